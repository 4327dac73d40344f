"""The rows of a step's output that belong to this rank's batch: steps are computed on the rows of all ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from alpa_strategy.capture.step_graph import StepGraph, ValueRef
from alpa_strategy.inter_op.microbatch_run import cut
from alpa_strategy.inter_op.microbatch_states import ancestors, find_states
from alpa_strategy.inter_op.slice import values_of
from alpa_strategy.inter_op.stage import Cut


def row_cuts(step: StepGraph, num_ranks: int) -> dict[int, Cut]:
    """Value of `step.output` -> where its rows are; without those that have no rows (a mean, a count).

    The ranks' rows follow each other in the batch as micro-batches do, so the same rules say how they pass through the
    ops. A value that mixes the rows of different ranks counts as rows where its first dim is as long as the batch.
    """
    wanted = [v for v in values_of(step.output) if step.values[v].shape]
    if not wanted or num_ranks == 1 or step.batch_scope == "global":
        return {}
    states = find_states(_only(step, wanted), num_ranks, 1, exact=True)
    found: dict[int, Cut] = {}
    for value in wanted:
        state = states.state.get(value)
        if state is not None and state.kind == "rows":
            found[value] = Cut(state.dim, state.segments)
        elif step.values[value].shape[0] == step.batch_size and step.batch_size % num_ranks == 0:
            found[value] = Cut()
    return found


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
    return replace(step, ops=ops, output=output, logs=(), metrics=(), checks=(), loss=-1, buffers=buffers)
