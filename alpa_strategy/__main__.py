"""`python -m alpa_strategy` is the `alpa` command."""

import sys

from alpa_strategy.cli import main

if __name__ == "__main__":
    sys.exit(main())
