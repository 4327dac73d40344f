"""How every value of a step is placed on micro-batches, and which ops must run once on the full
batch instead.

One walk in op order. An op gets the cheapest strategy that its operands' placements allow. If there
is none, an operand may be scaled by 1/M (a full value as partial values), recomputed per
micro-batch (`zeros(B, h)`), or passed in by the prologue. Otherwise the op moves to the prologue
(if it depends on no parameter) or to the epilogue (if only logs and outputs depend on it), or the
step is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.microbatch import rules
from alpa_strategy.microbatch.rules import (
    ANY,
    WHOLE,
    MicrobatchPlacement,
    TimeStrategy,
    rows,
)
from alpa_strategy.sharding.strategies import is_random

Form = Literal["own", "share", "given"]


@dataclass(frozen=True)
class Use:
    """How an op of the micro graph reads a value."""

    # Index of the value in the step.
    value: int

    # `own`: the value itself. `share`: 1/M of it. `given`: the prologue passes it in.
    form: Form = "own"

    # The placement in which the prologue passes it in.
    state: MicrobatchPlacement = WHOLE


@dataclass(frozen=True)
class Chosen:
    """An op of the micro graph: its strategy and how it reads its operands."""

    strategy: TimeStrategy
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class States:
    """The placements of a step's values, and where its ops run."""

    # Value -> its placement in the micro graph; `WHOLE` for values of moved ops, which the
    # prologue passes in.
    state: dict[int, MicrobatchPlacement]

    # Op index -> how it runs in the micro graph.
    chosen: dict[int, Chosen]

    # Indices of the ops whose results only the prologue computes.
    moved: frozenset[int]

    # Indices of the ops of the epilogue, which runs once after all micro-batches.
    late: frozenset[int]


def find_states(step: StepGraph, num_microbatches: int, num_runs: int) -> States:
    """Return the placements of all values of `step` on `num_microbatches` micro-batches.

    Args:
        num_runs: equal runs of samples in the batch, one after the other. Each is split.

    Raises:
        PlanError: the loss (or an op that it depends on) cannot be computed exactly from
            micro-batches.
    """
    independent: set[int] = set()
    for group in (step.buffers, step.batch, step.constants):
        independent.update(entry.value for entry in group)
    for op in step.ops:
        if independent.issuperset(op.operands):
            independent.update(op.results)
    return PlacementWalk(step, num_microbatches, num_runs, independent).states()


_FIX = "set num_microbatches=1, or write the loss as a sum or mean over the rows of the batch"

# Costs of preparing an operand, in no unit: the strategy with the smallest sum is chosen.

# A multiplication by 1/M.
_SHARE = 1

# Recomputing the operand's op per micro-batch.
_RECOMPUTE = 2

# A partial value from the prologue.
_GIVE = 3

# Samples from the prologue.
_GIVE_ROWS = 4

# All samples from the prologue. Every micro-batch then does the work of the full batch.
_GIVE_ALL_ROWS = 1000


@dataclass(frozen=True)
class _Fit:
    """A strategy, and how its operands are prepared."""

    # Sum of the costs above.
    cost: int

    chosen: Chosen

    # Op index -> the strategy that an earlier op must have.
    forced: dict[int, TimeStrategy]

    # Whether the prologue passes in all samples of an operand.
    needs_all_samples: bool


class PlacementWalk:
    """Chooses a strategy for every op of a step.

    Args:
        step: the step of the full batch.
        num_microbatches: into which the batch is split.
        num_runs: equal runs of samples in the batch, one after the other. Each is split.
        independent: values that a prologue may compute, because they depend on no parameter.
    """

    def __init__(
        self, step: StepGraph, num_microbatches: int, num_runs: int, independent: set[int]
    ) -> None:
        self.step = step
        self.num_microbatches = num_microbatches
        self.independent = independent

        self.num_runs = num_runs

        self.strategies = [rules.time_strategies(op.call, num_microbatches) for op in step.ops]

        # Op index -> the strategy that a later op needs it to have.
        self.forced: dict[int, TimeStrategy] = {}

    @cached_property
    def leads_to_loss(self) -> frozenset[int]:
        """Indices of the ops that the loss depends on."""
        return frozenset(self.step.ancestors({self.step.loss}))

    def states(self) -> States:
        """Return the placements of all values.

        Raises:
            PlanError: the step's loss cannot be computed from micro-batches.
        """
        # Each incomplete walk forces at least one more op, so this ends.
        is_complete = False
        while not is_complete:
            is_complete = self._walk()
        self._check_loss()
        return States(self.state, self.chosen, frozenset(self.moved), frozenset(self.late))

    def _walk(self) -> bool:
        """Visit all ops in order.

        Returns:
            False if an earlier op was forced to another strategy: the walk must then start anew.
        """
        self.chosen: dict[int, Chosen] = {}
        self.moved: set[int] = set()
        self.late: set[int] = set()
        self.state: dict[int, MicrobatchPlacement] = {}
        for entry in (*self.step.parameters, *self.step.constant_inputs):
            self.state[entry.value] = WHOLE
        for leaf in self.step.batch:
            is_split = leaf.batch_dim == 0 and leaf.is_split
            self.state[leaf.value] = rows(0, self.num_runs) if is_split else WHOLE

        for index in range(len(self.step.ops)):
            num_forced = len(self.forced)
            self.visit(index)
            if len(self.forced) > num_forced:
                return False
        return True

    def visit(self, index: int) -> None:
        """Choose the strategy of op number `index`, or move it to the prologue or the epilogue.

        Raises:
            PlanError: it has no exact strategy, and the loss depends on it.
        """
        op = self.step.ops[index]
        if self._made_by(self.late, op):
            self.postpone(index)
            return

        best = self._best_fit(index)
        is_independent = self.independent.issuperset(op.operands)
        runs_once = best is None or self._once_is_enough(index, best)
        if is_independent and runs_once:
            self.move(index)
        elif best is not None:
            self.forced |= best.forced
            self.chosen[index] = best.chosen
            self.state.update(zip(op.results, best.chosen.strategy.outputs, strict=True))
        elif index in self.leads_to_loss:
            raise self._refusal(index)
        else:
            self.postpone(index)

    def _best_fit(self, index: int) -> _Fit | None:
        """Return the cheapest strategy with its operands; None if the op has no exact one."""
        op = self.step.ops[index]
        states = tuple(self.state[value] for value in op.operands)
        best: _Fit | None = None
        for strategy in self._strategies(index, states):
            fit = self._fit(index, states, strategy)
            # Of equals the first: the repeated strategy comes before those that divide.
            if fit is not None and (best is None or fit.cost < best.cost):
                best = fit
            if best is not None and best.cost == 0:
                break
        return best

    def _strategies(
        self, index: int, states: tuple[MicrobatchPlacement, ...]
    ) -> Iterator[TimeStrategy]:
        """Yield the strategies that op number `index` may have.

        Args:
            states: the operands' placements.
        """
        if index in self.forced:
            yield self.forced[index]
            return
        yield from self.strategies[index]
        # Most ops need none of these, which take long to find.
        call = self.step.ops[index].call
        yield from rules.view_strategies(call, states, self.num_microbatches)

    def _once_is_enough(self, index: int, fit: _Fit) -> bool:
        """Whether the prologue computes an op's results once for all micro-batches.

        It does if they are full values that depend on all samples or are random.
        """
        op = self.step.ops[index]
        if any(state != WHOLE for state in fit.chosen.strategy.outputs):
            return False
        return fit.needs_all_samples or self._made_by(self.moved, op) or is_random(op.call)

    def _made_by(self, makers: set[int], op: Op) -> bool:
        """Whether one of the ops with the indices `makers` computes an operand of `op`."""
        return any(self.step.makers.get(value) in makers for value in op.operands)

    def move(self, index: int) -> None:
        """Let the prologue run the op, which gives its full results."""
        self.moved.add(index)
        self.state.update((value, WHOLE) for value in self.step.ops[index].results)

    def postpone(self, index: int) -> None:
        """Let the epilogue run the op."""
        self.late.add(index)

    def _fit(
        self, index: int, states: tuple[MicrobatchPlacement, ...], strategy: TimeStrategy
    ) -> _Fit | None:
        """Return how `strategy` gets its operands; None if it cannot.

        Args:
            states: the operands' placements.
        """
        op = self.step.ops[index]
        segments = []
        for have, want in zip(states, strategy.inputs, strict=True):
            if have.kind == want.kind == "rows" and want.segments == ANY:
                segments.append(have.segments)
        num_segments = max(segments, default=1)

        fixed = rules.specialised(op.call, strategy, num_segments, self.num_microbatches)
        if fixed is None:
            return None

        cost = 0
        uses = []
        needs_all_samples = False
        forced: dict[int, TimeStrategy] = {}
        for position, value in enumerate(op.operands):
            want = fixed.inputs[position]
            operand = self._operand(value, want, is_added=position == fixed.added)
            if operand is None:
                return None
            cost += operand.cost
            uses.append(operand.use)
            forced |= operand.forced
            needs_all_samples |= operand.use.form == "given" and want == WHOLE
        return _Fit(cost, Chosen(fixed, tuple(uses)), forced, needs_all_samples)

    def _operand(self, value: int, want: MicrobatchPlacement, is_added: bool) -> "_Operand | None":
        """Return how a strategy gets an operand as `want`; None if it cannot.

        Args:
            value: index of the operand's value.
            is_added: whether it is added to a sum over micro-batches.
        """
        have = self.state[value]
        dtype = self.step.values[value].dtype
        is_fraction = dtype.is_floating_point or dtype.is_complex
        can_be_scaled = have == WHOLE and is_fraction

        if is_added and can_be_scaled:
            return _Operand(Use(value, "share"))
        if have == want:
            return _Operand(Use(value))
        if want.kind == "sum" and can_be_scaled:
            return _Operand(Use(value, "share"), _SHARE)

        recomputed = self._recompute(value, want)
        if recomputed is not None:
            return _Operand(Use(value), _RECOMPUTE, recomputed)

        if value not in self.independent or not self._can_be_given(value, want):
            return None
        if have.kind == "sum":
            cost = _GIVE
        elif want.kind == "rows":
            cost = _GIVE_ROWS
        else:
            cost = _GIVE_ALL_ROWS
        return _Operand(Use(value, "given", want), cost)

    def _can_be_given(self, value: int, want: MicrobatchPlacement) -> bool:
        """Whether the prologue's `value` can be passed in as `want`."""
        if want.kind != "rows":
            return want == WHOLE
        size = self.step.values[value].shape[want.dim]
        return size % (want.segments * self.num_microbatches) == 0

    def _recompute(self, value: int, want: MicrobatchPlacement) -> dict[int, TimeStrategy] | None:
        """Return strategies with which the ops that make a full `value` make `want` instead: the
        samples of one micro-batch.

        Such ops are `expand` or `zeros`, for example.

        Args:
            value: index of a value.
            want: the placement that a later op needs.

        Returns:
            Op index -> strategy, of the value's op and of those before it; None if there are none,
            if `want` has no samples, or if the value is not computed in full.
        """
        index = self.step.makers.get(value)
        if not want.has_sample_dim or self.state[value] != WHOLE:
            return None
        if index is None or index in self.forced:
            return None
        if want.kind == "numbers" and value in self.step.escaping:
            return None

        op = self.step.ops[index]
        position = op.results.index(value)
        views = rules.view_for_result(op.call, want, self.num_microbatches)
        for strategy in (*self.strategies[index], *views):
            fixed = rules.specialised(op.call, strategy, want.segments, self.num_microbatches)
            if fixed is None or fixed.outputs[position] != want:
                continue
            of_operands = self._recompute_operands(op, fixed)
            if of_operands is not None:
                return {index: fixed} | of_operands
        return None

    def _recompute_operands(self, op: Op, strategy: TimeStrategy) -> dict[int, TimeStrategy] | None:
        """Return strategies of earlier ops that give `op` its operands as `strategy` needs them.

        Returns:
            Op index -> strategy, empty if the operands are as needed; None if one cannot be
            computed so.
        """
        strategies: dict[int, TimeStrategy] = {}
        for operand, want in zip(op.operands, strategy.inputs, strict=True):
            if self.state[operand] == want:
                continue
            of_operand = self._recompute(operand, want)
            if of_operand is None:
                return None
            strategies |= of_operand
        return strategies

    def _check_loss(self) -> None:
        """Raise PlanError if every micro-batch would compute the same loss from all samples."""
        # A stage may have no loss.
        if self.step.loss < 0:
            return
        batched = {leaf.value for leaf in self.step.batch if leaf.batch_dim == 0}
        depends_on_samples = any(
            not batched.isdisjoint(self.step.ops[index].operands) for index in self.leads_to_loss
        )
        if self.state[self.step.loss] == WHOLE and depends_on_samples:
            raise PlanError(
                f"the step cannot be split into {self.num_microbatches} micro-batches: "
                "its loss is no sum over rows of the batch",
                _FIX,
            )

    def _refusal(self, index: int) -> PlanError:
        """Return the error for an op that has no exact strategy."""
        op = self.step.ops[index]
        if any(self.state[value].kind == "sum" for value in op.operands):
            why = "uses a sum or mean over the whole batch in a way that is not linear in it"
        else:
            why = "combines different rows of the batch with one another"
        location = ", ".join(part for part in (op.source, op.module) if part)
        return PlanError(
            f"the step cannot be split into {self.num_microbatches} micro-batches exactly: "
            f"{op.call.target_name} ({location or op.name}) {why}, and the loss depends on it",
            _FIX,
        )


@dataclass(frozen=True)
class _Operand:
    """How a strategy gets one operand."""

    use: Use

    # One of the costs above, or 0.
    cost: int = 0

    # Op index -> the strategy that an earlier op must have.
    forced: dict[int, TimeStrategy] = field(default_factory=dict)
