"""`alpa whatif`: the plan on a cluster, or of a model, that is not as it is."""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from alpa_strategy.cluster.load import read_cluster_yaml
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.commands.origin import check_has_flags, request_of
from alpa_strategy.commands.recipe_task import captured_by_name, split_overrides
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.difference import (
    change,
    difference_table,
    differing_layers,
    num_devices,
    stages_text,
)
from alpa_strategy.display.findings import findings
from alpa_strategy.display.plan_words import assumed_rates_text
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import OptionError, PlanError, did_you_mean
from alpa_strategy.fit.command import (
    REQUEST_FLAGS,
    add_request_arguments,
    changed_request,
    check_no_flags,
    given_flags,
    is_by_name,
    read_options,
)
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import Origin, details_of_file
from alpa_strategy.loading import rare_collections
from alpa_strategy.options import PlanOptions
from alpa_strategy.recipe import KEYS, load_recipe
from alpa_strategy.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from alpa_strategy.planner.task import PlanTask

# Steps that differ by less than this share of them take equally long.
NOTICEABLE = 1e-3

# Columns of a change in the table.
MAX_LABEL = 34

_FACTOR = re.compile(r"([0-9.]+)x")
_RECIPE_KEYS = (*KEYS, "plan")


def add_arguments(whatif: argparse.ArgumentParser) -> None:
    """Add the options of `alpa whatif` to its parser; recipe and overrides are there already."""
    whatif.add_argument("--cluster", metavar="CLUSTER", help="as for alpa plan; of a plan: its own")
    whatif.add_argument(
        "--set",
        dest="settings",
        action="append",
        required=True,
        metavar="KEY=VALUE",
        help="a field of the cluster or recipe: inter_node.bandwidth=2x (twice as much),"
        " devices=16, data.batch_size=64; of hf:PATH seq=2x or batch=64 too; may be repeated",
    )
    add_request_arguments(whatif)


@dataclass(frozen=True)
class Variation:
    """A recipe and a cluster with some of the changes."""

    label: str
    to_cluster: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    # Of a model by name, in place of a recipe.
    request: FitRequest | None = None


# The task of a variation, and a function that plans it.
Planning = tuple["PlanTask", Callable[[], Plan]]


def run(arguments: argparse.Namespace) -> int:
    """Plan as it is, with each change alone and with all of them; print what changes and why.

    Returns:
        The exit status, 0.

    Raises:
        PlanError: there is no plan with all changes. The table was printed.
        AlpaError: an argument, the recipe or the cluster cannot be used.
    """
    # What was planned for the same inputs is not planned again.
    stored = Plan.load(arguments.recipe) if _is_plan_file(arguments.recipe) else None
    origin = _origin(arguments, stored)
    to_cluster, overrides = split_overrides(origin.overrides)
    cluster = ClusterSpec.load(origin.cluster, dict(to_cluster))
    request = request_of(origin, cluster)
    if request is None:
        check_no_flags(origin.recipe, arguments)
    base = Variation("as it is", to_cluster, tuple(overrides), request)
    variations = [base]
    if len(arguments.settings) > 1:
        for text in arguments.settings:
            variations.append(_varied(origin, base, [text], text))
    is_one = len(arguments.settings) == 1
    label = arguments.settings[0] if is_one else "all of them"
    variations.append(_varied(origin, base, arguments.settings, label))

    with rare_collections():
        plans, unchanged, failure = _planned(variations, _planner(origin, Progress()), stored)

    console = make_console()
    console.print(_overview(variations, plans, unchanged))
    for warning in _warnings(variations, plans):
        console.print(Text.assemble(("warning", "yellow"), "  ", plain(warning)))
    if failure is not None:
        raise failure
    before, after = plans[0], plans[-1]
    assert after is not None
    if before is None:
        for line in ("There is no plan as it is; with the change there is one.", *findings(after)):
            console.print(plain(f"- {line}", keeps_lines=True))
        return 0
    # The kept plan's parts are not priced: the table is of the one that was found.
    name = "another plan" if unchanged[-1].is_faster_than(after) else "changed"
    console.print(difference_table(["as it is", name], before, after))
    for line in _reasons(before, after, unchanged[-1]):
        console.print(plain(f"- {line}", keeps_lines=True))
    return 0


def _planner(origin: Origin, progress: Progress) -> Callable[[Variation], Planning]:
    """Return a function: variation -> (its task, a function that plans it). Captured steps are
    shared between variations. Both functions raise AlpaErrors.
    """
    from alpa_strategy.fit.variation import CapturedRequests
    from alpa_strategy.planner.planner import plan_captured

    requests = CapturedRequests(progress)

    def planning_of(variation: Variation) -> Planning:
        cluster = ClusterSpec.load(origin.cluster, dict(variation.to_cluster))
        if variation.request is not None:
            return requests.planning(variation.request, cluster, variation.overrides)
        captured = captured_by_name(origin.recipe, cluster, variation.overrides, progress)
        return captured.task, lambda: plan_captured(captured)

    return planning_of


def _is_plan_file(name: str) -> bool:
    """Whether the first argument is a stored plan, not a recipe or a model by name."""
    return name.endswith(".json") and not is_by_name(name)


def _origin(arguments: argparse.Namespace, stored: Plan | None) -> Origin:
    """Return the recipe, cluster and overrides that are varied: those of the arguments, or those
    from which a stored plan was made.

    Args:
        stored: the plan of the first argument; None: that is a recipe or a model by name.

    Raises:
        PlanError: the stored plan does not name its recipe.
        OptionError: `--cluster` is missing for a recipe.
    """
    if stored is not None:
        details = details_of_file(arguments.recipe, stored)
        if details is None or details.origin is None:
            raise PlanError(
                f"nothing beside {arguments.recipe} names the recipe that it was made from",
                "give the recipe and --cluster instead of the plan",
            )
        origin = details.origin
        check_has_flags(arguments.recipe, origin)
        cluster = arguments.cluster or origin.cluster
        overrides = (*origin.overrides, *arguments.overrides)
        # Of equal flags the last counts.
        flags = (*origin.flags, *given_flags(arguments))
        return Origin(origin.recipe, cluster, overrides, flags)
    if arguments.cluster is None:
        raise OptionError(
            "alpa whatif needs the cluster to begin with",
            "add --cluster, or give a plan that `alpa plan -o` stored instead of the recipe",
        )
    overrides = tuple(arguments.overrides)
    return Origin(arguments.recipe, arguments.cluster, overrides, given_flags(arguments))


def _planned(
    variations: Sequence[Variation],
    planning_of: Callable[[Variation], Planning],
    stored: Plan | None,
) -> tuple[list[Plan | None], list["UnchangedPlan"], PlanError | None]:
    """Plan variations, the unchanged one first.

    Args:
        planning_of: returns the task of a variation, and a function that plans it.
        stored: a plan that is taken for the variation that it was made for.

    Returns:
        The plan of each (None: nothing fits), the unchanged plan under each, and why there is no
        plan of the last one (None: there is one).
    """
    plans: list[Plan | None] = []
    unchanged: list[UnchangedPlan] = []
    failure: PlanError | None = None
    options: PlanOptions | None = None
    for variation in variations:
        task, make_plan = planning_of(variation)
        is_stored = stored is not None and stored.fingerprint == task.fingerprint
        failure = None
        try:
            plans.append(stored if is_stored else make_plan())
        except PlanError as error:
            plans.append(None)
            failure = error
        options = options or task.options
        unchanged.append(_unchanged(task, plans[0], options))
    return plans, unchanged, failure


def _varied(origin: Origin, base: Variation, changes: Sequence[str], label: str) -> Variation:
    """Return `base` with changes of the cluster and the recipe.

    Args:
        changes: texts KEY=VALUE, as of `--set`.
        label: of the result.

    Raises:
        OptionError: a change is not of the form KEY=VALUE, or `2x` of what is no number.
        ClusterError: the cluster file cannot be read.
        AlpaError: likewise the recipe, or the changes do not fit it.
    """
    to_cluster = dict(base.to_cluster)
    overrides = list(base.overrides)
    request = base.request
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals or not value:
            raise OptionError(
                f"--set {text!r} is not of the form KEY=VALUE", "write inter_node.bandwidth=2x"
            )
        if request is not None and key in REQUEST_FLAGS:
            present = {flag: getattr(request, name) for flag, name in REQUEST_FLAGS.items()}
            request = changed_request(request, key, _value(text, value, present, key))
        elif key.split(".")[0] in _RECIPE_KEYS:
            name = re.sub(r"^plan\.", "strategy.", key)
            if request is None:
                known = vars(load_recipe(origin.recipe, overrides))
            else:
                known = {"strategy": vars(read_options(overrides))}
            overrides.append(f"{name}={_value(text, value, known, name)}")
        elif key == "devices":
            to_cluster.update(_sized(origin, to_cluster, text, value))
        else:
            known, _ = read_cluster_yaml(origin.cluster, to_cluster)
            to_cluster[key] = _value(text, value, known, key)
    return Variation(label, to_cluster, tuple(overrides), request)


def _value(text: str, value: str, known: Mapping[str, Any], key: str) -> str:
    """Return the new value of a field: the text itself, or a multiple of the present one.

    Args:
        text: the whole `--set`, for messages.
        value: the new value, or `2x`.
        known: the present fields, nested.
        key: path of the field, `inter_node.bandwidth`.

    Raises:
        OptionError: a multiple of a field that does not exist or is no number.
    """
    factor = _FACTOR.fullmatch(value)
    if factor is None:
        return value
    present: Any = known
    for part in key.split("."):
        fields = present if isinstance(present, Mapping) else {}
        if part not in fields:
            raise OptionError(
                f"--set {text!r}: there is no value of {key} to multiply",
                did_you_mean(part, fields) or "name a number of the cluster's file or the recipe",
            )
        present = fields[part]
    try:
        number = float(present) * float(factor[1])
    except (TypeError, ValueError):
        raise OptionError(
            f"--set {text!r}: {key} is {present!r}, which has no multiple",
            "name a field that is a number, or write its new value",
        ) from None
    is_whole = isinstance(present, int) and number == round(number)
    return str(round(number)) if is_whole else repr(number)


def _sized(origin: Origin, to_cluster: Mapping[str, Any], text: str, value: str) -> dict[str, str]:
    """Return the fields of a cluster of `value` devices: as many full nodes, or a part of one.

    Args:
        to_cluster: overrides of the cluster so far.
        text: the whole `--set`, for messages.
        value: a number, or a multiple of the present one.

    Raises:
        OptionError: it is no number, or needs a part of a node in addition to full ones.
    """
    cluster = ClusterSpec.load(origin.cluster, dict(to_cluster))
    number = _value(text, value, {"devices": cluster.num_devices}, "devices")
    if not number.isdigit() or int(number) < 1:
        raise OptionError(f"--set {text!r}: {number} is no number of devices", "write devices=16")
    count = int(number)
    per_node = min(count, cluster.devices_per_node)
    if count % per_node:
        raise OptionError(
            f"--set {text!r}: {count} devices are no full nodes of {per_node}",
            f"give a multiple of {per_node}, or set num_nodes and devices_per_node",
        )
    return {"num_nodes": str(count // per_node), "devices_per_node": str(per_node)}


@dataclass(frozen=True)
class UnchangedPlan:
    """The plan as it is, under some of the changes."""

    # Seconds of a step; None: it cannot be used.
    seconds: float | None = None

    # Of the device that needs most, and what it may use.
    peak_bytes: int = 0
    memory_limit: float = math.inf

    # Why it cannot be used.
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can be used, and its memory is within the limit."""
        return self.seconds is not None and self.peak_bytes <= self.memory_limit

    def is_faster_than(self, plan: Plan) -> bool:
        """Whether it fits and takes less time than another plan: not all plans are tried."""
        if self.seconds is None or not self.fits:
            return False
        return self.seconds < plan.predicted.step_seconds * (1 - NOTICEABLE)


def _unchanged(task: "PlanTask", plan: Plan | None, options: PlanOptions) -> UnchangedPlan:
    """Return the seconds and bytes of a step of the changed task with the unchanged plan, or the
    problem.

    The problem is that there is no plan (None), that it is for another number of devices, that an
    option which was changed excludes it, or that it does not fit the task.

    Args:
        task: the changed one.
        plan: the unchanged plan.
        options: with which it was planned.
    """
    from alpa_strategy.planner.figures import excluding_option
    from alpa_strategy.planner.plan_stages import cost_on

    if plan is None:
        return UnchangedPlan(problem="there is none")
    before, after = num_devices(plan), task.cluster.num_devices
    if before != after:
        return UnchangedPlan(problem=f"it is for {before} devices, not for {after}")
    excluded = excluding_option(task.options, options, plan)
    if excluded:
        return UnchangedPlan(problem=f"it was made without {excluded}")
    try:
        cost = cost_on(task, plan)
    except PlanError as error:
        if plan.fingerprint.graph != task.fingerprint.graph:
            # The error is one of plan files that users edit: it names layouts.
            return UnchangedPlan(problem="the changed step cannot be sharded as it says")
        return UnchangedPlan(problem=error.problem)
    return UnchangedPlan(cost.seconds, cost.peak_bytes, task.memory_limit)


def _overview(
    variations: Sequence[Variation],
    plans: Sequence[Plan | None],
    unchanged: Sequence[UnchangedPlan],
) -> Table:
    """Return a table with a row for each variation: the faster of the plan that was found and the
    unchanged one.

    Args:
        variations: what was changed.
        plans: the plan that was found under each, the unchanged one first; None: nothing fits.
        unchanged: the unchanged plan under each.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # In a narrow terminal the labels are broken, never the figures.
    table.add_column("", max_width=MAX_LABEL, overflow="fold")
    # A change of the sequence changes the tokens of a sample.
    rates = [_rate(plan, counts_tokens=True, step=1.0) for plan in plans if plan is not None]
    counts_tokens = None not in rates
    rate_name = "tokens/s" if counts_tokens else "samples/s"
    for column in ("step", "", rate_name, "memory", "plan kept"):
        table.add_column(column, justify="right", no_wrap=True)
    first = 0.0 if plans[0] is None else plans[0].predicted.step_seconds
    for variation, plan, old in zip(variations, plans, unchanged, strict=True):
        if plan is None:
            no_plan = Text("no plan", "red")
            table.add_row(plain(variation.label), no_plan, "", "", "", _unchanged_cell(old))
            continue
        step = plan.predicted.step_seconds
        num_bytes = plan.predicted.peak_bytes
        if old.seconds is not None and old.is_faster_than(plan):
            step = old.seconds
            num_bytes = old.peak_bytes
        rate = _rate(plan, counts_tokens, step)
        table.add_row(
            plain(variation.label),
            format_seconds(step),
            change(first, step) if first else "",
            "" if rate is None else format_rate(rate),
            format_bytes(num_bytes),
            _unchanged_cell(old),
        )
    return table


def _rate(plan: Plan, counts_tokens: bool, step: float) -> float | None:
    """Return the tokens per second of a plan's task in steps of `step` seconds, or the samples;
    None: not known.
    """
    if plan.figures is None:
        return None
    if counts_tokens:
        return plan.figures.tokens_per_second(step)
    return plan.figures.samples_per_second(step)


def _warnings(variations: Sequence[Variation], plans: Sequence[Plan | None]) -> list[str]:
    """Return warnings on assumed FLOP/s of devices, each with the variations that it is for."""
    labels: dict[str, list[str]] = {}
    for variation, plan in zip(variations, plans, strict=True):
        text = "" if plan is None else assumed_rates_text(plan)
        if text:
            labels.setdefault(text, []).append(variation.label)
    return [f"{', '.join(of)}: {text}" for text, of in labels.items()]


def _unchanged_cell(unchanged: UnchangedPlan) -> Text:
    """Return the seconds of a step with the unchanged plan, `too large` if it does not fit, or `-`
    if it cannot be used.
    """
    if unchanged.seconds is None:
        return Text("-", "dim")
    if not unchanged.fits:
        return Text("too large", "red")
    return Text(format_seconds(unchanged.seconds))


def _reasons(before: Plan, after: Plan, unchanged: UnchangedPlan) -> list[str]:
    """Return sentences: the seconds of the unchanged plan and how many the new one saves, or why it
    cannot be used; the stages of both if they differ; what limits the new one.

    Args:
        before: the unchanged plan.
        after: the new plan.
        unchanged: how the unchanged plan would run in the varied case.
    """
    lines = []
    step = after.predicted.step_seconds
    outcome = "which is faster there"
    if unchanged.seconds is None:
        lines.append(f"The plan as it is cannot be used there: {unchanged.problem}.")
        outcome = "which can be used there"
    else:
        limit = format_bytes(unchanged.memory_limit)
        memory = f"{format_bytes(unchanged.peak_bytes)} of {limit} a device"
        line = f"The plan as it is would take {format_seconds(unchanged.seconds)} a step there"
        saved = unchanged.seconds - step
        if not unchanged.fits:
            count = before.num_microbatches
            cut = f", in {count} micro-batches as before" if count > 1 else ""
            lines.append(f"{line}, but does not fit: it needs {memory}{cut}.")
            outcome = "which fits there"
        elif saved > NOTICEABLE * unchanged.seconds:
            lines.append(f"{line}, and fits: {memory}. The new plan saves {format_seconds(saved)}.")
        elif unchanged.is_faster_than(after):
            # Not all stages and layouts are tried.
            more = format_seconds(-saved)
            lines.append(f"{line}, and fits: {memory}. The plan that was found takes {more} more.")
            lines.append(
                "Not all plans are tried: the present plan is the better one there, and its"
                " figures are in the first table."
            )
            outcome = "which is slower there"
        else:
            lines.append(f"{line}, and fits: {memory}. No other plan is faster.")
            outcome = "which is as fast there"
    old_stages, new_stages = stages_text(before), stages_text(after)
    if old_stages != new_stages:
        lines.append(f"It has {new_stages}, {outcome}; the plan as it is has {old_stages}.")
    elif differing_layers(before, after):
        lines.append(f"It has {new_stages} as before, with other layers, {outcome}.")
    pins = after.figures.pins if after.figures is not None else ()
    if pins:
        lines.append(f"Pinned in both: {', '.join(pins)}. A plan without may be faster.")
    return [*lines, *findings(after)]
