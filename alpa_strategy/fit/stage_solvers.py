"""Solvers of the stages of configurations, which searches, candidates and estimates share."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from alpa_strategy.errors import PlanError
from alpa_strategy.fit.configurations import Configuration
from alpa_strategy.fit.failures import Failure
from alpa_strategy.fit.microbatched import MicrobatchedGraphs
from alpa_strategy.inter_op.pins import Place, layers_of
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_solve import StageRequest, StageSolver
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.microbatch_search import microbatch_counts
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import in_flight

# The order of work of several stages.
SCHEDULE = "1F1B"

# Most seconds of one integer program.
_SOLVER_SECONDS = 2.0

# Op indices that split a micro-batch into layers, and the meshes that are pinned for each layer.
Layers = tuple[tuple[int, ...], tuple[frozenset[Place], ...]]


class ConfigurationSolvers:
    """The solvers of one task's configurations: what one of them has priced serves all.

    Args:
        task: the task.
        graphs: of its step in micro-batches.
        failures: gets the errors of numbers of micro-batches that are not possible.
    """

    def __init__(self, task: PlanTask, graphs: MicrobatchedGraphs, failures: list[Failure]) -> None:
        self.task = task
        self.failures = failures
        self._graphs = graphs
        # By number of micro-batches; None: the step cannot be split so.
        self._solvers: dict[int, StageSolver | None] = {}
        self._named_solvers: dict[Hashable, StageSolver] = {}
        # By names and kinds of a micro-batch's ops.
        self._layers_by_ops: dict[Hashable, Layers] = {}

    def of(self, configuration: Configuration) -> StageSolver:
        """Return the solver of a configuration's micro-batches under its names.

        Raises:
            PlanError: the step cannot be split so, or the options rule it out.
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

    def request(
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
            submesh=self.submesh(configuration.num_stages),
            shape=configuration.logical_mesh,
            remat=configuration.remat,
            alive=alive,
            cuts=job.cuts[first + 1 : last],
        )

    def submesh(self, num_stages: int) -> tuple[int, int]:
        """Return (nodes, devices per node) of one of equal stages."""
        size = self.task.cluster.num_devices // num_stages
        per_node = self.task.cluster.devices_per_node
        return (1, size) if size <= per_node else (size // per_node, per_node)

    def compute_seconds(self, configuration: Configuration) -> float:
        """Return the seconds of a step whose ops all devices share evenly, with the bubble of the
        pipeline.
        """
        count = configuration.num_microbatches
        bubble = (count + configuration.num_stages - 1) / count
        # A recomputed forward is a third more.
        more = 4 / 3 if configuration.remat else 1.0
        return self._ideal_seconds * bubble * more

    def gather_seconds(self, configuration: Configuration) -> float:
        """Return the seconds of a step in which parameters are gathered over the first mesh axis
        for the forward and the backward, and their gradients are summed back; 0 if it has one
        device. They are sharded over the other axes.
        """
        shape = configuration.logical_mesh
        if shape[0] == 1:
            return 0.0
        num_shards = configuration.num_stages * math.prod(shape[1:])
        mesh = self.task.cluster.logical_mesh(shape, self.submesh(configuration.num_stages))
        seconds = 3 * mesh.axes[0].seconds("all_gather", self._read_bytes / num_shards)
        return configuration.num_microbatches * seconds

    def alive(self, configuration: Configuration) -> Sequence[int]:
        """Return for each stage the micro-batches whose activations are stored at the same time."""
        if configuration.num_stages == 1:
            return (1,)
        return in_flight(SCHEDULE, configuration.num_stages, configuration.num_microbatches)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters as they are stored."""
        return sum(parameter.meta.num_bytes for parameter in self.task.step.parameters)

    @cached_property
    def _read_bytes(self) -> int:
        """Bytes of all parameters in the dtypes in which the step reads them."""
        step = self.task.step
        num_bytes = 0
        for parameter in step.parameters:
            num_bytes += parameter.meta.num_elements * step.dtypes_read[parameter.name].itemsize
        return num_bytes

    @property
    def num_layers(self) -> int:
        """Layers of a micro-batch."""
        return self._any_solver.job.num_layers

    @cached_property
    def counts(self) -> list[int]:
        """The numbers of micro-batches to try, of those that the step can be split into: experts in
        one grouped matmul sort the rows of all samples. PlanError if there are none.
        """
        counts = microbatch_counts(self.task.step, self.task.cluster, self.task.options)
        if self._any_solver.job.num_microbatches == counts[0]:
            return counts
        return [count for count in counts if self._solver(count) is not None]

    @cached_property
    def layer_seconds(self) -> list[float]:
        """Seconds of each layer's ops on one device, for one of the most micro-batches possible."""
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

    def _solver(self, count: int) -> StageSolver | None:
        """Return the solver of stages for `count` micro-batches, made at the first call.

        None if the step cannot be split so, or the options rule it out; `failures` has the error.
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
            PlanError: the step cannot be split so, or the options cannot be met.
        """
        task = self.task
        options = replace(
            task.options, solver_seconds=min(_SOLVER_SECONDS, task.options.solver_seconds)
        )
        task = replace(task, options=options)
        graph = self._graphs.graph(count, task.cluster.num_devices)
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
