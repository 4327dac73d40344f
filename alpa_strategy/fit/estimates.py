"""The seconds and bytes of a configuration, as its middle layer suggests them."""

import math
from dataclasses import replace

from alpa_strategy.fit.configurations import (
    Configuration,
    Estimate,
    stage_bytes,
    turn_bytes,
)
from alpa_strategy.fit.stage_solvers import SCHEDULE, ConfigurationSolvers
from alpa_strategy.inter_op.simulation import runtime_seconds, simulated_seconds
from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_fit import does_not_fit
from alpa_strategy.inter_op.stage_solve import SolvedStage

# Named plans that need less memory than the fastest layouts.
_ZERO = ("zero2", "zero3")


class Estimates:
    """Estimates of the configurations of one task.

    Args:
        solvers: of the task.
    """

    def __init__(self, solvers: ConfigurationSolvers) -> None:
        self.task = solvers.task
        self.solvers = solvers
        # By number of micro-batches, and whether layers are recomputed.
        self._costs_alone: dict[tuple[int, bool], StageCost] = {}

    def estimate(self, configuration: Configuration, most_seconds: float) -> Estimate:
        """Return the seconds of a step if every stage had as many middle layers.

        The fastest layouts are tried first, then ZeRO and tensor parallelism by name if they do not
        fit, or if they may be faster.

        Args:
            configuration: without names.
            most_seconds: of a step. ZeRO-3 that takes longer with its gathers is left out.

        Raises:
            PlanError: no layouts of the middle layer fit into its share of a device's memory.
        """
        share = self._layer_share(configuration.num_stages)
        least_bytes = self.least_bytes_of_stage(configuration)
        alive = self.solvers.alive(configuration)[0]
        if least_bytes <= self.task.memory_limit:
            least_bytes = math.inf
            fitting: list[Estimate] = []
            for names in ((), *self.names(configuration.logical_mesh)):
                is_hidden = self._hides_gathers(configuration, names)
                if fitting and not is_hidden:
                    continue
                named = replace(configuration, names=names)
                if not is_hidden and self._gathers_too_long(named, most_seconds):
                    continue
                if names and self.least_bytes_of_named(named) > self.task.memory_limit:
                    continue
                cost = self._middle(named, self.solvers.submesh(named.num_stages)).cost
                num_bytes = stage_bytes(cost, alive, named.remat, share)
                if num_bytes <= self.task.memory_limit and named.num_stages == 1:
                    num_bytes += self._more_bytes_of_last_layer(named, cost)
                if num_bytes <= self.task.memory_limit:
                    fitting.append(Estimate(self._step_seconds(named, cost, share), named))
                least_bytes = min(least_bytes, num_bytes)
            if fitting:
                return min(fitting, key=lambda estimate: estimate.seconds)
        raise does_not_fit("a device needs about", least_bytes, self.task.memory_limit)

    def least_bytes_of_stage(self, configuration: Configuration) -> float:
        """Return the bytes of a stage of middle layers if its devices shared them evenly."""
        num_devices = math.prod(self.solvers.submesh(configuration.num_stages))
        share = num_devices * self._layer_share(configuration.num_stages)
        always = self._middle_alone(configuration).always / share
        return always + self._least_activation_bytes(configuration)

    def _least_activation_bytes(self, configuration: Configuration) -> float:
        """Return the bytes of the activations of a stage of middle layers, as of
        `least_bytes_of_stage`.
        """
        cost = self._middle_alone(configuration)
        in_flight = self.solvers.alive(configuration)[0]
        of_layer = (cost.segment_inputs if configuration.remat else cost.saved) * in_flight
        num_devices = math.prod(self.solvers.submesh(configuration.num_stages))
        return of_layer / num_devices / self._layer_share(configuration.num_stages)

    def least_bytes_of_named(self, configuration: Configuration) -> float:
        """Return the bytes of a stage of a named plan whose devices share all evenly but the
        parameters, which ZeRO-2 replicates.
        """
        num_shards = configuration.num_stages
        for name, size in zip(configuration.names, configuration.logical_mesh, strict=True):
            if name != "zero2":
                num_shards *= size
        parameters = self.task.step.parameters
        num_bytes = sum(parameter.meta.num_bytes for parameter in parameters)
        return num_bytes / num_shards + self._least_activation_bytes(configuration)

    def names(self, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
        """Return named plans that need less memory than the fastest one, an entry per mesh axis; []
        if the user chose layouts.
        """
        if self.task.options.parallel != "auto" or self.task.options.placements:
            return []
        others = len(shape) - 1
        names = [(name, *("tensor",) * others) for name in _ZERO]
        names += [(name, *(name,) * others) for name in _ZERO]
        return list(dict.fromkeys(names))

    def is_slower(self, configuration: Configuration, seconds: float) -> bool:
        """Whether a configuration in its fastest layouts, whatever their memory, seems to take
        `seconds` at least.
        """
        if math.isinf(seconds):
            return False
        cost = self._middle(configuration, self.solvers.submesh(configuration.num_stages)).cost
        share = self._layer_share(configuration.num_stages)
        return self._step_seconds(configuration, cost, share) >= seconds

    def _gathers_too_long(self, configuration: Configuration, seconds: float) -> bool:
        """Whether a named plan gathers parameters for each micro-batch (ZeRO-3), and takes
        `seconds` at least with that.
        """
        if "zero3" not in configuration.names:
            return False
        gather_seconds = self.solvers.gather_seconds(configuration)
        if configuration.num_stages == 1:
            # The rest may be hidden behind computation.
            gather_seconds *= 1 - self.task.cluster.overlap
        return self.solvers.compute_seconds(configuration) + gather_seconds >= seconds

    def _hides_gathers(self, configuration: Configuration, names: tuple[str, ...]) -> bool:
        """Whether the named plan `names` may be faster than the fastest layouts, which are solved
        as if no gather overlapped with computation.
        """
        is_alone = configuration.num_stages == 1 and len(configuration.logical_mesh) == 1
        return is_alone and self.task.cluster.overlap > 0 and names == ("zero3",)

    def _more_bytes_of_last_layer(self, configuration: Configuration, middle: StageCost) -> float:
        """Return how many bytes more than a middle layer the last one uses in its turn: it has the
        logits and the loss.
        """
        solver = self.solvers.of(configuration)
        submesh = self.solvers.submesh(configuration.num_stages)
        last = self._layer(configuration, solver.job.num_layers - 1, submesh).cost
        remat = configuration.remat
        return max(0.0, turn_bytes(last, remat) - turn_bytes(middle, remat))

    def _middle(self, configuration: Configuration, submesh: tuple[int, int]) -> SolvedStage:
        """Return the middle layer alone, in the fastest layouts that the configuration allows."""
        middle = self.solvers.of(configuration).job.num_layers // 2
        return self._layer(configuration, middle, submesh)

    def _layer(
        self, configuration: Configuration, layer: int, submesh: tuple[int, int]
    ) -> SolvedStage:
        """Return a layer alone, in the fastest layouts that the configuration allows."""
        solver = self.solvers.of(configuration)
        alive = self.solvers.alive(configuration)[0]
        request = self.solvers.request(solver.job, layer, layer + 1, configuration, alive)
        return solver.fastest(replace(request, submesh=submesh))

    def _middle_alone(self, configuration: Configuration) -> StageCost:
        """Return the cost of the middle layer on one device, which meshes and stages of other sizes
        share.
        """
        key = configuration.num_microbatches, configuration.remat
        if key not in self._costs_alone:
            # Names of the mesh's axes have no meaning on one device.
            alone = replace(configuration, logical_mesh=(1,), names=("auto",))
            self._costs_alone[key] = self._middle(alone, (1, 1)).cost
        return self._costs_alone[key]

    def _step_seconds(self, configuration: Configuration, cost: StageCost, share: float) -> float:
        """Return the simulated seconds of equal stages, each of 1 / share layers of that cost."""
        layers = 1 / share
        forward = layers * cost.forward
        backward = layers * cost.backward + (forward if configuration.remat else 0.0)
        stage = (forward, backward, layers * cost.once, 0.0)
        overhead = runtime_seconds(self.task.cluster.device)
        num_stages = configuration.num_stages
        (seconds,) = simulated_seconds(
            SCHEDULE, num_stages, configuration.num_microbatches, [[stage] * num_stages], overhead
        )
        return seconds

    def _layer_share(self, num_stages: int) -> float:
        """Return the middle layer's share of a stage's seconds, if it were alone on its devices."""
        weights = self.solvers.layer_seconds
        return weights[len(weights) // 2] / (sum(weights) / num_stages)
