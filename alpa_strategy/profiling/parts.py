"""Where the time of a rank's steps goes: each moment belongs to its innermost range."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from alpa_strategy.profiling.ranges import (
    ACTION,
    COLLECTIVE,
    EVALUATION,
    MESSAGE,
    MODULE,
    NAMED,
    PHASE,
    STEP,
    UPDATE,
)
from alpa_strategy.profiling.rank_trace import ANNOTATION, OP, Slice

# Parts of a step that are not kinds of collectives.
FORWARD = "forward"
BACKWARD = "backward"
BOUNDARIES = "boundaries"
OPTIMIZER = "optimizer"
WAITING = "waiting"
HOST = "host"

# Phases of the Trainer that are the captured step.
STEP_PHASES = ("training_step", "backward")

# Ops that torch's process groups record, with the name of the collective after it.
_TORCH_COLLECTIVES = ("c10d::", "gloo:", "nccl:")
_TORCH_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "send": BOUNDARIES,
    "recv": BOUNDARIES,
}
_OPTIMIZER_STEP = "Optimizer.step#"


@dataclass(frozen=True)
class _Moment:
    """What the moments within a range belong to, unless another range is inside."""

    part: str = HOST

    # Whether a range around it has the name of a module, a collective or a message.
    is_named: bool = False

    # Whether it is in `training_step` or the backward.
    is_in_step: bool = False
    is_backward: bool = False

    # Until when (nanoseconds) it waits for other devices.
    until: int = 0


@dataclass
class StepTimes:
    """Nanoseconds of a rank's profiled steps."""

    # Number of steps.
    count: int = 0

    # Of all steps together.
    total: int = 0
    parts: Counter[str] = field(default_factory=Counter)

    # Within `training_step` and the backward, and of these within named ranges.
    in_step: int = 0
    named: int = 0

    @property
    def named_share(self) -> float:
        """Share of the captured steps within ranges of modules, collectives and messages."""
        return self.named / self.in_step if self.in_step else 0.0

    def seconds(self) -> dict[str, float]:
        """Return the mean seconds of a step by part."""
        parts = {}
        for part, nanoseconds in self.parts.items():
            parts[part] = nanoseconds / max(1, self.count) / 1e9
        return parts


def step_times(slices: Iterable[Slice]) -> StepTimes:
    """Return where the time of the profiled steps goes, on the thread that runs them.

    Args:
        slices: of one rank, nested.
    """
    all_slices = list(slices)
    steps = [trace_slice for trace_slice in all_slices if trace_slice.category == STEP]
    times = StepTimes(
        count=len(steps), total=sum(trace_slice.end - trace_slice.start for trace_slice in steps)
    )
    if not steps:
        return times
    track = steps[0].track
    stack: list[tuple[Slice, _Moment]] = []
    now = steps[0].start
    for trace_slice in all_slices:
        if trace_slice.track != track:
            continue
        now = _close(stack, trace_slice.start, now, times)
        _add(stack, now, trace_slice.start, times)
        now = max(now, trace_slice.start)
        outer = stack[-1][1] if stack else _Moment()
        stack.append((trace_slice, _moment_in(trace_slice, outer)))
    _close(stack, None, now, times)
    return times


def _close(
    stack: list[tuple[Slice, _Moment]], moment: int | None, now: int, times: StepTimes
) -> int:
    """Close the slices that end by `moment` (None: all), and return until when time is added.

    Args:
        stack: open slices, the innermost last; closed ones are removed.
        now: nanoseconds until which time was added before.
        times: gets the time.
    """
    while stack and (moment is None or stack[-1][0].end <= moment):
        end = stack[-1][0].end
        _add(stack, now, end, times)
        now = max(now, end)
        stack.pop()
    return now


def _add(stack: Sequence[tuple[Slice, _Moment]], start: int, end: int, times: StepTimes) -> None:
    """Add the interval from `start` to `end`, in nanoseconds, to the part of the innermost slice,
    if it is within a step.

    Args:
        stack: open slices, the innermost last.
        times: gets the time; waiting for other ranks is a part of its own.
    """
    if end <= start or not stack or stack[0][0].category != STEP:
        return
    moment = stack[-1][1]
    waiting = min(max(0, moment.until - start), end - start)
    times.parts[WAITING] += waiting
    times.parts[moment.part] += end - start - waiting
    if moment.is_in_step:
        times.in_step += end - start
        times.named += (end - start) * moment.is_named


def _moment_in(trace_slice: Slice, outer: _Moment) -> _Moment:
    """Return the part of the step to which the moments within a slice belong.

    Args:
        outer: the same of the slice around it.
    """
    if trace_slice.category in NAMED:
        outer = replace(outer, is_named=True)
    if trace_slice.category in (COLLECTIVE, MESSAGE):
        part = trace_slice.details.get("collective", BOUNDARIES)
        return replace(outer, part=part, until=trace_slice.details.get("until", 0))
    if trace_slice.category == MODULE:
        is_backward = outer.is_backward or bool(trace_slice.details.get("backward"))
        part = BACKWARD if is_backward else FORWARD
        # A module within a collective or an evaluation does not end it.
        return replace(outer, part=part) if outer.part in (HOST, FORWARD, BACKWARD) else outer
    if trace_slice.category == ACTION:
        is_backward = trace_slice.details["action"] != "F"
        part = BACKWARD if is_backward else FORWARD
        return replace(outer, part=part, is_backward=is_backward)
    if trace_slice.category == UPDATE:
        return replace(outer, part=OPTIMIZER)
    if trace_slice.category == EVALUATION:
        return _Moment(EVALUATION)
    if trace_slice.category == PHASE:
        return replace(outer, part=HOST, is_in_step=trace_slice.name in STEP_PHASES)
    if trace_slice.category == ANNOTATION and trace_slice.name.startswith(_OPTIMIZER_STEP):
        return replace(outer, part=OPTIMIZER)
    is_collective = trace_slice.category == OP and trace_slice.name.startswith(_TORCH_COLLECTIVES)
    if is_collective and outer.part in (HOST, FORWARD, BACKWARD, OPTIMIZER):
        return replace(outer, part=_torch_kind(trace_slice.name), is_named=True)
    return outer


def _torch_kind(name: str) -> str:
    """Return the kind of a collective of torch's: `c10d::allreduce_` is an `all_reduce`."""
    word = name.partition(":")[2].strip(":_")
    for prefix, kind in _TORCH_KINDS.items():
        if word.startswith(prefix):
            return kind
    return word
