"""Training with a ParameterStore gives what one process gives: parameters, gradients, norms,
checkpointed values.

The step is a small function that uses parameters as a lowered step would: resharded from the layout
that the store hands out to whole, with the batch's rows divided over all devices.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from covering import in_tiers
from proofs.thread_mesh import run_on_threads
from runtime.parameter_runs import (
    assert_equals_reference,
    batches,
    inputs_of,
    loss_sum,
    make_net,
    plan_of,
    train,
    train_on_groups,
)
from stores import store_on
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.errors import PlanError, RuntimeMismatchError
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import INVARIANT, REPLICATE, shard
from alpa_strategy.ir.plan import ParameterPlan
from alpa_strategy.lightning.full_parameters import clip_by_norm
from alpa_strategy.runtime.gradients import GradientReducer

MODES_1D = [("R*",), ("R",), ("S0",), ("S1",), ("G0",), ("G1",)]


MODES_2D = list(itertools.product(["R", "R*", "S0", "S1", "G0", "G1"], repeat=2))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES_1D, ids=" ".join)
def test_one_axis(mode, size):
    for result in run_on_threads((size,), lambda mesh: train(mesh, mode)):
        assert_equals_reference(result)


@pytest.mark.parametrize("mode", MODES_2D, ids=" ".join)
def test_two_axes(mode):
    for result in run_on_threads((2, 2), lambda mesh: train(mesh, mode)):
        assert_equals_reference(result)


@pytest.mark.parametrize(
    "mode", [("R*", "G0"), ("S0", "G0"), ("G0", "S0"), ("R*", "R*"), ("R", "S1")], ids=" ".join
)
@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"clear": False}, {"accumulate": 2, "clear": False}], ids=str
)
def test_accumulation(mode, options):
    for result in run_on_threads((2, 2), lambda mesh: train(mesh, mode, **options)):
        assert_equals_reference(result, **options)


@pytest.mark.parametrize("mode", [("R*",), ("S0",), ("G0",)], ids=" ".join)
@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"clear": False}, {"accumulate": 2, "clear": False}], ids=str
)
def test_accumulation_on_one_device(mode, options):
    (result,) = run_on_threads((1,), lambda mesh: train(mesh, mode, **options))
    assert_equals_reference(result, **options)


@pytest.mark.parametrize("mode", [("R*",), ("S0",)], ids=" ".join)
def test_one_device_leaves_gradients_where_autograd_made_them(mode):
    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(mesh, net, inputs, {p.name: plan_of(mode, p.meta.shape) for p in inputs})
        store.shard(bucket_bytes=200)
        for x in batches()[:3]:  # the first backward is another: devices agree then
            net.zero_grad()
            loss_sum(store.of_stage[0].step_inputs(prefetched_bytes=100), x).backward()
            made = {p: p.grad for p in net.parameters()}
            store.finish_backward()
            assert all(p.grad is made[p] for p in net.parameters())

    run_on_threads((1,), work)


@pytest.mark.parametrize(
    "mode", [("R*", "S0"), ("S0", "S0"), ("G1", "R"), ("R", "R*")], ids=" ".join
)
def test_clipping_by_norm(mode):
    options = {"max_norm": 0.3}
    for result in run_on_threads((2, 2), lambda mesh: train(mesh, mode, **options)):
        assert_equals_reference(result, **options)


ON_GROUPS = {(2,): MODES_1D, (3,): [("S0",), ("G0",)], (2, 2): MODES_2D[::4]}


@pytest.mark.parametrize(
    ("mesh_shape", "bucket_bytes"), in_tiers(itertools.product(ON_GROUPS, (1, 300, 1 << 20)))
)
def test_on_process_groups(pool, mesh_shape, bucket_bytes):
    for mode in ON_GROUPS[mesh_shape]:
        options = {"accumulate": 2, "max_norm": 0.3}
        call = {**options, "bucket_bytes": bucket_bytes, "regather": True}
        results = pool.run(math.prod(mesh_shape), train_on_groups, mesh_shape, mode, call)
        for result in results:
            assert_equals_reference(result, **options)
            assert result[2] == results[0][2]  # norms agree to the last bit


@pytest.mark.parametrize("mode", [("S0",), ("S1",)], ids=" ".join)
def test_regather_is_exact_and_frees_the_gathered_weight(mode):
    for result in run_on_threads((2,), lambda mesh: train(mesh, mode, regather=True)):
        assert_equals_reference(result)

    def freed(mesh, regather, dtype):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(mesh, net, inputs, {p.name: plan_of(mode, p.meta.shape) for p in inputs})
        store.shard()
        gather = Reshard(plan_of(mode, (7, 6)).step_layout(), (REPLICATE,), (7, 6), mesh)
        x = torch.ones(3, 6, dtype=dtype, requires_grad=True)
        with (
            store.of_stage[0].regather_hooks(prefetched_bytes=0)
            if regather
            else torch.enable_grad()
        ):
            weight = gather(net.first.weight.to(dtype))
            storage = StorageWeakRef(weight.untyped_storage())
            y = F.linear(x, weight)
        del weight
        is_freed = storage.expired()
        y.sum().backward()
        return is_freed, x.grad

    for dtype in (torch.float64, torch.bfloat16):  # the latter as under autocast
        keep = run_on_threads((2,), lambda m, d=dtype: freed(m, False, d))
        drop = run_on_threads((2,), lambda m, d=dtype: freed(m, True, d))
        for kept, dropped in zip(keep, drop, strict=True):
            assert (kept[0], dropped[0]) == (False, True)
            assert torch.equal(kept[1], dropped[1])


@pytest.mark.parametrize(
    "read", [torch.view_as_complex, lambda w: torch.view_as_complex(w).conj().mT, torch.t]
)
def test_views_that_read_a_gathered_parameter_otherwise(read):
    """As complex numbers, conjugated, transposed: autograd's saved tensors are re-gathered with the
    same strides and values.
    """

    def gradient(mesh, regather):
        module = nn.Module()
        module.weight = nn.Parameter(
            torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        )
        given = ParameterInput(0, ("weight",), TensorMeta((4, 3, 2), torch.float64, True))
        store = store_on(mesh, module, (given,), {"weight": ParameterPlan.parse("S0")})
        store.shard()
        gather = Reshard(ParameterPlan.parse("S0").step_layout(), (REPLICATE,), (4, 3, 2), mesh)
        with (
            store.of_stage[0].regather_hooks(prefetched_bytes=0)
            if regather
            else torch.enable_grad()
        ):
            weight = gather(module.weight)
            weight = read(weight[..., 0]) if read is torch.t else read(weight)
            x = torch.ones_like(weight, requires_grad=True)
            (x * weight * weight).abs().sum().backward()
        return x.grad, module.weight.grad

    kept, dropped = (
        run_on_threads((2,), lambda mesh, again=again: gradient(mesh, again))
        for again in (False, True)
    )
    for mine, theirs in zip(dropped, kept, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _rows(weight):
    return F.embedding(torch.tensor([1, 0, 1]), weight)


@pytest.mark.parametrize(
    ("make", "gathers"),
    [
        (torch.t, 2),
        (lambda w: w.bfloat16().unsqueeze(0), 2),
        (_rows, 1),
        (torch.relu, 1),
        (lambda w: w + 1, 1),
    ],
)
def test_only_views_and_casts_of_a_parameter_are_regathered(make, gathers):
    """What an op makes of a parameter is an activation: the plan has it kept, and its gathering
    paid once.
    """

    def work(mesh):
        module = nn.Module()
        module.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
        given = ParameterInput(0, ("weight",), TensorMeta((4, 6), torch.float64, True))
        store = store_on(mesh, module, (given,), {"weight": ParameterPlan.parse("S0")})
        store.shard()
        made = make(module.weight.detach())
        gather = Reshard((shard(0),), (INVARIANT,), (2 * made.shape[0], *made.shape[1:]), mesh)
        before = len(mesh.axes[0].record)
        with store.of_stage[0].regather_hooks(prefetched_bytes=0):
            whole = gather(make(module.weight))
            x = torch.ones_like(whole, requires_grad=True)
            loss = (x * whole).sum()
        torch.autograd.grad(loss, x)
        return len(mesh.axes[0].record) - before

    assert run_on_threads((2,), work) == [gathers, gathers]


@pytest.mark.parametrize("make", [torch.exp, torch.tanh, lambda x: x.softmax(0)])
def test_undifferentiated_values_are_freed(make):
    """An op that saves its own result (for a figure to log, say) must not hold itself where no
    backward comes.
    """

    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(
            mesh, net, inputs, {p.name: plan_of(("S0",), p.meta.shape) for p in inputs}
        )
        store.shard()
        with store.of_stage[0].regather_hooks(prefetched_bytes=0):
            result = make(torch.ones(3, requires_grad=True) * 2)
        return StorageWeakRef(result.untyped_storage())

    assert [result.expired() for result in run_on_threads((2,), work)] == [True, True]


def test_no_prefetch_for_a_use_that_is_over():
    """A layer norm's backward requests its bias before its weight, which was saved first. No cycle
    keeps the rest.
    """

    def work(mesh):
        norm = nn.LayerNorm(6, dtype=torch.float64)
        inputs = inputs_of(norm)
        store = store_on(mesh, norm, inputs, {p.name: ParameterPlan.parse("S0") for p in inputs})
        store.shard()
        gather = Reshard(ParameterPlan.parse("S0").step_layout(), (REPLICATE,), (6,), mesh)
        x = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
        with store.of_stage[0].regather_hooks(prefetched_bytes=1000) as regather:
            y = F.layer_norm(x, (6,), gather(norm.weight), gather(norm.bias))
        before = len(mesh.axes[0].record)
        torch.autograd.grad(y.sum(), x)
        gathers = len(mesh.axes[0].record) - before
        left = weakref.ref(regather)
        del y, regather
        return gathers, left() is None

    gc.disable()
    try:
        assert run_on_threads((2,), work) == [(2, True), (2, True)]
    finally:
        gc.enable()


def test_a_changed_parameter_is_not_gathered_for_an_older_forward():
    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(
            mesh, net, inputs, {p.name: plan_of(("S0",), p.meta.shape) for p in inputs}
        )
        store.shard()
        gather = Reshard(ParameterPlan.parse("S0").step_layout(), (REPLICATE,), (7, 6), mesh)
        with store.of_stage[0].regather_hooks(prefetched_bytes=0):
            y = F.linear(
                torch.ones(3, 6, dtype=torch.float64, requires_grad=True), gather(net.first.weight)
            )
        with torch.no_grad():
            net.first.weight.add_(1)
        with pytest.raises(RuntimeMismatchError, match="changed between the forward"):
            y.sum().backward()

    run_on_threads((2,), work)


def test_reduction_runs_in_buckets_during_the_backward():
    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(mesh, net, inputs, {p.name: ParameterPlan.parse("R*") for p in inputs})
        store.shard(bucket_bytes=400)
        record, counts = mesh.axes[0].record, []
        for _ in range(2):
            before = len(record)
            loss_sum(store.of_stage[0].step_inputs(), batches()[0]).backward()
            during = len(record)
            store.finish_backward()
            counts.append((during - before, [num_bytes for _, num_bytes in record[during:]]))
            buckets = [num_bytes for _, num_bytes in record[before:]]
        return counts, buckets

    total = 8 * sum(p.numel() for n, p in make_net().named_parameters() if n != "unused")
    for (first, second), buckets in run_on_threads((2,), work):
        assert first[0] == 0  # the first backward only observes
        # all are in flight before the backward ends
        assert second == (len(buckets), [])
        assert len(buckets) > 1
        assert sum(buckets) == total


def test_a_gradient_that_only_some_devices_have_is_zero_on_the_others():
    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(mesh, net, inputs, {p.name: ParameterPlan.parse("R*") for p in inputs})
        store.shard()
        for _ in range(2):
            net.zero_grad()
            given = store.of_stage[0].step_inputs()
            loss = given["first.weight"].sum() + (
                given["bias"] * 3 if mesh.coordinate[0] == 1 else 0
            )
            loss.backward()
            store.finish_backward()
        return net.bias.grad, net.first.weight.grad[0, 0], net.unused.grad

    for bias, weight, unused in run_on_threads((3,), work):
        assert (bias.item(), weight.item(), unused) == (3.0, 3.0, None)


def test_a_stage_without_trainable_parameters_needs_no_consensus():
    def work(mesh):
        reducer = GradientReducer(mesh, [], bucket_bytes=1)
        for _ in range(2):
            reducer.finish()
        return True

    assert all(run_on_threads((2,), work))


def test_misuse_is_an_error():
    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(mesh, net, inputs, {p.name: ParameterPlan.parse("R*") for p in inputs})
        store.shard()
        loss = loss_sum(store.of_stage[0].step_inputs(), batches()[0])
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeMismatchError, match="made twice"):
            loss.backward()

    run_on_threads((2,), work)


def test_a_gradient_that_is_asked_for_leaves_the_reduced_one():
    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(mesh, net, inputs, {p.name: ParameterPlan.parse("R*") for p in inputs})
        store.shard()
        loss_sum(store.of_stage[0].step_inputs(), batches()[0]).backward()
        store.finish_backward()
        reduced = net.bias.grad.clone()
        torch.autograd.grad(
            loss_sum(store.of_stage[0].step_inputs(), batches()[0]), net.bias
        )  # leaves .grad as it is
        assert torch.equal(net.bias.grad, reduced)

    run_on_threads((2,), work)


@pytest.mark.parametrize("mode", ["R*", "G0", "S0"])
def test_steps_may_use_other_parameters_than_the_first(mode):
    """What a step does not use keeps no gradient, though others of its bucket have one; what is new
    is reduced.
    """

    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        plans = {}
        for p in inputs:
            plans[p.name] = ParameterPlan.parse(mode if p.meta.shape else "R*")
        store = store_on(mesh, net, inputs, plans)
        store.shard()
        seen = []
        for names in (
            ("first.weight", "second.bias"),
            ("first.weight", "unused"),
            ("second.bias",),
        ):
            net.zero_grad()
            store.after_optimizer_step()
            given = store.of_stage[0].step_inputs()
            sum(given[name].sum() for name in names).backward()
            store.finish_backward()
            seen.append(
                {
                    n: p.grad.unique().tolist()
                    for n, p in net.named_parameters()
                    if p.grad is not None
                }
            )
        return seen

    for seen in run_on_threads((2,), work):
        one = [
            1.0 if mode == "S0" else 2.0
        ]  # shards are used as they are stored: nothing is summed
        assert seen == [
            {"first.weight": one, "second.bias": one},
            {"first.weight": one, "unused": one},
            {"second.bias": one},
        ]


def test_gradients_of_subsets_and_other_values():
    def work(mesh):
        net = make_net()
        inputs = inputs_of(net)
        store = store_on(
            mesh, net, inputs, {p.name: plan_of(("S0",), p.meta.shape) for p in inputs}
        )
        store.shard()
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        subset = [net.first.weight, net.bias]
        assert clip_by_norm(store, math.inf, subset).item() == pytest.approx(math.sqrt(43 * 4))
        with torch.no_grad():
            whole = torch.arange(42.0, dtype=torch.float64).view(7, 6)
            store.load_full(net.third.weight, whole, net.third.weight.data)  # the same as `first`
        return store.gather(net.first.weight)

    for whole in run_on_threads((3,), work):
        assert torch.equal(whole.flatten(), torch.arange(42.0, dtype=torch.float64))


def test_a_plan_that_lacks_a_parameter_is_refused():
    net = make_net()
    with pytest.raises(PlanError, match="no entry for parameter unused"):
        store_on(build_mesh((1,)), net, inputs_of(net), {})
