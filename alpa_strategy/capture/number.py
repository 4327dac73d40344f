"""The end of conversion: drop ops and constants without effect, number the values anew, name the ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from alpa_strategy.capture.builder import Builder
from alpa_strategy.capture.results import Results
from alpa_strategy.capture.trace import Trace, TracedInput
from alpa_strategy.ir.graph import (
    BatchInput,
    BufferInput,
    ConstantInput,
    Op,
    ParameterInput,
    StepGraph,
    ValueRef,
)
from alpa_strategy.ir.op import TensorMeta


def number(
    trace: Trace,
    builder: Builder,
    inputs: list[tuple[TracedInput, int]],
    constants_found: list[ConstantInput],
    results: Results,
) -> StepGraph:
    """The graph of the ops that have an effect, values numbered anew, ops named; `inputs` with their values."""
    updates, needed = results.updates, results.values()
    kept: list[Op] = []
    for op in reversed(builder.ops):
        if needed.intersection(op.results):
            kept.append(op)
            needed.update(op.operands)
    kept.reverse()
    new_index: dict[int, int] = {}
    values: list[TensorMeta] = []

    def define(old: int) -> int:
        new_index[old] = len(values)
        values.append(builder.values[old])
        return new_index[old]

    parameters, buffers, batch = [], [], []
    for entry, old in inputs:
        meta = builder.values[old]
        match entry.kind:
            case "parameter":
                parameters.append(ParameterInput(define(old), entry.names, meta))
            case "buffer":
                if old in needed or old in updates:
                    buffers.append((define(old), old, entry.names[0], meta))
            case _:
                batch.append(BatchInput(define(old), entry.leaf, meta, entry.batch_dim))
    constants = [replace(c, value=define(c.value)) for c in constants_found if c.value in needed]
    counts: dict[str, int] = {}
    ops: list[Op] = []
    for op in kept:
        base = op.call.target_name.split(".")[1]
        number = counts[base] = counts.get(base, -1) + 1
        operands = tuple(new_index[o] for o in op.operands)
        ops.append(replace(op, name=f"{base}_{number}", operands=operands, results=tuple(map(define, op.results))))

    def renumber(tree: Any) -> Any:
        return pytree.tree_map_only(ValueRef, lambda r: ValueRef(new_index[r.index]), tree)

    return StepGraph(
        values=tuple(values),
        parameters=tuple(parameters),
        buffers=tuple(
            BufferInput(new, name, meta, new_index[updates[old]] if old in updates else None)
            for new, old, name, meta in buffers
        ),
        batch=tuple(batch),
        constants=tuple(constants),
        ops=tuple(ops),
        loss=new_index[results.loss] if results.loss >= 0 else -1,
        output=renumber(results.output),
        logs=tuple(replace(r, value=renumber(r.value)) for r in results.logs),
        metrics=tuple(replace(r, args=renumber(r.args), kwargs=renumber(r.kwargs)) for r in results.metrics),
        batch_size=trace.batch_size,
        guards=tuple(trace.recording.guards),
        attributes=trace.recording.attributes,
        leaves=trace.read_leaves,
        checks=tuple(replace(check, value=new_index[check.value]) for check in results.checks),
        notes=tuple(trace.recording.notes),
        appended=tuple(replace(r, items=renumber(r.items)) for r in results.appended),
    )
