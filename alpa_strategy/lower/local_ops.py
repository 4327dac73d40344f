"""Local implementations: what a device runs where the plain op on its shards would not give its part of the result.

Each keeps the dual-placement contract of `sharding.layout` forward and backward: a Partial result receives the whole
gradient, a sharded one its shard; an operand's gradient is its shard, this device's summand (`R*`) or complete (`R`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.capture.ops import grouped_mm
from alpa_strategy.comm.mesh import AxisComm, MeshComm
from alpa_strategy.errors import ShardingError
from alpa_strategy.ir.op import AxisStrategy, LocalCall, OpCall, Slot, bind
from alpa_strategy.ir.placement import value_layout
from alpa_strategy.lower.ring_attention import RingAttention
from alpa_strategy.sharding.rule_table import added_operand

LocalOp = Callable[..., Tensor | tuple[Tensor, ...]]


def build_local_op(call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm) -> LocalOp:
    """The callable that runs `local.implementation` on this device.

    Args:
        call: the op at global shapes.
        strategies: one per mesh axis.
        local: the op at this device's shapes; its implementation works over the mesh axes `local.axes`.
        mesh: this device's place and collectives.

    Returns a function of the local operands in `Slot` order, which returns what the op returns.
    """
    return _BUILDERS[local.implementation or ""](call, strategies, local, mesh)


def _slices(
    call: OpCall, strategies: tuple[AxisStrategy, ...], operand: int, mesh: MeshComm
) -> tuple[tuple[int, int], ...]:
    """(start, stop) per dim of this device's part of an operand."""
    layout = value_layout(tuple(strategy.inputs[operand] for strategy in strategies))
    return layout.slices(call.operands[operand].shape, mesh.shape, mesh.coordinate)


def _fraction(call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm) -> LocalOp:
    """A mean of a part counts for as much of the whole mean as the part has of its elements."""
    shares: dict[tuple[int, int], float] = {}  # (operand, dim) that an axis cuts first -> our share of its length
    for axis in local.axes:
        dims = [(i, p.shard_dim) for i, p in enumerate(strategies[axis].inputs) if p.shard_dim is not None]
        i, dim = dims[0]  # all of them are one index of the op
        shares[i, dim] = local.call.operands[i].shape[dim] / call.operands[i].shape[dim]
    fraction = math.prod(shares.values())

    def run(*operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        results = local.call.call(*operands)
        if isinstance(results, Tensor):
            return results * fraction
        return tuple(result * fraction for result in results)

    return run


def _added_on_first(call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm) -> LocalOp:
    """Results that sum up, of which one operand must be part once: a row-parallel linear's bias, what addmm adds to."""
    added = added_operand(call)
    counts = all(mesh.coordinate[axis] == 0 for axis in local.axes)

    def once(operand: Tensor) -> Tensor:
        # The same node of the graph everywhere: the backward takes one order, and with it what it communicates.
        return operand.masked_fill(torch.full((), not counts, device=operand.device), 0)

    def run(*operands: Tensor) -> Any:
        return local.call.call(*(once(x) if i == added else x for i, x in enumerate(operands)))

    return run


def _of_vocabulary(run: Callable[..., Tensor], communicates: bool = False) -> Callable[..., LocalOp]:
    """A builder for `run(first, number, *arguments of the op)`: where this device's part of the dim that is cut begins,
    and the dim's length. communicates: the axes that cut it come third."""

    def build(call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm) -> LocalOp:
        operand = call.args[0].index
        dim = strategies[local.axes[0]].inputs[operand].shard_dim or 0
        place = _slices(call, strategies, operand, mesh)[dim][0], call.operands[operand].shape[dim]
        comms = (tuple(mesh.axes[axis] for axis in local.axes),) * communicates
        return replace(local.call, target=partial(run, *place, *comms)).call

    return build


def _groups_of_rows(call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm) -> LocalOp:
    """Some of the rows and some of the groups (experts): the offsets, which are whole, are clamped to them."""
    (first_row, last_row), _ = _slices(call, strategies, 0, mesh)
    (first_group, last_group), *_ = _slices(call, strategies, 1, mesh)

    def run(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        # offsets [groups] are where each group's rows end; bounds [own groups + 1] are the edges of ours.
        bounds = torch.nn.functional.pad(offsets, (1, 0))[first_group : last_group + 1]
        return grouped_mm(x, weight, (bounds - first_row).clamp(0, last_row - first_row))

    return replace(local.call, target=run).call


def _ring_attention(call: OpCall, strategies: tuple[AxisStrategy, ...], local: LocalCall, mesh: MeshComm) -> LocalOp:
    """Queries, keys and values in chunks of the sequence; one axis only (see `op_strategies`)."""
    if len(local.axes) > 1:
        raise ShardingError("keys and values can go around one mesh axis only", "cut the sequence along one of them")
    bound, comm = bind(call), mesh.axes[local.axes[0]]
    query, key, value = (bound[name].index for name in ("query", "key", "value"))
    scale = bound["scale"] or call.operands[query].shape[-1] ** -0.5

    def run(*operands: Tensor) -> Tensor:
        return RingAttention.apply(comm, operands[query], operands[key], operands[value], bound["is_causal"], scale)

    return run


def _over_all(tensor: Tensor, comms: Sequence[AxisComm], op: str = "sum") -> Tensor:
    """Sum or maximum over the devices of these axes."""
    for comm in comms:
        tensor = comm.all_reduce(tensor, op)
    return tensor


# --- BatchNorm over the rows of all devices.


def batch_norm_in_parts(call: OpCall, local: LocalCall, mesh: MeshComm) -> tuple[OpCall, LocalOp, OpCall]:
    """`batch_norm_sync` for compilers: what comes before its exchange and after it are calls of torch's ops alone.

    Returns (operand x -> this device's statistics [2 C + 1], these -> all devices', the operands and these -> results).
    """
    x, comms = bind(call)["x"], tuple(mesh.axes[axis] for axis in local.axes)
    before = replace(local.call, target=_statistics, args=(x,), kwargs=())
    after = replace(local.call, target=_normalised, args=(Slot(len(call.operands)), *local.call.args))
    return before, lambda part: _SharedStatistics.apply(part, comms), after


def _statistics(x: Tensor) -> Tensor:
    """This device's means, sums of squared deviations and number of values: [2 C + 1]. Autograd has its backward."""
    dtype, count = torch.promote_types(x.dtype, torch.float32), x.numel() // x.shape[1]
    variance, mean = torch.var_mean(x.to(dtype), [d for d in range(x.dim()) if d != 1], correction=0)
    return torch.cat([mean, variance * count, mean.new_full((1,), count)])


def _normalised(
    statistics: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """`batch_norm_sync` with all devices' statistics."""
    channels, shape = x.shape[1], [-1] + [1] * (x.dim() - 2)
    mean, square, total = statistics.split([channels, channels, 1])
    scale = (square / total + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    y = (x - mean.view(shape)) * scale.view(shape)
    y = (y if bias is None else y + bias.view(shape)).to(x.dtype)
    return y, *_running((mean.detach(), square.detach(), total), (running_mean, running_var), momentum)


class _SharedStatistics(torch.autograd.Function):
    """Statistics of all devices' values, of those of each's: `_statistics`, [2 C + 1]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comms: Sequence[AxisComm]) -> Tensor:
        shared = _combined(part, comms)
        ctx.save_for_backward(part, shared)
        ctx.comms = comms
        return shared

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part, shared = ctx.saved_tensors
        grad = _over_all(grad, ctx.comms)
        channels = len(part) // 2
        count, total = part[-1], shared[-1]
        grad_mean, grad_square, none = grad.split([channels, channels, 1])
        # mean = sum(count_i mean_i) / total; square = sum(square_i + count_i (mean_i - mean)^2), i: the devices
        apart = 2 * (part[:channels] - shared[:channels]) * grad_square
        return torch.cat([count * (grad_mean / total + apart), grad_square, torch.zeros_like(none)]), None


def _combined(part: Tensor, comms: Sequence[AxisComm]) -> Tensor:
    """All devices' statistics [2 C + 1] of this one's, in one exchange an axis."""
    channels = len(part) // 2
    for comm in comms:
        parts = comm.all_gather(part.unsqueeze(0), 0, comm.size)  # [devices, 2 C + 1]
        means, squares, counts = parts.split([channels, channels, 1], dim=1)
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        square = squares.sum(0) + ((means - mean).square() * counts).sum(0)
        part = torch.cat([mean, square, total])
    return part


class _BatchNormSync(torch.autograd.Function):
    """PyTorch's own kernels, each one pass over the memory, around the exchange of what the devices found."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comms: Sequence[AxisComm]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        if x.device.type in ("cpu", "cuda"):  # nowhere else has it a kernel
            dtype, count = torch.promote_types(x.dtype, torch.float32), x.numel() // channels
            mean, variance = torch.batch_norm_update_stats(x.to(dtype), None, None, 0.0)
            part = torch.cat([mean, variance * count, mean.new_tensor([count])])
        else:
            part = _statistics(x)
        mean, square, total = _combined(part, comms).split([channels, channels, 1])
        variance = square / total
        scale, shift = (p if p is None else p.to(mean.dtype) for p in (weight, bias))  # as kernels want them
        y = torch.batch_norm(x, scale, shift, mean, variance, False, 0.0, eps, False)
        ctx.save_for_backward(x, weight, mean, variance, total)
        ctx.comms, ctx.eps, ctx.bias_dtype = comms, eps, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, square, total)
        return y, mean, square, total

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, total = ctx.saved_tensors
        wide, grad_y = x.to(mean.dtype), grad_y.to(mean.dtype)
        inverse_std = (variance + ctx.eps).rsqrt()
        # This device's summands, [C] each: weight and bias are R* on the axes.
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad_y, wide, None, None, None, mean, inverse_std, True, ctx.eps, [False, True, True]
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = _over_all(torch.stack([grad_bias, grad_weight]), ctx.comms)  # [2, C]
            scale = inverse_std if weight is None else inverse_std * weight
            less, slope = (-scale * sums / total).unbind()
            # scale (dy - mean(dy) - normal mean(dy normal)), with normal = (x - mean) inverse_std
            grad_x = torch.batch_norm(wide, slope, less, mean, variance, False, 0.0, ctx.eps, False)
            grad_x = grad_x.addcmul_(grad_y, scale.view([-1] + [1] * (x.dim() - 2))).to(x.dtype)
        grad_weight = grad_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = grad_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


def batch_norm_sync(
    comms: Sequence[AxisComm],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """`capture.ops.batch_norm_train` on this device's part of the batch x [n, C, ...]; `comms`: the axes that share it.

    Returns (y, new_running_mean, new_running_var), or (y,) without running statistics.
    """
    y, mean, square, total = _BatchNormSync.apply(x, weight, bias, eps, tuple(comms))
    return y, *_running((mean, square, total), (running_mean, running_var), momentum)


def _running(
    found: tuple[Tensor, Tensor, Tensor], running: tuple[Tensor | None, Tensor | None], momentum: float
) -> tuple[Tensor, ...]:
    """The new running mean and variance, where there are such. found: mean, sum of squared deviations, their number."""
    (mean, square, total), (running_mean, running_var) = found, running
    if running_mean is None or running_var is None:
        return ()
    unbiased = square / (total - 1.0)  # as torch: running_var is unbiased, the variance that normalises is not
    new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
    new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return new_mean, new_var


# --- Embedding and cross entropy with the vocabulary (class) dim sharded, as in Megatron-LM (arXiv:1909.08053, section
# 3). Each device holds a run of ids. The embedding leaves rows of other devices' ids zero (the sum over the axis is the
# lookup); the loss exchanges three numbers per row instead of the logits, and its backward exchanges nothing.


def _check_ids(valid: Tensor, what: str) -> None:
    """Masking would hide ids that the whole op refuses. No host synchronisation on accelerators."""
    if valid.device.type != "cpu":
        torch._assert_async(valid.all(), f"{what} out of range")
    elif not bool(valid.all()):
        raise IndexError(f"{what} out of range")


def vocab_embedding(
    first_id: int, vocabulary: int, weight: Tensor, ids: Tensor, padding_idx: int = -1, *flags: bool
) -> Tensor:
    """weight [local rows, width] of ids from `first_id`; ids [...] -> this device's summand [..., width].

    `padding_idx` is the whole table's (negative: none); of the whole op's `flags` gradients are never sparse here, and
    no rule cuts a table whose gradients are scaled by frequency. IndexError: an id is outside the whole vocabulary.
    """
    _check_ids((ids >= 0) & (ids < vocabulary), "embedding id")
    rows = ids - first_id  # [...], of the local weight; outside it where another device holds the id
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    padding_row = padding_idx - first_id if padding_idx >= 0 else -1
    # Ids of other devices read any row, not one for all: in the backward they would pile up there.
    found = torch.embedding(weight, rows.remainder(weight.shape[0]), padding_row)
    return found.masked_fill_(elsewhere.unsqueeze(-1), 0)


def vocab_bags(
    first_id: int, vocabulary: int, weight: Tensor, ids: Tensor, weights: Tensor | None, mode: int, padding_idx: int
) -> Tensor:
    """weight [local rows, width] of ids from `first_id`; ids [n, k] -> this device's summand [n, width] of each bag.

    Ids of other devices, and padding, weigh nothing. Sums (mode 0) or means (1); `padding_idx`: the whole table's.
    """
    _check_ids((ids >= 0) & (ids < vocabulary), "embedding id")
    rows = ids - first_id
    here = (rows >= 0) & (rows < weight.shape[0])
    counted = ids != padding_idx
    share = (here & counted).to(weight.dtype)  # [n, k]: what each id adds to its bag on this device
    if weights is not None:
        share = share * weights
    if mode == 1:
        share = share / counted.sum(-1, keepdim=True).clamp(min=1)
    return torch.nn.functional.embedding_bag(rows.masked_fill(~here, 0), weight, mode="sum", per_sample_weights=share)


class VocabCrossEntropy(torch.autograd.Function):
    """`capture.ops.cross_entropy_sum` on logits that hold this device's classes only, from `first`.

    Row loss = A log(sum_c exp z_c) - sum_c a_c z_c, where a_c = weight_c ((1 - s) target_c + s / C), A = sum_c a_c.
    z is shifted by the row's maximum over all devices. Gradient: A softmax_c - a_c, ready at the end of the forward.

    logits [N, c], [N, c, d1, ...] or [c]; target indices [N, d1, ...] and weight, both of the whole class range.
    `comms`: the axes that shard the classes. Gives the summed loss, equal on all of their devices; half-precision
    logits are computed in fp32. IndexError when a target is not a class.
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
        dim = min(1, logits.dim() - 1)
        here, dtype = logits.shape[dim], torch.promote_types(logits.dtype, torch.float32)
        kept = target != ignore_index
        _check_ids(~kept | (target >= 0) & (target < num_classes), "cross entropy target")
        # Logits are [N, c, d1, ...], c classes of this device; targets, and what is exchanged, [N, 1, d1, ...].
        kept, target = kept.unsqueeze(dim), torch.where(kept, target, 0).unsqueeze(dim)
        weight = logits.new_ones(num_classes, dtype=dtype) if weight is None else weight.to(dtype)
        amount = (1.0 - smoothing) * weight[target] * kept
        total = (amount + smoothing * weight.mean()) * kept  # A
        every = weight[first : first + here].view([-1 if d == dim else 1 for d in range(logits.dim())])
        every = every * (smoothing / num_classes)  # what smoothing gives each class here
        is_here = (target >= first) & (target < first + here)
        index, amount = torch.where(is_here, target - first, 0), amount * is_here

        highest = _over_all(logits.detach().amax(dim, keepdim=True).to(dtype), comms, "max")
        shifted = logits.detach().to(dtype) - highest
        weighted = torch.where(amount != 0, shifted.gather(dim, index), 0.0) * amount
        if smoothing > 0.0:
            weighted = weighted + (shifted * every).sum(dim, keepdim=True)
        exponentials = shifted.exp_()
        denominator, weighted = _over_all(torch.stack([exponentials.sum(dim, keepdim=True), weighted]), comms)
        row_loss = (total * denominator.log() - weighted).masked_fill(~kept, 0.0)

        ctx.dtype = logits.dtype
        if ctx.needs_input_grad[3]:
            gradient = exponentials.mul_(total / denominator)
            if smoothing > 0.0:
                gradient.addcmul_(every, kept.to(dtype), value=-1)
            gradient.scatter_add_(dim, index, -amount)
            # fp16 would lose the small probabilities
            ctx.save_for_backward(gradient.to(logits.dtype) if logits.dtype == torch.bfloat16 else gradient)
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
        replace(local.call, target=partial(batch_norm_sync, [mesh.axes[axis] for axis in local.axes])).call
    ),
    "ring_attention": _ring_attention,
    "groups_of_rows": _groups_of_rows,
}
