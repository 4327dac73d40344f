"""The nearest changes that make a model fit, or a step at least 10 % faster.

Each one is planned again before it is shown, as the command with that change would plan it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import AlpaError
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.fit.search import search_regular
from alpa_strategy.fit.task import FitTask, captured
from alpa_strategy.ir.plan import Plan
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.task import Progress
from alpa_strategy.units import format_bytes

# A change must bring at least this many times the tokens per second, or make the model fit.
MIN_GAIN = 1.1

# Rank of adapters that are proposed.
_LORA_RANK = 16


@dataclass(frozen=True)
class FitCase:
    """A model's step, the cluster and the options for which a plan is made."""

    task: FitTask
    cluster: ClusterSpec
    options: PlanOptions

    @property
    def request(self) -> FitRequest:
        """The request of the task."""
        return self.task.request


@dataclass(frozen=True)
class Change:
    """A change of the command line."""

    # What is added to the command, or replaced in it.
    flags: str

    # What it costs other than seconds and bytes.
    price: str

    # Returns the case with the change.
    apply: Callable[[FitCase, Progress], FitCase]


@dataclass(frozen=True)
class PlannedChange:
    """A change with the plan of the changed case."""

    change: Change
    case: FitCase
    plan: Plan

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step per predicted second, of the changed case."""
        return self.case.request.tokens / self.plan.predicted.step_seconds


def plan_case(case: FitCase, progress: Progress, faster_than: float = math.inf) -> Plan:
    """Return the plan of a case.

    Args:
        case: what is asked.
        progress: of planning.
        faster_than: seconds of a step; slower plans are of no interest.

    Raises:
        PlanError: nothing fits, or no plan seems to take less than `faster_than`.
    """
    task = case.task.plan_task(case.cluster, case.options, progress)
    return search_regular(task, case.task.graphs, faster_than)


def nearest_changes(
    case: FitCase, plan: Plan | None, progress: Progress, most: int
) -> list[PlannedChange]:
    """Return the first `most` changes that help, in the order of what they cost the user: with them
    it fits, or has `MIN_GAIN` times the tokens per second. What cannot be planned does not help.

    Args:
        case: what was asked.
        plan: its plan; None: it does not fit.
        progress: of planning.
        most: changes to return; fewer if fewer help.
    """
    tokens_per_second = 0.0
    if plan is not None:
        tokens_per_second = case.request.tokens / plan.predicted.step_seconds
    helpful: list[PlannedChange] = []
    for change in possible_changes(case, fits=plan is not None):
        if len(helpful) == most:
            break
        try:
            changed = change.apply(case, progress)
            faster_than = math.inf
            if tokens_per_second > 0:
                faster_than = changed.request.tokens / (MIN_GAIN * tokens_per_second)
            changed_plan = plan_case(changed, progress, faster_than)
            planned = PlannedChange(change, changed, changed_plan)
        # What cannot be captured or planned does not help.
        except AlpaError:
            continue
        if planned.tokens_per_second >= MIN_GAIN * tokens_per_second:
            helpful.append(planned)
    return helpful


def possible_changes(case: FitCase, fits: bool) -> Iterator[Change]:
    """Yield changes of a case that may make it fit or faster, those that cost the user least first.

    Args:
        fits: whether the case has a plan. Some changes are for cases without one only.
    """
    options = case.options
    request = case.request
    for name, text in (
        ("remat", "activation checkpointing is solved"),
        ("num_microbatches", "micro-batches are solved"),
        ("parallel", "layouts and ZeRO are solved"),
        ("num_stages", "stages are solved"),
    ):
        default = getattr(PlanOptions(), name)
        if getattr(options, name) != default:
            flags = f"without plan.{name}"
            yield Change(flags, text, _with_options(**{name: default}))
    if not options.compile:
        yield Change("plan.compile=true", "compiles the stages", _with_options(compile=True))
    if request.optimizer in ("adam", "adamw") and request.lora_rank is None and not fits:
        price = "optimizer state in 8 bits"
        yield Change("--optimizer adamw8bit", price, _with_request(optimizer="adamw8bit"))
    if request.precision == "bf16-mixed":
        price = "weights without an fp32 copy: small updates may round away"
        yield Change("--precision bf16-true", price, _with_request(precision="bf16-true"))
    if not fits and request.batch_size % 2 == 0:
        half = request.batch_size // 2
        yield Change(f"--batch {half}", "half the tokens of a step", _with_request(batch_size=half))
    if request.lora_rank is None and not fits:
        price = "trains adapters alone"
        flags = f"--lora {_LORA_RANK}"
        yield Change(flags, price, _with_request(lora_rank=_LORA_RANK))
    if not fits and request.sequence_length >= 2048:
        half = request.sequence_length // 2
        yield Change(f"--seq {half}", "shorter context", _with_request(sequence_length=half))
    nodes = 2 * case.cluster.num_nodes
    yield Change(f"cluster.num_nodes={nodes}", "twice the devices", _with_nodes(nodes))


def change_line(planned: PlannedChange, case: FitCase, plan: Plan | None) -> tuple[str, str]:
    """Return the flags of a change, and what it brings and costs.

    Args:
        plan: of the case as requested; None: nothing fits.
    """
    if plan is None:
        brings = f"fits, {format_bytes(planned.plan.predicted.peak_bytes)} a device"
    else:
        brings = _brought(planned, case, plan)
    return planned.change.flags, f"{brings}; {planned.change.price}"


def _brought(planned: PlannedChange, case: FitCase, plan: Plan) -> str:
    """Return a text with the gain of a change over `plan`, which fits: factor of tokens/s, and more
    or less memory of a device.
    """
    before = case.request.tokens / plan.predicted.step_seconds
    gain = planned.tokens_per_second / before
    more = planned.plan.predicted.peak_bytes - plan.predicted.peak_bytes
    sign = "+" if more >= 0 else "-"
    return f"{gain:.2f}x the tokens/s, {sign}{format_bytes(math.fabs(more))}"


def with_changes(plan: Plan, changes: Sequence[PlannedChange], case: FitCase) -> Plan:
    """Return a plan whose figures have the changes, for `alpa show` and the page; the plan itself
    if it has no figures.

    Args:
        plan: of the case as requested.
        changes: those that were planned and help.
        case: the case as requested.
    """
    if plan.figures is None:
        return plan
    lines = []
    for planned in changes:
        flags, _ = change_line(planned, case, plan)
        lines.append(f"{flags}: {_brought(planned, case, plan)}")
    return replace(plan, figures=replace(plan.figures, planned_changes=tuple(lines)))


def _with_options(**values: object) -> Callable[[FitCase, Progress], FitCase]:
    """Return a function that changes planning options of a case."""

    def apply(case: FitCase, progress: Progress) -> FitCase:
        options = {**vars(case.options), **values}
        return replace(case, options=PlanOptions(**options))

    return apply


def _with_request(**values: object) -> Callable[[FitCase, Progress], FitCase]:
    """Return a function that changes fields of a case's request, and captures its step again if
    needed. The function raises as `captured` does.
    """

    def apply(case: FitCase, progress: Progress) -> FitCase:
        request = FitRequest(**{**vars(case.request), **values})
        if set(values) == {"optimizer"}:
            # The captured step has no optimizer.
            return replace(case, task=replace(case.task, request=request))
        task = captured(request, case.cluster.num_devices, progress)
        return replace(case, task=task)

    return apply


def _with_nodes(num_nodes: int) -> Callable[[FitCase, Progress], FitCase]:
    """Return a function that changes the number of nodes of a case."""

    def apply(case: FitCase, progress: Progress) -> FitCase:
        return replace(case, cluster=replace(case.cluster, num_nodes=num_nodes))

    return apply
