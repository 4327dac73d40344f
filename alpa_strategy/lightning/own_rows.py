"""The rows of a step's output that belong to this rank's batch: steps are computed on the rows of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from alpa_strategy.errors import CaptureError
from alpa_strategy.inter_op.subgraph import values_of
from alpa_strategy.ir.graph import Op, StepGraph, ValueRef
from alpa_strategy.lightning.extent import counts_rows, grows_with_rows
from alpa_strategy.microbatch.microstep import Cut, cut
from alpa_strategy.microbatch.states import States, ancestors, find_states

aten = torch.ops.aten
_APART = {  # ops that give some of a dim, and where the dim is in their arguments
    aten.select.int: 1,
    aten.unbind.int: 1,
    aten.slice.Tensor: 1,
    aten.narrow.default: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.chunk.default: 2,
    aten.tensor_split.sections: 2,
}


def row_cuts(step: StepGraph, num_ranks: int) -> dict[int, Cut]:
    """Value of `step.output` and `step.appended` -> where its rows are; without what has none (a mean, a count).

    The ranks' rows follow each other in the batch as micro-batches do, so the same rules say how they pass through the
    ops. A value that mixes the rows of different ranks counts as rows where its first dim is as long as the batch.

    Raises:
        CaptureError: the step returns what stands for the rows of all ranks and cannot be told from what this rank's
            rows would have given: some rows, their number, a sum over them.
    """
    given = values_of((step.output, *step.appended))
    if num_ranks == 1 or step.batch_scope == "global":
        return {}
    if counts_rows(step, (step.output, *(record.items for record in step.appended))):
        raise CaptureError("the step returns a number of rows", _OWN_ROWS)
    if not given:
        return {}
    part = _only(step, given)
    states = find_states(part, num_ranks, 1, exact=True)
    _check_rows_stay_together(part, states)
    wanted = [v for v in given if step.values[v].shape]
    found: dict[int, Cut] = {}
    for value in wanted:
        state = states.state.get(value)
        if state is not None and state.kind == "rows":
            found[value] = Cut(state.dim, state.segments)
        elif step.values[value].shape[0] == step.batch_size and step.batch_size % num_ranks == 0:
            found[value] = Cut()
    _check_means(part, states, [v for v in given if v not in found])
    return found


_OWN_ROWS = "log it (`self.log(..., reduce_fx='sum')`), or return the values of the rows themselves"


def _check_means(step: StepGraph, states: States, values: list[int]) -> None:
    source = grows_with_rows(step, states, values)
    if source is not None:
        raise CaptureError(
            f"the step returns a sum over rows, which is one over those of all ranks ({source})", _OWN_ROWS
        )


def _check_rows_stay_together(step: StepGraph, states: States) -> None:
    for op in step.ops:
        position = _APART.get(op.call.target)
        if position is None:
            continue
        state, dims = states.state.get(op.operands[0]), len(step.values[op.operands[0]].shape)
        dim = op.call.args[position] if len(op.call.args) > position else 0
        if state is not None and state.kind == "rows" and state.dim == dim % dims and not _takes_all(op):
            raise CaptureError(
                f"rows of the batch are taken apart ({op.source or op.name}), and the captured step has those of all "
                "ranks",
                "return or append the rows together, as one tensor",
            )


def _takes_all(op: Op) -> bool:
    """Whether a slice has all rows."""
    return op.call.results[0].shape == op.call.operands[0].shape


def own_rows(values: dict[int, Tensor], cuts: dict[int, Cut], num_ranks: int, rank: int) -> dict[int, Tensor]:
    """`values` with this rank's rows where `cuts` names a value; copies, so that nothing keeps the other rows alive."""
    own = {value: cut(values[value], how, num_ranks, rank).contiguous() for value, how in cuts.items()}
    return values | {value: tensor.clone() if _is_view(tensor) else tensor for value, tensor in own.items()}


def _is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _only(step: StepGraph, wanted: list[int]) -> StepGraph:
    """The part of a step that some values of its output need, without loss and records."""
    ops = tuple(step.ops[index] for index in ancestors(step, wanted))
    buffers = tuple(replace(b, update=None) for b in step.buffers)
    output = tuple(map(ValueRef, wanted))
    return replace(step, ops=ops, output=output, logs=(), metrics=(), checks=(), appended=(), loss=-1, buffers=buffers)
