"""`alpa plan`: plan a recipe for a described cluster."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.commands.recipe_task import (
    captured_recipe,
    check_plannable,
    plan_options,
    precision_name,
    split_overrides,
)
from alpa_strategy.commands.writing import writing
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.full_plan import plan_table
from alpa_strategy.display.progress import Progress, peak_rss_bytes
from alpa_strategy.display.summary import plan_summary
from alpa_strategy.display.table import plan_timing, tune_table
from alpa_strategy.errors import AlpaError, OptionError, check_names
from alpa_strategy.files import RECIPES, shipped_folder
from alpa_strategy.fit.command import (
    add_fit_arguments,
    check_no_flags,
    fit_request,
    given_flags,
    is_by_name,
    plan_by_name,
    request_flags,
    warn_of_rates,
)
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import Origin
from alpa_strategy.loading import rare_collections
from alpa_strategy.partial_results import PartialResults
from alpa_strategy.recipe import load_recipe, resolve_target

if TYPE_CHECKING:
    from alpa_strategy.fit.request import FitRequest
    from alpa_strategy.planner.task import PlanTask

# Functions of recipes/searches.py.
SEARCHES = (
    "mcmc",
    "greedy",
    "exhaustive",
    "megatron",
    "flexflow-like",
)

# Of batch sizes that are tuned: the number that a recipe pins is for its own.
FREE_MICROBATCHES = "strategy.num_microbatches=null"


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the options of `alpa plan` to its parser."""
    plan.add_argument(
        "--cluster",
        required=True,
        metavar="CLUSTER",
        help="a YAML file, or a name in configs/clusters",
    )
    _add_search_arguments(plan)
    plan.add_argument("-o", "--output", metavar="PLAN.json", help="file to store the plan in")
    plan.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print layouts, collectives and all notes, as `alpa show` does",
    )
    add_fit_arguments(plan)


def _add_search_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of `alpa plan` that change how plans are searched."""
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


def run(arguments: argparse.Namespace) -> int:
    """Plan the recipe, or a model by its name, print the plan, store it with its page if a file is
    given, and return 0. An output that is a directory, or has an impossible name, is an OptionError
    before the planning.

    Raises:
        AlpaError: an argument is wrong, the step cannot be captured, or nothing fits.
    """
    from alpa_strategy.page.stored import store_plan

    with writing(arguments.output or "plan.json"):
        # An impossible path is an error before the planning.
        pass

    to_cluster, overrides = split_overrides(arguments.overrides)
    cluster = ClusterSpec.load(arguments.cluster, to_cluster)
    console = make_console()
    request: FitRequest | None = None
    # Of the plan that is stored.
    flags: tuple[str, ...] = ()
    texts = list(arguments.overrides)
    if is_by_name(arguments.recipe):
        _check_for_models_by_name(arguments)
        asked = given_flags(arguments)
        request = fit_request(arguments.recipe, asked, cluster.num_devices)
        flags = request_flags(request)
    else:
        check_no_flags(arguments.recipe, arguments)

    progress = Progress()
    # Results of a planning that was killed are used again. They are deleted when the plan is
    # stored.
    with PartialResults(_folder_of_results(arguments), progress.tell) as results:
        if request is not None:
            plan, task = plan_by_name(request, arguments, cluster, overrides, progress)
        else:
            plan, task, batch_size = _plan_recipe(
                arguments, cluster, overrides, console, progress, results
            )
            if batch_size is not None:
                texts = [FREE_MICROBATCHES, *texts, f"data.batch_size={batch_size}"]

        stored = ""
        if arguments.output:
            with writing(arguments.output):
                texts += _sizes_of_sweep(task.cluster, cluster)
                origin = Origin(arguments.recipe, arguments.cluster, tuple(texts), flags)
                page = store_plan(arguments.output, plan, task, origin)
            stored = f"plan stored in {arguments.output}, its page in {page}"

    # When it is stored: a reader that closes the pipe loses nothing.
    if request is None:
        _print_plan(plan, arguments, console)
    if stored:
        console.print(plain(stored))
    return 0


def _print_plan(plan: Plan, arguments: argparse.Namespace, console: Console) -> None:
    """Print the plan of a recipe, and the seconds of its planning."""
    location = arguments.output or "PLAN.json"
    shown = plan_table(plan) if arguments.verbose else plan_summary(plan, location=location)
    console.print(shown)
    console.print(plan_timing(plan, peak_rss_bytes()))


def _folder_of_results(arguments: argparse.Namespace) -> Path | None:
    """Return the folder of the results of a planning; None: none are stored.

    Searches for comparison start without any: their time is measured. Plans of models by name take
    seconds.
    """
    if arguments.search or is_by_name(arguments.recipe):
        return None
    return Path(".alpa") / "planning"


def _sizes_of_sweep(planned: ClusterSpec, cluster: ClusterSpec) -> list[str]:
    """Return overrides that make `cluster` as large as the one that a plan is for."""
    overrides = []
    for name in ("num_nodes", "devices_per_node"):
        size = getattr(planned, name)
        if size != getattr(cluster, name):
            overrides.append(f"cluster.{name}={size}")
    return overrides


def _check_for_models_by_name(arguments: argparse.Namespace) -> None:
    """Refuse flags of recipes for a model by name.

    Raises:
        OptionError: there are some.
    """
    for flag in ("search", "tune", "around"):
        if getattr(arguments, flag) is not None:
            raise OptionError(
                f"--{flag} is for recipes, and {arguments.recipe} is a model by name",
                "leave it out, or plan a recipe of the model",
            )


def _plan_recipe(
    arguments: argparse.Namespace,
    cluster: ClusterSpec,
    overrides: Sequence[str],
    console: Console,
    progress: Progress,
    results: PartialResults,
) -> tuple[Plan, "PlanTask", int | None]:
    """Plan a recipe; return the plan with its task, and with the batch size that `--tune` has
    chosen.
    """
    recipe = load_recipe(arguments.recipe, overrides)
    check_plannable(recipe)
    if plan_options(recipe).costs is None:
        warn_of_rates(console, precision_name(recipe), cluster)

    planned = partial(_planned, arguments, cluster, progress=progress, results=results)
    batch_size: int | None = None
    if arguments.tune:
        plan, task, batch_size = _tuned(arguments, cluster, overrides, console, planned)
    else:
        plan, task = planned(overrides)
    results.report()
    return plan, task, batch_size


def _planned(
    arguments: argparse.Namespace,
    cluster: ClusterSpec,
    overrides: Sequence[str],
    progress: Progress,
    results: PartialResults,
) -> tuple[Plan, "PlanTask"]:
    """Return the plan of the recipe with `overrides` on `cluster`, and its task.

    Args:
        arguments: of `alpa plan`: recipe, search, plan to stay close to.
        results: stores partial results.

    Raises:
        AlpaError: the recipe, search or plan cannot be used, or nothing fits.
    """
    from alpa_strategy.planner.planner import plan_captured

    recipe = load_recipe(arguments.recipe, overrides)
    captured = captured_recipe(recipe, cluster, progress, results)
    choose = None
    if arguments.search:
        choose = partial(_search(arguments.search), seconds=arguments.search_seconds)

    around = Plan.load(arguments.around) if arguments.around else None
    with rare_collections():
        return plan_captured(captured, choose, around), captured.task


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
    planned: Callable[[Sequence[str]], tuple[Plan, "PlanTask"]],
) -> tuple[Plan, "PlanTask", int]:
    """Plan with several batch sizes around the recipe's, print a table, and return the plan of
    `best_batch` with its task and its batch size.

    A number of micro-batches in the recipe does not count; one in `overrides` holds for all sizes.

    Args:
        planned: overrides -> (plan, task).

    Raises:
        OptionError: the recipe's batch size is no whole number above 0.
        PlanError: of the smallest batch size that was tried, if none has a plan.
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
    free = [FREE_MICROBATCHES, *overrides]
    tasks: dict[int, PlanTask] = {}

    def plan_with(size: int) -> Plan:
        plan, tasks[size] = planned([*free, f"data.batch_size={size}"])
        return plan

    plans = tune_batch(plan_with, batch_size)

    num_loaders = 1 if plan_options(recipe).rows == "global" else cluster.num_devices
    best = best_batch(plans)
    console.print(tune_table(plans, best, num_loaders))
    chosen = min(plans) if best is None else best
    plan = plans[chosen]
    if isinstance(plan, AlpaError):
        raise plan
    return plan, tasks[chosen], chosen
