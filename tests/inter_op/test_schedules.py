"""Schedules: the same orders as torch's, the same times as the closed forms, the promised
activations alive.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from alpa_strategy.errors import PlanError
from alpa_strategy.schedules import (
    SCHEDULES,
    actions,
    closed_form,
    in_flight,
    mesh_of,
    refusal,
    seconds_of_many,
    splits_backward,
    timeline,
)

CASES = [(s, v) for s in SCHEDULES for v in SCHEDULES[s].stages_per_mesh]
sizes = st.tuples(st.sampled_from(CASES), st.integers(1, 6), st.integers(1, 24)).filter(
    lambda case: refusal(case[0][0], case[1], case[2]) is None
)

# Those that torch has as well; a schedule of our own is held to the laws below.
IN_TORCH = {
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
}


@settings(deadline=None, max_examples=60)
@given(sizes)
def test_splits_backward_says_whether_the_actions_have_weight_gradients(size):
    (schedule, v), num_meshes, num_microbatches = size
    kinds = {
        action.kind
        for order in actions(schedule, num_meshes, num_microbatches, v)
        for action in order
    }
    assert splits_backward(schedule, num_meshes, num_microbatches, v) == ("W" in kinds)


def seconds(schedule_terms, stage_seconds):
    """Of a whole schedule, from the seconds of one micro-batch per stage."""
    return schedule_terms.warmup * sum(stage_seconds) + schedule_terms.steady * max(stage_seconds)


def torch_order(
    schedule: str, num_meshes: int, num_microbatches: int, v: int, rank: int
) -> list[str]:
    """The order of one rank as torch's own class works it out, without stages or process groups."""
    cls = torch_schedules.get_schedule_class(schedule)
    schedule_of_torch = object.__new__(cls)
    schedule_of_torch.pp_group_size = schedule_of_torch._num_stages = (
        schedule_of_torch.num_stages
    ) = num_meshes
    schedule_of_torch._n_microbatches, schedule_of_torch.rank = num_microbatches, rank
    schedule_of_torch.num_stages = schedule_of_torch._num_stages = num_meshes * v
    schedule_of_torch.n_local_stages, schedule_of_torch._stages = v, [None] * v
    schedule_of_torch.number_of_rounds = max(1, num_microbatches // num_meshes)
    schedule_of_torch.microbatches_per_round = (
        num_microbatches // schedule_of_torch.number_of_rounds
    )
    if (
        schedule == "1F1B"
    ):  # as `Schedule1F1B._step_microbatches` runs it; its picture is off by one in torch 2.13
        warmup = min(num_microbatches, num_meshes - rank)
        steady = [
            f for m in range(num_microbatches) for f in (f"{rank}B{m}", f"{rank}F{warmup + m}")
        ]
        beyond = {f"{rank}F{m}" for m in range(num_microbatches, num_microbatches + warmup)}
        return [f"{rank}F{m}" for m in range(warmup)] + [
            action for action in steady if action not in beyond
        ]
    order = (
        schedule_of_torch._get_pipeline_order()[rank]
        if schedule == "GPipe"
        else schedule_of_torch._calculate_single_rank_operations(rank)
    )
    planned = [action for action in order if action is not None]
    return [str(action) for action in planned if action.is_compute_op]


@settings(max_examples=150, deadline=None)
@given(sizes.filter(lambda case: case[0][0] in IN_TORCH))
def test_orders_are_those_that_torch_executes(case):
    (schedule, v), num_meshes, num_microbatches = case
    for rank, order in enumerate(actions(schedule, num_meshes, num_microbatches, v)):
        assert [f"{a.stage}{a.kind}{a.microbatch}" for a in order] == torch_order(
            schedule, num_meshes, num_microbatches, v, rank
        )
        assert len(order) == num_microbatches * v * (3 if "Zero" in schedule else 2)
        assert {mesh_of(schedule, num_meshes, a.stage) for a in order} == {rank}


@settings(max_examples=150, deadline=None)
@given(sizes)
def test_what_is_alive_is_what_the_formulas_say(case):
    (schedule, v), num_meshes, num_microbatches = case
    timed = timeline(
        schedule, [1.0] * num_meshes * v, [2.0] * num_meshes * v, num_microbatches, num_meshes
    )
    for rank, promised in enumerate(in_flight(schedule, num_meshes, num_microbatches, v)):
        alive = most = 0
        for done in timed:
            if done.mesh == rank:
                # A full backward, or the second half of one.
                alive += (done.kind == "F") - (done.kind in "BW")
                most = max(most, alive)
        assert most == promised
        assert alive == 0


@settings(max_examples=150, deadline=None)
@given(sizes)
def test_equal_stages_take_the_closed_form(case):
    (schedule, v), num_meshes, num_microbatches = case
    num_stages = num_meshes * v
    timed = timeline(schedule, [1.0] * num_stages, [2.0] * num_stages, num_microbatches, num_meshes)
    expected = seconds(closed_form(schedule, num_meshes, num_microbatches, v), [3.0] * num_stages)
    assert max(s.end for s in timed) == pytest.approx(expected)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["GPipe", "1F1B"]),
    st.lists(st.floats(0.1, 5), min_size=1, max_size=6),
    st.integers(1, 20),
)
def test_unequal_stages_take_the_sum_and_the_slowest(schedule, forward, num_microbatches):
    total = [3 * f for f in forward]
    simulated = max(
        s.end for s in timeline(schedule, forward, [2 * f for f in forward], num_microbatches)
    )
    formula = seconds(closed_form(schedule, len(forward), num_microbatches), total)
    if schedule == "GPipe":
        assert simulated == pytest.approx(formula)
    assert formula - sum(total) + max(total) <= simulated + 1e-9
    assert simulated <= formula + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 5), min_size=2, max_size=5), st.floats(0, 1), st.integers(1, 16))
def test_a_boundary_costs_at_most_as_if_its_sender_waited_for_it(forward, wire, num_microbatches):
    """What the stage DP charges: the transfer of a boundary, both ways, is added to the stage
    before it.
    """
    backward = [2 * f for f in forward]
    timed = timeline(
        "1F1B", forward, backward, num_microbatches, boundary=[wire] * (len(forward) - 1)
    )
    charged = [3 * f + 2 * wire for f in forward]
    assert (
        max(s.end for s in timed)
        <= seconds(closed_form("1F1B", len(forward), num_microbatches), charged) + 1e-9
    )


def test_a_schedule_that_cannot_run_says_why():
    with pytest.raises(PlanError, match="multiple of 2"):
        actions("Interleaved1F1B", 4, 9, 2)
    with pytest.raises(PlanError, match="unknown"):
        closed_form("2F2B", 2, 4)


def test_messages_on_one_boundary_follow_each_other():
    """Links five times as slow as the stages: a step takes at least what its messages take one
    after the other.
    """
    timed = timeline("GPipe", [1.0, 1.0], [2.0, 2.0], 8, boundary=[5.0])
    assert max(done.end for done in timed) >= 1 + 8 * 5 + 1


@settings(max_examples=50, deadline=None)
@given(sizes, st.integers(0, 10**6))
def test_pipelines_timed_side_by_side_take_as_long_as_one_by_one(case, seed):
    (schedule, v), num_meshes, num_microbatches = case
    rng, stages = np.random.default_rng(seed), num_meshes * v
    forward, backward, wires = (rng.uniform(0, most, (4, stages)) for most in (1, 2, 3))
    together = seconds_of_many(schedule, forward, backward, num_microbatches, num_meshes, wires)
    for row in range(4):
        arguments = (forward[row], backward[row], num_microbatches, num_meshes, wires[row])
        assert together[row] == pytest.approx(
            max(done.end for done in timeline(schedule, *arguments)), rel=1e-12
        )
