"""`alpa plan hf:...`: its flags, and the answer that it prints."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.text import Text

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.plan_words import rates_warning
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import OptionError
from alpa_strategy.fit.optimizers import OPTIMIZERS
from alpa_strategy.fit.request import MAX_CHANGES, PRECISIONS, PREFIX, FitRequest
from alpa_strategy.ir.plan import Plan
from alpa_strategy.loading import rare_collections
from alpa_strategy.options import PlanOptions

if TYPE_CHECKING:
    from alpa_strategy.planner.task import PlanTask

# Fields of FitRequest, by the names of their flags.
REQUEST_FLAGS = {
    "seq": "sequence_length",
    "batch": "batch_size",
    "lora": "lora_rank",
    "optimizer": "optimizer",
    "precision": "precision",
}


def add_fit_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the flags of `alpa plan hf:...`."""
    flags = add_request_arguments(plan)
    flags.add_argument(
        "--changes", type=int, default=MAX_CHANGES, metavar="N", help="nearest changes to plan (3)"
    )
    flags.add_argument("--sweep", metavar="devices=8,16", help="plan several numbers of devices")
    flags.add_argument("--picture", metavar="OUT.svg", help="with --sweep: write a picture")


def add_request_arguments(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags that say what is asked of a model by name, and return their group."""
    flags = command.add_argument_group(
        "hf:PATH as RECIPE",
        "a model of Hugging Face by its config.json: no weights, no recipe",
    )
    flags.add_argument("--seq", type=int, default=4096, metavar="T", help="tokens (4096)")
    flags.add_argument(
        "--batch", type=int, metavar="B", help="sequences of a step of all devices (8 a device)"
    )
    flags.add_argument("--lora", type=int, metavar="R", help="train adapters of this rank alone")
    flags.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help=f"one of {', '.join(OPTIMIZERS)}"
    )
    flags.add_argument(
        "--precision", default="bf16-mixed", metavar="P", help=f"one of {', '.join(PRECISIONS)}"
    )
    return flags


def is_by_name(recipe: str) -> bool:
    """Whether `alpa plan` was given a model of Hugging Face in place of a recipe."""
    return recipe.startswith(PREFIX)


def check_is_recipe(recipe: str) -> None:
    """Refuse a model of Hugging Face where only recipes are known.

    Raises:
        OptionError: `recipe` is such a model.
    """
    if is_by_name(recipe):
        raise OptionError(
            f"{recipe} is no recipe, and only `alpa plan` and `alpa whatif` know models by name",
            f"ask with the flags that it was planned with: alpa whatif {recipe} --cluster CLUSTER"
            " --seq 8192 --batch 16 --set seq=2x",
        )


def plan_by_name(
    arguments: argparse.Namespace, cluster: ClusterSpec, overrides: Sequence[str]
) -> tuple[Plan, "PlanTask"]:
    """Plan a model of Hugging Face, print the answer, and return the plan with its task.

    Args:
        arguments: of `alpa plan`.
        overrides: `strategy.key=value`, options of the plan.

    Raises:
        AlpaError: the request is wrong, the step cannot be captured, or nothing fits.
    """
    from alpa_strategy.fit.answer import answer_fit, answer_sweep
    from alpa_strategy.fit.changes import FitCase
    from alpa_strategy.fit.task import captured

    request = fit_request(arguments, cluster)
    options = read_options(overrides)
    progress = Progress()
    console = make_console()
    if options.costs is None:
        warn_of_rates(console, request.precision, cluster)
    with rare_collections():
        case = FitCase(captured(request, cluster.num_devices, progress), cluster, options)
        if arguments.sweep:
            return answer_sweep(case, arguments.sweep, arguments.picture, progress, console)
        return answer_fit(case, arguments.changes, progress, console)


def warn_of_rates(console: Console, precision: str, cluster: ClusterSpec) -> None:
    """Print a warning if a cluster has no FLOP/s for a precision: planning may take minutes.

    Args:
        console: to print it on.
        precision: the Trainer's name of it.
        cluster: to plan for.
    """
    from alpa_strategy.planner.figures import assumed_of_precision

    if cluster.measured:
        # Measured times need no FLOP/s.
        return
    warning = rates_warning(*assumed_of_precision(precision, cluster.device))
    if warning:
        console.print(Text.assemble(("warning", "yellow"), "  ", plain(warning)))


def fit_request(arguments: argparse.Namespace, cluster: ClusterSpec) -> FitRequest:
    """Return what the flags ask for."""
    batch = arguments.batch
    return FitRequest(
        source=arguments.recipe.removeprefix(PREFIX),
        sequence_length=arguments.seq,
        batch_size=8 * cluster.num_devices if batch is None else batch,
        lora_rank=arguments.lora,
        optimizer=arguments.optimizer,
        precision=arguments.precision,
    )


def changed_request(request: FitRequest, flag: str, value: str) -> FitRequest:
    """Return the request with another value of one of `REQUEST_FLAGS`.

    Raises:
        OptionError: a number is expected, and `value` is none.
    """
    changed: dict[str, Any] = {}
    if flag in ("optimizer", "precision"):
        changed[REQUEST_FLAGS[flag]] = value
    elif value.isdigit():
        changed[REQUEST_FLAGS[flag]] = int(value)
    else:
        raise OptionError(f"{flag}={value} is no whole number", f"write {flag}=16, or {flag}=2x")
    return replace(request, **changed)


def read_options(overrides: Sequence[str]) -> PlanOptions:
    """Return the planning options of overrides `strategy.key=value`.

    Raises:
        OptionError: a key is no planning option, or a value is wrong.
    """
    values: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not key.startswith("strategy.") or not equals:
            raise OptionError(
                f"override {text!r} is for recipes",
                f"with {PREFIX} give cluster.* and plan.* overrides, and the flags of"
                " `alpa plan --help`",
            )
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        assert isinstance(parsed, dict)
        values[key.removeprefix("strategy.")] = parsed["value"]
    return PlanOptions.from_user(**values)
