"""microbatch: a step as the same work on M equal micro-batches, exactly. A transform from StepGraph
to StepGraphs.

Micro-batches are one more mesh axis, in time: the sharding rules say how every op splits over it.
states.py finds a state for every value; here the graphs are written down: prologue, micro graph,
epilogue (`MicroStep`).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from alpa_strategy.capture.ops import batch_norm_train
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.microbatch.rules import SUM, WHOLE, MicrobatchPlacement, local_call
from alpa_strategy.microbatch.states import States, Use, find_states
from alpa_strategy.sharding.strategies import is_random


@dataclass(frozen=True)
class MicroStep:
    """A step cut into `num_microbatches` equal micro-batches, exactly.

    Values keep the step's numbers; what has no counterpart in the step (a share of 1/M, a given
    value that the graph also makes itself) is numbered after them. The step's values after all
    micro-batches are the prologue's, the combined ones and the epilogue's together: with them logs,
    metrics, the output and buffer updates are done once, as the whole step's records say. `graph`,
    `prologue` and `epilogue` have no records of their own: `output` of each is a tuple with a
    ValueRef of everything that must leave it.
    """

    num_microbatches: int  # M
    # the step on one micro-batch, at global shapes divided by M along the batch. Its loss is a
    # summand: the sum over the micro-batches is the whole step's. The gradients of its parameters
    # add up over them.
    graph: StepGraph
    # what must be known of the whole batch before any micro-batch runs and depends on no parameter
    # (the number of targets that are not ignored, a random mask): a step over the whole batch whose
    # `escaping` values are handed to `graph` or belong to the step's results, or None
    prologue: StepGraph | None = None
    # value in `graph` (one of `graph.received`) -> value in `prologue` that fills it
    given: dict[int, int] = field(default_factory=dict)
    # of every value of `given` and every escaping one of `graph`, what a micro-batch has of it.
    # Rows are cut and joined (see `cut`), like those of a batch leaf; sums are added up; of what
    # escapes whole the last micro-batch's is taken (all are equal, but for updates of sequential
    # buffers).
    states: dict[int, MicrobatchPlacement] = field(default_factory=dict)
    # buffers that every micro-batch updates and the next one reads (BatchNorm statistics, as in
    # plain gradient accumulation). All other buffers keep their values until the step's end.
    sequential_buffers: tuple[str, ...] = ()
    # logs and outputs that are no sums over micro-batches (`loss.exp()`): a step over combined and
    # prologue values
    epilogue: StepGraph | None = None


def microbatch(step: StepGraph, num_microbatches: int, num_ranks: int = 1) -> MicroStep:
    """Cut `step` into `num_microbatches` micro-batches whose losses and gradients add up to the
    whole step's.

    Micro-batch m is made of the m-th part of every rank's rows. Exceptions to exactness, as in
    plain gradient
    accumulation: BatchNorm takes its statistics per micro-batch, and dropout draws other numbers
    than in one batch.

    Args:
        num_ranks: ranks of the job; with `batch_scope="rank"` each brings rows of its own and must
            be able to cut them.

    Raises:
        PlanError: the rows cannot be cut equally, or something that the loss depends on mixes rows
            of micro-batches.
    """
    if num_microbatches == 1:
        return MicroStep(
            1, step.bare(step.escaping, step.loss), states=dict.fromkeys(step.escaping, WHOLE)
        )
    num_ranks = num_ranks if step.batch_scope == "rank" else 1
    _check_rows(step, num_microbatches, num_ranks)
    return _Writer(step, num_microbatches, find_states(step, num_microbatches, num_ranks)).write()


def _check_rows(step: StepGraph, num_microbatches: int, num_ranks: int) -> None:
    # Leaves may have multiples of the batch's rows: each must fall into equal parts.
    rows = (
        math.gcd(*(leaf.meta.shape[0] for leaf in step.batch if leaf.batch_dim == 0)) // num_ranks
    )
    if num_microbatches < 1 or rows % num_microbatches or rows == 0:
        divisors = [str(d) for d in range(1, rows + 1) if rows % d == 0] or ["1"]
        whose = (
            f"{rows} rows that each rank brings" if num_ranks > 1 else f"{rows} rows of the batch"
        )
        raise PlanError(
            f"num_microbatches={num_microbatches} does not divide the {whose}",
            f"use one of {', '.join(divisors)}, or change the batch size",
        )


class _Writer:
    """Writes the graphs of one MicroStep down."""

    def __init__(self, step: StepGraph, num_microbatches: int, states: States) -> None:
        self.step, self.num_microbatches, self.states = step, num_microbatches, states
        self.values: list[TensorMeta] = list(step.values)
        for leaf in step.batch:
            self.values[leaf.value] = self._local(leaf.value, states.state[leaf.value])
        self.ops: list[Op] = []
        self.number: dict[Use, int] = {}  # how a value is read -> its number in the micro graph
        self.inputs = {
            e.value
            for group in (step.parameters, step.buffers, step.batch, step.constants)
            for e in group
        }
        # value that only the prologue makes -> the state in which the micro graph gets it
        self.from_prologue = {r: WHOLE for index in states.moved for r in step.ops[index].results}

    def write(self) -> MicroStep:
        step = self.step
        late_values = {r for index in self.states.late for r in step.ops[index].results}
        epilogue = self._epilogue(late_values)
        wanted = {
            *step.escaping,
            *(epilogue.received if epilogue is not None else ()),
        } - late_values
        kept, uses = self._keep(wanted)
        prologue_values = {use.value for use in uses if use.form == "given"} | (
            wanted & self.from_prologue.keys()
        )
        made = {result for index in kept for result in step.ops[index].results} | self.inputs
        received = self._number_given([use for use in uses if use.form == "given"], made)
        for index in kept:
            self._op(index)
        loss = self._number(self._loss_use()) if step.loss >= 0 else -1
        leaving = sorted(wanted - self.from_prologue.keys() - {step.loss})
        leaving += [value for value in dict.fromkeys((loss, step.loss)) if value >= 0]
        graph = self._micro_graph(received).bare(
            [v for v in leaving if v not in self.from_prologue], loss
        )
        states = {number: use.state for use, number in received.items()}
        states |= {
            value: SUM if value == loss else self.states.state[value] for value in graph.escaping
        }
        prologue_ops = tuple(step.ops[index] for index in step.ancestors(prologue_values))
        notes = step.notes
        norms = [index for index in kept if step.ops[index].call.target is batch_norm_train]
        if any(self.states.chosen[index].strategy.outputs[0].kind == "rows" for index in norms):
            notes += (
                f"BatchNorm takes its statistics per micro-batch (1/{self.num_microbatches} of the"
                " batch), as in "
                "gradient accumulation",
            )
        return MicroStep(
            self.num_microbatches,
            replace(graph, notes=notes),
            self._part(prologue_ops, sorted(prologue_values), ()) if prologue_values else None,
            {number: use.value for use, number in received.items()},
            states,
            self._sequential_buffers(kept),
            epilogue,
        )

    # What the micro graph needs

    def _keep(self, wanted: Collection[int]) -> tuple[list[int], list[Use]]:
        """Ops of the micro graph that are not dead, and every use in it.

        A random number that the prologue needs is drawn there, and given to the micro-batches.
        """
        while True:
            kept, uses = self._live(wanted)
            given = {use.value for use in uses if use.form == "given"} | (
                set(wanted) & self.from_prologue.keys()
            )
            drawn = [
                result
                for index in self.step.ancestors(given)
                if is_random(self.step.ops[index].call)
                for result in self.step.ops[index].results
                if result not in self.from_prologue
            ]
            if not drawn:
                return kept, uses
            self.from_prologue |= {value: self.states.state[value] for value in drawn}

    def _live(self, wanted: Collection[int]) -> tuple[list[int], list[Use]]:
        uses: dict[Use, None] = {}
        needed: set[int] = set()
        kept: list[int] = []

        def read(use: Use) -> None:
            use = self._resolve(use)
            uses[use] = None
            if use.form == "share" and use.value in self.from_prologue:
                read(Use(use.value))
            elif use.form != "given":
                needed.add(use.value)

        if self.step.loss >= 0:
            read(self._loss_use())
        for value in wanted:
            if value not in self.from_prologue:
                read(Use(value))
        for index in sorted(self.states.chosen, reverse=True):
            results = self.step.ops[index].results
            if not needed.intersection(results) or any(r in self.from_prologue for r in results):
                continue
            kept.append(index)
            for use in self.states.chosen[index].uses:
                read(use)
        return kept[::-1], list(uses)

    def _resolve(self, use: Use) -> Use:
        """Reading a value that only the prologue makes is being given it."""
        if use.form == "own" and use.value in self.from_prologue:
            return Use(use.value, "given", self.from_prologue[use.value])
        return use

    def _loss_use(self) -> Use:
        """The loss is a summand: one that is the same in every micro-batch counts for 1/M in
        each.
        """
        return Use(
            self.step.loss, "own" if self.states.state[self.step.loss].kind == "sum" else "share"
        )

    # Numbers

    def _new_value(self, meta: TensorMeta) -> int:
        self.values.append(meta)
        return len(self.values) - 1

    def _number_given(self, uses: list[Use], made: set[int]) -> dict[Use, int]:
        """Numbers of what the prologue gives: the value's own where the micro graph does not make
        it itself.
        """
        taken = set(made)
        for use in uses:
            meta = self._local(use.value, use.state)
            number = self._new_value(meta) if use.value in taken else use.value
            self.values[number] = meta
            taken.add(number)
            self.number[use] = number
        return {use: self.number[use] for use in uses}

    def _local(self, value: int, state: MicrobatchPlacement) -> TensorMeta:
        meta = self.step.values[value]
        if state.kind != "rows":
            return meta
        shape = list(meta.shape)
        shape[state.dim] //= self.num_microbatches
        return meta.with_shape(tuple(shape))

    def _number(self, use: Use, source: Op | None = None) -> int:
        """The number under which the micro graph reads a value; a share is made on first use."""
        use = self._resolve(use)
        if use in self.number:
            return self.number[use]
        if use.form == "own":
            return use.value
        whole = self._number(Use(use.value))
        self.number[use] = self._new_value(self.values[whole])
        self._share(whole, self.number[use], source)
        return self.number[use]

    # Ops

    def _share(self, value: int, result: int, source: Op | None) -> None:
        """result = value / M."""
        metas = (self.values[value],), (self.values[result],)
        call = OpCall(torch.ops.aten.mul.Tensor, (Slot(0), 1.0 / self.num_microbatches), (), *metas)
        name = f"share_{sum(op.name.startswith('share') for op in self.ops)}"
        where = (source.module, source.source) if source is not None else ("", "")
        self.ops.append(Op(name, call, (value,), (result,), *where))

    def _op(self, index: int) -> None:
        op, chosen = self.step.ops[index], self.states.chosen[index]
        operands = tuple(self._number(use, op) for use in chosen.uses)
        call = local_call(op.call, chosen.strategy, self.num_microbatches)
        for value, meta in zip(op.results, call.results, strict=True):
            self.values[value] = meta
        if not chosen.strategy.mean:
            self.ops.append(replace(op, call=call, operands=operands))
            return
        means = tuple(self._new_value(meta) for meta in call.results)
        self.ops.append(replace(op, call=call, operands=operands, results=means))
        for mean, result in zip(means, op.results, strict=True):
            self._share(mean, result, op)

    # Graphs

    def _micro_graph(self, received: dict[Use, int]) -> StepGraph:
        read = {value for op in self.ops for value in op.operands} | set(self.step.escaping)
        made = {value for op in self.ops for value in op.results} | self.inputs
        buffers = (b if b.update in made else replace(b, update=None) for b in self.step.buffers)
        return replace(
            self.step,
            values=tuple(self.values),
            buffers=tuple(b for b in buffers if b.value in read or b.update is not None),
            batch=tuple(replace(leaf, meta=self.values[leaf.value]) for leaf in self.step.batch),
            constants=tuple(c for c in self.step.constants if c.value in read),
            ops=tuple(self.ops),
            batch_size=self.step.batch_size // self.num_microbatches,
            received=tuple(received.values()),
        )

    def _epilogue(self, late_values: set[int]) -> StepGraph | None:
        """Late ops, over combined values; None when there are none."""
        wanted = sorted(late_values.intersection(self.step.escaping))
        if not wanted:
            return None
        numbers = {value for value, state in self.states.state.items() if state.kind == "numbers"}
        late = self.states.late.intersection(self.step.ancestors(wanted))
        read = {value for index in late for value in self.step.ops[index].operands}
        ops = tuple(
            self.step.ops[index]
            for index in sorted(late.union(self.step.ancestors(read & numbers)))
        )
        return self._part(ops, wanted, tuple(sorted(read - late_values - numbers - self.inputs)))

    def _part(self, ops: tuple[Op, ...], wanted: list[int], received: tuple[int, ...]) -> StepGraph:
        """A graph of some of the step's ops at the step's own shapes, with those inputs only that
        they read.
        """
        return replace(self.step.part(ops, wanted), received=received, notes=())

    def _sequential_buffers(self, kept: list[int]) -> tuple[str, ...]:
        """Buffers updated by statistics of a micro-batch, and what else their modules update
        (`num_batches_tracked`).

        A pass over the whole step: an update may be computed from the statistics.
        """
        statistics = {
            self.step.ops[index].results[position]
            for index in kept
            for position in self.states.chosen[index].strategy.sequential
        }
        for op in self.step.ops:
            if statistics.intersection(op.operands):
                statistics.update(op.results)
        updated = [b for b in self.step.buffers if b.update is not None]
        modules = {b.name.rpartition(".")[0] for b in updated if b.update in statistics}
        return tuple(b.name for b in updated if b.name.rpartition(".")[0] in modules)
