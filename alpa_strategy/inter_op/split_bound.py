"""A lower bound of pipelines with several stages on each of equal meshes, over all splits of the
layers into stages.

Under one order of actions, the end of a step is the longest path through them: a maximum of linear
functions of the stages' seconds, so it is convex in them. Its least value over all splits is found
by cutting planes (Kelley, 1960). A split is simulated; the longest path to the end of every mesh is
a linear function that no step can be below; a linear program finds the split that is best by all
functions so far, and its value is the bound. Parts of a layer may lie in any stages, as long as no
mesh has more layers than whole ones allow, so that the bound holds for every split of whole layers
in order.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from alpa_strategy.schedules import longest_paths, meshes_of_stages

# Splits that are simulated at most.
MAX_SPLITS = 100
# The bound is good enough if the best split known is above it by this share.
CLOSE_ENOUGH = 2e-3
# Layers are told apart by this share of the longest one.
RESOLUTION = 1e-4
# Of the linear program's value, for its tolerances.
ROUNDING = 1e-6


@dataclass(frozen=True)
class LayerKinds:
    """The layers to split; equal ones are one kind.

    Arrays have an element per kind.
    """

    count: np.ndarray

    # Least seconds of a micro-batch, forward and backward.
    seconds: np.ndarray

    # Least seconds once per step.
    once: np.ndarray

    # Kinds of the first and of the last layer, which lie in the first and in the last stage.
    first: int
    last: int


@dataclass(frozen=True)
class EqualMeshPipelines:
    """All pipelines with `stages_per_mesh` stages on each of `num_meshes` equal meshes under one
    schedule.
    """

    schedule: str
    num_meshes: int
    stages_per_mesh: int
    num_microbatches: int

    # Seconds of a micro-batch in each stage beside its ops.
    overhead: float

    # [stage] least seconds of a message to the next stage.
    wires: np.ndarray

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.num_meshes * self.stages_per_mesh

    @cached_property
    def holders(self) -> list[int]:
        """The mesh of each stage."""
        return meshes_of_stages(self.schedule, self.num_meshes, self.stages_per_mesh)


def kinds_of(seconds: np.ndarray, once: np.ndarray) -> LayerKinds:
    """Return the kinds of layers with the least seconds `seconds` of a micro-batch and `once` per
    step, both [layer].

    Seconds are rounded down a little, so that layers that are almost equal are one kind.
    """
    pairs = np.stack([seconds, once], axis=1)
    # Rounded down, the bound stays one.
    unit = RESOLUTION * max(float(seconds.max()), float(once.max()))
    if unit > 0:
        pairs = np.floor(pairs / unit + ROUNDING) * unit
    pairs, kinds, count = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    kinds = kinds.ravel()
    return LayerKinds(count.astype(float), pairs[:, 0], pairs[:, 1], int(kinds[0]), int(kinds[-1]))


def least_over_splits(pipelines: EqualMeshPipelines, layers: LayerKinds, enough: float) -> float:
    """Return a lower bound of the seconds of a step, whichever way the layers are split into
    stages.

    Args:
        pipelines: schedule, meshes and messages.
        layers: what is split.
        enough: seconds; a bound that is at least as large need not be better.
    """
    # Whole layers: a step is either as long as one more layer than `most_layers` on one mesh, or no
    # mesh has more.
    most_layers = _most_layers(pipelines, layers, enough)
    with_one_more = (most_layers + 1) * _shortest_layer(pipelines, layers)
    program = _SplitProgram(pipelines, layers, most_layers)
    # [stage, kind] how many layers of a kind a stage has.
    split = np.tile(layers.count / pipelines.num_stages, (pipelines.num_stages, 1))
    best_known = np.inf
    bound = 0.0
    for _ in range(MAX_SPLITS):
        ends = list(_mesh_ends(pipelines, split @ layers.seconds, split @ layers.once))
        best_known = min(best_known, max(end.seconds for end in ends))
        for end in ends:
            program.add(end)
        solution = program.solve()
        if solution is None:
            # Numerical trouble proves nothing: the bound of the round before stays.
            break
        bound, split = solution
        if bound >= enough or bound >= best_known * (1 - CLOSE_ENOUGH):
            break
    return min(bound * (1 - ROUNDING), with_one_more)


def _shortest_layer(pipelines: EqualMeshPipelines, layers: LayerKinds) -> float:
    """Return the seconds of a step that a mesh works for the shortest layer."""
    return float((pipelines.num_microbatches * layers.seconds + layers.once).min())


def _most_layers(pipelines: EqualMeshPipelines, layers: LayerKinds, enough: float) -> int:
    """Return the most layers of a mesh in a step of less than `enough` seconds; at least their
    mean number.
    """
    num_layers = int(layers.count.sum())
    shortest = _shortest_layer(pipelines, layers)
    if shortest <= 0 or enough >= num_layers * shortest:
        return num_layers
    return max(math.ceil(num_layers / pipelines.num_meshes), int(enough / shortest))


@dataclass(frozen=True)
class _MeshEnd:
    """When a mesh has done its work of a step, as a linear function of the stages' seconds."""

    # Its value for the split that was simulated.
    seconds: float

    # What does not depend on the split.
    constant: float

    # [stage] times that a stage's seconds of a micro-batch count.
    per_microbatch: np.ndarray

    # [stage] whether a stage's seconds once per step count.
    is_own: np.ndarray


def _mesh_ends(
    pipelines: EqualMeshPipelines, seconds: np.ndarray, once: np.ndarray
) -> Iterator[_MeshEnd]:
    """Yield the end of each mesh.

    Args:
        seconds: [stage] of a micro-batch, without the overhead.
        once: [stage] seconds once per step.
    """
    # As candidates are priced: half of the overhead belongs to the forward, which takes a third.
    forward = seconds / 3 + pipelines.overhead / 2
    backward = 2 / 3 * seconds + pipelines.overhead / 2
    paths = longest_paths(
        pipelines.schedule,
        forward,
        backward,
        pipelines.num_microbatches,
        pipelines.num_meshes,
        pipelines.wires,
    )
    for mesh, path in enumerate(paths):
        per_microbatch = path.forward / 3 + 2 / 3 * path.backward
        is_own = np.array([holder == mesh for holder in pipelines.holders], dtype=float)
        constant = path.seconds - float(per_microbatch @ seconds)
        total = path.seconds + float(is_own @ once)
        yield _MeshEnd(total, constant, per_microbatch, is_own)


class _SplitProgram:
    """The linear program: the split whose step is shortest by the mesh ends that are known.

    Args:
        pipelines: schedule and meshes.
        layers: what is split.
        most_layers: that a mesh may have.
    """

    def __init__(self, pipelines: EqualMeshPipelines, layers: LayerKinds, most_layers: int) -> None:
        from ortools.linear_solver import pywraplp

        self._layers = layers
        # Seconds count in those of the longest layer: a solver's tolerances are absolute.
        self._unit = float(layers.seconds.max()) or 1.0
        # GLOP gives up after a few rounds of such rows ("abnormal").
        self._solver = pywraplp.Solver.CreateSolver("CLP")
        infinity = self._solver.infinity()
        self._step = self._solver.NumVar(0.0, infinity, "step")
        # [stage][kind]
        self._parts = []
        for stage in range(pipelines.num_stages):
            of_kinds = []
            for kind, count in enumerate(layers.count):
                of_kinds.append(self._solver.NumVar(0.0, float(count), f"{stage}_{kind}"))
            # A stage has at least one layer.
            self._solver.Add(sum(of_kinds) >= 1)
            self._parts.append(of_kinds)
        self._solver.Add(self._parts[0][layers.first] >= 1)
        self._solver.Add(self._parts[-1][layers.last] >= 1)
        for mesh in range(pipelines.num_meshes):
            on_mesh = []
            for holder, of_kinds in zip(pipelines.holders, self._parts, strict=True):
                if holder == mesh:
                    on_mesh += of_kinds
            self._solver.Add(sum(on_mesh) <= most_layers)
        for kind, count in enumerate(layers.count):
            self._solver.Add(sum(of_kinds[kind] for of_kinds in self._parts) == float(count))
        self._solver.Minimize(self._step)

    def add(self, end: _MeshEnd) -> None:
        """Let the step be no shorter than the end of a mesh."""
        row = self._solver.Constraint(end.constant / self._unit, self._solver.infinity())
        row.SetCoefficient(self._step, 1.0)
        for stage, of_kinds in enumerate(self._parts):
            per_kind = end.per_microbatch[stage] * self._layers.seconds
            per_kind = per_kind + end.is_own[stage] * self._layers.once
            for part, seconds in zip(of_kinds, per_kind, strict=True):
                row.SetCoefficient(part, -float(seconds) / self._unit)

    def solve(self) -> tuple[float, np.ndarray] | None:
        """Return the seconds of the shortest step, and its split, [stage, kind]; None if the solver
        gave up.
        """
        if self._solver.Solve() != self._solver.OPTIMAL:
            return None
        split = np.zeros((len(self._parts), len(self._layers.count)))
        for stage, of_kinds in enumerate(self._parts):
            split[stage] = [part.solution_value() for part in of_kinds]
        return self._unit * float(self._solver.Objective().Value()), split
