"""Builds the intra-op problem: a StepGraph on one logical mesh as choices and transfers (design section 7).

Choices are the parameters' storage modes and the ops' strategies; transfers are the values. Inputs whose layout is
given (batch, buffers, constants) and what leaves the graph (loss, logs) are choices with a single strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from alpa_strategy.capture.step_graph import ParameterInput, StepGraph
from alpa_strategy.cluster.spec import LogicalMesh
from alpa_strategy.cost.flops import is_plain_view
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.intra_op.options import (
    OpOptions,
    ParameterOptions,
    is_gather,
    local_bytes,
    op_options,
    parameter_options,
    whole_only,
    without_parameters,
)
from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.sharding.layout import REPLICATE, DualLayout, shard
from alpa_strategy.sharding.localize import is_random
from alpa_strategy.sharding.op import OpCall, TensorMeta
from alpa_strategy.sharding.redistribute import reshard_table


@dataclass(frozen=True)
class TransferLayouts:
    """The layouts behind a Transfer's indices: of value `value`, rows `sources`, columns `targets`."""

    value: int
    sources: tuple[DualLayout, ...]
    targets: tuple[DualLayout, ...]


@dataclass(frozen=True)
class BoundaryChoice:
    """The choice that stands for a received or sent value: index in `problem.choices`, and its layouts."""

    choice: int
    layouts: tuple[DualLayout, ...]


@dataclass(frozen=True)
class IntraOp:
    """A problem with what is needed to read its solution back.

    Choices are ordered: parameters (as in `step.parameters`), ops (as in `step.ops`), then the fixed ones.
    `received` and `sent` hold the choices of a stage's boundary values. What happens once per optimizer step is shared
    by `steps_per_update` training steps. `steps_in_backward`: see `OptimizerInfo`.
    `unrestricted` is the problem without pins and penalties, where `problem` has them.
    """

    step: StepGraph
    mesh: LogicalMesh
    problem: Problem
    parameters: tuple[ParameterOptions, ...]
    ops: tuple[OpOptions, ...]
    transfers: tuple[TransferLayouts, ...]
    received: dict[int, BoundaryChoice] = field(default_factory=dict)
    sent: dict[int, BoundaryChoice] = field(default_factory=dict)
    steps_per_update: int = 1
    unrestricted: Problem | None = None
    steps_in_backward: bool = False


class OptionTables:
    """Options per op call and per parameter shape on one mesh, worked out once for all layers that share them."""

    def __init__(self, mesh: LogicalMesh, costs: OpCosts, optimizer: OptimizerInfo, steps_per_update: int = 1) -> None:
        self.mesh, self.costs, self.optimizer = mesh, costs, optimizer
        self.steps_per_update = steps_per_update
        self._ops: dict[OpCall, OpOptions] = {}
        self._parameters: dict[tuple[TensorMeta, int], ParameterOptions] = {}
        self._reshards: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def op(self, call: OpCall) -> OpOptions:
        if call not in self._ops:
            self._ops[call] = op_options(call, self.mesh, self.costs)
        return self._ops[call]

    def parameter(self, given: ParameterInput) -> ParameterOptions:
        key = given.meta, given.num_segments
        if key not in self._parameters:
            self._parameters[key] = parameter_options(
                given.meta, self.mesh, self.costs, self.optimizer, given.num_segments, self.steps_per_update
            )
        return self._parameters[key]

    def reshard(
        self, sources: tuple[DualLayout, ...], targets: tuple[DualLayout, ...], meta: TensorMeta
    ) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds, [source, target]."""
        key = (sources, targets, meta)
        if key not in self._reshards:
            self._reshards[key] = reshard_table(sources, targets, meta, self.mesh)
        return self._reshards[key]


def batch_layout(step: StepGraph, batch_dim: int | None, num_axes: int) -> DualLayout:
    """How a batch leaf arrives: every rank has its own rows, or the same tensor is on every rank."""
    own_rows = step.batch_scope == "rank" and batch_dim == 0
    return (shard(0) if own_rows else REPLICATE,) * num_axes


def boundary_layouts(meta: TensorMeta, mesh_shape: tuple[int, ...]) -> tuple[DualLayout, ...]:
    """How a value may pass from stage to stage: every combination of `R` and `S<d>` whose chunks are all equal."""
    found = []
    for layout in product((REPLICATE, *(shard(d) for d in range(len(meta.shape)))), repeat=len(mesh_shape)):
        left = list(meta.shape)
        for size, placement in zip(mesh_shape, layout, strict=True):
            if placement.shard_dim is not None:
                chunk, rest = divmod(left[placement.shard_dim], size)
                if rest or not chunk:
                    break
                left[placement.shard_dim] = chunk
        else:
            found.append(layout)
    return tuple(found)


BoundarySeconds = Callable[[int, DualLayout], float]


def build(
    step: StepGraph,
    tables: OptionTables,
    memory_limit: float = float("inf"),
    received_seconds: BoundarySeconds | None = None,
    sent_seconds: BoundarySeconds | None = None,
) -> IntraOp:
    """The problem of `step` on `tables.mesh`, unrestricted (see `presets.restrict` for pins).

    A received value is a choice among `boundary_layouts`, free unless `received_seconds(value, layout)` prices it; a
    sent value must reach one of these layouts, priced by `sent_seconds`. Both are kept until the backward.
    """
    mesh = tables.mesh
    num_axes = len(mesh.shape)
    whole: DualLayout = (REPLICATE,) * num_axes
    parameters = tuple(tables.parameter(p) for p in step.parameters)
    constants = constant_values(step)
    ops = tuple(
        whole_only(tables.op(op.call)) if constants.issuperset(op.results) else tables.op(op.call) for op in step.ops
    )
    ops = tuple(_with_resident_parameters(step, ops, mesh))
    choices = [
        Choice(p.name, options.seconds, options.num_bytes)
        for p, options in zip(step.parameters, parameters, strict=True)
    ]
    choices += [
        Choice(op.name, o.compute_seconds + o.comm_seconds, o.num_bytes) for op, o in zip(step.ops, ops, strict=True)
    ]
    # value -> (producing choice, its layout per strategy)
    producers: dict[int, tuple[int, tuple[DualLayout, ...]]] = {}
    for index, (p, options) in enumerate(zip(step.parameters, parameters, strict=True)):
        producers[p.value] = (index, options.sources)
    for index, (op, options) in enumerate(zip(step.ops, ops, strict=True)):
        for position, value in enumerate(op.results):
            producers[value] = (len(parameters) + index, tuple(outputs[position] for outputs in options.outputs))

    def add_fixed(name: str, num_bytes: float = 0.0) -> int:
        choices.append(Choice(name, np.zeros(1), np.array([num_bytes])))
        return len(choices) - 1

    def add_boundary(
        name: str, value: int, layouts: tuple[DualLayout, ...], seconds: BoundarySeconds | None, num_bytes: list[int]
    ) -> BoundaryChoice:
        cost = np.array([seconds(value, layout) if seconds else 0.0 for layout in layouts])
        choices.append(Choice(name, cost, np.array(num_bytes, dtype=float)))
        return BoundaryChoice(len(choices) - 1, layouts)

    for leaf in step.batch:
        layout = batch_layout(step, leaf.batch_dim, num_axes)
        choice = add_fixed(f"batch[{leaf.leaf}]", local_bytes(leaf.meta, layout, mesh.shape))
        producers[leaf.value] = (choice, (layout,))
    for given in (*step.buffers, *step.constants):
        producers[given.value] = (add_fixed(f"input{given.value}", given.meta.num_bytes), (whole,))
    received: dict[int, BoundaryChoice] = {}
    for value in step.received:
        given = boundary_layouts(step.values[value], mesh.shape)
        kept = [local_bytes(step.values[value], layout, mesh.shape) for layout in given]
        received[value] = add_boundary(f"received{value}", value, given, received_seconds, kept)
        producers[value] = (received[value].choice, given)
    sent: dict[int, BoundaryChoice] = {}
    for value in step.sent:
        wanted = boundary_layouts(step.values[value], mesh.shape)
        kept = [local_bytes(step.values[value], layout, mesh.shape) for layout in wanted]
        sent[value] = add_boundary(f"sent{value}", value, wanted, sent_seconds, kept)
    sink = add_fixed("output")
    parameter_values = {p.value for p in step.parameters}
    escaping = set(step.escaping)
    transfers: list[Transfer] = []
    layouts: list[TransferLayouts] = []
    for value, (producer, produced) in producers.items():
        asks = [
            (len(parameters) + op_index, tuple(inputs[position] for inputs in ops[op_index].inputs))
            for op_index, position in step.consumers.get(value, ())
        ]
        if value in escaping:
            asks.append((sink, (whole,)))
        if value in sent:
            asks.append((sent[value].choice, sent[value].layouts))
        if not asks or (value in constants and all(layout_is_whole(source) for source in produced)):
            continue  # whole on every device: each takes its part for nothing
        saved = any(ops[i].saved.operands[position] for i, position in step.consumers.get(value, ()))
        transfer, named = _transfer(step, tables, value, producer, produced, asks, saved, value in parameter_values)
        if value in received:  # kept as it came until the backward has run: using it as it is needs no other copy
            for p, source in enumerate(named.sources):
                if source in named.targets:
                    transfer.memory[p, named.targets.index(source)] = 0.0
        transfers.append(transfer)
        layouts.append(named)
    problem = Problem(tuple(choices), tuple(transfers), memory_limit)
    return IntraOp(
        step,
        mesh,
        problem,
        parameters,
        ops,
        tuple(layouts),
        received,
        sent,
        tables.steps_per_update,
        steps_in_backward=tables.optimizer.steps_in_backward,
    )


def _with_resident_parameters(step: StepGraph, ops: Sequence[OpOptions], mesh: LogicalMesh) -> Iterator[OpOptions]:
    given = {p.value: p.meta for p in step.parameters}
    for op, options in zip(step.ops, ops, strict=True):
        metas = [given.get(value) for value in op.operands]
        if is_plain_view(op.call) and metas[0] is not None:
            given.update((value, step.values[value]) for value in op.results)
        yield without_parameters(options, metas, mesh) if any(metas) else options


def constant_values(step: StepGraph) -> frozenset[int]:
    """Values made of buffers and constants alone: rotary tables, masks, positions.

    They are made whole on every device: tiny work, and nobody has to agree on a layout.
    """
    found = {given.value for given in (*step.buffers, *step.constants)}
    for op in step.ops:
        if found.issuperset(op.operands) and not is_random(op.call):
            found.update(op.results)
    return frozenset(found)


def layout_is_whole(layout: DualLayout) -> bool:
    """True when every device holds the whole value and its whole gradient."""
    return all(placement == REPLICATE for placement in layout)


def _transfer(
    step: StepGraph,
    tables: OptionTables,
    value: int,
    producer: int,
    produced: tuple[DualLayout, ...],
    asks: list[tuple[int, tuple[DualLayout, ...]]],
    saved: bool,
    is_parameter: bool,
) -> tuple[Transfer, TransferLayouts]:
    """One value's transfer. Bytes: the copy in the target layout, where a consumer's backward keeps it."""
    meta = step.values[value]
    sources = tuple(dict.fromkeys(produced))
    targets = tuple(dict.fromkeys(layout for _, asked in asks for layout in asked))
    forward, backward = tables.reshard(sources, targets, meta)
    cost = forward + backward
    memory = np.zeros_like(cost)
    for q, target in enumerate(targets):
        kept = local_bytes(meta, target, tables.mesh.shape)
        for p, source in enumerate(sources):
            if is_parameter:
                # A gathered parameter is not kept but gathered once more in the backward (ZeRO-3).
                if saved and is_gather(source, target):
                    cost[p, q] += forward[p, q]
            elif saved:
                memory[p, q] = kept
    row = {layout: i for i, layout in enumerate(sources)}
    column = {layout: i for i, layout in enumerate(targets)}
    uses = tuple(Use(choice, np.array([column[layout] for layout in asked])) for choice, asked in asks)
    transfer = Transfer(f"v{value}", producer, np.array([row[layout] for layout in produced]), uses, cost, memory)
    return transfer, TransferLayouts(value, sources, targets)
