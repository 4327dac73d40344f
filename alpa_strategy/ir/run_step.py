"""Runs a StepGraph op by op, on full tensors on one device."""

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
    """Run the step op by op, on full tensors on one device.

    A pipeline runs its prologue and epilogue this way, once per step.

    Args:
        parameters: by any of the parameter's names, in the module's shapes. All tensors are on one
            device.
        buffers: by name. The counters are under `COUNTERS`, if the step computes with them.
        batch_leaves: global tensors in the order of `step.batch`.
        received: the values `step.received`.

    Returns:
        Value index -> tensor, for all values. `step.escaping` has those that leave the graph.
    """
    received = received or {}
    values: dict[int, Tensor] = {value: received[value] for value in step.received}
    for entry in step.parameters:
        parameter = next(parameters[name] for name in entry.names if name in parameters)
        if entry.module_shape is not None:
            parameter = parameter.view(entry.meta.shape)
        values[entry.value] = parameter
    for buffer in step.buffers:
        values[buffer.value] = buffers[buffer.name]
    for leaf, tensor in zip(step.batch, batch_leaves, strict=True):
        values[leaf.value] = tensor

    # Factories (arange, zeros) have no device in the graph.
    device = next((tensor.device for tensor in values.values()), torch.get_default_device())
    for constant in step.constants:
        values[constant.value] = constant.tensor.to(device)

    # The context is for the Python functions among the targets; ATen's overloads ignore it.
    with device:
        for op in step.ops:
            call = at_counters(op.call, buffers.get(COUNTERS, {})).on(device)
            returned = call.call(*(values[operand] for operand in op.operands))
            results = [returned]
            if isinstance(returned, tuple | list):
                results = [item for item in returned if isinstance(item, Tensor)]
            values.update(zip(op.results, results, strict=True))
    return values
