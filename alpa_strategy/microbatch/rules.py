"""How one op splits over micro-batches: the sharding rules on one more axis, which is time.

A `MicrobatchPlacement` describes a value on that axis, a `TimeStrategy` an op. The axis has no
resharding, and `R` and `R*` are the same there: gradients are summed over micro-batches in any
case, so the gradient of a full value is a partial value. Nothing here knows of a graph.
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
from alpa_strategy.ir.per_rank import PerRank
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, DualPlacement, shard
from alpa_strategy.sharding.rule_families import RESHAPES, broadcast_dim, is_reshape
from alpa_strategy.sharding.rule_table import added_operand, depends_on_rules
from alpa_strategy.sharding.strategies import axis_strategies, localize

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten._to_copy.default)
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)

# Op -> positions of the arguments in which it is linear, if the other argument is unsharded.
_LINEAR_IN = {aten.mul.Tensor: (0, 1), aten.div.Tensor: (0,)}

# Placeholder in `MicrobatchPlacement.segments`: the strategy works with any number of segments.
ANY = 0


@dataclass(frozen=True)
class MicrobatchPlacement:
    """The part of a value that a micro-batch has.

    Kinds:

    - `whole`: the full value, the same in all micro-batches.
    - `sum`: a partial value; the full value is the sum over the micro-batches.
    - `rows`: some samples, along dim `dim`. The dim holds `segments` runs of samples one after the
      other, each split into M chunks: 2 runs in `torch.cat([a, b])`, T in a flattened [T, B].
    - `numbers`: sample indices (`arange(B)`) along `dim`, counted from the micro-batch's first
      sample.
    """

    kind: Literal["whole", "sum", "rows", "numbers"]
    dim: int = -1
    segments: int = 1

    @property
    def placement(self) -> DualPlacement:
        """The closest placement of the sharding rules; right for shapes only."""
        if self.kind == "whole":
            return INVARIANT
        if self.kind == "sum":
            return PARTIAL
        return shard(self.dim)

    @property
    def has_sample_dim(self) -> bool:
        """Whether `dim` is split over the micro-batches."""
        return self.kind in ("rows", "numbers")


WHOLE = MicrobatchPlacement("whole")
SUM = MicrobatchPlacement("sum")


def rows(dim: int, segments: int = 1) -> MicrobatchPlacement:
    """Return the placement of a value with samples along `dim`."""
    return MicrobatchPlacement("rows", dim, segments)


def cut(tensor: Tensor, how: MicrobatchPlacement, num_microbatches: int, index: int) -> Tensor:
    """Return the samples of micro-batch `index` of a full tensor: chunk `index` of every run.

    Args:
        how: a placement of kind `rows`.
    """
    chunks = tensor.unflatten(how.dim, (how.segments, num_microbatches, -1))
    return chunks.select(how.dim + 1, index).flatten(how.dim, how.dim + 1)


def joined(parts: Sequence[Tensor], how: MicrobatchPlacement) -> Tensor:
    """Return the full tensor of its micro-batches' chunks: inverse of `cut`.

    Args:
        parts: the tensor of each micro-batch.
        how: a placement of kind `rows`.
    """
    runs = [part.unflatten(how.dim, (how.segments, -1)) for part in parts]
    stacked = torch.stack(runs, how.dim + 1)
    return stacked.flatten(how.dim, how.dim + 2)


@dataclass(frozen=True)
class TimeStrategy:
    """One way to run an op on micro-batches."""

    # One placement per operand and per result. All that have `ANY` segments get the same number.
    inputs: tuple[MicrobatchPlacement, ...]
    outputs: tuple[MicrobatchPlacement, ...]

    # Whether the results are means over the micro-batch, so that each is scaled by 1/M.
    mean: bool = False

    # Position of the operand that is added to a sum over micro-batches: each adds 1/M of it.
    added: int | None = None

    # Whether the second argument is a number that is added to such a sum: likewise.
    adds_number: bool = False

    # Positions of the results that are running statistics, passed from one micro-batch to the
    # next.
    sequential: tuple[int, ...] = ()


@depends_on_rules
@lru_cache(maxsize=16384)
def time_strategies(call: OpCall, num_parts: int) -> tuple[TimeStrategy, ...]:
    """Return every exact way to run `call` if samples are split into `num_parts` chunks.

    The first one repeats the op on full values.
    """
    if isinstance(call.target, PerRank):
        within_ranks = _within_ranks(call.target, num_parts)
        return (*within_ranks, _over_ranks(call))
    # The result of a batch norm depends on the split. `microbatch` adds a note that says so.
    if call.target is ops.batch_norm_train:
        return tuple(_batch_norm(call))
    strategies = (*_from_rules(call, num_parts), *_time_only(call))
    with_indices = (*strategies, *_sample_indices(call, strategies))
    return tuple(dict.fromkeys(with_indices))


def _over_ranks(call: OpCall) -> TimeStrategy:
    """Return the strategy of a `PerRank` whose micro-batches have some ranks' samples each."""
    inputs = []
    for is_mapped in call.target.mapped:
        inputs.append(rows(0) if is_mapped else WHOLE)
    return TimeStrategy(tuple(inputs), (rows(0),) * len(call.results))


def _within_ranks(target: PerRank, num_parts: int) -> tuple[TimeStrategy, ...]:
    """Return the strategies of a `PerRank` whose micro-batches have some of every rank's samples.

    They are those of one rank's op. Their dims are one further, behind the ranks.
    """
    shifted = []
    for strategy in time_strategies(target.inner, num_parts):
        inputs = []
        for state, is_mapped in zip(strategy.inputs, target.mapped, strict=True):
            inputs.append(_one_dim_further(state) if is_mapped else state)
        outputs = tuple(map(_one_dim_further, strategy.outputs))
        shifted.append(replace(strategy, inputs=tuple(inputs), outputs=outputs))
    return tuple(shifted)


def _one_dim_further(state: MicrobatchPlacement) -> MicrobatchPlacement:
    return replace(state, dim=state.dim + 1) if state.has_sample_dim else state


def view_strategies(
    call: OpCall, states: tuple[MicrobatchPlacement, ...], num_parts: int
) -> tuple[TimeStrategy, ...]:
    """Return the ways to run a view, `cat`, `split` or slice on operands that have `states`.

    No other op has any, nor has one on operands without samples, or with a partial value.
    """
    if isinstance(call.target, PerRank):
        return _views_per_rank(call.target, states, num_parts)
    kinds = {state.kind for state in states}
    if "sum" in kinds or "rows" not in kinds:
        return ()
    outputs = _view_outputs(call, states, num_parts)
    if outputs is None:
        return ()
    return (TimeStrategy(states, outputs),)


def _views_per_rank(
    target: PerRank, states: tuple[MicrobatchPlacement, ...], num_parts: int
) -> tuple[TimeStrategy, ...]:
    """Return `view_strategies` of an op that runs for each rank, along a leading dim of ranks; ()
    if an operand's samples are along that dim.
    """
    inner_states = []
    for state, is_mapped in zip(states, target.mapped, strict=True):
        is_moved = is_mapped and state.has_sample_dim
        inner_states.append(replace(state, dim=state.dim - 1) if is_moved else state)
    if any(state.has_sample_dim and state.dim < 0 for state in inner_states):
        return ()
    shifted = []
    for strategy in view_strategies(target.inner, tuple(inner_states), num_parts):
        outputs = tuple(map(_one_dim_further, strategy.outputs))
        shifted.append(replace(strategy, inputs=states, outputs=outputs))
    return tuple(shifted)


def view_for_result(
    call: OpCall, want: MicrobatchPlacement, num_parts: int
) -> tuple[TimeStrategy, ...]:
    """Return the way to run a view whose result has the placement `want`, of kind `rows`; () for
    other ops and kinds, and if the operand's samples would be no runs.
    """
    if not is_reshape(call) or want.kind != "rows" or len(call.operands) != 1:
        return ()
    # The view back gives the operand of the result.
    states = _viewed(call.results[0].shape, call.operands[0].shape, want, num_parts)
    return () if states is None else (TimeStrategy(states, (want,)),)


def specialised(
    call: OpCall, strategy: TimeStrategy, segments: int, num_parts: int
) -> TimeStrategy | None:
    """Return the strategy with `segments` in place of `ANY`.

    None if a dim cannot be split into `num_parts` equal chunks per segment.
    """
    placements = (*strategy.inputs, *strategy.outputs)
    if not any(placement.has_sample_dim for placement in placements):
        return strategy

    def fix(state: MicrobatchPlacement) -> MicrobatchPlacement:
        return replace(state, segments=segments) if state.segments == ANY else state

    inputs = tuple(map(fix, strategy.inputs))
    outputs = tuple(map(fix, strategy.outputs))

    metas = (*call.operands, *call.results)
    for state, meta in zip((*inputs, *outputs), metas, strict=True):
        if state.has_sample_dim and meta.shape[state.dim] % (state.segments * num_parts):
            return None
    return replace(strategy, inputs=inputs, outputs=outputs)


def _from_rules(call: OpCall, num_parts: int) -> Iterator[TimeStrategy]:
    """Yield the strategies that the sharding rules give.

    Rules treat all samples alike, in any order. Views that merge dims do not: their samples must be
    one run.
    """
    segments = 1 if regroups_dims(call) else ANY

    def state(dual: DualPlacement) -> MicrobatchPlacement:
        if dual.shard_dim is not None:
            return rows(dual.shard_dim, segments)
        return SUM if dual == PARTIAL else WHOLE

    for strategy in axis_strategies(call, num_parts):
        # All other implementations run collectives, and there are none between micro-batches.
        is_local = strategy.implementation in (None, "fraction", "bias_on_first")
        if not is_local or _needs_whole_gradient(call, strategy):
            continue

        added = None
        if strategy.implementation == "bias_on_first":
            added = added_operand(call)
        yield TimeStrategy(
            inputs=tuple(map(state, strategy.inputs)),
            outputs=tuple(map(state, strategy.outputs)),
            mean=strategy.implementation == "fraction",
            added=added,
        )


def _needs_whole_gradient(call: OpCall, strategy: AxisStrategy) -> bool:
    """Whether a full result of divided operands needs its full gradient in every micro-batch.

    No micro-batch has it: there the gradient is a partial value.
    """
    has_divided_operand = any(
        meta.requires_grad and not isinstance(dual.value, Replicate)
        for meta, dual in zip(call.operands, strategy.inputs, strict=True)
    )
    has_invariant_result = any(
        meta.requires_grad and dual == INVARIANT
        for meta, dual in zip(call.results, strategy.outputs, strict=True)
    )
    return has_divided_operand and has_invariant_result


def _batch_norm(call: OpCall) -> Iterator[TimeStrategy]:
    """Yield the strategies of a batch norm.

    Its statistics are those of a micro-batch, as in plain gradient accumulation: the one
    documented exception to exactness.
    """
    yield TimeStrategy((WHOLE,) * len(call.operands), (WHOLE,) * len(call.results))

    x = bind(call)["x"].index
    inputs = [WHOLE] * len(call.operands)
    inputs[x] = rows(0, ANY)

    statistics = tuple(range(1, len(call.results)))
    outputs = (rows(0, ANY), *(WHOLE for _ in statistics))
    yield TimeStrategy(tuple(inputs), outputs, sequential=statistics)


def _time_only(call: OpCall) -> Iterator[TimeStrategy]:
    """Yield strategies that device meshes do not have, because they would be slow or would round.

    On the time axis they cost nothing.
    """
    num_operands = len(call.operands)
    unsplit = (WHOLE,) * num_operands
    is_float = bool(call.results) and call.results[0].dtype.is_floating_point

    if call.target in _CASTS and is_float:
        yield TimeStrategy((SUM,), (SUM,))

    for position in _LINEAR_IN.get(call.target, ()):
        factor = call.args[position]
        if isinstance(factor, Slot):
            inputs = list(unsplit)
            inputs[factor.index] = SUM
            yield TimeStrategy(tuple(inputs), (SUM,))

    adds_number = aten_name(call.target) in ("add", "sub", "rsub") and num_operands == 1
    if adds_number and isinstance(call.args[0], Slot) and is_float:
        yield TimeStrategy((SUM,), (SUM,), adds_number=True)

    # The result's size is an argument, and no rule tells which dims may be drawn separately. On
    # the time axis all may.
    if aten_name(call.target) == "randint":
        for dim in range(len(call.results[0].shape)):
            yield TimeStrategy(unsplit, (rows(dim, ANY),))

    if call.target is aten.repeat.default:
        for dim in _constant_dims_of_repeat(call):
            yield TimeStrategy(unsplit, (rows(dim, ANY),))


def _constant_dims_of_repeat(call: OpCall) -> Iterator[int]:
    """Yield the result's dims along which `repeat` gives the same slice everywhere."""
    source = call.operands[slots(call)[0].index].shape
    target = call.results[0].shape
    num_new_dims = len(target) - len(source)
    for dim in range(len(target)):
        if dim < num_new_dims or source[dim - num_new_dims] == 1:
            yield dim


def _sample_indices(call: OpCall, strategies: tuple[TimeStrategy, ...]) -> Iterator[TimeStrategy]:
    """Yield strategies in which sample indices are counted from the micro-batch's first sample.

    In `x[arange(B), i]` every sample of x is read separately, so the indices may be local.

    Args:
        strategies: the op's other strategies.
    """
    if call.target in _ARANGES:
        bound = bind(call)
        arange = (bound.get("start", 0), bound.get("step", 1), bound["end"])
        if arange == (0, 1, call.results[0].shape[0]):
            yield TimeStrategy((), (MicrobatchPlacement("numbers", 0),))
    elif regroups_dims(call) or call.target in (*_CASTS, aten.expand.default):
        yield from _reshaped_indices(call, strategies)
    elif call.target is aten.index.Tensor:
        yield from _read_by_number(call)


def _reshaped_indices(call: OpCall, strategies: tuple[TimeStrategy, ...]) -> Iterator[TimeStrategy]:
    """Yield strategies of a cast or view of integers in which operand and result are sample
    indices: for every dim that has the samples before and after, with the same size.

    Nothing if the result is no integer tensor.

    Args:
        strategies: the op's other strategies, which show where the samples are.
    """
    is_integer = not call.results[0].dtype.is_floating_point
    if not is_integer or len(call.operands) != 1:
        return
    for strategy in strategies:
        before = strategy.inputs[0]
        after = strategy.outputs[0]
        has_samples = before.kind == after.kind == "rows"
        if not has_samples:
            continue
        # A view that merges the samples with another dim makes no sample index.
        if call.operands[0].shape[before.dim] == call.results[0].shape[after.dim]:
            yield TimeStrategy(
                (MicrobatchPlacement("numbers", before.dim),),
                (MicrobatchPlacement("numbers", after.dim),),
            )


def _read_by_number(call: OpCall) -> Iterator[TimeStrategy]:
    """Yield the strategies of `x[n, i, j]` in which `n` has the sample indices of x.

    The index tensors broadcast with each other; one dim of the broadcast result has the samples.
    """
    source, indices = call.args[0], call.args[1]
    positions = [dim for dim, index in enumerate(indices) if isinstance(index, Slot)]
    are_leading_dims = positions == list(range(len(positions)))
    if not positions or not are_leading_dims:
        return

    # Operand numbers of the index tensors.
    index_operands = [indices[dim].index for dim in positions]
    first = index_operands[0]
    num_samples = call.operands[source.index].shape[0]
    index_rank = max(len(call.operands[operand].shape) for operand in index_operands)

    for dim in range(index_rank):
        states = {source.index: rows(0)}  # x [samples, ...]
        for operand in index_operands:
            operand_dim = broadcast_dim(call, operand, dim, index_rank)
            states[operand] = WHOLE if operand_dim is None else rows(operand_dim)

        first_state = states[first]
        if first_state.kind != "rows":
            continue
        if call.operands[first].shape[first_state.dim] == num_samples:
            states[first] = MicrobatchPlacement("numbers", first_state.dim)
            inputs = tuple(states[operand] for operand in range(len(call.operands)))
            yield TimeStrategy(inputs, (rows(dim),))


def local_call(call: OpCall, strategy: TimeStrategy, num_microbatches: int) -> OpCall:
    """Return the call on one micro-batch: shapes divided, size arguments rewritten."""
    placements = AxisStrategy(
        tuple(state.placement for state in strategy.inputs),
        tuple(state.placement for state in strategy.outputs),
    )
    local = localize(call, (placements,), (num_microbatches,), (0,)).call
    if not strategy.adds_number:
        return local
    if isinstance(local.target, PerRank):
        inner = _with_share_of_number(local.target.inner, num_microbatches)
        return replace(local, target=local.target.with_inner(inner))
    return _with_share_of_number(local, num_microbatches)


def _with_share_of_number(call: OpCall, num_microbatches: int) -> OpCall:
    """Return a sum's call, with a share of the number that is added."""
    first, number, *others = call.args
    return replace(call, args=(first, number / num_microbatches, *others))


# Samples in views, `cat`, `split` and slices, if a dim holds several runs of them, one after the
# other.
#
# A dim with `segments` k is [k, n]: k runs of n samples (or a multiple), each split into equal
# chunks. `torch.cat([a, b])` has k = 2, a flattened [T, B] has k = T. Device meshes have no such
# layout.


SPLITS = ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")


def regroups_dims(call: OpCall) -> bool:
    """Whether the op may merge or split dims.

    Several runs of samples then end up in other dims than a single run does.
    """
    return aten_name(call.target) in RESHAPES


def _view_outputs(
    call: OpCall, states: tuple[MicrobatchPlacement, ...], num_parts: int
) -> tuple[MicrobatchPlacement, ...] | None:
    """Return the results' placements if the operands have `states`; None if the results would mix
    samples of several micro-batches, or the op is no view.
    """
    name = aten_name(call.target)
    if name in ("cat", "concat"):
        return _concatenated(call, states)

    first = states[0]
    if first.kind != "rows":
        return None
    if is_reshape(call) and len(states) == 1:
        return _viewed(call.operands[0].shape, call.results[0].shape, first, num_parts)

    takes_slices = name in (*SPLITS, "slice", "narrow")
    if not takes_slices or _dim(call) != first.dim:
        return None

    # Only slices of full runs have a placement.
    run_length = call.operands[0].shape[first.dim] // first.segments
    if name in ("slice", "narrow"):
        start = _start(call)
        if start is None or start % run_length:
            return None
    sizes = [result.shape[first.dim] for result in call.results]
    if any(size % run_length or size == 0 for size in sizes):
        return None
    return tuple(rows(first.dim, size // run_length) for size in sizes)


def _dim(call: OpCall) -> int:
    """Return the `dim` argument, counted from the front."""
    rank = len(call.operands[slots(call)[0].index].shape)
    return bind(call)["dim"] % rank


def _start(call: OpCall) -> int | None:
    """Return the first index of a slice along its dim; None if the slice has steps or a tensor."""
    bound = bind(call)
    if bound.get("step", 1) != 1 or isinstance(bound["start"], Slot):
        return None
    size = call.operands[0].shape[_dim(call)]
    start = bound["start"] or 0
    if start < 0:
        start += size
    return min(max(start, 0), size)


def _viewed(
    source: tuple[int, ...], target: tuple[int, ...], state: MicrobatchPlacement, num_parts: int
) -> tuple[MicrobatchPlacement, ...] | None:
    """Return the placement of a view's result; None if its dims do not fall on runs of samples.

    Both shapes are [before, n, after]: n are the samples, `before` is everything in front of them,
    dims and segments.

    Args:
        source, target: shapes before and after the view.
        state: placement of the operand, of kind `rows`.
        num_parts: number of micro-batches.
    """
    # Runs of samples, in order of memory.
    before = math.prod(source[: state.dim]) * state.segments

    # Product of the target's dims so far.
    front = 1
    for dim, size in enumerate(target):
        divides = before % front == 0 and size % (before // front) == 0
        if divides and size > 1:
            # The runs that this dim holds: the dims before it hold the others.
            num_runs = before // front
            samples_and_after = size // num_runs
            if samples_and_after % num_parts == 0 and samples_and_after > 0:
                return (rows(dim, num_runs),)
        front *= size
        if front > before:
            return None
    return None


def _concatenated(
    call: OpCall, states: tuple[MicrobatchPlacement, ...]
) -> tuple[MicrobatchPlacement, ...] | None:
    """Return the placement of `cat`'s result, a tuple of one; None if an operand's samples are not
    along the dim of `cat`, or the operands' runs differ in length.
    """
    dim = bind(call)["dim"] % len(call.results[0].shape)
    run_lengths = set()
    num_segments = 0
    for slot in slots(call):
        state = states[slot.index]
        if (state.kind, state.dim) != ("rows", dim):
            return None
        size = call.operands[slot.index].shape[dim]
        run_lengths.add(size // state.segments)
        num_segments += state.segments
    if len(run_lengths) > 1:
        return None
    return (rows(dim, num_segments),)
