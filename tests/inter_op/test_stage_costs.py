"""Costs of runs of layers against the exact ILP of the same stage, and whole pipeline plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from covering import covering, in_tiers, slow_but
from hypothesis import given
from hypothesis import strategies as st
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.devices import Link
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.flops import op_base_name
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.layer_pricing import run_parts
from alpa_strategy.inter_op.pins import stage_fits, submeshes
from alpa_strategy.inter_op.stage_costs import StageCostTask, run_costs, stage_costs
from alpa_strategy.inter_op.stage_problem import (
    RematSpans,
    balanced_groups,
    cost_of,
    stage_build,
    take_apart,
    weighted,
)
from alpa_strategy.inter_op.stage_solve import StageRequest, StageSolver
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.intra_op.problem import evaluate
from alpa_strategy.intra_op.restrict import restrict
from alpa_strategy.intra_op.solver.solve import solve
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.stage_graph import stage_on
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.pipeline_search import plan_pipeline
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import in_flight, refusal

ADAM = OptimizerInfo()
SIZES = {
    "gpt": {"num_layers": 4, "d_model": 64, "seq_len": 32, "vocab_size": 128},
    "llama": {"num_layers": 3},
    "mlp": {"d_hidden": 256, "num_layers": 6},
    "convnet": {},
}


def cluster(num_nodes: int = 2, per_node: int = 2) -> ClusterSpec:
    """Small, with a slow link between nodes: a network that binds."""
    whole = ClusterSpec.load("pcie_8gpu", {"num_nodes": num_nodes, "devices_per_node": per_node})
    return replace(whole, inter_node=Link(20e-6, 1e9))


@cache
def captured(name: str, rows: int = 16):
    module = MODELS[name](**SIZES[name])
    batch = module.example_batch(rows, torch.Generator().manual_seed(0))
    return capture_step(module, batch, world_size=1, batch_scope="global")


def job_of(name: str, num_microbatches: int = 4, limit: float = np.inf) -> StageCostTask:
    graph = microbatch(captured(name), num_microbatches).graph
    spec = cluster()
    return StageCostTask(
        graph,
        cluster_layers(graph),
        num_microbatches,
        spec,
        RooflineCosts(spec.device),
        PlanOptions(),
        ADAM,
        limit,
    )


# Of a Llama on four devices, 8 s, the plan is in test_scale.py.
QUICK_RUNS = [row for row in covering(product(SIZES, ((2,), (2, 2)))) if row[0] != "llama"]


@pytest.mark.parametrize(("name", "shape"), slow_but(product(SIZES, ((2,), (2, 2))), QUICK_RUNS))
def test_runs_are_priced_at_or_just_above_their_ilp(name, shape):
    """The named approximation of layer_matrix.py, measured: never below the optimum, at most a few
    percent above.
    """
    job = job_of(name)
    submesh = (1, 2) if shape == (2,) else (2, 2)
    parts = run_parts(job, submesh, shape)
    B = job.num_microbatches
    tables = OptionTables(job.cluster.logical_mesh(shape, submesh), job.costs, ADAM)
    gaps = []
    runs = [
        (0, 1),
        (0, job.num_layers),
        (1, job.num_layers),
        (job.num_layers - 1, job.num_layers),
        (1, 2),
    ]
    for first, last in runs:
        if last <= first:
            continue
        graph = stage_on(job.graph, job.cuts[first], job.cuts[last], int(np.prod(shape)))
        stage = take_apart(stage_build(graph, tables))
        exact = solve(weighted(stage, B, 1))
        priced = min(B * (p[first, last, 0] + p[first, last, 1]) + p[first, last, 2] for p in parts)
        gaps.append(priced / exact.seconds - 1)
    assert min(gaps) >= -1e-6
    assert max(gaps) <= 0.05, gaps
    assert gaps[0] <= 0.03


@pytest.mark.parametrize(
    "parallel", ["data", "zero3"]
)  # (the penalties of "tensor" are those of each layer)
def test_named_plans_are_priced_as_their_ilp(parallel):
    """What a named plan forbids is left out before the layers are solved: the price is that of the
    restricted ILP.
    """
    job = job_of("gpt")
    job = replace(job, options=replace(job.options, parallel=parallel))
    parts = run_parts(job, (1, 2), (2,))[:, 0, job.num_layers]
    tables = OptionTables(job.cluster.logical_mesh((2,), (1, 2)), job.costs, ADAM)
    whole = restrict(
        stage_build(stage_on(job.graph, 0, job.cuts[-1], 2), tables), job.options, ADAM
    )
    exact = solve(weighted(take_apart(whole), job.num_microbatches, 1)).seconds
    priced = min(job.num_microbatches * (p[0] + p[1]) + p[2] for p in parts)
    assert exact * (1 - 1e-6) <= priced <= exact * 1.03


@pytest.mark.parametrize("starts", [(0,), (0, 9), (0, 5, 9, 20)], ids=str)
def test_the_parts_of_a_stage_add_up(starts):
    """With equal shares the problem's bytes have the mean of the spans' graphs where the cost has
    the largest.
    """
    job = job_of("gpt")
    tables = OptionTables(job.cluster.logical_mesh((2,), (1, 2)), job.costs, ADAM)
    intra = stage_build(stage_on(job.graph, job.cuts[1], job.cuts[3], 2), tables)
    stage = take_apart(RematSpans(intra, starts).split(), starts)
    rng = np.random.default_rng(0)
    for remat in (False, True):
        problem = weighted(stage, 8, 3, remat)
        for _ in range(5):
            assignment = [
                int(rng.choice(np.flatnonzero(np.isfinite(c.cost)))) for c in problem.choices
            ]
            cost = cost_of(stage, assignment)
            seconds, num_bytes = evaluate(problem, assignment)
            left_out = max(cost.again) - sum(cost.again) / len(starts) if remat else 0.0
            assert seconds == pytest.approx(8 * cost.seconds(remat) + cost.once)
            assert num_bytes + left_out == pytest.approx(cost.num_bytes(3, remat))


def test_what_is_made_of_parameters_is_paid_once_per_step():
    """Under one assignment: what the micro-batches are rid of is paid once, and its results are
    kept.
    """
    module = MODELS["gpt"](**SIZES["gpt"])
    half = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    step = capture_step(
        module, module.example_batch(16), world_size=1, batch_scope="global", context=half
    )
    job = job_of("gpt")
    graph = microbatch(step, 4).graph
    tables = OptionTables(job.cluster.logical_mesh((2,), (1, 2)), job.costs, ADAM)
    once, again = (
        stage_build(stage_on(graph, 0, len(graph.ops), 2), tables, derives)
        for derives in (False, True)
    )
    assert not again.per_step.ops
    casts = {
        graph.ops[op].operands[0]
        for op in once.per_step.ops
        if op_base_name(graph.ops[op].call) == "to"
    }
    linear = {op.operands[1] for op in step.ops if op_base_name(op.call) == "linear"}
    assert len(casts) >= len(linear) > 0
    assert casts <= {p.value for p in graph.parameters}
    rng = np.random.default_rng(0)
    for _ in range(5):
        assignment = [
            int(rng.choice(np.flatnonzero(np.isfinite(c.cost)))) for c in once.problem.choices
        ]
        a, b = (cost_of(take_apart(intra), assignment) for intra in (once, again))
        assert a.once > b.once
        assert a.forward < b.forward
        assert a.forward + a.once == pytest.approx(b.forward + b.once)
        assert a.always > b.always
        assert a.saved < b.saved


def test_spans_share_a_stages_graph_and_keep_what_passes_between_them():
    """Under one assignment: the cut stage's graphs add up to the whole's, but for what is kept
    instead.
    """
    job = job_of("mlp")
    tables = OptionTables(job.cluster.logical_mesh((2,), (1, 2)), job.costs, ADAM)
    intra = stage_build(stage_on(job.graph, 0, len(job.graph.ops), 2), tables)
    assignment = solve(weighted(take_apart(intra), 4, 1)).assignment
    starts = job.cuts[:-1]
    whole, cut = (
        cost_of(take_apart(RematSpans(intra, s).split(), s), assignment) for s in ((0,), starts)
    )
    assert len(cut.again) == len(starts) > 2
    assert whole.segment_inputs < cut.segment_inputs
    assert max(cut.again) < whole.again[0] <= sum(cut.again) + cut.segment_inputs
    assert cut.num_bytes(1, True) < whole.num_bytes(1, True)
    assert cut.num_bytes(100, True) > whole.num_bytes(100, True)
    assert cut.saved >= whole.saved


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=12), st.integers(1, 12))
def test_groups_are_balanced(weights, count):
    starts = balanced_groups(weights, count)
    assert starts[0] == 0
    assert len(starts) <= count
    assert list(starts) == sorted(set(starts))
    heaviest = max(sum(weights[a:b]) for a, b in pairwise((*starts, len(weights))))
    for cuts in combinations(range(1, len(weights)), min(count, len(weights)) - 1):
        other = max(sum(weights[a:b]) for a, b in pairwise((0, *cuts, len(weights))))
        assert heaviest <= other * (1 + 1e-9) + 1e-9


def test_a_stage_recomputes_in_the_spans_that_need_least_memory():
    """Layer by layer with few micro-batches in flight, in fewer spans with many; within a limit
    that binds.
    """
    job = job_of("mlp")
    solver = StageSolver(job)
    request = StageRequest(0, job.cuts[-1], (1, 2), (2,), True, 1, cuts=job.cuts[1:-1])
    few, many = (solver.solve(replace(request, alive=alive)) for alive in (1, 1000))
    assert len(few.plan.spans) > len(many.plan.spans)
    assert set(few.plan.recompute_splits) <= set(job.cuts)
    whole = solver.solve(replace(request, cuts=()))
    assert whole.plan.spans == ((0, job.cuts[-1]),)
    assert few.plan.predicted.peak_bytes < whole.plan.predicted.peak_bytes
    limit = 0.9 * few.plan.predicted.peak_bytes
    tight = StageSolver(replace(job, memory_limit=limit)).solve(request)
    assert tight.plan.predicted.peak_bytes <= limit
    assert tight.plan.predicted.step_seconds >= few.plan.predicted.step_seconds


def test_more_micro_batches_in_flight_are_paid_with_time():
    job = job_of("gpt")
    free = run_costs(job, (1, 2))
    whole = (0, job.num_layers)
    need = free.always[whole] + job.num_microbatches * free.in_flight[whole]
    at = int(np.where(np.isfinite(free.seconds[whole]), free.seconds[whole], np.inf).argmin())
    tight = run_costs(replace(job, memory_limit=float(0.8 * need[at])), (1, 2))
    assert tight.seconds[whole].min() >= free.seconds[whole].min() * (1 - 1e-9)
    fitting = np.isfinite(tight.seconds[whole])
    assert (tight.always[whole] + tight.in_flight[whole])[fitting].max() <= 0.8 * need[at]


def test_what_was_priced_is_not_priced_again(monkeypatch):
    job, known = job_of("mlp"), {}
    (first,) = stage_costs(job, [(1, 1)], known)
    worked_out: list[tuple[int, int]] = []

    def noted(job, submesh, prices):
        worked_out.append(submesh)
        return run_costs(job, submesh, prices)

    monkeypatch.setattr("alpa_strategy.inter_op.stage_costs.run_costs", noted)
    again = stage_costs(job, [(1, 1), (1, 2)], known)
    assert again[0] is first
    assert worked_out == [(1, 2)]
    stage_costs(job, [(1, 2)], known, unlikely=[(1, 2)])
    assert worked_out == [(1, 2), (1, 2)], "a bound alone is priced otherwise"


def test_submeshes_lie_inside_nodes_or_are_whole_nodes():
    assert submeshes(cluster(1, 4)) == ((1, 1), (1, 2), (1, 3), (1, 4))
    assert submeshes(cluster(8, 8)) == ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
    assert submeshes(cluster(1, 6)) == ((1, 1), (1, 2), (1, 3), (1, 4), (1, 6))
    fits = stage_fits(cluster(2, 4), ((1, 2), (1, 4), (2, 4)))
    assert fits[8].tolist() == [True, True, True]
    assert fits[5].tolist() == [False, False, False]
    assert fits[6].tolist() == [True, False, False]


PINNED = [
    {},
    {"num_stages": 2, "num_microbatches": 4},
    {"num_stages": 4, "num_microbatches": 8, "schedule": "1F1B", "remat": True},
    {"num_microbatches": 4, "schedule": "GPipe", "num_stages": 2, "remat": False},
    {"schedule": "Interleaved1F1B", "num_microbatches": 8, "num_stages": 4},
    {"schedule": "ZBVZeroBubble", "num_microbatches": 8, "num_stages": 4},
]


@pytest.mark.parametrize(("name", "pinned"), in_tiers(product(("mlp", "gpt"), range(len(PINNED)))))
def test_plans_are_whole_and_keep_to_the_options(name, pinned):
    options = PINNED[pinned]
    step, spec = captured(name), cluster()
    plan = plan_pipeline(
        PlanTask(step, spec, PlanOptions.from_user(batch_scope="global", **options), ADAM)
    )
    graph = microbatch(step, plan.num_microbatches).graph
    assert [a.ops[1] == b.ops[0] for a, b in pairwise(plan.stages)] == [True] * (
        len(plan.stages) - 1
    )
    assert (plan.stages[0].ops[0], plan.stages[-1].ops[1]) == (0, len(graph.ops))
    # stages of one mesh have the same first device
    submeshes = {s.first_device: s.submesh for s in plan.stages}
    assert sum(np.prod(submesh) for submesh in submeshes.values()) == spec.num_devices
    for stage in plan.stages:
        own = stage_on(graph, *stage.ops, int(np.prod(stage.logical_mesh)))
        assert set(stage.received) == set(own.received)
        assert set(stage.sent) == set(own.sent)
        assert set(stage.strategies) == {op.name for op in own.ops}
        assert options.get("remat") in (None, stage.remat)
    assert plan.num_microbatches == options.get("num_microbatches", plan.num_microbatches)
    assert len(plan.stages) == options.get("num_stages", len(plan.stages))
    if len(plan.stages) > 1:
        assert plan.schedule == options.get("schedule", plan.schedule)
        ranks = len({s.first_device for s in plan.stages})
        assert refusal(plan.schedule, ranks, plan.num_microbatches) is None
        assert (
            len(in_flight(plan.schedule, ranks, plan.num_microbatches, len(plan.stages) // ranks))
            == ranks
        )
    assert Plan.from_dict(plan.to_dict()) == plan


def test_a_pipeline_where_the_network_binds():
    """Wide layers and a slow link: two stages on two nodes beat one stage over both."""
    with torch.device("meta"):
        module = MODELS["mlp"](d_in=4096, d_hidden=4096, d_out=4096, num_layers=8)
        batch = (torch.empty(1024, 4096), torch.empty(1024, 4096))
    step = capture_step(module, batch, world_size=1, batch_scope="global")
    slow = replace(cluster(), inter_node=Link(20e-6, 4e9))
    one = plan_pipeline(PlanTask(step, slow, PlanOptions(batch_scope="global", num_stages=1), ADAM))
    best = plan_pipeline(PlanTask(step, slow, PlanOptions(batch_scope="global"), ADAM))
    assert len(best.stages) > 1
    assert best.predicted.step_seconds < 0.9 * one.predicted.step_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 1000}, "num_stages=1000"),
        ({"num_microbatches": 3}, "num_microbatches=3"),
        ({"memory_limit": 1e3}, "no pipeline fits"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_clearly(options, message):
    with pytest.raises(PlanError, match=message):
        plan_pipeline(
            PlanTask(
                captured("mlp"),
                cluster(),
                PlanOptions.from_user(batch_scope="global", **options),
                ADAM,
            )
        )
