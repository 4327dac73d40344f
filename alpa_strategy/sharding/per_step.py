"""The work of a stage that is done once per step instead of once per micro-batch: ops on parameters
and constants alone, such as casts, transposed copies and weight norm.

The planner decides which ops these are (`per_step`), the plan has their names, and lowering reads
them (`per_step_of`).
"""

from collections.abc import Collection, Sequence
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
    """Return the work of a micro-batched stage that is worth doing once per step: deterministic ops
    on parameters, constants and buffers that no micro-batch updates.

    Parameters that are only viewed are left out.
    """
    of_constants, of_parameters = _ops_without_samples(graph)
    groups = []
    for group in _groups(graph, of_parameters):
        if not all(is_view(graph.ops[index].call) for index in group):
            groups.append(group)
    ops = _with_own_constants(graph, set().union(*groups), of_constants)
    return _per_step(graph, groups, ops)


def per_step_of(graph: StepGraph, names: Collection[str]) -> PerStep:
    """Return the work of a stage of which the ops called `names` run once per step.

    Args:
        graph: of the stage.
        names: those that a plan has (`Execution.per_step_ops`).
    """
    ops = {index for index, op in enumerate(graph.ops) if op.name in names}
    _, of_parameters = _ops_without_samples(graph)
    return _per_step(graph, _groups(graph, of_parameters & ops), ops)


def not_per_step(graph: StepGraph, names: Collection[str]) -> list[str]:
    """Return those of `names` that cannot run once per step, in the order of the graph; names of no
    op come last, sorted.

    They read samples or random numbers, only view a parameter, or other ops need their results for
    every micro-batch.
    """
    ops = {index for index, op in enumerate(graph.ops) if op.name in names}
    of_constants, of_parameters = _ops_without_samples(graph)
    possible = ops & of_parameters & per_step(graph).ops
    possible = _with_own_constants(graph, possible, of_constants)
    unknown = set(names) - {graph.ops[index].name for index in ops}
    return [graph.ops[index].name for index in sorted(ops - possible)] + sorted(unknown)


def _ops_without_samples(graph: StepGraph) -> tuple[set[int], set[int]]:
    """Return the positions of deterministic ops on constants alone, and of those on parameters and
    constants.

    Buffers that no micro-batch updates are constants.
    """
    constants = {constant.value for constant in graph.constants}
    constants.update(buffer.value for buffer in graph.buffers if buffer.update is None)
    made_of_parameters = {parameter.value for parameter in graph.parameters}
    of_constants: set[int] = set()
    of_parameters: set[int] = set()
    for index, op in enumerate(graph.ops):
        if is_random(op.call):
            continue
        if constants.issuperset(op.operands):
            of_constants.add(index)
            constants.update(op.results)
        elif all(value in constants or value in made_of_parameters for value in op.operands):
            of_parameters.add(index)
            made_of_parameters.update(op.results)
    return of_constants, of_parameters


def _groups(graph: StepGraph, ops: Collection[int]) -> list[frozenset[int]]:
    """Return `ops` in groups that share values, in the order of their first ops."""
    # Value -> the ops that it is made with.
    groups: dict[int, frozenset[int]] = {}
    for index in sorted(ops):
        operands = graph.ops[index].operands
        group = frozenset({index}).union(*(groups[v] for v in operands if v in groups))
        for member in group:
            groups.update(dict.fromkeys(graph.ops[member].results, group))
    return list(dict.fromkeys(groups.values()))


def _per_step(graph: StepGraph, groups: Sequence[frozenset[int]], ops: Collection[int]) -> PerStep:
    """Return the derivations of `groups`; micro-batches do not run `ops`."""
    derivations = tuple(_derivation(graph, group, ops) for group in groups)
    return PerStep(derivations, frozenset(ops))


def _with_own_constants(graph: StepGraph, moved: set[int], constant: set[int]) -> set[int]:
    """Return `moved` with those of the ops `constant` whose results only moved ops read, at least
    one of them, and which do not leave the step.

    Args:
        moved: indices of ops that run once per step.
        constant: indices of ops that depend on constants alone.
    """
    moved = set(moved)
    leaving = {*graph.escaping, *graph.sent}
    for index in sorted(constant, reverse=True):
        results = graph.ops[index].results
        readers = {reader for value in results for reader, _ in graph.consumers.get(value, ())}
        if readers and readers <= moved and leaving.isdisjoint(results):
            moved.add(index)
    return moved


def _derivation(graph: StepGraph, group: frozenset[int], moved: Collection[int]) -> Derivation:
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
