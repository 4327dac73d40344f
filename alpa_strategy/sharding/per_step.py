"""The work of a stage that is done once per step instead of once per micro-batch: ops on parameters
and constants alone, such as casts, transposed copies and weight norm.

Planner and lowering both use this module.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from alpa_strategy.cost.flops import is_view
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.sharding.strategies import is_random


@dataclass(frozen=True)
class Derivation:
    """Ops that compute values from parameters and share values with each other: they run together,
    once per step.
    """

    # Positions in the graph, constants that they need included.
    ops: tuple[int, ...]

    # Names of those that they read.
    parameters: tuple[str, ...]

    # What the rest of the graph takes of their results.
    values: tuple[int, ...]


@dataclass(frozen=True)
class PerStep:
    """A stage's derivations. `ops` are the positions of the ops that micro-batches do not run."""

    derivations: tuple[Derivation, ...] = ()
    ops: frozenset[int] = frozenset()

    @cached_property
    def values(self) -> frozenset[int]:
        """The values that the micro-batches read of all derivations."""
        return frozenset(value for derivation in self.derivations for value in derivation.values)

    def parameters_of(self, graph: StepGraph) -> set[str]:
        """Return the names of the trainable parameters that `graph` depends on, also through
        derivations.

        Args:
            graph: a part of the stage without `ops`.
        """
        read = {*graph.escaping, *graph.sent}
        for op in graph.ops:
            read.update(op.operands)

        names = set()
        for parameter in graph.parameters:
            if parameter.value in read and parameter.meta.requires_grad:
                names.add(parameter.name)
        for derivation in self.derivations:
            if not read.isdisjoint(derivation.values):
                names.update(derivation.parameters)
        return names


def casts_of_parameters(graph: StepGraph) -> dict[int, int]:
    """Return value -> parameter's value, for values that are only casts of parameters to half
    precision.
    """
    parameters = {p.value for p in graph.parameters}
    return {
        op.results[0]: op.operands[0]
        for op in graph.ops
        if op.call.target is torch.ops.aten.to.dtype and parameters.issuperset(op.operands)
        if graph.values[op.results[0]].dtype in (torch.bfloat16, torch.float16)
    }


def per_step(graph: StepGraph) -> PerStep:
    """Return the work of a micro-batched stage that can be done once per step: deterministic ops on
    parameters, constants and buffers that no micro-batch updates.

    Parameters that are only viewed are left out.
    """
    parameters = {p.value for p in graph.parameters}
    known = {
        *(c.value for c in graph.constants),
        *(b.value for b in graph.buffers if b.update is None),
    }
    # ops
    constant: set[int] = set()
    # Value -> the ops that it is made with, which share values.
    groups: dict[int, frozenset[int]] = {}
    for index, op in enumerate(graph.ops):
        is_made_here = all(
            value in known or value in parameters or value in groups for value in op.operands
        )
        if not is_made_here or is_random(op.call):
            continue
        if known.issuperset(op.operands):
            constant.add(index)
            known.update(op.results)
            continue
        group = frozenset({index}).union(
            *(groups[value] for value in op.operands if value in groups)
        )
        groups.update((value, group) for member in group for value in graph.ops[member].results)
    distinct_groups = [
        g
        for g in dict.fromkeys(groups.values())
        if not all(is_view(graph.ops[index].call) for index in g)
    ]
    moved = _with_own_constants(
        graph, {index for group in distinct_groups for index in group}, constant
    )
    return PerStep(
        tuple(_derivation(graph, group, moved) for group in distinct_groups), frozenset(moved)
    )


def _with_own_constants(graph: StepGraph, moved: set[int], constant: set[int]) -> set[int]:
    """Return `moved` with the ops on constants that no other op needs."""
    moved = set(moved)
    leaving = {*graph.escaping, *graph.sent}
    for index in sorted(constant, reverse=True):
        results = graph.ops[index].results
        readers = {reader for value in results for reader, _ in graph.consumers.get(value, ())}
        if readers and readers <= moved and leaving.isdisjoint(results):
            moved.add(index)
    return moved


def _derivation(graph: StepGraph, group: frozenset[int], moved: set[int]) -> Derivation:
    """Return how the values of `group` are computed: all ops needed, parameters read, values that
    leave.

    Args:
        graph: the step.
        group: indices of ops that run once per step.
        moved: indices of all such ops; they are no consumers of the result.
    """
    leaving, maker = {*graph.escaping, *graph.sent}, graph.makers
    values = tuple(
        value
        for value in sorted(value for index in group for value in graph.ops[index].results)
        if value in leaving
        or any(reader not in moved for reader, _ in graph.consumers.get(value, ()))
    )
    ops, stack = set(group), list(group)
    while stack:
        needed = {maker[value] for value in graph.ops[stack.pop()].operands if value in maker} - ops
        ops |= needed
        stack += needed
    read = {value for index in ops for value in graph.ops[index].operands}
    return Derivation(
        tuple(sorted(ops)), tuple(p.name for p in graph.parameters if p.value in read), values
    )
