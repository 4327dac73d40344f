"""The stages that a job's pipelines may have, and the candidates that are made of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product

import numpy as np

from alpa_strategy.inter_op.boundaries import boundary_tables
from alpa_strategy.inter_op.pins import stage_cuts, stage_fits
from alpa_strategy.inter_op.simulation import runtime_seconds, simulated_seconds
from alpa_strategy.inter_op.stage_costs import LayerRangeCosts, StageCostTask
from alpa_strategy.inter_op.stage_dp import StageRange, StageTables
from alpa_strategy.inter_op.stage_solve import SolvedStage
from alpa_strategy.schedules import splits_backward

# In pipeline order.
Stages = tuple[StageRange, ...]


@dataclass(frozen=True)
class Candidate:
    """Chosen stages, with the job and the schedule that they were chosen for."""

    # Simulated seconds of a step, from the costs of the tables.
    seconds: float
    job: StageCostTask
    schedule: str
    stages_per_mesh: int
    stages: Stages
    # Of each stage.
    submesh_of: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    remat: tuple[bool, ...]
    # Of each stage, the (micro-batch, stage) pairs in flight on its mesh.
    alive: tuple[int, ...]
    # Of each stage, seconds of a micro-batch's messages to and from the next one.
    wires: tuple[float, ...]
    # The stages, if their layouts are known already.
    solved: tuple[SolvedStage, ...] = ()


@dataclass(frozen=True)
class UnfitStage:
    """A stage that was chosen, and for which no layouts were found that fit.

    Attributes:
        first, last: its layers, [first, last).
        submesh: index in `StageSpace.meshes`.
        shape, remat: of the layouts that were looked for.
        alive: micro-batches in flight, per stage of its mesh.
    """

    first: int
    last: int
    submesh: int
    shape: tuple[int, ...]
    remat: bool
    alive: float


@dataclass(frozen=True, eq=False)
class StageSpace:
    """Runs of layers on submeshes, priced: the stages that pipelines are made of."""

    job: StageCostTask
    meshes: Sequence[tuple[int, int]]
    # Of each submesh in `meshes`.
    runs: Sequence[LayerRangeCosts]
    # [first layer, last layer + 1, submesh] which stages are allowed; None: all.
    allowed: np.ndarray | None = None
    # Stages that are priced as if they fit, but do not.
    unfit: tuple[UnfitStage, ...] = ()

    def without(self, candidate: Candidate, index: int) -> "StageSpace":
        """Return the space without stage number `index` of a candidate: no layouts of it fit."""
        stage = candidate.stages[index]
        unfit = UnfitStage(
            stage.first,
            stage.last,
            stage.submesh,
            candidate.shapes[index],
            candidate.remat[index],
            candidate.alive[index] / candidate.stages_per_mesh,
        )
        return replace(self, unfit=(*self.unfit, unfit))

    def may_fit(self, candidate: Candidate) -> bool:
        """Return whether none of a candidate's stages is known not to fit."""
        if self.unfit_alive is None:
            return True
        for stage, pairs in zip(candidate.stages, candidate.alive, strict=True):
            at = stage.first, stage.last, stage.submesh, stage.candidate
            if pairs / candidate.stages_per_mesh >= self.unfit_alive[at]:
                return False
        return True

    @cached_property
    def unfit_alive(self) -> np.ndarray | None:
        """`StageTables.unfit_alive`, [first layer, last layer + 1, submesh, candidate]:
        micro-batches alive with which a stage does not fit, inf if there is no such number; None:
        all stages may fit.

        What holds for a stage holds for stages of equal layers, and for those that have them among
        others: these store more.
        """
        if not self.unfit:
            return None

        least = np.full(self._stacked("seconds", np.inf).shape, np.inf)
        for stage in self.unfit:
            kinds = self.job.layers_on(self.sizes[stage.submesh]).kinds
            runs = self.runs[stage.submesh]
            is_same_shape = runs.shape == runs.shapes.index(stage.shape)
            is_unfit = is_same_shape & (runs.remat == stage.remat)
            is_unfit &= _contain(kinds, kinds[stage.first : stage.last])[..., None]
            of_submesh = least[:, :, stage.submesh, : is_unfit.shape[2]]
            of_submesh[is_unfit] = np.minimum(of_submesh[is_unfit], stage.alive)
        return least

    @cached_property
    def sizes(self) -> list[int]:
        """The number of devices of each submesh."""
        return [math.prod(mesh) for mesh in self.meshes]

    @property
    def overhead(self) -> float:
        """Seconds of a micro-batch in each stage in addition to its ops."""
        return runtime_seconds(self.job.cluster.device)

    @cached_property
    def pinned(self) -> list[int]:
        """The first layer of every stage that `options.stages` names, and the number of layers;
        empty if stages are solved.
        """
        cuts = stage_cuts(self.job.graph, self.job.options.stages)
        return [self.job.cuts.index(cut) for cut in cuts]

    @cached_property
    def places(self) -> np.ndarray:
        """[first layer, last layer + 1, 2] the first device and the number of devices that
        `options.device_map` pins such a stage to: -1 if nothing is pinned, and 0 devices if its
        layers are pinned to different ones.
        """
        num_layers = self.job.num_layers
        places = np.full((num_layers, num_layers + 1, 2), -1)
        for first, last in combinations(range(num_layers + 1), 2):
            pins = set().union(*self.job.places[first:last])
            if len(pins) == 1:
                places[first, last] = pins.pop()
            elif pins:
                places[first, last] = (-1, 0)
        return places

    @cached_property
    def may_be(self) -> np.ndarray:
        """[first layer, last layer + 1, submesh] which stages the user's pins allow. One stage of
        all layers is only allowed if neither a schedule nor several stages are pinned.
        """
        num_pinned_devices = self.places[..., 1, None]
        allowed = (num_pinned_devices < 0) | (num_pinned_devices == self.sizes)
        if self.pinned:
            is_other = np.ones(allowed.shape[:2], dtype=bool)
            is_other[self.pinned[:-1], self.pinned[1:]] = False
            allowed[is_other] = False
        # A schedule that the user pins is one of several stages (`pins.py`).
        options = self.job.options
        allowed[0, -1] &= options.schedule is None and options.num_stages in (None, 1)
        return allowed

    @cached_property
    def tables(self) -> StageTables:
        """Costs of all runs of layers on all submeshes, inf seconds where a run is not allowed or
        its optimizer update does not fit.
        """
        cluster = self.job.cluster
        num_devices = cluster.num_devices
        seconds = self._stacked("seconds", np.inf) + self.overhead
        seconds[~self.may_be] = np.inf
        if self.allowed is not None:
            seconds[~self.allowed] = np.inf
        at_update = self._stacked("at_update", 0.0)
        seconds[at_update > self.job.memory_limit] = np.inf

        # Stages take devices in order: the next one starts at the device where one ends.
        starts = None
        if any(self.job.places):
            starts = (self.places[..., 0], np.arange(num_devices, -1, -1))
        joints: list[tuple[int, int] | None] = []
        for devices_left in range(num_devices + 1):
            start = num_devices - devices_left
            joints.append((start, start) if 0 < devices_left < num_devices else None)

        fits = stage_fits(cluster, tuple(self.meshes))
        indices = range(len(self.meshes))
        all_pairs = [(a, b) for a, b in product(indices, indices)]
        boundary, link_at = boundary_tables(self.job, self.meshes, fits, joints, all_pairs)
        return StageTables(
            num_devices=np.array(self.sizes),
            seconds=seconds,
            once_seconds=self._stacked("once", 0.0),
            bytes_always=self._stacked("always", 0.0),
            bytes_in_flight=self._stacked("in_flight", 0.0),
            boundary=boundary,
            fits=fits,
            link_at=link_at,
            starts=starts,
            bytes_at_update=at_update,
            unfit_alive=self.unfit_alive,
        )

    def _stacked(self, name: str, fill_value: float) -> np.ndarray:
        """Return field `name` of all runs, [first layer, last layer + 1, submesh, candidate].

        Submeshes with fewer candidates are filled up with `fill_value`.
        """
        num_candidates = max(runs.seconds.shape[2] for runs in self.runs)
        padded = []
        for runs in self.runs:
            array = getattr(runs, name)
            padding = ((0, 0), (0, 0), (0, num_candidates - array.shape[2]))
            padded.append(np.pad(array, padding, constant_values=fill_value))
        return np.stack(padded, axis=2).astype(float)

    @cached_property
    def _split_backward_tables(self) -> StageTables:
        """The tables for schedules that split the backward.

        Sums over devices do not overlap with matmuls then, and candidates that recompute have inf
        seconds unless stages have to.
        """
        seconds = self.tables.seconds + self._stacked("overlapped", 0.0)
        if not self.job.remat:
            for mesh, runs in enumerate(self.runs):
                num_candidates = runs.remat.shape[2]
                seconds[:, :, mesh, :num_candidates][runs.remat] = np.inf
        return replace(self.tables, seconds=seconds)

    def tables_for(self, schedule: str, num_meshes: int, stages_per_mesh: int) -> StageTables:
        """Return the tables for a schedule, which may split the backward."""
        if splits_backward(schedule, num_meshes, self.job.num_microbatches, stages_per_mesh):
            return self._split_backward_tables
        return self.tables

    def cheapest(
        self,
        tables: StageTables,
        stages: Sequence[tuple[int, int, int]],
        left: Sequence[int],
        alive: Sequence[int],
    ) -> tuple[Stages, list[float]]:
        """Return the cheapest candidate that fits of each stage, and its seconds in a step: inf if
        none fits.

        Args:
            stages: (first layer, last layer + 1, submesh).
            left: of each stage, the devices (or stages, as `tables` count) from it on.
            alive: of each stage, the (micro-batch, stage) pairs in flight on its mesh.
        """
        chosen: list[StageRange] = []
        chosen_seconds: list[float] = []
        for stage, devices_left, pairs in zip(stages, left, alive, strict=True):
            # [candidate]
            seconds = self.job.num_microbatches * tables.seconds[stage] + tables.once_seconds[stage]
            fits = tables.fits_memory(stage, pairs, self.job.memory_limit)
            fits &= tables.may_begin(*stage, devices_left)
            fitting_seconds = np.where(fits, seconds, np.inf)
            chosen.append(StageRange(*stage, int(fitting_seconds.argmin())))
            chosen_seconds.append(float(fitting_seconds.min()))
        return tuple(chosen), chosen_seconds

    def candidates(
        self,
        tables: StageTables,
        left: Sequence[int],
        schedule: str,
        stages_per_mesh: int,
        choices: Sequence[Stages],
        alive: tuple[int, ...],
    ) -> list[Candidate]:
        """Return candidates with the simulated seconds of their step.

        Args:
            left: of each stage, what `tables.link_at` counts by.
            choices: the stages of each candidate; all have the same number of stages.
            alive: of each stage, the (micro-batch, stage) pairs in flight on its mesh.
        """
        candidates: list[Candidate] = []
        pipelines: list[list[tuple[float, float, float, float]]] = []
        for choice in choices:
            candidate = self._candidate(tables, left, schedule, stages_per_mesh, choice, alive)
            candidates.append(candidate)
            pipelines.append(self._stage_seconds(candidate))

        num_meshes = len(alive) // stages_per_mesh
        step_seconds = simulated_seconds(
            schedule, num_meshes, self.job.num_microbatches, pipelines, self.overhead
        )
        return [
            replace(candidate, seconds=seconds)
            for candidate, seconds in zip(candidates, step_seconds, strict=True)
        ]

    def _candidate(
        self,
        tables: StageTables,
        left: Sequence[int],
        schedule: str,
        stages_per_mesh: int,
        choice: Stages,
        alive: tuple[int, ...],
    ) -> Candidate:
        """Return a candidate whose seconds are not simulated yet: they are 0. Args: as of
        `candidates`, for one choice of stages.
        """
        shapes: list[tuple[int, ...]] = []
        remat: list[bool] = []
        for stage in choice:
            runs = self.runs[stage.submesh]
            at = stage.first, stage.last, stage.candidate
            shapes.append(runs.shapes[int(runs.shape[at])])
            remat.append(bool(runs.remat[at]))

        wires: list[float] = []
        for index, (stage, following) in enumerate(pairwise(choice), start=1):
            wire = tables.wire(stage.last, stage.submesh, following.submesh, left[index])
            wires.append(wire)
        wires.append(0.0)
        return Candidate(
            seconds=0.0,
            job=self.job,
            schedule=schedule,
            stages_per_mesh=stages_per_mesh,
            stages=choice,
            submesh_of=tuple(stage.submesh for stage in choice),
            shapes=tuple(shapes),
            remat=tuple(remat),
            alive=alive,
            wires=tuple(wires),
        )

    def _stage_seconds(self, candidate: Candidate) -> list[tuple[float, float, float, float]]:
        """Return (forward, backward, once per step, message to the next stage) of each stage, in
        seconds; the first two and the last of one micro-batch. A backward counts as two forwards,
        with recomputation as three.
        """
        splits = splits_backward(
            candidate.schedule,
            len(candidate.stages) // candidate.stages_per_mesh,
            self.job.num_microbatches,
            candidate.stages_per_mesh,
        )
        stage_seconds = []
        for index, stage in enumerate(candidate.stages):
            runs = self.runs[stage.submesh]
            at = stage.first, stage.last, stage.candidate
            # A backward takes as long as two forwards; recomputation is one forward more.
            num_backward = 3 if candidate.remat[index] else 2
            seconds = float(runs.seconds[at])
            if splits:
                seconds += float(runs.overlapped[at])
            forward = seconds / (1 + num_backward)
            once = float(runs.once[at])
            wire = candidate.wires[index]
            stage_seconds.append((forward, num_backward * forward, once, wire))
        return stage_seconds


def _contain(kinds: Sequence[int], part: Sequence[int]) -> np.ndarray:
    """Return [first, last + 1] whether the run of `kinds` has `part` among its items, in order."""
    num_layers = len(kinds)
    contains = np.zeros((num_layers, num_layers + 1), dtype=bool)
    for first in range(num_layers - len(part) + 1):
        last = first + len(part)
        if list(kinds[first:last]) == list(part):
            contains[: first + 1, last:] = True
    return contains
