"""Buffers of a pipeline: rank 0's, on every rank.

A pipeline may update its buffers with every micro-batch, on devices that do not know which rank's
samples they have. So all ranks get the buffers of rank 0, which are what every rank has after the
next broadcast (see `capture/merge_ranks.py`).
"""

from dataclasses import replace

import torch

from alpa_strategy.ir.graph import BufferInput, Op, StepGraph
from alpa_strategy.ir.of_ranks import OfRanks
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta


def with_first_rank_buffers(step: StepGraph) -> StepGraph:
    """Return the step with rank 0's buffer updates in place of those of all ranks.

    The values of `step` keep their numbers; new ops and values follow them.
    """
    of_ranks = dict(step.of_ranks)
    values = list(step.values)
    ops = list(step.ops)
    buffers: list[BufferInput] = []
    for buffer in step.buffers:
        if buffer.update is None or buffer.update not in of_ranks:
            buffers.append(buffer)
            continue
        call = _first_rank_call(of_ranks[buffer.update], values[buffer.update], buffer.meta)
        update = len(values)
        values.append(call.results[0])
        ops.append(Op(f"first_rank_{update}", call, (buffer.update,), (update,), "", ""))
        buffers.append(replace(buffer, update=update))
    return replace(step, values=tuple(values), ops=tuple(ops), buffers=tuple(buffers))


def _first_rank_call(how: OfRanks, meta: TensorMeta, buffer: TensorMeta) -> OpCall:
    """Return the call that takes rank 0's value out of one of all ranks.

    Args:
        meta: of the value of all ranks.
        buffer: metadata of the buffer, which has the shape of one rank's value.
    """
    result = meta.with_shape(buffer.shape)
    if how.is_number:
        target = torch.ops.aten.select.int
        return OpCall(target, (Slot(0), how.dim, 0), (), (meta,), (result,))
    target = torch.ops.aten.slice.Tensor
    size = buffer.shape[how.dim]
    return OpCall(target, (Slot(0), how.dim, 0, size), (), (meta,), (result,))
