"""Builds the intra-op problem: a StepGraph on one logical mesh as choices and transfers
(docs/formulas.md#intra-op).

Choices are the parameters' storage modes and the ops' strategies; transfers are the values. Inputs
whose layout is given (batch, buffers, constants) and what leaves the graph (loss, logs) are choices
with a single strategy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.cost.flops import is_plain_view, is_view
from alpa_strategy.intra_op.option_tables import OptionTables, TransferTables
from alpa_strategy.intra_op.options import (
    OpOptions,
    ParameterOptions,
    gathers,
)
from alpa_strategy.intra_op.overlap import hidden
from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use
from alpa_strategy.ir.gathers import local_bytes
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import INVARIANT, DualLayout, shard
from alpa_strategy.ir.stage_graph import batch_layout, leaving_layouts
from alpa_strategy.sharding.per_step import PerStep, casts_of_parameters
from alpa_strategy.sharding.redistribute import reshard_table
from alpa_strategy.sharding.strategies import is_random


@dataclass(frozen=True)
class TransferLayouts:
    """The layouts of a transfer's indices: of value `value`, `sources` are the rows of its tables
    and `targets` the columns.
    """

    value: int
    sources: tuple[DualLayout, ...]
    targets: tuple[DualLayout, ...]

    # Seconds [source, target] of the forward that run beside products.
    hidden: np.ndarray

    # Likewise of the backward, beside the gradients of weights.
    hidden_in_backward: np.ndarray

    @property
    def equal(self) -> np.ndarray:
        """[source, target] whether they are the same layout."""
        number = {layout: i for i, layout in enumerate(self.sources)}
        return np.array([number[s] for s in self.sources])[:, None] == [
            number.get(t, -1) for t in self.targets
        ]


@dataclass(frozen=True)
class BoundaryChoice:
    """The choice of a received or sent value: its index in `problem.choices`, and its layouts."""

    choice: int
    layouts: tuple[DualLayout, ...]


@dataclass(frozen=True)
class IntraOp:
    """A problem, and all that is needed to read its solution back."""

    step: StepGraph
    tables: "OptionTables"
    # choices: parameters (as in `step.parameters`), ops (as in `step.ops`), then the fixed ones
    problem: Problem
    parameters: tuple[ParameterOptions, ...]
    ops: tuple[OpOptions, ...]
    transfers: tuple[TransferLayouts, ...]
    # received, sent: the choices of a stage's boundary values
    received: dict[int, BoundaryChoice] = field(default_factory=dict)
    sent: dict[int, BoundaryChoice] = field(default_factory=dict)

    # Without pins and penalties, where `problem` has them.
    unrestricted: Problem | None = None

    # What a stage does once for all of its micro-batches.
    per_step: PerStep = field(default_factory=PerStep)
    # op -> the first of its strategies that run it again in the backward (`memory_choices.py`)
    recomputes: Mapping[int, int] = field(default_factory=dict)

    # That keep its result in host memory, behind them.
    stores: Mapping[int, int] = field(default_factory=dict)

    @property
    def mesh(self) -> LogicalMesh:
        """The devices."""
        return self.tables.mesh

    def savers(self, value: int) -> list[int]:
        """Return the ops whose backward saves what they read of a value."""
        return [
            op
            for op, position in self.step.consumers.get(value, ())
            if self.ops[op].saved.operands[position]
        ]

    def with_costs(self, more: Mapping[int, np.ndarray]) -> "IntraOp":
        """Return this problem with seconds added to its objective.

        Args:
            more: choice -> [strategy] seconds.
        """
        choices = list(self.problem.choices)
        for index, seconds in more.items():
            choices[index] = replace(choices[index], cost=choices[index].cost + seconds)
        problem = replace(self.problem, choices=tuple(choices))
        return replace(self, problem=problem, unrestricted=self.unrestricted or self.problem)

    @cached_property
    def gathered_again(self) -> frozenset[int]:
        """Values that are not saved in the layout in which they are gathered for use: parameters,
        and values made of them once per step.
        """
        return self.per_step.values.union(
            (p.value for p in self.step.parameters), casts_of_parameters(self.step)
        )


@lru_cache(maxsize=4096)
def boundary_layouts(meta: TensorMeta, mesh_shape: tuple[int, ...]) -> tuple[DualLayout, ...]:
    """Return the layouts in which a value may pass between stages: every combination of `R` and
    `S<d>` whose shards all have the same size.
    """
    layouts = []
    for layout in product(
        (INVARIANT, *(shard(d) for d in range(len(meta.shape)))), repeat=len(mesh_shape)
    ):
        sizes = list(meta.shape)
        for size, placement in zip(mesh_shape, layout, strict=True):
            if placement.shard_dim is not None:
                chunk, rest = divmod(sizes[placement.shard_dim], size)
                if rest or not chunk:
                    break
                sizes[placement.shard_dim] = chunk
        else:
            layouts.append(layout)
    return tuple(layouts)


def build(step: StepGraph, tables: OptionTables) -> IntraOp:
    """Return the problem of `step` on `tables.mesh`, unrestricted (see `restrict.py` for pins).

    A received value has one of `boundary_layouts`, a sent one must reach one. Both are stored until
    the backward.
    """
    builder = _Builder(step, tables)
    builder.add_inputs()
    received = {value: builder.add_boundary("received", value) for value in step.received}
    for value, boundary in received.items():
        builder.producers[value] = boundary.choice, boundary.layouts
    sent = {value: builder.add_boundary("sent", value) for value in step.sent}
    builder.add_transfers(received, sent)
    problem = Problem(tuple(builder.choices), tuple(builder.transfers))
    layouts = tuple(builder.layouts)
    return IntraOp(step, tables, problem, builder.parameters, builder.ops, layouts, received, sent)


class _Builder:
    """The problem under construction: first the choices of parameters and ops, then the fixed ones,
    then the transfers.
    """

    def __init__(self, step: StepGraph, tables: OptionTables) -> None:
        self._step = step
        self._tables = tables
        self._mesh = tables.mesh
        self._unsharded = tables.unsharded
        self.constants = constant_values(step)
        self.parameters = tuple(tables.parameter(p, step) for p in step.parameters)
        options = []
        for op in step.ops:
            if self.constants.issuperset(op.results):
                # All devices compute it in full: it has only the first strategy, which repeats the
                # op.
                options.append(tables.repeated_op(op.call))
            else:
                options.append(tables.op(op.call))
        self.ops = tuple(_with_resident_parameters(step, tuple(options), tables))
        self.choices: list[Choice] = []
        # value -> (the choice that makes it, its layout per strategy)
        self.producers: dict[int, tuple[int, tuple[DualLayout, ...]]] = {}
        self.transfers: list[Transfer] = []
        self.layouts: list[TransferLayouts] = []
        for parameter, stored in zip(step.parameters, self.parameters, strict=True):
            self.producers[parameter.value] = (
                self._add(parameter.name, stored.seconds, stored.num_bytes),
                stored.sources,
            )
        for op, run in zip(step.ops, self.ops, strict=True):
            choice = self._add(op.name, run.compute_seconds + run.comm_seconds, run.num_bytes)
            for position, value in enumerate(op.results):
                self.producers[value] = choice, tables.layouts(run, False, position)

    def _add(self, name: str, seconds: np.ndarray, num_bytes: np.ndarray) -> int:
        self.choices.append(Choice(name, seconds, num_bytes))
        return len(self.choices) - 1

    def _add_fixed(self, name: str, num_bytes: float = 0.0) -> int:
        return self._add(name, np.zeros(1), np.array([num_bytes]))

    def add_inputs(self) -> None:
        """Add the batch as it arrives, and buffers and constants in full."""
        for leaf in self._step.batch:
            layout = batch_layout(self._step, leaf.batch_dim, len(self._mesh.shape))
            num_bytes = local_bytes(leaf.meta, layout, self._mesh.shape)
            self.producers[leaf.value] = (
                self._add_fixed(f"batch[{leaf.leaf}]", num_bytes),
                (layout,),
            )
        for constant_input in self._step.constant_inputs:
            choice = self._add_fixed(f"input{constant_input.value}", constant_input.meta.num_bytes)
            self.producers[constant_input.value] = choice, (self._unsharded,)

    def add_boundary(self, kind: str, value: int) -> BoundaryChoice:
        """Add a value that passes between stages, in each of its `boundary_layouts`, and return its
        choice.

        A received constant is unsharded only.

        Args:
            kind: "received" or "sent", for the choice's name.
        """
        layouts = boundary_layouts(self._step.values[value], self._mesh.shape)
        if kind == "received" and value in self._step.received_constants:
            # Layouts of rotary tables would tie all layers of a stage to one another.
            layouts = self._tables.only_unsharded
        saved_bytes = [
            local_bytes(self._step.values[value], layout, self._mesh.shape) for layout in layouts
        ]
        return BoundaryChoice(
            self._add(f"{kind}{value}", np.zeros(len(layouts)), np.array(saved_bytes, dtype=float)),
            layouts,
        )

    def add_transfers(
        self, received: Mapping[int, BoundaryChoice], sent: Mapping[int, BoundaryChoice]
    ) -> None:
        """Add every value's transfer from its maker to all readers: ops, the next stages, the
        step's results.

        Args:
            received, sent: value -> the choice of its layout at the stage's start and end.
        """
        sink = self._add_fixed("output")
        casts = casts_of_parameters(self._step)
        escaping, saved_values = (
            set(self._step.escaping),
            kept_values(self._step, self.ops, self.constants),
        )
        # `held`: constants, as they are made
        kept_by_maker, held = set(received), set[int]()
        for op, options in zip(self._step.ops, self.ops, strict=True):
            if not options.saved.fuses:
                kept_by_maker.update(
                    v for v, keep in zip(op.results, options.saved.results, strict=True) if keep
                )
        for value, (_, produced) in self.producers.items():
            consumers = self._step.consumers.get(value, ())
            asks = [
                (
                    len(self.parameters) + op,
                    self._tables.layouts(self.ops[op], True, position),
                )
                for op, position in consumers
            ]
            if value in escaping:
                asks.append(self._leaving(value, sink))
            if value in sent:
                asks.append((sent[value].choice, sent[value].layouts))
            is_unsharded = value in self.constants and all(
                p == INVARIANT for layout in produced for p in layout
            )
            saved = value in saved_values or any(
                self.ops[op].saved.operands[position] for op, position in consumers
            )
            if is_unsharded and saved:
                held.add(self._memory_of(value))
            if not asks or is_unsharded:
                # Full on every device: a reader's shard costs nothing.
                continue
            # Received values are kept as they came until the backward has run, results that their
            # own op keeps (of a ReLU) as they were made, and others are recomputed so: using them
            # as they are needs no other copy.
            is_there = value in kept_by_maker or value not in saved_values
            transfer, layouts = self._transfer(value, asks, saved, is_there, value in casts)
            self.transfers.append(transfer)
            self.layouts.append(layouts)
        # Others are inputs, which are there in any case.
        for value in held & self._step.makers.keys():
            choice = self.producers[value][0]
            memory = self.choices[choice].memory + self._step.values[value].num_bytes
            self.choices[choice] = replace(self.choices[choice], memory=memory)

    def _leaving(self, value: int, sink: int) -> tuple[int, tuple[DualLayout, ...]]:
        """Return (choice, layout per strategy) in which a value leaves the step: on every device
        its own rank's of values that ranks have, else the full value.

        A value with several such layouts (the loss) gets a choice of its own in place of `sink`.

        Args:
            sink: the fixed choice that reads the results.
        """
        layouts = leaving_layouts(self._step, value, len(self._mesh.shape))
        if len(layouts) == 1:
            return sink, layouts
        choice = self._add("loss", np.zeros(len(layouts)), np.zeros(len(layouts)))
        return choice, layouts

    def _memory_of(self, value: int) -> int:
        """Return the value whose memory `value` is a view of."""
        while value in self._step.makers and is_view(
            (op := self._step.ops[self._step.makers[value]]).call
        ):
            value = op.operands[0]
        return value

    def _transfer(
        self,
        value: int,
        asks: list[tuple[int, tuple[DualLayout, ...]]],
        saved: bool,
        is_there: bool,
        is_cast: bool,
    ) -> tuple[Transfer, TransferLayouts]:
        """Return one value's transfer. Its bytes are those of the copy in the target layout, if a
        consumer's backward saves that.

        Args:
            asks: (choice, the layout that it requires per strategy) of every reader.
            saved: whether a consumer's backward saves it.
            is_there: whether it is stored as it is made in any case.
            is_cast: whether it is a parameter in half precision.
        """
        (producer, produced), meta = self.producers[value], self._step.values[value]
        is_parameter = is_cast or producer < len(self.parameters)
        leaves = value in self._step.escaping, value in self._step.sent
        ends = (produced, *(required for _, required in asks))
        storage = saved, is_there, is_cast
        tables = self._tables.transfer(
            ends,
            (meta, is_parameter, *leaves, *storage),
            lambda: self._transfer_tables(value, ends, is_parameter, *storage),
        )
        uses = tuple(
            Use(choice, layout) for (choice, _), layout in zip(asks, tables.required, strict=True)
        )
        transfer = Transfer(f"v{value}", producer, tables.source, uses, tables.cost, tables.memory)
        layouts = TransferLayouts(
            value, tables.sources, tables.targets, tables.hidden, tables.hidden_in_backward
        )
        return transfer, layouts

    def _transfer_tables(
        self,
        value: int,
        ends: tuple[tuple[DualLayout, ...], ...],
        is_parameter: bool,
        saved: bool,
        is_there: bool,
        is_cast: bool,
    ) -> TransferTables:
        """Return the tables of a value's transfer. Other arguments: as of `_transfer`.

        Args:
            ends: of the maker and of each reader, its layout per strategy.
            is_parameter: whether it is a parameter or one cast to half precision, which is
                re-gathered for the backward.
        """
        meta = self._step.values[value]
        produced, *asks = ends
        # Rows and columns of the table: every layout once, whatever number of strategies has it.
        sources = tuple(dict.fromkeys(produced))
        targets = tuple(dict.fromkeys(layout for required in asks for layout in required))
        forward, backward = reshard_table(
            sources, targets, meta.num_bytes, meta.requires_grad, self._mesh
        )
        in_forward = np.zeros_like(forward)
        in_backward = np.zeros_like(forward)
        if is_parameter:
            backward = backward * self._tables.optimizer.gradient_scale(meta.dtype.itemsize)
        elif self._tables.overlaps_matmuls:
            in_forward, in_backward = hidden(
                self._step, self.ops, value, (sources, targets), self._mesh
            )
            forward, backward = forward - in_forward, backward - in_backward
        layouts = TransferLayouts(value, sources, targets, in_forward, in_backward)
        # [source, target]
        cost = forward + backward
        memory = np.zeros_like(cost)
        copies = [local_bytes(meta, target, self._mesh.shape) for target in targets]
        # A gathered parameter is not kept but gathered once more in the backward (ZeRO-3)
        if saved and is_parameter:
            cost = np.where(gathers(sources, targets), cost + forward, cost)
            # A cast that is not gathered is kept.
            memory[:] = np.where(layouts.equal & is_cast, copies, 0)
        elif saved:
            memory[:] = np.where(layouts.equal & is_there, 0, copies)
        row = {layout: i for i, layout in enumerate(sources)}
        column = {layout: i for i, layout in enumerate(targets)}
        source = np.array([row[layout] for layout in produced])
        required = []
        for reader in asks:
            required.append(np.array([column[layout] for layout in reader]))
        for shared in (source, *required, cost, memory, in_forward, in_backward):
            shared.flags.writeable = False
        return TransferTables(
            source, tuple(required), sources, targets, cost, memory, in_forward, in_backward
        )


def _with_resident_parameters(
    step: StepGraph, ops: Sequence[OpOptions], tables: OptionTables
) -> Iterator[OpOptions]:
    """Yield the options of each op, without bytes of parameters and their views: these are stored
    anyway.

    Args:
        ops: the options of the step's ops, with those bytes.
    """
    resident = {p.value: p.meta for p in step.parameters}
    for op, options in zip(step.ops, ops, strict=True):
        metas = tuple(resident.get(value) for value in op.operands)
        if is_plain_view(op.call) and metas[0] is not None:
            resident.update((value, step.values[value]) for value in op.results)
        yield tables.without_parameters(options, metas) if any(metas) else options


def constant_values(step: StepGraph) -> frozenset[int]:
    """Return the values computed from buffers and constants alone: rotary tables, masks, positions.

    Every device computes them in full: they are little work, and no layout has to be chosen.
    """
    return step.values_of_constants(lambda call: not is_random(call))


def kept_values(step: StepGraph, ops: Sequence[OpOptions], constants: frozenset[int]) -> set[int]:
    """Return the values that are saved for the backward: all that an op's backward reads, except
    those that fused ops recompute.

    From the last op to the first: results of an op that fuses are not saved if its operands are, or
    if these are smaller (for a view, as large). But results that an op that does not fuse (a
    matmul) reads in the backward are saved: they would be written to memory for it. PyTorch's
    partitioner takes a minimum cut of the same graph, with the same exception.
    """
    saved: set[int] = set()
    # for products
    written: set[int] = set()
    for op, options in zip(step.ops, ops, strict=True):
        read = [
            value for value, keep in zip(op.operands, options.saved.operands, strict=True) if keep
        ]
        if options.saved.fuses:
            read += [
                value for value, keep in zip(op.results, options.saved.results, strict=True) if keep
            ]
        else:
            written.update(read)
        saved.update(read)
    computed = {value for op in step.ops for value in op.results} - constants
    for op, options in zip(reversed(step.ops), reversed(ops), strict=True):
        results = saved.intersection(op.results) - written
        if not options.saved.fuses or not results:
            continue
        more = {value for value in op.operands if value in computed} - saved
        spared = sum(step.values[value].num_bytes for value in results)
        added = sum(step.values[value].num_bytes for value in more)
        if added < spared or (added == spared and is_plain_view(op.call)):
            saved = (saved - results) | more
    return saved
