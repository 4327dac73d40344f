"""Offload: what a device stores of a parameter, its gradient and the optimizer's state may lie in host memory.

`with_offload` gives parameters every way to be stored a second time, so. What is used of one comes over the link to the
host for each use (`ParameterPlan.is_fetched`), or once per step where its gradient is reduced once per step, and leaves
no byte on the device but while it is in use. The optimizer steps on the host.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from alpa_strategy.cluster.spec import Host
from alpa_strategy.cost.flops import is_plain_view
from alpa_strategy.errors import PlanError
from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.options import joined, local_bytes
from alpa_strategy.intra_op.problem import repeated
from alpa_strategy.intra_op.recompute import result_bytes, stored
from alpa_strategy.intra_op.restrict import matching
from alpa_strategy.ir.graph import ParameterInput, StepGraph
from alpa_strategy.ir.stage_plan import ParameterPlan
from alpa_strategy.options import PlanOptions


def can_be_offloaded(given: ParameterInput) -> bool:
    """Whether there is anything of it to be fetched that a device computes with."""
    return given.meta.dtype.is_floating_point and given.meta.num_elements > 0


def pinned_offload(step: StepGraph, options: PlanOptions, host: Host | None) -> frozenset[str] | None:
    """Names of the parameters that `PlanOptions.offload` wants in host memory, None where that is solved.

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
    return frozenset(name for pattern in options.offload for name in matching(pattern, names, "offload"))


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
            host = intra.tables.parameter(given, on_host=True)
            again = 1.0 if _is_saved(intra, given) else 0.0
            backward = again * host.fetch_seconds + host.return_seconds
            host = replace(host, seconds=host.seconds + host.fetch_seconds + backward, backward_seconds=backward)
            parameters[index] = joined(own, host)
            twins[index] = np.array([own.plans.index(replace(plan, on_host=False)) for plan in host.plans])
            seconds[index], num_bytes[index] = host.seconds - own.seconds[twins[index]], host.num_bytes
    return replace(
        intra,
        parameters=tuple(parameters),
        problem=repeated(intra.problem, twins, seconds, num_bytes, only=pinned is not None),
        unrestricted=intra.unrestricted and repeated(intra.unrestricted, twins, seconds, num_bytes),
    )


def with_host_price(intra: IntraOp, price: float) -> IntraOp:
    """The same with so many seconds a byte of host memory added to what is minimised."""
    choices = list(intra.problem.choices)
    for index, own in enumerate(intra.parameters):
        choices[index] = replace(choices[index], cost=choices[index].cost + price * own.host_bytes)
    for op, first in intra.stores.items():
        choice, num_bytes = len(intra.parameters) + op, result_bytes(intra, op)
        num_bytes[:first] = 0
        choices[choice] = replace(choices[choice], cost=choices[choice].cost + price * num_bytes)
    problem = replace(intra.problem, choices=tuple(choices))
    return replace(intra, problem=problem, unrestricted=intra.unrestricted or intra.problem)


def host_bytes(intra: IntraOp, assignment: Sequence[int]) -> float:
    """Bytes of host memory that a device's parameters and results take."""
    parameters = sum(float(o.host_bytes[k]) for o, k in zip(intra.parameters, assignment, strict=False))
    return parameters + sum(_stored_bytes(intra, assignment))


def _stored_bytes(intra: IntraOp, assignment: Sequence[int]) -> list[float]:
    """Of each result that waits in host memory."""
    return [float(result_bytes(intra, i)[assignment[len(intra.parameters) + i]]) for i in stored(intra, assignment)]


def fetched_bytes(intra: IntraOp, assignment: Sequence[int]) -> float:
    """Most bytes at once of copies from the host, or of their gradients: those between their first and last use, the
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


def _is_saved(intra: IntraOp, given: ParameterInput) -> bool:
    """Whether some op's backward needs the parameter: it is fetched once more then."""
    views = (is_plain_view(intra.step.ops[op].call) for op, _ in intra.step.consumers.get(given.value, ()))
    return bool(intra.savers(given.value)) or any(views)
