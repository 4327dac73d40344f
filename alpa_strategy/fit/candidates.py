"""The configurations that a search tries, ordered by a lower bound of their seconds."""

import math
from collections.abc import Iterable, Iterator, Sequence

from alpa_strategy.fit.configurations import Candidate, Configuration, usual_sequences
from alpa_strategy.fit.stage_solvers import SCHEDULE, ConfigurationSolvers
from alpa_strategy.inter_op.mesh_options import allowed_shapes
from alpa_strategy.microbatch.transform import num_split_samples
from alpa_strategy.schedules import refusal


class Candidates:
    """The configurations of one task.

    Args:
        solvers: of the task.
    """

    def __init__(self, solvers: ConfigurationSolvers) -> None:
        self.task = solvers.task
        self.solvers = solvers

    def usual(self) -> list[Candidate]:
        """Return the usual configurations, the fastest first."""
        return self._ordered(self._configurations(usual_sequences(self.task.step)))

    def small(self) -> list[Candidate]:
        """Return (least seconds, configuration) of those with the most micro-batches that are not
        among the usual ones, the fastest first: they need the least memory, and leave devices parts
        of sequences. PlanError: as of `_configurations`.
        """
        usual = set(self._configurations(usual_sequences(self.task.step)))
        smallest = self._configurations((0,))
        return self._ordered(conf for conf in smallest if conf not in usual)

    def _ordered(self, configurations: Iterable[Configuration]) -> list[Candidate]:
        """Return (least seconds, configuration) of each, the fastest first, without duplicates."""
        candidates = []
        for configuration in dict.fromkeys(configurations):
            compute_seconds = self.solvers.compute_seconds(configuration)
            least_seconds = compute_seconds + self._gather_seconds(configuration)
            candidates.append((least_seconds, configuration))
        return sorted(candidates, key=lambda candidate: candidate[0])

    def _gather_seconds(self, configuration: Configuration) -> float:
        """Return the seconds of gathering parameters (ZeRO-3) that nothing hides; 0 if parameters
        and gradients fit without.
        """
        shape = configuration.logical_mesh
        num_shards = configuration.num_stages * math.prod(shape[1:])
        if 2 * self.solvers.parameter_bytes / num_shards <= self.task.memory_limit:
            return 0.0
        return (1 - self.task.cluster.overlap) * self.solvers.gather_seconds(configuration)

    def _configurations(self, sequences: Sequence[float]) -> Iterator[Configuration]:
        """Yield the configurations to solve: numbers of stages, logical meshes, micro-batches,
        recomputation.

        Args:
            sequences: of a micro-batch on each device that computes sequences of its own; 0: as few
                as possible.

        Raises:
            PlanError: no number of micro-batches is possible.
        """
        options = self.task.options
        counts = self.solvers.counts
        num_sequences = num_split_samples(self.task.step)
        remats: tuple[bool, ...] = (False, True)
        if isinstance(options.remat, bool):
            remats = (options.remat,)
        elif options.remat is not None:
            remats = (False,)
        for num_stages in self._stage_counts():
            submesh = self.solvers.submesh(num_stages)
            for shape in self._shapes(submesh):
                for per_device in sequences:
                    # With two for each stage, stages are idle for a third of the step.
                    least = 1 if num_stages == 1 else 2 * num_stages
                    wanted = max(least, num_sequences / max(1, per_device * shape[0]))
                    count = min(counts, key=lambda count: abs(math.log(count / wanted)))
                    if num_stages > 1 and refusal(SCHEDULE, num_stages, count):
                        continue
                    for remat in remats:
                        yield Configuration(num_stages, count, shape, remat)

    def _stage_counts(self) -> list[int]:
        """Return the numbers of stages to try: the pinned one, or powers of two that divide the
        devices into full nodes or equal parts of one, at most one stage per layer.
        """
        pinned = self.task.options.num_stages
        if pinned is not None:
            return [pinned]
        num_devices = self.task.cluster.num_devices
        counts = []
        count = 1
        while count <= min(num_devices, self.solvers.num_layers):
            if num_devices % count == 0 and self._has_submesh(count):
                counts.append(count)
            count *= 2
        return counts

    def _has_submesh(self, num_stages: int) -> bool:
        """Return whether equal stages are full nodes or equal parts of one."""
        size = self.task.cluster.num_devices // num_stages
        per_node = self.task.cluster.devices_per_node
        return size % per_node == 0 or per_node % size == 0

    def _shapes(self, submesh: tuple[int, int]) -> list[tuple[int, ...]]:
        """Return the flat mesh, and those whose second axis is all devices per node of `submesh` or
        half of them, at least 2; all that are allowed if the options pin `logical_mesh`.
        """
        allowed = allowed_shapes(self.task.cluster, self.task.options, submesh)
        if self.task.options.logical_mesh is not None:
            return list(allowed)
        full = submesh[1]
        wanted = {full, max(2, full // 2)}
        shapes = []
        for shape in allowed:
            if len(shape) == 1 or shape[1] in wanted:
                shapes.append(shape)
        return shapes
