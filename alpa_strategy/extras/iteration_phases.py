"""Iterations of several phases: training steps that generate, score and update.

The phase that trains is planned as any step is. Every other phase is priced twice: with parameters
in the layouts of training, and in layouts of its own, into which they are moved once an iteration,
in addition to what training stores. The cheaper of the two is taken, as ReaLHF (arXiv 2406.14088)
searches. Parameters that no phase trains get the layout of the first phase that uses them.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.capture.batch_leaves import have_common_size
from alpa_strategy.capture.capture import convert
from alpa_strategy.capture.python_state import requiring_grad
from alpa_strategy.capture.rewrites import segment_fused_linears
from alpa_strategy.capture.trace import StepCall, trace_step
from alpa_strategy.errors import CaptureError, PlanError
from alpa_strategy.ir.graph import StepGraph, values_of
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import ParameterPlan, PhaseCost, Plan, StagePlan, job_ranks
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.one_stage import plan_one_stage
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.sharding.redistribute import reshard_table


@dataclass(frozen=True)
class Phase:
    """A part of an iteration: `step(*args)`, repeated `times` times.

    A LightningModule's `iteration_phases(self, batch) -> dict[str, Phase]` returns those of a step;
    tensors that it creates are on the meta device.
    """

    # Computes tensors from `args`: the next token from one token and earlier keys and values, for
    # example. The phase that trains returns the loss.
    step: Callable[..., Any]
    # Pytrees of tensors of typical shapes. Tensors with samples have one rank's, in dim 0.
    args: tuple[Any, ...] = ()
    # How often the phase runs in an iteration.
    times: int = 1
    # Whether a backward and the optimizer's step follow.
    trains: bool = False


@dataclass(frozen=True)
class CapturedIteration:
    """The phases of an iteration, captured."""

    # Name -> the phase and its ops.
    phases: Mapping[str, tuple[Phase, StepGraph]]

    @property
    def step(self) -> StepGraph:
        """The ops of the phase that trains."""
        return next(graph for phase, graph in self.phases.values() if phase.trains)

    def plan(self, task: PlanTask, choose: Callable[[PlanTask], Plan]) -> Plan:
        """Return the plan of `step`, with the costs of all phases; see `plan_iteration`."""
        return plan_iteration(self.phases, task, choose)


def captured_iteration(
    module: Any,
    batch: Any,
    world_size: int,
    batch_scope: str,
    context: Callable[[], AbstractContextManager[Any]],
) -> CapturedIteration | None:
    """Capture the phases of a module with `iteration_phases`; None of any other module.

    Arguments and errors: as of `capture_phases`.
    """
    if not hasattr(module, "iteration_phases"):
        return None
    return CapturedIteration(capture_phases(module, batch, world_size, batch_scope, context))


def capture_phases(
    module: Any,
    batch: Any,
    world_size: int,
    batch_scope: str,
    context: Callable[[], AbstractContextManager[Any]],
) -> dict[str, tuple[Phase, StepGraph]]:
    """Capture the phases that `module.iteration_phases` returns for `batch`, by name.

    Batch, ranks, `batch_scope` and `context` are as of `capture_step`: phases have the samples of
    all ranks, or under `global` those of `batch`. Errors of the user's code are not caught.

    Raises:
        CaptureError: none or several phases train, or a phase cannot be captured.
    """
    to_meta = partial(torch.empty_like, device="meta")
    with torch.device("meta"), context():
        phases = module.iteration_phases(pytree.tree_map_only(Tensor, to_meta, batch))
    if sum(phase.trains for phase in phases.values()) != 1:
        problem = f"iteration_phases names {', '.join(phases)}, of which not just one trains"
        raise CaptureError(
            problem, "give one of them trains=True; its loss may be a sum of several models'"
        )
    num_ranks = world_size if batch_scope == "rank" else 1
    graphs = {name: _captured(module, phase, num_ranks, context) for name, phase in phases.items()}
    return {
        name: (phases[name], replace(graph, batch_scope=batch_scope))
        for name, graph in graphs.items()
    }


def _captured(
    module: Any, phase: Phase, num_ranks: int, context: Callable[[], AbstractContextManager[Any]]
) -> StepGraph:
    """Return the ops of a phase on the samples of all ranks, without gradients unless it trains.

    Inputs and results of a phase that does not train come from other phases and go to others: they
    have the layouts that are best for it.

    Args:
        num_ranks: whose samples are joined.
        context: in which the phase is traced.

    Raises:
        CaptureError: it cannot be captured.
    """
    # Every graph has a loss. That of a phase that does not train is removed below.
    placeholder_loss = torch.zeros((), device="meta", requires_grad=True)

    def step(inputs: Any) -> dict[str, Any]:
        args, placeholder = inputs
        result = phase.step(*args)
        loss = result if phase.trains else placeholder * 1
        return {"loss": loss, "result": result}

    # Phases are priced on the samples of all ranks.
    batch = (_of_all_ranks(phase.args, num_ranks), placeholder_loss)
    with requiring_grad(() if phase.trains else module.parameters(), False):
        graph = convert(trace_step(StepCall(module, batch, 0, context, step=step)))
    graph = segment_fused_linears(graph)
    leaving = values_of(graph.output["result"])
    part = graph.part_for(leaving)
    if phase.trains:
        return replace(part, loss=graph.loss)
    return replace(
        part, batch=(), output=(), received=tuple(leaf.value for leaf in part.batch), sent=leaving
    )


def _of_all_ranks(args: Any, num_ranks: int) -> Any:
    """Return a phase's arguments with the samples of all ranks, without values.

    Tensors with the most frequent size(0) have samples.
    """
    leaves, spec = pytree.tree_flatten(args)
    flags = iter(have_common_size(leaves))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and next(flags):
            shape = (leaf.size(0) * num_ranks, *leaf.shape[1:])
            leaves[index] = torch.empty(shape, dtype=leaf.dtype, device="meta")
    return pytree.tree_unflatten(leaves, spec)


def plan_iteration(
    captured: Mapping[str, tuple[Phase, StepGraph]],
    task: PlanTask,
    choose: Callable[[PlanTask], Plan],
) -> Plan:
    """Return the plan of the phase that trains, with the costs of all phases (`Plan.phases`).

    Args:
        captured: phases and their graphs, by name.
        task: that of the phase that trains.
        choose: finds its plan.

    Raises:
        PlanError: a phase fits in no layout.
    """
    trained = {parameter.name for parameter in task.step.parameters}
    frozen_bytes: dict[str, int] = {}
    for _, step in captured.values():
        for parameter in step.parameters:
            if parameter.name not in trained:
                frozen_bytes[parameter.name] = parameter.meta.num_bytes

    # Parameters of other phases are sharded over all devices while the step is planned.
    others_bytes = sum(frozen_bytes.values()) / task.cluster.num_devices
    limit = max(1.0, task.memory_limit - others_bytes)
    plan = choose(replace(task, options=replace(task.options, memory_limit=limit)))
    cluster = task.cluster.in_order(job_ranks(plan.stages))
    prices = _PhasePrices(replace(task, cluster=cluster), plan)

    # Phases without trained parameters come first: they decide how their own parameters are laid
    # out, and so how much memory the others have.
    def has_trained(name: str) -> bool:
        _, step = captured[name]
        return any(parameter.name in trained for parameter in step.parameters)

    costs: dict[str, PhaseCost] = {}
    for name in sorted(captured, key=has_trained):
        phase, step = captured[name]
        costs[name] = prices.cost_of(name, phase, step)

    stored_bytes = int(prices.stored_bytes)
    phases = []
    for name in captured:
        cost = costs[name]
        phases.append(replace(cost, peak_bytes=cost.peak_bytes + stored_bytes))
    return replace(plan, phases=tuple(phases))


class _StoredParameter(NamedTuple):
    """How a parameter is laid out between phases."""

    # The logical mesh of all devices; (): a part of the devices has it.
    mesh: tuple[int, ...]
    plan: ParameterPlan
    # On one device.
    num_bytes: float


def _stored_parameters(step: StepGraph, stage: StagePlan) -> dict[str, _StoredParameter]:
    """Return a stage's parameters by name.

    What training gathers once per step is sharded as under ZeRO-3 here, and gathered at each use.
    """
    mesh = stage.logical_mesh
    metas = {parameter.name: parameter.meta for parameter in step.parameters}
    stored: dict[str, _StoredParameter] = {}
    for name, plan in stage.parameter_plans.items():
        frozen_modes = []
        for mode in plan.modes:
            frozen_modes.append("R" if mode.is_unsharded else f"S{mode.dim}")
        frozen_plan = ParameterPlan.parse(" ".join(frozen_modes), plan.num_segments)
        local_shape = plan.layout.local_shape(metas[name].shape, mesh, (0,) * len(mesh))
        num_bytes = metas[name].with_shape(local_shape).num_bytes
        stored[name] = _StoredParameter(mesh, frozen_plan, num_bytes)
    return stored


@dataclass(frozen=True)
class _PhaseOption:
    """A plan for a phase, with or without moving parameters."""

    plan: Plan
    # Seconds to move parameters into the plan's layouts; None: nothing is moved.
    move_seconds: float | None


class _PhasePrices:
    """Prices phases beside the plan of the phase that trains."""

    def __init__(self, task: PlanTask, training: Plan) -> None:
        self._task = task
        self._training = training
        # Parameters that have a layout so far, by name.
        self.stored = _parameters_of_plan(task.step, training)

        itemsize = {
            parameter.name: parameter.meta.dtype.itemsize
            for parameter in task.step.parameters
            if parameter.meta.requires_grad
        }
        num_elements = sum(
            parameter.num_bytes / itemsize[name]
            for name, parameter in self.stored.items()
            if name in itemsize
        )
        self._state_bytes = task.optimizer.state_bytes * num_elements
        # What training needs at its peak in addition to what is stored between phases.
        self._more_at_peak = training.predicted.peak_bytes - self.stored_bytes

    @property
    def stored_bytes(self) -> float:
        """Bytes that a device stores between phases."""
        return self._state_bytes + sum(parameter.num_bytes for parameter in self.stored.values())

    def cost_of(self, name: str, phase: Phase, step: StepGraph) -> PhaseCost:
        """Return the cost of the best way to run a phase: in the stored layouts of parameters, or
        in layouts of its own, into which they are moved.

        The peak of the cost is the bytes that it adds to those stored between phases. Parameters
        that no earlier phase has are stored from now on as this phase has them.

        Raises:
            PlanError: it fits in no layout.
        """
        if phase.trains:
            seconds = self._training.predicted.step_seconds
            layout = _layout_text(step, self._training)
            peak = int(self._more_at_peak)
            return PhaseCost(name, phase.times, layout, peak, seconds, None, seconds)

        stored = {
            parameter.name: self.stored[parameter.name]
            for parameter in step.parameters
            if parameter.name in self.stored
        }
        options: list[_PhaseOption] = []
        for price in (self._staying, self._moved):
            with suppress(PlanError):
                options.append(price(step, stored))
        if not options:
            options.append(self._moved(step, stored, "zero3"))

        def total_seconds(option: _PhaseOption) -> float:
            step_seconds = option.plan.predicted.step_seconds
            return phase.times * step_seconds + (option.move_seconds or 0.0)

        best = min(options, key=total_seconds)
        staying_seconds: float | None = None
        for option in options:
            if option.move_seconds is None:
                staying_seconds = option.plan.predicted.step_seconds
                break

        own_parameters = _stored_parameters(step, best.plan.stages[0])
        counted_bytes = 0.0
        for parameter_name, parameter in own_parameters.items():
            is_new = parameter_name not in stored
            if is_new:
                self.stored[parameter_name] = parameter
            if is_new or best.move_seconds is None:
                counted_bytes += parameter.num_bytes

        predicted = best.plan.predicted
        return PhaseCost(
            name,
            phase.times,
            _layout_text(step, best.plan),
            predicted.peak_bytes - int(counted_bytes),
            predicted.step_seconds,
            best.move_seconds,
            staying_seconds,
        )

    def _staying(self, step: StepGraph, stored: Mapping[str, _StoredParameter]) -> _PhaseOption:
        """Return the plan around the layouts that parameters have.

        Raises:
            PlanError: they are not on one mesh of all devices, or nothing fits.
        """
        meshes = {parameter.mesh for parameter in stored.values()}
        if len(meshes) != 1 or () in meshes:
            raise PlanError("its parameters do not lie on one mesh of all devices")
        pinned = {name: parameter.plan for name, parameter in stored.items()}
        # They are in the plan's memory and in what is stored: counted once.
        stored_bytes = sum(parameter.num_bytes for parameter in stored.values())
        plan = self._one_stage(step, -stored_bytes, pinned, logical_mesh=meshes.pop())
        return _PhaseOption(plan, None)

    def _moved(
        self,
        step: StepGraph,
        stored: Mapping[str, _StoredParameter],
        parallel: str = "auto",
    ) -> _PhaseOption:
        """Return the plan with layouts of its own, with the seconds to move what is stored (None if
        nothing is). PlanError if nothing fits.
        """
        # Parameters without a layout keep the phase's one in training, too, which must have memory
        # for them. Under ZeRO-3 it has.
        adds_parameters = parallel == "auto" and len(stored) < len(step.parameters)
        more_bytes = self._more_at_peak if adds_parameters else 0.0
        plan = self._one_stage(step, more_bytes, parallel=parallel)
        move_seconds = self._move_seconds(step, plan.stages[0], stored) if stored else None
        return _PhaseOption(plan, move_seconds)

    def _move_seconds(
        self, step: StepGraph, stage: StagePlan, stored: Mapping[str, _StoredParameter]
    ) -> float:
        """Return the seconds to move `stored` parameters into the layouts that `stage` has."""
        targets = _stored_parameters(step, stage)
        # Parameters with the same layouts before and after are moved together.
        bytes_by_layouts = Counter[Any]()
        gathered_bytes = 0.0
        for parameter in step.parameters:
            target = targets[parameter.name]
            source = stored.get(parameter.name, target)
            if source.mesh == target.mesh:
                layouts = source.plan.step_layout(False), target.plan.step_layout(False)
                bytes_by_layouts[layouts] += parameter.meta.num_bytes
            elif not (source.mesh and source.plan.is_unsharded):
                # Between meshes: as if a device had nothing of it before.
                gathered_bytes += target.num_bytes

        cluster = self._task.cluster
        mesh = cluster.logical_mesh(stage.logical_mesh)
        seconds = 0.0
        for (before, after), num_bytes in bytes_by_layouts.items():
            table = reshard_table((before,), (after,), num_bytes, False, mesh)
            seconds += float(table[0][0, 0])
        if gathered_bytes:
            (flat_axis,) = cluster.logical_mesh((cluster.num_devices,)).axes
            seconds += flat_axis.seconds("all_gather", gathered_bytes)
        return seconds

    def _one_stage(
        self, step: StepGraph, more_bytes: float, pinned: Any = None, **pins: Any
    ) -> Plan:
        """Return a plan on all devices that leaves memory for what is stored and `more_bytes` on
        each.

        Args:
            pinned: name -> layouts of parameters that must be kept.
            pins: further fields of `PlanOptions`.

        Raises:
            PlanError: nothing fits.
        """
        task_options = self._task.options
        limit = self._task.memory_limit - self.stored_bytes - more_bytes
        options = PlanOptions(
            memory_limit=max(1.0, limit),
            remat=False,
            offload=False,
            solver=task_options.solver,
            solver_seconds=task_options.solver_seconds,
            costs=task_options.costs,
            compile=task_options.compile,
            batch_scope=task_options.batch_scope,
            **pins,
        )
        task = replace(self._task, step=step, options=options, optimizer=OptimizerInfo())
        return plan_one_stage(task, pinned or {})


def _parameters_of_plan(step: StepGraph, plan: Plan) -> dict[str, _StoredParameter]:
    """Return the parameters of all stages by name; on several meshes with the mean bytes of a
    device.
    """
    num_meshes = len({stage.first_device for stage in plan.stages})
    parameters: dict[str, _StoredParameter] = {}
    for stage in plan.stages:
        parameters.update(_stored_parameters(step, stage))
    if num_meshes == 1:
        return parameters
    return {
        name: _StoredParameter((), parameter.plan, parameter.num_bytes / num_meshes)
        for name, parameter in parameters.items()
    }


def _layout_text(step: StepGraph, plan: Plan) -> str:
    """Return the first stage's mesh and the storage placements of most bytes of the phase's
    parameters, one for each mesh axis.
    """
    parameter_plans: dict[str, ParameterPlan] = {}
    for stage in plan.stages:
        parameter_plans.update(stage.parameter_plans)

    bytes_by_modes = Counter[str]()
    for parameter in step.parameters:
        modes = parameter_plans[parameter.name].modes
        text = " ".join(mode.storage.value for mode in modes)
        bytes_by_modes[text] += parameter.meta.num_bytes

    parts = ["x".join(map(str, plan.stages[0].logical_mesh))]
    parts += [modes for modes, _ in bytes_by_modes.most_common(1)]
    return " ".join(parts)
