"""Embedding and cross entropy with the vocabulary (class) dim sharded, as in Megatron-LM (arXiv:1909.08053, section 3).

Each device holds a run of ids. The embedding leaves rows of other devices' ids zero (the sum over the axis is the
lookup); the loss exchanges three numbers per row instead of the logits, and its backward exchanges nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alpa_strategy.comm.mesh import AxisComm


def _check_ids(valid: Tensor, what: str) -> None:
    """Masking would hide ids that the whole op refuses. No host synchronisation on accelerators."""
    if valid.device.type != "cpu":
        torch._assert_async(valid.all(), f"{what} out of range")
    elif not bool(valid.all()):
        raise IndexError(f"{what} out of range")


def vocab_embedding(
    first_id: int,
    vocabulary: int,
    weight: Tensor,
    ids: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """weight [local rows, width] of ids from `first_id`; ids [...] -> this device's summand [..., width].

    `padding_idx` is the whole table's (negative: none); gradients are dense, and no rule cuts a table whose gradients
    are scaled by frequency. IndexError when an id is outside the whole vocabulary.
    """
    _check_ids((ids >= 0) & (ids < vocabulary), "embedding id")
    rows = ids - first_id  # [...], of the local weight; outside it where another device holds the id
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    padding_row = padding_idx - first_id if padding_idx >= 0 else -1
    # Ids of other devices read any row, not one for all: in the backward they would pile up there.
    found = torch.embedding(weight, rows.remainder(weight.shape[0]), padding_row)
    return found.masked_fill_(elsewhere.unsqueeze(-1), 0)


def vocab_bags(
    first_id: int,
    vocabulary: int,
    weight: Tensor,
    ids: Tensor,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
) -> Tensor:
    """weight [local rows, width] of ids from `first_id`; ids [n, k] -> this device's summand [n, width] of each bag.

    Ids of other devices, and padding, weigh nothing here. Sums (mode 0) or means (1); `padding_idx` is the whole
    table's (negative: none).
    """
    _check_ids((ids >= 0) & (ids < vocabulary), "embedding id")
    rows = ids - first_id
    here = (rows >= 0) & (rows < weight.shape[0])
    counted = ids != padding_idx
    share = (here & counted).to(weight.dtype)  # [n, k]: what each id adds to its bag on this device
    if per_sample_weights is not None:
        share = share * per_sample_weights
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
        return row_loss.sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return None, None, None, (gradient * grad.to(gradient.dtype)).to(ctx.dtype), *(None,) * 4


def _over_all(tensor: Tensor, comms: tuple[AxisComm, ...], op: str = "sum") -> Tensor:
    """Sum or maximum over the devices of these axes."""
    for comm in comms:
        tensor = comm.all_reduce(tensor, op)
    return tensor
