"""Spans: the runs of a stage's ops that are recomputed one by one, in the terms of its intra-op problem. What is done
once per step is a span of its own, which is not recomputed.

What passes from span to span is kept in the layout in which it is made; every span brings it to its uses by itself, as
it does with parameters. So a value is resharded once per span and target, not once per stage and target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.options import local_bytes
from alpa_strategy.intra_op.problem import Transfer, Use

PER_STEP = -2  # the span of ops that run once per step


class Spans:
    """The spans of a stage; `starts`: positions among its ops at which they begin, the first is 0."""

    def __init__(self, intra: IntraOp, starts: Sequence[int] = (0,)) -> None:
        self._per_step = intra.per_step.ops
        self._first_op, self._num_ops = len(intra.parameters), len(intra.ops)
        self._starts = np.asarray(starts)
        self.count = len(starts)

    def of_choice(self, choice: int) -> int | None:
        """The span of a choice of the problem, None where it is no op."""
        op = choice - self._first_op
        if not 0 <= op < self._num_ops:
            return None
        return PER_STEP if op in self._per_step else self._place(op)

    def _place(self, op: int) -> int:
        return int(np.searchsorted(self._starts, op, side="right")) - 1

    def of_use(self, transfer: Transfer, use: Use) -> int:
        """Where a value is brought to a use: what leaves the stage is made ready where it is made."""
        if (span := self.of_choice(use.choice)) is not None:
            return span
        is_op = self.of_choice(transfer.producer) is not None
        return self._place(transfer.producer - self._first_op) if is_op else self.count - 1

    def split(self, intra: IntraOp) -> IntraOp:
        """The problem with one transfer per value and span; the choices stay as they are."""
        if self.count == 1 and not self._per_step:
            return intra
        transfers, layouts = [], []
        for transfer, named in zip(intra.problem.transfers, intra.transfers, strict=True):
            uses: dict[int, list[Use]] = {}
            for use in transfer.uses:
                uses.setdefault(self.of_use(transfer, use), []).append(use)
            transfers += [replace(transfer, uses=tuple(own)) for _, own in sorted(uses.items())]
            layouts += [named] * len(uses)
        return replace(intra, problem=replace(intra.problem, transfers=tuple(transfers)), transfers=tuple(layouts))

    def crossing_bytes(self, intra: IntraOp, choice: int) -> np.ndarray:
        """[strategy] of an op: bytes of those of its results that later spans read."""
        options, op = intra.ops[choice - self._first_op], intra.step.ops[choice - self._first_op]
        own = self.of_choice(choice)
        total = np.zeros(len(options.outputs))
        for position, value in enumerate(op.results):
            readers = (self.of_choice(self._first_op + reader) for reader, _ in intra.step.consumers.get(value, ()))
            if any(span != own for span in readers):
                meta = intra.step.values[value]
                total += [local_bytes(meta, outputs[position], intra.mesh.shape) for outputs in options.outputs]
        return total


def balanced_groups(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Positions at which `count` (or fewer) runs of consecutive items begin, the heaviest run as light as possible."""
    low, high = max(weights, default=0.0), sum(weights)
    best = _greedy(weights, high)
    for _ in range(50):
        limit = (low + high) / 2
        starts = _greedy(weights, limit)
        if len(starts) <= count:
            best, high = starts, limit
        else:
            low = limit
    return best


def _greedy(weights: Sequence[float], limit: float) -> tuple[int, ...]:
    starts, total = [0], 0.0
    for position, weight in enumerate(weights):
        if total + weight > limit * (1 + 1e-12) and position > starts[-1]:
            starts.append(position)
            total = 0.0
        total += weight
    return tuple(starts)
