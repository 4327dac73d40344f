"""An iteration of several phases, as a module tells them that generates, scores and updates in one
training step.

The phase that trains is planned as any step is. Every other is priced with parameters as they lie
for it, and in a layout of its own, into which they are brought once an iteration, beside what
training keeps; the cheaper is taken (ReaLHF, arXiv 2406.14088, searches so). What no phase trains
lies as the first that uses it wants.
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

from alpa_strategy.capture.capture import convert
from alpa_strategy.capture.python_state import requiring_grad
from alpa_strategy.capture.rewrites import segment_fused_linears
from alpa_strategy.capture.trace import StepCall, likely_rows, trace_step
from alpa_strategy.errors import CaptureError, PlanError
from alpa_strategy.ir.graph import StepGraph, values_of
from alpa_strategy.ir.plan import ParameterPlan, PhaseCost, Plan, StagePlan, job_ranks
from alpa_strategy.options import OptimizerInfo, PlanOptions
from alpa_strategy.planner.one_stage import plan_one_stage
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.sharding.redistribute import reshard_table


@dataclass(frozen=True)
class Phase:
    """A part of an iteration: `step(*args)`, so many `times`.

    A LightningModule's `iteration_phases(self, batch) -> dict[str, Phase]` names those of a step;
    new tensors are meta.
    """

    # computes tensors of `args`: the next token, of one and earlier keys and values, say; a phase
    # that trains: the loss
    step: Callable[..., Any]
    args: tuple[
        Any, ...
    ] = ()  # pytrees of tensors of typical shapes; those with rows have one rank's, in dim 0
    times: int = 1
    trains: bool = False  # a backward and the optimizer's step follow


def capture_phases(
    module: Any,
    batch: Any,
    world_size: int,
    batch_scope: str,
    context: Callable[[], AbstractContextManager[Any]],
) -> dict[str, tuple[Phase, StepGraph]]:
    """The phases that `module` names for `batch`, captured; see `capture_step` for the arguments.

    Raises:
        CaptureError: not just one trains, or one cannot be captured. Errors of the user's code
            pass.
    """
    to_meta = partial(torch.empty_like, device="meta")
    with torch.device("meta"), context():
        phases = module.iteration_phases(pytree.tree_map_only(Tensor, to_meta, batch))
    if sum(phase.trains for phase in phases.values()) != 1:
        problem = f"iteration_phases names {', '.join(phases)}, of which not just one trains"
        raise CaptureError(
            problem, "give one of them trains=True; its loss may be a sum of several models'"
        )
    factor = world_size if batch_scope == "rank" else 1
    graphs = {name: _captured(module, phase, factor, context) for name, phase in phases.items()}
    return {
        name: (phases[name], replace(graph, batch_scope=batch_scope))
        for name, graph in graphs.items()
    }


def _captured(
    module: Any, phase: Phase, factor: int, context: Callable[[], AbstractContextManager[Any]]
) -> StepGraph:
    """The ops of a phase on `factor` times its rows; without gradients where it does not train.

    What such a phase is given others have made, and others take what it gives: both lie as is best
    for it.
    """
    loss = torch.zeros((), device="meta", requires_grad=True)  # a graph has one: this is cut off

    def step(given: Any) -> dict[str, Any]:
        result = phase.step(*given[0])
        return {"loss": result if phase.trains else given[1] * 1, "result": result}

    rows = *likely_rows(pytree.tree_leaves(phase.args)), False
    with requiring_grad(() if phase.trains else module.parameters(), False):
        graph = convert(
            trace_step(StepCall(module, (phase.args, loss), factor, 0, context, rows, step=step))
        )
    graph = segment_fused_linears(graph)
    leaving = values_of(graph.output["result"])
    part = graph.part_for(leaving)
    if phase.trains:
        return replace(part, loss=graph.loss)
    return replace(
        part, batch=(), output=(), received=tuple(leaf.value for leaf in part.batch), sent=leaving
    )


def plan_iteration(
    captured: Mapping[str, tuple[Phase, StepGraph]],
    task: PlanTask,
    choose: Callable[[PlanTask], Plan],
) -> Plan:
    """The plan of the phase that trains, which `task` is for and `choose` finds, with what all take
    (`Plan.phases`).

    Raises:
        PlanError: a phase fits in no layout.
    """
    trained = {p.name for p in task.step.parameters}
    others = {
        p.name: p.meta.num_bytes
        for _, step in captured.values()
        for p in step.parameters
        if p.name not in trained
    }
    limit = (
        task.memory_limit - sum(others.values()) / task.cluster.num_devices
    )  # where they lie in parts
    plan = choose(replace(task, options=replace(task.options, memory_limit=max(1.0, limit))))
    prices = _Prices(replace(task, cluster=task.cluster.in_order(job_ranks(plan.stages))), plan)
    # Phases without trained parameters decide how their own lie, and so what room is left for the
    # rest.
    order = sorted(
        captured, key=lambda name: any(p.name in trained for p in captured[name][1].parameters)
    )
    costs = {name: prices.of(name, *captured[name]) for name in order}
    beside = int(prices.lying_bytes)
    return replace(
        plan,
        phases=tuple(replace(costs[n], peak_bytes=costs[n].peak_bytes + beside) for n in captured),
    )


class _Place(NamedTuple):
    """How a parameter lies between phases: on a mesh of all devices (() where on some), with bytes
    of a device.
    """

    mesh: tuple[int, ...]
    plan: ParameterPlan
    num_bytes: float


def _places(step: StepGraph, stage: StagePlan) -> dict[str, _Place]:
    """As a stage has its parameters. What training gathers once a step is in shards as any,
    gathered at each use.
    """
    places, mesh, given = {}, stage.logical_mesh, {p.name: p.meta for p in step.parameters}
    for name, plan in stage.parameter_plans.items():
        local = plan.layout.local_shape(given[name].shape, mesh, (0,) * len(mesh))
        modes = ("R" if mode.is_whole else f"S{mode.dim}" for mode in plan.modes)
        frozen = ParameterPlan.parse(" ".join(modes), plan.num_segments)
        places[name] = _Place(mesh, frozen, given[name].with_shape(local).num_bytes)
    return places


class _Prices:
    """What phases take beside the plan of the one that trains. lies: parameter -> its place, as far
    as it has one.
    """

    def __init__(self, task: PlanTask, training: Plan) -> None:
        self._task, self._training = task, training
        found = [item for stage in training.stages for item in _places(task.step, stage).items()]
        num_meshes = len({stage.first_device for stage in training.stages})
        self.lies = (
            dict(found)
            if num_meshes == 1
            else {n: _Place((), x.plan, x.num_bytes / num_meshes) for n, x in found}
        )
        widths = {
            p.name: p.meta.dtype.itemsize for p in task.step.parameters if p.meta.requires_grad
        }
        num_elements = sum(
            place.num_bytes / widths[name] for name, place in self.lies.items() if name in widths
        )
        self._state_bytes = task.optimizer.state_bytes * num_elements
        self._more_at_peak = training.predicted.peak_bytes - self.lying_bytes

    @property
    def lying_bytes(self) -> float:
        """Of a device between phases."""
        return self._state_bytes + sum(place.num_bytes for place in self.lies.values())

    def of(self, name: str, phase: Phase, step: StepGraph) -> PhaseCost:
        """How a phase is best done. Its peak is what it adds to all that lies there between
        phases.
        """
        if phase.trains:
            layout, seconds = (
                _layout_text(step, self._training),
                self._training.predicted.step_seconds,
            )
            return PhaseCost(
                name, phase.times, layout, int(self._more_at_peak), seconds, None, seconds
            )
        held = {p.name: self.lies[p.name] for p in step.parameters if p.name in self.lies}
        ways: list[
            tuple[Plan, float | None]
        ] = []  # and seconds of moves, None where nothing is moved
        for way in (self._staying, self._moved):
            with suppress(PlanError):
                ways.append(way(step, held))
        ways = ways or [self._moved(step, held, "zero3")]
        plan, moved = min(
            ways, key=lambda way: phase.times * way[0].predicted.step_seconds + (way[1] or 0.0)
        )
        staying = next(
            (other.predicted.step_seconds for other, moves in ways if moves is None), None
        )
        places = _places(step, plan.stages[0])
        self.lies |= {name: place for name, place in places.items() if name not in held}
        counted = sum(
            place.num_bytes for name, place in places.items() if moved is None or name not in held
        )
        seconds, peak = plan.predicted.step_seconds, plan.predicted.peak_bytes - int(counted)
        return PhaseCost(name, phase.times, _layout_text(step, plan), peak, seconds, moved, staying)

    def _staying(self, step: StepGraph, held: Mapping[str, _Place]) -> tuple[Plan, None]:
        """The plan around what lies already."""
        meshes = {place.mesh for place in held.values()}
        if len(meshes) != 1 or () in meshes:
            raise PlanError("its parameters do not lie on one mesh of all devices")
        pinned, in_place = (
            {n: place.plan for n, place in held.items()},
            sum(place.num_bytes for place in held.values()),
        )
        return self._one_stage(step, -in_place, pinned, logical_mesh=meshes.pop()), None

    def _moved(
        self, step: StepGraph, held: Mapping[str, _Place], parallel: str = "auto"
    ) -> tuple[Plan, float | None]:
        """The plan with a layout of its own; None where no parameter lay otherwise before."""
        # What lies there from now on does so in training, too; in parts on all devices it has room.
        is_new = parallel == "auto" and len(held) < len(step.parameters)
        plan = self._one_stage(step, self._more_at_peak if is_new else 0.0, parallel=parallel)
        (stage,), cluster, received = plan.stages, self._task.cluster, 0.0
        places, alike = (
            _places(step, stage),
            Counter[Any](),
        )  # what lies and goes alike goes together
        for given in step.parameters:
            source, target = held.get(given.name, places[given.name]), places[given.name]
            if source.mesh == target.mesh:
                alike[source.plan.step_layout(False), target.plan.step_layout(False)] += (
                    given.meta.num_bytes
                )
            elif not (source.mesh and source.plan.is_whole):
                received += target.num_bytes  # as if a device had had none of it
        mesh, (flat,) = (
            cluster.logical_mesh(stage.logical_mesh),
            cluster.logical_mesh((cluster.num_devices,)).axes,
        )
        seconds = sum(
            float(reshard_table((a,), (b,), size, False, mesh)[0][0, 0])
            for (a, b), size in alike.items()
        )
        return plan, seconds + (
            flat.seconds("all_gather", received) if received else 0.0
        ) if held else None

    def _one_stage(
        self, step: StepGraph, more_bytes: float, pinned: Any = None, **wish: Any
    ) -> Plan:
        """A plan on all devices beside what lies there and `more_bytes` of each."""
        asked, room = self._task.options, self._task.memory_limit - self.lying_bytes - more_bytes
        wish |= {
            n: getattr(asked, n)
            for n in ("solver", "solver_seconds", "costs", "compile", "batch_scope")
        }
        options = PlanOptions(memory_limit=max(1.0, room), remat=False, offload=False, **wish)
        return plan_one_stage(
            replace(self._task, step=step, options=options, optimizer=OptimizerInfo()), pinned or {}
        )


def _layout_text(step: StepGraph, plan: Plan) -> str:
    """The (first) mesh, and for each of its axes how most bytes of the phase's parameters lie."""
    plans = {name: each for stage in plan.stages for name, each in stage.parameter_plans.items()}
    most = Counter[str]()
    for given in step.parameters:
        most[" ".join(mode.storage.value for mode in plans[given.name].modes)] += (
            given.meta.num_bytes
        )
    return " ".join(
        [
            "x".join(map(str, plan.stages[0].logical_mesh)),
            *(modes for modes, _ in most.most_common(1)),
        ]
    )
