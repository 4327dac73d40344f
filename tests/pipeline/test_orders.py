"""Any order of actions that can be run is run, whoever wrote it; one that cannot is refused before
anything runs.
"""

from __future__ import annotations

import pytest
from pipeline_net import StageCase, check_steps

from alpa_strategy.errors import PlanError
from alpa_strategy.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    actions,
    refusal,
    register_schedule,
    timeline,
)


def order(text):
    """`0F1 0B1` as actions."""
    return tuple(Action(int(word[0]), word[1], int(word[2])) for word in text.split())


def last_in_first_out(num_stages, num_microbatches, num_meshes):
    """GPipe, but the last micro-batch's backward comes first."""
    return [
        [
            *(Action(stage, "F", m) for m in range(num_microbatches)),
            *(Action(stage, "B", m) for m in reversed(range(num_microbatches))),
        ]
        for stage in range(num_stages)
    ]


def overtaking(num_stages, num_microbatches, num_meshes):
    """Stage 0 sends 0, 1, 2 and stage 1 takes 2, 0, 1; backwards likewise."""
    return order("0F0 0F1 0F2 0I2 0B0 0W2 0B1"), order("1F2 1F0 1B0 1F1 1B1 1I2 1W2")


def run_own(name, num_stages, num_microbatches):
    register_schedule(globals()[name])
    stages = tuple(StageCase((rank,), (2 * rank, 2 * rank + 1)) for rank in range(num_stages))
    check_steps(stages, name, num_microbatches, 2 * num_stages)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_schedule_of_ones_own_is_run(pool, num_stages):
    pool.run(num_stages, run_own, "last_in_first_out", num_stages, 4)


def test_micro_batches_may_overtake_each_other(pool):
    pool.run(2, run_own, "overtaking", 2, 3)


BAD = {
    "lock up": (order("0F0 0B0 0F1 0B1"), order("1F1 1B1 1F0 1B0")),
    "backward first": (order("0F0 0B0 0F1 0B1"), order("1F0 1B0 1B1 1F1")),
    "weights first": (order("0F0 0W0 0I0 0F1 0B1"), order("1F0 1B0 1F1 1B1")),
    "no backward": (order("0F0 0B0 0F1"), order("1F0 1B0 1F1 1B1")),
    "twice": (order("0F0 0B0 0F1 0B1 0F1"), order("1F0 1B0 1F1 1B1")),
    "half": (order("0F0 0I0 0F1 0B1"), order("1F0 1B0 1F1 1B1")),
    "unknown": (order("0F0 0B0 0F1 0B1 0F9"), order("1F0 1B0 1F1 1B1")),
    "no action": (order("0X0"), order("1F0 1B0 1F1 1B1")),
    "elsewhere": (order("1F0 1B0 1F1 1B1"), order("0F0 0B0 0F1 0B1")),
}
REASONS = {
    "lock up": "wait for each other: mesh 0 before 0B0, mesh 1 before 1F1",
    "backward first": "wait for each other: mesh 0 before 0B1, mesh 1 before 1B1",
    "weights first": "wait for each other: mesh 0 before 0W0, mesh 1 before 1F1",
    "no backward": "does the backward of micro-batch 1 in stage 0 on mesh 0 0 times instead of 1",
    "twice": "does the forward of micro-batch 1 in stage 0 on mesh 0 2 times instead of 1",
    "half": "does the weights' backward of micro-batch 0 in stage 0 on mesh 0 0 times instead of 1",
    "unknown": "does the forward of micro-batch 9 in stage 0 on mesh 0 1 times instead of 0",
    "no action": "on mesh 0, which is no action",
    "elsewhere": "in stage 0 on mesh 0 0 times instead of 1",
}


@pytest.mark.parametrize("case", BAD)
def test_orders_that_cannot_be_run_are_refused(case):
    register_schedule(
        Schedule(f"bad: {case}", lambda num_stages, num_microbatches, num_meshes: BAD[case])
    )
    try:
        with pytest.raises(PlanError, match=REASONS[case]):
            actions(f"bad: {case}", 2, 2)
    finally:
        del SCHEDULES[f"bad: {case}"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_of_ours_locks_up_or_lies_elsewhere(schedule):
    for v in SCHEDULES[schedule].stages_per_mesh:
        for num_meshes in range(1, 5):
            folded = [min(s, 2 * num_meshes - 1 - s) for s in range(2 * num_meshes)]
            looped = [s % num_meshes for s in range(v * num_meshes)]
            for count in range(1, 13):
                if refusal(schedule, num_meshes, count) is None:
                    orders = actions(schedule, num_meshes, count, v)
                    meshes = {
                        action.stage: mesh for mesh, order in enumerate(orders) for action in order
                    }
                    results = [meshes[stage] for stage in sorted(meshes)]
                    is_folded = SCHEDULES[schedule].is_folded
                    assert results == (folded if is_folded else looped)
                    timeline(
                        schedule, [1.0] * num_meshes * v, [1.0] * num_meshes * v, count, num_meshes
                    )
