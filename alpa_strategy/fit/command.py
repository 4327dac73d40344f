"""`alpa plan hf:...`: its flags, and the answer that it prints."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.text import Text

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.plan_words import rates_warning
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import OptionError, check_names
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
_SEQUENCE_LENGTH = 4096
_SEQUENCES_OF_A_DEVICE = 8

# What to write for a recipe in place of a flag.
_IN_A_RECIPE = {
    "seq": "data.sequence_length={}",
    "batch": "data.batch_size={} (of one rank, unless the recipe's batch_scope is global)",
    "lora": "model.lora.r={} (of recipes with adapters, as hf_finetune)",
    "optimizer": "the optimizer in the recipe's model, which is the one that is planned",
    "precision": "trainer.precision={}",
    "changes": "nothing: the change that helps most is a row of every plan",
    "sweep": "alpa whatif RECIPE --cluster CLUSTER --set devices=16",
    "picture": "--html of `alpa show`",
}


def add_fit_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the flags of models by name to the parser of `alpa plan`."""
    flags = add_request_arguments(plan)
    flags.add_argument(
        "--changes", type=int, metavar="N", help=f"nearest changes to plan ({MAX_CHANGES})"
    )
    flags.add_argument("--sweep", metavar="devices=8,16", help="a table of numbers of devices")
    flags.add_argument("--picture", metavar="OUT.svg", help="draw --sweep")


def add_request_arguments(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags of a request (sequence length, batch, optimizer, ...) to a command, and return
    their group.
    """
    flags = command.add_argument_group(
        "hf:PATH as RECIPE",
        "a model of Hugging Face by its config.json: no weights, no recipe",
    )
    flags.add_argument("--seq", type=int, metavar="T", help=f"tokens ({_SEQUENCE_LENGTH})")
    flags.add_argument(
        "--batch",
        type=int,
        metavar="B",
        help=f"sequences of a step of all devices ({_SEQUENCES_OF_A_DEVICE} a device)",
    )
    flags.add_argument("--lora", type=int, metavar="R", help="train adapters of this rank alone")
    flags.add_argument(
        "--optimizer", metavar="NAME", help=f"one of {', '.join(OPTIMIZERS)} (adamw)"
    )
    flags.add_argument(
        "--precision", metavar="P", help=f"one of {', '.join(PRECISIONS)} (bf16-mixed)"
    )
    return flags


def given_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags of `REQUEST_FLAGS` on a command line, as `seq=8192`."""
    values = {flag: getattr(arguments, flag) for flag in REQUEST_FLAGS}
    return tuple(f"{flag}={value}" for flag, value in values.items() if value is not None)


def check_no_flags(recipe: str, arguments: argparse.Namespace) -> None:
    """Refuse flags of models by name for a recipe.

    Raises:
        OptionError: there are some. It says which override of the recipe does the same.
    """
    instead: dict[str, str] = {}
    for flag, text in _IN_A_RECIPE.items():
        value = getattr(arguments, flag, None)
        if value is not None:
            instead[f"--{flag}"] = text.format(value)
    if instead:
        verb = "is a flag" if len(instead) == 1 else "are flags"
        raise OptionError(
            f"{', '.join(instead)} {verb} of models by name ({PREFIX}PATH); {recipe} is a recipe",
            "; ".join(f"in place of {flag}: {text}" for flag, text in instead.items()),
        )


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
            f"{recipe} is no recipe, and `alpa compare` knows no models by name",
            f"plan it for each cluster: alpa plan {recipe} --cluster CLUSTER, or ask"
            f" alpa whatif {recipe} --cluster CLUSTER --set devices=16",
        )


def plan_by_name(
    request: FitRequest,
    arguments: argparse.Namespace,
    cluster: ClusterSpec,
    overrides: Sequence[str],
    progress: Progress,
) -> tuple[Plan, "PlanTask"]:
    """Plan a model of Hugging Face, print the answer, and return the plan with its task.

    Args:
        request: what is asked (`fit_request`).
        arguments: of `alpa plan`.
        cluster: to plan for.
        overrides: `strategy.key=value`, options of the plan.
        progress: of capture and planning.

    Raises:
        AlpaError: the request is wrong, the step cannot be captured, or nothing fits.
    """
    from alpa_strategy.fit.answer import answer_fit, answer_sweep
    from alpa_strategy.fit.changes import FitCase
    from alpa_strategy.fit.task import captured

    options = read_options(overrides)
    console = make_console()
    if options.costs is None:
        warn_of_rates(console, request.precision, cluster)
    with rare_collections():
        case = FitCase(captured(request, cluster.num_devices, progress), cluster, options)
        if arguments.sweep:
            return answer_sweep(case, arguments.sweep, arguments.picture, progress, console)
        num_changes = MAX_CHANGES if arguments.changes is None else arguments.changes
        return answer_fit(case, num_changes, progress, console)


def warn_of_rates(console: Console, precision: str, cluster: ClusterSpec) -> None:
    """Print a warning if a cluster has no FLOP/s for a precision: planning may take minutes. None
    for measured clusters.

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


def fit_request(recipe: str, flags: Iterable[str], num_devices: int) -> FitRequest:
    """Return the request that flags of `alpa plan hf:...` describe.

    Args:
        recipe: `hf:PATH`.
        flags: as `seq=8192`; of equal ones the last counts.
        num_devices: of the cluster, for the number of sequences if no flag has it.

    Raises:
        OptionError: a flag is unknown, or a number is none. Other values are not checked.
    """
    source = recipe.removeprefix(PREFIX)
    batch_size = _SEQUENCES_OF_A_DEVICE * num_devices
    request = FitRequest(source, sequence_length=_SEQUENCE_LENGTH, batch_size=batch_size)
    for text in flags:
        flag, _, value = text.partition("=")
        check_names([flag], REQUEST_FLAGS, f"{recipe}: there is no flag")
        request = changed_request(request, flag, value)
    return request


def request_flags(request: FitRequest) -> tuple[str, ...]:
    """Return all flags of a request, as `seq=8192`: the inverse of `fit_request`."""
    values = {flag: getattr(request, name) for flag, name in REQUEST_FLAGS.items()}
    return tuple(f"{flag}={value}" for flag, value in values.items() if value is not None)


def changed_request(request: FitRequest, flag: str, value: str) -> FitRequest:
    """Return the request with another value of one of `REQUEST_FLAGS`.

    Raises:
        OptionError: a number is expected, and `value` is none.
    """
    changed: dict[str, Any] = {}
    if flag in ("optimizer", "precision"):
        changed[REQUEST_FLAGS[flag]] = value
    elif value.removeprefix("-").isdigit():
        changed[REQUEST_FLAGS[flag]] = int(value)
    else:
        raise OptionError(f"{flag}={value} is no whole number", f"write {flag}=16, or {flag}=2x")
    return replace(request, **changed)


def read_options(overrides: Sequence[str]) -> PlanOptions:
    """Return the planning options of overrides `strategy.key=value`.

    Raises:
        OptionError: an override has another form, a key is no planning option, or a value is wrong.
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
