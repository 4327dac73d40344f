"""The profiled steps in short: seconds by part for every rank, and the last step over time."""

from collections.abc import Iterator, Sequence

from alpa_strategy.ir.measured_steps import (
    MeasuredAction,
    MeasuredLane,
    MeasuredMessage,
    ProfiledRank,
    ProfiledSteps,
)
from alpa_strategy.profiling.parts import step_times
from alpa_strategy.profiling.ranges import ACTION, EVALUATION, MESSAGE, PHASE, STEP
from alpa_strategy.profiling.rank_trace import Slice, with_parents
from alpa_strategy.profiling.waiting import RankRecord

# A piece of an action before or after a wait is drawn from this share of the action on.
_DRAWN_SHARE = 0.02

_NANO = 1e-9


def profiled_steps(records: Sequence[RankRecord], first: int, trace: str) -> ProfiledSteps:
    """Return the profiled steps in short, without the time of evaluation.

    Args:
        records: of all ranks, on one clock, with `until` marked.
        first: number of the first profiled step.
        trace: path of the trace.
    """
    ranks = []
    count = 0
    seconds = 0.0
    for record in records:
        times = step_times(record.slices)
        parts = {part: s for part, s in times.seconds().items() if part != EVALUATION}
        rank = ProfiledRank(record.rank, record.stages, parts, times.named_share)
        ranks.append(rank)
        count = times.count
        in_steps = times.total - times.parts[EVALUATION]
        seconds += in_steps * _NANO / max(1, times.count) / len(records)
    shown = _first_of_each_mesh(records)
    begin = min((_last_step(record)[0] for record in shown), default=0)
    lanes = [_lane(record, begin) for record in shown]
    messages = list(_messages(shown, begin))
    messages.sort(key=lambda message: message.start)
    return ProfiledSteps(first, count, seconds, tuple(ranks), tuple(lanes), tuple(messages), trace)


def _first_of_each_mesh(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the first rank's record for each set of stages, in the order of the stages."""
    by_stages: dict[tuple[int, ...], RankRecord] = {}
    for record in records:
        by_stages.setdefault(record.stages, record)
    return [by_stages[stages] for stages in sorted(by_stages)]


def _last_step(record: RankRecord) -> tuple[int, int]:
    """Return the start and the end of the last profiled step."""
    steps = [trace_slice for trace_slice in record.slices if trace_slice.category == STEP]
    return (steps[-1].start, steps[-1].end) if steps else (0, 0)


def _lane(record: RankRecord, begin: int) -> MeasuredLane:
    """Return the actions of a rank in its last profiled step. Their times count from `begin`,
    nanoseconds on the records' clock.
    """
    start, end = _last_step(record)
    in_step = [trace_slice for trace_slice in record.slices if start <= trace_slice.start < end]
    actions = [*_actions(in_step, begin), *_update(record, in_step, begin)]
    actions.sort(key=lambda action: action.start)
    return MeasuredLane(record.rank, record.stages, tuple(actions))


def _actions(slices: Sequence[Slice], begin: int) -> Iterator[MeasuredAction]:
    """Yield the actions, without the time in which they wait for messages: an action that waits is
    several pieces, of which those below `_DRAWN_SHARE` of it are left out.

    Args:
        slices: of one step of a rank.
        begin: nanoseconds at which the step begins.
    """
    waits: dict[int, list[Slice]] = {}
    actions: list[Slice] = []
    for trace_slice, around in with_parents(slices):
        if trace_slice.category == ACTION:
            actions.append(trace_slice)
        if trace_slice.category == MESSAGE and "receives" in trace_slice.details:
            outer = [above for above in around if above.category == ACTION]
            if outer:
                waits.setdefault(id(outer[-1]), []).append(trace_slice)
    for action in actions:
        pieces = []
        start = action.start
        for wait in waits.get(id(action), ()):
            pieces.append((start, wait.start))
            start = wait.end
        pieces.append((start, action.end))
        least = _DRAWN_SHARE * (action.end - action.start)
        for piece_start, piece_end in pieces:
            if piece_end - piece_start > least:
                kind, stage, number = _action_of(action)
                yield _timed(kind, stage, number, piece_start, piece_end, begin)


def _action_of(trace_slice: Slice) -> tuple[str, int, int]:
    return (
        trace_slice.details["action"],
        trace_slice.details["stage"],
        trace_slice.details["microbatch"],
    )


def _timed(
    kind: str, stage: int, microbatch: int, start: int, end: int, begin: int
) -> MeasuredAction:
    seconds = (end - start) * _NANO
    return MeasuredAction(kind, stage, microbatch, max(0.0, (start - begin) * _NANO), seconds)


def _update(record: RankRecord, slices: Sequence[Slice], begin: int) -> Iterator[MeasuredAction]:
    """Yield the optimizer's update: from the end of its closure to the end of its step. Args: as of
    `_actions`.
    """
    for trace_slice in slices:
        if trace_slice.category != PHASE or trace_slice.name != "optimizer_step":
            continue
        inner = [other for other in slices if other.name == "closure"]
        inside = [other for other in inner if trace_slice.start <= other.start < trace_slice.end]
        start = max((other.end for other in inside), default=trace_slice.start)
        stage = record.stages[0] if record.stages else 0
        yield _timed("U", stage, 0, start, trace_slice.end, begin)


def _messages(records: Sequence[RankRecord], begin: int) -> Iterator[MeasuredMessage]:
    """Yield the messages of the last step, from their sends to the end of their receives.

    Args:
        records: of all ranks.
        begin: nanoseconds at which the step begins.
    """
    for record in records:
        start, end = _last_step(record)
        for trace_slice in record.slices:
            is_in_step = start <= trace_slice.start < end
            if (
                trace_slice.category != MESSAGE
                or "receives" not in trace_slice.details
                or not is_in_step
            ):
                continue
            source, target, _, microbatch = trace_slice.details["receives"]
            sent = min(trace_slice.details.get("until", trace_slice.start), trace_slice.end)
            seconds = (trace_slice.end - sent) * _NANO
            at = max(0.0, (sent - begin) * _NANO)
            yield MeasuredMessage(source, target, microbatch, at, seconds)
