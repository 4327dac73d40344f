"""Simulates a pipeline's step: when each action of a schedule starts and ends.

Each mesh works through its actions in order. An action starts as soon as its input has arrived. A
link transfers one message at a time. What an action waits for does not depend on seconds: actions
become numbers once, and are simulated for many pipelines. `schedules.py` has the schedules.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from alpa_strategy.schedule_orders import Action

# Share of a backward's time that computes the weights' gradients, if they are computed separately.
WEIGHT_SHARE = 0.5

# (F | B | W, stage, micro-batch): the result of an action. `B` is the gradient of the inputs.
Source = tuple[str, int, int]

Seconds = TypeVar("Seconds", float, np.ndarray)


def input_of(action: Action, num_stages: int) -> Source | None:
    """Return the input that an action waits for; None in the first stage's forward."""
    stage = action.stage
    microbatch = action.microbatch
    if action.kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    if action.kind == "W":
        return "B", stage, microbatch
    has_next_stage = stage + 1 < num_stages
    return ("B", stage + 1, microbatch) if has_next_stage else ("F", stage, microbatch)


def result_of(action: Action) -> Source:
    """Return the result of an action, for others to wait for."""
    kind = "B" if action.kind == "I" else action.kind
    return kind, action.stage, action.microbatch


# Of actions, in the order of their seconds in a simulation.
_KINDS = "FBIW"


class Steps(NamedTuple):
    """The actions of a schedule, as numbers for a simulation.

    Attributes:
        numbers: of each action, in order: its mesh; its index in the seconds of all kinds of
            actions and stages; the time that it waits for, -1 for none; the time that it sets; its
            link, and the time at which its message arrives, -1 for none.
        num_times: how many times there are.
    """

    numbers: list[tuple[int, int, int, int, int, int]]
    num_times: int


def numbered_steps(
    in_order: Iterable[tuple[int, Action, Source | None]], num_stages: int, num_microbatches: int
) -> Steps:
    """Return actions as the numbers of `Steps`.

    Args:
        in_order: (mesh, action, its input), each after the one that it waits for.
    """
    num_results = num_stages * num_microbatches
    # Results of forwards and of backwards, their arrivals, and one for all that nothing waits for.
    first_time = {"F": 0, "B": num_results}
    unused = 4 * num_results

    def time_of(source: Source) -> int:
        kind, stage, microbatch = source
        if kind == "W":
            return unused
        return first_time[kind] + stage * num_microbatches + microbatch

    numbers = []
    for mesh, action, needed in in_order:
        stage = action.stage
        work = _KINDS.index(action.kind) * num_stages + stage
        waits_for = -1
        if needed is not None:
            is_local = needed[1] == stage
            waits_for = time_of(needed) + (0 if is_local else 2 * num_results)

        result = time_of(result_of(action))
        link = arrival = -1
        if action.kind == "F" and stage + 1 < num_stages:
            link = stage
        elif action.kind in "BI" and stage > 0:
            link = num_stages + stage - 1
        if link >= 0:
            arrival = result + 2 * num_results
        numbers.append((mesh, work, waits_for, result, link, arrival))
    return Steps(numbers, unused + 1)


def timed_steps(
    steps: Steps,
    forward: Sequence[Seconds],
    backward: Sequence[Seconds],
    boundary: Sequence[Seconds],
    latest: Callable[[Seconds, Seconds], Seconds],
) -> Iterator[tuple[Seconds, Seconds]]:
    """Yield (start, end) of each action of a simulated step, in order.

    All seconds are numbers, or arrays with an element per pipeline.

    Args:
        steps: of the schedule.
        forward, backward: of each stage.
        boundary: of each stage but the last one, or of all; () for no messages.
        latest: returns the larger of two, element by element.
    """
    num_stages = len(forward)
    zero: Seconds = forward[0] * 0.0
    # In the order of `_KINDS`.
    seconds: list[Seconds] = list(forward)
    seconds.extend(backward)
    seconds += [b * (1 - WEIGHT_SHARE) for b in backward]
    seconds += [b * WEIGHT_SHARE for b in backward]
    of_links: list[Seconds] = list(boundary)
    of_links += [zero] * (num_stages - len(boundary))
    of_links += of_links
    # When a link has transferred its last message, and a mesh has done its last action.
    link_free: list[Seconds] = [zero] * (2 * num_stages)
    clock: list[Seconds] = [zero] * num_stages
    times: list[Seconds] = [zero] * steps.num_times

    for mesh, work, waits_for, result, link, arrival in steps.numbers:
        start = clock[mesh]
        if waits_for >= 0:
            start = latest(start, times[waits_for])
        end = start + seconds[work]
        clock[mesh] = end
        times[result] = end
        if link >= 0:
            arrived = latest(link_free[link], end) + of_links[link]
            link_free[link] = arrived
            times[arrival] = arrived
        yield start, end
