"""`alpa plan hf:...`: its flags, and the answer that it prints."""

import argparse
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from rich.console import RenderableType

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.console import make_console
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.fit.changes import MAX_CHANGES, FitCase, nearest_changes, plan_case
from alpa_strategy.fit.flags import flags_table
from alpa_strategy.fit.optimizers import OPTIMIZERS
from alpa_strategy.fit.report import (
    changes_table,
    does_not_fit,
    headline,
    memory_table,
    report,
    verdict,
)
from alpa_strategy.fit.request import PRECISIONS, PREFIX, FitRequest
from alpa_strategy.fit.summary import model_flops
from alpa_strategy.fit.sweep import best_point, read_sweep, sweep, sweep_table, write_picture
from alpa_strategy.fit.task import captured
from alpa_strategy.ir.plan import Plan
from alpa_strategy.options import PlanOptions


def add_fit_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the flags of `alpa plan hf:...`."""
    flags = plan.add_argument_group(
        "hf:PATH as RECIPE",
        "plan a model of Hugging Face by its config.json: no weights, no recipe",
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
    flags.add_argument(
        "--changes", type=int, default=MAX_CHANGES, metavar="N", help="nearest changes to plan (3)"
    )
    flags.add_argument("--sweep", metavar="devices=8,16", help="plan several numbers of devices")
    flags.add_argument("--picture", metavar="OUT.svg", help="with --sweep: write a picture")


def is_by_name(recipe: str) -> bool:
    """Whether `alpa plan` was given a model of Hugging Face in place of a recipe."""
    return recipe.startswith(PREFIX)


def plan_by_name(
    arguments: argparse.Namespace, cluster: ClusterSpec, overrides: Sequence[str]
) -> Plan:
    """Plan a model of Hugging Face, and print the answer.

    Args:
        arguments: of `alpa plan`.
        overrides: `strategy.key=value`, options of the plan.

    Raises:
        AlpaError: the request is wrong, the step cannot be captured, or nothing fits.
    """
    request = fit_request(arguments, cluster)
    options = read_options(overrides)
    progress = Progress()
    console = make_console()
    case = FitCase(captured(request, cluster.num_devices, progress), cluster, options)
    task = case.task
    top = headline(task.request, cluster, task.num_parameters, task.num_trained)
    if arguments.sweep:
        sizes = read_sweep(arguments.sweep, cluster)
        points = sweep(case, sizes, progress)
        console.print(report([top, sweep_table(points)]))
        if arguments.picture:
            write_picture(arguments.picture, points)
        return best_point(points)

    plan: Plan | None = None
    reason: PlanError | None = None
    try:
        plan = plan_case(case, progress)
    except PlanError as error:
        reason = error
    changes = nearest_changes(case, plan, progress, arguments.changes)
    if plan is None:
        assert reason is not None
        console.print(report([top, does_not_fit(reason), changes_table(changes, case, None)]))
        raise reason
    usable_bytes = options.usable_bytes(cluster.device.memory_bytes)
    sections: list[RenderableType] = [
        top,
        verdict(plan, task.request, cluster, model_flops(task.step)),
        memory_table(plan, cluster, usable_bytes),
        changes_table(changes, case, plan),
        flags_table(plan, task.request),
    ]
    console.print(report(sections))
    return plan


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
