"""Embedding and cross entropy with the vocabulary (class) dim sharded, as in Megatron-LM (arXiv:1909.08053, section 3).

Each device holds a run of ids. The embedding leaves rows of other devices' ids zero (the sum over the axis is the
lookup); the loss exchanges three or four numbers per row instead of the logits, and its backward exchanges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Classes:
    """Which classes this device holds of the loss's, and what the loss does with targets.

    Attributes:
        first, num_classes: the first class here, and the number of all.
        comms: the axes that shard them.
        ignore_index, smoothing: as of `F.cross_entropy`.
    """

    first: int
    num_classes: int
    comms: tuple[AxisComm, ...]
    ignore_index: int
    smoothing: float

    def over_all(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Sum or maximum over the devices that share the classes."""
        for comm in self.comms:
            tensor = comm.all_reduce(tensor, op)
        return tensor


@dataclass(frozen=True)
class _Shares:
    """The a_c of this device's classes, shaped to go with the logits.

    Attributes:
        kept: rows that count.
        index, amount: of each row's target, its place among the classes here and its amount (0: it is elsewhere).
        every: what smoothing gives each class; None where there is none.
    """

    kept: Tensor
    index: Tensor
    amount: Tensor
    every: Tensor | None


class _VocabCrossEntropy(torch.autograd.Function):
    """Row loss = A log(sum_c exp z_c) - sum_c a_c z_c, where a_c = weight_c ((1 - s) target_c + s / C), A = sum_c a_c.

    z is shifted by the row's maximum over all devices. Gradient: A softmax_c - a_c, ready at the end of the forward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, classes: _Classes) -> Tensor:
        dim = min(1, logits.dim() - 1)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if weight is not None:  # those of the classes here, along `dim`
            weight = weight.narrow(0, classes.first, logits.shape[dim]).to(dtype)
            weight = weight.view([-1 if d == dim else 1 for d in range(logits.dim())])
        # [N, c, d1, ...], c classes of this device; what is exchanged is [N, 1, d1, ...]
        highest = logits.detach().amax(dim, keepdim=True).to(dtype)
        shifted = logits.detach().to(dtype) - classes.over_all(highest, "max")
        shares = _target_shares(shifted, target, weight, classes)
        # Without class weights the a_c of a row add up to 1 whatever the smoothing: nothing to exchange.
        amounts = _row_amounts(shifted, shares, dim, needs_total=weight is not None)

        exponentials = shifted.exp_()
        sums = classes.over_all(torch.stack([exponentials.sum(dim, keepdim=True), *amounts]))  # [2 or 3, N, 1, d1, ...]
        denominator, weighted = sums[0], sums[1]
        total = sums[2] if weight is not None else torch.ones_like(denominator)
        row_loss = (total * denominator.log() - weighted).masked_fill(~shares.kept, 0.0)
        total = total.masked_fill(~shares.kept, 0.0)

        ctx.dtype = logits.dtype
        if ctx.needs_input_grad[0]:
            gradient = _gradient(exponentials.mul_(total / denominator), shares, dim)
            # fp16 would lose the small probabilities
            ctx.save_for_backward(gradient.to(logits.dtype) if logits.dtype == torch.bfloat16 else gradient)
        return row_loss.sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad.to(gradient.dtype)).to(ctx.dtype), None, None, None


def _row_amounts(shifted: Tensor, shares: _Shares, dim: int, needs_total: bool) -> list[Tensor]:
    """This device's part of each row's sum_c a_c z_c, and (`needs_total`) of its A."""
    weighted = torch.where(shares.amount != 0, shifted.gather(dim, shares.index), 0.0) * shares.amount
    total = shares.amount
    if shares.every is not None:
        weighted = weighted + (shifted * shares.every).sum(dim, keepdim=True)
        total = total + shares.every.expand_as(shifted).sum(dim, keepdim=True)
    return [weighted, total] if needs_total else [weighted]


def _gradient(gradient: Tensor, shares: _Shares, dim: int) -> Tensor:
    """`gradient` (A softmax_c) less a_c, in place."""
    if shares.every is not None:
        gradient -= shares.every * shares.kept
    return gradient.scatter_add_(dim, shares.index, -shares.amount)


def _target_shares(shifted: Tensor, target: Tensor, weight: Tensor | None, classes: _Classes) -> _Shares:
    dim, dtype = min(1, shifted.dim() - 1), shifted.dtype
    kept = target != classes.ignore_index
    _check_ids(~kept | (target >= 0) & (target < classes.num_classes), "cross entropy target")
    local = target - classes.first
    ours = (kept & (local >= 0) & (local < shifted.shape[dim])).unsqueeze(dim)  # [N, 1, d1, ...]
    index = torch.where(ours, local.unsqueeze(dim), 0)
    amount = ours.to(dtype) * (1.0 - classes.smoothing)
    if weight is not None:
        amount = amount * weight.flatten()[index]
    every: Tensor | None = None
    if classes.smoothing > 0.0:
        every = shifted.new_full([1] * shifted.dim(), classes.smoothing / classes.num_classes)
        every = every if weight is None else every * weight
    return _Shares(kept.unsqueeze(dim), index, amount, every)


def vocab_cross_entropy(
    first_class: int,
    num_classes: int,
    comms: tuple[AxisComm, ...],
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """`capture.ops.cross_entropy_sum` on logits that hold this device's classes only, from `first_class`.

    logits [N, c], [N, c, d1, ...] or [c]; target indices [N, d1, ...] and weight, both of the whole class range.
    `comms`: the axes that shard the classes. Returns the summed loss, equal on all of their devices; half-precision
    logits are computed in fp32. IndexError when a target is not a class.
    """
    classes = _Classes(first_class, num_classes, comms, ignore_index, label_smoothing)
    return _VocabCrossEntropy.apply(logits, target, weight, classes)
