"""No plan that users would try by hand is better than the searched one; what is called a bound is
one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from covering import in_tiers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.flops import op_flops
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op import candidates
from alpa_strategy.inter_op.bound import step_bound
from alpa_strategy.inter_op.stage_costs import LayerRangeCosts
from alpa_strategy.inter_op.stage_fit import _without_the_largest
from alpa_strategy.inter_op.stage_solve import StageSolver
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.one_stage import whole_batch, whole_step_request
from alpa_strategy.planner.pipeline_search import PipelineSearch, plan_pipeline
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import SCHEDULES, in_flight_by_stage, refusal, timeline

ADAM = OptimizerInfo()
PAIRS = (
    ("gpt", {"num_layers": 6, "d_model": 64, "vocab_size": 64}, "p3_16xlarge_x8", (1, 4)),
    ("gpt", {"num_layers": 4, "d_model": 256, "vocab_size": 32}, "p3_16xlarge_x8", (2, 2)),
    ("llama", {"num_layers": 4}, "pcie_8gpu", (2, 2)),
    ("mlp", {}, "pcie_8gpu", (1, 4)),
    # Fewer blocks than devices.
    ("llama", {"num_layers": 2}, "pcie_8gpu", (1, 4)),
)


def step_of(name: str, sizes: dict, rows: int = 16):
    module = MODELS[name](**sizes)
    batch = module.example_batch(rows, torch.Generator().manual_seed(0))
    return capture_step(module, batch, world_size=1, batch_scope="global")


def regular_options(num_devices: int, count: int):
    """p equal stages, each on a mesh of d x t devices, for every p, d and t with p d t = the number
    of devices.
    """
    for stages in range(2, num_devices + 1):
        if num_devices % stages == 0:
            size = num_devices // stages
            shapes = [(size,), *((d, size // d) for d in range(2, size) if size % d == 0)]
            for shape in shapes:
                yield PlanOptions(
                    num_stages=stages,
                    logical_mesh=shape,
                    num_microbatches=count,
                    batch_scope="global",
                )


# Every size of mesh (128), and those around the best regular plan's (2).
@pytest.mark.parametrize(("pair", "limit"), in_tiers(product(range(len(PAIRS)), (128, 2))))
def test_no_regular_plan_is_better_and_none_is_below_the_bound(pair, limit, monkeypatch):
    name, sizes, cluster, nodes = PAIRS[pair]
    monkeypatch.setattr(candidates, "EVERY_SIZE", limit)
    step = step_of(name, sizes)
    devices = ClusterSpec.load(cluster, {"num_nodes": nodes[0], "devices_per_node": nodes[1]})
    best = plan_pipeline(
        PlanTask(step, devices, PlanOptions(batch_scope="global", num_microbatches=8), ADAM)
    )
    bound = best.predicted.step_seconds * (1 - best.gap)
    tried = 0
    for options in regular_options(math.prod(nodes), 8):
        try:
            plan = plan_pipeline(PlanTask(step, devices, options, ADAM))
        except PlanError:  # more stages than layers or ops
            continue
        tried += 1
        assert best.predicted.step_seconds <= plan.predicted.step_seconds * (
            1 + candidates.TOLERANCE
        )
        assert bound <= plan.predicted.step_seconds * (1 + 1e-9)
    assert tried > 1


def bound_of(
    least,
    each_microbatch,
    count,
    num_devices,
    meshes,
    overhead=0.0,
    schedule=None,
    boundary=None,
    may_be=None,
    floors=None,
    memory_limit=math.inf,
):
    """`step_bound` of made-up costs. floors: per submesh, the last fields of `LayerRangeCosts`."""
    floors = floors or [()] * len(meshes)
    runs = [
        LayerRangeCosts(
            (),
            least[:, a],
            each_microbatch[:, a],
            least[:, a],
            each_microbatch[:, a],
            *[np.zeros(0)] * 8,
            *floors[a],
        )
        for a in range(len(meshes))
    ]
    cluster = SimpleNamespace(num_devices=num_devices, is_uniform=True, overlap=0.0)
    options = SimpleNamespace(schedule=schedule)
    job = SimpleNamespace(
        num_microbatches=count,
        cluster=cluster,
        options=options,
        num_layers=len(least),
        memory_limit=memory_limit,
        remat=False,
    )
    sizes = np.array([math.prod(mesh) for mesh in meshes])
    boundary = (
        np.zeros((1, len(least) + 1, len(meshes), len(meshes))) if boundary is None else boundary
    )
    fits, link_at = (
        np.ones((num_devices + 1, len(meshes)), dtype=bool),
        np.zeros(num_devices + 1, dtype=int),
    )
    tables = SimpleNamespace(num_devices=sizes, boundary=boundary, fits=fits, link_at=link_at)
    if may_be is None:
        may_be = np.ones((len(least), len(least) + 1, len(meshes)), dtype=bool)
        may_be[0, -1] = schedule is None
    space = SimpleNamespace(
        job=job, sizes=list(sizes), runs=runs, tables=tables, overhead=overhead, may_be=may_be
    )
    return step_bound(space)


def simulated(schedule, seconds, once, count, v=1, wires=(), overhead=0.0):
    """Seconds of a step of stages that take `seconds` a micro-batch and `once`; a backward takes
    two forwards, and each
    half of the overhead."""
    directions = []
    for share in (1 / 3, 2 / 3):
        directions.append([s * share + overhead / 2 for s in seconds])
    end = max(
        done.end
        for done in timeline(
            schedule, *directions, count, len(seconds) // v, [w / 2 for w in wires]
        )
    )
    return end + v * max(once)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
@example(680)  # as many stages as micro-batches: messages after the last forward count once
@example(22404)  # fewer micro-batches than stages: a backward has half of the overhead
def test_no_simulated_pipeline_is_below_the_bound(seed):
    """Every split into stages on meshes of every size that pins leave, waiting and messages
    included; costs grow where
    layers are divided."""
    rng = np.random.default_rng(seed)
    L = int(rng.integers(3, 6))
    D = 8
    count = int(rng.integers(2, 24))
    sizes = np.array([1, 2, 4, 8])
    each_microbatch = rng.choice([0.5, 1.0, 1.0, 1.0], (L, 1)) / sizes ** rng.uniform(0.3, 1.0)
    once = rng.uniform(0, 2.0, (L, 1)) / sizes
    boundary = rng.uniform(0, rng.choice([1e-9, 0.3, 1.5]), (1, L + 1, 4, 4))
    may_be = rng.random((L, L + 1, 4)) < rng.choice([0.6, 1.0])
    every, overhead = [(1, n) for n in sizes], float(rng.choice([0.0, 0.05, 0.5]))
    bound = bound_of(
        count * each_microbatch + once,
        each_microbatch,
        count,
        D,
        every,
        overhead,
        boundary=boundary,
        may_be=may_be,
    )
    best = (
        count * (each_microbatch[:, 3].sum() + overhead) + once[:, 3].sum()
        if may_be[0, L, 3]
        else math.inf
    )
    for p in range(2, L + 1):
        for cuts, meshes in product(combinations(range(1, L), p - 1), product(range(4), repeat=p)):
            ends = list(zip(pairwise((0, *cuts, L)), meshes, strict=True))
            if not all(may_be[a, b, m] for (a, b), m in ends):
                continue
            seconds, per_step = (
                [float(table[a:b, m].sum()) for (a, b), m in ends]
                for table in (each_microbatch, once)
            )
            wires = [
                float(boundary[0, cut, a, b])
                for cut, (a, b) in zip(cuts, pairwise(meshes), strict=True)
            ]
            if sizes[list(meshes)].sum() == D:
                best = min(best, simulated("1F1B", seconds, per_step, count, 1, wires, overhead))
            for name, v in product(
                ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"), (2, 4)
            ):
                fits = (
                    v in SCHEDULES[name].stages_per_mesh
                    and p % v == 0
                    and len(set(meshes)) == 1
                    and p > v
                )
                if fits and sizes[meshes[0]] * p == v * D and not refusal(name, p // v, count):
                    best = min(best, simulated(name, seconds, per_step, count, v, wires, overhead))
    assert bound <= best * (1 + 1e-9)
    assert bound >= best / 2 or not may_be.all(), "it says something"


@dataclass(frozen=True)
class TwoLayouts:
    """Layers that are fast or small. Arrays [layer, submesh, layout]: seconds of a micro-batch,
    bytes always and of a micro-batch in flight.
    """

    seconds: np.ndarray
    always: np.ndarray
    saved: np.ndarray

    def least_seconds(self, first: int, last: int, mesh: int, alive: float, limit: float) -> float:
        """Of a micro-batch in the best layouts of a stage that fit; inf where none do."""
        best = math.inf
        for layouts in product(range(2), repeat=last - first):
            at = np.arange(first, last), mesh, list(layouts)
            if self.always[at].sum() + alive * self.saved[at].sum() <= limit:
                best = min(best, float(self.seconds[at].sum()))
        return best

    def floors(self, count: int) -> list[tuple[np.ndarray, ...]]:
        """Per submesh, as `LayerRangeCosts` has them, with some prices."""
        prices = [(0.0, 1.0), *product((0.1, 1.0, 10.0, 1e4), (1.0, 3.0))]
        per_mesh = []
        for mesh in range(self.seconds.shape[1]):
            tables = [table[:, mesh] for table in (self.seconds, self.always, self.saved)]
            least = [
                (count * tables[0] + price * (tables[1] + alive * tables[2])).min(axis=1)
                for price, alive in prices
            ]
            table = np.array([[(price, alive, 1.0, 0.0) for price, alive in prices]])
            per_mesh.append(
                (
                    table,
                    np.array([least]),
                    tables[1].min(axis=1)[None],
                    np.zeros((1, len(tables[0]))),
                )
            )
        return per_mesh


def best_that_fits(
    layers: TwoLayouts, sizes: np.ndarray, num_devices: int, count: int, limit: float
) -> float:
    """Seconds of the best pipeline of two stages or more: every cut, mesh, layout and schedule."""
    L, best = len(layers.seconds), math.inf
    many = [("InterleavedZeroBubble", 2), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)]
    for p in range(2, L + 1):
        for cuts, meshes in product(combinations(range(1, L), p - 1), product(range(3), repeat=p)):
            for name, v in [("1F1B", 1), *many]:
                ranks, rest = divmod(p, v)
                are_equal = len(set(meshes)) == 1 and ranks > 1
                is_regular = v == 1 or are_equal
                covers = sizes[list(meshes)].sum() == v * num_devices
                if rest or not is_regular or not covers or refusal(name, ranks, count):
                    continue
                alive = in_flight_by_stage(name, ranks, count, v)
                ends = zip(pairwise((0, *cuts, L)), meshes, alive, strict=True)
                seconds = [
                    layers.least_seconds(a, b, mesh, pairs / v, limit / v)
                    for (a, b), mesh, pairs in ends
                ]
                if math.isfinite(sum(seconds)):
                    best = min(best, simulated(name, seconds, [0.0] * p, count, v))
    return best


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_no_pipeline_that_fits_into_memory_is_below_the_bound(seed):
    """Every layer is fast or small; stages take the fastest layouts that fit beside what their
    schedule keeps in flight. The bound knows of a few prices of memory.
    """
    rng = np.random.default_rng(seed)
    L, D = int(rng.integers(3, 6)), 4
    count = int(rng.integers(2, 12))
    sizes = np.array([1, 2, 4])
    fast = rng.choice([0.5, 1.0, 1.0], (L, 1)) / sizes ** rng.uniform(0.5, 1.0)
    slower, smaller = rng.uniform(1.0, 2.0, (L, 3)), rng.uniform(0.2, 1.0, (L, 3))
    always, saved = rng.uniform(0.2, 1.0, (2, L, 3)) / sizes
    layers = TwoLayouts(
        np.stack([fast, fast * slower], axis=2),
        np.stack([always, always * smaller], axis=2),
        np.stack([saved, saved * smaller], axis=2),
    )
    limit = float(rng.uniform(0.3, 2.0))
    every = [(1, n) for n in sizes]
    may_be = np.ones((L, L + 1, 3), dtype=bool)
    may_be[0, L] = False
    bound, without = (
        bound_of(count * fast, fast, count, D, every, may_be=may_be, floors=floors, memory_limit=m)
        for floors, m in ((layers.floors(count), limit), (None, math.inf))
    )
    best = best_that_fits(layers, sizes, D, count, limit)
    assert bound <= best * (1 + 1e-9)
    assert bound >= without * (1 - 1e-9) or math.isinf(best)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1F1B", "GPipe"]))
def test_no_division_of_unequal_layers_is_below_the_bound(seed, schedule):
    """Work alone: layers one after the other on meshes that cover the devices, the busiest mesh
    against the bound.
    """
    rng = np.random.default_rng(seed)
    L = int(rng.integers(2, 6))
    meshes = ((1, 1), (1, 2), (1, 4))
    D = 4
    work = rng.choice([0.3, 1.0, 1.0, 2.0], (L, 1)) * rng.uniform(0.8, 1.0, 3) / np.array([1, 2, 4])
    bound = bound_of(work, np.zeros_like(work), 4, D, meshes, schedule=schedule)
    best = math.inf
    for count in range(2, min(L, D) + 1):  # a schedule that is requested has two stages or more
        for sizes in product(range(3), repeat=count):
            if sum(2**a for a in sizes) > D:
                continue
            for cuts in combinations(range(1, L), count - 1):
                ends = list(pairwise((0, *cuts, L)))
                busiest = max(
                    work[a:b, mesh].sum() for (a, b), mesh in zip(ends, sizes, strict=True)
                )
                best = min(best, busiest)
    assert bound <= best * (1 + 1e-9)
    assert bound >= best / 3, "it says something"


@pytest.mark.parametrize("num_layers", [4, 6])
def test_layers_begin_at_blocks_and_none_is_nothing(num_layers):
    step = step_of("gpt", {"num_layers": num_layers, "d_model": 32, "vocab_size": 1024})
    cuts = cluster_layers(step)
    assert len(cuts) == num_layers + 2  # the head is work enough for a layer of its own
    for first, last in pairwise(cuts):
        assert sum(op_flops(op.call) for op in step.ops[first:last]) > 0
    blocks = [step.ops[cut].module for cut in cuts[1:-2]]
    expected = [["blocks", str(i)] for i in range(1, num_layers)]
    assert [b.split(".")[:2] for b in blocks] == expected


def test_strategies_over_the_limit_are_left_out_before_the_solve():
    """A strategy is no choice if its temporary bytes, in addition to the smallest saved bytes of
    all ops, are over the limit.
    """
    task = PlanTask(
        step_of("mlp", {}),
        ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 4}),
        PlanOptions(),
        ADAM,
    )
    intra = StageSolver(whole_batch(task)).price(whole_step_request(task, (4,), {})).intra
    kept = sum(float(choice.memory.min()) for choice in intra.problem.choices)
    offset = len(intra.parameters)
    most = max(float(op.temporary_bytes.min()) for op in intra.ops)
    reduced = _without_the_largest(intra.problem, intra, kept + most)
    for op, choice, before in zip(
        intra.ops, reduced.choices[offset:], intra.problem.choices[offset:], strict=False
    ):
        assert (
            np.isfinite(choice.cost) == (np.isfinite(before.cost) & (op.temporary_bytes <= most))
        ).all()
    assert any(np.isinf(choice.cost).any() for choice in reduced.choices)
    with pytest.raises(DoesNotFitError, match="with all that is kept"):
        _without_the_largest(intra.problem, intra, kept + most / 2)


def test_one_stage_with_few_micro_batches_can_win():
    """Two valleys: pipelines get slower towards few micro-batches, one stage is the faster the
    fewer they are.
    """
    seconds = {32: 9.0, 16: 8.0, 8: 8.5, 4: 6.5, 2: 6.0, 1: 7.0}

    def solve(space, known):
        candidate = SimpleNamespace(seconds=seconds[space.job.num_microbatches], submesh_of=(0,))
        return [candidate] if candidate.seconds < known else []

    spec = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    task = PlanTask(
        step_of("mlp", {}, rows=32), spec, PlanOptions(batch_scope="global", remat=False), ADAM
    )
    search = PipelineSearch(task, several=False, solve=solve)
    search.run(math.inf)
    assert search.best[0].seconds == 6.0
