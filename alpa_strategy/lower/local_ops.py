"""Local implementations of ops, for which the plain op on shards would not give the shard of the
result.

Each one keeps the contract of dual placements (`ir/placement.py`) forward and backward. A Partial
result receives the full gradient, a sharded one its shard. An operand's gradient is its shard, this
device's partial value (`R*`), or complete (`R`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alpa_strategy.capture.ops import grouped_mm
from alpa_strategy.comm.mesh import AxisComm, MeshComm
from alpa_strategy.errors import ShardingError
from alpa_strategy.ir.op import AxisStrategy, LocalCall, OpCall, Slot, bind
from alpa_strategy.ir.per_rank import PerRank, stacked_over_ranks
from alpa_strategy.ir.placement import value_layout
from alpa_strategy.lower.ring_attention import RingAttention
from alpa_strategy.sharding.per_rank import inner_strategy
from alpa_strategy.sharding.rule_table import added_operand

LocalOp = Callable[..., Tensor | tuple[Tensor, ...]]


def build_local_op(
    call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm
) -> LocalOp:
    """Return the function that runs `local.implementation` on this device.

    Args:
        call: the op at global shapes.
        strategies: one per mesh axis.
        local: the op at this device's shapes; its implementation works over the mesh axes
            `local.axes`.
        mesh: this device's coordinate and collectives.

    Returns:
        A function of the local operands in `Slot` order, with the op's results.
    """
    if isinstance(call.target, PerRank):
        return _per_rank(call, strategies, local, mesh)
    return _BUILDERS[local.implementation or ""](call, strategies, local, mesh)


def _per_rank(
    call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm
) -> LocalOp:
    """Return the implementation of a `PerRank` op: its inner op, for one rank after the other."""
    target: PerRank = call.target
    of_rank: PerRank = local.call.target
    inner_strategies = tuple(inner_strategy(target, strategy) for strategy in strategies)
    inner_local = replace(local, call=of_rank.inner)
    run = build_local_op(target.inner, inner_strategies, inner_local, mesh)

    def run_for_all(*operands: Tensor) -> Any:
        return stacked_over_ranks(run, operands, of_rank.mapped, of_rank.num_ranks)

    return run_for_all


def _slices(
    call: OpCall, strategies: tuple[AxisStrategy, ...], operand: int, mesh: MeshComm
) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) per dim of this device's shard of operand number `operand`."""
    layout = value_layout(tuple(strategy.inputs[operand] for strategy in strategies))
    return layout.slices(call.operands[operand].shape, mesh.shape, mesh.coordinate)


def _fraction(
    call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm
) -> LocalOp:
    """Return the implementation of a mean over a sharded dim: the shard's mean, weighted by the
    shard's share of the elements. Args: as of `build_local_op`.
    """
    # (operand, dim) that is sharded -> this device's share of its size
    shares: dict[tuple[int, int], float] = {}
    for axis in local.axes:
        sharded_dims = []
        for i, placement in enumerate(strategies[axis].inputs):
            if placement.shard_dim is not None:
                sharded_dims.append((i, placement.shard_dim))
        # All of them are one index of the op: the first one will do.
        i, dim = sharded_dims[0]
        shares[i, dim] = local.call.operands[i].shape[dim] / call.operands[i].shape[dim]
    fraction = math.prod(shares.values())

    def run(*operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        results = local.call.call(*operands)
        if isinstance(results, Tensor):
            return results * fraction
        return tuple(result * fraction for result in results)

    return run


def _added_on_first(
    call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm
) -> LocalOp:
    """Return the implementation of an op whose results are summed over devices, and to which one
    operand must be added once: the bias of a row-parallel linear, the first operand of addmm.
    Args: as of `build_local_op`.

    The first device of the axes adds the operand, all others zeros.
    """
    added = added_operand(call)
    counts = all(mesh.coordinate[axis] == 0 for axis in local.axes)

    def once(operand: Tensor) -> Tensor:
        # The same autograd node on every device, so that the backward and its collectives have the
        # same order.
        return operand.masked_fill(torch.full((), not counts, device=operand.device), 0)

    def run(*operands: Tensor) -> Any:
        counted_once = list(operands)
        if added is not None:
            counted_once[added] = once(operands[added])
        return local.call.call(*counted_once)

    return run


def _of_vocabulary(
    run: Callable[..., Tensor], communicates: bool = False
) -> Callable[..., LocalOp]:
    """Return a builder for `run(first, size, *arguments of the op)`.

    `first` is the start of this device's chunk of the sharded dim, `size` the dim's full size.

    Args:
        communicates: whether `run` takes the axes that shard the dim as its third argument.
    """

    def build(
        call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm
    ) -> LocalOp:
        operand = call.args[0].index
        dim = strategies[local.axes[0]].inputs[operand].shard_dim or 0
        first, _ = _slices(call, strategies, operand, mesh)[dim]
        size = call.operands[operand].shape[dim]
        target = partial(run, first, size)
        if communicates:
            comms = tuple(mesh.axes[axis] for axis in local.axes)
            target = partial(run, first, size, comms)
        return replace(local.call, target=target).call

    return build


def _groups_of_rows(
    call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm
) -> LocalOp:
    """Return the implementation of a grouped matmul on shards of rows and of groups (experts): the
    offsets, which are full, are clamped to the shard. Args: as of `build_local_op`.
    """
    (first_row, last_row), _ = _slices(call, strategies, 0, mesh)
    (first_group, last_group), *_ = _slices(call, strategies, 1, mesh)

    def run(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        # offsets [groups]: the end of each group's rows.
        # bounds [local groups + 1]: the edges of the local groups' rows.
        bounds = torch.nn.functional.pad(offsets, (1, 0))[first_group : last_group + 1]
        return grouped_mm(x, weight, (bounds - first_row).clamp(0, last_row - first_row))

    return replace(local.call, target=run).call


def _ring_attention(
    call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm
) -> LocalOp:
    """Return the implementation of attention with the sequence sharded over one axis: keys and
    values go around it. Args: as of `build_local_op`.

    Raises:
        ShardingError: the sequence is sharded over several axes.
    """
    if len(local.axes) > 1:
        raise ShardingError(
            "keys and values can go around one mesh axis only", "cut the sequence along one of them"
        )
    bound = bind(call)
    comm = mesh.axes[local.axes[0]]
    query, key, value = (bound[name].index for name in ("query", "key", "value"))
    scale = bound["scale"] or call.operands[query].shape[-1] ** -0.5

    def run(*operands: Tensor) -> Tensor:
        return RingAttention.apply(
            comm, operands[query], operands[key], operands[value], bound["is_causal"], scale
        )

    return run


def _over_all(tensor: Tensor, comms: Sequence[AxisComm], op: str = "sum") -> Tensor:
    """Return the `sum` or `max` over the devices of these axes. Collective."""
    for comm in comms:
        tensor = comm.all_reduce(tensor, op)
    return tensor


# --- BatchNorm over the samples of all devices.


def batch_norm_in_parts(
    call: OpCall, local: LocalCall, mesh: MeshComm
) -> tuple[OpCall, LocalOp, OpCall]:
    """Split `batch_norm_sync` at its exchange, so that the ops before and after it are compiled.

    Returns:
        Three functions: of x, giving x, this device's statistics [2 C + 1] and the carrier of
        `_Statistics`; of these statistics, giving those of all devices; and of the operands with
        that x, the statistics of all devices and the carrier, giving the results. The first and the
        last are calls of torch's ops alone.
    """
    x = bind(call)["x"]
    comms = tuple(mesh.axes[axis] for axis in local.axes)
    before = replace(local.call, target=_Statistics.apply, args=(x,), kwargs=())

    statistics = Slot(len(call.operands))
    carrier = Slot(len(call.operands) + 1)
    after = replace(local.call, target=_normalised, args=(statistics, carrier, *local.call.args))
    return before, lambda part: _SharedStatistics.apply(part, comms), after


class _Statistics(torch.autograd.Function):
    """x [n, C, ...] -> x, its statistics [2 C + 1], and a carrier of C zeros.

    The statistics are means, sums of squared deviations, and the number of values. The carrier's
    gradient is the scale that turns the gradient of y into one of x (`_Affine`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = x.numel() // x.shape[1]
        if _has_kernels(x):
            mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
        else:
            variance, mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
        ctx.save_for_backward(x, mean)
        return (
            x.view_as(x),
            torch.cat([mean, variance * count, mean.new_full((1,), count)]),
            torch.zeros_like(mean),
        )

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad: Tensor, scale: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        channels, wide = len(mean), x.to(mean.dtype)
        grad_mean, grad_square, _ = grad.split([channels, channels, 1])
        of_statistics = _affine(wide, mean, 2 * grad_square, grad_mean / (x.numel() // channels))
        return of_statistics.addcmul_(grad_y.to(mean.dtype), _in_channels(scale, x)).to(x.dtype)


class _Affine(torch.autograd.Function):
    """y = (x - mean) scale + shift. Its backward passes the gradient of y to x unscaled.

    The scale is passed as the gradient of `carrier`. `_Statistics` multiplies by it when it adds
    the gradient of the statistics. So no gradient is written twice.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, carrier: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, mean, scale)
        return _affine(x, mean, scale, shift).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale = ctx.saved_tensors
        wide = x.to(mean.dtype)
        grad = grad_y.to(mean.dtype)
        if _has_kernels(x):
            _, grad_scale, grad_shift = torch.ops.aten.native_batch_norm_backward(
                grad,
                wide,
                None,
                None,
                None,
                mean,
                torch.ones_like(mean),
                True,
                0.0,
                [False, True, True],
            )
        else:
            dims = [0, *range(2, x.dim())]
            grad_scale = (grad * (wide - _in_channels(mean, x))).sum(dims)
            grad_shift = grad.sum(dims)
        return grad_y, None, grad_scale, grad_shift, scale


def _affine(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """(x - mean) scale + shift in one pass over x [n, C, ...]; the others are [C]."""
    if _has_kernels(x):
        return torch.batch_norm(
            x, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0, False
        )
    return (x - _in_channels(mean, x)) * _in_channels(scale, x) + _in_channels(shift, x)


def _has_kernels(x: Tensor) -> bool:
    """Whether PyTorch's batch norm kernels are used, each one pass over the memory.

    Not under a compiler, which fuses plain ops.
    """
    return x.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling()


def _in_channels(values: Tensor, x: Tensor) -> Tensor:
    """`values` [C] in a shape that broadcasts over x [n, C, ...]."""
    return values.view([-1] + [1] * (x.dim() - 2))


class _SharedStatistics(torch.autograd.Function):
    """This device's statistics [2 C + 1] (`_Statistics`) -> those of all devices' values."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comms: Sequence[AxisComm]) -> Tensor:
        shared = _combined(part, comms)
        ctx.save_for_backward(part, shared)
        ctx.comms = comms
        return shared

    @staticmethod
    # The sum over devices has no second backward.
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part, shared = ctx.saved_tensors
        channels = len(part) // 2
        count, total = part[-1], shared[-1]
        grad_mean, grad_square = _over_all(grad[: 2 * channels], ctx.comms).split(channels)
        # Over devices i: mean = sum(count_i mean_i) / total,
        # square = sum(square_i + count_i (mean_i - mean)^2).
        apart = 2 * (part[:channels] - shared[:channels]) * grad_square
        return torch.cat(
            [count * (grad_mean / total + apart), grad_square, grad[2 * channels :]]
        ), None


def _combined(part: Tensor, comms: Sequence[AxisComm]) -> Tensor:
    """Return all devices' statistics from this one's, by one all-gather per axis.

    Args:
        part: this device's means [C], sums of squared deviations [C] and number of elements [1] per
            channel, joined to [2 C + 1].
        comms: the axes over which the samples are sharded.
    """
    channels = len(part) // 2
    for comm in comms:
        # [devices, 2 C + 1]
        parts = comm.all_gather(part.unsqueeze(0), 0, comm.size)
        means, squares, counts = parts.split([channels, channels, 1], dim=1)
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        square = squares.sum(0) + ((means - mean).square() * counts).sum(0)
        part = torch.cat([mean, square, total])
    return part


def batch_norm_sync(comms: Sequence[AxisComm], x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """`capture.ops.batch_norm_train` on this device's samples x [n, C, ...].

    Args:
        comms: the axes that shard the batch.

    Returns:
        (y, new_running_mean, new_running_var), or (y,) without running statistics.
    """
    x, part, carrier = _Statistics.apply(x)
    return _normalised(_SharedStatistics.apply(part, tuple(comms)), carrier, x, *others)


def _normalised(
    statistics: Tensor,
    carrier: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the results of `batch_norm_sync`: the normalised input, and the new running mean and
    variance if there are any.

    Args:
        statistics: of all devices, [2 C + 1] as of `_combined`.
        carrier: of `_Statistics`.
        x: [samples, C, ...]; the others as of `torch.nn.functional.batch_norm`.
    """
    channels = x.shape[1]
    mean, square, total = statistics.split([channels, channels, 1])
    scale = (square / total + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    # 0, with a gradient: that of y with respect to the mean.
    shift = (mean.detach() - mean) * scale
    if bias is not None:
        shift = shift + bias
    y = _Affine.apply(x, mean.detach(), scale, shift, carrier)
    if running_mean is None or running_var is None:
        return (y,)
    # As PyTorch has it for the running variance; the one that normalises is biased.
    unbiased = square.detach() / (total - 1.0)
    new_mean = torch.lerp(running_mean, mean.detach().to(running_mean.dtype), momentum)
    return y, new_mean, torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)


# --- Embedding and cross entropy with the vocabulary (class) dim sharded, as in Megatron-LM
# (arXiv:1909.08053, section 3). Each device stores the rows of consecutive ids. The embedding
# leaves rows of other devices' ids zero (the sum over the axis is the lookup). The loss exchanges
# three numbers per row instead of the logits, and its backward exchanges nothing.


def _check_ids(valid: Tensor, name: str) -> None:
    """Raise IndexError unless all of `valid` are True: masking would hide ids that the full op
    rejects. On accelerators the kernel asserts it, without synchronising the host.
    """
    if valid.device.type != "cpu":
        torch._assert_async(valid.all(), f"{name} out of range")
    elif not bool(valid.all()):
        raise IndexError(f"{name} out of range")


def vocab_embedding(
    first_id: int, vocabulary: int, weight: Tensor, ids: Tensor, padding_idx: int = -1, *flags: bool
) -> Tensor:
    """Look up the ids whose rows this device stores: ids [...] -> partial value [..., width].

    Args:
        first_id: id of the first local row.
        vocabulary: number of ids of all devices.
        weight: [local rows, width].
        padding_idx: of the full table; negative: none.
        flags: of the full op, ignored. Gradients are never sparse here, and no rule shards a table
            whose gradients are scaled by frequency.

    Raises:
        IndexError: on the CPU, an id is outside the full vocabulary; elsewhere an assertion fails.
    """
    _check_ids((ids >= 0) & (ids < vocabulary), "embedding id")
    # Local rows, [...]; out of range if another device stores the row.
    rows = ids - first_id
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    padding_row = padding_idx - first_id if padding_idx >= 0 else -1
    # Ids of other devices read various rows: if all read the same one, the backward would add all
    # of their gradients there one by one.
    looked_up = torch.embedding(weight, rows.remainder(weight.shape[0]), padding_row)
    return looked_up.masked_fill_(elsewhere.unsqueeze(-1), 0)


def vocab_bags(
    first_id: int,
    vocabulary: int,
    weight: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    mode: int,
    padding_idx: int,
) -> Tensor:
    """Sum the rows of each bag that this device stores: ids [n, k] -> partial value [n, width].

    Args:
        first_id: id of the first local row.
        vocabulary: number of ids of all devices.
        weight: [local rows, width].
        weights: of the ids in their bag, [n, k]; None: 1 each.
        mode: 0: sums, 1: means.
        padding_idx: of the full table; its rows count nothing.

    Raises:
        IndexError: on the CPU, an id is outside the full vocabulary; elsewhere an assertion fails.
    """
    _check_ids((ids >= 0) & (ids < vocabulary), "embedding id")
    rows = ids - first_id
    here = (rows >= 0) & (rows < weight.shape[0])
    counted = ids != padding_idx
    # [n, k]: factor of each id's row in its bag on this device.
    share = (here & counted).to(weight.dtype)
    if weights is not None:
        share = share * weights
    if mode == 1:
        share = share / counted.sum(-1, keepdim=True).clamp(min=1)
    return torch.nn.functional.embedding_bag(
        rows.masked_fill(~here, 0), weight, mode="sum", per_sample_weights=share
    )


class VocabCrossEntropy(torch.autograd.Function):
    """`capture.ops.cross_entropy_sum` on logits of this device's classes only.

    Loss of a sample = A log(sum_c exp z_c) - sum_c a_c z_c, where a_c = weight_c ((1 - s) target_c
    + s / C), A = sum_c a_c. z is shifted by the sample's maximum over all devices. Gradient:
    A softmax_c - a_c, ready at the end of the forward. Half-precision logits are computed in fp32.

    Arguments of `forward`:
        first: index of this device's first class.
        num_classes: of all devices.
        comms: the axes that shard the classes.
        logits: [samples, local classes], [samples, local classes, *d] or [local classes].
        target: class indices among all classes, [samples, *d].
        weight: of all classes, [num_classes]; None: all are 1.
        ignore_index, smoothing: as of `torch.nn.functional.cross_entropy`.
        summed_in: dtype of the result; None: that of the logits.

    Returns:
        The loss summed over the samples, equal on all devices of `comms`.

    Raises:
        IndexError: a target is not a class.
    """

    @staticmethod
    def forward(
        ctx: Any,
        first: int,
        num_classes: int,
        comms: tuple[AxisComm, ...],
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        summed_in: torch.dtype | None = None,
    ) -> Tensor:
        # Dim of the classes.
        dim = min(1, logits.dim() - 1)
        here = logits.shape[dim]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        is_counted = target != ignore_index
        _check_ids(~is_counted | (target >= 0) & (target < num_classes), "cross entropy target")
        # [samples, 1, *d], as all that is exchanged.
        target = torch.where(is_counted, target, 0).unsqueeze(dim)
        is_counted = is_counted.unsqueeze(dim)
        weight = logits.new_ones(num_classes, dtype=dtype) if weight is None else weight.to(dtype)
        amount = (1.0 - smoothing) * weight[target] * is_counted
        # A
        total = (amount + smoothing * weight.mean()) * is_counted
        class_shape = [1] * logits.dim()
        class_shape[dim] = -1
        class_weights = weight[first : first + here].view(class_shape)
        # What smoothing gives each class here.
        class_weights = class_weights * (smoothing / num_classes)
        is_here = (target >= first) & (target < first + here)
        index, amount = torch.where(is_here, target - first, 0), amount * is_here

        highest = _over_all(logits.detach().amax(dim, keepdim=True).to(dtype), comms, "max")
        shifted = logits.detach().to(dtype) - highest
        weighted = torch.where(amount != 0, shifted.gather(dim, index), 0.0) * amount
        if smoothing > 0.0:
            weighted = weighted + (shifted * class_weights).sum(dim, keepdim=True)
        exponentials = shifted.exp_()
        denominator, weighted = _over_all(
            torch.stack([exponentials.sum(dim, keepdim=True), weighted]), comms
        )
        row_loss = (total * denominator.log() - weighted).masked_fill(~is_counted, 0.0)

        ctx.dtype = logits.dtype
        if ctx.needs_input_grad[3]:
            gradient = exponentials.mul_(total / denominator)
            if smoothing > 0.0:
                gradient.addcmul_(class_weights, is_counted.to(dtype), value=-1)
            gradient.scatter_add_(dim, index, -amount)
            # fp16 would lose the small probabilities
            ctx.save_for_backward(
                gradient.to(logits.dtype) if logits.dtype == torch.bfloat16 else gradient
            )
        return row_loss.sum().to(summed_in or logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return None, None, None, (gradient * grad.to(gradient.dtype)).to(ctx.dtype), *(None,) * 5


_BUILDERS: dict[str, Callable[[OpCall, tuple[AxisStrategy, ...], LocalCall, MeshComm], LocalOp]] = {
    "fraction": _fraction,
    "bias_on_first": _added_on_first,
    "vocab_embedding": _of_vocabulary(vocab_embedding),
    "vocab_bags": _of_vocabulary(vocab_bags),
    "vocab_cross_entropy": _of_vocabulary(VocabCrossEntropy.apply, communicates=True),
    "batch_norm_sync": lambda call, strategies, local, mesh: (
        replace(
            local.call, target=partial(batch_norm_sync, [mesh.axes[axis] for axis in local.axes])
        ).call
    ),
    "ring_attention": _ring_attention,
    "groups_of_rows": _groups_of_rows,
}
