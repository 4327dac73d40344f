"""Plans with given stages: which ranks each stage has, how it is parallel inside, whether it
recomputes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from equality.harness import SAMPLES_PER_STEP
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_solve import StageRequest, StageSolver
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Plan, Predicted
from alpa_strategy.ir.stage_graph import slice_stage
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.optimizer_info import optimizer_info_of
from alpa_strategy.planner.task import PlanTask

# Ranks of each stage.
Places = tuple[tuple[int, ...], ...]


def staged_plan(
    model: str,
    kwargs: dict[str, Any],
    places: Places,
    schedule: str,
    num_microbatches: int,
    inside: str = "auto",
    remat: bool = False,
    batch_scope: str = "rank",
) -> Plan:
    """Return the plan of a `record` run; stages have about equal work, layouts are the solver's.

    Args:
        model, kwargs: name in `MODELS`, and its arguments.
        places: ranks of each stage.
        schedule, num_microbatches, batch_scope: of the run.
        inside: `parallel` within a stage.
        remat: whether stages are recomputed, in up to three segments each.
    """
    world = 1 + max(max(ranks) for ranks in places)
    module, step = _captured(model, kwargs, world, batch_scope)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": world})
    options = PlanOptions.from_user(parallel=inside, batch_scope=batch_scope)
    optimizer = optimizer_info_of(module)
    graph = microbatch(step, num_microbatches, world if batch_scope == "rank" else 1).graph
    cuts = cluster_layers(graph, len(places))
    costs = RooflineCosts(cluster.device)
    solver = StageSolver(
        StageCostTask(
            graph, cuts, num_microbatches, cluster, costs, options, optimizer, math.inf, remat
        )
    )
    stored: dict[tuple[int, ...], dict] = {ranks: {} for ranks in places}
    stages = []
    for (first, last), ranks in zip(pairwise(cuts), places, strict=True):
        size = len(ranks)
        inner = cluster_layers(slice_stage(graph, first, last), min(3, last - first))[1:-1]
        if remat:
            spans = tuple(first + cut for cut in inner)
        else:
            spans = ()
        num_stages = places.count(ranks)
        wish = StageRequest(
            *(first, last, (1, size), (size,), remat, num_microbatches, num_stages),
            *(stored[ranks], spans),
        )
        # all segments, also if fewer would need less memory
        plan = replace(solver.solve(wish).plan, recompute_splits=spans)
        stored[ranks].update(plan.parameter_plans)
        stages.append(replace(plan, first_device=ranks[0]))
    return Plan(
        PlanTask(step, cluster, options, optimizer).fingerprint,
        tuple(stages),
        Predicted(1.0, 1),
        num_microbatches,
        schedule,
    )


def _captured(
    model: str, kwargs: dict[str, Any], world: int, batch_scope: str
) -> tuple[Any, StepGraph]:
    """Return (module, captured step) of a run on `world` ranks in float64."""
    num_samples = SAMPLES_PER_STEP
    if batch_scope != "global":
        num_samples //= world
    torch.set_default_dtype(torch.float64)
    try:
        module = MODELS[model](**kwargs)
        batch = module.example_batch(num_samples, torch.Generator().manual_seed(3))
        step = capture_step(module, batch, world_size=world, batch_scope=batch_scope)
    finally:
        torch.set_default_dtype(torch.float32)
    return module, replace(step, batch_scope=batch_scope)
