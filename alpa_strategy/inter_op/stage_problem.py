"""A stage's intra-op problem, its costs split by when they arise: per micro-batch, once per step,
always stored, and stored per micro-batch in flight.

It comes from the same `build` as that of a single stage. `weighted` adds the costs up for a number
of micro-batches, of which `alive` are in flight at once, with or without recomputation: the problem
that the ILP solves for a stage. A stage that recomputes does so segment by segment (`RematSpans`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from alpa_strategy.cost.flops import is_view
from alpa_strategy.inter_op.beside_compute import without_hidden
from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.intra_op.build import IntraOp, build
from alpa_strategy.intra_op.memory_choices import result_bytes
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.intra_op.options import gathers
from alpa_strategy.intra_op.problem import Problem, Transfer, Use
from alpa_strategy.ir.gathers import local_bytes
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.sharding.per_step import PerStep, per_step
from alpa_strategy.sharding.redistribute import reshard_table

# There while any span is recomputed.
EVERY_SPAN = -1
# The span of ops that run once per step.
PER_STEP = -2


@dataclass(frozen=True)
class CostBreakdown:
    """Seconds and bytes: arrays per strategy of a choice, or [source, target] of a transfer.

    Ops that run once per step have the segment `PER_STEP`, and only `once` and `always` in a
    forward.
    """

    # forward, backward: seconds of one micro-batch
    forward: np.ndarray
    backward: np.ndarray

    # Seconds once per step.
    once: np.ndarray

    # Bytes whatever is in flight.
    always: np.ndarray

    # Bytes of one micro-batch between its forward and its backward.
    saved: np.ndarray
    # bytes of these under recomputation: the inputs of segments, received or from the one before
    segment_inputs: np.ndarray

    # Bytes of the graph that recomputing makes, in span `span`.
    again: np.ndarray

    # Seconds of one micro-batch's sums over devices that are not in `forward` and `backward`, since
    # they overlap with matmuls.
    overlapped: np.ndarray
    span: int = EVERY_SPAN

    @cached_property
    def nonzero(self) -> frozenset[str]:
        """Names of the arrays that are not all zero."""
        return frozenset(
            name
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray) and value.any()
        )


def zero_costs(shape: int | tuple[int, ...]) -> CostBreakdown:
    """Return arrays of costs of a choice or a transfer that takes no time and no memory."""
    zero = np.zeros(shape)
    return CostBreakdown(zero, zero, zero, zero, zero, zero, zero, zero)


@dataclass(frozen=True)
class StageProblem:
    """An intra-op problem `intra` (restricted or not), and the cost breakdown of its choices and
    transfers.
    """

    intra: IntraOp
    choices: tuple[CostBreakdown, ...]
    transfers: tuple[CostBreakdown, ...]
    num_spans: int

    # [parameter][option] bytes of its gathered copy that its casts hold as well.
    held_copies: list[np.ndarray]


def stage_build(
    graph: StepGraph,
    tables: OptionTables,
    recompute_per_microbatch: bool = False,
    once: PerStep | None = None,
) -> IntraOp:
    """Return the problem of a stage that runs micro-batches (see `build`): some ops run once per
    step.

    Args:
        recompute_per_microbatch: as in `StagePlan`; then all ops run per micro-batch.
        once: the work that is done once per step; None: all that is worth it.
    """
    build_result = build(graph, tables)
    if recompute_per_microbatch:
        return build_result
    if once is None:
        once = per_step(graph)
    return RematSpans(replace(build_result, per_step=once)).split()


def take_apart(intra: IntraOp, starts: Sequence[int] = (0,)) -> StageProblem:
    """Split the costs of every choice and transfer of a stage's problem by when they arise.

    Args:
        intra: with a transfer per recompute segment of `starts` (`RematSpans.split`).
    """
    step = intra.step
    problem = intra.problem
    spans = RematSpans(intra, starts)
    num_parameters = len(intra.parameters)
    num_ops = len(intra.ops)
    received = {b.choice for b in intra.received.values()}
    sent = {b.choice for b in intra.sent.values()}
    batch = range(num_parameters + num_ops, num_parameters + num_ops + len(step.batch))
    held_copies = [copies_that_casts_hold(intra, index) for index in range(num_parameters)]
    choices = []
    for index, choice in enumerate(problem.choices):
        costs, span = zero_costs(len(choice.cost)), spans.of_choice(index)
        # Choices come as `IntraOp` orders them: parameters, ops, then batch leaves and what is
        # received, sent or fixed.
        if index < num_parameters:
            parameter = intra.parameters[index]
            forward, backward = parameter.fetch_seconds, parameter.backward_seconds
            once = choice.cost - forward - backward
            always = choice.memory - held_copies[index]
            costs = replace(costs, forward=forward, backward=backward, once=once, always=always)
        elif span == PER_STEP:
            forward = intra.ops[index - num_parameters].forward_seconds
            always = choice.memory + _held_bytes(intra, index - num_parameters)
            costs = replace(costs, once=forward, backward=choice.cost - forward, always=always)
        elif span is not None:  # an op of the micro-batches
            forward, memory = intra.ops[index - num_parameters].forward_seconds, choice.memory
            crossing_bytes = (
                spans.crossing_bytes(index) if len(starts) > 1 else costs.segment_inputs
            )
            costs = replace(
                costs,
                forward=forward,
                backward=choice.cost - forward,
                saved=memory,
                segment_inputs=crossing_bytes,
                again=memory,
            )
        elif index in received:  # until its gradient has gone back, recomputed or not
            costs = replace(
                costs, backward=choice.cost, saved=choice.memory, segment_inputs=choice.memory
            )
        elif index in sent:  # gone once it has arrived
            costs = replace(costs, backward=choice.cost, saved=choice.memory, again=choice.memory)
        elif index in batch:
            costs = replace(costs, saved=choice.memory, again=choice.memory)
        else:  # buffers and constants, and what leaves the step
            costs = replace(costs, always=choice.memory)
        choices.append(costs if span is None else replace(costs, span=span))
    transfers = _all_transfer_parts(intra, spans)
    return StageProblem(intra, tuple(choices), tuple(transfers), len(starts), held_copies)


def _all_transfer_parts(intra: IntraOp, spans: "RematSpans") -> list[CostBreakdown]:
    """Return `_transfer_parts` of every transfer.

    Args:
        spans: the recompute segments of choices and transfers.
    """
    # Those of equal layers have the same arrays.
    known: dict[Hashable, CostBreakdown] = {}
    transfers = []
    for index, (transfer, layouts) in enumerate(
        zip(intra.problem.transfers, intra.transfers, strict=True)
    ):
        span = spans.of_use(transfer, transfer.uses[0])
        made_in = spans.of_choice(transfer.producer)
        meta = intra.step.values[layouts.value]
        is_per_step = span == PER_STEP
        key: Hashable = index
        # Once per step, the penalties and savers of the transfer itself count.
        if not is_per_step:
            key = (
                id(transfer.cost),
                id(transfer.memory),
                id(layouts.sources),
                id(layouts.targets),
                id(layouts.hidden),
                id(layouts.hidden_in_backward),
                meta.num_bytes,
                meta.requires_grad,
                made_in == PER_STEP,
                made_in in (None, span),
            )
        if key not in known:
            known[key] = _transfer_parts(intra, index, span, made_in)
        transfers.append(replace(known[key], span=span))
    return transfers


def _transfer_parts(intra: IntraOp, index: int, span: int, made_in: int | None) -> CostBreakdown:
    """Return the [source, target] costs of a resharding by component: forward, backward, once per
    step, and bytes.

    Args:
        index: of the transfer in `intra`.
        span, made_in: the recompute segments of the transfer and of its producer.
    """
    transfer, layouts = intra.problem.transfers[index], intra.transfers[index]
    meta = intra.step.values[layouts.value]
    forward, alone = reshard_table(
        layouts.sources, layouts.targets, meta.num_bytes, meta.requires_grad, intra.mesh
    )
    forward = forward - layouts.hidden
    is_allowed = np.isfinite(transfer.cost)
    nothing = replace(zero_costs(transfer.cost.shape), span=span)
    # [source, target]; inf - inf is no number
    finite = np.where(np.isfinite(forward), forward, 0.0)
    with np.errstate(invalid="ignore"):
        backward = np.where(is_allowed, transfer.cost - forward, np.inf)
        # Without gathering again: what is gathered stays to the step's end.
        if span == PER_STEP:
            penalty = transfer.cost - (intra.unrestricted or intra.problem).transfers[index].cost
            # Of a copy that ops read which run once per step, where their backward keeps it.
            is_kept = not intra.per_step.ops.isdisjoint(intra.savers(layouts.value))
            copies = [local_bytes(meta, target, intra.mesh.shape) for target in layouts.targets]
            copied_bytes = np.where(layouts.equal | (not is_kept), 0.0, copies)
            backward = np.where(is_allowed, alone + penalty, np.inf)
            return replace(nothing, backward=backward, once=finite, always=copied_bytes)
    memory = again = transfer.memory
    # There all the time; what is gathered of it is re-gathered for the backward.
    if made_in == PER_STEP:
        gathered = gathers(layouts.sources, layouts.targets)
        backward = np.where(gathered & (memory > 0), backward + finite, backward)
        memory = again = np.where(gathered | layouts.equal, 0.0, memory)
    elif made_in not in (None, span):  # kept as it was made
        again = np.where(layouts.equal, 0.0, memory)
    return replace(
        nothing,
        forward=finite,
        backward=backward,
        saved=memory,
        again=again,
        overlapped=layouts.hidden + layouts.hidden_in_backward,
    )


def copies_that_casts_hold(intra: IntraOp, index: int) -> np.ndarray:
    """Return [option] the bytes of the gathered copy of parameter number `index` that its casts
    hold as well; 0 if the step does not cast it.

    A copy is gathered in the dtype to which all uses cast it. These casts then return the copy
    itself, and its bytes are counted with what they hold until the end of the step.
    """
    step, copy_bytes = intra.step, intra.parameters[index].copy_bytes
    parameter = step.parameters[index]
    if step.dtypes_read[parameter.name] == parameter.meta.dtype:
        return np.zeros_like(copy_bytes)

    num_casts = 0
    for op, _ in step.consumers.get(parameter.value, ()):
        held = intra.per_step.values.intersection(step.ops[op].results)
        num_casts += op in intra.per_step.ops and bool(held)
    return num_casts * copy_bytes


def _held_bytes(intra: IntraOp, op: int) -> np.ndarray:
    """Return [strategy] the bytes that an op's results add to memory until the end of the step.

    These are results which micro-batches read or an op that runs once per step saves. Views, and
    results that count as saved already, are 0.
    """
    step, options = intra.step, intra.ops[op]
    total = np.zeros(len(options.outputs))
    if is_view(step.ops[op].call):
        return total
    for position, value in enumerate(step.ops[op].results):
        is_held = value in intra.per_step.values or not intra.per_step.ops.isdisjoint(
            intra.savers(value)
        )
        if is_held and not options.saved.results[position]:
            total += result_bytes(intra, op, position)
    return total


def weighted(
    stage: StageProblem,
    num_microbatches: float,
    in_flight: float,
    remat: bool = False,
    memory_limit: float = np.inf,
    shares: Sequence[float] | None = None,
) -> Problem:
    """Return the problem: minimise num_microbatches * (seconds of a micro-batch) + seconds once,
    within the bytes of a device.

    Args:
        in_flight: micro-batches whose activations are stored at once.
        remat: whether the stage recomputes its activations.
        memory_limit: bytes of a device.
        shares: of the recompute segments, adding up to 1. The memory row has this mean of the
            segments' activations in place of the largest: it is never more, and equal if only
            segments count that need as much as the largest. None: equal shares.
    """
    if (num_microbatches, in_flight, remat) == (1, 1, False) and not stage.intra.per_step.ops:
        # The parts add up to what they were taken from.
        return replace(stage.intra.problem, memory_limit=memory_limit)
    shares = shares or [1 / stage.num_spans] * stage.num_spans
    share_of = {EVERY_SPAN: 1.0, PER_STEP: 0.0, **dict(enumerate(shares))} if remat else None
    problem = stage.intra.problem
    cost, memory = weigh(stage.choices, num_microbatches, in_flight, share_of)
    choices = [
        replace(c, cost=s, memory=b) for c, s, b in zip(problem.choices, cost, memory, strict=True)
    ]
    cost, memory = weigh(stage.transfers, num_microbatches, in_flight, share_of)
    transfers = [
        replace(t, cost=s, memory=b)
        for t, s, b in zip(problem.transfers, cost, memory, strict=True)
    ]
    return Problem(tuple(choices), tuple(transfers), memory_limit)


def weigh(
    breakdowns: Sequence[CostBreakdown],
    num_microbatches: float,
    in_flight: float,
    shares: Mapping[int, float] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (seconds per step, bytes): a list of arrays for each, with one array per breakdown.

    Args:
        in_flight: micro-batches whose activations are stored at once.
        shares: of a stage that recomputes: segment -> the share of its `CostBreakdown.again` that
            counts. None: it does not recompute.
    """
    forwards = 1 if shares is None else 2
    seconds = [num_microbatches * (forwards * p.forward + p.backward) + p.once for p in breakdowns]
    if shares is None:
        return seconds, [p.always + in_flight * p.saved for p in breakdowns]
    return seconds, [
        p.always + shares[p.span] * p.again + in_flight * p.segment_inputs for p in breakdowns
    ]


def with_update_row(
    problem: Problem, stage: StageProblem, share: float, memory_limit: float
) -> Problem:
    """Return a problem of the stage whose memory row is a mean of its own and of the one that holds
    while the optimizer updates.

    Args:
        problem: of `weighted`.
        share: the weight of the optimizer's row; 0: the problem as it is.
        memory_limit: of the optimizer's row, bytes.
    """
    if share == 0.0:
        return problem

    choices = []
    for choice, at_update in zip(problem.choices, _bytes_at_update(stage), strict=True):
        memory = (1 - share) * choice.memory + share * at_update
        choices.append(replace(choice, memory=memory))
    # At the update there are no copies of values for their uses.
    transfers = [replace(t, memory=(1 - share) * t.memory) for t in problem.transfers]
    limit = (1 - share) * problem.memory_limit + share * memory_limit
    return Problem(tuple(choices), tuple(transfers), limit)


def update_bytes(stage: StageProblem) -> float:
    """Return the bytes that the stage needs at least while the optimizer updates; inf if all
    strategies of a choice are forbidden.
    """
    least = 0.0
    for choice, at_update in zip(stage.intra.problem.choices, _bytes_at_update(stage), strict=True):
        # As floats: integers have no infinity.
        possible = at_update[np.isfinite(choice.cost)].astype(float)
        least += float(possible.min(initial=np.inf))
    return least


def _bytes_at_update(stage: StageProblem) -> list[np.ndarray]:
    """[choice][strategy] bytes while the optimizer updates; see `StageCost.update`."""
    scratch = stage.intra.tables.optimizer.scratch
    bytes_of_choices = []
    for index, parts in enumerate(stage.choices):
        num_bytes = np.zeros_like(parts.always) if parts.span == PER_STEP else parts.always
        if index < len(stage.intra.parameters):
            num_bytes = num_bytes + scratch * stage.intra.parameters[index].gradient_bytes
            num_bytes = num_bytes + stage.held_copies[index]
        bytes_of_choices.append(num_bytes)
    return bytes_of_choices


def cost_of(
    stage: StageProblem,
    assignment: Sequence[int],
    working: float = 0.0,
    prefetch: bool | None = None,
) -> StageCost:
    """Return the summed costs of an assignment. A value pays once per distinct target layout (and
    recompute segment).

    On a cluster with `overlap`, seconds are without those that overlap with computation.

    Args:
        working: temporary bytes.
        prefetch: of a stage on all devices, whether there is memory to gather parameters before
            they are used; None for stages of pipelines.
    """
    cost = summed_costs(stage, assignment, working)
    return without_hidden(stage.intra, assignment, cost, prefetch)


def summed_costs(stage: StageProblem, assignment: Sequence[int], working: float) -> StageCost:
    """Return the costs of an assignment with the seconds of everything that may overlap.

    Args: as of `cost_of`.
    """
    # The last two: of PER_STEP and EVERY_SPAN.
    total = np.zeros(6)
    again = np.zeros(stage.num_spans + 2)
    always_of_per_step = 0.0

    def add(costs: CostBreakdown, at: int | tuple[int, int]) -> None:
        nonlocal always_of_per_step
        summed = (
            costs.forward,
            costs.backward,
            costs.once,
            costs.always,
            costs.saved,
            costs.segment_inputs,
        )
        total[:] += [float(x[at]) for x in summed]
        again[costs.span] += costs.again[at]
        if costs.span == PER_STEP:
            always_of_per_step += float(costs.always[at])

    for costs, k in zip(stage.choices, assignment, strict=True):
        add(costs, k)
    for index in range(len(stage.intra.parameters)):
        # The gathered copy itself stays until the parameters have new values.
        always_of_per_step -= float(stage.held_copies[index][assignment[index]])
    for costs, transfer in zip(stage.transfers, stage.intra.problem.transfers, strict=True):
        source = int(transfer.source[assignment[transfer.producer]])
        for target in {int(use.layout[assignment[use.choice]]) for use in transfer.uses}:
            add(costs, (source, target))
    forward, backward, once, always, saved, segment_inputs = map(float, total)
    of_spans = again[: stage.num_spans] + again[EVERY_SPAN]
    parameters = stage.intra.parameters
    gradients = sum(
        float(parameter.gradient_bytes[k])
        for parameter, k in zip(parameters, assignment, strict=False)
    )
    # What is made once per step is freed when the last backward is done.
    update = gradients * stage.intra.tables.optimizer.scratch - always_of_per_step
    return StageCost(
        forward,
        backward,
        once,
        always,
        saved,
        segment_inputs,
        tuple(map(float, of_spans)),
        working,
        update,
    )


# --- Spans: the runs of a stage's ops that are recomputed one by one, in the terms of its intra-op
# problem. What is done once per step is a span of its own, which is not recomputed.
#
# What passes from span to span is kept in the layout in which it is made; every span brings it to
# its uses by itself, as it does with parameters. So a value is resharded once per span and target,
# not once per stage and target.


@dataclass(frozen=True)
class RematSpans:
    """The recompute segments of a stage. `starts` are the positions among its ops at which they
    begin; the first is 0.
    """

    intra: IntraOp
    starts: Sequence[int] = (0,)

    def of_choice(self, choice: int) -> int | None:
        """Return the segment of a choice of the problem, `PER_STEP` for an op that runs once per
        step; None if the choice is no op.
        """
        op = choice - len(self.intra.parameters)
        if not 0 <= op < len(self.intra.ops):
            return None
        return PER_STEP if op in self.intra.per_step.ops else self._place(op)

    def _place(self, op: int) -> int:
        """Return the index of the recompute segment that has an op."""
        return bisect_right(self.starts, op) - 1

    def of_use(self, transfer: Transfer, use: Use) -> int:
        """Return the segment in which a value is resharded for a use: that of the op that uses it.

        For a value that leaves the stage it is its maker's, the last one for an input.
        """
        if (span := self.of_choice(use.choice)) is not None:
            return span
        is_op = self.of_choice(transfer.producer) is not None
        return (
            self._place(transfer.producer - len(self.intra.parameters))
            if is_op
            else len(self.starts) - 1
        )

    def split(self) -> IntraOp:
        """Return the problem with one transfer per value and segment; the choices stay the same."""
        intra = self.intra
        if len(self.starts) == 1 and not intra.per_step.ops:
            return intra
        transfers, layouts = [], []
        for transfer, named in zip(intra.problem.transfers, intra.transfers, strict=True):
            uses: dict[int, list[Use]] = {}
            for use in transfer.uses:
                uses.setdefault(self.of_use(transfer, use), []).append(use)
            made_in = self.of_choice(transfer.producer)
            for span, uses_of_span in sorted(uses.items()):
                piece = replace(transfer, uses=tuple(uses_of_span))
                piece_layouts = named
                if named.hidden.any() and (span != made_in or span == PER_STEP):
                    # Only a matmul of the same program is summed in chunks.
                    piece = replace(piece, cost=piece.cost + named.hidden)
                    piece_layouts = replace(named, hidden=np.zeros_like(named.hidden))
                transfers.append(piece)
                layouts.append(piece_layouts)
        return replace(
            intra,
            problem=replace(intra.problem, transfers=tuple(transfers)),
            transfers=tuple(layouts),
        )

    def crossing_bytes(self, choice: int) -> np.ndarray:
        """Return [strategy] the bytes of an op's results that other segments read.

        Args:
            choice: index of the op's choice, after those of all parameters.
        """
        intra = self.intra
        first_op = len(intra.parameters)
        span_of_choice = self.of_choice(choice)
        index = choice - first_op
        total = np.zeros(len(intra.ops[index].outputs))
        for position, value in enumerate(intra.step.ops[index].results):
            readers = (
                self.of_choice(first_op + reader)
                for reader, _ in intra.step.consumers.get(value, ())
            )
            if any(span != span_of_choice for span in readers):
                total += result_bytes(intra, index, position)
        return total


def balanced_groups(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the positions at which at most `count` runs of consecutive items begin, such that the
    heaviest run is as light as possible.
    """
    up_to = np.cumsum([0.0, *weights])
    # Weights of runs
    limits = np.unique(np.maximum(up_to[None] - up_to[:, None], max(weights, default=0.0)))
    return _greedy(
        weights,
        limits[bisect_left(limits, True, key=lambda most: len(_greedy(weights, most)) <= count)],
    )


def _greedy(weights: Sequence[float], limit: float) -> tuple[int, ...]:
    """Return the first positions of segments, each as long as its weights sum to at most `limit`,
    but with at least one weight; (0,) for no weights.
    """
    starts, total = [0], 0.0
    for position, weight in enumerate(weights):
        if total + weight > limit * (1 + 1e-12) and position > starts[-1]:
            starts.append(position)
            total = 0.0
        total += weight
    return tuple(starts)
