"""The seconds and bytes of a configuration, as its middle layer suggests them."""

import math
from dataclasses import replace

from alpa_strategy.fit.configurations import (
    Configuration,
    Estimate,
    kept_bytes,
    stage_bytes,
    stored_bytes,
    turn_bytes,
)
from alpa_strategy.fit.stage_solvers import SCHEDULE, ConfigurationSolvers
from alpa_strategy.inter_op.simulation import runtime_seconds, simulated_seconds
from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_fit import does_not_fit
from alpa_strategy.inter_op.stage_solve import SolvedStage

# Of bytes that exceed a device's limit by this factor, it is enough to know about how many they
# are.
CLEARLY_TOO_LARGE = 1.3

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

    def estimate(self, configuration: Configuration, with_gathers: bool = False) -> Estimate:
        """Return the seconds of a step if every stage had as many middle layers.

        The fastest layouts are tried first, then ZeRO-2 and tensor parallelism by name if they do
        not fit, or if they may be faster.

        Args:
            configuration: without names.
            with_gathers: instead try the named plans that gather parameters for each micro-batch
                (ZeRO-3). `least_seconds_with_gathers` is a lower bound of theirs.

        Raises:
            PlanError: no layouts of the middle layer fit into its share of a device's memory.
        """
        limit = self.task.memory_limit
        least_bytes = self.least_bytes_of_stage(configuration)
        if least_bytes > limit:
            raise does_not_fit("a device needs about", least_bytes, limit)

        least_bytes = math.inf
        fitting: list[Estimate] = []
        for names in ((), *self.names(configuration.logical_mesh)):
            named = replace(configuration, names=names)
            if self._shows_gathers(named) != with_gathers:
                continue
            if fitting and not self._hides_gathers(named):
                continue
            if names and self.least_bytes_of_named(named) > limit:
                continue
            middle = self._middle(named)
            num_bytes = self._bytes_of_stage(named, middle)
            if num_bytes <= limit:
                seconds = self._step_seconds(named, middle.cost)
                fitting.append(Estimate(seconds, named))
            least_bytes = min(least_bytes, num_bytes)
        if not fitting:
            raise does_not_fit("a device needs about", least_bytes, limit)
        return min(fitting, key=lambda estimate: estimate.seconds)

    def least_seconds_with_gathers(self, configuration: Configuration) -> float:
        """Return a lower bound of the seconds of a step that gathers parameters for each
        micro-batch (ZeRO-3).
        """
        gather_seconds = self.solvers.gather_seconds(configuration)
        if configuration.num_stages == 1:
            # The rest may be hidden behind computation.
            gather_seconds *= 1 - self.task.cluster.overlap
        return self.solvers.compute_seconds(configuration) + gather_seconds

    def _bytes_of_stage(self, configuration: Configuration, middle: SolvedStage) -> float:
        """Return the bytes of a device of a stage of middle layers.

        Args:
            configuration: of the stage.
            middle: the middle layer in it.
        """
        alive = self.solvers.alive(configuration)[0]
        share = self._layer_share(configuration.num_stages)
        num_bytes = stage_bytes(middle.cost, alive, configuration.remat, share)
        if configuration.num_stages == 1 and num_bytes <= self.task.memory_limit:
            return self._bytes_with_last_layer(configuration, middle)
        return num_bytes

    def least_bytes_of_stage(self, configuration: Configuration) -> float:
        """Return the bytes of a stage of middle layers if its devices shared them evenly; about as
        many if they are clearly more than the limit.
        """
        about = self._about_bytes_of_stage(configuration)
        if about >= CLEARLY_TOO_LARGE * self.task.memory_limit:
            return about
        return self._stored_evenly(configuration, self._middle_alone(configuration))

    def _about_bytes_of_stage(self, configuration: Configuration) -> float:
        """Return about as many bytes as `least_bytes_of_stage`, without the graph of a micro-batch:
        from the smallest micro-batch, whose activations grow with its samples.
        """
        most = max(self.solvers.counts)
        smallest = replace(configuration, num_microbatches=most)
        growth = most / configuration.num_microbatches
        return self._stored_evenly(configuration, self._middle_alone(smallest), growth)

    def _stored_evenly(
        self, configuration: Configuration, cost: StageCost, growth: float = 1.0
    ) -> float:
        """Return the bytes that stay on a device of a stage whose devices share all evenly.

        Args:
            cost: of a middle layer on one device.
            growth: how many times as many activations there are.
        """
        alive = self.solvers.alive(configuration)[0]
        activations = growth * kept_bytes(cost, alive, configuration.remat)
        return self._shared_evenly(cost.always + activations, configuration)

    def _shared_evenly(self, num_bytes: float, configuration: Configuration) -> float:
        """Return the bytes of a device of a stage whose devices share all evenly.

        Args:
            num_bytes: of a middle layer.
        """
        num_devices = math.prod(self.solvers.submesh(configuration.num_stages))
        return num_bytes / num_devices / self._layer_share(configuration.num_stages)

    def least_bytes_of_named(self, configuration: Configuration) -> float:
        """Return a lower bound of the bytes of a device under a named plan: of parameters and
        activations alone, without gradients and the optimizer's state.

        Axes of ZeRO-2 replicate the parameters, the others share them. All devices of a stage share
        the activations evenly.
        """
        num_shards = configuration.num_stages
        for name, size in zip(configuration.names, configuration.logical_mesh, strict=True):
            if name != "zero2":
                num_shards *= size
        # Offloaded parameters are in host memory.
        num_bytes = 0 if self.task.options.offload else self.solvers.parameter_bytes
        cost = self._middle_alone(configuration)
        alive = self.solvers.alive(configuration)[0]
        activations = kept_bytes(cost, alive, configuration.remat)
        return num_bytes / num_shards + self._shared_evenly(activations, configuration)

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
        cost = self._middle(configuration).cost
        return self._step_seconds(configuration, cost) >= seconds

    def _shows_gathers(self, configuration: Configuration) -> bool:
        """Whether a named plan gathers parameters for each micro-batch, and is slower for it."""
        return "zero3" in configuration.names and not self._hides_gathers(configuration)

    def _hides_gathers(self, configuration: Configuration) -> bool:
        """Whether a named plan may be faster than the fastest layouts, which are solved as if no
        gather overlapped with computation.
        """
        is_alone = configuration.num_stages == 1 and len(configuration.logical_mesh) == 1
        return is_alone and self.task.cluster.overlap > 0 and configuration.names == ("zero3",)

    def _bytes_with_last_layer(self, configuration: Configuration, middle: SolvedStage) -> float:
        """Return the bytes of a device that has all layers: the last one has the logits and the
        loss.

        Args:
            configuration: of one stage.
            middle: its middle layer.
        """
        job = self.solvers.of(configuration).job
        last = self._layer(configuration, job.num_layers - 1)
        remat = configuration.remat
        turn_of_last = turn_bytes(last.cost, remat)
        seconds = self.solvers.layer_seconds
        num_others = sum(seconds[:-1]) / seconds[job.num_layers // 2]
        if job.gradients_begin:
            # The other layers have no gradients yet.
            turn_of_last -= num_others * middle.plan.predicted.memory["gradients"]
        stored = num_others * stored_bytes(middle.cost, 1, remat)
        stored += stored_bytes(last.cost, 1, remat)
        return stored + max(turn_bytes(middle.cost, remat), turn_of_last)

    def _middle(
        self, configuration: Configuration, submesh: tuple[int, int] | None = None
    ) -> SolvedStage:
        """Return `_layer` of the middle layer."""
        middle = self.solvers.of(configuration).job.num_layers // 2
        return self._layer(configuration, middle, submesh)

    def _layer(
        self, configuration: Configuration, layer: int, submesh: tuple[int, int] | None = None
    ) -> SolvedStage:
        """Return a layer alone, in the fastest layouts that the configuration allows.

        Args:
            configuration: of the stages.
            layer: its index.
            submesh: on which it is; None: that of the configuration's stages.
        """
        solver = self.solvers.of(configuration)
        alive = self.solvers.alive(configuration)[0]
        request = self.solvers.request(solver.job, layer, layer + 1, configuration, alive)
        if submesh is not None:
            request = replace(request, submesh=submesh)
        return solver.fastest(request)

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

    def _step_seconds(self, configuration: Configuration, cost: StageCost) -> float:
        """Return the simulated seconds of equal stages of middle layers of that cost."""
        layers = 1 / self._layer_share(configuration.num_stages)
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
