"""A stage's intra-op problem told apart: per micro-batch, once per step, kept always, kept per micro-batch in flight.

From the same `build` as a single stage. `weighted` puts the parts together again for a number of micro-batches,
of which so many are alive at once, with or without recomputation: the problem that the ILP solves for a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.intra_op.build import IntraOp, OptionTables
from alpa_strategy.intra_op.problem import Problem


@dataclass(frozen=True)
class Parts:
    """Arrays per strategy of a choice, or [source, target] of a transfer. Seconds and bytes.

    Attributes:
        forward, backward: seconds of one micro-batch.
        once: seconds once per step.
        always: bytes whatever is in flight.
        saved: bytes of one micro-batch between its forward and its backward.
        boundary: of these, the received and sent values, which recomputation keeps.
    """

    forward: np.ndarray
    backward: np.ndarray
    once: np.ndarray
    always: np.ndarray
    saved: np.ndarray
    boundary: np.ndarray


@dataclass(frozen=True)
class StageProblem:
    """`intra` (restricted or not) with the parts of its choices and transfers."""

    intra: IntraOp
    choices: tuple[Parts, ...]
    transfers: tuple[Parts, ...]


@dataclass(frozen=True)
class StageCost:
    """What an assignment costs; see `Parts`. `working` are short-lived bytes on top."""

    forward: float
    backward: float
    once: float
    always: float
    saved: float
    boundary: float
    working: float = 0.0

    def seconds(self, remat: bool = False) -> float:
        """One micro-batch."""
        return self.forward * (2 if remat else 1) + self.backward

    def num_bytes(self, in_flight: int, remat: bool = False) -> float:
        """Peak of one device."""
        kept = self.boundary * (in_flight - 1) + self.saved if remat else self.saved * in_flight
        return self.always + kept + self.working


def take_apart(intra: IntraOp, tables: OptionTables) -> StageProblem:
    """The parts of every choice and transfer of a stage's problem."""
    step, problem = intra.step, intra.problem
    num_parameters, num_ops = len(intra.parameters), len(intra.ops)
    boundary = {b.choice for b in (*intra.received.values(), *intra.sent.values())}
    batch = range(num_parameters + num_ops, num_parameters + num_ops + len(step.batch))
    choices = []
    for index, choice in enumerate(problem.choices):
        zero = np.zeros(len(choice.cost))
        parts = Parts(zero, zero, zero, zero, zero, zero)
        if index < num_parameters:
            parts = replace(parts, once=choice.cost, always=choice.memory)
        elif index < num_parameters + num_ops:
            forward = intra.ops[index - num_parameters].forward_seconds
            parts = replace(parts, forward=forward, backward=choice.cost - forward, saved=choice.memory)
        elif index in boundary:
            parts = replace(parts, backward=choice.cost, saved=choice.memory, boundary=choice.memory)
        elif index in batch:
            parts = replace(parts, saved=choice.memory)
        else:
            parts = replace(parts, always=choice.memory)
        choices.append(parts)
    transfers = []
    for transfer, layouts in zip(problem.transfers, intra.transfers, strict=True):
        forward, _ = tables.reshard(layouts.sources, layouts.targets, step.values[layouts.value])
        with np.errstate(invalid="ignore"):
            backward = np.where(np.isfinite(transfer.cost), transfer.cost - forward, np.inf)
        zero = np.zeros_like(transfer.cost)
        finite = np.where(np.isfinite(forward), forward, 0.0)
        transfers.append(Parts(finite, backward, zero, zero, transfer.memory, zero))
    return StageProblem(intra, tuple(choices), tuple(transfers))


def weighted(
    stage: StageProblem, num_microbatches: float, in_flight: float, remat: bool = False, memory_limit: float = np.inf
) -> Problem:
    """minimise num_microbatches * (seconds of a micro-batch) + seconds once, within the bytes of a device."""
    cost, memory = weigh(stage.choices, num_microbatches, in_flight, remat)
    choices = [replace(c, cost=s, memory=b) for c, s, b in zip(stage.intra.problem.choices, cost, memory, strict=True)]
    cost, memory = weigh(stage.transfers, num_microbatches, in_flight, remat)
    transfers = [
        replace(t, cost=s, memory=b) for t, s, b in zip(stage.intra.problem.transfers, cost, memory, strict=True)
    ]
    return Problem(tuple(choices), tuple(transfers), memory_limit)


def weigh(
    parts: Sequence[Parts], num_microbatches: float, in_flight: float, remat: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(seconds per step, bytes) of each."""
    forwards = 2 if remat else 1
    seconds = [num_microbatches * (forwards * p.forward + p.backward) + p.once for p in parts]
    if remat:
        return seconds, [p.always + p.saved - p.boundary + in_flight * p.boundary for p in parts]
    return seconds, [p.always + in_flight * p.saved for p in parts]


def cost_of(stage: StageProblem, assignment: Sequence[int], working: float = 0.0) -> StageCost:
    """The parts of an assignment, summed; a value pays once per distinct target layout."""
    total = np.zeros(6)
    for parts, k in zip(stage.choices, assignment, strict=True):
        total += [float(x[k]) for x in _arrays(parts)]
    for parts, transfer in zip(stage.transfers, stage.intra.problem.transfers, strict=True):
        source = transfer.source[assignment[transfer.producer]]
        for target in {int(use.layout[assignment[use.choice]]) for use in transfer.uses}:
            total += [float(x[source, target]) for x in _arrays(parts)]
    return StageCost(*map(float, total), working)


def _arrays(parts: Parts) -> tuple[np.ndarray, ...]:
    return parts.forward, parts.backward, parts.once, parts.always, parts.saved, parts.boundary
