"""Ring attention: attention with the sequence sharded over a mesh axis.

Every device keeps its queries; keys and values go around. A device attends to the keys and values
of one other at a time, while the next ones are received, and merges results by the log-sum-exp of
each row.

Under a causal mask the last device of contiguous chunks would do nearly all the work. So chunks are
exchanged before and after: of 2 n halves of chunks device i computes the i-th and the i-th from the
end. Then each step is the same work on every device: two of four quarters, or the diagonal.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.comm.mesh import AxisComm, Pending

aten = torch.ops.aten
Tensors = tuple[Tensor, ...]
_HALVES = (torch.float16, torch.bfloat16)


class RingAttention(torch.autograd.Function):
    """`scaled_dot_product_attention` on this device's chunks of the sequence.

    comm: the axis that cuts the sequence into equal chunks; where `causal`, row r sees the columns
    up to r, counted over all devices, and chunks have an even length. query [batch, heads, rows,
    width]; key, value [batch, heads or a divisor of it, columns, width]. Gives [batch, heads, rows,
    width], and gradients of the own chunks only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: AxisComm,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """Return this device's chunk of the result, in the query's dtype. Collective on `comm`.

        Args:
            comm: the axis that shards the sequence.
            query, key, value: this device's chunks, [batch, heads, rows, width]; keys may have
                fewer heads.
            causal: whether row r sees columns up to r only.
            scale: factor of query times key.
        """
        if causal:
            query, key, value = _zigzag(comm, (query, key, value))
        # [batch, heads, rows, width]
        out = torch.zeros_like(query, dtype=_wide(query))
        # [batch, heads, rows]
        lse = query.new_full((), -torch.inf, dtype=_wide(query)).repeat(query.shape[:-1])
        for source, pair in _around(comm, _flat((key, value))):
            rows, columns, diagonal = _visible(comm.index, source, causal, query, key)
            part, part_lse = _attend(
                _cut(query, rows), _seen(pair, (key, value), columns), diagonal, scale
            )
            seen_out, seen_lse = _cut(out, rows), lse[..., rows]
            merged = torch.logaddexp(seen_lse, part_lse.to(lse.dtype))
            seen_out.mul_((seen_lse - merged).exp().unsqueeze(-1))
            seen_out.addcmul_(part.to(out.dtype), (part_lse - merged).exp().unsqueeze(-1))
            seen_lse.copy_(merged)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.comm = comm
        ctx.causal = causal
        ctx.scale = scale
        if causal:
            (out,) = _zigzag(comm, (out,), back=True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this device's chunks of query, key and value. Collective."""
        query, key, value, out, lse = ctx.saved_tensors
        comm = ctx.comm
        if ctx.causal:
            (grad,) = _zigzag(comm, (grad,))
        grad_query = torch.zeros_like(query, dtype=_wide(query))
        # The gradient of a key follows it one step later, and one step further: to its device.
        local, flat = (key, value), _flat((key, value))
        due = torch.zeros_like(flat, dtype=_wide(flat))
        coming_due: Pending | None = None
        for source, pair in _around(comm, flat):
            rows, columns, diagonal = _visible(comm.index, source, ctx.causal, query, key)
            # Kernels require a contiguous log-sum-exp.
            merged = _cut(out, rows), lse[..., rows].contiguous()
            seen = _seen(pair, local, columns)
            parts = _attend_backward(
                _cut(grad, rows), _cut(query, rows), seen, merged, diagonal, ctx.scale
            )
            _cut(grad_query, rows).add_(parts[0])
            due = due if coming_due is None else coming_due.wait()
            for total, part in zip(_seen(due, local, columns), parts[1:], strict=True):
                total.add_(part)
            coming_due = _pass_on(comm, due)
        assert coming_due is not None
        due = coming_due.wait()
        grads = tuple(g.to(query.dtype) for g in (grad_query, *_seen(due, local, slice(None))))
        grads = _zigzag(comm, grads, back=True) if ctx.causal else grads
        return None, *grads, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over devices: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _cut(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[..., rows, :]


# --- Chunks on the ring.


def _around(comm: AxisComm, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (source device, its keys and values), step by step, this device's first; the next ones
    are received meanwhile. Collective on `comm`.

    Args:
        comm: the axis around which they go.
        flat: this device's keys and values, as of `_flat`.
    """
    for step in range(comm.size):
        # The last ones have been on every device.
        is_last = step == comm.size - 1
        coming = None if is_last else _pass_on(comm, flat)
        yield (comm.index - step) % comm.size, flat
        if coming is not None:
            flat = coming.wait()


def _visible(
    device: int, source: int, causal: bool, query: Tensor, key: Tensor
) -> tuple[slice, slice, bool]:
    """Return (the rows of `device` that attend to anything of `source`, the columns that they
    attend to, whether that is the diagonal).

    Of 2 n halves a device has the i-th and the i-th from the end: of an earlier device it sees the
    first half, with all its rows; of a later one it sees both halves, with its second half's rows.

    Args:
        device, source: indices on the axis.
        causal: whether rows attend to earlier columns only.
        query, key: of `device`, [batch, heads, rows, width].
    """
    everything = slice(None)
    if not causal or source == device:
        return everything, everything, causal
    if source < device:
        return everything, slice(0, key.shape[-2] // 2), False
    return slice(query.shape[-2] // 2, None), everything, False


def _pass_on(comm: AxisComm, flat: Tensor) -> Pending:
    """Launch the exchange that sends `flat` to the next device, and receives as much."""
    sent = [0] * comm.size
    received = [0] * comm.size
    sent[(comm.index + 1) % comm.size] = flat.numel()
    received[(comm.index - 1) % comm.size] = flat.numel()
    return comm.start_exchange(flat, sent, received)


def _seen(flat: Tensor, local: Tensors, columns: slice) -> Tensors:
    """Return some columns of a device's keys and values, or of their gradients.

    Args:
        flat: as they were received.
        local: this device's; the tensors have the same shapes.
    """
    parts = flat.split([x.numel() for x in local])
    return tuple(_cut(part.view(x.shape), columns) for part, x in zip(parts, local, strict=True))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _zigzag(comm: AxisComm, tensors: Tensors, back: bool = False) -> Tensors:
    """Return the tensors with halves i and 2 n - 1 - i on device i in place of chunk i, of every
    tensor [..., rows, width]; with `back` the inverse. Collective on `comm`.
    """
    n, i = comm.size, comm.index
    in_order = [(2 * device, 2 * device + 1) for device in range(n)]
    folded = [(device, 2 * n - 1 - device) for device in range(n)]
    before, after = (folded, in_order) if back else (in_order, folded)
    comes_from, goes_to = (
        {half: d for d, pair in enumerate(at) for half in pair} for at in (before, after)
    )
    held, wanted = before[i], after[i]
    halves = [x.chunk(2, -2) for x in tensors]
    shapes = [pair[0].shape for pair in halves]
    size = sum(shape.numel() for shape in shapes)
    flat = _flat(
        [pair[p] for p in sorted((0, 1), key=lambda p: goes_to[held[p]]) for pair in halves]
    )
    sent, received = [0] * n, [0] * n
    for mine, others in zip(held, wanted, strict=True):
        sent[goes_to[mine]] += size
        received[comes_from[others]] += size
    came = comm.start_exchange(flat, sent, received).wait().split(size)
    # Halves that one device sends come in their order.
    places = sorted((0, 1), key=lambda p: comes_from[wanted[p]])
    ordered = [
        part.split([shape.numel() for shape in shapes])
        for _, part in sorted(zip(places, came, strict=True))
    ]
    return tuple(
        torch.cat([ordered[0][k].view(shape), ordered[1][k].view(shape)], -2)
        for k, shape in enumerate(shapes)
    )


# --- One block: attention with the log-sum-exp of its rows. The backward of a block takes the
# whole's result and log-sum-exp, and gives the block's share of the gradients.


def _attend(query: Tensor, pair: Tensors, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (output, log of the sum of exponentials) of attention to one block of keys and
    values: [batch, heads, rows, width] and [batch, heads, rows].

    Args:
        query: [batch, heads, rows, width].
        pair: key and value, [batch, key heads, columns, width].
        causal: whether the block is the diagonal.
        scale: of the scores.
    """
    key, value = (_as_heads(x, query) for x in pair)
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    if _has_flash(query):
        return aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )[:2]
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ value.to(scores.dtype), lse


def _attend_backward(
    grad: Tensor, query: Tensor, pair: Tensors, merged: Tensors, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of `_attend`.

    Args:
        grad: of the result over all columns.
        merged: result and log-sum-exp over all columns.
        query, pair, causal, scale: as of `_attend`.
    """
    groups, (out, lse) = pair[0].shape[1], merged
    key, value = (_as_heads(x, query) for x in pair)
    if query.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad, query, key, value, out, lse, 0.0, causal), scale=scale
        )
    elif _has_flash(query):
        # The state of a dropout.
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            *(
                grad,
                query,
                key,
                value,
                out,
                lse,
                None,
                None,
                query.shape[-2],
                key.shape[-2],
                0.0,
                causal,
            ),
            *(unused, unused),
            scale=scale,
        )
    else:
        # [batch, heads, rows, columns]
        weights = (_scores(query, key, causal, scale) - lse.unsqueeze(-1)).exp()
        query, key, value, out, grad = (x.to(weights.dtype) for x in (query, key, value, out, grad))
        grad_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * scale
        grads = grad_scores @ key, grad_scores.mT @ query, weights.mT @ grad
    grad_query, grad_key, grad_value = grads
    return grad_query, _as_groups(grad_key, groups), _as_groups(grad_value, groups)


def _has_flash(query: Tensor) -> bool:
    """Return whether PyTorch's flash attention kernel runs such queries."""
    if query.device.type != "cuda" or query.dtype not in _HALVES:
        return False
    is_ampere = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return is_ampere and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the scaled products of queries and keys, -inf where masked."""
    scores = (query @ key.mT).to(_wide(query)) * scale
    if not causal:
        return scores
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return scores.masked_fill(ones.triu(1), -torch.inf)


def _as_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Return the heads that several query heads share, repeated for each of them."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _as_groups(grad: Tensor, groups: int) -> Tensor:
    """Return the gradient of shared keys or values, summed over the query heads that share them."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2)
