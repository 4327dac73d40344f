"""Keep or recompute: each op's result that others keep for their backward, decided with its layout in one problem.

`with_recompute` gives such ops every strategy a second time: its forward runs once more in the backward, and what
consumers keep of the result in the layout in which it was made costs no memory. It needs the op's operands, which the
op's own backward keeps anyway, or which are recomputed as well. So chains of norms and pointwise ops keep one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from alpa_strategy.cost.flops import PRODUCTS, is_view, op_base_name
from alpa_strategy.errors import OptionError
from alpa_strategy.intra_op.build import IntraOp, TransferLayouts
from alpa_strategy.intra_op.options import OpOptions
from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.guards import is_symbolic
from alpa_strategy.ir.op import OpCall
from alpa_strategy.options import SELECTIVE, PlanOptions
from alpa_strategy.sharding.strategies import is_random


def can_run_again(call: OpCall) -> bool:
    """Whether a second run gives the same tensor, memory of its own, whatever the step's counters are."""
    one = len(call.results) == 1 and not call.returns_tuple and bool(call.operands)
    return one and not is_view(call) and not is_random(call) and not is_symbolic(call)


def pinned_again(step: StepGraph, options: PlanOptions) -> frozenset[str] | None:
    """Names of the ops that `PlanOptions.remat` wants to be made again, None where it names none.

    Raises:
        OptionError: a name of it is that of no op that could be.
    """
    if not isinstance(options.remat, tuple):
        return None
    found: set[str] = set()
    able = [op for op in step.ops if can_run_again(op.call)]
    for name in options.remat:
        own = {op.name for op in able if _is_named(op, name)}
        if not own:
            has = any(_is_named(op, name) for op in step.ops)
            what = "only views, random ops and ops of several results, which are kept" if has else "no op of the step"
            raise OptionError(
                f"remat={name!r} names {what}", 'name ops or modules as `alpa plan` shows them, or write "selective"'
            )
        found |= own
    return frozenset(found)


def _is_named(op: Op, name: str) -> bool:
    """Whether a pattern names the op or a module around it; "selective" all but products, convolutions, attention."""
    if name == SELECTIVE:
        return op_base_name(op.call) not in PRODUCTS
    parts = op.module.split(".")
    return any(fnmatchcase(own, name) for own in (op.name, *(".".join(parts[: i + 1]) for i in range(len(parts)))))


def with_recompute(intra: IntraOp, pinned: Collection[str] | None = None) -> IntraOp:
    """The same choices and transfers with strategies that recompute behind those that keep (`IntraOp.recomputes`).

    Args:
        pinned: names of ops that are made again wherever they can be, and no others are; None: solved.
    """
    offset = len(intra.parameters)
    again = {offset + i: _again(intra, i) for i, op in enumerate(intra.step.ops) if pinned is None or op.name in pinned}
    again = {choice: which for choice, which in again.items() if len(which)}
    ops = [
        _with_second_runs(options, again[offset + i]) if offset + i in again else options
        for i, options in enumerate(intra.ops)
    ]
    layouts = tuple(
        replace(named, sources=named.sources * 2) if transfer.producer in again else named
        for named, transfer in zip(intra.transfers, intra.problem.transfers, strict=True)
    )
    first = {choice - offset: len(intra.problem.choices[choice].cost) for choice in again}
    return replace(
        intra,
        ops=tuple(ops),
        transfers=layouts,
        problem=_doubled(intra, intra.problem, again, pinned is not None),
        unrestricted=intra.unrestricted and _doubled(intra, intra.unrestricted, again),
        recomputes=first,
    )


def recomputed(intra: IntraOp, assignment: Sequence[int]) -> tuple[str, ...]:
    """Names of the ops whose strategy is one that recomputes."""
    offset = len(intra.parameters)
    return tuple(intra.step.ops[i].name for i, first in intra.recomputes.items() if assignment[offset + i] >= first)


def _again(intra: IntraOp, index: int) -> np.ndarray:
    """The strategies of an op that may be had with a second run."""
    op, options = intra.step.ops[index], intra.ops[index]
    none = np.zeros(0, dtype=int)
    if index in intra.per_step.ops or not can_run_again(op.call) or options.saved.results[0]:
        return none
    alone = all(size == 1 for size in intra.mesh.shape)  # elsewhere matrices may be gathered at use, and so once more
    matrices = {p.value for p in intra.step.parameters if len(p.meta.shape) > 1 and not alone}
    here = {p.value for p in intra.step.parameters} | {given.value for given in intra.step.constant_inputs}
    for value, keeps in zip(op.operands, options.saved.operands, strict=True):
        if value in matrices or not (keeps or value in here):
            return none
    readers = intra.step.consumers.get(op.results[0], ())
    if not any(intra.ops[reader].saved.operands[position] for reader, position in readers):
        return none
    return np.array([k for k, each in enumerate(options.strategies) if all(s.implementation is None for s in each)])


def _with_second_runs(options: OpOptions, again: np.ndarray) -> OpOptions:
    longer: dict[str, Any] = {}
    for name in (f.name for f in fields(options) if f.name != "saved"):
        found = getattr(options, name)
        if isinstance(found, tuple):
            longer[name] = (*found, *(found[k] for k in again))
        else:
            longer[name] = np.concatenate([found, found[again]])
    more = np.concatenate([np.zeros(len(options.strategies)), options.forward_seconds[again]])
    longer["compute_seconds"] = longer["compute_seconds"] + more
    return replace(options, **longer)


def _doubled(intra: IntraOp, problem: Problem, again: dict[int, np.ndarray], only_again: bool = False) -> Problem:
    offset = len(intra.parameters)

    def longer(index: int, array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, array[again[index]]]) if index in again else array

    def choice(index: int, given: Choice) -> Choice:
        if index not in again:
            return given
        more = np.zeros(len(given.cost) + len(again[index]))
        more[len(given.cost) :] = intra.ops[index - offset].forward_seconds[again[index]]
        cost = longer(index, given.cost) + more
        if only_again:
            cost[again[index]] = np.inf  # the first run's, which keep
        return replace(given, cost=cost, memory=longer(index, given.memory))

    def transfer(given: Transfer, named: TransferLayouts) -> Transfer:
        uses = tuple(Use(use.choice, longer(use.choice, use.layout)) for use in given.uses)
        if given.producer not in again:
            return replace(given, uses=uses)
        as_made = np.array([[source == target for target in named.targets] for source in named.sources])
        second = given.source[again[given.producer]] + len(named.sources)
        return replace(
            given,
            source=np.concatenate([given.source, second]),
            uses=uses,
            cost=np.vstack([given.cost, given.cost]),
            memory=np.vstack([given.memory, np.where(as_made, 0.0, given.memory)]),
        )

    return replace(
        problem,
        choices=tuple(choice(i, given) for i, given in enumerate(problem.choices)),
        transfers=tuple(transfer(*pair) for pair in zip(problem.transfers, intra.transfers, strict=True)),
    )
