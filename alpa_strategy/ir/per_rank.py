"""PerRank: an op that runs once for the samples of each rank.

A step on the batches of all ranks must give what each rank computes on its own batch (DDP's
contract). Most ops do so by themselves, because they treat every sample alike. An op that combines
samples (a sum over the batch, BatchNorm, `z @ z.T`) is put into a `PerRank`: its operands get a
leading dim of ranks, and it runs on one slice after the other. A device that has the samples of one
rank runs the op once.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.op import DerivedTarget, OpCall, Slot, TensorMeta


@dataclass(frozen=True)
class PerRank(DerivedTarget):
    """The target of an OpCall that runs `inner` for each rank.

    The call's arguments are its operands in the order of `inner.operands`, its results are those of
    `inner` with a leading dim of ranks.
    """

    # The op on the samples of one rank.
    inner: OpCall

    # For every operand, whether it has a leading dim of ranks. The others are the same for all.
    mapped: tuple[bool, ...]

    # Size of the leading dim.
    num_ranks: int

    @property
    def name(self) -> str:
        """Name in plans and programs, with a digest of the op's arguments."""
        return self._name

    @cached_property
    def _name(self) -> str:
        """Return a name that is the same for equal ops in every process."""
        inner = self.inner
        text = f"{inner.target_name}{inner.args}{inner.kwargs}{self.mapped}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        base = inner.target_name.split(".")[1]
        return f"per_rank.{base}.{digest}"

    @property
    def num_operands(self) -> int:
        """Number of tensor arguments."""
        return len(self.mapped)

    def __call__(self, *operands: Tensor) -> Any:
        """Run the op for each rank, and stack the results."""
        return stacked_over_ranks(self.inner.call, operands, self.mapped, self.num_ranks)

    def with_inner(self, inner: OpCall) -> "PerRank":
        """Return the target that runs `inner` instead."""
        return PerRank(inner, self.mapped, self.num_ranks)


def stacked_over_ranks(
    run: Any, operands: tuple[Tensor, ...], mapped: tuple[bool, ...], num_ranks: int
) -> Any:
    """Call `run` on each rank's slices of the operands, and stack its results.

    Args:
        run: a function of the operands; returns a tensor or a tuple of tensors.
        operands: those that are `mapped` have a leading dim of `num_ranks`.
    """
    returned = []
    for rank in range(num_ranks):
        slices = []
        for operand, is_mapped in zip(operands, mapped, strict=True):
            slices.append(_slice_of(operand, rank) if is_mapped else operand)
        returned.append(run(*slices))

    if isinstance(returned[0], Tensor):
        return _stacked(returned)
    return tuple(_stacked(list(results)) for results in zip(*returned, strict=True))


def _slice_of(operand: Tensor, rank: int) -> Tensor:
    """Return a rank's slice of an operand, [ranks, ...]."""
    if operand.shape[0] == 1:
        # The backward of `select` would copy the gradient into zeros.
        return operand.squeeze(0)
    return operand.select(0, rank)


def with_rank_dim(results: Any) -> Any:
    """Return the tensor or tensors of a single rank with a leading dim of ranks."""
    if isinstance(results, Tensor):
        return results.unsqueeze(0)
    return tuple(result.unsqueeze(0) for result in results)


def _stacked(results: list[Tensor]) -> Tensor:
    """Stack one result of all ranks. That of a single rank is not copied."""
    if len(results) == 1:
        return results[0].unsqueeze(0)
    return torch.stack(results)


def per_rank_call(inner: OpCall, mapped: tuple[bool, ...], num_ranks: int) -> OpCall:
    """Return the call that runs `inner` for each of `num_ranks` ranks.

    Args:
        inner: the call on one rank's samples, with its results.
        mapped: for every operand, whether it has a leading dim of ranks.
    """
    operands = []
    for meta, is_mapped in zip(inner.operands, mapped, strict=True):
        operands.append(_with_ranks(meta, num_ranks) if is_mapped else meta)
    results = tuple(_with_ranks(meta, num_ranks) for meta in inner.results)
    slots = tuple(Slot(index) for index in range(len(mapped)))
    target = PerRank(inner, mapped, num_ranks)
    return OpCall(target, slots, (), tuple(operands), results, inner.returns_tuple)


def _with_ranks(meta: TensorMeta, num_ranks: int) -> TensorMeta:
    """Return the tensor stacked over ranks, [ranks, ...]."""
    return meta.with_shape((num_ranks, *meta.shape))
