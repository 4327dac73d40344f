"""What a device need not keep: results that are made again, results and parameters that lie in host
memory.

`with_recompute` gives ops whose result others keep for their backward every strategy a second time:
its forward runs once more in the backward, and what consumers keep of the result in the layout in
which it was made costs no memory. It needs the op's operands, which the op's own backward keeps
anyway, or which are recomputed as well. So chains of norms and pointwise ops keep one tensor.
`with_stored_results` gives them once more, with the result in host memory from the forward to the
backward. That needs no operands, so products may go there, which take long to be made again.

`with_offload` gives parameters every way to be stored a second time, with their gradients and the
optimizer's state in host memory, where the optimizer steps. What is used of one comes over the link
to the host for each use (`ParameterPlan.is_fetched`), or once per step where its gradient is
reduced so, and is on the device only meanwhile.
"""

import glob
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
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
from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.options import gathers, joined, local_bytes, picked
from alpa_strategy.intra_op.problem import Problem, duplicate_strategies
from alpa_strategy.intra_op.restrict import matching
from alpa_strategy.ir.graph import Op, ParameterInput, StepGraph
from alpa_strategy.ir.guards import is_symbolic
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.plan import ParameterPlan
from alpa_strategy.options import SELECTIVE, PlanOptions
from alpa_strategy.sharding.redistribute import reshard_table
from alpa_strategy.sharding.strategies import is_random

VIEWS = (PLAIN_VIEWS | PART_VIEWS) - MAY_COPY


def can_run_again(call: OpCall) -> bool:
    """Whether a second run gives the same tensor, memory of its own, whatever the step's counters
    are.
    """
    one = len(call.results) == 1 and not call.returns_tuple and bool(call.operands)
    return one and not is_view(call) and not is_random(call) and not is_symbolic(call)


def pinned_again(step: StepGraph, options: PlanOptions) -> frozenset[str] | None:
    """Names of the ops that `PlanOptions.remat` wants to be made again, None where it names none.

    Raises:
        OptionError: a name of it is that of no op that could be.
    """
    if not isinstance(options.remat, tuple):
        return None
    found: set[str] = set()
    able = [op for op in step.ops if can_run_again(op.call)]
    for name in options.remat:
        own = {op.name for op in able if _is_named(op, name)}
        if not own:
            has = any(_is_named(op, name) for op in step.ops)
            what = (
                "only views, random ops and ops of several results, which are kept"
                if has
                else "no op of the step"
            )
            raise OptionError(
                f"remat={name!r} names {what}",
                'name ops or modules as `alpa plan` shows them, or write "selective"',
            )
        found |= own
    return frozenset(found)


def _is_named(op: Op, name: str) -> bool:
    """Whether a pattern names the op or a module around it; "selective" all but products,
    convolutions, attention.
    """
    if name == SELECTIVE:
        return op_base_name(op.call) not in PRODUCTS
    modules = accumulate(op.module.split("."), "{}.{}".format)
    return any(fnmatchcase(own, name) for own in (op.name, *modules))


def with_recompute(intra: IntraOp, pinned: Collection[str] | None = None) -> IntraOp:
    """The same choices and transfers with strategies that recompute behind those that keep
    (`IntraOp.recomputes`).

    Args:
        pinned: names of ops that are made again wherever they can be, and no others are; None:
            solved.
    """
    wanted = (i for i, op in enumerate(intra.step.ops) if pinned is None or op.name in pinned)
    again = {i: which for i in wanted if len(which := _again(intra, i))}
    seconds = {i: intra.ops[i].forward_seconds[which] for i, which in again.items()}
    firsts = {i: len(intra.ops[i].strategies) for i in again}
    return replace(
        _extended(intra, again, seconds, _gatherings(intra), pinned is not None), recomputes=firsts
    )


def _gatherings(intra: IntraOp) -> dict[int, np.ndarray]:
    """Transfer of a parameter -> [source, target] seconds of gathering it for use: a second run
    does so once more.
    """
    found = {}
    for index, each in enumerate(intra.transfers):
        gathered, meta = gathers(each.sources, each.targets), intra.step.values[each.value]
        if each.value in intra.gathered_again and gathered.any():
            forward, _ = reshard_table(
                each.sources, each.targets, meta.num_bytes, False, intra.mesh
            )
            found[index] = np.where(gathered, forward, 0.0)
    return found


def _views(intra: IntraOp, ops: Collection[int]) -> dict[int, np.ndarray]:
    """The views of results of `ops`, and of such views -> all of their strategies."""
    found: dict[int, np.ndarray] = {}
    for i, op in enumerate(intra.step.ops):
        if op_base_name(op.call) in VIEWS and op.operands[0] not in intra.gathered_again:
            maker = intra.step.makers.get(op.operands[0], -1)
            if maker in ops or maker in found:
                found[i] = np.arange(len(intra.ops[i].strategies))
    return found


def _is_kept(intra: IntraOp, value: int) -> bool:
    """Whether some op's backward keeps a value, or a view of it."""
    readers = {op: intra.step.ops[op] for op, _ in intra.step.consumers.get(value, ())}
    views = (op.results for op in readers.values() if op_base_name(op.call) in VIEWS)
    return bool(intra.savers(value)) or any(
        _is_kept(intra, view) for results in views for view in results
    )


def with_stored_results(intra: IntraOp, host: Host) -> IntraOp:
    """The same with strategies whose result waits in host memory behind the others
    (`IntraOp.stores`).

    On its way there and back it costs its bytes / link_bandwidth; nothing of that is taken to be
    hidden.
    """
    stored = {i: which for i in range(len(intra.ops)) if len(which := _storable(intra, i))}
    seconds = {
        i: 2 / host.link_bandwidth * result_bytes(intra, i)[which] for i, which in stored.items()
    }
    return replace(
        _extended(intra, stored, seconds, {}),
        stores={i: len(intra.ops[i].strategies) for i in stored},
    )


def result_bytes(intra: IntraOp, index: int, position: int = 0) -> np.ndarray:
    """Bytes of one of an op's results on a device, by strategy."""
    meta, outputs = (
        intra.step.values[intra.step.ops[index].results[position]],
        intra.ops[index].outputs,
    )
    return np.array(
        [local_bytes(meta, made[position], intra.mesh.shape) for made in outputs], dtype=float
    )


def _extended(
    intra: IntraOp,
    more: Mapping[int, np.ndarray],
    seconds: Mapping[int, np.ndarray],
    gathered: Mapping[int, np.ndarray],
    only: bool = False,
) -> IntraOp:
    """Ops' strategies `more` (op -> which) once more, for so many `seconds` each, with no result,
    or view, kept.

    gathered: transfer -> [source, target] seconds that its value costs them as well. only: instead
    of an op's others.
    """
    ops, offset, views = list(intra.ops), len(intra.parameters), _views(intra, more)
    more, seconds = (
        {**more, **views},
        {**seconds, **{i: np.zeros(len(which)) for i, which in views.items()}},
    )
    for i, which in more.items():
        added = picked(ops[i], which)
        ops[i] = joined(ops[i], replace(added, compute_seconds=added.compute_seconds + seconds[i]))
    again, extra = ({offset + i: each for i, each in given.items()} for given in (more, seconds))
    seen = {offset + i for i in views}
    # What they ask for in columns of their own -> what these cost more: a view of what is kept is
    # none that is not.
    wide: dict[int, np.ndarray | float] = {**gathered}
    uses = (
        (index, use)
        for index, transfer in enumerate(intra.problem.transfers)
        for use in transfer.uses
    )
    wide.update((index, np.inf) for index, use in uses if use.choice in seen)

    def longer(problem: Problem, only: bool) -> Problem:
        """Results get rows of their own in transfers: they are not there in the backward as they
        were made.

        What a transfer costs then:     for first strategies    for second ones, where it is in `wide`
        from a result that is kept      cost                    cost + wide
        from one that is not            cost                    same, but of a view: 0 as it was made, else inf
        """
        found = duplicate_strategies(problem, again, extra, only=only)
        transfers = list(found.transfers)
        for index, (given, named) in enumerate(
            zip(problem.transfers, intra.transfers, strict=True)
        ):
            own, (rows, columns) = transfers[index], given.cost.shape
            cost, memory, equal = given.cost, given.memory, named.equal  # [source, target]
            source, uses = own.source, list(own.uses)
            if index in wide:
                cost, memory, equal = (
                    np.hstack([cost, cost + wide[index]]),
                    *np.tile([memory, equal], (1, 1, 2)),
                )
                for place, use in enumerate(given.uses):
                    if index in gathered or use.choice in seen:
                        behind = np.arange(len(uses[place].layout)) >= len(use.layout)
                        uses[place] = replace(use, layout=uses[place].layout + columns * behind)
            if given.producer in again:
                source = source + rows * (np.arange(len(source)) >= len(given.source))
                made = cost.copy()
                if index in wide and index not in gathered:
                    made[:, columns:] = np.where(named.equal, 0.0, np.inf)
                cost, memory = (
                    np.vstack([cost, made]),
                    np.vstack([memory, np.where(equal, 0.0, memory)]),
                )
            transfers[index] = replace(
                own, source=source, uses=tuple(uses), cost=cost, memory=memory
            )
        return replace(found, transfers=tuple(transfers))

    transfers = list(intra.transfers)
    for index, (each, transfer) in enumerate(
        zip(intra.transfers, intra.problem.transfers, strict=True)
    ):
        rows, columns = 1 + (transfer.producer in again), 1 + (index in wide)
        hidden = np.tile(each.hidden, (rows, columns))
        transfers[index] = replace(
            each, sources=each.sources * rows, targets=each.targets * columns, hidden=hidden
        )
    problem, free = (
        longer(intra.problem, only),
        intra.unrestricted and longer(intra.unrestricted, False),
    )
    return replace(
        intra, ops=tuple(ops), transfers=tuple(transfers), problem=problem, unrestricted=free
    )


def recomputed(intra: IntraOp, assignment: Sequence[int]) -> tuple[str, ...]:
    """Names of the ops whose strategy is one that recomputes."""
    sent = stored(intra, assignment)
    return tuple(
        intra.step.ops[i].name for i in _taken(intra, intra.recomputes, assignment) if i not in sent
    )


def stored(intra: IntraOp, assignment: Sequence[int]) -> tuple[int, ...]:
    """The ops whose result waits in host memory."""
    return _taken(intra, intra.stores, assignment)


def _taken(intra: IntraOp, firsts: Mapping[int, int], assignment: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i, first in firsts.items() if assignment[len(intra.parameters) + i] >= first)


def _again(intra: IntraOp, index: int) -> np.ndarray:
    """The strategies of an op that may be had with a second run."""
    op, plain = intra.step.ops[index], _plain(intra, index)
    here = {given.value for given in (*intra.step.parameters, *intra.step.constant_inputs)}
    operands = zip(op.operands, intra.ops[index].saved.operands, strict=True)
    return plain if all(keeps or value in here for value, keeps in operands) else plain[:0]


def _storable(intra: IntraOp, index: int) -> np.ndarray:
    """The strategies of an op whose result may wait in host memory: those that keep it."""
    is_float = all(meta.dtype.is_floating_point for meta in intra.step.ops[index].call.results)
    return _plain(intra, index)[: intra.recomputes.get(index) if is_float else 0]


def _plain(intra: IntraOp, index: int) -> np.ndarray:
    """Strategies of an op that is called as it is and can run again; none where no op, or itself,
    keeps its result.
    """
    op, options = intra.step.ops[index], intra.ops[index]
    is_able = can_run_again(op.call) and index not in intra.per_step.ops
    is_kept = is_able and not options.saved.results[0] and _is_kept(intra, op.results[0])
    strategies = options.strategies if is_kept else ()
    return np.array(
        [k for k, each in enumerate(strategies) if all(s.implementation is None for s in each)],
        dtype=int,
    )


# --- Parameters in host memory.


def can_be_offloaded(given: ParameterInput) -> bool:
    """Whether there is anything of it to be fetched that a device computes with."""
    return given.meta.dtype.is_floating_point and given.meta.num_elements > 0


def pinned_offload(
    step: StepGraph, options: PlanOptions, host: Host | None
) -> frozenset[str] | None:
    """Names of the parameters that `PlanOptions.offload` wants in host memory, None where that is
    solved.

    Raises:
        OptionError: a name of it is that of no parameter. PlanError: there is no `host`.
    """
    if options.offload and host is None:
        raise PlanError(
            f"offload={options.offload!r}, and the cluster has no way to host memory",
            "write `host:` with link_bandwidth, memory_bytes and memory_bandwidth into its file",
        )
    if options.offload is None:
        return None
    if isinstance(options.offload, bool):
        return frozenset(p.name for p in step.parameters if options.offload and can_be_offloaded(p))
    names = {alias: p.name for p in step.parameters for alias in p.names}
    return frozenset(
        name for pattern in options.offload for name in matching(pattern, names, "offload")
    )


def offload_of(plans: Mapping[str, ParameterPlan]) -> bool | tuple[str, ...]:
    """`PlanOptions.offload` for a step that is planned around parameters that lie so already."""
    return tuple(glob.escape(name) for name, plan in plans.items() if plan.on_host) or False


def with_offload(intra: IntraOp, pinned: Collection[str] | None = None) -> IntraOp:
    """The same problem with the ways that store parameters in host memory behind the others.

    Args:
        pinned: names of those that lie there, and no others do; None: solved.
    """
    parameters = list(intra.parameters)
    twins, seconds, num_bytes = (dict[int, np.ndarray]() for _ in range(3))
    for index, (given, own) in enumerate(zip(intra.step.parameters, intra.parameters, strict=True)):
        if can_be_offloaded(given) and (pinned is None or given.name in pinned):
            host = intra.tables.parameter(given, intra.step, on_host=True)
            # Fetched once more where some op's backward needs it.
            views = (
                is_plain_view(intra.step.ops[op].call)
                for op, _ in intra.step.consumers.get(given.value, ())
            )
            again = 1.0 if intra.savers(given.value) or any(views) else 0.0
            backward = again * host.fetch_seconds + host.return_seconds
            host = replace(
                host,
                seconds=host.seconds + host.fetch_seconds + backward,
                backward_seconds=backward,
            )
            parameters[index] = joined(own, host)
            twins[index] = np.array(
                [own.plans.index(replace(plan, on_host=False)) for plan in host.plans]
            )
            seconds[index], num_bytes[index] = (
                host.seconds - own.seconds[twins[index]],
                host.num_bytes,
            )
    return replace(
        intra,
        parameters=tuple(parameters),
        problem=duplicate_strategies(
            intra.problem, twins, seconds, num_bytes, only=pinned is not None
        ),
        unrestricted=intra.unrestricted
        and duplicate_strategies(intra.unrestricted, twins, seconds, num_bytes),
    )


def with_host_price(intra: IntraOp, price: float) -> IntraOp:
    """The same with so many seconds a byte of host memory added to what is minimised."""
    more = {index: price * own.host_bytes for index, own in enumerate(intra.parameters)}
    for op, first in intra.stores.items():
        num_bytes = result_bytes(intra, op)
        num_bytes[:first] = 0
        more[len(intra.parameters) + op] = price * num_bytes
    return intra.with_costs(more)


def host_bytes(intra: IntraOp, assignment: Sequence[int]) -> float:
    """Bytes of host memory that a device's parameters and results take."""
    parameters = sum(
        float(o.host_bytes[k]) for o, k in zip(intra.parameters, assignment, strict=False)
    )
    return parameters + sum(_stored_bytes(intra, assignment))


def _stored_bytes(intra: IntraOp, assignment: Sequence[int]) -> list[float]:
    """Of each result that waits in host memory."""
    return [
        float(result_bytes(intra, i)[assignment[len(intra.parameters) + i]])
        for i in stored(intra, assignment)
    ]


def fetched_bytes(intra: IntraOp, assignment: Sequence[int]) -> float:
    """Most bytes at once of copies from the host, or of their gradients: those between their first
    and last use, the
    next, which is on its way, and one that is on its way back."""
    alive = np.zeros(len(intra.step.ops) + 1)
    largest = 0
    for given, options, k in zip(intra.step.parameters, intra.parameters, assignment, strict=False):
        uses = [op for op, _ in intra.step.consumers.get(given.value, ())]
        if options.plans[k].is_fetched and uses:
            num_bytes = local_bytes(given.meta, options.sources[k], intra.mesh.shape)
            alive[min(uses) : max(uses) + 1] += num_bytes
            largest = max(largest, num_bytes)
    return float(alive.max()) + 2 * max(largest, *_stored_bytes(intra, assignment), 0)
