"""The `alpa` command: train a recipe, plan one for a described cluster, show a plan.

Subcommands import the planner themselves, so that the others start fast.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning import seed_everything
from rich.text import Text

from alpa_strategy.checkpoint.saving import export_checkpoint
from alpa_strategy.commands import compare as compare_command
from alpa_strategy.commands import diff as diff_command
from alpa_strategy.commands import plan as plan_command
from alpa_strategy.commands import show as show_command
from alpa_strategy.commands import whatif as whatif_command
from alpa_strategy.commands import why as why_command
from alpa_strategy.commands.recipe_task import PLAN_KEYS
from alpa_strategy.display.console import make_console
from alpa_strategy.display.op_table import op_data, op_rows, op_table
from alpa_strategy.errors import AlpaError, CheckpointError, OptionError, printable
from alpa_strategy.recipe import KEYS, build_data, build_model, build_trainer, load_recipe

EXIT_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    An AlpaError is a message on stderr and exit code 2. Any other exception is a defect and keeps
    its stack trace; a wrong argument is a SystemExit.

    Args:
        argv: arguments; None: those of the process.
    """
    arguments = _parse(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except AlpaError as error:
        console = make_console(stderr=True, soft_wrap=True)
        console.print(Text.assemble(("error: ", "bold red"), (error.problem, "red")))
        if error.fix:
            console.print(Text.assemble(("what to do: ", "bold"), error.fix))
        return EXIT_USER_ERROR
    except BrokenPipeError:
        # `alpa show plan.json | head`.
        sys.stderr.close()
        return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line; `argv` is `sys.argv[1:]` if it is None. Exits with a message
    if an argument is unknown.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse ends a list of positionals at the first option: `alpa plan R --cluster C key=value`
    # leaves `key=value` in `rest`.
    takes_overrides = hasattr(arguments, "overrides")
    unknown = rest
    if takes_overrides:
        unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)} (a recipe's are written"
            " trainer.devices=2)"
        )
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `alpa`. Each subcommand sets `run`, which takes the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="alpa",
        description='Automatic parallelism for PyTorch Lightning: Trainer(strategy="alpa").',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a recipe on the devices of this machine or of a torchrun job",
        description="Train a recipe on the devices of this machine or of a torchrun job.",
    )
    _add_recipe_arguments(train, "trainer.devices=2 model.lr=1e-3", KEYS)
    train.set_defaults(run=_train)

    plan = commands.add_parser(
        "plan",
        help="plan a recipe for a cluster; no devices and no weights are needed",
        description="Plan a recipe for a cluster; no devices and no weights are needed.",
    )
    example = "cluster.num_nodes=2 plan.parallel=tensor data.batch_size=8"
    _add_recipe_arguments(plan, example, (*PLAN_KEYS, *KEYS))
    plan_command.add_arguments(plan)
    plan.set_defaults(run=plan_command.run)

    show = commands.add_parser("show", help="show a stored plan")
    show.add_argument("plan", metavar="PLAN.json")
    show_command.add_arguments(show)
    show.set_defaults(run=show_command.run)

    why_help = "what other layouts of a parameter or op would cost, and what binds it"
    why = commands.add_parser("why", help=why_help, description=f"Print {why_help}.")
    why_command.add_arguments(why)
    why.set_defaults(run=why_command.run)

    _add_questions(commands)

    ops_help = "how ops may be sharded: rules in index notation, and how these were proved"
    ops = commands.add_parser("ops", help=ops_help)
    _add_ops_arguments(ops)
    ops.set_defaults(run=_ops)

    export_help = "turn a sharded checkpoint into an ordinary Lightning file"
    export = commands.add_parser("export", help=export_help)
    _add_export_arguments(export)
    export.set_defaults(run=_export)
    return parser


def _add_questions(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands that plan once more, or compare plans."""
    whatif_help = "plan with another cluster, batch or model, and print what changes and why"
    whatif = commands.add_parser("whatif", help=whatif_help)
    _add_recipe_arguments(whatif, "plan.parallel=tensor", (*PLAN_KEYS, *KEYS), takes_plan=True)
    whatif_command.add_arguments(whatif)
    whatif.set_defaults(run=whatif_command.run)

    diff = commands.add_parser("diff", help="print what differs between two stored plans")
    diff_command.add_arguments(diff)
    diff.set_defaults(run=diff_command.run)

    compare_help = "plan a recipe on several clusters or under several named plans: time, memory"
    compare = commands.add_parser("compare", help=f"{compare_help}, cost")
    _add_recipe_arguments(compare, "data.batch_size=8", (*PLAN_KEYS, *KEYS))
    compare_command.add_arguments(compare)
    compare.set_defaults(run=compare_command.run)


def _add_recipe_arguments(
    command: argparse.ArgumentParser, example: str, keys: Sequence[str], takes_plan: bool = False
) -> None:
    """Add the recipe and its overrides to a command.

    Args:
        command: parser of the command.
        example: overrides that its help shows.
        keys: first keys of the overrides that it accepts.
        takes_plan: whether a stored plan may be given in the place of a recipe.
    """
    recipe_help = "a YAML file, or the name of a recipe that is shipped"
    metavar = "RECIPE"
    if takes_plan:
        recipe_help = f"a plan that `alpa plan -o` stored, or {recipe_help}"
        metavar = "PLAN.json|RECIPE"
    command.add_argument("recipe", metavar=metavar, help=recipe_help)
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help=_overrides_help(example, keys)
    )


def _add_ops_arguments(ops: argparse.ArgumentParser) -> None:
    """Add the arguments of `alpa ops`."""
    ops.add_argument(
        "pattern",
        nargs="?",
        default="*",
        metavar="PATTERN",
        help="a glob pattern such as 'aten.conv*', or a part of the name",
    )
    ops.add_argument("--json", action="store_true", help="print all data of these ops as JSON")


def _add_export_arguments(export: argparse.ArgumentParser) -> None:
    """Add the arguments of `alpa export`."""
    export.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a directory that a Trainer with this strategy has written",
    )
    export.add_argument(
        "output",
        metavar="OUT.ckpt",
        nargs="?",
        help="its state_dict is what the plain module loads",
    )
    export.add_argument(
        "--hf",
        metavar="DIR",
        help="write the Hugging Face model in it as its save_pretrained does, instead of OUT.ckpt",
    )
    export.add_argument("--module", metavar="NAME", help="with --hf: of several models")
    export.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="with --hf: of a file of weights"
    )
    export.add_argument(
        "--trust",
        action="store_true",
        help="run the code that is pickled in it: only if you trust its writer",
    )


def _overrides_help(example: str, keys: Sequence[str]) -> str:
    """Return the help of `key=value` arguments."""
    sections = [f"{key}." for key in keys if key != "seed"]
    return f"for example {example}; a key is seed, or begins with {', '.join(sections)}"


def _train(arguments: argparse.Namespace) -> int:
    """Train the recipe of `alpa train`, print its last metrics on rank 0, and return the exit code:
    130 after Ctrl+C, else 0.
    """
    # Lightning 2.6 uses a deprecated class of PyTorch 2.13; users cannot do anything about it.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if recipe.seed is not None:
        seed_everything(recipe.seed, workers=True, verbose=False)

    trainer = build_trainer(recipe)
    model = build_model(recipe)
    data = build_data(recipe)
    trainer.fit(model, datamodule=data)

    if trainer.is_global_zero:
        texts = [f"trained {trainer.global_step} steps"]
        for name, value in trainer.progress_bar_metrics.items():
            if isinstance(value, int | float) and name != "v_num":
                texts.append(f"{printable(name)} {value:.4g}")
        print(", ".join(texts))

    # As a shell says it of Ctrl-C.
    return 130 if trainer.interrupted else 0


def _export(arguments: argparse.Namespace) -> int:
    """Export a checkpoint, print the path and (of a local file) the size of the result, return 0.

    Raises:
        OptionError: both kinds of target are given, or none.
        CheckpointError: the checkpoint is missing or damaged, or the target cannot be written.
    """
    if (arguments.output is None) == (arguments.hf is None):
        raise OptionError(
            "alpa export needs one place to write to", "alpa export CKPT OUT.ckpt, or CKPT --hf DIR"
        )
    try:
        if arguments.hf is not None:
            print(_export_to_folder(arguments))
            return 0
        written = export_checkpoint(
            arguments.checkpoint, arguments.output, weights_only=not arguments.trust
        )
    except FileNotFoundError as error:
        raise CheckpointError(str(error), "give the path of a checkpoint") from error
    size = f": {written.stat().st_size / 2**20:.1f} MiB" if isinstance(written, Path) else ""
    print(f"{written}{size}")
    return 0


def _export_to_folder(arguments: argparse.Namespace) -> Path | str:
    """Export a checkpoint into a folder of Hugging Face's format, and return its path."""
    # transformers is optional.
    from alpa_strategy.hf.export import export_pretrained

    return export_pretrained(
        arguments.checkpoint,
        arguments.hf,
        module=arguments.module,
        max_shard_size=arguments.max_shard_size,
        weights_only=not arguments.trust,
    )


def _ops(arguments: argparse.Namespace) -> int:
    """Print the rules of ops whose names match a pattern, and return 0; OptionError if there are
    none.
    """
    rows = op_rows(arguments.pattern)
    if arguments.json:
        print(json.dumps(op_data(rows), indent=1))
    else:
        make_console().print(op_table(rows))
    return 0
