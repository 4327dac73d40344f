"""A step as the same work on M equal micro-batches, exactly: from a StepGraph to StepGraphs.

Micro-batches are one more mesh axis, in time: the sharding rules tell how every op splits over it.
`states.py` finds a placement for every value. This file writes the graphs: prologue, micro graph
and epilogue (`MicroStep`).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from alpa_strategy.capture.ops import batch_norm_train
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.ir.per_rank import PerRank
from alpa_strategy.microbatch.first_rank_buffers import with_first_rank_buffers
from alpa_strategy.microbatch.rules import (
    SUM,
    WHOLE,
    MicrobatchPlacement,
    TimeStrategy,
    local_call,
    rows,
)
from alpa_strategy.microbatch.states import States, Use, find_states
from alpa_strategy.sharding.strategies import is_random


@dataclass(frozen=True)
class MicroStep:
    """A step split into `num_microbatches` equal micro-batches, exactly.

    Values keep the step's numbers. A value that the step does not have is numbered after them: a
    share of 1/M, or a value of the prologue that the micro graph also computes itself.

    The step's values after all micro-batches are those of the prologue, the combined ones, and
    those of the epilogue. Logs, metrics, the output and buffer updates are made from them once, as
    the records of the full step describe. `graph`, `prologue` and `epilogue` have no records:
    `output` of each is a tuple with a ValueRef of every value that must leave it.
    """

    # M
    num_microbatches: int

    # The step on one micro-batch, at global shapes divided by M along the batch dim. Its loss is a
    # partial value: the sum over the micro-batches is the loss of the full step. The gradients of
    # its parameters are summed likewise.
    graph: StepGraph

    # A step over the full batch that runs before the micro-batches, or None. It has the values that
    # depend on all samples and on no parameter (the number of targets that are not ignored, a
    # random mask). Its `escaping` values go to `graph` or are results of the step.
    prologue: StepGraph | None = None

    # Value in `graph` (one of `graph.received`) -> the value in `prologue` that fills it.
    from_prologue: dict[int, int] = field(default_factory=dict)

    # Value of `from_prologue`, or escaping value of `graph` -> its placement on micro-batches.
    # Samples are split and concatenated like those of a batch leaf (see `cut`). Partial values are
    # summed. Of a full value that leaves `graph` the last micro-batch's is taken: all are equal,
    # except for updates of sequential buffers.
    states: dict[int, MicrobatchPlacement] = field(default_factory=dict)

    # Buffers that every micro-batch updates and the next one reads (BatchNorm statistics, as in
    # plain gradient accumulation). All other buffers keep their values until the end of the step.
    sequential_buffers: tuple[str, ...] = ()

    # A step over combined and prologue values for logs and outputs that are no sums over
    # micro-batches (`loss.exp()`), or None.
    epilogue: StepGraph | None = None

    # Runs of samples in the batch, one after the other. Micro-batch m has chunk m of each. There is
    # a run for each rank, or a single one: then a micro-batch has all samples of some ranks.
    num_runs: int = 1


def microbatch(step: StepGraph, num_microbatches: int, num_ranks: int = 1) -> MicroStep:
    """Split `step` into micro-batches whose losses and gradients sum to those of the step.

    Buffers get the updates of rank 0 (`with_first_rank_buffers`).

    Micro-batch m has chunk m of every rank's samples, or all samples of the m-th group of ranks
    (`_num_runs`). There are two exceptions to exactness, as in plain gradient accumulation:
    BatchNorm takes its statistics per micro-batch unless that has all samples of a rank, and
    dropout draws other numbers than in one batch.

    Args:
        num_ranks: ranks of the job. With `batch_scope="rank"` each has its own samples.

    Raises:
        PlanError: the samples cannot be split equally, or an op that the loss depends on combines
            samples of several micro-batches.
    """
    step = with_first_rank_buffers(step)
    if num_microbatches == 1:
        graph = step.bare(step.escaping, step.loss)
        return MicroStep(1, graph, states=dict.fromkeys(step.escaping, WHOLE))

    num_ranks = ranks_with_samples(step, num_ranks)
    num_runs = _num_runs(step, num_microbatches, num_ranks)
    _check_divisible(step, num_microbatches, num_runs)
    states = find_states(step, num_microbatches, num_runs)
    return _Writer(step, num_microbatches, states, num_runs).write()


def ranks_with_samples(step: StepGraph, num_ranks: int) -> int:
    """Return how many ranks have samples of their own in the batch of `step`: `num_ranks`, or 1 if
    the batch is that of all ranks together.
    """
    return num_ranks if step.batch_scope == "rank" else 1


def _num_runs(step: StepGraph, num_microbatches: int, num_ranks: int) -> int:
    """Return the runs of samples of which every micro-batch has a chunk: 1 or `num_ranks`.

    It is 1 if micro-batches can be whole ranks, and an op combines the samples of a rank (it is
    exact only so) or the samples of a rank cannot be divided into equal chunks.
    """
    if num_ranks % num_microbatches != 0:
        return num_ranks
    combines_samples = any(isinstance(op.call.target, PerRank) for op in step.ops)
    ranks_are_divisible = num_split_samples(step) % (num_ranks * num_microbatches) == 0
    if combines_samples or not ranks_are_divisible:
        return 1
    return num_ranks


def num_split_samples(step: StepGraph) -> int:
    """Return the number of samples that micro-batches split, those of all ranks."""
    return math.gcd(*_split_sizes(step))


def num_samples(step: StepGraph) -> int | None:
    """Return the samples of a step's batch, those of all ranks; None if its tensors have different
    numbers of them.
    """
    sizes = _split_sizes(step)
    return sizes.pop() if len(sizes) == 1 else None


def _split_sizes(step: StepGraph) -> set[int]:
    """Return the sizes of dim 0 of the batch's tensors that micro-batches split."""
    sizes = set()
    for leaf in step.batch:
        if leaf.batch_dim == 0 and leaf.is_split:
            sizes.add(leaf.meta.shape[0])
    return sizes


def notes_of_split(step: StepGraph, graph: StepGraph) -> tuple[str, ...]:
    """Return notes on ops that make micro-batches inexact; none if they compute exactly what the
    full batch does.

    Args:
        step: that was split.
        graph: of one micro-batch.
    """
    return graph.notes[len(step.notes) :]


def _check_divisible(step: StepGraph, num_microbatches: int, num_runs: int) -> None:
    """Raise PlanError unless each run of samples splits into `num_microbatches` equal chunks."""
    # Leaves may have multiples of the batch size: each must split into equal chunks.
    num_samples = num_split_samples(step) // num_runs
    if num_microbatches >= 1 and num_samples > 0 and num_samples % num_microbatches == 0:
        return

    divisors = []
    for divisor in range(1, num_samples + 1):
        if num_samples % divisor == 0:
            divisors.append(str(divisor))
    whose = "rows that each rank brings" if num_runs > 1 else "rows of the batch"
    raise PlanError(
        f"num_microbatches={num_microbatches} does not divide the {num_samples} {whose}",
        f"use one of {', '.join(divisors or ['1'])}, or change the batch size",
    )


class _Writer:
    """Writes the graphs of one MicroStep."""

    def __init__(
        self, step: StepGraph, num_microbatches: int, states: States, num_runs: int
    ) -> None:
        self.step = step
        self.num_microbatches = num_microbatches
        self.states = states
        self.num_runs = num_runs

        # Metadata of every value of the micro graph.
        self.values: list[TensorMeta] = list(step.values)
        for leaf in step.batch:
            self.values[leaf.value] = self._local(leaf.value, states.state[leaf.value])

        # Ops of the micro graph.
        self.ops: list[Op] = []

        # How a value is read -> its number in the micro graph.
        self.number: dict[Use, int] = {}

        self.inputs: set[int] = set()
        for group in (step.parameters, step.buffers, step.batch, step.constants):
            self.inputs.update(entry.value for entry in group)

        # Of equal layers, calls and strategies are equal.
        self._local_calls: dict[tuple[OpCall, TimeStrategy], OpCall] = {}

        # Value that only the prologue computes -> its placement in the micro graph.
        self.from_prologue: dict[int, MicrobatchPlacement] = {}
        for index in states.moved:
            self.from_prologue.update((value, WHOLE) for value in step.ops[index].results)

    def write(self) -> MicroStep:
        """Return the step of one micro-batch, with its prologue and epilogue."""
        step = self.step
        epilogue_values = self._results_of(self.states.late)
        epilogue = self._epilogue(epilogue_values)

        # Values that the prologue and the micro graph must compute.
        received_later = epilogue.received if epilogue is not None else ()
        needed = {*step.escaping, *received_later} - epilogue_values

        op_indices, uses = self._find_live_ops(needed)
        given_uses = [use for use in uses if use.form == "given"]
        prologue_values = {use.value for use in given_uses}
        prologue_values |= needed & self.from_prologue.keys()

        computed = self._results_of(op_indices) | self.inputs
        received = self._number_given(given_uses, computed)
        for index in op_indices:
            self._op(index)
        loss = self._number(self._loss_use()) if step.loss >= 0 else -1

        graph = self._micro_graph(received, self._leaving(needed, loss), loss)
        graph = replace(graph, notes=step.notes + self._batch_norm_notes(op_indices))

        states = {number: use.state for use, number in received.items()}
        for value in graph.escaping:
            states[value] = SUM if value == loss else self.states.state[value]

        prologue = None
        if prologue_values:
            prologue_ops = tuple(step.ops[index] for index in step.ancestors(prologue_values))
            prologue = self._part(prologue_ops, sorted(prologue_values), ())
        return MicroStep(
            self.num_microbatches,
            graph,
            prologue,
            {number: use.value for use, number in received.items()},
            states,
            self._sequential_buffers(op_indices),
            epilogue,
            self.num_runs,
        )

    def _results_of(self, op_indices: Collection[int]) -> set[int]:
        """Return the values that these ops of the step compute."""
        return {value for index in op_indices for value in self.step.ops[index].results}

    def _leaving(self, needed: Collection[int], loss: int) -> list[int]:
        """Return the values that leave the micro graph, its loss and the step's among them."""
        leaving = sorted(set(needed) - self.from_prologue.keys() - {self.step.loss})
        leaving += [value for value in dict.fromkeys((loss, self.step.loss)) if value >= 0]
        return [value for value in leaving if value not in self.from_prologue]

    def _batch_norm_notes(self, op_indices: list[int]) -> tuple[str, ...]:
        """Return a note for the user if BatchNorm takes its statistics per micro-batch; else ().

        Args:
            op_indices: the ops that run per micro-batch.
        """
        for index in op_indices:
            target = self.step.ops[index].call.target
            of_rank = target.inner.target if isinstance(target, PerRank) else target
            is_batch_norm = of_rank is batch_norm_train
            state = self.states.chosen[index].strategy.outputs[0]
            has_whole_ranks = isinstance(target, PerRank) and state == rows(0)
            if is_batch_norm and state.kind == "rows" and not has_whole_ranks:
                note = (
                    "BatchNorm takes its statistics per micro-batch"
                    f" (1/{self.num_microbatches} of the batch), as in gradient accumulation"
                )
                return (note,)
        return ()

    # Which ops the micro graph has

    def _find_live_ops(self, needed: Collection[int]) -> tuple[list[int], list[Use]]:
        """Return the op indices of the micro graph, dead ops left out, and every use in it.

        A random number that the prologue needs is drawn there and passed to the micro-batches.
        """
        while True:
            op_indices, uses = self._live(needed)
            prologue_values = {use.value for use in uses if use.form == "given"}
            prologue_values |= set(needed) & self.from_prologue.keys()

            drawn: list[int] = []
            for index in self.step.ancestors(prologue_values):
                if not is_random(self.step.ops[index].call):
                    continue
                results = self.step.ops[index].results
                drawn += [value for value in results if value not in self.from_prologue]
            if not drawn:
                return op_indices, uses
            self.from_prologue |= {value: self.states.state[value] for value in drawn}

    def _live(self, needed: Collection[int]) -> tuple[list[int], list[Use]]:
        """Return the indices of the ops that `needed` and the loss depend on, and their uses."""
        uses: dict[Use, None] = {}
        computed: set[int] = set()
        op_indices: list[int] = []

        def read(use: Use) -> None:
            use = self._resolve(use)
            uses[use] = None
            if use.form == "share" and use.value in self.from_prologue:
                read(Use(use.value))
            elif use.form != "given":
                computed.add(use.value)

        if self.step.loss >= 0:
            read(self._loss_use())
        for value in needed:
            if value not in self.from_prologue:
                read(Use(value))

        for index in sorted(self.states.chosen, reverse=True):
            results = self.step.ops[index].results
            is_live = bool(computed.intersection(results))
            if not is_live or any(value in self.from_prologue for value in results):
                continue
            op_indices.append(index)
            for use in self.states.chosen[index].uses:
                read(use)
        return op_indices[::-1], list(uses)

    def _resolve(self, use: Use) -> Use:
        """Return `use`, as `given` if only the prologue computes the value."""
        if use.form == "own" and use.value in self.from_prologue:
            return Use(use.value, "given", self.from_prologue[use.value])
        return use

    def _loss_use(self) -> Use:
        """Return how the loss is read.

        It is a partial value. A loss that is the same in every micro-batch counts 1/M in each.
        """
        is_partial = self.states.state[self.step.loss].kind == "sum"
        return Use(self.step.loss, "own" if is_partial else "share")

    # Numbers of values in the micro graph

    def _new_value(self, meta: TensorMeta) -> int:
        """Add a value to the micro graph, and return its number."""
        self.values.append(meta)
        return len(self.values) - 1

    def _number_given(self, uses: list[Use], computed: set[int]) -> dict[Use, int]:
        """Return the numbers, in the micro graph, of the values that the prologue passes in.

        A value keeps its number in the step, unless the micro graph computes it as well.

        Args:
            uses: how these values are read.
            computed: values that the micro graph computes.
        """
        taken = set(computed)
        for use in uses:
            meta = self._local(use.value, use.state)
            number = self._new_value(meta) if use.value in taken else use.value
            self.values[number] = meta
            taken.add(number)
            self.number[use] = number
        return {use: self.number[use] for use in uses}

    def _local(self, value: int, state: MicrobatchPlacement) -> TensorMeta:
        """Return the metadata of `value` on one micro-batch, in the placement `state`."""
        meta = self.step.values[value]
        if state.kind != "rows":
            return meta
        shape = list(meta.shape)
        shape[state.dim] //= self.num_microbatches
        return meta.with_shape(tuple(shape))

    def _number(self, use: Use, source: Op | None = None) -> int:
        """Return the number under which the micro graph reads a value.

        At the first use of a share, the op that computes it is added.

        Args:
            source: the op that reads it.
        """
        use = self._resolve(use)
        if use in self.number:
            return self.number[use]
        if use.form == "own":
            return use.value
        full = self._number(Use(use.value))
        share = self._new_value(self.values[full])
        self.number[use] = share
        self._add_share(full, share, source)
        return share

    # Ops of the micro graph

    def _add_share(self, value: int, result: int, source: Op | None) -> None:
        """Add the op result = value / M, for M micro-batches, to the micro graph.

        Args:
            source: the op whose module and line it gets.
        """
        call = OpCall(
            torch.ops.aten.mul.Tensor,
            (Slot(0), 1.0 / self.num_microbatches),
            (),
            (self.values[value],),
            (self.values[result],),
        )
        num_shares = sum(op.name.startswith("share") for op in self.ops)
        op = Op(f"share_{num_shares}", call, (value,), (result,))
        if source is not None:
            op = replace(op, module=source.module, source=source.source)
        self.ops.append(op)

    def _op(self, index: int) -> None:
        """Add op number `index` of the step, on one micro-batch, to the micro graph.

        If its results are means over the micro-batch, 1/M of them are added as well.
        """
        op = self.step.ops[index]
        chosen = self.states.chosen[index]
        operands = tuple(self._number(use, op) for use in chosen.uses)
        key = op.call, chosen.strategy
        if key not in self._local_calls:
            self._local_calls[key] = local_call(*key, self.num_microbatches)
        call = self._local_calls[key]
        for value, meta in zip(op.results, call.results, strict=True):
            self.values[value] = meta

        if not chosen.strategy.mean:
            self.ops.append(replace(op, call=call, operands=operands))
            return

        means = tuple(self._new_value(meta) for meta in call.results)
        self.ops.append(replace(op, call=call, operands=operands, results=means))
        for mean, result in zip(means, op.results, strict=True):
            self._add_share(mean, result, op)

    # Graphs

    def _micro_graph(self, received: dict[Use, int], leaving: list[int], loss: int) -> StepGraph:
        """Return the micro graph of `self.ops`.

        Args:
            received: how a value is read that the prologue passes in -> its number.
            leaving: values that leave the graph for the epilogue or the step's results.
            loss: value of the loss.
        """
        read = {value for op in self.ops for value in op.operands}
        read.update(self.step.escaping)
        computed = {value for op in self.ops for value in op.results} | self.inputs

        buffers = []
        for buffer in self.step.buffers:
            if buffer.update not in computed:
                buffer = replace(buffer, update=None)
            if buffer.value in read or buffer.update is not None:
                buffers.append(buffer)

        batch = [replace(leaf, meta=self.values[leaf.value]) for leaf in self.step.batch]
        graph = replace(
            self.step,
            values=tuple(self.values),
            buffers=tuple(buffers),
            batch=tuple(batch),
            constants=tuple(c for c in self.step.constants if c.value in read),
            ops=tuple(self.ops),
            batch_size=self.step.batch_size // self.num_microbatches,
            received=tuple(received.values()),
        )
        return graph.bare(leaving, loss)

    def _epilogue(self, epilogue_values: set[int]) -> StepGraph | None:
        """Return the graph of the late ops over combined values; None if there are none."""
        leaving = sorted(epilogue_values.intersection(self.step.escaping))
        if not leaving:
            return None
        late = self.states.late.intersection(self.step.ancestors(leaving))
        read = {value for index in late for value in self.step.ops[index].operands}

        # Sample indices are local to a micro-batch, so the epilogue computes global ones.
        indices = {value for value, state in self.states.state.items() if state.kind == "numbers"}
        op_indices = late.union(self.step.ancestors(read & indices))
        ops = tuple(self.step.ops[index] for index in sorted(op_indices))

        received = sorted(read - epilogue_values - indices - self.inputs)
        return self._part(ops, leaving, tuple(received))

    def _part(
        self, ops: tuple[Op, ...], leaving: list[int], received: tuple[int, ...]
    ) -> StepGraph:
        """Return the graph of some of the step's ops, at the step's shapes.

        It has those inputs that the ops read.
        """
        return replace(self.step.part(ops, leaving), received=received, notes=())

    def _sequential_buffers(self, op_indices: list[int]) -> tuple[str, ...]:
        """Return the buffers that a micro-batch's statistics update.

        Other buffers of the same modules (`num_batches_tracked`) are among them.
        """
        statistics: set[int] = set()
        for index in op_indices:
            results = self.step.ops[index].results
            positions = self.states.chosen[index].strategy.sequential
            statistics.update(results[position] for position in positions)
        # An update may be computed from the statistics.
        for op in self.step.ops:
            if statistics.intersection(op.operands):
                statistics.update(op.results)

        updated = [buffer for buffer in self.step.buffers if buffer.update is not None]
        modules = {_module_of(buffer.name) for buffer in updated if buffer.update in statistics}
        return tuple(buffer.name for buffer in updated if _module_of(buffer.name) in modules)


def _module_of(buffer_name: str) -> str:
    return buffer_name.rpartition(".")[0]
