"""Stages on equal meshes, `stages_per_mesh` on each."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from alpa_strategy.inter_op.boundaries import Joint, boundary_tables
from alpa_strategy.inter_op.stage_dp import StageTables
from alpa_strategy.inter_op.stage_space import Candidate, Stages, StageSpace
from alpa_strategy.schedules import in_flight_by_stage, meshes_of_stages


@dataclass(frozen=True, eq=False)
class EqualMeshes:
    """Stages on equal meshes under one schedule."""

    space: StageSpace
    schedule: str
    stages_per_mesh: int
    # Index of the submesh in `space.meshes`.
    submesh: int

    @property
    def ranks(self) -> int:
        """The number of meshes."""
        return self.space.job.cluster.num_devices // self.mesh_size

    @property
    def mesh_size(self) -> int:
        """The number of devices of a mesh."""
        return self.space.sizes[self.submesh]

    @cached_property
    def holders(self) -> list[int]:
        """The mesh of each stage."""
        return meshes_of_stages(self.schedule, self.ranks, self.stages_per_mesh)

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Of each stage, the (micro-batch, stage) pairs in flight on its mesh."""
        return in_flight_by_stage(
            self.schedule, self.ranks, self.space.job.num_microbatches, self.stages_per_mesh
        )

    @cached_property
    def tables(self) -> StageTables:
        """The tables of all submeshes, with the messages between the stages of this pipeline; these
        are indexed by the number of stages that are left, and take 0 seconds within a mesh.
        """
        tables = self.space.tables_for(self.schedule, self.ranks, self.stages_per_mesh)
        joints: list[Joint] = []
        for sender, receiver in pairwise(self.holders):
            if sender == receiver:
                joints.append(None)
            else:
                joints.append((self.mesh_size * (sender + 1), self.mesh_size * receiver))
        by_stages_left = [None, *reversed(joints), None]
        own_pair = [(self.submesh, self.submesh)]
        boundary, link_at = boundary_tables(
            self.space.job, self.space.meshes, tables.fits, by_stages_left, own_pair
        )
        return replace(tables, boundary=boundary, link_at=link_at)

    @cached_property
    def alone(self) -> StageTables:
        """The tables of this submesh alone, counted as one device each.

        A mesh stores what all of its stages need whatever is in flight. Stages whose optimizer
        update does not fit get inf seconds.
        """
        one = in_units(self.tables, np.array([self.submesh]), self.mesh_size)
        # All stages of a mesh are updated together.
        at_update = self.stages_per_mesh * one.bytes_at_update
        seconds = np.where(at_update > self.space.job.memory_limit, np.inf, one.seconds)
        starts = self.tables.starts
        if starts is not None:
            first_devices = np.array([-1, *reversed(self.holders)]) * self.mesh_size
            starts = (starts[0], first_devices)
        unfit_alive = one.unfit_alive
        if unfit_alive is not None:
            unfit_alive = self.stages_per_mesh * unfit_alive
        return replace(
            one,
            seconds=seconds,
            unfit_alive=unfit_alive,
            bytes_always=self.stages_per_mesh * one.bytes_always,
            fits=np.ones((len(self.holders) + 1, 1), dtype=bool),
            link_at=self.tables.link_at,
            starts=starts,
        )

    def cheapest(self, cuts: Sequence[int]) -> tuple[Stages, list[float]]:
        """Return the cheapest candidate of each stage between `cuts`, as `StageSpace.cheapest`."""
        stages = [(first, last, 0) for first, last in pairwise(cuts)]
        return self.space.cheapest(self.alone, stages, range(len(stages), 0, -1), self.alive)

    def candidates(self, choices: Sequence[Stages]) -> list[Candidate]:
        """Return candidates of stages that were chosen in the tables `alone`."""
        stages_of_space: list[Stages] = []
        for choice in choices:
            stages_of_space.append(tuple(replace(stage, submesh=self.submesh) for stage in choice))
        num_left = list(range(len(self.alive), 0, -1))
        return self.space.candidates(
            self.tables, num_left, self.schedule, self.stages_per_mesh, stages_of_space, self.alive
        )

    def climbed(self, cuts: list[int], known: Callable[[], float]) -> Iterable[Candidate]:
        """Yield stages between `cuts`, then better and better ones: cuts are moved by one layer
        while that makes the simulated step shorter.

        The closed form counts the largest stage of a mesh for all of its stages, but only the sum
        of their work delays others: for unequal stages it may be twice the simulated step.

        Args:
            cuts: layers at which stages begin and end.
            known: returns the seconds of the best candidate so far; only faster ones are yielded,
                perhaps none.
        """
        choice, busy = self._cheapest_and_busy(cuts)
        if sum(busy) >= len(busy) * known() or math.isinf(sum(busy)):
            return
        (best,) = self.candidates([choice])
        while True:
            if best.seconds < known():
                yield best
            better = self._best_neighbour(cuts, best)
            if better is None:
                return
            best, cuts = better

    def all_cuts(self, known: Callable[[], float]) -> Iterable[Candidate]:
        """Yield the best stages of all cuts between layers, if it is faster than the best candidate
        so far, of `known()` seconds.

        Where cuts are moved one by one, several that have to move together stay where they are.
        """
        num_layers = self.space.job.num_layers
        choices = []
        for inner in combinations(range(1, num_layers), len(self.holders) - 1):
            choice, busy = self._cheapest_and_busy((0, *inner, num_layers))
            if max(busy) < known():
                choices.append(choice)
        if not choices:
            return
        best = min(self.candidates(choices), key=lambda candidate: candidate.seconds)
        if best.seconds < known():
            yield best

    def _cheapest_and_busy(self, cuts: Sequence[int]) -> tuple[Stages, np.ndarray]:
        """Return the cheapest stages between `cuts`, and the seconds of work of each mesh in a
        step.
        """
        choice, seconds = self.cheapest(cuts)
        return choice, np.bincount(self.holders, seconds)

    def _best_neighbour(
        self, cuts: list[int], best: Candidate
    ) -> tuple[Candidate, list[int]] | None:
        """Return the best candidate with one cut moved by one layer, and its cuts; None if none is
        faster than `best`.
        """
        neighbours: list[list[int]] = []
        choices: list[Stages] = []
        for index in range(1, len(self.holders)):
            for cut in (cuts[index] - 1, cuts[index] + 1):
                if not cuts[index - 1] < cut < cuts[index + 1]:
                    continue
                moved = [*cuts[:index], cut, *cuts[index + 1 :]]
                choice, busy = self._cheapest_and_busy(moved)
                if max(busy) < best.seconds:
                    neighbours.append(moved)
                    choices.append(choice)
        if not choices:
            return None
        candidates = self.candidates(choices)
        fastest = min(range(len(candidates)), key=lambda i: candidates[i].seconds)
        if candidates[fastest].seconds >= best.seconds:
            return None
        return candidates[fastest], neighbours[fastest]


def in_units(tables: StageTables, submeshes: np.ndarray, unit: int) -> StageTables:
    """Return the tables of the submeshes `submeshes`, with devices counted in units of `unit`.

    The sizes of these submeshes are multiples of `unit`.
    """
    starts = tables.starts
    if starts is not None:
        starts = (starts[0], starts[1][::unit])
    unfit_alive = tables.unfit_alive
    if unfit_alive is not None:
        unfit_alive = unfit_alive[:, :, submeshes]
    return StageTables(
        num_devices=tables.num_devices[submeshes] // unit,
        seconds=tables.seconds[:, :, submeshes],
        once_seconds=tables.once_seconds[:, :, submeshes],
        bytes_always=tables.bytes_always[:, :, submeshes],
        bytes_in_flight=tables.bytes_in_flight[:, :, submeshes],
        boundary=tables.boundary[:, :, submeshes][..., submeshes],
        fits=tables.fits[::unit, submeshes],
        link_at=tables.link_at[::unit],
        starts=starts,
        bytes_at_update=tables.bytes_at_update[:, :, submeshes],
        unfit_alive=unfit_alive,
    )
