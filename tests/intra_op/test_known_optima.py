"""Textbook plans come out of the solver under given alpha and beta, and no assignment is ever
cheaper.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from models import GPT
from torch import nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.devices import DeviceSpec, Link
from alpa_strategy.cluster.logical_mesh import CommTable
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.intra_op.build import build
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.intra_op.problem import Problem, evaluate
from alpa_strategy.intra_op.solver.solve import solve
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import modes_text
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.one_stage import plan_one_stage
from alpa_strategy.planner.task import PlanTask

ADAM = OptimizerInfo()


class Tower(pl.LightningModule):
    """`num_pairs` of wide linear pairs; loss: mean square of the output."""

    def __init__(self, width: int, hidden: int, num_pairs: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, hidden, bias=False),
                nn.ReLU(),
                nn.Linear(hidden, width, bias=False),
            )
            for _ in range(num_pairs)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        for pair in self.pairs:
            x = pair(x)
        return F.mse_loss(x, y)


def cluster_of(
    num_devices: int,
    *,
    latency: float = 1e-5,
    bandwidth: float = 1e10,
    memory: float = 1e12,
    num_nodes: int = 1,
    inter: Link | None = None,
) -> ClusterSpec:
    device = DeviceSpec(
        name="test",
        memory_bytes=int(memory),
        memory_bandwidth=1e12,
        peak_flops=(("float32", 1e14), ("float64", 1e14)),
        launch_seconds=1e-6,
    )
    link = Link(latency, bandwidth)
    return ClusterSpec("test", num_nodes, num_devices // num_nodes, device, link, inter or link)


def plan_tower(width: int, hidden: int, pairs: int, rows: int, cluster: ClusterSpec, **options):
    with torch.device("meta"):
        model = Tower(width, hidden, pairs)
        batch = (torch.empty(rows, width), torch.empty(rows, width))
    step = capture_step(model, batch, world_size=cluster.num_devices)
    return plan_one_stage(PlanTask(step, cluster, PlanOptions(**options), ADAM))


def test_large_batch_gives_data_parallel_with_one_reduction():
    plan = plan_tower(256, 256, 2, rows=65536, cluster=cluster_of(4), logical_mesh=(4,))
    kinds = {(c.kind, c.phase) for c in plan.collectives() if c.num_bytes > 1024}
    assert kinds <= {("all_reduce", "step"), ("all_gather", "step"), ("reduce_scatter", "step")}
    for parameter in plan.stages[0].parameter_plans.values():
        assert str(parameter.modes[0]) in ("R*", "G0"), "used whole by every device on its own rows"


def test_data_parallel_reduces_each_gradient_once():
    plan = plan_tower(
        256, 256, 2, rows=65536, cluster=cluster_of(4), parallel="data", logical_mesh=(4,)
    )
    (step_reduce,) = [c for c in plan.collectives() if c.phase == "step"]
    assert (step_reduce.kind, step_reduce.count, step_reduce.num_bytes) == (
        "all_reduce",
        4,
        4 * 256 * 256 * 4,
    )
    # The losses of four ranks, and their mean.
    assert all(c.num_bytes <= 16 for c in plan.collectives() if c.phase != "step")


def test_gradients_are_reduced_at_the_end_if_small_messages_are_faster():
    """Measured: 1 MB goes at twice the rate of 32 MB (caches). That is no reason to reduce within
    the backward.
    """
    points = ((2**10, 2e-5), (2**20, 2**20 / 4e9), (2**22, 2**22 / 4e9), (2**25, 2**25 / 2e9))
    measured = replace(cluster_of(2), tables=(CommTable("all_reduce", 2, 1, points),))
    plan = plan_tower(256, 256, 2, rows=65536, cluster=measured, parallel="data", logical_mesh=(2,))
    assert {modes_text(p.modes) for p in plan.stages[0].parameter_plans.values()} == {"R*"}
    assert all(c.num_bytes <= 8 for c in plan.collectives() if c.phase == "backward")


def test_wide_hidden_gives_column_then_row_with_one_reduction_a_pair():
    """The last one scatters: every rank has the loss of its own samples."""
    pairs = 3
    plan = plan_tower(
        2048, 65536, pairs, rows=16, cluster=cluster_of(4, latency=1e-4), logical_mesh=(4,)
    )
    for name, layout in plan.stages[0].parameters.items():
        assert str(layout) == ("S0" if name.endswith(".0.weight") else "S1"), name
    forward = [
        c
        for c in plan.collectives()
        if c.phase == "forward" and c.kind != "all_gather" and c.num_bytes > 1024
    ]
    assert sum(c.count for c in forward) == pairs
    assert not [c for c in plan.collectives() if c.phase == "step"], (
        "no weight gradient is ever moved"
    )


def test_two_axes_give_both():
    """Slow links between nodes: data parallel across, tensor parallel inside."""
    cluster = cluster_of(4, num_nodes=2, bandwidth=1e11, inter=Link(1e-4, 2e9))
    with torch.device("meta"):
        model = Tower(1024, 16384, 2)
        batch = (torch.empty(4096, 1024), torch.empty(4096, 1024))
    step = capture_step(model, batch, world_size=4)
    plan = plan_one_stage(PlanTask(step, cluster, PlanOptions(logical_mesh=(2, 2)), ADAM))
    for parameter in plan.stages[0].parameter_plans.values():
        outer, inner = map(str, parameter.modes)
        assert outer[0] in "RG"
        assert inner[0] == "S"


@pytest.mark.parametrize("share", [0.9, 0.45, 0.3])
def test_tight_memory_shards_optimizer_state_then_parameters(share):
    rows = 64
    width = 1024
    hidden = 4096
    pairs = 4
    weights = 2 * pairs * width * hidden * 4
    whole = weights * 4  # weights, gradients, two Adam moments
    cluster = cluster_of(4, bandwidth=1e13, latency=1e-7)
    kwargs = {"rows": rows, "logical_mesh": (4,), "parallel": "auto"}
    plan = plan_tower(width, hidden, pairs, cluster=cluster, memory_limit=share * whole, **kwargs)
    assert plan.predicted.peak_bytes <= share * whole
    modes = {str(p.modes[0])[0] for p in plan.stages[0].parameter_plans.values()}
    assert modes & {"G", "S"}
    if share <= 0.3:
        assert "S" in modes, "not even one whole copy fits"


def test_memory_alone_moves_data_parallel_to_zero():
    """With batch parallelism pinned by a huge batch, memory decides between R*, G and S."""
    rows = 16384
    width = 512
    hidden = 2048
    pairs = 4
    parameters = 2 * pairs * width * hidden
    free = plan_tower(width, hidden, pairs, rows, cluster_of(4, bandwidth=1e11), logical_mesh=(4,))
    zero3 = plan_tower(
        width,
        hidden,
        pairs,
        rows,
        cluster_of(4, bandwidth=1e11),
        logical_mesh=(4,),
        parallel="zero3",
    )
    limit = (free.predicted.peak_bytes + zero3.predicted.peak_bytes) / 2
    tight = plan_tower(
        width,
        hidden,
        pairs,
        rows,
        cluster_of(4, bandwidth=1e11),
        logical_mesh=(4,),
        memory_limit=limit,
    )
    assert zero3.predicted.peak_bytes < limit < free.predicted.peak_bytes, parameters
    assert tight.predicted.peak_bytes <= limit
    assert tight.predicted.step_seconds >= free.predicted.step_seconds
    assert any(not p.is_unsharded for p in tight.stages[0].parameter_plans.values())


@pytest.mark.parametrize(
    ("mesh_shape", "memory_share", "keep"),
    [
        ((2,), 0.6, 3),
        ((2, 2), None, 3),
        pytest.param((2,), None, 5, marks=pytest.mark.slow),
        pytest.param((2,), 0.6, 5, marks=pytest.mark.slow),
        pytest.param((2, 2), None, 4, marks=pytest.mark.slow),
        pytest.param((2, 2), 0.6, 4, marks=pytest.mark.slow),
    ],
)
def test_brute_force_never_beats_the_solver(mesh_shape, memory_share, keep):
    """Every assignment of a small real graph, after thinning each choice to `keep` strategies."""
    cluster = cluster_of(prod(mesh_shape))
    with torch.device("meta"):
        model = Tower(8, 16, 1)
        batch = (torch.empty(8, 8), torch.empty(8, 8))
    step = capture_step(model, batch, world_size=prod(mesh_shape))
    costs = RooflineCosts(cluster.device)
    intra = build(step, OptionTables(cluster.logical_mesh(mesh_shape), costs, ADAM))
    problem = thin(intra.problem, keep)
    outcomes = [
        evaluate(problem, a) for a in product(*(range(len(c.cost)) for c in problem.choices))
    ]
    outcomes = [outcome for outcome in outcomes if outcome[0] < float("inf")]
    if memory_share is not None:  # between the least bytes and those of the unconstrained optimum
        least, free = min(b for _, b in outcomes), min(outcomes)[1]
        problem = replace(problem, memory_limit=least + memory_share * (free - least))
    best = min(seconds for seconds, num_bytes in outcomes if num_bytes <= problem.memory_limit)
    assert solve(problem).seconds == pytest.approx(best, rel=1e-6)


def thin(problem: Problem, keep: int) -> Problem:
    """Keep at most `keep` strategies of every choice (spread over the list), so that all can be
    enumerated.
    """
    kept = []
    for choice in problem.choices:
        n = len(choice.cost)
        kept.append(
            sorted({round(i * (n - 1) / max(1, keep - 1)) for i in range(keep)})
            if n > keep
            else list(range(n))
        )
    choices = tuple(
        replace(c, cost=c.cost[k], memory=c.memory[k])
        for c, k in zip(problem.choices, kept, strict=True)
    )
    transfers = tuple(
        replace(
            t,
            source=t.source[kept[t.producer]],
            uses=tuple(replace(u, layout=u.layout[kept[u.choice]]) for u in t.uses),
        )
        for t in problem.transfers
    )
    return replace(problem, choices=choices, transfers=transfers)


def test_solved_plan_is_no_slower_than_any_named_plan():
    cluster = cluster_of(4)
    with torch.device("meta"):
        model = GPT(vocab_size=512, d_model=128, num_layers=2, seq_len=64)
    batch = tuple(torch.empty(4, 64, dtype=torch.long, device="meta") for _ in range(2))
    step = capture_step(model, batch, world_size=4)
    plan = plan_one_stage(PlanTask(step, cluster, PlanOptions(baselines=True), ADAM))
    assert set(plan.baselines) == {"data", "zero2", "zero3", "tensor"}
    for name, seconds in plan.baselines.items():
        assert seconds is None or plan.predicted.step_seconds <= seconds * (1 + 1e-9), name
