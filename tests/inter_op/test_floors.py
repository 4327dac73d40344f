"""Lower bounds of stages that fit into memory: below whatever layouts are found, and above the
bound without memory where that binds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec, Link
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.errors import DoesNotFitError
from alpa_strategy.inter_op.floors import StageFloors
from alpa_strategy.inter_op.stage_costs import (
    LayerRangeCosts,
    StageCostTask,
    run_costs,
    with_extra_floors,
)
from alpa_strategy.inter_op.stage_solve import StageRequest, StageSolver
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions

SUBMESH = (1, 2)
# Of the exact ILP: layers are priced with fewer layouts at their ends (layer_matrix.py).
APPROXIMATION = 0.05


def job_of(limit: float, optimizer: OptimizerInfo) -> StageCostTask:
    module = MODELS["gpt"](num_layers=3, d_model=64, seq_len=32, vocab_size=64)
    batch = module.example_batch(16, torch.Generator().manual_seed(0))
    step = capture_step(module, batch, world_size=1, batch_scope="global")
    graph = microbatch(step, 8).graph
    spec = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    spec = replace(spec, intra_node=Link(20e-6, 1e9))
    costs = RooflineCosts(spec.device)
    return StageCostTask(
        graph, cluster_layers(graph), 8, spec, costs, PlanOptions(), optimizer, limit
    )


@pytest.fixture(scope="module", params=[0.0, 3.0], ids=["activations", "the optimizer's step"])
def tight(request) -> StageCostTask:
    """A limit between what all layers need in their fastest layouts and the least they can do."""
    job = job_of(1e12, OptimizerInfo(scratch=request.param))
    costs = run_costs(job, SUBMESH)
    fastest = int(np.nanargmin(costs.seconds[0, -1]))
    need = costs.always + 4 * costs.in_flight
    most = max(need[0, -1, fastest], costs.at_update[0, -1, fastest])
    return replace(job, memory_limit=0.7 * float(most))


def priced(job: StageCostTask) -> LayerRangeCosts:
    """The costs on two devices, with all floors."""
    return with_extra_floors(job, SUBMESH, run_costs(job, SUBMESH))


def test_no_priced_stage_that_fits_is_below_its_floor(tight):
    costs = priced(tight)
    floors = StageFloors(tight, [costs])
    total = tight.num_microbatches * costs.seconds + costs.once
    num_fitting = 0
    for alive in (1, 2, 4, 8):
        fits = np.isfinite(total) & (costs.at_update <= tight.memory_limit)
        fits &= costs.always + alive * costs.in_flight <= tight.memory_limit
        floor = np.broadcast_to(floors.seconds(alive), total.shape)
        assert (total[fits] >= floor[fits] * (1 - 1e-9)).all()
        num_fitting += fits.sum()
    assert num_fitting > 10


@pytest.mark.parametrize("remat", [False, True])
def test_no_solved_stage_that_fits_is_below_its_floor(tight, remat):
    job = replace(tight, remat=remat)
    floors = StageFloors(job, [priced(job)])
    solver = StageSolver(job)
    num_solved = 0
    for first, last in ((0, 1), (0, 2), (1, 3), (0, job.num_layers)):
        for alive in (1, 4):
            request = StageRequest(
                job.cuts[first],
                job.cuts[last],
                SUBMESH,
                (2,),
                remat,
                alive,
                cuts=job.cuts[first + 1 : last],
            )
            try:
                solved = solver.solve(request)
            except DoesNotFitError:
                continue
            floor = floors.seconds(alive)[first, last, 0]
            assert solved.objective >= floor * (1 - APPROXIMATION)
            num_solved += 1
    assert num_solved > 2


def test_where_memory_binds_a_floor_is_above_the_fastest_layouts(tight):
    costs = priced(tight)
    floor = StageFloors(tight, [costs]).seconds(8)[0, -1, 0]
    assert floor > 1.01 * costs.least.sum()


def test_where_everything_fits_nothing_more_is_priced():
    costs = priced(job_of(1e12, OptimizerInfo()))
    assert costs.floor_prices.shape[1] == 0
    assert (StageFloors(job_of(1e12, OptimizerInfo()), [costs]).seconds(8) == 0).all()


def test_stages_that_share_a_mesh_share_its_memory(tight):
    """A half of the memory for each of two stages is less than all of it for one."""
    floors = StageFloors(tight, [priced(tight)])
    alone, shared = floors.seconds(4), floors.seconds(8, stages_per_mesh=2)
    assert (shared >= alone).all()
    assert (shared > alone).any()
