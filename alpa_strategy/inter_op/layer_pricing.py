"""The layers of a job on one logical mesh, priced for the stage DP: each kind of equal layers once,
at several prices of memory (layer_matrix.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.inter_op.equal_layers import boundary_structure
from alpa_strategy.inter_op.layer_matrix import (
    LayerBoundary,
    LayerMatrix,
    LayerProblem,
    Part,
    Price,
    floor_of,
    follow_leaders,
    layer_matrix,
    passing_seconds,
    without_hidden_gathers,
)
from alpa_strategy.inter_op.layer_runs import Runs, compose_runs, newly_received_shares
from alpa_strategy.inter_op.mesh_options import options_of_part
from alpa_strategy.inter_op.stage_problem import stage_build, take_apart
from alpa_strategy.intra_op.build import boundary_layouts
from alpa_strategy.intra_op.memory_choices import pinned_offload, with_offload
from alpa_strategy.intra_op.restrict import restrict
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.placement import INVARIANT, DualLayout

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_costs import StageCostTask

# Prices of memory, as multiples of the seconds per byte of the whole step without a price, with
# numbers of micro-batches in flight.
PRICES = ((0.05, 1), (0.5, 1), (0.5, 16), (5.0, 1), (5.0, 16), (1e3, 4))

# Of the layouts that are the fastest.
FREE_MEMORY = Price(per_byte=0.0, in_flight=1)


@dataclass(frozen=True)
class UnpricedLayers:
    """The layers of a job on one logical mesh. Layers that are equal by structure are one kind."""

    # The graph of each layer.
    layers: list[StepGraph]

    # Of each layer, the index of its kind in `problems` and `passing`.
    kinds: list[int]

    problems: list[LayerProblem]

    # `passing_seconds` of each kind.
    passing: list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class PricedLayers:
    """The layers of a job on one logical mesh, each kind priced once."""

    unpriced: UnpricedLayers

    # The first is `FREE_MEMORY`.
    prices: list[Price]

    # Of each kind, at all prices.
    matrices: list[LayerMatrix]

    # Seconds per byte of a step in the fastest layouts.
    scale: float

    # [layer, 2] lower bounds where sums do not overlap with matmuls: seconds of a step, and of a
    # micro-batch.
    least_apart: np.ndarray

    def runs(self) -> Runs:
        """Return all runs of layers, at all prices."""
        layers = self.unpriced.layers
        return compose_runs(self.matrices, self.unpriced.kinds, newly_received_shares(layers))

    def excess(self) -> np.ndarray:
        """Return [layer] by how many seconds of a step the fastest layouts may take longer than the
        optimum.
        """
        return np.array([self.matrices[kind].excess[0] for kind in self.unpriced.kinds])


def run_parts(
    job: "StageCostTask",
    submesh: tuple[int, int],
    shape: tuple[int, ...],
    prices: Sequence[tuple[float, int]] = PRICES,
) -> np.ndarray:
    """Return [price, first, last + 1, part] of all runs on one logical mesh; forward is inf if
    impossible.
    """
    return priced_layers(job, submesh, shape, prices).runs().by_layers()


def priced_layers(
    job: "StageCostTask",
    submesh: tuple[int, int],
    shape: tuple[int, ...],
    prices: Sequence[tuple[float, int]],
) -> PricedLayers:
    """Price every kind of layer on one logical mesh, without a price of memory and at `prices`.

    Args:
        submesh: (nodes, devices per node).
        shape: of the logical mesh.
        prices: multiples of the step's seconds per byte, with micro-batches in flight.

    Raises:
        OptionError, PlanError: a pin cannot be met.
    """
    unpriced = unpriced_layers(job, submesh, shape)

    kinds = range(len(unpriced.problems))
    matrices = [_matrix_at(job, unpriced, kind, [FREE_MEMORY]) for kind in kinds]
    scale = _seconds_per_byte([matrices[kind] for kind in unpriced.kinds])
    least_apart = _least_apart(job, unpriced, matrices)
    absolute = [Price(scale * factor, in_flight) for factor, in_flight in prices]
    if prices:
        priced = [_matrix_at(job, unpriced, kind, absolute) for kind in kinds]
        pairs = zip(matrices, priced, strict=True)
        matrices = [_at_all_prices(free, at_prices) for free, at_prices in pairs]
    return PricedLayers(unpriced, [FREE_MEMORY, *absolute], matrices, scale, least_apart)


def _matrix_at(
    job: "StageCostTask", unpriced: UnpricedLayers, kind: int, prices: Sequence[Price]
) -> LayerMatrix:
    """Return the costs of one kind of layer at `prices`, between all layouts at its ends.

    Args:
        kind: index of the kind in `unpriced.problems`.
    """
    return layer_matrix(
        unpriced.problems[kind],
        prices,
        job.num_microbatches,
        unpriced.passing[kind],
        job.gradients_begin,
    )


def _least_apart(
    job: "StageCostTask", unpriced: UnpricedLayers, matrices: Sequence[LayerMatrix]
) -> np.ndarray:
    """Return `PricedLayers.least_apart`.

    Args:
        matrices: of each kind, at `FREE_MEMORY`.
    """
    least = []
    for kind, problem in enumerate(unpriced.problems):
        matrix = matrices[kind]
        if any("overlapped" in costs.nonzero for costs in problem.transfers):
            matrix = _matrix_at(job, unpriced, kind, [FREE_MEMORY._replace(overlaps=False)])
        # [entering layout, leaving layout]
        objective = matrix.objective[0]
        best = np.unravel_index(objective.argmin(), objective.shape)
        parts = matrix.parts[0][best]
        seconds = parts[Part.FORWARD] + parts[Part.BACKWARD] + parts[Part.OVERLAPPED]
        excess = matrix.excess[0]
        of_step = floor_of(objective[best], excess)
        of_microbatch = floor_of(seconds, excess / job.num_microbatches)
        least.append((float(of_step), float(of_microbatch)))
    return np.array([least[kind] for kind in unpriced.kinds])


def unpriced_layers(
    job: "StageCostTask",
    submesh: tuple[int, int],
    shape: tuple[int, ...],
    has_per_step_ops: bool = True,
    hides_gathers: bool = True,
) -> UnpricedLayers:
    """Build the problem of every kind of layer on one logical mesh.

    Args:
        submesh: (nodes, devices per node).
        shape: of the logical mesh.
        has_per_step_ops: whether some ops run once for all micro-batches.
        hides_gathers: whether layers of one stage on all devices are without the communication that
            may be hidden (`without_hidden_gathers`).

    Raises:
        OptionError, PlanError: a pin cannot be met.
    """
    tables = job.option_tables(submesh, shape)
    mesh = tables.mesh
    ends = [_boundary(job, layer, shape) for layer in range(job.num_layers)]
    kinds = _kinds(job, mesh, ends)
    layers = job.layers_on(mesh.num_devices).graphs

    problems = []
    passing = []
    on_host = pinned_offload(job.graph, job.options, job.cluster.host)
    for kind in range(max(kinds) + 1):
        first = kinds.index(kind)
        options = options_of_part(job.options, layers[first])
        build = stage_build(layers[first], tables, recompute_per_microbatch=not has_per_step_ops)
        intra = restrict(build, options, job.optimizer)
        if on_host:
            intra = with_offload(intra, on_host)
        problem = follow_leaders(take_apart(intra), ends[first])
        if hides_gathers and mesh.num_devices == job.cluster.num_devices:
            # No pipeline has such a stage.
            problem = without_hidden_gathers(problem, mesh.overlap)
        problems.append(problem)
        passing.append(passing_seconds(job.graph, ends[first], tables))
    return UnpricedLayers(layers, kinds, problems, passing)


def _kinds(job: "StageCostTask", mesh: LogicalMesh, ends: Sequence[LayerBoundary]) -> list[int]:
    """Return, per layer, the number of its kind: equal for equal layers with equal boundaries."""
    layers = job.layers_on(mesh.num_devices)
    kind_of: dict[tuple, int] = {}
    kinds = []
    for layer, end in enumerate(ends):
        boundary = boundary_structure(layers.graphs[layer], layers.positions[layer], end)
        kinds.append(kind_of.setdefault((layers.kinds[layer], boundary), len(kind_of)))
    return kinds


def _seconds_per_byte(layers: Sequence[LayerMatrix]) -> float:
    """Return the least seconds of the step per least bytes that it stores; 1.0 if a layer is
    impossible.

    Args:
        layers: the matrix of every layer, without a price of memory.
    """
    seconds = 0.0
    num_bytes = 0.0
    for layer in layers:
        seconds += float(layer.objective[0].min())
        stored = layer.parts[0, ..., Part.ALWAYS : Part.SAVED + 1].sum(axis=-1)
        num_bytes += float(stored.min())
    return seconds / max(num_bytes, 1.0) if np.isfinite(seconds) else 1.0


def _at_all_prices(one: LayerMatrix, other: LayerMatrix) -> LayerMatrix:
    """Return the matrix of a layer at the prices of both."""
    return LayerMatrix(
        np.concatenate([one.objective, other.objective]),
        np.concatenate([one.parts, other.parts]),
        np.concatenate([one.excess, other.excess]),
    )


def _boundary(job: "StageCostTask", layer: int, shape: tuple[int, ...]) -> LayerBoundary:
    """Return the values at a layer's ends, and the layouts of the one that leads at each end."""
    before = job.crossing[layer]
    after = job.crossing[layer + 1]
    entering, entering_layouts = _leader(job, before, shape)
    leaving, leaving_layouts = _leader(job, after, shape)
    passing = tuple(value for value in before if value in after)
    return LayerBoundary(entering, leaving, entering_layouts, leaving_layouts, passing)


def _leader(
    job: "StageCostTask", crossing: Sequence[int], shape: tuple[int, ...]
) -> tuple[int | None, tuple[DualLayout, ...]]:
    """Return the value whose layout the others that cross a cut follow, and its layouts.

    It is the largest of those that require a gradient, or of all; None, with one unsharded layout,
    if nothing crosses.

    Args:
        crossing: the values that cross the cut.
    """
    values = job.graph.values

    def rank(value: int) -> tuple[bool, int, int]:
        return values[value].requires_grad, values[value].num_bytes, -value

    leader = max(crossing, key=rank, default=None)
    if leader is None:
        return None, ((INVARIANT,) * len(shape),)
    return leader, boundary_layouts(values[leader], shape)
