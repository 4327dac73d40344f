"""A search of seconds: equal stages on equal meshes, as people set them up by hand, with layouts
that the integer program solves.

A configuration is a number of stages and of micro-batches, the logical mesh of a stage, and whether
it recomputes. One layer in the middle of the model stands for all others: its layouts are solved
within its share of a device's memory, and its costs times the number of layers order the
configurations. The best are then solved exactly, stage by stage. `planner.choose_plan` searches
more (stages and meshes of any size, other schedules, host memory) and takes minutes.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.fit.configurations import (
    Candidate,
    Configuration,
    Estimate,
    equal_stages,
    stage_bytes,
    usual_sequences,
    wire_seconds,
)
from alpa_strategy.fit.failures import Failure, needed_bytes, nothing_fits, with_need
from alpa_strategy.inter_op.mesh_options import allowed_shapes
from alpa_strategy.inter_op.pins import Place, layers_of
from alpa_strategy.inter_op.simulation import runtime_seconds, simulated_seconds
from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_fit import does_not_fit
from alpa_strategy.inter_op.stage_solve import SolvedStage, StageRequest, StageSolver
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import NO_BOUND, Plan
from alpa_strategy.microbatch.transform import microbatch, num_split_samples
from alpa_strategy.planner.assembly import plan_of
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.figures import with_figures
from alpa_strategy.planner.microbatch_search import microbatch_counts
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import in_flight, refusal

# The order of work of several stages.
SCHEDULE = "1F1B"

# Configurations that may fit by their least memory and are estimated; and that are solved exactly.
_MAX_ESTIMATED = 8
_MAX_SOLVED = 2

# Most seconds of one integer program.
_SOLVER_SECONDS = 2.0

# Op indices that split a micro-batch into layers, and the meshes that are pinned for each layer.
Layers = tuple[tuple[int, ...], tuple[frozenset[Place], ...]]

# Named plans that need less memory than the fastest layouts.
_ZERO = ("zero2", "zero3")

# Solves a stage.
SolveStage = Callable[[StageSolver, StageRequest], SolvedStage]

# An estimate may be above the solved step by this factor.
_SLACK = 1.03


def search_regular(task: PlanTask) -> Plan:
    """Return the best plan of equal stages on equal meshes.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
    """
    search = RegularSearch(task)
    best = search.best_of(search.candidates())
    if best is None:
        best = search.best_of(search.small_candidates())
    if best is None:
        best = search.best_within_limit()
    if best is None:
        raise nothing_fits(search.failures, task.memory_limit)
    # Unequal stages and other schedules were not looked at.
    return with_figures(replace(best, gap=NO_BOUND), task)


class RegularSearch:
    """The configurations of one task; what is priced once serves all of them."""

    def __init__(self, task: PlanTask) -> None:
        self.task = task
        self.failures: list[Failure] = []
        # Of configurations whose fastest layouts, and named plans, do not fit.
        self._too_large: list[Estimate] = []
        # By number of micro-batches; None: the step cannot be split so.
        self._solvers: dict[int, StageSolver | None] = {}
        self._named_solvers: dict[Hashable, StageSolver] = {}
        # By number of micro-batches, and whether layers are recomputed.
        self._costs_alone: dict[tuple[int, bool], StageCost] = {}
        # By names and kinds of a micro-batch's ops.
        self._layers_by_ops: dict[Hashable, Layers] = {}

    def best_of(self, candidates: Iterable[Candidate]) -> Plan | None:
        """Return the best plan of candidates that come the fastest first; None: nothing fits.

        More of them are estimated until one fits when it is solved.
        """
        remaining = deque(candidates)
        best: Plan | None = None
        while best is None and remaining:
            with self.task.progress("estimate"):
                estimates = self._next_estimates(remaining)
            best = self._best_of_estimates(estimates)
        return best

    def _best_of_estimates(self, estimates: Sequence[Estimate]) -> Plan | None:
        """Return the best plan of `estimates`, which are solved in their order; None: none fits."""
        best: Plan | None = None
        num_solved = 0
        for estimate in estimates:
            best_seconds = math.inf if best is None else best.predicted.step_seconds
            if num_solved >= _MAX_SOLVED or estimate.seconds >= best_seconds * _SLACK:
                break
            with self.task.progress("solve the stages"):
                try:
                    plan = self.plan(estimate.configuration)
                except PlanError as error:
                    self.failures.append((estimate.configuration.label, error))
                    self._too_large.append(estimate)
                    continue
            num_solved += 1
            if plan.predicted.step_seconds < best_seconds:
                best = plan
        return best

    def _next_estimates(self, candidates: deque[Candidate]) -> list[Estimate]:
        """Take candidates from the front, and return those that seem to fit, the fastest first."""
        estimates: list[Estimate] = []
        best_seconds = math.inf
        num_estimated = 0
        while candidates:
            bound, configuration = candidates[0]
            if num_estimated >= _MAX_ESTIMATED or bound >= best_seconds:
                break
            candidates.popleft()
            try:
                if self._least_bytes_of_stage(configuration) <= self.task.memory_limit:
                    num_estimated += 1
                estimate = self._estimate(configuration)
            except PlanError as error:
                self.failures.append((configuration.label, error))
                continue
            best_seconds = min(best_seconds, estimate.seconds)
            estimates.append(estimate)
        return sorted(estimates, key=lambda estimate: estimate.seconds)

    def best_within_limit(self) -> Plan | None:
        """Return the first plan, the fastest estimate first, of the configurations that
        `best_of` has left out, in layouts that are solved within the limit; None: nothing fits.

        Such a solve takes a minute, where the fastest layouts take seconds.
        """
        for estimate in sorted(self._too_large, key=lambda estimate: estimate.seconds):
            with self.task.progress("solve the stages within the limit"):
                try:
                    return self._within_limit(estimate.configuration)
                except PlanError as error:
                    self.failures.append((estimate.configuration.label, error))
        return None

    def plan(self, configuration: Configuration) -> Plan:
        """Return the plan of a configuration, each stage solved exactly.

        The fastest layouts are taken if they fit. Otherwise named plans that need less memory are
        tried. If one of them fits, layouts are also solved within the limit, and the faster plan is
        returned.

        Raises:
            PlanError: neither fits.
        """
        failures: list[PlanError] = []
        try:
            return self._plan(configuration, self._fastest_that_fits)
        except DoesNotFitError as error:
            failures.append(error)

        plans: list[Plan] = []
        for names in self._names(configuration.logical_mesh):
            if names == configuration.names:
                continue
            named = replace(configuration, names=names)
            try:
                plan = self._plan(named, self._fastest_that_fits)
            except PlanError as error:
                failures.append(error)
                continue
            note = f"the fastest layouts do not fit: the plan is parallel={list(names)}"
            plans.append(replace(plan, notes=(*plan.notes, note)))
        if not plans:
            raise min(failures, key=lambda error: needed_bytes(error, self.task.memory_limit))
        with suppress(PlanError):
            plans.append(self._within_limit(configuration))
        return min(plans, key=lambda plan: plan.predicted.step_seconds)

    def _within_limit(self, configuration: Configuration) -> Plan:
        """Return the plan whose layouts are solved within the limit.

        Raises:
            PlanError: it does not fit.
        """
        try:
            return self._plan(replace(configuration, names=()), StageSolver.solve)
        except PlanError as error:
            raise with_need(error, self.task.memory_limit) from error

    def _fastest_that_fits(self, solver: StageSolver, request: StageRequest) -> SolvedStage:
        """Return the stage in its fastest layouts. Raises: DoesNotFitError: they do not fit."""
        stage = solver.fastest(request)
        num_bytes = stage.plan.predicted.peak_bytes
        if num_bytes > self.task.memory_limit:
            raise does_not_fit("a stage needs", num_bytes, self.task.memory_limit)
        return stage

    def _plan(self, configuration: Configuration, solve: SolveStage) -> Plan:
        """Return the plan of a configuration whose stages are solved by `solve`; its PlanErrors
        pass.
        """
        solver = self._named(configuration)
        job = solver.job
        submesh = self._submesh(configuration.num_stages)
        num_devices = math.prod(submesh)
        alive = self._alive(configuration)
        solved: list[SolvedStage] = []
        wires: list[float] = []
        first_devices: list[int] = []
        bounds = equal_stages(self._layer_seconds, configuration.num_stages)
        for index, (first, last) in enumerate(pairwise(bounds)):
            request = self._request(job, first, last, configuration, alive[index])
            solved.append(solve(solver, request))
            first_devices.append(index * num_devices)
            is_last = index == configuration.num_stages - 1
            wires.append(0.0 if is_last else wire_seconds(job, last, submesh, index))
        plan = plan_of(job, self.task.fingerprint, solved, first_devices, SCHEDULE, wires)
        notes = (*job.graph.notes, *plan.notes)
        return replace(plan, notes=notes)

    # --- Candidates

    def candidates(self) -> list[Candidate]:
        """Return the usual configurations, the fastest first."""
        return self._ordered(self._configurations(usual_sequences(self.task.step)))

    def small_candidates(self) -> list[Candidate]:
        """Return configurations with the most micro-batches that are not among the usual ones, the
        fastest first: they need the least memory, and leave devices parts of sequences.
        """
        usual = set(self._configurations(usual_sequences(self.task.step)))
        smallest = self._configurations((0,))
        return self._ordered(conf for conf in smallest if conf not in usual)

    def _ordered(self, configurations: Iterable[Configuration]) -> list[Candidate]:
        """Return (least seconds, configuration) of each, the fastest first, without duplicates."""
        candidates = []
        for configuration in dict.fromkeys(configurations):
            num_stages = configuration.num_stages
            count = configuration.num_microbatches
            bubble = (count + num_stages - 1) / count
            # A recomputed forward is a third more.
            more = 4 / 3 if configuration.remat else 1.0
            seconds = self._ideal_seconds * bubble * more + self._gather_seconds(configuration)
            candidates.append((seconds, configuration))
        return sorted(candidates, key=lambda candidate: candidate[0])

    def _gather_seconds(self, configuration: Configuration) -> float:
        """Return the seconds of gathering parameters (ZeRO-3) that nothing hides; 0 if parameters
        and gradients fit without.
        """
        num_bytes = 0.0
        for parameter in self.task.step.parameters:
            num_bytes += parameter.meta.num_bytes
        shape = configuration.logical_mesh
        num_shards = configuration.num_stages * math.prod(shape[1:])
        if 2 * num_bytes / num_shards <= self.task.memory_limit or shape[0] == 1:
            return 0.0
        cluster = self.task.cluster
        mesh = cluster.logical_mesh(shape, self._submesh(configuration.num_stages))
        # In half precision: for the forward, for the backward, and gradients back.
        gathered = num_bytes / 2 / num_shards
        seconds = 3 * mesh.axes[0].seconds("all_gather", gathered)
        return configuration.num_microbatches * (1 - cluster.overlap) * seconds

    def _configurations(self, sequences: Sequence[float]) -> Iterator[Configuration]:
        """Yield the configurations to solve: numbers of stages, logical meshes, micro-batches,
        recomputation.

        Args:
            sequences: of a micro-batch on each device that computes sequences of its own; 0: as
                few as possible.
        """
        options = self.task.options
        counts = self._counts
        num_sequences = num_split_samples(self.task.step)
        remats: tuple[bool, ...] = (False, True)
        if isinstance(options.remat, bool):
            remats = (options.remat,)
        elif options.remat is not None:
            remats = (False,)
        for num_stages in self._stage_counts():
            submesh = self._submesh(num_stages)
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
        devices, at most one stage per layer.
        """
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
        """Return whether equal stages are full nodes or equal parts of one."""
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
        shapes = []
        for shape in allowed:
            if len(shape) == 1 or shape[1] in wanted:
                shapes.append(shape)
        return shapes

    # --- Estimates

    def _estimate(self, configuration: Configuration) -> Estimate:
        """Return the seconds of a step if every stage had as many middle layers.

        The fastest layouts are tried first, then ZeRO and tensor parallelism by name if they do not
        fit, or if they may be faster.

        Raises:
            PlanError: no layouts of the middle layer fit into its share of a device's memory.
        """
        share = self._layer_share(configuration.num_stages)
        least_bytes = self._least_bytes_of_stage(configuration)
        alive = self._alive(configuration)[0]
        if least_bytes <= self.task.memory_limit:
            least_bytes = math.inf
            fitting: list[Estimate] = []
            for names in ((), *self._names(configuration.logical_mesh)):
                is_hidden = self._hides_gathers(configuration, names)
                if fitting and not is_hidden:
                    continue
                named = replace(configuration, names=names)
                cost = self._middle(named, self._submesh(named.num_stages)).cost
                num_bytes = stage_bytes(cost, alive, named.remat, share)
                if num_bytes <= self.task.memory_limit:
                    fitting.append(Estimate(self._step_seconds(named, cost, share), named))
                least_bytes = min(least_bytes, num_bytes)
            if fitting:
                return min(fitting, key=lambda estimate: estimate.seconds)
        raise does_not_fit("a device needs about", least_bytes, self.task.memory_limit)

    def _hides_gathers(self, configuration: Configuration, names: tuple[str, ...]) -> bool:
        """Whether the named plan `names` may be faster than the fastest layouts, which are solved
        as if no gather overlapped with computation.
        """
        is_alone = configuration.num_stages == 1 and len(configuration.logical_mesh) == 1
        return is_alone and self.task.cluster.overlap > 0 and names == ("zero3",)

    def _middle(self, configuration: Configuration, submesh: tuple[int, int]) -> SolvedStage:
        """Return the middle layer alone, in the fastest layouts that the configuration allows."""
        solver = self._named(configuration)
        job = solver.job
        middle = job.num_layers // 2
        alive = self._alive(configuration)[0]
        request = self._request(job, middle, middle + 1, configuration, alive)
        return solver.fastest(replace(request, submesh=submesh))

    def _least_bytes_of_stage(self, configuration: Configuration) -> float:
        """Return the bytes of a stage of middle layers if its devices shared them evenly."""
        cost = self._middle_alone(configuration)
        alive = self._alive(configuration)[0]
        remat = configuration.remat
        in_use = cost.always + (cost.segment_inputs if remat else cost.saved) * alive
        num_devices = math.prod(self._submesh(configuration.num_stages))
        return in_use / num_devices / self._layer_share(configuration.num_stages)

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

    def _names(self, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
        """Return named plans that need less memory than the fastest one, an entry per mesh axis; []
        if the user chose layouts.
        """
        if self.task.options.parallel != "auto" or self.task.options.placements:
            return []
        others = len(shape) - 1
        names = [(name, *("tensor",) * others) for name in _ZERO]
        names += [(name, *(name,) * others) for name in _ZERO]
        return list(dict.fromkeys(names))

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
        """Seconds of the undivided step's ops if all devices were always busy with them."""
        costs = self.task.op_costs
        seconds = sum(sum(costs.op_seconds(op.call)) for op in self.task.step.ops)
        return seconds / self.task.cluster.num_devices

    @cached_property
    def _any_solver(self) -> StageSolver:
        """The solver of the most micro-batches that the options allow; PlanError if none do."""
        for count in microbatch_counts(self.task.step, self.task.cluster, self.task.options):
            solver = self._solver(count)
            if solver is not None:
                return solver
        _, error = self.failures[-1]
        raise error

    @cached_property
    def _counts(self) -> list[int]:
        """The numbers of micro-batches to try, of those that the step can be split into: experts in
        one grouped matmul sort the rows of all samples.
        """
        counts = microbatch_counts(self.task.step, self.task.cluster, self.task.options)
        if self._any_solver.job.num_microbatches == counts[0]:
            return counts
        return [count for count in counts if self._solver(count) is not None]

    @property
    def _num_layers(self) -> int:
        return self._any_solver.job.num_layers

    # --- Stages

    def _solver(self, count: int) -> StageSolver | None:
        """Return the solver of stages for `count` micro-batches, made at the first call.

        None if the options rule it out; `failures` has the error.
        """
        if count not in self._solvers:
            try:
                self._solvers[count] = StageSolver(self._job(count))
            except PlanError as error:
                self.failures.append((f"{count} micro-batches", error))
                self._solvers[count] = None
        return self._solvers[count]

    def _job(self, count: int) -> StageCostTask:
        """Return the task of pricing stages for `count` micro-batches, with less solver time a
        stage.

        Raises:
            PlanError: the options cannot be met.
        """
        task = self.task
        options = replace(
            task.options, solver_seconds=min(_SOLVER_SECONDS, task.options.solver_seconds)
        )
        task = replace(task, options=options)
        graph = microbatch(task.step, count, task.cluster.num_devices).graph
        cuts, places = self._layers(graph)
        remat = task.options.remat
        if isinstance(remat, tuple):
            # Names of ops: single results are recomputed, no segments of layers.
            remat = False
        return stage_cost_task(task, graph, cuts, count, remat=remat, places=places)

    def _layers(self, graph: StepGraph) -> Layers:
        """Return the layers of a micro-batch (`layers_of`).

        Micro-batches of another number have the same ops on more or fewer samples: the same layers.
        """
        ops = tuple((op.name, op.call.target_name) for op in graph.ops)
        if ops not in self._layers_by_ops:
            layers = layers_of(graph, self.task.cluster, self.task.options)
            self._layers_by_ops[ops] = layers
        return self._layers_by_ops[ops]

    def _named(self, configuration: Configuration) -> StageSolver:
        """Return the solver of a configuration's micro-batches under its names.

        Raises:
            PlanError: the step cannot be split so.
        """
        key = configuration.num_microbatches, configuration.logical_mesh, configuration.names
        if key in self._named_solvers:
            return self._named_solvers[key]
        count = configuration.num_microbatches
        solver = self._solver(count)
        if solver is None:
            raise PlanError(f"the step cannot be split into {count} micro-batches")
        if configuration.names:
            options = replace(
                solver.job.options,
                parallel=configuration.names,
                logical_mesh=configuration.logical_mesh,
            )
            solver = solver.under(options)
        self._named_solvers[key] = solver
        return solver

    def _request(
        self,
        job: StageCostTask,
        first: int,
        last: int,
        configuration: Configuration,
        alive: int,
    ) -> StageRequest:
        """Return the request for the stage of layers [first, last).

        Args:
            alive: micro-batches whose activations are stored at the same time.
        """
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
        """Return for each stage the micro-batches whose activations are stored at the same time."""
        if configuration.num_stages == 1:
            return (1,)
        return in_flight(SCHEDULE, configuration.num_stages, configuration.num_microbatches)
