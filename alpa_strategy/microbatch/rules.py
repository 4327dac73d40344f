"""What a micro-batch has of a value (`MicrobatchPlacement`), and how one op splits over
micro-batches: the sharding rules on one more axis, in time instead of over devices.

On that axis nothing is ever resharded, and `R` and `R*` are one state: gradients add up over the
micro-batches anyway, so whatever is whole has a gradient that is a summand. Nothing here knows of a
graph.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate

from alpa_strategy.capture import ops
from alpa_strategy.ir.op import AxisStrategy, OpCall, Slot, aten_name, bind, slots
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, DualPlacement, shard
from alpa_strategy.sharding.rule_families import RESHAPES, broadcast_dim
from alpa_strategy.sharding.rule_table import added_operand, depends_on_rules, rule_of
from alpa_strategy.sharding.strategies import axis_strategies, localize

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten._to_copy.default)
_LINEAR_IN = {aten.mul.Tensor: (0, 1), aten.div.Tensor: (0,)}
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


ANY = 0


@dataclass(frozen=True)
class MicrobatchPlacement:
    """What a micro-batch has of a value.

    `whole`: all of it, the same in all micro-batches. `sum`: a summand. `rows`: its part of dim
    `dim`, which holds
    `segments` runs of rows one after the other (`torch.cat([a, b])`: 2; [T, B] flattened: T), each
    cut into M parts.
    `numbers`: row numbers (`arange(B)`) along `dim`, counted from the micro-batch's own first row.
    """

    kind: Literal["whole", "sum", "rows", "numbers"]
    dim: int = -1
    segments: int = 1

    @property
    def placement(self) -> DualPlacement:
        """As the sharding rules see it; only shapes may be concluded from it."""
        return {"whole": INVARIANT, "sum": PARTIAL}.get(self.kind) or shard(self.dim)


WHOLE, SUM = MicrobatchPlacement("whole"), MicrobatchPlacement("sum")


def rows(dim: int, segments: int = 1) -> MicrobatchPlacement:
    """The state of a value with rows along `dim`."""
    return MicrobatchPlacement("rows", dim, segments)


def cut(
    tensor: Tensor, how: MicrobatchPlacement, num_microbatches: int, index: int, num_ranks: int = 1
) -> Tensor:
    """What micro-batch `index` has of a whole tensor with rows: the `index`-th part of every
    rank's, in rank order.

    A rank that cuts what it holds itself has `num_ranks=1`.
    """
    runs = how.segments * num_ranks  # rows of one rank in one segment lie together
    parts = tensor.unflatten(how.dim, (runs, num_microbatches, -1))
    return parts.select(how.dim + 1, index).flatten(how.dim, how.dim + 1)


def joined(parts: Sequence[Tensor], how: MicrobatchPlacement, num_ranks: int = 1) -> Tensor:
    """Inverse of `cut`: the micro-batches' parts as the whole tensor, rows in the ranks' order."""
    runs = how.segments * num_ranks
    stacked = torch.stack([part.unflatten(how.dim, (runs, -1)) for part in parts], how.dim + 1)
    return stacked.flatten(how.dim, how.dim + 2)


@dataclass(frozen=True)
class TimeStrategy:
    """One way to run an op on micro-batches."""

    # inputs, outputs: state per operand and result. Rows in `ANY` number of segments: the same
    # number in all of them.
    inputs: tuple[MicrobatchPlacement, ...]
    outputs: tuple[MicrobatchPlacement, ...]
    # the results are means over the micro-batch's part: they count for 1/M of the whole's
    mean: bool = False
    added: int | None = (
        None  # the operand that is added to a sum over micro-batches, so that each adds 1/M of it
    )
    adds_number: bool = (
        False  # the second argument is a number that is added to a sum over micro-batches: likewise
    )
    sequential: tuple[
        int, ...
    ] = ()  # results that are running statistics, carried from one micro-batch to the next


@depends_on_rules
@lru_cache(maxsize=16384)
def time_strategies(call: OpCall, num_parts: int) -> tuple[TimeStrategy, ...]:
    """Every exact way to run `call` when rows are cut into `num_parts`, the repeated one
    (everything whole) first.
    """
    if (
        call.target is ops.batch_norm_train
    ):  # the one op whose result depends on the cut, and it is said in a note
        return tuple(_batch_norm(call))
    found = (*_from_rules(call, num_parts), *_time_only(call))
    return tuple(dict.fromkeys((*found, *_row_numbers(call, found))))


def view_strategies(
    call: OpCall, states: tuple[MicrobatchPlacement, ...], num_parts: int
) -> tuple[TimeStrategy, ...]:
    """Ways to run a view, `cat`, `split` or slice on operands in given states, which only such ops
    have.
    """
    if any(state.kind == "sum" for state in states) or not any(
        state.kind == "rows" for state in states
    ):
        return ()
    found = _row_views(call, states, num_parts)
    return () if found is None else (TimeStrategy(states, found),)


def specialised(
    call: OpCall, strategy: TimeStrategy, segments: int, num_parts: int
) -> TimeStrategy | None:
    """The strategy for rows in that many segments; None when a dim cannot be cut so."""

    def fix(state: MicrobatchPlacement) -> MicrobatchPlacement:
        return replace(state, segments=segments) if state.segments == ANY else state

    fixed = replace(
        strategy, inputs=tuple(map(fix, strategy.inputs)), outputs=tuple(map(fix, strategy.outputs))
    )
    pairs = zip((*fixed.inputs, *fixed.outputs), (*call.operands, *call.results), strict=True)
    for state, meta in pairs:
        if state.kind in ("rows", "numbers") and meta.shape[state.dim] % (
            state.segments * num_parts
        ):
            return None
    return fixed


def _from_rules(call: OpCall, num_parts: int) -> Iterator[TimeStrategy]:
    """The sharding rules. All treat rows alike, wherever they lie; not so views that merge dims,
    nor Functions.
    """
    needs_one_segment = rule_of(call.target) is None or regroups_dims(call)
    segments = 1 if needs_one_segment else ANY

    def state(dual: DualPlacement) -> MicrobatchPlacement:
        if dual.shard_dim is not None:
            return rows(dual.shard_dim, segments)
        return SUM if dual == PARTIAL else WHOLE

    for strategy in axis_strategies(call, num_parts):
        # The others run collectives inside, and micro-batches have nobody to talk to.
        if strategy.implementation not in (
            None,
            "fraction",
            "bias_on_first",
        ) or _needs_whole_gradient(call, strategy):
            continue
        added = added_operand(call) if strategy.implementation == "bias_on_first" else None
        inputs, outputs = (tuple(map(state, side)) for side in (strategy.inputs, strategy.outputs))
        yield TimeStrategy(inputs, outputs, strategy.implementation == "fraction", added)


def _needs_whole_gradient(call: OpCall, strategy: AxisStrategy) -> bool:
    """A whole result of divided operands whose gradient must be complete in every micro-batch: here
    it is a summand.
    """
    divided = any(
        meta.requires_grad and not isinstance(dual.value, Replicate)
        for meta, dual in zip(call.operands, strategy.inputs, strict=True)
    )
    whole = any(
        meta.requires_grad and dual == INVARIANT
        for meta, dual in zip(call.results, strategy.outputs, strict=True)
    )
    return divided and whole


def _batch_norm(call: OpCall) -> Iterator[TimeStrategy]:
    """Statistics are those of a micro-batch, as in plain gradient accumulation: the one documented
    exception.
    """
    yield TimeStrategy((WHOLE,) * len(call.operands), (WHOLE,) * len(call.results))
    x = bind(call)["x"].index
    statistics = tuple(range(1, len(call.results)))
    inputs = [WHOLE] * len(call.operands)
    inputs[x] = rows(0, ANY)
    outputs = (rows(0, ANY), *(WHOLE for _ in statistics))
    yield TimeStrategy(tuple(inputs), outputs, sequential=statistics)


def _time_only(call: OpCall) -> Iterator[TimeStrategy]:
    """What a device mesh does not offer because it would not pay, or would round: here it costs
    nothing more.
    """
    whole = (WHOLE,) * len(call.operands)
    if call.target in _CASTS and call.results[0].dtype.is_floating_point:
        yield TimeStrategy((SUM,), (SUM,))
    for position in _LINEAR_IN.get(call.target, ()):
        factor = call.args[position]
        if isinstance(factor, Slot):
            yield TimeStrategy(
                tuple(SUM if i == factor.index else WHOLE for i in range(len(whole))), (SUM,)
            )
    adds_number = aten_name(call.target) in ("add", "sub", "rsub") and len(call.operands) == 1
    if adds_number and isinstance(call.args[0], Slot) and call.results[0].dtype.is_floating_point:
        yield TimeStrategy((SUM,), (SUM,), adds_number=True)
    # The result's size is an argument and no rule says which dims may be drawn by themselves: in
    # time all may.
    if aten_name(call.target) == "randint":
        for dim in range(len(call.results[0].shape)):
            yield TimeStrategy(whole, (rows(dim, ANY),))
    if call.target is aten.repeat.default:  # of a single element (or slice) every part is the same
        source, target = call.operands[slots(call)[0].index].shape, call.results[0].shape
        offset = len(target) - len(source)
        for dim in (d for d in range(len(target)) if d < offset or source[d - offset] == 1):
            yield TimeStrategy(whole, (rows(dim, ANY),))


def _row_numbers(call: OpCall, found: tuple[TimeStrategy, ...]) -> Iterator[TimeStrategy]:
    """`x[arange(B), i]`: every row of x is read by itself, so a micro-batch may count its rows from
    0.
    """
    if call.target in _ARANGES:
        bound = bind(call)
        if (bound.get("start", 0), bound.get("step", 1), bound["end"]) == (
            0,
            1,
            call.results[0].shape[0],
        ):
            yield TimeStrategy((), (MicrobatchPlacement("numbers", 0),))
    elif regroups_dims(call) or call.target in (*_CASTS, aten.expand.default):
        for strategy in found:
            before, after = strategy.inputs[0], strategy.outputs[0]
            integers = not call.results[0].dtype.is_floating_point and len(call.operands) == 1
            are_rows = integers and before.kind == after.kind == "rows"
            if are_rows and call.operands[0].shape[before.dim] == call.results[0].shape[after.dim]:
                yield TimeStrategy(
                    (MicrobatchPlacement("numbers", before.dim),),
                    (MicrobatchPlacement("numbers", after.dim),),
                )
    elif call.target is aten.index.Tensor:
        yield from _read_by_number(call)


def _read_by_number(call: OpCall) -> Iterator[TimeStrategy]:
    """x[n, i, j] where n numbers the rows of x: the index tensors broadcast, along one dim of them
    lie the rows.
    """
    source, indices = call.args[0], call.args[1]
    positions = [d for d, index in enumerate(indices) if isinstance(index, Slot)]
    if not positions or positions[0] != 0 or positions != list(range(len(positions))):
        return
    tensors = [indices[d].index for d in positions]
    index_rank = max(len(call.operands[i].shape) for i in tensors)
    for dim in range(index_rank):
        states = {source.index: rows(0)}  # x [rows, ...]
        for i in tensors:
            own = broadcast_dim(call, i, dim, index_rank)
            states[i] = WHOLE if own is None else rows(own)
        numbers = states[tensors[0]]
        if numbers.kind == "rows" and (
            call.operands[tensors[0]].shape[numbers.dim] == call.operands[source.index].shape[0]
        ):
            states[tensors[0]] = MicrobatchPlacement("numbers", numbers.dim)
            yield TimeStrategy(tuple(states[i] for i in range(len(call.operands))), (rows(dim),))


def local_call(call: OpCall, strategy: TimeStrategy, num_microbatches: int) -> OpCall:
    """The call on one micro-batch: shapes divided, arguments that hold sizes rewritten."""
    placements = AxisStrategy(
        tuple(state.placement for state in strategy.inputs),
        tuple(state.placement for state in strategy.outputs),
    )
    local = localize(call, (placements,), (num_microbatches,), (0,)).call
    if not strategy.adds_number:
        return local
    first, number, *others = local.args
    return replace(local, args=(first, number / num_microbatches, *others))


# --- Where rows go in views, `cat`, `split` and slices when a dim holds several runs of rows, one
# after the other.
#
# A dim with `segments` k is [k, n]: k runs of n rows (or rows times something), each of which is
# cut into equal parts. `torch.cat([a, b])` has k = 2, [T, B] flattened has k = T. Micro-batches
# have this layout, meshes do not.


SPLITS = ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")


def regroups_dims(call: OpCall) -> bool:
    """Whether the op may merge or split dims, so that rows in several runs do not stay where single
    runs do.
    """
    return aten_name(call.target) in RESHAPES


def _row_views(
    call: OpCall, states: tuple[MicrobatchPlacement, ...], num_parts: int
) -> tuple[MicrobatchPlacement, ...] | None:
    """Where the results have their rows when the operands are in `states`; None: not as rows."""
    name, first = aten_name(call.target), states[0]
    if name in ("cat", "concat"):
        return _joined(call, states)
    if first.kind != "rows":
        return None
    if name in RESHAPES and len(states) == 1 and call.target._overloadname != "dtype":
        return _viewed(call.operands[0].shape, call.results[0].shape, first, num_parts)
    if name not in (*SPLITS, "slice", "narrow") or _dim(call) != first.dim:
        return None
    run = call.operands[0].shape[first.dim] // first.segments
    if name in ("slice", "narrow") and ((start := _start(call)) is None or start % run):
        return None
    sizes = [result.shape[first.dim] for result in call.results]
    if any(size % run or size == 0 for size in sizes):  # whole runs only
        return None
    return tuple(rows(first.dim, size // run) for size in sizes)


def _dim(call: OpCall) -> int:
    return bind(call)["dim"] % len(call.operands[slots(call)[0].index].shape)


def _start(call: OpCall) -> int | None:
    """First index of a slice along its dim; None when it is not a plain run."""
    bound = bind(call)
    if bound.get("step", 1) != 1 or isinstance(bound["start"], Slot):
        return None
    size = call.operands[0].shape[_dim(call)]
    start = bound["start"] or 0
    return min(max(start + size if start < 0 else start, 0), size)


def _viewed(
    source: tuple[int, ...], target: tuple[int, ...], state: MicrobatchPlacement, num_parts: int
) -> tuple[MicrobatchPlacement, ...] | None:
    """[before, n, after] in both shapes: n are the rows, `before` is what dims and segments in
    front of them hold.
    """
    before = math.prod(source[: state.dim]) * state.segments  # runs of rows, in order
    front = 1  # elements of the target's dims that were passed
    for j, size in enumerate(target):
        if before % front == 0 and size % (before // front) == 0 and size > 1:
            runs = before // front  # that dim j holds: the dims before it hold the others
            rows_and_after = size // runs
            if rows_and_after % num_parts == 0 and rows_and_after > 0:
                return (rows(j, runs),)
        front *= size
        if front > before:
            return None
    return None


def _joined(
    call: OpCall, states: tuple[MicrobatchPlacement, ...]
) -> tuple[MicrobatchPlacement, ...] | None:
    dim = bind(call)["dim"] % len(call.results[0].shape)
    joined = [(call.operands[slot.index].shape, states[slot.index]) for slot in slots(call)]
    runs = {shape[dim] // state.segments for shape, state in joined}
    if len(runs) > 1 or any((state.kind, state.dim) != ("rows", dim) for _, state in joined):
        return None
    return (rows(dim, sum(state.segments for _, state in joined)),)
