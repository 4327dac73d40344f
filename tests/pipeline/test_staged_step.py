"""Captured models as pipelines: any cuts, any plans inside the stages, any schedule equal the whole
step.
"""

from __future__ import annotations

import gc
import itertools
import random as python_random
import weakref
from collections import Counter
from dataclasses import replace
from itertools import product

import pipeline_models_crossing  # noqa: F401  (more MODELS)
import pytest
import torch
import torch.distributed as dist
from covering import in_tiers, slow_but
from models import MODELS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import broadcast_object
from alpa_strategy.comm.mesh import build_mesh, build_stage_meshes
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.intra_op.build import build as build_problem
from alpa_strategy.intra_op.decode import decode
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import ParameterPlan, Predicted, stage_ranks
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.ir.stage_graph import slice_stage
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.pipeline.build import StageDevices, build_pipeline, stage_randoms
from alpa_strategy.planner.execution import stage_execution
from alpa_strategy.planner.pipeline_search import plan_pipeline
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.schedules import splits_backward

ADAM = OptimizerInfo(state_bytes=16)
CASES = {
    "mlp": {},
    "gpt": {"ignore_fraction": 0.4, "num_layers": 2, "vocab_size": 33},
    "llama": {"num_layers": 1},
    "bert": {"num_layers": 1},
    "convnet": {},
    "derived": {},
}
ROWS_PER_RANK = 4


def captured(name, world):
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        module = MODELS[name](**CASES[name])
        whole = module.example_batch(ROWS_PER_RANK * world, torch.Generator().manual_seed(2))
        rank = dist.get_rank()
        rows = slice(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK)
        mine = torch.utils._pytree.tree_map(lambda t: t[rows], whole)
        step = capture_step(module, mine, world_size=world)
    finally:
        torch.set_default_dtype(torch.float32)
    return module, step, *(torch.utils._pytree.tree_leaves(batch) for batch in (whole, mine))


def random_stage(graph, ops, ranks, rng, remat):
    """Any plan of a stage on `ranks`: strategies drawn at random, the same on all ranks."""
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": len(ranks)})
    costs = RooflineCosts(cluster.device)
    intra = build_problem(
        slice_stage(graph, *ops), OptionTables(cluster.logical_mesh((len(ranks),)), costs, ADAM)
    )
    assignment = [
        rng.choice([k for k, seconds in enumerate(choice.cost) if seconds < float("inf")])
        for choice in intra.problem.choices
    ]
    stage = decode(intra, assignment, (1, len(ranks)), Predicted(0.0, 0))
    inner = range(ops[0] + 1, ops[1])
    cutter = python_random.Random(f"{ops}")  # recomputed or not, the plan is the same
    cuts = sorted(cutter.sample(inner, min(len(inner), cutter.randint(0, 5)))) if remat else []
    stage = replace(
        stage, ops=ops, first_device=ranks[0], remat=remat, recompute_splits=tuple(cuts)
    )
    return replace(stage, execution=stage_execution(graph, stage, is_pipelined=True))


def same_storage(stages, meshes_of):
    """Stages on one mesh store a parameter that both use alike."""
    plans = {}
    for i, stage in enumerate(stages):
        for name, plan in stage.parameter_plans.items():
            if plans.setdefault((meshes_of[i], name), plan) != plan:
                return False
    return True


def random_stages(graph, places, rng, remat=False):
    """Random cuts and plans; stages on one mesh store a shared parameter alike."""
    count = len(graph.ops)
    while True:
        cuts = [0, *sorted(rng.sample(range(1, count), len(places) - 1)), count]
        spans = zip(itertools.pairwise(cuts), places, strict=True)
        stages = [random_stage(graph, ops, ranks, rng, remat) for ops, ranks in spans]
        if same_storage(stages, places):
            return stages


def sharded(module, micro, stages, meshes):
    """This rank's stages -> their parameters, in shards."""
    store = ParameterStore(
        module, micro.graph.parameters, stages, meshes, build_mesh((dist.get_world_size(),))
    )
    store.shard()
    return store.of_stage


def without_overlap(stage):
    """The stage as planned for a backward in halves."""
    return replace(stage, execution=replace(stage.execution, fused_matmuls=(), chunk_dims={}))


def prepare(module, micro, stages, schedule):
    """(pipeline, this rank's parameters per mesh), ready to step."""
    num_meshes = len({stage_ranks(stage) for stage in stages})
    if splits_backward(schedule, num_meshes, micro.num_microbatches, len(stages) // num_meshes):
        stages = [without_overlap(stage) for stage in stages]
    meshes = build_stage_meshes([(stage.logical_mesh, stage_ranks(stage)) for stage in stages])
    stores = sharded(module, micro, stages, meshes)
    distinct = list({id(s): s for s in stores.values()}.values())
    places = StageDevices(meshes, stage_randoms(stages, meshes, seed=0), torch.device("cpu"))
    return build_pipeline(module, micro, stages, schedule, places, stores), distinct


def given_values(micro, parameters, buffers, leaves):
    """What the micro-batches are given by the prologue."""
    if micro.prologue is None:
        return {}
    outputs = run_step(
        micro.prologue, parameters, buffers, [leaves[b.leaf] for b in micro.prologue.batch]
    )
    return {value: outputs[source] for value, source in micro.from_prologue.items()}


def run_planned(name, options):
    """The planner's own stages, as rank 0 finds them; returns how they lie."""
    world = dist.get_world_size()
    case = captured(name, world)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": world})
    plan = None
    if dist.get_rank() == 0:
        plan = plan_pipeline(PlanTask(case[1], cluster, PlanOptions(**options), ADAM))
    plan = broadcast_object(plan)
    compare(
        name, case, microbatch(case[1], plan.num_microbatches, world), plan.stages, plan.schedule
    )
    return [(stage.first_device, stage.submesh) for stage in plan.stages]


def run_model(name, places, schedule, num_microbatches, seed, remat=False):
    """Stages drawn at random; places: ranks per stage."""
    case = captured(name, dist.get_world_size())
    micro = microbatch(case[1], num_microbatches, dist.get_world_size())
    stages = random_stages(
        micro.graph, places, python_random.Random(f"{name}{places}{seed}"), remat
    )
    compare(name, case, micro, stages, schedule)


def compare(name, case, micro, stages, schedule):
    """Two steps of the pipeline against the full step."""
    module, step, whole, mine = case
    parameters = {
        p.name: module.get_parameter(p.name).detach().clone().view(p.meta.shape)
        for p in step.parameters
    }
    buffers = {b.name: module.get_buffer(b.name).clone() for b in step.buffers}
    trained = {
        n: p.clone().requires_grad_(module.get_parameter(n).requires_grad)
        for n, p in parameters.items()
    }
    expected = run_step(step, trained, buffers, [whole[b.leaf] for b in step.batch])
    expected[step.loss].backward()
    pipeline, stores = prepare(module, micro, stages, schedule)
    given = given_values(micro, parameters, buffers, whole)
    is_exact = (
        name != "convnet" or micro.num_microbatches == 1
    )  # BatchNorm's statistics are per micro-batch
    losses = []
    for _ in range(2):
        values, gradients = pipeline.step([mine[b.leaf] for b in micro.graph.batch], given)
        loss = values[micro.graph.loss]
        losses.append(loss.item())
        if is_exact:
            torch.testing.assert_close(loss, expected[step.loss].detach(), rtol=1e-11, atol=1e-12)
        grads = {id(p): g for p, g in gradients}
        for store in stores:
            for parameter, sharded in store._by_parameter.items():
                known = sharded.name
                grad = grads.get(id(parameter), torch.zeros_like(parameter))
                found = sharded.gather_like(grad).view(parameters[known].shape)
                assert found.isfinite().all()
                want = trained[known].grad
                want = torch.zeros_like(found) if want is None else want
                if is_exact:
                    torch.testing.assert_close(
                        found, want, rtol=1e-9, atol=1e-12, msg=lambda m, k=known: f"{k}: {m}"
                    )
            store.after_optimizer_step()
        pipeline.set_buffers(buffers)
    assert losses[0] == losses[1]


def run_with_dropout(places, schedule, remat):
    """Losses of three steps and the local gradients of the last."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        module = MODELS["gpt"](num_layers=2, vocab_size=33, dropout=0.3)
        whole = module.example_batch(8, torch.Generator().manual_seed(2))
        rows = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
        mine = torch.utils._pytree.tree_map(lambda t: t[rows], whole)
        step = capture_step(module, mine, world_size=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert any("dropout" in str(op.call.target) for op in step.ops)
    micro = microbatch(step, 2, 2)
    stages = random_stages(micro.graph, places, python_random.Random(0), remat)
    pipeline, stores = prepare(module, micro, stages, schedule)
    leaves = torch.utils._pytree.tree_leaves(mine)
    given = given_values(micro, {}, {}, torch.utils._pytree.tree_leaves(whole))
    losses = []
    for _ in range(3):
        values, gradients = pipeline.step([leaves[b.leaf] for b in micro.graph.batch], given)
        losses.append(values[micro.graph.loss].item())
        for store in stores:
            store.after_optimizer_step()
    return losses, [g.tolist() for _, g in gradients]


@pytest.mark.parametrize(
    ("name", "places", "seed"),
    in_tiers(product(CASES, (((0, 1), (2,)), ((0,), (1, 2))), range(2))),
)
def test_models_on_unequal_stages(pool, name, places, seed):
    pool.run(3, run_model, name, places, "1F1B" if seed else "GPipe", 2, seed)


SCHEDULES = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


# The planner's stages, below, are interleaved.
QUICK_SCHEDULES = (
    ("LoopedBFS", False),
    ("InterleavedZeroBubble", False),
    ("ZBVZeroBubble", True),
)


@pytest.mark.parametrize(
    ("schedule", "remat"), slow_but(product(SCHEDULES, (False, True)), QUICK_SCHEDULES)
)
def test_gpt_under_every_schedule(pool, schedule, remat):
    meshes = ((0, 1), (2,))
    places = (*meshes, *(reversed(meshes) if schedule == "ZBVZeroBubble" else meshes))
    pool.run(3, run_model, "gpt", places, schedule, 4, 0, remat)


@pytest.mark.parametrize("seed", slow_but(range(3), (0,)))
def test_recomputation_on_several_devices(pool, seed):
    """Devices of a stage save different tensors and compute different gradients: they still
    recompute together.
    """
    pool.run(4, run_model, "gpt", ((0, 1), (2, 3)), "1F1B", 2, seed, True)


# BERT computes as GPT does, without a tied embedding; the others are on unequal stages above.
@pytest.mark.parametrize("name", slow_but(("gpt", "bert", "convnet", "derived"), ("gpt",)))
def test_recomputation_without_a_pipeline(pool, name):
    """RematSpans share weights (a tied embedding), whose gradients are reduced once they are
    complete.
    """
    for seed in range(2):
        pool.run(2, run_model, name, ((0, 1),), "1F1B", 2, seed, True)


def run_in_half(places, remat):
    """Losses and gradients in bfloat16-mixed precision: casts once per step, and for every
    micro-batch.
    """
    torch.manual_seed(1)
    module = MODELS["gpt"](num_layers=2, vocab_size=32)
    whole = module.example_batch(8, torch.Generator().manual_seed(2))
    rows = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    mine = torch.utils._pytree.tree_map(lambda t: t[rows], whole)
    step = capture_step(
        module, mine, world_size=2, context=lambda: torch.autocast("cpu", torch.bfloat16)
    )
    micro = microbatch(step, 4, 2)
    stages = random_stages(micro.graph, places, python_random.Random(3), remat)
    meshes = build_stage_meshes([(stage.logical_mesh, stage_ranks(stage)) for stage in stages])
    stores = sharded(module, micro, stages, meshes)
    leaves = torch.utils._pytree.tree_leaves(mine)
    given = given_values(micro, {}, {}, torch.utils._pytree.tree_leaves(whole))
    results = []
    for casts_per_microbatch in (False, True):
        planned_stages = stages
        if casts_per_microbatch:
            planned_stages = [
                replace(stage, execution=replace(stage.execution, per_step_ops=()))
                for stage in stages
            ]
        run_places = StageDevices(
            meshes, stage_randoms(stages, meshes, seed=0), torch.device("cpu")
        )
        pipeline = build_pipeline(module, micro, planned_stages, "1F1B", run_places, stores)
        values, gradients = pipeline.step([leaves[b.leaf] for b in micro.graph.batch], given)
        results.append((values[micro.graph.loss].item(), [g.tolist() for _, g in gradients]))
        for store in stores.values():
            store.after_optimizer_step()
    return results


@pytest.mark.parametrize(
    ("places", "remat"), in_tiers(product((((0,), (1,)), ((0, 1),)), (False, True)))
)
def test_casting_weights_once_per_step_changes_no_bit(pool, places, remat):
    for once, always in pool.run(2, run_in_half, places, remat):
        assert once == always


class Softmaxes(TorchDispatchMode):
    """Their results, as long as these live."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default:
            self.made.append(StorageWeakRef(found.untyped_storage()))
        return found


def run_and_count_softmaxes(remat):
    """How many two steps make, and how many of them live after these; nothing collects what holds
    itself.
    """
    _, step, whole, mine = captured("derived", 1)
    micro = microbatch(step, 4, 1)
    module = MODELS["derived"]().double()
    pipeline, _ = prepare(
        module, micro, random_stages(micro.graph, ((0,),), python_random.Random(0), remat), "1F1B"
    )
    leaves = [mine[b.leaf] for b in micro.graph.batch]
    gc.disable()
    try:
        with Softmaxes() as seen:
            for _ in range(2):
                pipeline.step(leaves, given_values(micro, {}, {}, whole))
        return len(seen.made), sum(not made.expired() for made in seen.made)
    finally:
        gc.enable()


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_what_is_made_of_parameters_is_made_once_per_step(pool, remat):
    assert pool.run(1, run_and_count_softmaxes, remat) == [(2, 0)]


class SavedBytes:
    """The most bytes that autograd holds at once, each storage once; parameters do not count."""

    def __init__(self, parameters):
        self._alive = Counter({p.untyped_storage().data_ptr(): 1 for p in parameters})
        self.now = self.most = 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        self._alive[key] += 1
        self.now += size if self._alive[key] == 1 else 0
        self.most = max(self.most, self.now)
        holder = Holder(tensor)
        weakref.finalize(holder, self._drop, key, size)
        return holder

    def _drop(self, key, size):
        self._alive[key] -= 1
        self.now -= 0 if self._alive[key] else size


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


def run_and_count(cuts):
    """The most bytes saved for the backward of two micro-batches on one device, and the loss.

    cuts: None (nothing is recomputed), "whole", or "layers".
    """
    module, step, whole, mine = captured("gpt", 1)
    micro = microbatch(step, 2, 1)
    graph = micro.graph
    stage = random_stage(graph, (0, len(graph.ops)), (0,), python_random.Random(0), False)
    layers = cluster_layers(graph, 4)[1:-1] if cuts == "layers" else ()
    plans = dict.fromkeys(
        stage.parameter_plans, ParameterPlan.parse("R")
    )  # nothing to gather, which has own hooks
    stage = replace(stage, parameter_plans=plans, remat=cuts is not None, recompute_splits=layers)
    pipeline, _ = prepare(module, micro, [stage], "1F1B")
    saved = SavedBytes(module.parameters())
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda holder: holder.tensor):
        values, _ = pipeline.step(
            [mine[b.leaf] for b in graph.batch], given_values(micro, {}, {}, whole)
        )
    assert saved.now == 0
    return saved.most, values[graph.loss].item()


def test_recomputing_by_segments_saves_less_than_a_full_stage(pool):
    (kept, loss), (whole, loss_again), (layers, loss_by_layers) = (
        pool.run(1, run_and_count, cuts)[0] for cuts in (None, "whole", "layers")
    )
    assert loss == loss_again == loss_by_layers
    assert whole <= kept
    assert layers < 0.6 * whole


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}),
        pytest.param(
            3,
            {"num_stages": 2, "num_microbatches": 2, "schedule": "GPipe"},
            marks=pytest.mark.slow,
        ),
        (4, {"num_stages": 4, "num_microbatches": 4, "schedule": "Interleaved1F1B"}),
        (2, {"num_stages": 4, "num_microbatches": 4, "schedule": "ZBVZeroBubble"}),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else x["schedule"],
)
def test_the_planners_stages(pool, num_ranks, options):
    places = pool.run(num_ranks, run_planned, "gpt", options)[0]
    assert len(places) == options["num_stages"]


@pytest.mark.parametrize(
    ("name", "schedule"), in_tiers(product(("gpt", "convnet"), ("GPipe", "1F1B")))
)
def test_micro_batches_without_a_pipeline(pool, name, schedule):
    pool.run(2, run_model, name, ((0, 1),), schedule, 2, 0)


@pytest.mark.parametrize(
    "places",
    [
        # test_pipelines.py has a training with dropout in two stages.
        pytest.param(((0,), (1,)), id="two stages", marks=pytest.mark.slow),
        pytest.param(((0, 1),), id="two devices"),
    ],
)
def test_dropout_is_reproducible_and_recomputed_alike(pool, places):
    first, again, recomputed = (
        pool.run(2, run_with_dropout, places, "1F1B", remat) for remat in (False, False, True)
    )
    assert len(set(first[0][0])) == 3
    assert first == again
    for (losses, grads), (same_losses, same_grads) in zip(first, recomputed, strict=True):
        assert losses == same_losses
        for grad, same in zip(grads, same_grads, strict=True):  # summed in another order
            torch.testing.assert_close(
                torch.tensor(grad), torch.tensor(same), rtol=1e-12, atol=1e-12
            )
