"""A search of seconds: equal stages on equal meshes, as people set them up by hand, with layouts
that the integer program solves.

A configuration is a number of stages and of micro-batches, the logical mesh of a stage, and whether
it recomputes. One layer in the middle of the model stands for all others: its layouts are solved
within its share of a device's memory, and its costs times the number of layers order the
configurations. The best are then solved exactly, stage by stage. `planner.choose_plan` searches
more (stages and meshes of any size, other schedules, host memory) and takes minutes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.mesh_options import allowed_shapes
from alpa_strategy.inter_op.pins import layers_of
from alpa_strategy.inter_op.simulation import runtime_seconds, simulated_seconds
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_problem import StageCost
from alpa_strategy.inter_op.stage_solve import SolvedStage, StageRequest, StageSolver
from alpa_strategy.ir.plan import Plan
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.planner.assembly import plan_of
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.failures import no_plan_error
from alpa_strategy.planner.microbatch_search import microbatch_counts
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import in_flight, refusal
from alpa_strategy.sharding.cross_mesh import boundary_link

# The order of work of several stages.
SCHEDULE = "1F1B"

# Sequences of a micro-batch on each device that computes sequences of its own.
_SEQUENCES_OF_A_DEVICE = (1, 4)

# Configurations that are estimated, and that are solved exactly.
_MAX_ESTIMATED = 24
_MAX_SOLVED = 4

# Most seconds of one integer program.
_SOLVER_SECONDS = 2.0

# An estimate may be above the solved step by this factor.
_SLACK = 1.03


@dataclass(frozen=True)
class Configuration:
    """Equal stages on equal meshes."""

    num_stages: int
    num_microbatches: int

    # Of each stage.
    logical_mesh: tuple[int, ...]
    remat: bool


@dataclass(frozen=True)
class Estimate:
    """A configuration with the seconds of a step that its middle layer suggests."""

    seconds: float
    configuration: Configuration


def search_regular(task: PlanTask) -> Plan:
    """Return the best plan of equal stages on equal meshes.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    search = RegularSearch(task)
    with task.progress("estimate"):
        estimates = search.estimates()
    failures: list[tuple[str, PlanError]] = list(search.failures)
    best: Plan | None = None
    num_solved = 0
    for estimate in estimates:
        best_seconds = math.inf if best is None else best.predicted.step_seconds
        if num_solved >= _MAX_SOLVED or estimate.seconds >= best_seconds * _SLACK:
            break
        with task.progress("solve the stages"):
            try:
                plan = search.plan(estimate.configuration)
            except PlanError as error:
                failures.append((_label(estimate.configuration), error))
                continue
        num_solved += 1
        if plan.predicted.step_seconds < best_seconds:
            best = plan
    if best is None:
        fix = "use more devices, fewer or shorter sequences, or relax the pinned options"
        raise no_plan_error("no plan fits", failures, fix)
    return best


class RegularSearch:
    """The configurations of one task; what is priced once serves all of them."""

    def __init__(self, task: PlanTask) -> None:
        self.task = task
        self.failures: list[tuple[str, PlanError]] = []
        # By number of micro-batches; None: the step cannot be split so.
        self._solvers: dict[int, StageSolver | None] = {}

    def estimates(self) -> list[Estimate]:
        """Return the configurations that seem to fit, the fastest first."""
        estimates: list[Estimate] = []
        best_seconds = math.inf
        num_estimated = 0
        for bound, configuration in self._candidates():
            if num_estimated >= _MAX_ESTIMATED or bound >= best_seconds:
                break
            num_estimated += 1
            try:
                seconds = self._estimated_seconds(configuration)
            except PlanError as error:
                self.failures.append((_label(configuration), error))
                continue
            best_seconds = min(best_seconds, seconds)
            estimates.append(Estimate(seconds, configuration))
        return sorted(estimates, key=lambda estimate: estimate.seconds)

    def plan(self, configuration: Configuration) -> Plan:
        """Return the plan of a configuration, each stage solved exactly.

        Raises:
            PlanError: a stage does not fit.
        """
        solver = self._solver(configuration.num_microbatches)
        assert solver is not None
        job = solver.job
        submesh = self._submesh(configuration.num_stages)
        num_devices = math.prod(submesh)
        alive = self._alive(configuration)
        solved: list[SolvedStage] = []
        wires: list[float] = []
        first_devices: list[int] = []
        bounds = self._stage_bounds(configuration)
        for index, (first, last) in enumerate(pairwise(bounds)):
            request = self._request(job, first, last, configuration, alive[index])
            solved.append(solver.solve(request))
            first_devices.append(index * num_devices)
            is_last = index == configuration.num_stages - 1
            wires.append(0.0 if is_last else self._wire_seconds(job, last, submesh, index))
        plan = plan_of(job, self.task.fingerprint, solved, first_devices, SCHEDULE, wires)
        notes = (*job.graph.notes, *plan.notes)
        return replace(plan, notes=notes)

    # --- Candidates

    def _candidates(self) -> list[tuple[float, Configuration]]:
        """Return (least seconds, configuration), the least first."""
        candidates = []
        for configuration in dict.fromkeys(self._configurations()):
            num_stages = configuration.num_stages
            count = configuration.num_microbatches
            bubble = (count + num_stages - 1) / count
            # A recomputed forward is a third more.
            more = 4 / 3 if configuration.remat else 1.0
            candidates.append((self._ideal_seconds * bubble * more, configuration))
        return sorted(candidates, key=lambda candidate: candidate[0])

    def _configurations(self) -> Iterator[Configuration]:
        options = self.task.options
        cluster = self.task.cluster
        counts = microbatch_counts(self.task.step, cluster, options)
        num_sequences = max(counts)
        remats: tuple[bool, ...] = (False, True)
        if isinstance(options.remat, bool):
            remats = (options.remat,)
        elif options.remat is not None:
            remats = (False,)
        for num_stages in self._stage_counts():
            submesh = self._submesh(num_stages)
            for shape in self._shapes(submesh):
                for per_device in _SEQUENCES_OF_A_DEVICE:
                    wanted = num_sequences / (per_device * shape[0])
                    count = min(counts, key=lambda count: abs(math.log(count / max(1, wanted))))
                    if num_stages > 1 and refusal(SCHEDULE, num_stages, count):
                        continue
                    for remat in remats:
                        yield Configuration(num_stages, count, shape, remat)

    def _stage_counts(self) -> list[int]:
        pinned = self.task.options.num_stages
        if pinned is not None:
            return [pinned]
        num_devices = self.task.cluster.num_devices
        counts = []
        count = 1
        while count <= min(num_devices, self._num_layers):
            if num_devices % count == 0 and self._has_submesh(count):
                counts.append(count)
            count *= 2
        return counts

    def _has_submesh(self, num_stages: int) -> bool:
        size = self.task.cluster.num_devices // num_stages
        per_node = self.task.cluster.devices_per_node
        return size % per_node == 0 or per_node % size == 0

    def _submesh(self, num_stages: int) -> tuple[int, int]:
        """Return (nodes, devices per node) of one of equal stages."""
        size = self.task.cluster.num_devices // num_stages
        per_node = self.task.cluster.devices_per_node
        return (1, size) if size <= per_node else (size // per_node, per_node)

    def _shapes(self, submesh: tuple[int, int]) -> list[tuple[int, ...]]:
        """Return the flat mesh, and those whose second axis is half a node or a full one."""
        allowed = allowed_shapes(self.task.cluster, self.task.options, submesh)
        if self.task.options.logical_mesh is not None:
            return list(allowed)
        full = submesh[1]
        wanted = {full, max(2, full // 2)}
        return [shape for shape in allowed if len(shape) == 1 or shape[1] in wanted]

    # --- Estimates

    def _estimated_seconds(self, configuration: Configuration) -> float:
        """Return the seconds of a step if every stage had as many middle layers.

        Raises:
            PlanError: the middle layer does not fit into its share of a device's memory.
        """
        count = configuration.num_microbatches
        solver = self._solver(count)
        if solver is None:
            raise PlanError(f"the step cannot be split into {count} micro-batches")
        job = solver.job
        share = self._layer_share(configuration.num_stages)
        alive = self._alive(configuration)[0]
        middle = job.num_layers // 2
        request = self._request(job, middle, middle + 1, configuration, alive)
        cost = solver.solve(request).cost
        # Temporary memory is not shared by layers, as they use it in turn.
        temporary = max(cost.working, cost.again[0] if configuration.remat else 0.0)
        layer_bytes = cost.num_bytes(alive, configuration.remat) - temporary
        left = self.task.memory_limit - temporary
        if layer_bytes > share * left:
            limit = share * left + temporary
            cost = self._within(solver, limit).solve(request).cost
        return self._step_seconds(configuration, cost, share)

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
        weights = self._layer_seconds
        return weights[len(weights) // 2] / (sum(weights) / num_stages)

    @cached_property
    def _layer_seconds(self) -> list[float]:
        """Seconds of each layer's ops on one device."""
        job = self._any_solver.job
        costs = self.task.op_costs
        seconds = []
        for first, last in pairwise(job.cuts):
            ops = job.graph.ops[first:last]
            seconds.append(sum(sum(costs.op_seconds(op.call)) for op in ops))
        return seconds

    @cached_property
    def _ideal_seconds(self) -> float:
        """Seconds of a step if all devices were always busy with its ops alone."""
        count = self._any_solver.job.num_microbatches
        return count * sum(self._layer_seconds) / self.task.cluster.num_devices

    @cached_property
    def _any_solver(self) -> StageSolver:
        """The solver of the most micro-batches that the step can be split into."""
        for count in microbatch_counts(self.task.step, self.task.cluster, self.task.options):
            solver = self._solver(count)
            if solver is not None:
                return solver
        _, error = self.failures[-1]
        raise error

    @property
    def _num_layers(self) -> int:
        return self._any_solver.job.num_layers

    # --- Stages

    def _solver(self, count: int) -> StageSolver | None:
        if count not in self._solvers:
            try:
                self._solvers[count] = StageSolver(self._job(count))
            except PlanError as error:
                self.failures.append((f"{count} micro-batches", error))
                self._solvers[count] = None
        return self._solvers[count]

    def _job(self, count: int) -> StageCostTask:
        task = self.task
        options = replace(
            task.options, solver_seconds=min(_SOLVER_SECONDS, task.options.solver_seconds)
        )
        task = replace(task, options=options)
        graph = microbatch(task.step, count, task.cluster.num_devices).graph
        cuts, places = layers_of(graph, task.cluster, task.options)
        remat = task.options.remat
        if isinstance(remat, tuple):
            # Names of ops: single results are recomputed, no segments of layers.
            remat = False
        return stage_cost_task(task, graph, cuts, count, remat=remat, places=places)

    def _within(self, solver: StageSolver, limit: float) -> StageSolver:
        """Return a solver of the same job with another limit of memory, which shares prices."""
        other = StageSolver(replace(solver.job, memory_limit=limit))
        other._tables = solver._tables
        other._free = solver._free
        return other

    def _request(
        self,
        job: StageCostTask,
        first: int,
        last: int,
        configuration: Configuration,
        alive: int,
    ) -> StageRequest:
        return StageRequest(
            first=job.cuts[first],
            last=job.cuts[last],
            submesh=self._submesh(configuration.num_stages),
            shape=configuration.logical_mesh,
            remat=configuration.remat,
            alive=alive,
            cuts=job.cuts[first + 1 : last],
        )

    def _alive(self, configuration: Configuration) -> Sequence[int]:
        if configuration.num_stages == 1:
            return (1,)
        return in_flight(SCHEDULE, configuration.num_stages, configuration.num_microbatches)

    def _stage_bounds(self, configuration: Configuration) -> list[int]:
        """Return the first layer of each stage, and the number of layers: about equal seconds."""
        weights = self._layer_seconds
        ends = list(accumulate(weights))
        num_stages = configuration.num_stages
        bounds = [0]
        for index in range(1, num_stages):
            goal = ends[-1] * index / num_stages
            least = bounds[-1] + 1
            most = len(weights) - (num_stages - index)
            nearest = min(range(least, most + 1), key=lambda last: abs(ends[last - 1] - goal))
            bounds.append(nearest)
        return [*bounds, len(weights)]

    def _wire_seconds(
        self, job: StageCostTask, cut: int, submesh: tuple[int, int], index: int
    ) -> float:
        """Return the seconds of a micro-batch's messages across a cut, and back."""
        cluster = self.task.cluster
        last_sender = (index + 1) * math.prod(submesh) - 1
        per_node = cluster.devices_per_node
        crosses_nodes = last_sender // per_node != (last_sender + 1) // per_node
        link = boundary_link(submesh, submesh, cluster, crosses_nodes)
        num_bytes = job.crossing_bytes[cut]
        messages = int((num_bytes > 0).sum())
        return messages * link.latency + float(num_bytes.sum()) / link.bandwidth


def _label(configuration: Configuration) -> str:
    """Return a configuration in words, for errors."""
    mesh = "x".join(map(str, configuration.logical_mesh))
    text = f"{configuration.num_stages} stages of {mesh}"
    text += f", {configuration.num_microbatches} micro-batches"
    return f"{text}, recomputed" if configuration.remat else text
