"""Candidates are solved in turn; what falls short of its promise does not hide what keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from alpa_strategy.errors import PlanError
from alpa_strategy.planner.assembly import best_solved


def candidate(
    schedule: str,
    promised: float,
    solved: float | None,
    submesh: int = 0,
    stages_per_mesh: int = 1,
) -> Any:
    """`solved`: seconds of its plan; None: it does not fit."""
    return SimpleNamespace(
        schedule=schedule,
        seconds=promised,
        solved_to=solved,
        submesh_of=(submesh,),
        stages_per_mesh=stages_per_mesh,
        job=SimpleNamespace(num_microbatches=8),
    )


def best_of(*candidates: Any) -> tuple[float | None, list[float]]:
    """(seconds of the best plan, what was promised of those that were solved, in order)."""
    tried: list[float] = []

    def solve(each: Any) -> Any:
        tried.append(each.seconds)
        if each.solved_to is None:
            raise PlanError("does not fit")
        return SimpleNamespace(predicted=SimpleNamespace(step_seconds=each.solved_to))

    best, failures = best_solved(candidates, solve)
    assert len(failures) == sum(
        each.solved_to is None for each in candidates if each.seconds in tried
    )
    return best and best.predicted.step_seconds, tried


def test_the_first_that_keeps_its_promise_is_taken() -> None:
    assert best_of(candidate("1F1B", 2.0, 2.0), candidate("GPipe", 1.0, 1.0)) == (1.0, [1.0])


def test_many_of_a_kind_that_fall_short_do_not_hide_another_kind() -> None:
    """As on 64 V100s: eight zero-bubble plans promised 73 s and took 87, another schedule took
    84.
    """
    short = [candidate("ZBV", 73 + i / 10, 87 + i / 10) for i in range(8)]
    assert best_of(*short, candidate("1F1B", 83.0, 84.0)) == (84.0, [73.0, 83.0])
    assert best_of(*short, candidate("ZBV", 74.5, 74.3, submesh=1)) == (74.3, [73.0, 74.5])


def test_what_does_not_fit_is_passed_over() -> None:
    assert best_of(candidate("ZBV", 1.0, None), candidate("1F1B", 2.0, 2.1)) == (2.1, [1.0, 2.0])
    assert best_of(candidate("ZBV", 1.0, None)) == (None, [1.0])


def test_where_one_does_not_fit_the_search_goes_on() -> None:
    """What is found then is solved as well, as often as nothing fits."""
    searched: list[float] = []

    def again(remaining: list[Any], failed: Any, error: PlanError, seconds: float) -> list[Any]:
        searched.append(failed.seconds)
        is_enough = len(searched) == 20
        found = candidate("1F1B", failed.seconds + 1, failed.seconds + 1 if is_enough else None)
        return [*remaining, found]

    def solve(each: Any) -> Any:
        if each.solved_to is None:
            raise PlanError("does not fit")
        return SimpleNamespace(predicted=SimpleNamespace(step_seconds=each.solved_to))

    best, failures = best_solved([candidate("1F1B", 1.0, None)], solve, again)
    assert best is not None
    assert best.predicted.step_seconds == 21.0
    assert searched == [float(i) for i in range(1, 21)]
    assert len(failures) == 20


def test_interleaved_stages_that_promise_about_the_same_are_all_solved() -> None:
    first = candidate("ZBVZeroBubble", 1.0, 1.01, stages_per_mesh=2)
    second = candidate("ZBVZeroBubble", 1.001, 1.002, stages_per_mesh=2)
    slower = candidate("ZBVZeroBubble", 1.006, 1.0, stages_per_mesh=2)
    assert best_of(first, second, slower) == (1.002, [1.0, 1.001])
