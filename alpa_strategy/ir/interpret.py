"""Runs a StepGraph on whole tensors on one device: what a pipeline does once a step; the reference in the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import COUNTERS, at_counters


def run_step(
    step: StepGraph,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Any],
    batch_leaves: Sequence[Tensor],
    received: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Every value of the step.

    Args:
        parameters: by any of the names that the parameter has, in the module's shapes (all tensors on one device).
        buffers: by name; the counters under `COUNTERS`, where the step computes with them.
        batch_leaves: global tensors in `step.batch` order.
        received: the values that others hand in (`step.received`).

    Returns:
        Value index -> tensor; `step.escaping` says which leave the graph.
    """
    values: dict[int, Tensor] = {value: (received or {})[value] for value in step.received}
    for entry in step.parameters:
        given = next(parameters[name] for name in entry.names if name in parameters)
        values[entry.value] = given.view(entry.meta.shape) if entry.module_shape is not None else given
    for buffer in step.buffers:
        values[buffer.value] = buffers[buffer.name]
    for leaf, tensor in zip(step.batch, batch_leaves, strict=True):
        values[leaf.value] = tensor
    # Factories (arange, zeros) have no device of their own in the graph.
    device = next((tensor.device for tensor in values.values()), torch.get_default_device())
    for constant in step.constants:
        values[constant.value] = constant.tensor.to(device)
    with device:  # for the Python functions among the targets; ATen's overloads do not look at it
        for op in step.ops:
            call = at_counters(op.call, buffers.get(COUNTERS, {})).on(device)
            out = call.call(*(values[i] for i in op.operands))
            results = [t for t in out if isinstance(t, Tensor)] if isinstance(out, tuple | list) else [out]
            values.update(zip(op.results, results, strict=True))
    return values
