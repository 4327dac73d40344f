"""The `alpa` command: train a recipe, plan one for a described cluster, show a plan.

Subcommands import the planner themselves, so that the others start fast.
"""

import argparse
import gc
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from errno import EINVAL
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import seed_everything
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from rich.console import Console
from rich.text import Text

from alpa_strategy.checkpoint.saving import export_checkpoint
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.op_table import op_data, op_rows, op_table
from alpa_strategy.display.progress import Progress, peak_rss_bytes
from alpa_strategy.display.table import plan_html, plan_svg, plan_table, plan_timing, tune_table
from alpa_strategy.errors import AlpaError, CheckpointError, OptionError, check_names, printable
from alpa_strategy.files import RECIPES, is_possible, shipped_folder
from alpa_strategy.fit.command import add_fit_arguments, is_by_name, plan_by_name
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.job import compiled_by_user
from alpa_strategy.lightning.master_weights import with_masters
from alpa_strategy.options import Limits, PlanOptions
from alpa_strategy.partial_results import PartialResults
from alpa_strategy.planner.eager_plan import eager_option
from alpa_strategy.recipe import (
    KEYS,
    Recipe,
    build_data,
    build_model,
    build_trainer,
    load_recipe,
    resolve_target,
)

EXIT_USER_ERROR = 2
# First keys of overrides that only `alpa plan` accepts: fields of the cluster, and `plan` as
# another name of the recipe's section `strategy`.
PLAN_KEYS = ("cluster", "plan")
# Functions of recipes/searches.py.
SEARCHES = (
    "mcmc",
    "greedy",
    "exhaustive",
    "megatron",
    "flexflow-like",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    An AlpaError is a message on stderr and exit code 2. Any other exception is a defect and keeps
    its stack trace.

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
    _add_plan_arguments(plan)
    add_fit_arguments(plan)
    plan.set_defaults(run=_plan)

    show = commands.add_parser("show", help="show a stored plan")
    show.add_argument("plan", metavar="PLAN.json")
    show.add_argument("--html", metavar="OUT.html", help="write a self-contained page")
    show.add_argument("--svg", metavar="OUT.svg", help="write a picture")
    show.set_defaults(run=_show)

    ops_help = "how ops may be sharded: rules in index notation, and how these were proved"
    ops = commands.add_parser("ops", help=ops_help)
    _add_ops_arguments(ops)
    ops.set_defaults(run=_ops)

    export_help = "turn a sharded checkpoint into an ordinary Lightning file"
    export = commands.add_parser("export", help=export_help)
    _add_export_arguments(export)
    export.set_defaults(run=_export)
    return parser


def _add_recipe_arguments(
    command: argparse.ArgumentParser, example: str, keys: Sequence[str]
) -> None:
    """Add the recipe and its overrides to a command.

    Args:
        command: parser of the command.
        example: overrides that its help shows.
        keys: first keys of the overrides that it accepts.
    """
    command.add_argument(
        "recipe", metavar="RECIPE", help="a YAML file, or the name of a recipe that is shipped"
    )
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help=_overrides_help(example, keys)
    )


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--cluster",
        required=True,
        metavar="CLUSTER",
        help="a YAML file, or a name in configs/clusters",
    )
    plan.add_argument(
        "--search",
        metavar="NAME",
        help=f"for comparison, on the same costs: {', '.join(SEARCHES)}, or FILE.FUNCTION, "
        "a function (task, seconds) -> Plan of your own",
    )
    plan.add_argument(
        "--search-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="for each number of micro-batches (10)",
    )
    plan.add_argument(
        "--tune",
        choices=("batch_size",),
        help="double and halve data.batch_size for the most samples a second; micro-batches are"
        " solved for each size",
    )
    plan.add_argument(
        "--around",
        metavar="PLAN.json",
        help="a plan for other batches; parameters keep its devices and layouts",
    )
    plan.add_argument("-o", "--output", metavar="PLAN.json", help="file to store the plan in")


def _add_ops_arguments(ops: argparse.ArgumentParser) -> None:
    ops.add_argument(
        "pattern",
        nargs="?",
        default="*",
        metavar="PATTERN",
        help="a glob pattern such as 'aten.conv*', or a part of the name",
    )
    ops.add_argument("--json", action="store_true", help="print all data of these ops as JSON")


def _add_export_arguments(export: argparse.ArgumentParser) -> None:
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
    sections = [f"{key}." for key in keys if key != "seed"]
    return f"for example {example}; a key is seed, or begins with {', '.join(sections)}"


def _train(arguments: argparse.Namespace) -> int:
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
    print(f"{written}: {written.stat().st_size / 2**20:.1f} MiB")
    return 0


def _export_to_folder(arguments: argparse.Namespace) -> Path | str:
    # transformers is optional.
    from alpa_strategy.hf.export import export_pretrained

    return export_pretrained(
        arguments.checkpoint,
        arguments.hf,
        module=arguments.module,
        max_shard_size=arguments.max_shard_size,
        weights_only=not arguments.trust,
    )


def _plan(arguments: argparse.Namespace) -> int:
    with _writing(arguments.output or "plan.json"):
        # An impossible path is an error before the planning.
        pass

    to_cluster, overrides = _split_overrides(arguments.overrides)
    cluster = ClusterSpec.load(arguments.cluster, to_cluster)
    if is_by_name(arguments.recipe):
        return _stored(arguments, plan_by_name(arguments, cluster, overrides))
    console = make_console()

    recipe = load_recipe(arguments.recipe, overrides)
    options = plan_options(recipe)
    limits = _limits(recipe)
    option = eager_option(options, limits)
    if option is None and limits.replicas:
        option = f"replicas={limits.replicas}"
    if option is not None:
        raise OptionError(
            f"{option}: there is no plan of all devices",
            "leave it out; to plan one of several replicas, give a cluster of its devices and"
            " batch_scope=global",
        )

    progress = Progress()
    # Results of a planning that was killed are used again. Searches for comparison start without
    # them: their time is measured.
    folder = None if arguments.search else Path(".alpa") / "planning"
    with PartialResults(folder, progress.tell) as results:
        planned = partial(_planned, arguments, cluster, progress=progress, results=results)
        if arguments.tune:
            plan = _tuned(arguments, cluster, overrides, console, planned)
        else:
            plan = planned(overrides)

    usable_bytes = options.usable_bytes(cluster.device.memory_bytes)
    console.print(plan_table(plan, memory_limit=usable_bytes))
    console.print(plan_timing(plan, peak_rss_bytes()))
    return _stored(arguments, plan)


def _stored(arguments: argparse.Namespace, plan: Plan) -> int:
    """Store the plan if a file is given; return the exit code."""
    if arguments.output:
        with _writing(arguments.output):
            plan.save(arguments.output)
        make_console().print(plain(f"plan stored in {arguments.output}"))
    return 0


def _planned(
    arguments: argparse.Namespace,
    cluster: ClusterSpec,
    overrides: Sequence[str],
    progress: Progress,
    results: PartialResults,
) -> Plan:
    """Return the plan of the recipe with `overrides` on `cluster`."""
    from alpa_strategy.planner.optimizer_info import optimizer_info_of
    from alpa_strategy.planner.planner import make_plan

    recipe = load_recipe(arguments.recipe, overrides)
    options = plan_options(recipe)
    # Planning needs shapes alone: a model of 39 B parameters takes no memory here.
    with progress("build the model on the meta device"), torch.device("meta"):
        model = build_model(recipe)
    if recipe.strategy.get("compile") is None:
        options = replace(options, compile=compiled_by_user(model) is not None)

    batch = _example_batch(build_data(recipe), recipe)
    precision = precision_plugin(recipe)
    precision.convert_module(model)
    optimizer = optimizer_info_of(model)

    choose = None
    if arguments.search:
        choose = partial(_search(arguments.search), seconds=arguments.search_seconds)

    with _rare_collections():
        around = Plan.load(arguments.around) if arguments.around else None
        context = precision.train_step_context
        return make_plan(
            model,
            batch,
            cluster,
            options,
            optimizer,
            progress,
            context,
            None,
            choose,
            around,
            results,
        )


def _search(name: str) -> Callable[..., Plan]:
    """Return the search function `name`: a shipped one, or `FILE.FUNCTION` of the user's.

    Raises:
        OptionError: there is no such function.
    """
    if "." in name:
        return resolve_target(name, Path.cwd(), "--search")

    check_names([name], SEARCHES, "--search: there is no")
    target = f"searches.plan_{name.replace('-', '_')}"
    return resolve_target(target, shipped_folder(RECIPES), "--search")


def _tuned(
    arguments: argparse.Namespace,
    cluster: ClusterSpec,
    overrides: Sequence[str],
    console: Console,
    planned: Callable[[Sequence[str]], Plan],
) -> Plan:
    """Plan with several batch sizes around the recipe's, print a table, and return the best plan.

    Raises:
        AlpaError: the recipe has no batch size, or no batch size has a plan.
    """
    from alpa_strategy.planner.batch_size import best_batch, tune_batch

    recipe = load_recipe(arguments.recipe, overrides)
    batch_size = recipe.data.get("batch_size")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(
            f"{recipe.path}: data.batch_size={batch_size!r} cannot be tuned",
            "give a whole number, such as 8",
        )

    # The recipe pins a number of micro-batches for its own batch size. A number on the command line
    # comes later and holds for all sizes.
    free = ["strategy.num_microbatches=null", *overrides]
    plans = tune_batch(lambda size: planned([*free, f"data.batch_size={size}"]), batch_size)

    num_loaders = 1 if plan_options(recipe).rows == "global" else cluster.num_devices
    best = best_batch(plans)
    console.print(tune_table(plans, best, num_loaders))
    plan = plans[min(plans) if best is None else best]
    if isinstance(plan, AlpaError):
        raise plan
    return plan


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Context in which garbage is collected rarely, which saves a sixth of the planning time."""
    thresholds = gc.get_threshold()
    # Imported objects are many, and never garbage.
    gc.freeze()
    gc.set_threshold(100_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _show(arguments: argparse.Namespace) -> int:
    plan = Plan.load(arguments.plan)
    make_console().print(plan_table(plan))
    for path, render in ((arguments.html, plan_html), (arguments.svg, plan_svg)):
        if path:
            with _writing(path) as target:
                target.write_text(render(plan), encoding="utf-8")
    return 0


def _ops(arguments: argparse.Namespace) -> int:
    rows = op_rows(arguments.pattern)
    if arguments.json:
        print(json.dumps(op_data(rows), indent=1))
    else:
        make_console().print(op_table(rows))
    return 0


@contextmanager
def _writing(path: str) -> Iterator[Path]:
    """Context that writes a file at the user's `path`.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        if not is_possible(Path(path)) or Path(path).is_dir():
            raise OSError(EINVAL, "it is a directory, or has a name that no file can have")
        yield Path(path)
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written: {error.strerror}", "give another path"
        ) from None


def plan_options(recipe: Recipe) -> PlanOptions:
    """Return the recipe's strategy options that plans depend on.

    Raises:
        OptionError: an option has a value that it cannot have.
    """
    names = {option.name for option in fields(PlanOptions)}
    values = {key: value for key, value in recipe.strategy.items() if key in names}
    if "accumulate_grad_batches" in recipe.trainer:
        values["accumulate_grad_batches"] = recipe.trainer["accumulate_grad_batches"]
    return PlanOptions.from_user(**values)


def _limits(recipe: Recipe) -> Limits:
    """Return the recipe's strategy options that only the runtime uses."""
    names = {option.name for option in fields(Limits)}
    values = {key: value for key, value in recipe.strategy.items() if key in names}
    return Limits.from_user(**values)


def _split_overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the overrides of `alpa plan` into those of the cluster and those of the recipe.

    Returns:
        The cluster's fields and values, and the recipe's overrides, with `plan.` as `strategy.`.

    Raises:
        OptionError: an override has an unknown key, or is not of the form key=value.
    """
    to_cluster: dict[str, Any] = {}
    to_recipe: list[str] = []
    for text in overrides:
        section = re.split(r"[.=]", text, maxsplit=1)[0]
        check_names([section], (*PLAN_KEYS, *KEYS), f"override {text!r}: unknown key")
        if section in PLAN_KEYS and not text.startswith(f"{section}."):
            raise OptionError(
                f"override {text!r} names no field of {section!r}",
                "write cluster.num_nodes=2, or plan.parallel=tensor",
            )
        if section == "cluster":
            key, equals, value = text.removeprefix("cluster.").partition("=")
            if not equals:
                raise OptionError(
                    f"override {text!r} is not of the form key=value", "write cluster.num_nodes=2"
                )
            to_cluster[key] = value
        else:
            to_recipe.append(re.sub(r"^plan\.", "strategy.", text))
    return to_cluster, to_recipe


def _example_batch(data: Any, recipe: Recipe) -> Any:
    """Return a batch of the right shapes: of `data.example_batch()`, or of the first samples.

    Raises:
        OptionError: the data module has neither `example_batch()` nor a map-style dataset.
    """
    if hasattr(data, "example_batch"):
        return data.example_batch()
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    try:
        # Not by iterating the loader, which would start its workers.
        samples = [loader.dataset[i] for i in range(loader.batch_size)]
    except (AttributeError, TypeError, NotImplementedError):
        raise OptionError(
            f"{recipe.path}: data: {type(data).__name__} has neither example_batch() nor a"
            " map-style training dataset",
            "add a method example_batch() that returns a batch of the right shapes",
        ) from None
    return loader.collate_fn(samples)


def precision_plugin(recipe: Recipe) -> Precision:
    """Return the Trainer's plugin for the recipe's precision.

    Its autocast is that of the CPU, on which steps are captured for any cluster.

    Raises:
        OptionError: the precision cannot be planned.
    """
    precision = str(recipe.trainer.get("precision") or "32-true")
    full_names = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
    precision = full_names.get(precision, precision)
    plugins: dict[str, Callable[[], Precision]] = {
        "32-true": Precision,
        "64-true": DoublePrecision,
        "16-mixed": lambda: MixedPrecision("16-mixed", "cpu"),
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "16-true": lambda: HalfPrecision("16-true"),
        "bf16-true": lambda: HalfPrecision("bf16-true"),
    }
    check_names([precision], plugins, f"{recipe.path}: trainer.precision cannot be planned:")
    plugin = plugins[precision]()
    return with_masters(plugin) if recipe.strategy.get("master_weights") else plugin
