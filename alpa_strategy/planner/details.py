"""The details of a plan, for every parameter and op of the step that it was made for.

Every stage's problem is built once more. The plan's layouts are an assignment of it, whose costs
are read off: nothing is solved.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_problem import (
    RematSpans,
    StageProblem,
    cost_of,
    stage_build,
    take_apart,
)
from alpa_strategy.intra_op import memory_choices
from alpa_strategy.intra_op.build import IntraOp, build
from alpa_strategy.intra_op.decode import (
    Message,
    op_messages,
    parameter_messages,
    transfer_messages,
    working_bytes,
)
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.intra_op.problem import evaluate
from alpa_strategy.ir.gathers import local_bytes
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import dtype_name
from alpa_strategy.ir.placement import DualLayout, dual_layout_to_str, value_layout
from alpa_strategy.ir.plan import Plan, StagePlan, job_ranks, modes_text
from alpa_strategy.ir.plan_companion import plan_digest
from alpa_strategy.ir.plan_details import (
    MessageDetails,
    OpDetails,
    Origin,
    ParameterDetails,
    PlanDetails,
    StageDetails,
    StageMemory,
    ValueDetails,
)
from alpa_strategy.ir.stage_graph import stage_on
from alpa_strategy.ir.value_names import maker_names
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.planner.execution import can_overlap
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.sharding.per_step import per_step_of


def details_of(task: PlanTask, plan: Plan, origin: Origin | None = None) -> PlanDetails | None:
    """Return the details of a plan; None for eager steps, which have no plan of their ops.

    Args:
        task: what the plan was made for.
        origin: the recipe, if it is known.

    Raises:
        PlanError: the plan has layouts that the step cannot have.
    """
    if plan.is_eager:
        return None
    stages = tuple(stage_details(stage, problem) for stage, problem in stage_problems(task, plan))
    return PlanDetails(
        plan=plan_digest(plan),
        memory_limit=float(min(task.memory_limit, 1e30)),
        devices_per_node=task.cluster.devices_per_node,
        batch_size=task.step.batch_size,
        stages=stages,
        origin=origin,
    )


@dataclass(frozen=True)
class AssignedStage:
    """A stage's problem with the plan's assignment of it."""

    problem: StageProblem
    assignment: tuple[int, ...]
    cost: StageCost

    @property
    def intra(self) -> IntraOp:
        """The problem of its ops and parameters."""
        return self.problem.intra


def stage_problems(task: PlanTask, plan: Plan) -> Iterator[tuple[StagePlan, AssignedStage]]:
    """Yield every stage of a plan with its problem, in which the plan is an assignment.

    Raises:
        PlanError: the plan has layouts that the step cannot have, or the step cannot be split so.
    """
    cluster = task.cluster.in_order(job_ranks(plan.stages))
    graph = task.step
    costs = task.op_costs
    if plan.is_pipelined:
        costs = task.for_stages().op_costs
        graph = microbatch(graph, plan.num_microbatches, cluster.num_devices).graph

    tables: dict[tuple, OptionTables] = {}
    for stage in plan.stages:
        mesh = cluster.logical_mesh(stage.logical_mesh, stage.submesh)
        num_steps = task.options.accumulate_grad_batches
        new_tables = OptionTables(mesh, costs, task.optimizer, num_steps, can_overlap(plan))
        stage_tables = tables.setdefault((stage.submesh, stage.logical_mesh), new_tables)
        if plan.is_pipelined:
            part = stage_on(graph, *stage.ops, mesh.num_devices)
            intra = _problem_of_stage(part, stage_tables, stage)
        else:
            intra = build(graph, stage_tables)
        begins = task.options.accumulate_grad_batches == 1 and not plan.is_pipelined
        is_alone = mesh.num_devices == cluster.num_devices
        prefetch = stage.prefetched_bytes > 0 if is_alone else None
        yield stage, _assigned(intra, stage, begins, prefetch)


def _problem_of_stage(part: StepGraph, tables: OptionTables, stage: StagePlan) -> IntraOp:
    """Return the problem of a stage that runs micro-batches, with the plan's work once per step."""
    if stage.execution is None:
        return stage_build(part, tables, stage.recompute_per_microbatch)
    return stage_build(part, tables, once=per_step_of(part, stage.execution.per_step_ops))


def _assigned(
    intra: IntraOp, stage: StagePlan, begins: bool, prefetch: bool | None
) -> AssignedStage:
    """Return a stage's problem with the plan's layouts.

    Args:
        begins: gradients are made, not added to earlier ones.
        prefetch: as of `cost_of`.

    Raises:
        PlanError: as of `_assignment`.
    """
    on_host = frozenset(name for name, plan in stage.parameter_plans.items() if plan.on_host)
    starts = (0, *(cut - stage.ops[0] for cut in stage.recompute_splits))
    intra = RematSpans(intra, starts).split()
    if on_host:
        intra = memory_choices.with_offload(intra, on_host)
    num_strategies = [len(options.strategies) for options in intra.ops]
    if stage.recomputed:
        intra = memory_choices.with_recompute(intra, stage.recomputed)
    assignment = _assignment(intra, stage, num_strategies)
    problem = take_apart(intra, starts)
    working = working_bytes(intra, assignment, begins)
    return AssignedStage(problem, assignment, cost_of(problem, assignment, working, prefetch))


def _assignment(intra: IntraOp, stage: StagePlan, num_strategies: Sequence[int]) -> tuple[int, ...]:
    """Return the strategy index of every choice of a stage's problem.

    Args:
        num_strategies: of each op, without those that recompute its result. Where there are such,
            they are taken.

    Raises:
        PlanError: the plan has a layout that is not among the problem's.
    """
    assignment = [0] * len(intra.problem.choices)
    for index, parameter in enumerate(intra.step.parameters):
        plans = intra.parameters[index].plans
        assignment[index] = _index(plans, stage.parameter_plans.get(parameter.name), parameter.name)
    for index, op in enumerate(intra.step.ops):
        strategies = intra.ops[index].strategies
        start = num_strategies[index] if len(strategies) > num_strategies[index] else 0
        place = len(intra.parameters) + index
        chosen = stage.strategies.get(op.name)
        assignment[place] = start + _index(strategies[start:], chosen, op.name)
    for of_value, boundaries in ((stage.received, intra.received), (stage.sent, intra.sent)):
        for value, boundary in boundaries.items():
            layout = of_value.get(value)
            assignment[boundary.choice] = _index(boundary.layouts, layout, f"value {value}")
    _settle_others(intra, assignment)
    return tuple(assignment)


def _settle_others(intra: IntraOp, assignment: list[int]) -> None:
    """Set in `assignment` the layouts of choices that are in no plan, such as that of the loss:
    those that cost least.
    """
    boundaries = {of.choice for of in (*intra.received.values(), *intra.sent.values())}
    problem = intra.problem
    for index in range(len(intra.parameters) + len(intra.ops), len(problem.choices)):
        if index in boundaries or len(problem.choices[index].cost) == 1:
            continue
        read = []
        for transfer in problem.transfers:
            if any(use.choice == index for use in transfer.uses):
                read.append(transfer)
        seconds = []
        for strategy in range(len(problem.choices[index].cost)):
            assignment[index] = strategy
            seconds.append(evaluate(replace(problem, transfers=tuple(read)), assignment)[0])
        assignment[index] = int(np.argmin(seconds))


def _index(options: Sequence[object], option: object, name: str) -> int:
    """Return the index of a plan's layout of `name` among the possible ones.

    Raises:
        PlanError: it is not among them.
    """
    try:
        return options.index(option)
    except ValueError:
        raise PlanError(
            f"the plan has no possible layout of {name}: {option}",
            "make the plan again: it was made for another step, or edited",
        ) from None


def stage_details(stage: StagePlan, assigned: AssignedStage) -> StageDetails:
    """Return the details of a stage.

    Args:
        stage: its plan.
        assigned: its problem.
    """
    writer = _StageDetails(stage, assigned)
    return StageDetails(
        memory=writer.memory(),
        once_seconds=max(0.0, assigned.cost.once),
        parameters=tuple(writer.parameters()),
        ops=tuple(writer.ops()),
    )


class _StageDetails:
    """Reads the details of one stage off its problem."""

    def __init__(self, stage: StagePlan, assigned: AssignedStage) -> None:
        self._stage = stage
        self._assigned = assigned
        self._intra = assigned.intra
        self._step: StepGraph = self._intra.step
        self._makers = maker_names(self._step)
        self._messages_of_op: dict[int, list[MessageDetails]] = defaultdict(list)
        self._collect_messages()
        # Choice -> the transfers of what it makes.
        self._transfers_of: dict[int, list[int]] = defaultdict(list)
        for index, transfer in enumerate(self._intra.problem.transfers):
            self._transfers_of[transfer.producer].append(index)

    def _collect_messages(self) -> None:
        """Sort the communication of the stage by the op that it belongs to, in
        `self._messages_of_op`. That of parameters is left out.
        """
        for resharding, message in transfer_messages(self._intra, self._assigned.assignment):
            first, value, source, target = resharding
            # A value that only leaves the stage is brought by the op that makes it.
            op = first if first < len(self._intra.ops) else self._step.makers.get(value, -1)
            shown = self._shown(message, "before")
            layouts = dual_layout_to_str(source), dual_layout_to_str(target)
            moved = replace(shown, value=self._makers[value], source=layouts[0], target=layouts[1])
            self._messages_of_op[op].append(moved)
        for op, message in op_messages(self._intra, self._assigned.assignment):
            self._messages_of_op[op].append(self._shown(message, "inside"))

    def _shown(self, message: Message, place: str) -> MessageDetails:
        """Return a message with bytes and seconds; `place` is `before` or `inside` its op."""
        seconds = message.seconds(self._intra)
        return MessageDetails(
            message.kind, message.axis, message.phase, 1, message.num_bytes, seconds, place
        )

    def parameters(self) -> Iterator[ParameterDetails]:
        """Yield the details of the stage's parameters."""
        mesh_shape = self._intra.mesh.shape
        state_bytes = self._intra.tables.optimizer.state_bytes
        messages: dict[int, list[MessageDetails]] = defaultdict(list)
        for index, message in parameter_messages(self._intra, self._assigned.assignment):
            messages[index].append(self._shown(message, "update"))

        for index, parameter in enumerate(self._step.parameters):
            options = self._intra.parameters[index]
            choice = self._assigned.assignment[index]
            plan = options.plans[choice]
            origin = (0,) * len(mesh_shape)
            local_shape = plan.layout.local_shape(parameter.meta.shape, mesh_shape, origin)
            stored = parameter.meta.with_shape(local_shape)
            if plan.num_segments > 1:
                # As the module sees it: the segments follow one another.
                local_shape = (local_shape[0] * local_shape[1], *local_shape[2:])
            gradient = int(options.gradient_bytes[choice])
            weight = 0 if plan.on_host else stored.num_bytes
            state = 0
            if parameter.meta.requires_grad and not plan.on_host:
                state = int(stored.num_elements * state_bytes)
            gathered = int(options.num_bytes[choice]) - weight - gradient - state
            readers = self._step.consumers.get(parameter.value, ())
            yield ParameterDetails(
                name=parameter.name,
                shape=tuple(parameter.module_shape or parameter.meta.shape),
                dtype=dtype_name(parameter.meta.dtype),
                modes=modes_text(plan.module_modes),
                local_shape=local_shape,
                weight_bytes=weight,
                gradient_bytes=gradient,
                state_bytes=state,
                gathered_bytes=max(0, gathered),
                update_seconds=float(options.update_seconds[choice]),
                readers=self._op_names(op for op, _ in readers),
                messages=_combined(messages[index]),
                num_segments=plan.num_segments,
                on_host=plan.on_host,
            )

    def ops(self) -> Iterator[OpDetails]:
        """Yield the details of the stage's ops, in order of execution."""
        # Also those whose results wait in host memory.
        recomputed = set(self._stage.recomputed_ops)
        for index, op in enumerate(self._step.ops):
            options = self._intra.ops[index]
            choice = self._assigned.assignment[len(self._intra.parameters) + index]
            forward = self._forward_seconds(index, choice)
            readers = (
                reader for value in op.results for reader, _ in self._step.consumers.get(value, ())
            )
            yield OpDetails(
                name=op.name,
                target=op.call.target_name,
                module=op.module,
                source=op.source,
                strategies=tuple(map(str, options.strategies[choice])),
                operands=self._values(op.operands, options.inputs[choice]),
                results=self._values(op.results, options.outputs[choice]),
                readers=self._op_names(readers),
                forward_seconds=forward,
                backward_seconds=max(0.0, float(options.compute_seconds[choice]) - forward),
                saved_bytes=self._saved_bytes(index),
                temporary_bytes=int(options.temporary_bytes[choice]),
                is_per_step=index in self._intra.per_step.ops,
                is_recomputed=op.name in recomputed or self._stage.remat,
                messages=_combined(self._messages_of_op[index]),
            )

    def _forward_seconds(self, index: int, choice: int) -> float:
        """Return the seconds of an op's forward, without its collectives.

        Args:
            index: of the op in the stage.
            choice: index of its strategy.
        """
        options = self._intra.ops[index]
        forward = float(options.forward_seconds[choice])
        for message in self._messages_of_op[index]:
            if message.place == "inside" and message.phase == "forward":
                forward -= message.seconds
        return max(0.0, forward)

    def _saved_bytes(self, index: int) -> int:
        """Return the bytes that the forward of an op saves: masks and the like, its results, and
        copies of these in the layouts in which readers save them.
        """
        place = len(self._intra.parameters) + index
        assignment = self._assigned.assignment
        total = float(self._assigned.problem.choices[place].saved[assignment[place]])
        for transfer_index in self._transfers_of[place]:
            transfer = self._intra.problem.transfers[transfer_index]
            saved = self._assigned.problem.transfers[transfer_index].saved
            source = int(transfer.source[assignment[place]])
            for target in {int(use.layout[assignment[use.choice]]) for use in transfer.uses}:
                total += float(saved[source, target])
        return int(total)

    def _values(
        self, values: Sequence[int], layouts: Sequence[DualLayout]
    ) -> tuple[ValueDetails, ...]:
        """Return shape, layout and local bytes of values, given with their layouts."""
        mesh_shape = self._intra.mesh.shape
        origin = (0,) * len(mesh_shape)
        shown = []
        for value, layout in zip(values, layouts, strict=True):
            meta = self._step.values[value]
            shown.append(
                ValueDetails(
                    maker=self._makers[value],
                    shape=tuple(meta.shape),
                    dtype=dtype_name(meta.dtype),
                    layout=dual_layout_to_str(layout),
                    local_shape=value_layout(layout).local_shape(meta.shape, mesh_shape, origin),
                    local_bytes=local_bytes(meta, layout, mesh_shape),
                )
            )
        return tuple(shown)

    def _op_names(self, indices: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._step.ops[index].name for index in dict.fromkeys(indices))

    def memory(self) -> StageMemory:
        """Return the stage's bytes on one device by what they are for."""
        cost = self._assigned.cost
        weights = gradients = state = gathered = 0
        for parameter in self.parameters():
            weights += parameter.weight_bytes
            gradients += parameter.gradient_bytes
            state += parameter.state_bytes
            gathered += parameter.gathered_bytes
        activations, recomputed = cost.saved, 0.0
        if self._stage.remat:
            activations, recomputed = cost.segment_inputs, max(cost.again)
        known = weights + gradients + state + gathered
        return StageMemory(
            weights=weights,
            gradients=gradients,
            state=state,
            gathered=gathered,
            other=max(0, round(cost.always) - known),
            activations=round(activations),
            recomputed=round(recomputed),
            temporary=round(cost.working),
            update=max(0, round(cost.update)),
        )


def _combined(messages: Sequence[MessageDetails]) -> tuple[MessageDetails, ...]:
    """Return messages with equal ones added up, in order of appearance."""
    totals: dict[MessageDetails, MessageDetails] = {}
    for message in messages:
        key = replace(message, count=0, num_bytes=0, seconds=0.0)
        total = totals.get(key, key)
        totals[key] = replace(
            total,
            count=total.count + message.count,
            num_bytes=total.num_bytes + message.num_bytes,
            seconds=total.seconds + message.seconds,
        )
    return tuple(totals.values())
