"""Does a number that a step gives grow with the rows of the batch (a sum, a count), or not (a mean)?

Evaluation steps are computed on the rows of all ranks. What they return is handed to each rank, and a mean is as good
as the rank's own; a sum of all ranks' rows is not what the rank's hooks expect, who may add it up once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.microbatch.states import States

aten = torch.ops.aten
UNKNOWN = 99
_LINEAR = {  # degree of the result from those of the operands
    aten.neg.default,
    aten.detach.default,
    aten.clone.default,
    aten.to.dtype,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.stack.default,
    aten.cat.default,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_BOUNDED = {  # reductions that take one of the elements
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.amin.default,
    aten.any.default,
    aten.all.default,
    aten.any.dim,
    aten.all.dim,
}


def grows_with_rows(step: StepGraph, states: States, wanted: Iterable[int]) -> str | None:
    """The source of the first op that makes a value of `wanted` grow with the batch's rows, or may; None: none does.

    Args:
        step: the part of an evaluation step that makes `wanted`.
        states: where its values have rows.
    """
    degree: dict[int, int] = {}
    source: dict[int, str] = {}
    for index, op in enumerate(step.ops):
        operands = [degree.get(v, 0) for v in op.operands]
        found = _degree(step, op, operands, _reduces_rows(op, states), _mean(states, index))
        for value in op.results:
            degree[value] = found
            blamed = next((source[v] for v in op.operands if v in source), None)
            if found:
                source[value] = blamed or op.source or op.name
    return next((source[v] for v in wanted if degree.get(v, 0)), None)


def counts_rows(step: StepGraph, structure: Any) -> bool:
    """Whether a plain number in an output structure may be a number of rows (`len(x)`): a multiple of the batch's."""
    numbers = [leaf for leaf in pytree.tree_leaves(structure) if type(leaf) in (int, float)]
    return any(leaf and leaf % step.batch_size == 0 for leaf in numbers)


def _degree(step: StepGraph, op: Op, operands: list[int], reduces: bool, is_mean: bool) -> int:
    """The power of the number of rows with which the results grow."""
    target = op.call.target
    numbers = [a for a in op.call.args if type(a) in (int, float)]
    if reduces:
        if any(operands):
            return UNKNOWN
        return 0 if is_mean or target in _BOUNDED else 1
    if target in _PRODUCTS or target in _QUOTIENTS:
        if any(n and (n % step.batch_size == 0 or (1 / n) % step.batch_size == 0) for n in numbers):
            return UNKNOWN  # the number of rows itself
        first, *others = operands
        return min(UNKNOWN, first + (sum(others) if target in _PRODUCTS else -sum(others)))
    if not any(operands):
        return 0
    return operands[0] if target in _LINEAR and len(set(operands)) == 1 and not _adds_a_number(op) else UNKNOWN


def _adds_a_number(op: Op) -> bool:
    """Whether an addition adds a plain number, which does not grow."""
    return op.call.target in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor) and len(op.operands) < 2


def _reduces_rows(op: Op, states: States) -> bool:
    return any(_has_rows(states, v) for v in op.operands) and not any(_has_rows(states, v) for v in op.results)


def _has_rows(states: States, value: int) -> bool:
    state = states.state.get(value)
    return state is not None and state.kind in ("rows", "numbers")


def _mean(states: States, index: int) -> bool:
    return index in states.chosen and states.chosen[index].strategy.mean
