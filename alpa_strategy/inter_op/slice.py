"""A run of a step's ops as a StepGraph of its own: what a stage executes. Values keep the whole step's numbers.

A stage's inputs are those parameters, buffers, constants and batch leaves that it reads, and `received`: values that
earlier stages make. What later stages read is `sent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch.utils import _pytree as pytree

from alpa_strategy.ir.graph import AppendRecord, LogRecord, MetricRecord, StepGraph, ValueRef


def slice_stage(step: StepGraph, first: int, last: int) -> StepGraph:
    """Ops [first, last) of `step` as a graph.

    A log, metric or output stays where its last value is made; its other values are received there. One that holds no
    value made by an op belongs to the slice with the last op. A buffer is updated where its new value is made.
    """
    if not 0 <= first < last <= len(step.ops):
        raise ValueError(f"ops [{first}, {last}) of a step with {len(step.ops)} ops")
    ops = step.ops[first:last]
    maker = makers(step)
    is_end = last == len(step.ops)

    def is_home(values: Sequence[int]) -> bool:
        made = [maker[v] for v in values if v in maker]
        return first <= max(made) < last if made else is_end

    logs = tuple(record for record in step.logs if is_home(values_of(record)))
    metrics = tuple(record for record in step.metrics if is_home(values_of(record)))
    appended = tuple(record for record in step.appended if is_home(values_of(record)))
    checks = tuple(check for check in step.checks if is_home((check.value,)))
    output = _keep(step.output, lambda value: is_home((value,)))
    updates = {b.update for b in step.buffers if b.update is not None and is_home((b.update,))}
    loss = step.loss if step.loss >= 0 and is_home((step.loss,)) else -1
    read = {value for op in ops for value in op.operands} | updates
    read.update(value for record in (*logs, *metrics, *appended) for value in values_of(record))
    read.update(values_of(output), [loss] if loss >= 0 else [], [check.value for check in checks])
    here = {value for op in ops for value in op.results}
    handed_in = set(step.received) | {value for value, op in maker.items() if op < first}
    return replace(
        step,
        parameters=tuple(p for p in step.parameters if p.value in read),
        buffers=tuple(
            b if b.update in updates else replace(b, update=None)
            for b in step.buffers
            if b.value in read or b.update in updates
        ),
        batch=tuple(b for b in step.batch if b.value in read),
        constants=tuple(c for c in step.constants if c.value in read),
        ops=ops,
        loss=loss,
        output=output,
        logs=logs,
        metrics=metrics,
        checks=checks,
        appended=appended,
        received=tuple(sorted(read & handed_in)),
        sent=tuple(sorted(v for v in here if v in step.sent or last_readers(step)[v] >= last)),
    )


def slice_stages(step: StepGraph, cuts: Sequence[int]) -> tuple[StepGraph, ...]:
    """The stages between cut positions: `cuts` ascends from 0 to the number of ops."""
    return tuple(slice_stage(step, a, b) for a, b in pairwise(cuts))


def stage_on(step: StepGraph, first: int, last: int, num_devices: int) -> StepGraph:
    """`slice_stage` as it is planned and lowered on a mesh of `num_devices`.

    Batch rows arrive divided over the stage's devices where they divide evenly, else whole (`batch_scope`).
    """
    stage = slice_stage(step, first, last)
    even = all(leaf.meta.shape[0] % num_devices == 0 for leaf in stage.batch if leaf.batch_dim == 0)
    return replace(stage, batch_scope="rank" if even and step.batch_scope == "rank" else "global")


def shared_parameters(step: StepGraph, cuts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Name of every parameter that ops of several stages read -> these stages: its gradient is summed over them."""
    users: dict[int, set[int]] = {p.value: set() for p in step.parameters}
    for stage, (first, last) in enumerate(pairwise(cuts)):
        for op in step.ops[first:last]:
            for value in users.keys() & op.operands:
                users[value].add(stage)
    return {p.name: tuple(sorted(users[p.value])) for p in step.parameters if len(users[p.value]) > 1}


def crossing_values(step: StepGraph, position: int) -> tuple[int, ...]:
    """Values made by ops before `position` that are read at or after it (the boundary there), ascending."""
    last = last_readers(step)
    return tuple(v for v, op in sorted(makers(step).items()) if op < position <= last[v])


def values_of(node: Any) -> tuple[int, ...]:
    """Value indices in an output structure, log or metric record, in order, each once."""
    found: dict[int, None] = {}

    def visit(item: Any) -> None:
        if isinstance(item, ValueRef):
            found[item.index] = None
        elif isinstance(item, LogRecord):
            visit(item.value)
        elif isinstance(item, AppendRecord):
            visit(item.items)
        elif isinstance(item, MetricRecord):
            visit(item.args)
            visit(tuple(value for _, value in item.kwargs))
        elif not pytree.tree_is_leaf(item):
            for value in pytree.tree_leaves(item):
                visit(value)

    visit(node)
    return tuple(found)


def _keep(node: Any, wanted: Callable[[int], bool]) -> Any:
    """An output structure without the values of other stages: left out of tuples and lists, None elsewhere."""
    if isinstance(node, ValueRef):
        return node if wanted(node.index) else None
    if isinstance(node, dict):
        return {key: _keep(value, wanted) for key, value in node.items()}
    if isinstance(node, list | tuple):
        kept = [_keep(item, wanted) for item in node if not isinstance(item, ValueRef) or wanted(item.index)]
        return tuple(kept) if isinstance(node, tuple) else kept
    return node


@lru_cache(maxsize=8)
def _tables(key: _ById) -> tuple[dict[int, int], dict[int, int]]:
    step = key.step
    maker = {value: index for index, op in enumerate(step.ops) for value in op.results}
    last = dict.fromkeys(maker, -1)
    for index, op in enumerate(step.ops):
        for value in op.operands:
            if value in last:
                last[value] = index
    records = [values_of(record) for record in (*step.logs, *step.metrics, *step.appended)]
    for values in records:  # read where the record's last value is made
        homes = [maker[v] for v in values if v in maker]
        for value in values:
            if value in last:
                last[value] = max(last[value], *homes)
    return maker, last


class _ById:
    """A step as a cache key: by identity (graphs are frozen, and hashing one would visit all of it)."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step

    def __hash__(self) -> int:
        return id(self.step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.step is other.step


def makers(step: StepGraph) -> dict[int, int]:
    """Value -> index of the op that makes it."""
    return _tables(_ById(step))[0]


def last_readers(step: StepGraph) -> dict[int, int]:
    """Op-made value -> index of the last op (or record's home) that reads it; -1 when none does."""
    return _tables(_ById(step))[1]
