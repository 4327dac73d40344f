"""Which part of a step's results belongs to one rank's rows, for user code that reads them beside that rank's batch."""

from __future__ import annotations

from itertools import chain

from torch.utils import _pytree as pytree

from alpa_strategy.ir.graph import StepGraph, ValueRef
from alpa_strategy.ir.op import OpCall
from alpa_strategy.microbatch.microstep import Cut
from alpa_strategy.microbatch.rules import (
    WHOLE,
    State,
    TimeStrategy,
    rows,
    specialised,
    time_strategies,
    view_strategies,
)
from alpa_strategy.microbatch.states import ancestors


def rows_of_ranks(step: StepGraph, num_ranks: int) -> dict[int, Cut]:
    """Where values that the step returns or appends to lists have rows: value -> how the ranks' parts are cut from it.

    All others are the same for everybody: losses, statistics of the batch, results in which rows of several ranks meet.
    """
    shown = {
        leaf.index
        for leaf in pytree.tree_leaves((step.output, [record.items for record in step.appended]))
        if isinstance(leaf, ValueRef) and step.values[leaf.index].shape
    }
    if not shown or num_ranks == 1 or step.batch_scope == "global":
        return {}
    states = {leaf.value: rows(0) for leaf in step.batch if leaf.batch_dim == 0}
    for index in ancestors(step, tuple(shown)):
        op = step.ops[index]
        have = tuple(states.get(value, WHOLE) for value in op.operands)
        ways = chain(time_strategies(op.call, num_ranks), view_strategies(op.call, have, num_ranks))
        outputs = next((found for way in ways if (found := _results(op.call, way, have, num_ranks))), ())
        states.update(zip(op.results, outputs, strict=False))
    return {v: Cut(states[v].dim, states[v].segments) for v in shown if states.get(v, WHOLE).kind == "rows"}


def _results(call: OpCall, way: TimeStrategy, have: tuple[State, ...], num_ranks: int) -> tuple[State, ...]:
    """The states of the op's results where rows lie in its operands as `have` says; empty where `way` is not for these.

    Whatever is whole can be read in parts as well; whole results that rows went into are statistics of the batch.
    """
    segments = max((state.segments for state in have if state.kind == "rows"), default=1)
    fixed = specialised(call, way, segments, num_ranks)
    if fixed is None or all(state == WHOLE for state in (*have, *fixed.outputs)):
        return ()
    for state, want in zip(have, fixed.inputs, strict=True):
        if (state.kind == "rows" or want.kind == "numbers") and state != want:
            return ()
    if not have or any(state != WHOLE for state in have):
        return tuple(state if state.kind in ("rows", "numbers") else WHOLE for state in fixed.outputs)
    return ()
