"""The recompute segments that are taken need as little memory as any of their halvings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from inter_op.test_tight_memory import OPTIMIZERS, captured, cluster

from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.inter_op.recompute_segments import RecomputeSegments, _halvings, _segmentation
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_problem import cost_of
from alpa_strategy.inter_op.stage_solve import PricedStage, StageRequest, StageSolver
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions

NUM_LAYERS = 12
NUM_MICROBATCHES = 4


def priced_stage() -> PricedStage:
    """A stage of many layers, each of which may be a segment."""
    graph = microbatch(captured(NUM_LAYERS), NUM_MICROBATCHES).graph
    spec = replace(cluster(), num_nodes=1)
    cuts = cluster_layers(graph)
    job = StageCostTask(
        graph,
        cuts,
        NUM_MICROBATCHES,
        spec,
        RooflineCosts(spec.device),
        PlanOptions(),
        OPTIMIZERS["adam"],
        math.inf,
    )
    request = StageRequest(
        0, len(graph.ops), (1, 2), (2,), remat=True, alive=1, cuts=tuple(cuts[1:-1])
    )
    return StageSolver(job).price(request)


@pytest.mark.parametrize("order", [1, -1])
def test_no_halving_needs_less_memory(order: int) -> None:
    priced = priced_stage()
    assert len(priced.request.starts) > 6
    segments = RecomputeSegments()
    numbers = set()
    for alive in (1.0, 2.0, 4.0, 16.0, 64.0)[::order]:
        finest = cost_of(priced.finest, priced.free.assignment)
        of_halvings = {priced.request.starts: finest.num_bytes(alive, True)}
        for count in list(_halvings(len(priced.request.starts)))[1:]:
            starts, cost = _segmentation(priced, finest, count)
            of_halvings[starts] = cost.num_bytes(alive, True)
        chosen = segments.least_memory(priced, alive)
        assert of_halvings[chosen] == min(of_halvings.values())
        numbers.add(len(chosen))
    # The more micro-batches are in flight, the fewer segments.
    assert len(numbers) > 1
