"""Keep, recompute or offload: each op's result that others keep for their backward, decided with its layout.

`with_recompute` gives such ops every strategy a second time: its forward runs once more in the backward, and what
consumers keep of the result in the layout in which it was made costs no memory. It needs the op's operands, which the
op's own backward keeps anyway, or which are recomputed as well. So chains of norms and pointwise ops keep one tensor.
`with_stored_results` gives them once more, with the result in host memory from the forward to the backward. That needs
no operands, so products may go there, which take long to be made again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from alpa_strategy.cluster.spec import Host
from alpa_strategy.cost.flops import PRODUCTS, is_view, op_base_name
from alpa_strategy.errors import OptionError
from alpa_strategy.intra_op.build import IntraOp, TransferLayouts
from alpa_strategy.intra_op.options import joined, local_bytes, picked
from alpa_strategy.intra_op.problem import Problem, Transfer, repeated
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.guards import is_symbolic
from alpa_strategy.ir.op import OpCall
from alpa_strategy.options import SELECTIVE, PlanOptions
from alpa_strategy.sharding.strategies import is_random


def can_run_again(call: OpCall) -> bool:
    """Whether a second run gives the same tensor, memory of its own, whatever the step's counters are."""
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
            what = "only views, random ops and ops of several results, which are kept" if has else "no op of the step"
            raise OptionError(
                f"remat={name!r} names {what}", 'name ops or modules as `alpa plan` shows them, or write "selective"'
            )
        found |= own
    return frozenset(found)


def _is_named(op: Op, name: str) -> bool:
    """Whether a pattern names the op or a module around it; "selective" all but products, convolutions, attention."""
    if name == SELECTIVE:
        return op_base_name(op.call) not in PRODUCTS
    parts = op.module.split(".")
    return any(fnmatchcase(own, name) for own in (op.name, *(".".join(parts[: i + 1]) for i in range(len(parts)))))


def with_recompute(intra: IntraOp, pinned: Collection[str] | None = None) -> IntraOp:
    """The same choices and transfers with strategies that recompute behind those that keep (`IntraOp.recomputes`).

    Args:
        pinned: names of ops that are made again wherever they can be, and no others are; None: solved.
    """
    again = {i: _again(intra, i) for i, op in enumerate(intra.step.ops) if pinned is None or op.name in pinned}
    seconds = {i: intra.ops[i].forward_seconds[which] for i, which in again.items()}
    return replace(_extended(intra, again, seconds, pinned is not None), recomputes=_firsts(intra, again))


def with_stored_results(intra: IntraOp, host: Host) -> IntraOp:
    """The same with strategies whose result waits in host memory behind the others (`IntraOp.stores`).

    On its way there and back it costs its bytes / link_bandwidth; nothing of that is taken to be hidden.
    """
    stored = {i: _storable(intra, i) for i in range(len(intra.ops))}
    seconds = {i: 2 / host.link_bandwidth * result_bytes(intra, i)[which] for i, which in stored.items()}
    return replace(_extended(intra, stored, seconds), stores=_firsts(intra, stored))


def result_bytes(intra: IntraOp, index: int, position: int = 0) -> np.ndarray:
    """Bytes of one of an op's results on a device, by strategy."""
    meta, outputs = intra.step.values[intra.step.ops[index].results[position]], intra.ops[index].outputs
    return np.array([local_bytes(meta, made[position], intra.mesh.shape) for made in outputs], dtype=float)


def _firsts(intra: IntraOp, more: Mapping[int, np.ndarray]) -> dict[int, int]:
    """Op -> the index that the first of its added strategies gets."""
    return {i: len(intra.ops[i].strategies) for i, which in more.items() if len(which)}


def _extended(
    intra: IntraOp, more: Mapping[int, np.ndarray], seconds: Mapping[int, np.ndarray], only: bool = False
) -> IntraOp:
    """Ops' strategies `more` (op -> which) once more, for so many `seconds` each, with nothing kept of the result.

    only: an op that has them has no others.
    """
    offset = len(intra.parameters)
    again = {offset + i: which for i, which in more.items() if len(which)}
    extra = {offset + i: each for i, each in seconds.items()}
    ops = list(intra.ops)
    for i, which in ((i, which) for i, which in more.items() if len(which)):
        added = picked(ops[i], which)
        ops[i] = joined(ops[i], replace(added, compute_seconds=added.compute_seconds + seconds[i]))
    layouts = tuple(
        replace(named, sources=named.sources * 2) if transfer.producer in again else named
        for named, transfer in zip(intra.transfers, intra.problem.transfers, strict=True)
    )
    return replace(
        intra,
        ops=tuple(ops),
        transfers=layouts,
        problem=_longer(intra, intra.problem, again, extra, only),
        unrestricted=intra.unrestricted and _longer(intra, intra.unrestricted, again, extra, False),
    )


def recomputed(intra: IntraOp, assignment: Sequence[int]) -> tuple[str, ...]:
    """Names of the ops whose strategy is one that recomputes."""
    sent = set(stored(intra, assignment))
    taken = _taken(intra, intra.recomputes, assignment)
    return tuple(intra.step.ops[i].name for i in taken if i not in sent)


def stored(intra: IntraOp, assignment: Sequence[int]) -> tuple[int, ...]:
    """The ops whose result waits in host memory."""
    return _taken(intra, intra.stores, assignment)


def _taken(intra: IntraOp, firsts: Mapping[int, int], assignment: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i, first in firsts.items() if assignment[len(intra.parameters) + i] >= first)


def _again(intra: IntraOp, index: int) -> np.ndarray:
    """The strategies of an op that may be had with a second run."""
    op, plain = intra.step.ops[index], _plain(intra, index)
    if not len(plain):
        return plain
    alone = all(size == 1 for size in intra.mesh.shape)  # elsewhere matrices may be gathered at use, and so once more
    matrices = {p.value for p in intra.step.parameters if len(p.meta.shape) > 1 and not alone}
    here = {p.value for p in intra.step.parameters} | {given.value for given in intra.step.constant_inputs}
    operands = zip(op.operands, intra.ops[index].saved.operands, strict=True)
    are_there = all((keeps or value in here) and value not in matrices for value, keeps in operands)
    return plain if are_there else plain[:0]


def _storable(intra: IntraOp, index: int) -> np.ndarray:
    """The strategies of an op whose result may wait in host memory: those that keep it."""
    is_float = all(meta.dtype.is_floating_point for meta in intra.step.ops[index].call.results)
    return _plain(intra, index)[: intra.recomputes.get(index) if is_float else 0]


def _plain(intra: IntraOp, index: int) -> np.ndarray:
    """The strategies of an op that is called as it is and can run again; none where no other op keeps its result, or it
    does so itself."""
    op, none = intra.step.ops[index], np.zeros(0, dtype=int)
    if index in intra.per_step.ops or not can_run_again(op.call) or intra.ops[index].saved.results[0]:
        return none
    if not intra.savers(op.results[0]):
        return none
    strategies = intra.ops[index].strategies
    return np.array([k for k, each in enumerate(strategies) if all(s.implementation is None for s in each)], dtype=int)


def _longer(
    intra: IntraOp, problem: Problem, again: Mapping[int, np.ndarray], extra: Mapping[int, np.ndarray], only: bool
) -> Problem:
    def doubled(given: Transfer, longer: Transfer, named: TransferLayouts) -> Transfer:
        if given.producer not in again:
            return longer
        return replace(
            longer,
            source=np.concatenate([given.source, longer.source[len(given.source) :] + len(named.sources)]),
            cost=np.vstack([given.cost, given.cost]),
            memory=np.vstack([given.memory, np.where(named.equal, 0.0, given.memory)]),
        )

    found = repeated(problem, again, extra, only=only)
    return replace(found, transfers=tuple(map(doubled, problem.transfers, found.transfers, intra.transfers)))
