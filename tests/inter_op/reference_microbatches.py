"""Reference executor of a MicroStep: full tensors in one process, micro-batch after
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.microbatch.rules import cut, joined, rows
from alpa_strategy.microbatch.transform import MicroStep


def combine_microbatches(
    micro: MicroStep, results: Sequence[Mapping[int, Tensor]]
) -> dict[int, Tensor]:
    """The step's values from those of the micro-batches, by `micro.states`.

    Args:
        results: per micro-batch the values of `micro.graph.escaping`, whole (of all ranks).
    """
    combined: dict[int, Tensor] = {}
    for value in micro.graph.escaping:
        state, parts = micro.states[value], [result[value] for result in results]
        match state.kind:
            case "sum":
                combined[value] = (
                    parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=parts[0].dtype)
                )
            case "whole":
                combined[value] = parts[-1]
            case "rows":
                combined[value] = joined(parts, state)
    return combined


def run_microbatches(
    micro: MicroStep,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Any],
    batch_leaves: Sequence[Tensor],
) -> dict[int, Tensor]:
    """One step, micro-batch after micro-batch. Gradients are added to the `.grad` of the
    parameters.

    Args:
        parameters, buffers, batch_leaves: as for `run_step`, `batch_leaves` whole in the order of
            `graph.batch`.

    Returns:
        The step's escaping values, detached, and `graph.loss`.
    """
    leaves = {
        leaf.value: tensor for leaf, tensor in zip(micro.graph.batch, batch_leaves, strict=True)
    }
    values = _run_part(micro.prologue, parameters, buffers, leaves, {})
    state = dict(buffers)
    results: list[dict[int, Tensor]] = []
    for index in range(micro.num_microbatches):
        batch = []
        for leaf, tensor in zip(micro.graph.batch, batch_leaves, strict=True):
            if leaf.batch_dim is None or not leaf.is_split:
                batch.append(tensor)
            else:
                batch.append(cut(tensor, rows(0, micro.num_runs), micro.num_microbatches, index))
        received = {}
        for value, source in micro.from_prologue.items():
            if micro.states[value].kind == "whole":
                received[value] = values[source]
            else:
                received[value] = cut(
                    values[source], micro.states[value], micro.num_microbatches, index
                )
        outputs = run_step(micro.graph, parameters, state, batch, received)
        loss = outputs[micro.graph.loss]
        if loss.requires_grad:
            loss.backward()
        results.append({value: outputs[value].detach() for value in micro.graph.escaping})
        for buffer in micro.graph.buffers:
            if buffer.name in micro.sequential_buffers and buffer.update is not None:
                state[buffer.name] = outputs[buffer.update].detach()
    values |= combine_microbatches(micro, results)
    return values | _run_part(micro.epilogue, parameters, state, leaves, values)


@torch.no_grad()
def _run_part(
    part: StepGraph | None,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Any],
    leaves: Mapping[int, Tensor],
    received: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """What leaves a prologue or an epilogue."""
    if part is None:
        return {}
    outputs = run_step(
        part, parameters, buffers, [leaves[leaf.value] for leaf in part.batch], received
    )
    return {value: outputs[value] for value in part.escaping}
