"""Which state every value of a step has on micro-batches, and which ops must run once on the whole
batch instead.

One walk in op order. An op takes the strategy that fits its operands' states; where none does, an
operand may be shared out (`R` as summands of 1/M), made again as rows (`zeros(B, h)`), or handed in
by the prologue; else the op is moved to the prologue (it depends on no parameter), to the epilogue
(only logs and outputs depend on it), or the step is refused.

At the end (`rows_of_ranks`): which part of a step's results belongs to one rank's rows, as user
code wants them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch.utils import _pytree as pytree

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import Op, StepGraph, ValueRef
from alpa_strategy.ir.op import OpCall, aten_name, bind, dims_of
from alpa_strategy.microbatch import rules
from alpa_strategy.microbatch.rules import (
    ANY,
    SPLITS,
    WHOLE,
    MicrobatchPlacement,
    TimeStrategy,
    rows,
)
from alpa_strategy.sharding.rule_families import RESHAPES
from alpa_strategy.sharding.strategies import is_random

Form = Literal["own", "share", "given"]


@dataclass(frozen=True)
class Use:
    """How an op reads a value: `own`: as it is; `share`: 1/M of it; `given`: by the prologue, in
    `state`.
    """

    value: int
    form: Form = "own"
    state: MicrobatchPlacement = WHOLE


@dataclass(frozen=True)
class Chosen:
    """An op of the micro graph: its strategy and how it reads its operands."""

    strategy: TimeStrategy
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class States:
    """The finding."""

    # value -> its state in the micro graph (whole for values of moved ops, which the prologue
    # gives)
    state: dict[int, MicrobatchPlacement]
    chosen: dict[int, Chosen]  # op index -> how it runs in the micro graph
    moved: frozenset[int]  # ops whose results only the prologue makes
    late: frozenset[int]  # ops that run once on the combined values, after all micro-batches


def find_states(step: StepGraph, num_microbatches: int, num_ranks: int) -> States:
    """States of all values of `step` on `num_microbatches` micro-batches of rows that `num_ranks`
    ranks bring.

    Raises:
        PlanError: the loss (or what it depends on) cannot be computed micro-batch by micro-batch
            exactly.
    """
    independent = {
        entry.value for group in (step.buffers, step.batch, step.constants) for entry in group
    }
    for op in step.ops:
        if independent.issuperset(op.operands):
            independent.update(op.results)
    return _Walk(step, num_microbatches, num_ranks, independent).states()


_FIX = "set num_microbatches=1, or write the loss as a sum or mean over the rows of the batch"

# How unwanted it is that an operand needs a multiplication, an op made anew, a number from the
# prologue, rows from it, and (only where nothing else is left: every micro-batch then does the work
# of all) all rows of the batch.
_SHARE, _REMAKE, _GIVE, _GIVE_ROWS, _GIVE_ALL_ROWS = 1, 2, 3, 4, 1000


@dataclass(frozen=True)
class _Fit:
    """A strategy with what it takes to give it its operands."""

    cost: int
    chosen: Chosen
    forced: dict[int, TimeStrategy]
    wants_whole: bool


class _Walk:
    """independent: values that a prologue may give, as they depend on no parameter."""

    def __init__(
        self, step: StepGraph, num_microbatches: int, num_ranks: int, independent: set[int]
    ) -> None:
        self.step, self.num_microbatches, self.independent = step, num_microbatches, independent
        self.num_parts = (
            num_microbatches * num_ranks
        )  # every run of rows must fall into so many equal parts
        self.strategies = [rules.time_strategies(op.call, self.num_parts) for op in step.ops]
        self.forced: dict[int, TimeStrategy] = {}  # op index -> what a later op needs it to be

    @cached_property
    def leads_to_loss(self) -> frozenset[int]:
        """Indices of the ops that the loss depends on."""
        return frozenset(self.step.ancestors({self.step.loss}))

    def states(self) -> States:
        """The finding. PlanError as of `find_states`."""
        while not self._walk():  # every round forces at least one op more
            pass
        self._check_loss()
        return States(self.state, self.chosen, frozenset(self.moved), frozenset(self.late))

    def _walk(self) -> bool:
        """Walk all ops; False when an earlier op was forced to another strategy: then the walk must
        be taken again.
        """
        self.chosen: dict[int, Chosen] = {}
        self.moved: set[int] = set()
        self.late: set[int] = set()
        self.state = {
            given.value: WHOLE for given in (*self.step.parameters, *self.step.constant_inputs)
        }
        self.state |= {
            leaf.value: rows(0) if leaf.batch_dim == 0 else WHOLE for leaf in self.step.batch
        }
        for index in range(len(self.step.ops)):
            num_forced = len(self.forced)
            self._op(index)
            if len(self.forced) > num_forced:
                return False
        return True

    def _op(self, index: int) -> None:
        op = self.step.ops[index]
        if self._made_by(self.late, op):
            self._postpone(index)
            return
        independent = self.independent.issuperset(op.operands)
        states = tuple(self.state[value] for value in op.operands)
        if index in self.forced:
            strategies: tuple[TimeStrategy, ...] = (self.forced[index],)
        else:
            strategies = (
                *self.strategies[index],
                *rules.view_strategies(op.call, states, self.num_parts),
            )
        fits = []
        for strategy in strategies:
            fit = self._fit(index, states, strategy)
            if fit is not None:
                fits.append(fit)
        # Of equals the first: the repeated strategy stands before those that divide.
        best = min(fits, key=lambda fit: fit.cost, default=None)
        if independent and (best is None or self._once_is_enough(index, best)):
            self._move(index)
        elif best is not None:
            self.forced |= best.forced
            self.chosen[index] = best.chosen
            self.state.update(zip(op.results, best.chosen.strategy.outputs, strict=True))
        elif index in self.leads_to_loss:
            raise self._refusal(index)
        else:
            self._postpone(index)

    def _once_is_enough(self, index: int, fit: _Fit) -> bool:
        """What is whole and depends on all rows, or is random, is made once for all
        micro-batches.
        """
        op = self.step.ops[index]
        if any(state != WHOLE for state in fit.chosen.strategy.outputs):
            return False
        return fit.wants_whole or self._made_by(self.moved, op) or is_random(op.call)

    def _made_by(self, makers: set[int], op: Op) -> bool:
        """Whether one of these ops (by index) makes an operand of `op`."""
        return any(self.step.makers.get(value) in makers for value in op.operands)

    def _move(self, index: int) -> None:
        self.moved.add(index)
        self.state.update((value, WHOLE) for value in self.step.ops[index].results)

    def _postpone(self, index: int) -> None:
        self.late.add(index)

    def _fit(
        self, index: int, states: tuple[MicrobatchPlacement, ...], strategy: TimeStrategy
    ) -> _Fit | None:
        """What it takes to give `strategy` its operands; None when they cannot be had."""
        op = self.step.ops[index]
        segments = [
            have.segments
            for have, want in zip(states, strategy.inputs, strict=True)
            if have.kind == want.kind == "rows" and want.segments == ANY
        ]
        fixed = rules.specialised(op.call, strategy, max(segments, default=1), self.num_parts)
        if fixed is None:
            return None
        cost, uses, wants_whole = 0, [], False
        forced: dict[int, TimeStrategy] = {}
        for position, (value, have, want) in enumerate(
            zip(op.operands, states, fixed.inputs, strict=True)
        ):
            dtype = self.step.values[value].dtype
            is_number = dtype.is_floating_point or dtype.is_complex
            divisible = have == WHOLE and is_number
            if position == fixed.added and divisible:
                uses.append(Use(value, "share"))
            elif have == want:
                uses.append(Use(value))
            elif want.kind == "sum" and divisible:
                uses.append(Use(value, "share"))
                cost += _SHARE
            elif (more := self._remake(value, want)) is not None:
                forced |= more
                uses.append(Use(value))
                cost += _REMAKE
            elif value in self.independent and self._can_be_given(value, want):
                uses.append(Use(value, "given", want))
                cost += (
                    _GIVE
                    if have.kind == "sum"
                    else _GIVE_ROWS
                    if want.kind == "rows"
                    else _GIVE_ALL_ROWS
                )
                wants_whole |= want == WHOLE
            else:
                return None
        return _Fit(cost, Chosen(fixed, tuple(uses)), forced, wants_whole)

    def _can_be_given(self, value: int, want: MicrobatchPlacement) -> bool:
        if want.kind != "rows":
            return want == WHOLE
        return self.step.values[value].shape[want.dim] % (want.segments * self.num_parts) == 0

    def _remake(self, value: int, want: MicrobatchPlacement) -> dict[int, TimeStrategy] | None:
        """Strategies of earlier ops under which a whole `value` is made in rows (`expand`,
        `zeros`); None: no way.
        """
        index = self.step.makers.get(value)
        if (
            want.kind not in ("rows", "numbers")
            or self.state[value] != WHOLE
            or index is None
            or index in self.forced
        ):
            return None
        if want.kind == "numbers" and value in self.step.escaping:
            return None
        op = self.step.ops[index]
        position = op.results.index(value)
        for strategy in self.strategies[index]:
            fixed = rules.specialised(op.call, strategy, want.segments, self.num_parts)
            if fixed is None or fixed.outputs[position] != want:
                continue
            found = {index: fixed}
            for operand, asked in zip(op.operands, fixed.inputs, strict=True):
                if self.state[operand] == asked:
                    continue
                more = self._remake(operand, asked)
                if more is None:
                    break
                found |= more
            else:
                return found
        return None

    def _check_loss(self) -> None:
        """PlanError when every micro-batch would compute the same loss from all rows."""
        if self.step.loss < 0:  # a part that does not make it
            return
        rows_read = {leaf.value for leaf in self.step.batch if leaf.batch_dim == 0}
        reads_rows = any(
            not rows_read.isdisjoint(self.step.ops[i].operands) for i in self.leads_to_loss
        )
        if self.state[self.step.loss] == WHOLE and reads_rows:
            raise PlanError(
                f"the step cannot be cut into {self.num_microbatches} micro-batches: "
                "its loss is no sum over rows of the batch",
                _FIX,
            )

    def _refusal(self, index: int) -> PlanError:
        op = self.step.ops[index]
        if any(self.state[value].kind == "sum" for value in op.operands):
            why = "uses a sum or mean over the whole batch in a way that is not linear in it"
        else:
            why = "combines different rows of the batch with one another"
        where = ", ".join(part for part in (op.source, op.module) if part)
        return PlanError(
            f"the step cannot be cut into {self.num_microbatches} micro-batches exactly: "
            f"{op.call.target_name} ({where or op.name}) {why}, and the loss depends on it",
            _FIX,
        )


def sums_over_rows(step: StepGraph, num_ranks: int) -> bool:
    """Whether the loss, or a summand of it, is known to be a sum over the rows of all ranks, not a
    mean: nothing on its
    way is divided by what is made of the batch, or by a number that may be that of all rows (or one
    less)."""
    try:
        states = find_states(step, num_ranks, 1)
    except PlanError:  # rows meet one another
        return False
    sums, scaled = (
        set[int](),
        {value for index in states.moved for value in step.ops[index].results},
    )
    for index, chosen in sorted(states.chosen.items()):
        op, follows = step.ops[index], not scaled.isdisjoint(step.ops[index].operands)
        given = any(use.form == "given" and use.state == WHOLE for use in chosen.uses)
        numbers = [max(abs(x), 1 / abs(x)) for x in op.call.args if type(x) in (int, float) and x]
        counts = any(
            round(n) % step.batch_size in (0, step.batch_size - 1)
            for n in numbers
            if 1 < n < math.inf
        )
        scales = op.call.target_name in ("aten.mul.Tensor", "aten.div.Tensor") and (
            given or counts or follows
        )
        adds_rows = (
            chosen.strategy.outputs[0].kind == "sum" and not chosen.strategy.mean and not follows
        )
        adds_rows &= any(states.state[value].kind == "rows" for value in op.operands)
        if not scales and (adds_rows or not sums.isdisjoint(op.operands)):
            sums.update(op.results)
        elif scales or follows:
            scaled.update(op.results)
    return step.loss in sums


_BY_PLACE = {"select", "slice", "narrow", "unbind", "select_scatter", "slice_scatter", *SPLITS}
_BY_PLACE |= {"tensor_split", "diff", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}
_BY_INDEX = (
    "index",
    "index_select",
    "gather",
)  # with numbers of no batch: `x[[0, 3]]`, `x[self.anchors]`


def where_rows_meet(
    step: StepGraph, num_ranks: int, by_place: bool, own_step: Callable[[], StepGraph]
) -> str | None:
    """The user's line on which the loss depends on rows of several ranks' being one batch; None:
    there is none.

    by_place: only where rows are taken by their places (`x[0]`, `x[:5]`, `x.squeeze(0)` of a batch
    of one), as each rank's own batch has others there. Equal pieces of all rows, smaller than a
    rank's, are a loop over these.
    own_step: of this rank's rows alone. Groups of rows that are others there are by place, too
    (`x.view(5, -1, n)`).
    """
    found = _RankWalk(step.bare(()), num_ranks, 1, set()).states()
    lines, given = (
        [op.source or op.name for op in step.ops],
        {x.value for x in step.constant_inputs},
    )
    # (value, its rows' dim, a rank's rows) -> what takes some of them
    taken: dict[tuple[int, int, int], dict[OpCall, int]] = {}
    alike: dict[
        int, tuple[int, ...]
    ] = {}  # op -> the shape that its result has in the step of a rank
    for index in step.ancestors({step.loss}):
        op, name = step.ops[index], aten_name(step.ops[index].call.target)
        result, state = op.call.results[0].shape, found.state[op.results[0]]
        for value, meta in zip(op.operands, op.call.operands, strict=True):
            have = found.state[value]
            of_rank = (
                meta.shape[have.dim] // (have.segments * num_ranks) if have.kind == "rows" else 0
            )
            is_listed = name in _BY_INDEX and not given.isdisjoint(op.operands)
            if of_rank and index in found.moved and (is_listed or name in RESHAPES or not by_place):
                return lines[index]
            is_reshaped = of_rank and name in RESHAPES and state.kind == "rows"
            if is_reshaped and (
                result[state.dim] % step.batch_size or (of_rank == 1 and name == "squeeze")
            ):
                alike[index] = (
                    *result[: state.dim],
                    result[state.dim] // num_ranks,
                    *result[state.dim + 1 :],
                )
            is_along = name in _BY_PLACE and value == op.operands[0]
            is_along = is_along and have.dim in dims_of(bind(op.call).get("dim"), len(meta.shape))
            if of_rank and is_along and index in found.moved:
                taken.setdefault((value, have.dim, of_rank), {}).setdefault(op.call, index)
    for (value, dim, of_rank), calls in taken.items():
        shape, first = step.values[value].shape, next(iter(calls.values()))
        parts = [meta.shape for call in calls for meta in call.results]
        sizes = [part[dim] if len(part) == len(shape) else 1 for part in parts]
        is_loop = sizes[0] < of_rank and of_rank % sizes[0] == 0 and set(sizes) == {sizes[0]}
        if not is_loop or sum(sizes) != shape[dim]:
            return lines[first]
        if len(parts[0]) == len(shape):  # a single row looks the same in both steps
            alike[first] = parts[0]
    others = own_step().ops if alike else ()
    for index, shape in sorted(alike.items()):
        if index < len(others) and others[index].call.results[0].shape != shape:
            return lines[index]
    return None


def rows_of_ranks(step: StepGraph, num_ranks: int) -> dict[int, MicrobatchPlacement]:
    """Where values that the step returns or appends to lists have rows: value -> how the ranks'
    parts are cut from it.

    All others are the same for everybody: losses, statistics of the batch, results in which rows of
    several ranks meet.
    """
    shown = {
        leaf.index
        for leaf in pytree.tree_leaves((step.output, [record.items for record in step.appended]))
        if isinstance(leaf, ValueRef) and step.values[leaf.index].shape
    }
    if not shown or num_ranks == 1 or step.batch_scope == "global":
        return {}
    states = _RankWalk(step.bare(()), num_ranks, 1, set()).states().state
    return {
        value: state for value, state in states.items() if value in shown and state.kind == "rows"
    }


class _RankWalk(_Walk):
    """Sums, and what rows of several ranks make, are whole: everybody has them when the step has
    run.
    """

    def _postpone(self, index: int) -> None:
        self._move(index)

    def _op(self, index: int) -> None:
        super()._op(index)
        self.state.update(
            (v, WHOLE) for v in self.step.ops[index].results if self.state[v].kind == "sum"
        )
