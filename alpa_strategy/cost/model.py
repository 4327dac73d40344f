"""Seconds and bytes of one local op call: the only place where op costs come from (docs/formulas.md#costs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from alpa_strategy.ir.op import OpCall
from alpa_strategy.options import OptimizerInfo


@dataclass(frozen=True)
class Saved:
    """What autograd keeps of one op until its backward.

    Attributes:
        operands: per operand, whether it is saved.
        results: per result, whether it is saved.
        extra_bytes: bytes of saved tensors that are neither (dropout masks, log-sum-exp, ...).
        temporary_bytes: bytes alive only while the op (or its backward) runs, over and above operands, results, grads.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    extra_bytes: int
    temporary_bytes: int = 0


class OpCosts(Protocol):
    """Costs of ops on one device of a cluster."""

    def op_seconds(self, call: OpCall) -> tuple[float, float]:
        """(forward, backward) seconds of `call` at its own (local) shapes. Backward is 0 when nothing requires grad."""
        ...

    def saved(self, call: OpCall) -> Saved:
        """What autograd saves: asked of a fake-tensor run, remembered per call."""
        ...

    def optimizer_seconds(self, num_elements: int, itemsize: int, optimizer: OptimizerInfo) -> float:
        """Seconds to update `num_elements` parameter elements of `itemsize` bytes each."""
        ...
