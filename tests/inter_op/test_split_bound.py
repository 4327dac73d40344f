"""The bound over all splits of layers into several stages on each of equal meshes."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from alpa_strategy.inter_op.split_bound import EqualMeshPipelines, kinds_of, least_over_splits
from alpa_strategy.schedules import seconds_of_many

SCHEDULES = (("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2))


def simulated(pipelines, seconds, splits):
    """Return [split] the seconds of a step.

    Args:
        splits: positions between layers, [split][stage + 1].
    """
    stages = []
    for cuts in splits:
        stages.append([seconds[first:last].sum() for first, last in pairwise(cuts)])
    stages = np.array(stages)
    forward = stages / 3 + pipelines.overhead / 2
    backward = 2 / 3 * stages + pipelines.overhead / 2
    wires = np.broadcast_to(pipelines.wires, stages.shape)
    return seconds_of_many(
        pipelines.schedule,
        forward,
        backward,
        pipelines.num_microbatches,
        pipelines.num_meshes,
        wires,
    )


def all_splits(num_layers, num_stages):
    inner = combinations(range(1, num_layers), num_stages - 1)
    return [(0, *cuts, num_layers) for cuts in inner]


@pytest.mark.parametrize(("schedule", "stages_per_mesh"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_no_split_is_below_the_bound_and_the_best_is_near(schedule, stages_per_mesh, seed):
    generator = np.random.default_rng(seed)
    seconds = generator.choice([1.0, 1.3, 2.0], size=10)
    wires = np.full(2 * stages_per_mesh, 0.05)
    pipelines = EqualMeshPipelines(schedule, 2, stages_per_mesh, 6, 0.01, wires)
    bound = least_over_splits(pipelines, kinds_of(seconds, np.zeros(10)), np.inf)
    ends = simulated(pipelines, seconds, all_splits(10, 4))
    assert bound <= ends.min() * (1 + 1e-9)
    # Whole layers of up to a fifth of a stage's work cannot be split as the bound may.
    assert bound >= 0.93 * ends.min()


@pytest.mark.parametrize(("schedule", "stages_per_mesh"), SCHEDULES)
def test_one_layer_a_stage_is_the_simulated_step(schedule, stages_per_mesh):
    num_stages = 4 * stages_per_mesh
    pipelines = EqualMeshPipelines(schedule, 4, stages_per_mesh, 8, 1e-3, np.full(num_stages, 1e-2))
    seconds = np.full(num_stages, 0.3)
    bound = least_over_splits(pipelines, kinds_of(seconds, np.zeros(num_stages)), np.inf)
    (end,) = simulated(pipelines, seconds, [tuple(range(num_stages + 1))])
    assert bound == pytest.approx(end, rel=1e-5)


def test_what_is_done_once_comes_after_the_last_micro_batch():
    pipelines = EqualMeshPipelines("Interleaved1F1B", 2, 2, 4, 0.0, np.zeros(4))
    seconds = np.full(4, 1.0)
    without = least_over_splits(pipelines, kinds_of(seconds, np.zeros(4)), np.inf)
    once = np.full(4, 0.5)
    with_once = least_over_splits(pipelines, kinds_of(seconds, once), np.inf)
    # Every mesh has two of the four layers.
    assert with_once == pytest.approx(without + 1.0, rel=1e-5)


def test_a_bound_that_is_enough_need_not_be_better():
    pipelines = EqualMeshPipelines("ZBVZeroBubble", 4, 2, 12, 0.0, np.zeros(8))
    layers = kinds_of(np.full(32, 1.0), np.zeros(32))
    best = least_over_splits(pipelines, layers, np.inf)
    early = least_over_splits(pipelines, layers, 0.5 * best)
    assert 0.5 * best * (1 - 1e-5) <= early <= best * (1 + 1e-9)


@pytest.mark.parametrize(("schedule", "stages_per_mesh"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_with_a_known_step_the_bound_counts_whole_layers(schedule, stages_per_mesh, seed):
    generator = np.random.default_rng(seed)
    seconds = generator.choice([1.0, 1.1, 1.3], size=9)
    pipelines = EqualMeshPipelines(schedule, 3, stages_per_mesh, 6, 0.01, np.full(6, 0.05))
    layers = kinds_of(seconds, np.zeros(9))
    best = simulated(pipelines, seconds, all_splits(9, 6)).min()
    of_parts = least_over_splits(pipelines, layers, np.inf)
    of_whole_layers = least_over_splits(pipelines, layers, best)
    # Both end within 0.2 % of their best.
    assert of_parts * (1 - 3e-3) <= of_whole_layers <= best * (1 + 1e-9)
    assert of_whole_layers >= 0.9 * best
