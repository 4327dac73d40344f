"""A pipeline's step equals the same step in one process: stages on any ranks, any schedule, any
sharding inside.
"""

from __future__ import annotations

import pytest
from pipeline_net import StageCase, check_steps

TWO = [((0,), (0, 1)), ((1,), (2, 3))]


def run_case(stages, *args):
    return check_steps(tuple(StageCase(*stage) for stage in stages), *args)


@pytest.mark.parametrize("num_microbatches", [2, 6])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_two_stages(pool, schedule, num_microbatches):
    pool.run(2, run_case, TWO, schedule, num_microbatches, 4)


def looped(num_ranks, num_stages):
    return [((i % num_ranks,), (i,)) for i in range(num_stages)]


V_SHAPE = [((0,), (0,)), ((1,), (1,)), ((1,), (2,)), ((0,), (3,))]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("schedule", "stages", "num_microbatches"),
    [
        ("Interleaved1F1B", looped(2, 4), 4),
        ("LoopedBFS", looped(2, 4), 4),
        ("InterleavedZeroBubble", looped(2, 4), 4),
        ("ZBVZeroBubble", V_SHAPE, 4),
        ("Interleaved1F1B", looped(3, 6), 6),
        ("InterleavedZeroBubble", looped(3, 6), 3),
    ],
)
def test_several_stages_on_a_mesh(pool, schedule, stages, num_microbatches, tied):
    num_ranks = 1 + max(ranks[0] for ranks, _ in stages)
    pool.run(num_ranks, run_case, stages, schedule, num_microbatches, len(stages), tied)


UNEQUAL = {
    "1+3": [((0,), (0, 1)), ((1, 2, 3), (2, 3))],
    "3+1": [((0, 1, 2), (0,)), ((3,), (1, 2, 3))],
    "2+1": [((0, 1), (0, 1)), ((2,), (2, 3))],
    "1+2": [((0,), (0, 1)), ((1, 2), (2, 3))],
    "2+1+1": [((0, 1), (0,)), ((2,), (1, 2)), ((3,), (3,))],
    "1+1+2": [((0,), (0,)), ((1,), (1,)), ((2, 3), (2, 3))],
    "1+1+1+1": [((0,), (0,)), ((1,), (1,)), ((2,), (2,)), ((3,), (3,))],
}


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("stages", UNEQUAL)
def test_stages_of_unequal_sizes(pool, stages, schedule, tied):
    num_ranks = 1 + max(rank for ranks, _ in UNEQUAL[stages] for rank in ranks)
    pool.run(num_ranks, run_case, UNEQUAL[stages], schedule, 4, 4, tied)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("R",), ("T",)),
        (("T",), ("S0",)),
        (("S0", (), "G0"), ("S0", (), "G1")),
        (("S0", (), "S0"), ("T",)),
    ],
    ids=["repeated-TP", "TP-DP", "ZeRO2-ZeRO2", "ZeRO3-TP"],
)
@pytest.mark.parametrize("schedule", ["1F1B"])
def test_any_sharding_inside(pool, schedule, first, second):
    stages = [((0, 1), (0, 1), *first), ((2, 3), (2, 3), *second)]
    pool.run(4, run_case, stages, schedule, 4, 4, True)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_zero_bubble_with_sharding_inside(pool, schedule):
    if schedule == "ZBVZeroBubble":
        stages = [
            ((0, 1), (0,), "S0", (), "S0"),
            ((2,), (1,)),
            ((2,), (2,)),
            ((0, 1), (3,), "S0", (), "S0"),
        ]
    else:
        stages = [((0, 1), (0,), "T"), ((2,), (1,)), ((0, 1), (2,), "T"), ((2,), (3,))]
    pool.run(3, run_case, stages, schedule, 4, 4, True)
