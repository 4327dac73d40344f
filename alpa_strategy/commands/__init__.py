"""What the `alpa` command's subcommands do, one file each; `cli.py` reads the command line."""
