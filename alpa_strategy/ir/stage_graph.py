"""A run of a step's ops as a StepGraph: the part that a stage executes. Values have the numbers of
the full step.

A stage's inputs are the parameters, buffers, constants and batch leaves that it reads, and
`received`: values that earlier stages compute. Values that later stages read are `sent`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from alpa_strategy.ir.graph import StepGraph, ValueRef, values_of
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, DualLayout, shard


def slice_stage(step: StepGraph, first: int, last: int) -> StepGraph:
    """Return ops [first, last) of `step` as a graph.

    A log, metric or output belongs to the slice that computes its last value, and receives its
    other values there. One without values of ops belongs to the slice with the last op. A buffer is
    updated where its new value is computed.

    Raises:
        ValueError: the range is empty or not within the step's ops.
    """
    if not 0 <= first < last <= len(step.ops):
        raise ValueError(f"ops [{first}, {last}) of a step with {len(step.ops)} ops")
    ops = step.ops[first:last]
    maker = step.makers
    is_end = last == len(step.ops)

    def is_home(values: Sequence[int]) -> bool:
        makers = [maker[v] for v in values if v in maker]
        return first <= max(makers) < last if makers else is_end

    records: dict[str, Any] = {
        name: tuple(record for record in getattr(step, name) if is_home(values_of(record)))
        for name in ("logs", "metrics", "appended", "assigned", "checks")
    }
    output = _keep(step.output, lambda value: is_home((value,)))
    updates = set()
    for buffer in step.buffers:
        if buffer.update is not None and is_home((buffer.update,)):
            updates.add(buffer.update)
    has_loss = step.loss >= 0 and is_home((step.loss,))
    loss = step.loss if has_loss else -1
    read = {value for op in ops for value in op.operands} | updates
    read.update(values_of((output, records)), [loss] if loss >= 0 else [])
    here = {value for op in ops for value in op.results}
    handed_in = set(step.received) | {value for value, op in maker.items() if op < first}
    received = tuple(sorted(read & handed_in))
    constants = step.made_of_constants.union(step.received_constants)
    buffers = []
    for buffer in step.buffers:
        if buffer.update in updates:
            buffers.append(buffer)
        elif buffer.value in read:
            buffers.append(replace(buffer, update=None))
    return replace(
        step.part(ops, read),
        buffers=tuple(buffers),
        loss=loss,
        output=output,
        **records,
        received=received,
        received_constants=tuple(value for value in received if value in constants),
        sent=tuple(sorted(v for v in here if v in step.sent or step.last_readers[v] >= last)),
    )


def stage_on(step: StepGraph, first: int, last: int, num_devices: int) -> StepGraph:
    """Return `slice_stage` as it is planned and lowered on a mesh of `num_devices`.

    The batch's samples arrive divided over the stage's devices if they divide evenly and are those
    of each rank in `step`, else in full (`batch_scope`). Raises ValueError as `slice_stage`.
    """
    stage = slice_stage(step, first, last)
    even = all(leaf.meta.shape[0] % num_devices == 0 for leaf in stage.batch if leaf.batch_dim == 0)
    is_per_rank = even and step.batch_scope == "rank"
    return replace(stage, batch_scope="rank" if is_per_rank else "global")


def crossing_values(step: StepGraph, position: int) -> tuple[int, ...]:
    """Return the values of ops before `position` that are read at or after it, ascending."""
    return tuple(
        v for v, op in sorted(step.makers.items()) if op < position <= step.last_readers[v]
    )


def batch_layout(step: StepGraph, batch_dim: int | None, num_axes: int) -> DualLayout:
    """Return the layout in which a batch leaf arrives: each rank has its local samples, or all
    ranks have the same tensor.
    """
    own_rows = step.batch_scope == "rank" and batch_dim == 0
    return (shard(0) if own_rows else INVARIANT,) * num_axes


def leaving_layouts(
    step: StepGraph, value: int, num_axes: int, is_in_order: bool = True
) -> tuple[DualLayout, ...]:
    """Return the layouts in which a value may leave a step, the usual one first.

    Each device gets its own rank's value of those that ranks have, and the full value of others.
    Nothing reads the mean of the ranks' losses, where the backward begins: it may stay a sum.

    Args:
        value: one of `step.escaping`.
        is_in_order: whether the devices are in the order of ranks. Else a device's block is another
            rank's, and each device gets the values of all.
    """
    if value == step.loss and step.loss_of_ranks >= 0:
        return tuple(product((INVARIANT, PARTIAL), repeat=num_axes))
    how = dict(step.of_ranks).get(value)
    if how is not None and is_in_order:
        return (how.layout(num_axes),)
    return ((INVARIANT,) * num_axes,)


def _keep(node: Any, wanted: Callable[[int], bool]) -> Any:
    """Return an output structure without the values of other stages: left out of tuples and lists,
    None elsewhere.

    Args:
        wanted: whether a value is of this stage.
    """
    if isinstance(node, ValueRef):
        return node if wanted(node.index) else None
    if isinstance(node, dict):
        return {key: _keep(value, wanted) for key, value in node.items()}
    if isinstance(node, list | tuple):
        items = [
            _keep(item, wanted)
            for item in node
            if not isinstance(item, ValueRef) or wanted(item.index)
        ]
        return tuple(items) if isinstance(node, tuple) else items
    return node
