"""What a step's results and loss have of the samples of single ranks.

The ranks of a job are treated like micro-batches that run at the same time: `find_states` for one
rank's samples each. A result that then has samples is split between the ranks; an op that then
cannot run combines the samples of several ranks.
"""

import math
from collections import defaultdict
from collections.abc import Callable

from torch.utils import _pytree as pytree

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import Op, StepGraph, ValueRef
from alpa_strategy.ir.op import OpCall, TensorMeta, aten_name, bind, dims_of
from alpa_strategy.microbatch.rules import SPLITS, WHOLE, MicrobatchPlacement
from alpa_strategy.microbatch.states import Chosen, PlacementWalk, find_states
from alpa_strategy.sharding.rule_families import RESHAPES


def sums_over_rows(step: StepGraph, num_ranks: int) -> bool:
    """Whether the loss, or a term of it, is known to be a sum over all ranks' samples, not a mean.

    It is if nothing between the sum and the loss divides by a value that is made of the batch, or
    by a number that may be the number of samples (or one less).
    """
    try:
        states = find_states(step, num_ranks, 1)
    except PlanError:
        # Samples are combined with each other.
        return False

    # Values that are sums over samples, and values that were scaled by a number of samples.
    sums: set[int] = set()
    scaled: set[int] = set()
    for index in states.moved:
        scaled.update(step.ops[index].results)

    for index, chosen in sorted(states.chosen.items()):
        op = step.ops[index]
        has_scaled_operand = not scaled.isdisjoint(op.operands)
        may_scale = op.call.target_name in ("aten.mul.Tensor", "aten.div.Tensor")
        has_count = _reads_batch_count(chosen) or _has_sample_count(op, step)
        scales = False
        if may_scale:
            scales = has_scaled_operand or has_count

        is_sum = chosen.strategy.outputs[0].kind == "sum" and not chosen.strategy.mean
        reads_samples = any(states.state[value].kind == "rows" for value in op.operands)
        adds_samples = is_sum and reads_samples and not has_scaled_operand

        has_sum_operand = not sums.isdisjoint(op.operands)
        if not scales and (adds_samples or has_sum_operand):
            sums.update(op.results)
        elif scales or has_scaled_operand:
            scaled.update(op.results)
    return step.loss in sums


def _reads_batch_count(chosen: Chosen) -> bool:
    """Whether an operand is a full value from the prologue, such as the number of targets."""
    full_values = [use for use in chosen.uses if use.state == WHOLE]
    return any(use.form == "given" for use in full_values)


def _has_sample_count(op: Op, step: StepGraph) -> bool:
    """Whether an argument may be a multiple of the number of samples, or one less, or 1 / it."""
    for arg in op.call.args:
        if type(arg) not in (int, float) or not arg:
            continue
        number = max(abs(arg), 1 / abs(arg))
        if not 1 < number < math.inf:
            continue
        if round(number) % step.batch_size in (0, step.batch_size - 1):
            return True
    return False


# Ops that take samples by their position along a dim.
_BY_POSITION = {
    "select",
    "slice",
    "narrow",
    "unbind",
    "select_scatter",
    "slice_scatter",
    *SPLITS,
    "tensor_split",
    "diff",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
}

# Ops that take samples by index tensors. If these are no part of the batch, that is by position as
# well: `x[[0, 3]]`, `x[self.anchors]`.
_BY_INDEX = ("index", "index_select", "gather")


def where_rows_meet(
    step: StepGraph, num_ranks: int, by_place: bool, own_step: Callable[[], StepGraph]
) -> str | None:
    """Return the user's line on which the loss depends on several ranks' samples as one batch.

    Equal slices of all samples, smaller than a rank's batch, are a loop over samples and allowed.

    Args:
        by_place: report only ops that take samples by position (`x[0]`, `x[:5]`, `x.squeeze(0)` of
            a batch of one), since a rank's local batch has other samples there.
        own_step: returns the step on this rank's samples alone. Groups of samples that differ
            there are by position, too (`x.view(5, -1, n)`).

    Returns:
        The line; None if there is none.
    """
    return _CombinedSamples(step, num_ranks, by_place).first_line(own_step)


class _CombinedSamples:
    """Searches the ops that the loss depends on for those that combine ranks' samples.

    Args: as of `where_rows_meet`.
    """

    def __init__(self, step: StepGraph, num_ranks: int, by_place: bool) -> None:
        self.step = step
        self.num_ranks = num_ranks
        self.by_place = by_place
        self.states = _RankWalk(step.bare(()), num_ranks, 1, set()).states()
        self.constants = {entry.value for entry in step.constant_inputs}

        # (value, its sample dim, samples of one rank) -> the calls that take some of them, each
        # with the index of its first op.
        self.slices: dict[tuple[int, int, int], dict[OpCall, int]] = defaultdict(dict)

        # Op index -> the shape that its result has on the samples of one rank, if the op groups
        # samples alike there.
        self.local_shapes: dict[int, tuple[int, ...]] = {}

    def first_line(self, own_step: Callable[[], StepGraph]) -> str | None:
        """Return the first line that combines samples of several ranks, or None."""
        for index in self.step.ancestors({self.step.loss}):
            op = self.step.ops[index]
            for value, meta in zip(op.operands, op.call.operands, strict=True):
                if self._combines(index, value, meta):
                    return self._line(index)

        for (value, dim, samples_per_rank), calls in self.slices.items():
            first = next(iter(calls.values()))
            if not self._is_loop(value, dim, samples_per_rank, calls):
                return self._line(first)

        local_ops = own_step().ops if self.local_shapes else ()
        for index, shape in sorted(self.local_shapes.items()):
            if index < len(local_ops) and local_ops[index].call.results[0].shape != shape:
                return self._line(index)
        return None

    def _line(self, index: int) -> str:
        op = self.step.ops[index]
        return op.source or op.name

    def _combines(self, index: int, value: int, meta: TensorMeta) -> bool:
        """Whether op `index` combines samples of its operand `value`.

        Slices and reshapes are recorded, to be decided when all ops have been visited.
        """
        have = self.states.state[value]
        if have.kind != "rows":
            return False
        samples_per_rank = meta.shape[have.dim] // (have.segments * self.num_ranks)
        if not samples_per_rank:
            return False

        op = self.step.ops[index]
        name = aten_name(op.call.target)
        is_moved = index in self.states.moved
        has_fixed_indices = name in _BY_INDEX and not self.constants.isdisjoint(op.operands)
        if is_moved and (has_fixed_indices or name in RESHAPES or not self.by_place):
            return True

        if name in RESHAPES:
            self._record_reshape(index, samples_per_rank)
        if is_moved and name in _BY_POSITION and value == op.operands[0]:
            self._record_slice(index, have.dim, samples_per_rank)
        return False

    def _record_slice(self, index: int, sample_dim: int, samples_per_rank: int) -> None:
        """Record an op that slices its first operand along `sample_dim`."""
        op = self.step.ops[index]
        rank_of_tensor = len(op.call.operands[0].shape)
        if sample_dim in dims_of(bind(op.call).get("dim"), rank_of_tensor):
            calls = self.slices[op.operands[0], sample_dim, samples_per_rank]
            calls.setdefault(op.call, index)

    def _record_reshape(self, index: int, samples_per_rank: int) -> None:
        """Record the local shape of a reshape's result that has another number of samples."""
        op = self.step.ops[index]
        state = self.states.state[op.results[0]]
        if state.kind != "rows":
            return
        shape = list(op.call.results[0].shape)
        is_regrouped = shape[state.dim] % self.step.batch_size != 0
        squeezes_one = samples_per_rank == 1 and aten_name(op.call.target) == "squeeze"
        if is_regrouped or squeezes_one:
            shape[state.dim] //= self.num_ranks
            self.local_shapes[index] = tuple(shape)

    def _is_loop(
        self, value: int, dim: int, samples_per_rank: int, calls: dict[OpCall, int]
    ) -> bool:
        """Whether `calls` take all samples of `value` in equal slices, none larger than a rank's.

        The local shape of the slices is recorded: it must be the same on the samples of one rank.
        """
        shape = self.step.values[value].shape
        slices = [meta.shape for call in calls for meta in call.results]
        sizes = []
        for slice_shape in slices:
            keeps_dim = len(slice_shape) == len(shape)
            sizes.append(slice_shape[dim] if keeps_dim else 1)
        size = sizes[0]

        are_equal = set(sizes) == {size}
        divides = size < samples_per_rank and samples_per_rank % size == 0
        if not (are_equal and divides and sum(sizes) == shape[dim]):
            return False
        # A single sample looks the same in both steps.
        if len(slices[0]) == len(shape):
            first = next(iter(calls.values()))
            self.local_shapes[first] = slices[0]
        return True


def rows_of_ranks(step: StepGraph, num_ranks: int) -> dict[int, MicrobatchPlacement]:
    """Return the values that a step returns or appends to lists and that have samples.

    All other values are the same on every rank: losses, statistics of the batch, results that
    combine samples of several ranks.

    Returns:
        Value -> how each rank's samples are sliced from it.
    """
    shown = set()
    for leaf in pytree.tree_leaves((step.output, [record.items for record in step.appended])):
        if isinstance(leaf, ValueRef) and step.values[leaf.index].shape:
            shown.add(leaf.index)
    if not shown or num_ranks == 1 or step.batch_scope == "global":
        return {}

    states = _RankWalk(step.bare(()), num_ranks, 1, set()).states().state
    placements = {}
    for value, state in states.items():
        if value in shown and state.kind == "rows":
            placements[value] = state
    return placements


class _RankWalk(PlacementWalk):
    """A walk over ranks instead of micro-batches.

    Sums, and results that combine samples of several ranks, are full values: every rank has them
    after the step.
    """

    def postpone(self, index: int) -> None:
        self.move(index)

    def visit(self, index: int) -> None:
        super().visit(index)
        for value in self.step.ops[index].results:
            if self.state[value].kind == "sum":
                self.state[value] = WHOLE
