"""Choices that save memory on a device: results that are recomputed, results and parameters in host
memory.

`with_recompute` adds a second copy of every strategy of ops whose result is saved for backward: the
op's forward runs once more in the backward, and the saved result, in the layout in which it was
computed, costs no memory. That needs the op's operands, which its own backward saves anyway, or
which are recomputed as well. Chains of norms and pointwise ops therefore save one tensor.
`with_stored_results` adds one more copy, with the result in host memory from the forward to the
backward. It needs no operands, so it is for matmuls, too, which are expensive to recompute.

`with_offload` adds a second copy of every way to store a parameter, with its gradient and the
optimizer's state in host memory, where the optimizer steps. What is used of the parameter is
fetched over the link to the host for each use (`ParameterPlan.is_fetched`), or once per step if its
gradient is reduced once per step, and is on the device only meanwhile.
"""

import glob
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

import numpy as np

from alpa_strategy.cluster.devices import Host
from alpa_strategy.cost.flops import (
    MAY_COPY,
    PART_VIEWS,
    PLAIN_VIEWS,
    PRODUCTS,
    is_plain_view,
    is_view,
    op_base_name,
)
from alpa_strategy.errors import DoesNotFitError, OptionError, PlanError
from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.options import ParameterOptions, gathers, joined, picked
from alpa_strategy.intra_op.problem import Problem, Transfer, duplicate_strategies
from alpa_strategy.intra_op.restrict import matching
from alpa_strategy.ir.gathers import local_bytes
from alpa_strategy.ir.graph import Op, ParameterInput, StepGraph
from alpa_strategy.ir.guards import is_symbolic
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.plan import ParameterPlan
from alpa_strategy.options import SELECTIVE, PlanOptions
from alpa_strategy.sharding.redistribute import reshard_table
from alpa_strategy.sharding.strategies import is_random
from alpa_strategy.units import format_bytes

VIEWS = (PLAIN_VIEWS | PART_VIEWS) - MAY_COPY


def can_run_again(call: OpCall) -> bool:
    """Whether a second run of an op gives the same tensor, in memory of its own, for all values of
    the step's counters.

    So not for views, random ops and ops with symbolic numbers. Ops without operands or with several
    results are left out as well.
    """
    has_one_result = len(call.results) == 1 and not call.returns_tuple
    if not has_one_result or not call.operands:
        return False
    return not is_view(call) and not is_random(call) and not is_symbolic(call)


def pinned_again(step: StepGraph, options: PlanOptions) -> frozenset[str] | None:
    """Return the names of the ops that `PlanOptions.remat` pins to be recomputed, None if it has no
    names.

    Raises:
        OptionError: a name matches no op that can be recomputed.
    """
    if not isinstance(options.remat, tuple):
        return None
    pinned: set[str] = set()
    for name in options.remat:
        ops = [op for op in step.ops if _is_named(op, name)]
        names = {op.name for op in ops if can_run_again(op.call)}
        if not names:
            problem = "no op of the step"
            if ops:
                problem = "only views, random ops and ops of several results, which are kept"
            raise OptionError(
                f"remat={name!r} names {problem}",
                'name ops or modules as `alpa plan` shows them, or write "selective"',
            )
        pinned |= names
    return frozenset(pinned)


def _is_named(op: Op, pattern: str) -> bool:
    """Whether a pattern matches the op or a module around it; "selective" is all ops but matmuls,
    convolutions and attention.
    """
    if pattern == SELECTIVE:
        return op_base_name(op.call) not in PRODUCTS
    modules = accumulate(op.module.split("."), "{}.{}".format)
    return any(fnmatchcase(name, pattern) for name in (op.name, *modules))


def with_recompute(intra: IntraOp, pinned: Collection[str] | None = None) -> IntraOp:
    """Return the same problem with strategies that recompute behind the others
    (`IntraOp.recomputes`).

    Args:
        pinned: names of ops that are recomputed if they can be, while no others are; None: solved.
    """
    strategies: dict[int, np.ndarray] = {}
    seconds: dict[int, np.ndarray] = {}
    for index, op in enumerate(intra.step.ops):
        if pinned is not None and op.name not in pinned:
            continue
        recomputable = _recomputable(intra, index)
        if len(recomputable):
            strategies[index] = recomputable
            seconds[index] = intra.ops[index].forward_seconds[recomputable]

    added = _AddedStrategies.of(intra, strategies, seconds, _gather_seconds(intra))
    extended = added.extended(only=pinned is not None)
    return replace(extended, recomputes=_first_added(intra, strategies))


def _gather_seconds(intra: IntraOp) -> dict[int, np.ndarray]:
    """Return the seconds [source, target] of gathering parameters for use, by transfer: recomputing
    an op gathers them once more.
    """
    seconds: dict[int, np.ndarray] = {}
    for index, layouts in enumerate(intra.transfers):
        is_gathered = gathers(layouts.sources, layouts.targets)
        if layouts.value in intra.gathered_again and is_gathered.any():
            num_bytes = intra.step.values[layouts.value].num_bytes
            forward_seconds, _ = reshard_table(
                layouts.sources, layouts.targets, num_bytes, False, intra.mesh
            )
            seconds[index] = np.where(is_gathered, forward_seconds, 0.0)
    return seconds


def _views(intra: IntraOp, ops: Collection[int]) -> dict[int, np.ndarray]:
    """Return op -> all of its strategies, for views of results of `ops` and views of such views.

    Views of re-gathered values (`IntraOp.gathered_again`) are left out.
    """
    views: dict[int, np.ndarray] = {}
    for index, op in enumerate(intra.step.ops):
        if op_base_name(op.call) in VIEWS and op.operands[0] not in intra.gathered_again:
            maker = intra.step.makers.get(op.operands[0], -1)
            if maker in ops or maker in views:
                views[index] = np.arange(len(intra.ops[index].strategies))
    return views


def _is_saved(intra: IntraOp, value: int) -> bool:
    """Whether some op saves a value, or a view of it, for its backward."""
    if intra.savers(value):
        return True
    readers = {op for op, _ in intra.step.consumers.get(value, ())}
    for reader in readers:
        op = intra.step.ops[reader]
        is_view_of_value = op_base_name(op.call) in VIEWS
        if is_view_of_value and any(_is_saved(intra, view) for view in op.results):
            return True
    return False


def with_stored_results(intra: IntraOp, host: Host) -> IntraOp:
    """Return the same problem with strategies whose result waits in host memory behind the others
    (`IntraOp.stores`).

    A result costs bytes / link_bandwidth to store, and as much to fetch. Nothing of that is
    expected to overlap with compute.
    """
    strategies: dict[int, np.ndarray] = {}
    seconds: dict[int, np.ndarray] = {}
    for index in range(len(intra.ops)):
        storable = _storable(intra, index)
        if len(storable):
            strategies[index] = storable
            seconds[index] = 2 / host.link_bandwidth * result_bytes(intra, index)[storable]

    added = _AddedStrategies.of(intra, strategies, seconds, {})
    return replace(added.extended(), stores=_first_added(intra, strategies))


def _first_added(intra: IntraOp, ops: Iterable[int]) -> dict[int, int]:
    """Return the position of the first copied strategy of each op: they stand behind its own."""
    return {index: len(intra.ops[index].strategies) for index in ops}


def result_bytes(intra: IntraOp, index: int, position: int = 0) -> np.ndarray:
    """Return [strategy] the bytes of result `position` of op number `index` on one device."""
    meta = intra.step.values[intra.step.ops[index].results[position]]
    num_bytes = [
        local_bytes(meta, outputs[position], intra.mesh.shape)
        for outputs in intra.ops[index].outputs
    ]
    return np.array(num_bytes, dtype=float)


@dataclass(frozen=True)
class _AddedStrategies:
    """Second copies of strategies of ops, behind the first ones, whose results are not saved for
    backward on the device.
    """

    intra: IntraOp
    # Of each op, the strategies that are copied, and the seconds that each copy takes in addition.
    strategies: Mapping[int, np.ndarray]
    seconds: Mapping[int, np.ndarray]
    # Choices of ops that are views of results of the others.
    view_choices: frozenset[int]
    # Of each transfer, seconds [source, target] that the copies pay for its value as well.
    gather_seconds: Mapping[int, np.ndarray]

    @classmethod
    def of(
        cls,
        intra: IntraOp,
        strategies: Mapping[int, np.ndarray],
        seconds: Mapping[int, np.ndarray],
        gather_seconds: Mapping[int, np.ndarray],
    ) -> "_AddedStrategies":
        """Return copies of `strategies`, and of all strategies of views of their results.

        Args:
            strategies: op index -> the strategies that are copied.
            seconds: op index -> [copy] seconds that a copy takes in addition.
            gather_seconds: index of a transfer -> [source, target] seconds that copies pay for its
                value in addition.
        """
        views = _views(intra, strategies)
        view_seconds = {index: np.zeros(len(copied)) for index, copied in views.items()}
        offset = len(intra.parameters)
        return cls(
            intra,
            {**strategies, **views},
            {**seconds, **view_seconds},
            frozenset(offset + index for index in views),
            gather_seconds,
        )

    @cached_property
    def _choices(self) -> dict[int, np.ndarray]:
        """Copied strategies by choice of the problem."""
        offset = len(self.intra.parameters)
        return {offset + index: copied for index, copied in self.strategies.items()}

    @cached_property
    def _more_seconds(self) -> dict[int, np.ndarray]:
        """Additional seconds of the copies by choice of the problem."""
        offset = len(self.intra.parameters)
        return {offset + index: seconds for index, seconds in self.seconds.items()}

    @cached_property
    def _column_seconds(self) -> dict[int, np.ndarray | float]:
        """Return index of a transfer whose copied uses have columns of their own -> the seconds
        that these take in addition.

        A view of a saved result cannot be a view of one that is not saved: inf.
        """
        seconds: dict[int, np.ndarray | float] = {**self.gather_seconds}
        for index, transfer in enumerate(self.intra.problem.transfers):
            if any(use.choice in self.view_choices for use in transfer.uses):
                seconds[index] = np.inf
        return seconds

    def extended(self, only: bool = False) -> IntraOp:
        """Return the problem with the copies in it.

        Args:
            only: the copies take the place of the first strategies.
        """
        intra = self.intra
        ops = list(intra.ops)
        for index, copied in self.strategies.items():
            options = picked(ops[index], copied)
            compute_seconds = options.compute_seconds + self.seconds[index]
            ops[index] = joined(ops[index], replace(options, compute_seconds=compute_seconds))

        transfers = list(intra.transfers)
        for index, layouts in enumerate(intra.transfers):
            num_rows = 2 if intra.problem.transfers[index].producer in self._choices else 1
            num_columns = 2 if index in self._column_seconds else 1
            hidden = np.tile(layouts.hidden, (1, num_columns))
            if num_rows == 2:
                # A result that is not saved is not summed in chunks.
                hidden = np.vstack([hidden, np.zeros_like(hidden)])
            transfers[index] = replace(
                layouts,
                sources=layouts.sources * num_rows,
                targets=layouts.targets * num_columns,
                hidden=hidden,
                hidden_in_backward=np.tile(layouts.hidden_in_backward, (num_rows, num_columns)),
            )

        unrestricted = intra.unrestricted
        if unrestricted is not None:
            unrestricted = self._extended_problem(unrestricted, only=False)
        return replace(
            intra,
            ops=tuple(ops),
            transfers=tuple(transfers),
            problem=self._extended_problem(intra.problem, only),
            unrestricted=unrestricted,
        )

    def _extended_problem(self, problem: Problem, only: bool) -> Problem:
        """Return `problem` with the copies.

        Results of copies have rows of their own in transfers: in the backward they are not there
        as they were computed. Uses by copies have columns of their own where `_column_seconds` has
        the transfer. A transfer then costs

            from                        to first strategies    to copies, with own columns
            a result that is saved      cost                   cost + column seconds
            one that is not             cost + hidden          the same, but to a copied view: 0 in
                                                               the layout of the result, else inf

        Args:
            only: as of `duplicate_strategies`.
        """
        extended = duplicate_strategies(problem, self._choices, self._more_seconds, only=only)
        transfers = []
        for index, transfer in enumerate(problem.transfers):
            longer = extended.transfers[index]
            transfers.append(self._extended_transfer(index, transfer, longer))
        return replace(extended, transfers=tuple(transfers))

    def _extended_transfer(self, index: int, transfer: Transfer, longer: Transfer) -> Transfer:
        """Return transfer number `index` with rows and columns for the copies.

        Args:
            transfer: without copies.
            longer: with the copies' layouts, which share the rows and columns of the first ones.
        """
        num_rows, num_columns = transfer.cost.shape
        has_columns = index in self._column_seconds
        # [source, target]
        cost = transfer.cost
        memory = transfer.memory
        hidden = self.intra.transfers[index].hidden
        is_same_layout = self.intra.transfers[index].equal
        is_source_layout = is_same_layout

        uses = list(longer.uses)
        if has_columns:
            cost = np.hstack([cost, cost + self._column_seconds[index]])
            memory = np.tile(memory, (1, 2))
            is_same_layout = np.tile(is_same_layout, (1, 2))
            for place, use in enumerate(transfer.uses):
                if index in self.gather_seconds or use.choice in self.view_choices:
                    layout = uses[place].layout
                    is_copy = np.arange(len(layout)) >= len(use.layout)
                    uses[place] = replace(use, layout=layout + num_columns * is_copy)

        source = longer.source
        if transfer.producer in self._choices:
            is_copy = np.arange(len(source)) >= len(transfer.source)
            source = source + num_rows * is_copy
            copied_cost = cost + np.tile(hidden, (1, cost.shape[1] // num_columns))
            if has_columns and index not in self.gather_seconds:
                copied_cost[:, num_columns:] = np.where(is_source_layout, 0.0, np.inf)
            cost = np.vstack([cost, copied_cost])
            memory = np.vstack([memory, np.where(is_same_layout, 0.0, memory)])
        return replace(longer, source=source, uses=tuple(uses), cost=cost, memory=memory)


def recomputed(intra: IntraOp, assignment: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the ops whose strategy recomputes, and does not store the result in host
    memory.
    """
    offloaded = stored(intra, assignment)
    names = []
    for index in _added_in(intra, intra.recomputes, assignment):
        if index not in offloaded:
            names.append(intra.step.ops[index].name)
    return tuple(names)


def stored(intra: IntraOp, assignment: Sequence[int]) -> tuple[int, ...]:
    """Return the ops whose result waits in host memory."""
    return _added_in(intra, intra.stores, assignment)


def _added_in(
    intra: IntraOp, first_added: Mapping[int, int], assignment: Sequence[int]
) -> tuple[int, ...]:
    """Return the ops whose strategy in `assignment` is one of those added from `first_added` on."""
    offset = len(intra.parameters)
    return tuple(
        index for index, first in first_added.items() if assignment[offset + index] >= first
    )


def _recomputable(intra: IntraOp, index: int) -> np.ndarray:
    """Return the strategies of op number `index` that can be recomputed: its operands are there in
    the backward.
    """
    step = intra.step
    strategies = _plain(intra, index)
    inputs = {stored_input.value for stored_input in (*step.parameters, *step.constant_inputs)}
    saved = intra.ops[index].saved.operands
    for value, is_saved in zip(step.ops[index].operands, saved, strict=True):
        if not is_saved and value not in inputs:
            return strategies[:0]
    return strategies


def _storable(intra: IntraOp, index: int) -> np.ndarray:
    """Return the strategies of op number `index` whose result may wait in host memory: those of
    `_plain` that do not recompute it; none if a result is no floating-point tensor.
    """
    results = intra.step.ops[index].call.results
    if not all(meta.dtype.is_floating_point for meta in results):
        return np.array([], dtype=int)
    return _plain(intra, index)[: intra.recomputes.get(index)]


def _plain(intra: IntraOp, index: int) -> np.ndarray:
    """Return the strategies under which op number `index` is called as it is and can run a second
    time.

    There are none if it runs once per step, if no other op saves its result, or if its own backward
    saves it.
    """
    op = intra.step.ops[index]
    options = intra.ops[index]
    is_repeatable = can_run_again(op.call) and index not in intra.per_step.ops
    if not is_repeatable or options.saved.results[0] or not _is_saved(intra, op.results[0]):
        return np.array([], dtype=int)
    plain = []
    for k, axis_strategies in enumerate(options.strategies):
        if all(strategy.implementation is None for strategy in axis_strategies):
            plain.append(k)
    return np.array(plain, dtype=int)


# --- Parameters in host memory.


def can_be_offloaded(parameter: ParameterInput) -> bool:
    """Whether a parameter has elements that a device computes with."""
    return parameter.meta.dtype.is_floating_point and parameter.meta.num_elements > 0


def pinned_offload(
    step: StepGraph, options: PlanOptions, host: Host | None
) -> frozenset[str] | None:
    """Return the names of the parameters that `PlanOptions.offload` pins to host memory, None if
    that is solved; empty for `offload=False`, all that can be there for True.

    Raises:
        OptionError: a name matches no parameter.
        PlanError: some are pinned, and the cluster has no `host`.
    """
    if options.offload and host is None:
        raise PlanError(
            f"offload={options.offload!r}, and the cluster has no way to host memory",
            "write `host:` with link_bandwidth, memory_bytes and memory_bandwidth into its file",
        )
    if options.offload is None or options.offload is False:
        return None if options.offload is None else frozenset()
    if options.offload is True:
        return frozenset(p.name for p in step.parameters if can_be_offloaded(p))
    names = {alias: p.name for p in step.parameters for alias in p.names}
    pinned: set[str] = set()
    for pattern in options.offload:
        pinned.update(matching(pattern, names, "offload"))
    return frozenset(pinned)


def offload_of(plans: Mapping[str, ParameterPlan]) -> bool | tuple[str, ...]:
    """Return `PlanOptions.offload` for a step that is planned around parameters with `plans`."""
    names = tuple(glob.escape(name) for name, plan in plans.items() if plan.on_host)
    return names or False


def with_offload(intra: IntraOp, pinned: Collection[str] | None = None) -> IntraOp:
    """Return the same problem with options that store parameters in host memory behind the others.

    Args:
        pinned: names of the parameters that are stored there, while no others are, if they can be;
            None: solved.
    """
    parameters = list(intra.parameters)
    # By parameter: the options that are copied, and what the copies cost.
    copied: dict[int, np.ndarray] = {}
    more_seconds: dict[int, np.ndarray] = {}
    num_bytes: dict[int, np.ndarray] = {}
    for index, parameter in enumerate(intra.step.parameters):
        is_pinned = pinned is None or parameter.name in pinned
        if not is_pinned or not can_be_offloaded(parameter):
            continue
        options = intra.parameters[index]
        on_host = _host_options(intra, parameter)
        device_plans = [replace(plan, on_host=False) for plan in on_host.plans]
        copied[index] = np.array([options.plans.index(plan) for plan in device_plans])
        more_seconds[index] = on_host.seconds - options.seconds[copied[index]]
        num_bytes[index] = on_host.num_bytes
        parameters[index] = joined(options, on_host)

    def extended(problem: Problem, only: bool) -> Problem:
        return duplicate_strategies(problem, copied, more_seconds, num_bytes, only=only)

    unrestricted = intra.unrestricted
    if unrestricted is not None:
        unrestricted = extended(unrestricted, only=False)
    return replace(
        intra,
        parameters=tuple(parameters),
        problem=extended(intra.problem, only=pinned is not None),
        unrestricted=unrestricted,
    )


def _host_options(intra: IntraOp, parameter: ParameterInput) -> ParameterOptions:
    """Return the options of a parameter in host memory, with the seconds of fetching it and of
    returning its gradient.
    """
    options = intra.tables.parameter(parameter, intra.step, on_host=True)
    consumers = intra.step.consumers.get(parameter.value, ())
    has_views = any(is_plain_view(intra.step.ops[op].call) for op, _ in consumers)
    # It is fetched once more for the backward if some op's backward reads it.
    backward_seconds = options.return_seconds
    if has_views or intra.savers(parameter.value):
        backward_seconds = options.fetch_seconds + options.return_seconds
    return replace(
        options,
        seconds=options.seconds + options.fetch_seconds + backward_seconds,
        backward_seconds=backward_seconds,
    )


def with_host_price(intra: IntraOp, price: float) -> IntraOp:
    """Return the same problem with `price` seconds per byte of host memory in its objective."""
    seconds: dict[int, np.ndarray] = {}
    for index, options in enumerate(intra.parameters):
        seconds[index] = price * options.host_bytes
    for op, first in intra.stores.items():
        num_bytes = result_bytes(intra, op)
        num_bytes[:first] = 0
        seconds[len(intra.parameters) + op] = price * num_bytes
    return intra.with_costs(seconds)


def host_bytes(intra: IntraOp, assignment: Sequence[int]) -> float:
    """Return the bytes of host memory that a device's parameters and results need."""
    total = sum(_stored_bytes(intra, assignment))
    for options, k in zip(intra.parameters, assignment, strict=False):
        total += float(options.host_bytes[k])
    return total


def check_host(intra: IntraOp, assignment: Sequence[int]) -> None:
    """Check that what is pinned to host memory fits there.

    Raises:
        DoesNotFitError: it needs more than a device's share of its node's host memory.
    """
    need, host = host_bytes(intra, assignment), intra.mesh.host
    if host is not None and need > host.memory_bytes:
        raise DoesNotFitError(
            f"what offload= puts into host memory needs {format_bytes(need)} of a device's share,"
            f" {format_bytes(host.memory_bytes)}",
            'name fewer parameters in offload=, leave it out, or add parallel="zero3", under which'
            " a device stores shards",
        )


def _stored_bytes(intra: IntraOp, assignment: Sequence[int]) -> list[float]:
    """Return the bytes of each result that waits in host memory."""
    offset = len(intra.parameters)
    return [
        float(result_bytes(intra, index)[assignment[offset + index]])
        for index in stored(intra, assignment)
    ]


def fetched_bytes(intra: IntraOp, assignment: Sequence[int]) -> float:
    """Return the most bytes that a device needs at once for what is fetched from host memory.

    That is copies of parameters, or their gradients, between their first and last use; the next
    one, which is being fetched; and one that is being returned.
    """
    bytes_at_op = np.zeros(len(intra.step.ops) + 1)
    largest = 0
    for index, parameter in enumerate(intra.step.parameters):
        options = intra.parameters[index]
        k = assignment[index]
        uses = [op for op, _ in intra.step.consumers.get(parameter.value, ())]
        if options.plans[k].is_fetched and uses:
            num_bytes = local_bytes(parameter.meta, options.sources[k], intra.mesh.shape)
            bytes_at_op[min(uses) : max(uses) + 1] += num_bytes
            largest = max(largest, num_bytes)
    return float(bytes_at_op.max()) + 2 * max(largest, *_stored_bytes(intra, assignment), 0)
