"""Embedding and cross entropy with the vocabulary (class) dim sharded, as in Megatron-LM (arXiv:1909.08053, section 3).

Each device holds a run of ids. The embedding leaves rows of other devices' ids zero (the sum over the axis is the
lookup); the loss exchanges three or four numbers per row instead of the logits, and its backward exchanges nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alpa_strategy.runtime.comm import AxisComm


def _check_ids(valid: Tensor, what: str) -> None:
    """Masking would hide ids that the whole op refuses. No host synchronisation on accelerators."""
    if valid.device.type != "cpu":
        torch._assert_async(valid.all(), f"{what} out of range")
    elif not bool(valid.all()):
        raise IndexError(f"{what} out of range")


class _VocabEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, elsewhere: Tensor, padding_row: int, by_frequency: bool):
        num_rows = weight.shape[0]
        if num_rows == 0:
            result = weight.new_zeros(*rows.shape, weight.shape[1])
        else:
            result = torch.embedding(weight, rows.masked_fill(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(-1), 0)
        # Ids of other devices and padding go to one row past the end in the backward, which skips that row: they
        # neither pile up on a real row nor count in `by_frequency`.
        skipped = elsewhere if padding_row < 0 else elsewhere | (rows == padding_row)
        ctx.save_for_backward(rows.masked_fill(skipped, num_rows))
        ctx.num_rows, ctx.by_frequency = num_rows, by_frequency
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        (rows,) = ctx.saved_tensors
        grad_weight = torch.ops.aten.embedding_dense_backward(
            grad, rows, ctx.num_rows + 1, ctx.num_rows, ctx.by_frequency
        )
        return grad_weight[: ctx.num_rows], None, None, None, None


def vocab_embedding(
    weight: Tensor, ids: Tensor, first_id: int, vocabulary: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """weight [local rows, width] of ids from `first_id`; ids [...] -> this device's summand [..., width].

    `padding_idx` is the whole table's (negative: none). IndexError when an id is outside the whole vocabulary.
    """
    _check_ids((ids >= 0) & (ids < vocabulary), "embedding id")
    rows = ids - first_id
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    padding_row = padding_idx - first_id if padding_idx >= 0 else -1
    return _VocabEmbedding.apply(weight, rows, elsewhere, padding_row, scale_grad_by_freq)


class _VocabCrossEntropy(torch.autograd.Function):
    """Row loss = A log(sum_c exp z_c) - sum_c a_c z_c, where a_c = weight_c ((1 - s) target_c + s / C), A = sum_c a_c.

    z is shifted by the row's maximum over all devices. Gradient: A softmax_c - a_c, ready at the end of the forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        first_class: int,
        num_classes: int,
        comms: tuple[AxisComm, ...],
    ) -> Tensor:
        dim = min(1, logits.dim() - 1)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        num_local = logits.shape[dim]
        if weight is not None:
            if weight.shape[0] != num_local:  # whole on this device
                weight = weight.narrow(0, first_class, num_local)
            weight = weight.to(dtype).view([-1 if d == dim else 1 for d in range(logits.dim())])

        if num_local:
            highest = logits.detach().amax(dim, keepdim=True).to(dtype)
        else:
            shape = [1 if d == dim else size for d, size in enumerate(logits.shape)]
            highest = logits.new_full(shape, float("-inf"), dtype=dtype)
        for comm in comms:
            highest = comm.all_reduce(highest, "max")
        shifted = logits.detach().to(dtype) - highest

        kept, hot, shares = _target_shares(
            logits, target, weight, ignore_index, smoothing, first_class, num_classes, dtype
        )
        weighted = torch.zeros_like(highest)
        # Without class weights the a_c of a row add up to 1 whatever the smoothing: nothing to exchange.
        total = torch.zeros_like(highest) if weight is not None or kept is None else None
        if hot is not None:
            index, amount = hot
            if num_local:
                weighted += torch.where(amount != 0, shifted.gather(dim, index), 0.0) * amount
            if total is not None:
                total += amount
        if shares is not None:
            weighted += (shifted * shares).sum(dim, keepdim=True)
            if total is not None:
                total += shares.expand_as(shifted).sum(dim, keepdim=True)

        log_probs_needed = ctx.needs_input_grad[1]
        centred = shifted if log_probs_needed else None
        exponentials = shifted.exp() if log_probs_needed else shifted.exp_()
        per_row = [exponentials.sum(dim, keepdim=True), weighted, *([] if total is None else [total])]
        sums = torch.stack(per_row)
        for comm in comms:
            sums = comm.all_reduce(sums)
        denominator, weighted = sums[0], sums[1]
        total = torch.ones_like(denominator) if total is None else sums[2]
        row_loss = total * denominator.log() - weighted
        if kept is not None:
            row_loss = row_loss.masked_fill(~kept, 0.0)
            total = total.masked_fill(~kept, 0.0)

        ctx.saved_kind = (logits.dtype, smoothing)
        gradient = log_probs = None
        if ctx.needs_input_grad[0]:
            gradient = exponentials.mul_(total / denominator)
            if shares is not None:
                gradient -= shares if kept is None else shares * kept
            if hot is not None and num_local:
                gradient.scatter_add_(dim, hot[0], -hot[1])
            if logits.dtype == torch.bfloat16:  # fp16 would lose the small probabilities
                gradient = gradient.to(logits.dtype)
        if log_probs_needed:
            log_probs = centred - denominator.log()
            if weight is not None:
                log_probs = log_probs * weight
        ctx.save_for_backward(gradient, log_probs)
        return row_loss.sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        gradient, log_probs = ctx.saved_tensors
        dtype, smoothing = ctx.saved_kind
        grad_logits = grad_target = None
        if gradient is not None:
            grad_logits = (gradient * grad.to(gradient.dtype)).to(dtype)
        if log_probs is not None:
            grad_target = (log_probs * (grad.to(log_probs.dtype) * (smoothing - 1.0))).to(dtype)
        return grad_logits, grad_target, None, None, None, None, None, None


def _target_shares(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    first_class: int,
    num_classes: int,
    dtype: torch.dtype,
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None, Tensor | None]:
    """The a_c of this device's classes as (rows that count, (class index, amount) of one class a row, dense part)."""
    dim = min(1, logits.dim() - 1)
    uniform = smoothing / num_classes
    if target.is_floating_point():
        shares = target.detach().to(dtype) * (1.0 - smoothing) + uniform
        return None, None, shares if weight is None else shares * weight

    kept = target != ignore_index
    _check_ids(~kept | (target >= 0) & (target < num_classes), "cross entropy target")
    local = target - first_class
    ours = (kept & (local >= 0) & (local < logits.shape[dim])).unsqueeze(dim)
    index = torch.where(ours, local.unsqueeze(dim), 0)
    amount = ours.to(dtype) * (1.0 - smoothing)
    if weight is not None and logits.shape[dim]:
        amount = amount * weight.flatten()[index]
    shares = None
    if smoothing > 0.0:
        shares = torch.full([1] * logits.dim(), uniform, dtype=dtype, device=logits.device)
        shares = shares if weight is None else shares * weight
    return kept.unsqueeze(dim), (index, amount), shares


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    first_class: int,
    num_classes: int,
    comms: tuple[AxisComm, ...],
) -> Tensor:
    """`capture.ops.cross_entropy_sum` on logits that hold this device's classes only, from `first_class`.

    logits [N, c], [N, c, d1, ...] or [c]; target indices of the whole class range [N, d1, ...], or probabilities shaped
    as logits; weight [c] or whole. `comms`: the axes that shard the classes. Returns the summed loss, equal on all of
    their devices; half-precision logits are computed in fp32. IndexError when a target is not a class.
    """
    return _VocabCrossEntropy.apply(
        logits, target, weight, ignore_index, label_smoothing, first_class, num_classes, comms
    )
