"""Every local implementation gives the unsharded op's results and gradients, under the
dual-placement contract.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from proofs.prove import grad_layout
from proofs.thread_mesh import run_on_threads
from sharding.calls import call_and_operands
from torch.distributed.tensor.placement_types import Replicate

from alpa_strategy.capture import ops as capture_ops
from alpa_strategy.ir.op import AxisStrategy, LocalCall, OpCall
from alpa_strategy.ir.placement import Layout, value_layout
from alpa_strategy.lower.local_ops import batch_norm_in_parts, batch_norm_sync, build_local_op

aten = torch.ops.aten


def as_tuple(results):
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def part(tensor, layout, mesh):
    for dim, (start, stop) in enumerate(layout.slices(tensor.shape, mesh.shape, mesh.coordinate)):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor.clone()


def assemble(parts, layout, shape, mesh_shape):
    """The full tensor from the ranks' parts; replicas must be bitwise equal."""
    coordinates = list(itertools.product(*map(range, mesh_shape)))
    by_coordinate = dict(zip(coordinates, parts, strict=True))
    whole = torch.zeros(shape, dtype=parts[0].dtype)
    for coordinate, own in by_coordinate.items():
        # the replica of the same shard on the first device of each replicated axis
        first = list(coordinate)
        for axis, placement in enumerate(layout):
            if isinstance(placement, Replicate):
                first[axis] = 0
        first = tuple(first)
        torch.testing.assert_close(own, by_coordinate[first], rtol=0, atol=0, equal_nan=True)
        if first == coordinate:
            ranges = layout.slices(shape, mesh_shape, coordinate)
            whole[tuple(slice(a, b) for a, b in ranges)] += own
    return whole


def backward_of(results):
    """The nodes that a backward runs."""
    left, names = [r.grad_fn for r in results if r.grad_fn is not None], []
    while left:
        node = left.pop()
        names.append(node.name())
        left += [given for given, _ in node.next_functions if given is not None]
    return names


def check(call, operands, mesh_shape, texts, axes=None, tolerance=1e-12, build=build_local_op):
    """Run unsharded and sharded, and compare results and gradients.

    Returns:
        The record of collectives of every axis, by rank.
    """
    strategies = tuple(map(AxisStrategy.parse, texts))
    if axes is None:
        axes = tuple(i for i, s in enumerate(strategies) if s.implementation)
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in operands]
    expected = as_tuple(call.call(*leaves))
    grads = []
    for r in expected:
        if r.requires_grad:
            grads.append(torch.randn_like(r))
        else:
            grads.append(None)
    torch.autograd.backward(
        [r for r in expected if r.requires_grad], [g for g in grads if g is not None]
    )
    operand_duals = []
    for i in range(len(operands)):
        operand_duals.append(tuple(s.inputs[i] for s in strategies))
    result_duals = []
    for i in range(len(expected)):
        result_duals.append(tuple(s.outputs[i] for s in strategies))

    def work(mesh):
        mine = [
            part(t.detach(), value_layout(d), mesh).requires_grad_(t.requires_grad)
            for t, d in zip(operands, operand_duals, strict=True)
        ]
        local = local_call(call, strategies, axes, mine, result_duals, mesh)
        return run_local(build(call, strategies, local, mesh), mine, grads, result_duals, mesh)

    ranks = run_on_threads(mesh_shape, work)
    check_results(ranks, expected, result_duals, mesh_shape, tolerance)
    for i, leaf in enumerate(leaves):
        if leaf.requires_grad:
            parts = [rank.gradients[i] for rank in ranks]
            assert None not in parts, f"operand {i} has no gradient on some rank"
            full = assemble(parts, grad_layout(operand_duals[i]), leaf.shape, mesh_shape)
            torch.testing.assert_close(full, leaf.grad, rtol=tolerance, atol=tolerance)
    check_same_backward(ranks)
    return [rank.records for rank in ranks]


def run_local(function, operands, grads, result_duals, mesh):
    """Run forward and backward on one device, as a `LocalRun`."""
    storages = [t.untyped_storage()._cdata for t in operands]
    saved = set()

    def pack(tensor):
        storage = tensor.untyped_storage()._cdata
        saved.update(i for i, operand in enumerate(storages) if operand == storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = as_tuple(function(*operands))
    nodes = backward_of(results)
    for axis in mesh.axes:
        axis.record.append(("backward", 0))
    differentiated = []
    cotangents = []
    for result, grad, duals in zip(results, grads, result_duals, strict=True):
        if grad is not None:
            differentiated.append(result)
            cotangents.append(part(grad, grad_layout(duals), mesh))
    torch.autograd.backward(differentiated, cotangents)
    return LocalRun(
        results=[r.detach() for r in results],
        gradients=[t.grad for t in operands],
        records=[axis.record for axis in mesh.axes],
        saved=saved,
        has_elements=all(t.numel() for t in operands),
        nodes=nodes,
    )


def check_results(ranks, expected, result_duals, mesh_shape, tolerance):
    """The ranks' results together are those of the unsharded op."""
    for i, result in enumerate(expected):
        parts = [rank.results[i] for rank in ranks]
        assert all(local.dtype == result.dtype for local in parts)
        full = assemble(parts, value_layout(result_duals[i]), result.shape, mesh_shape)
        torch.testing.assert_close(
            full, result.detach(), rtol=tolerance, atol=tolerance, equal_nan=True
        )


@dataclass
class LocalRun:
    """Forward and backward of an op on one rank."""

    results: list[torch.Tensor]

    # of the operands
    gradients: list[torch.Tensor | None]

    # collectives of every mesh axis
    records: list

    # indices of the operands that are saved for the backward
    saved: set[int]

    # whether each operand has an element on this rank
    has_elements: bool

    # names of the nodes of the backward
    nodes: list[str]


def local_call(call, strategies, axes, operands, result_duals, mesh):
    """The call of one device on its local operands."""
    implementation = next(s.implementation for s in strategies if s.implementation)
    results_meta = []
    for meta, duals in zip(call.results, result_duals, strict=True):
        layout = value_layout(duals)
        shape = layout.local_shape(meta.shape, mesh.shape, mesh.coordinate)
        results_meta.append(meta.with_shape(shape))
    operands_meta = []
    for meta, operand in zip(call.operands, operands, strict=True):
        operands_meta.append(meta.with_shape(tuple(operand.shape)))
    local = replace(call, operands=tuple(operands_meta), results=tuple(results_meta))
    return LocalCall(local, implementation, axes)


def check_same_backward(ranks: list[LocalRun]) -> None:
    """All devices run the same backward, and save the same operands for it.

    A gathered parameter that is saved is re-gathered in the backward, by all devices or by none.
    With a node less on one device, the devices would communicate in another order. Shards without
    elements belong to no gathered parameter.
    """
    compared = [rank for rank in ranks if rank.has_elements]
    assert all(rank.nodes == ranks[0].nodes for rank in compared)
    assert all(rank.saved == compared[0].saved for rank in compared), (
        "devices differ in the operands that they save for the backward"
    )


def rand(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


# fraction
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_mean_over_uneven_dims(n):
    call, x = call_and_operands(aten.mean.dim, rand(7, 4, 5), [0, 2])
    check(call, x, (n,), ["S0->P@fraction"])
    check(call, x, (n,), ["S2->P@fraction"])
    check(call, x, (n, 2), ["S0->P@fraction", "S2->P@fraction"])
    check(call, x, (2, n), ["S0->P@fraction", "S0->P@fraction"])
    check(call, x, (n, 2), ["S2->P@fraction", "S1->S0"])
    check(call, x, (2, n), ["R->R", "S0->P@fraction"])


@pytest.mark.parametrize(
    "target",
    [
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy_with_logits.default,
    ],
)
def test_mean_losses(target):
    call, x = call_and_operands(target, rand(5, 3), torch.rand(5, 3, dtype=torch.float64))
    check(call, x, (2,), ["S0,S0->P@fraction"])
    check(call, x, (2, 2), ["S0,S0->P@fraction", "S1,S1->P@fraction"])


def test_mean_loss_of_broadcast_operands():
    target, weight = torch.rand(5, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    call, x = call_and_operands(
        aten.binary_cross_entropy_with_logits.default, rand(5, 3), target, weight
    )
    check(call, x, (2,), ["S0,S0,R*->P@fraction"])
    check(call, x, (2, 2), ["S0,S0,R*->P@fraction", "S1,S1,S0->P@fraction"])


# bias_on_first
# ------------------------------------------------------------------------------------------


def test_row_parallel_linear():
    call, x = call_and_operands(aten.linear.default, rand(4, 3, 5), rand(6, 5), rand(6))
    check(call, x, (3,), ["S2,S1,R*->P@bias_on_first"])
    check(call, x, (2, 2), ["S2,S1,R*->P@bias_on_first", "S2,S1,R*->P@bias_on_first"])
    check(call, x, (2, 2), ["S2,S1,R*->P@bias_on_first", "R*,S0,S0->S2"])
    check(call, x, (2, 3), ["S0,R*,R*->S0", "S2,S1,R*->P@bias_on_first"])


def test_row_parallel_convolution():
    call, x = call_and_operands(
        aten.convolution.default,
        rand(2, 5, 4, 4),
        rand(3, 5, 3, 3),
        rand(3),
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
    )
    check(call, x, (2,), ["S1,S1,R*->P@bias_on_first"])
    call, x = call_and_operands(
        aten.conv2d.default, rand(2, 5, 4, 4), rand(3, 5, 3, 3), bias=rand(3)
    )
    check(call, x, (2,), ["S1,S1,R*->P@bias_on_first"])


@pytest.mark.parametrize("alpha", [1, 0.5])
def test_row_parallel_addmm(alpha):
    call, x = call_and_operands(
        aten.addmm.default, rand(3), rand(4, 5), rand(5, 3), alpha=alpha, beta=2
    )
    check(call, x, (3,), ["R*,S1,S0->P@bias_on_first"])
    call, x = call_and_operands(
        aten.baddbmm.default, rand(2, 4, 3), rand(2, 4, 5), rand(2, 5, 3), alpha=alpha
    )
    check(call, x, (2,), ["R*,S2,S1->P@bias_on_first"])


def test_linear_without_bias_is_plain():
    call, x = call_and_operands(aten.linear.default, rand(4, 5), rand(6, 5))
    check(call, x, (2,), ["S1,S1->P@bias_on_first"])


# vocab_embedding
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [-1, 0, 6])
def test_vocabulary_parallel_embedding(padding_idx):
    ids = torch.tensor([[0, 1, 6, 3, 3], [6, 6, 2, 0, 4]])
    call, x = call_and_operands(aten.embedding.default, rand(7, 4), ids, padding_idx)
    check(call, x, (3,), ["S0,R->P@vocab_embedding"])
    check(call, x, (2, 2), ["S0,R->P@vocab_embedding", "S0,R->P@vocab_embedding"])
    check(call, x, (2, 2), ["S1,R->S2", "S0,R->P@vocab_embedding"])
    check(call, x, (2, 2), ["R*,S0->S0", "S0,R->P@vocab_embedding"])


def test_embedding_id_out_of_the_whole_vocabulary():
    call, x = call_and_operands(aten.embedding.default, rand(7, 4), torch.tensor([0, 6]))
    x[1] = torch.tensor([0, 7])
    with pytest.raises(IndexError):
        check(call, x, (2,), ["S0,R->P@vocab_embedding"])


@pytest.mark.parametrize("padding_idx", [-1, 0, 6])
@pytest.mark.parametrize(("mode", "weighted"), [(0, False), (0, True), (1, False)])
def test_vocabulary_parallel_bags(padding_idx, mode, weighted):
    ids = torch.tensor([[0, 1, 6, 3, 3], [6, 6, 2, 0, 4], [6, 6, 6, 6, 6], [0, 0, 0, 0, 0]])
    weights = rand(4, 5) if weighted else None
    call, x = call_and_operands(capture_ops.bag_lookup, rand(7, 4), ids, weights, mode, padding_idx)
    for whole, cut in (("R*", "S0"),) if weighted else (("", ""),):
        check(call, x, (3,), [f"S0,R{whole and ',' + whole}->P@vocab_bags"])
        check(
            call,
            x,
            (2, 2),
            [f"S1,R{whole and ',' + whole}->S1", f"S0,R{whole and ',' + whole}->P@vocab_bags"],
        )
        check(
            call,
            x,
            (2, 2),
            [f"R*,S0{cut and ',' + cut}->S0", f"S0,R{whole and ',' + whole}->P@vocab_bags"],
        )


# vocab_cross_entropy
# ------------------------------------------------------------------------------------------


def cross_entropy_call(logits, target, weight=None, ignore_index=-100, smoothing=0.0):
    return call_and_operands(
        capture_ops.cross_entropy_sum, logits, target, weight, ignore_index, smoothing
    )


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    num_classes=st.integers(4, 9),
    mesh_shape=st.sampled_from([(2,), (3,), (4,), (2, 2)]),
    extra=st.sampled_from([None, (), (2,), (2, 3)]),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    ignore_index=st.sampled_from([-100, 2, 255]),
    scale=st.sampled_from([1.0, 300.0]),
)
def test_cross_entropy_over_sharded_classes(
    data, num_classes, mesh_shape, extra, weighted, smoothing, ignore_index, scale
):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    rows = () if extra is None else (5,)
    logits = (
        torch.randn(*rows, num_classes, *(extra or ()), dtype=torch.float64) * scale
    ).requires_grad_()
    target = torch.randint(0, num_classes, (*rows, *(extra or ())))
    target = torch.where(torch.rand(target.shape) < 0.3, ignore_index, target)
    weight = torch.rand(num_classes, dtype=torch.float64) if weighted else None
    call, x = cross_entropy_call(logits, target, weight, ignore_index, smoothing)
    dim = min(1, logits.dim() - 1)
    text = f"S{dim},R{',R' if weighted else ''}->R@vocab_cross_entropy"
    for axes in check(
        call, x, mesh_shape, [text] * len(mesh_shape), tolerance=1e-11 if scale > 1 else 1e-12
    ):
        for record in axes:
            assert record[-1][0] == "backward"  # no collective after the forward
            assert len(record) == 3


def test_cross_entropy_with_rows_on_another_axis():
    call, x = cross_entropy_call(rand(5, 7), torch.tensor([0, 6, -100, 3, 3]))
    check(call, x, (2, 3), ["S0,S0->P", "S1,R->R@vocab_cross_entropy"])
    check(call, x, (3, 2), ["S1,R->R@vocab_cross_entropy", "S0,S0->P"])
    check(call, x, (3, 2), ["S1,R->R@vocab_cross_entropy", "R,R->R"])


def test_cross_entropy_of_masked_classes():
    logits = torch.randn(4, 6, dtype=torch.float64)
    logits[:, 3:] = float("-inf")  # one device's classes are all impossible
    call, x = cross_entropy_call(logits.requires_grad_(), torch.tensor([0, 1, 2, 0]))
    check(call, x, (2,), ["S1,R->R@vocab_cross_entropy"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_cross_entropy_in_half_precision(dtype, tolerance):
    torch.manual_seed(0)
    logits = torch.randn(6, 40)
    call, x = cross_entropy_call(logits.to(dtype).requires_grad_(), torch.randint(0, 40, (6,)))
    check(call, x, (2,), ["S1,R->R@vocab_cross_entropy"], tolerance=tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_cross_entropy_of_half_precision_logarithms_summed_in_float32(smoothing, weighted, kind):
    """What GPUs' autocast computes: log_softmax as its operand is, the rest in float32."""
    torch.manual_seed(0)
    logits = torch.randn(6, 40).to(torch.bfloat16)
    weight = torch.rand(40) if weighted else None
    target = torch.randint(0, 40, (6,)) if kind == "classes" else torch.rand(6, 40).softmax(-1)
    if kind == "classes":
        target[2] = -100
    found = capture_ops.cross_entropy_sum(logits, target, weight, -100, smoothing, torch.float32)
    rounded = logits.log_softmax(
        -1
    ).float()  # whose own log_softmax is the same but for this rounding
    wanted = torch.nn.functional.cross_entropy(
        rounded, target, weight, reduction="sum", label_smoothing=smoothing
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=0.0)
    if kind == "classes":
        extra = [weight] if weighted else []
        call, x = call_and_operands(
            capture_ops.cross_entropy_sum,
            logits.requires_grad_(),
            target,
            weight,
            -100,
            smoothing,
            torch.float32,
        )
        check(call, x, (2,), [f"S1,R{',R' * len(extra)}->R@vocab_cross_entropy"], tolerance=2e-2)


def test_cross_entropy_backward_twice():
    call, x = cross_entropy_call(rand(5, 7), torch.tensor([0, 6, -100, 3, 3]))
    strategy = (AxisStrategy.parse("S1,R->R@vocab_cross_entropy"),)

    def work(mesh):
        mine = part(x[0].detach(), Layout.parse("S1"), mesh).requires_grad_()
        metas = (call.operands[0].with_shape(tuple(mine.shape)), call.operands[1])
        local = OpCall(call.target, call.args, call.kwargs, metas, call.results)
        run = build_local_op(call, strategy, LocalCall(local, "vocab_cross_entropy", (0,)), mesh)
        loss = run(mine, x[1])
        (first,) = torch.autograd.grad(loss, mine, retain_graph=True)
        (second,) = torch.autograd.grad(loss * 2, mine)
        return torch.equal(first * 2, second)

    assert all(run_on_threads((2,), work))


def test_cross_entropy_target_out_of_range():
    call, x = cross_entropy_call(rand(2, 7), torch.tensor([0, 6]))
    x[1] = torch.tensor([0, 7])
    with pytest.raises(IndexError):
        check(call, x, (2,), ["S1,R->R@vocab_cross_entropy"])


# batch_norm_sync
# ------------------------------------------------------------------------------------------


def in_parts(call, strategies, local, mesh):
    """As compiled programs run it."""
    before, exchange, after = batch_norm_in_parts(call, local, mesh)

    def run(x, *others):
        x, part, carrier = before.call(x, *others)
        return after.call(x, *others, exchange(part), carrier)

    return run


@pytest.mark.parametrize("build", [build_local_op, in_parts])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (7, 4, 5), (7, 4, 5, 3)])
def test_batch_norm_over_the_whole_batch(affine, tracked, shape, build):
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 20).requires_grad_()
    scale = [rand(4), rand(4)] if affine else [None, None]
    statistics = [torch.randn(4).double(), torch.rand(4).double()] if tracked else [None, None]
    call, tensors = call_and_operands(
        capture_ops.batch_norm_train, x, *scale, *statistics, 0.1, 1e-5
    )

    def text(x_at, channel_at, stat_at, implementation="@batch_norm_sync"):
        inputs = [x_at] + [channel_at] * 2 * affine + [stat_at] * 2 * tracked
        return f"{','.join(inputs)}->{','.join([x_at] + [stat_at] * 2 * tracked)}{implementation}"

    batch, channel = text("S0", "R*", "R"), text("S1", "S0", "S0", "")
    check(call, tensors, (2,), [batch], tolerance=1e-11, build=build)
    check(call, tensors, (3,), [batch], tolerance=1e-11, build=build)
    check(call, tensors, (2, 2), [batch, batch], tolerance=1e-11, build=build)
    check(call, tensors, (2, 2), [channel, batch], tolerance=1e-11, build=build)
    if len(shape) > 2:
        check(call, tensors, (2, 2), [batch, text("S2", "R*", "R")], tolerance=1e-11, build=build)


def test_batch_norm_over_devices_is_not_differentiated_twice():
    """What the others' values add to the second derivative is lost in the sum over devices."""
    x = rand(4, 3).requires_grad_()
    y = batch_norm_sync([], x, None, None, None, None, 0.1, 1e-5)[0]
    (grad,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [build_local_op, in_parts])
def test_batch_norm_in_bfloat16(build, dtype):
    """dtype: of parameters and buffers."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, dtype=torch.bfloat16).requires_grad_()
    scale, shift = (torch.randn(3).to(dtype).requires_grad_() for _ in range(2))
    statistics = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    call, tensors = call_and_operands(
        capture_ops.batch_norm_train, x, scale, shift, *statistics, 0.1, 1e-5
    )
    check(
        call, tensors, (2,), ["S0,R*,R*,R,R->S0,R,R@batch_norm_sync"], tolerance=3e-2, build=build
    )


@pytest.mark.parametrize("size", [1, 3])
def test_convolutions_on_cpus_are_the_users_own_calls(size):
    call, _ = call_and_operands(
        aten.conv2d.default, torch.randn(2, 4, 6, 6), torch.randn(8, 4, size, size)
    )
    assert call.on(torch.device("cpu")) is call
