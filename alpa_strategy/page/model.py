"""A Plan and its details as plain data for the page's script.

Numbers stay numbers: the script formats them. Names stay texts: the script draws them character by
character. Keys are short words because the data of a large plan is most of its page.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from alpa_strategy.display.answers import answers_of
from alpa_strategy.display.communication import hidden_messages_text, sum_of_collectives_text
from alpa_strategy.display.findings import busiest_text
from alpa_strategy.display.op_times import StepClock, slowest_ops, total_text
from alpa_strategy.display.plan_words import (
    assumed_rates_text,
    flops_text,
    plan_words,
    rates_text,
    task_words,
)
from alpa_strategy.display.stage_groups import idle_seconds
from alpa_strategy.display.table import equal_stages, mesh_text, proof_of, recomputes, step_parts
from alpa_strategy.display.timeline import ScheduleTimeline, device_range
from alpa_strategy.display.waits import less_waiting_text, waits
from alpa_strategy.ir.measured_steps import MeasuredSteps
from alpa_strategy.ir.plan import (
    Collective,
    Plan,
    StagePlan,
    TaskFigures,
    modes_text,
    stage_ranks,
)
from alpa_strategy.ir.plan_details import (
    MessageDetails,
    OpDetails,
    ParameterDetails,
    PlanDetails,
    StageDetails,
    ValueDetails,
)
from alpa_strategy.page.measured import measured_model
from alpa_strategy.page.memory import memory_of_devices, memory_over_time, parts_within
from alpa_strategy.page.numbers import short_number
from alpa_strategy.page.schedule import drawn_schedule


def page_model(
    plan: Plan,
    details: PlanDetails | None = None,
    name: str = "",
    measured: MeasuredSteps | None = None,
) -> dict[str, Any]:
    """Return the data of a plan's page.

    Args:
        plan: to show.
        details: of its parameters and ops; None: the page has the plan alone.
        name: of the plan, such as its file's.
        measured: by a run of the plan; None: nothing.
    """
    answers = answers_of(plan)
    return {
        "name": name,
        "title": _title(plan),
        "words": "" if plan.is_eager else plan_words(plan),
        "cluster": plan.cluster_name,
        "devices": sum(math.prod(submesh) for submesh in _meshes(plan)),
        "perNode": _devices_per_node(plan, details),
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "eager": plan.is_eager,
        "proof": proof_of(plan),
        "gap": plan.gap,
        "step": short_number(plan.predicted.step_seconds),
        **_figures(plan, details),
        "peak": plan.predicted.peak_bytes,
        "limit": _limit(plan, details),
        "unusable": 0 if plan.figures is None else plan.figures.unusable_bytes,
        "memory": memory_of_devices(plan),
        "slowest": _slowest(plan, details),
        "busiest": busiest_text(plan),
        "lessWaiting": less_waiting_text(plan) if len(plan.stages) > 1 else "",
        "messages": hidden_messages_text(plan),
        "parts": [[part, short_number(seconds)] for part, seconds in step_parts(plan).items()],
        "baselines": [[text, _finite(seconds)] for text, seconds in plan.baselines.items()],
        "phases": [[p.name, p.times, short_number(p.total_seconds), p.layout] for p in plan.phases],
        "notes": list(plan.notes),
        "findings": list(answers.findings),
        "change": answers.change,
        "solver": [
            [phase, short_number(seconds)] for phase, seconds in plan.solver_seconds.items()
        ],
        "detailed": details is not None,
        "groups": equal_stages(plan),
        "stages": _stages(plan, details),
        "timeline": _timeline(plan),
        "explanations": _explanations(details),
        # Whether `alpa why` can make the plan's step once more.
        "explainable": details is not None and details.origin is not None,
        "measured": measured_model(plan, measured),
    }


def _stages(plan: Plan, details: PlanDetails | None) -> list[dict[str, Any]]:
    """Return the JSON data of all stages, with ops and parameters if there are details."""
    stages = []
    for index, stage in enumerate(plan.stages):
        of_stage = details.stages[index] if details is not None else None
        data = _stage(index, stage, of_stage)
        if of_stage is not None:
            data["total"] = total_text(plan, stage, of_stage)
            _add_step_seconds(data, StepClock.of(plan, stage), of_stage)
        stages.append(data)
    return stages


def _add_step_seconds(data: dict[str, Any], clock: StepClock, details: StageDetails) -> None:
    """Add the seconds of a step to each parameter and op of a stage's data, as `step`."""
    for row, parameter in zip(data["parameters"], details.parameters, strict=True):
        row["step"] = short_number(clock.parameter_seconds(parameter))
    for row, op in zip(data["ops"], details.ops, strict=True):
        row["step"] = short_number(clock.op_seconds(op))


def _slowest(plan: Plan, details: PlanDetails | None) -> list[list[Any]]:
    """Return the slowest ops as [label, source, count, seconds of a step]."""
    rows: list[list[Any]] = []
    for row in slowest_ops(plan, details) if details is not None else ():
        rows.append([row.label, row.source, row.count, short_number(row.seconds)])
    return rows


def _explanations(details: PlanDetails | None) -> dict[str, Any]:
    """Return name of a parameter or op -> the stored answer of `alpa why` as JSON data; none
    without details.
    """
    answers: dict[str, Any] = {}
    for answer in details.explanations if details is not None else ():
        choices = []
        for choice in (answer.chosen, *answer.choices):
            choices.append(
                {
                    "layout": choice.layout,
                    "seconds": _finite(choice.seconds),
                    "bytes": choice.num_bytes,
                    "compute": short_number(choice.compute_seconds),
                    "communication": short_number(choice.communication_seconds),
                    "problem": choice.problem,
                }
            )
        answers[answer.name] = {
            "choices": choices,
            "reasons": list(answer.reasons),
            "slower": answer.num_slower,
        }
    return answers


def _title(plan: Plan) -> str:
    """Return the plan's title: its mesh, or stages and schedule."""
    if len(plan.stages) == 1:
        stage = plan.stages[0]
        title = f"one stage on mesh {mesh_text(stage.logical_mesh)}"
        if plan.num_microbatches > 1:
            title += f", {plan.num_microbatches} micro-batches"
        return title + recomputes(stage)
    count = plan.num_microbatches
    return f"{len(plan.stages)} stages, {count} micro-batches, {plan.schedule}"


def _meshes(plan: Plan) -> Iterable[tuple[int, int]]:
    """Return the submesh of every mesh: several stages may share one."""
    return {stage.first_device: stage.submesh for stage in plan.stages}.values()


def _devices_per_node(plan: Plan, details: PlanDetails | None) -> int:
    """Return the devices of a node; without details, the most that a submesh has of one."""
    if details is not None:
        return details.devices_per_node
    return max(submesh[1] for submesh in _meshes(plan))


def _figures(plan: Plan, details: PlanDetails | None) -> dict[str, Any]:
    """Return the figures of the plan's step as JSON data."""
    figures = plan.figures
    if figures is None:
        # Of an older plan file.
        figures = TaskFigures(0 if details is None else details.batch_size)
    return {
        "precision": figures.precision,
        "task": task_words(plan),
        "samples": figures.num_samples,
        "tokens": figures.num_tokens,
        "rates": rates_text(figures, plan.predicted.step_seconds),
        "flops": flops_text(figures),
        "warning": assumed_rates_text(plan),
    }


def _limit(plan: Plan, details: PlanDetails | None) -> float | None:
    """Return the memory limit in bytes, None if there is none, or it is not known."""
    if details is None and plan.figures is not None:
        return plan.figures.memory_limit
    if details is None or details.memory_limit >= 1e30:
        return None
    return details.memory_limit


def _stage(index: int, stage: StagePlan, details: StageDetails | None) -> dict[str, Any]:
    """Return a stage as JSON data: seconds, bytes, and its parameters and ops, briefly without
    details.
    """
    p = stage.predicted
    data: dict[str, Any] = {
        "index": index,
        "devices": list(stage_ranks(stage)),
        "range": device_range(stage),
        "mesh": list(stage.logical_mesh),
        "layers": stage.layers,
        "remat": stage.remat,
        "recomputed": recomputes(stage).lstrip(", "),
        "forward": short_number(stage.forward_seconds),
        "backward": short_number(stage.backward_seconds),
        "boundary": short_number(stage.boundary_seconds),
        "boundaryBytes": stage.boundary_bytes,
        "seconds": short_number(p.step_seconds),
        "compute": short_number(p.compute_seconds),
        "communication": short_number(p.communication_seconds),
        "optimizer": short_number(p.optimizer_seconds),
        "peak": p.peak_bytes,
        "parts": dict(p.memory),
        "collectives": [_collective(collective) for collective in stage.collectives],
        "sum": sum_of_collectives_text(stage),
    }
    if details is None:
        data["parameters"] = _parameters_of_plan(stage)
        data["ops"] = [
            {"name": name, "strategies": list(map(str, strategies))}
            for name, strategies in stage.strategies.items()
        ]
        return data
    data["once"] = short_number(details.once_seconds)
    data["within"] = parts_within(stage, details.memory)
    data["memory"] = memory_over_time(stage, details.memory)
    data["parameters"] = [_parameter(parameter) for parameter in details.parameters]
    data["ops"] = [_op(op) for op in details.ops]
    return data


def _parameters_of_plan(stage: StagePlan) -> list[dict[str, Any]]:
    """Return name, shape, placements, number of segments, and whether it is in host memory, of each
    parameter of the stage, as JSON data.
    """
    parameters = []
    for name, plan in stage.parameter_plans.items():
        parameters.append(
            {
                "name": name,
                "shape": list(stage.shapes.get(name, ())),
                "modes": modes_text(plan.module_modes),
                "segments": plan.num_segments,
                "host": plan.on_host,
            }
        )
    return parameters


def _parameter(parameter: ParameterDetails) -> dict[str, Any]:
    """Return a parameter as JSON data: layout, bytes and messages of it."""
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "dtype": parameter.dtype,
        "modes": parameter.modes,
        "local": list(parameter.local_shape),
        "bytes": [
            parameter.weight_bytes,
            parameter.gradient_bytes,
            parameter.state_bytes,
            parameter.gathered_bytes,
        ],
        "update": short_number(parameter.update_seconds),
        "readers": list(parameter.readers),
        "messages": _messages(parameter.messages),
        "segments": parameter.num_segments,
        "host": parameter.on_host,
    }


def _op(op: OpDetails) -> dict[str, Any]:
    """Return an op as JSON data: strategy, operands, results, seconds, bytes and messages of it."""
    return {
        "name": op.name,
        "target": op.target,
        "module": op.module,
        "source": op.source,
        "strategies": list(op.strategies),
        "operands": [_value(value) for value in op.operands],
        "results": [_value(value) for value in op.results],
        "readers": list(op.readers),
        "forward": short_number(op.forward_seconds),
        "backward": short_number(op.backward_seconds),
        "saved": op.saved_bytes,
        "temporary": op.temporary_bytes,
        "once": op.is_per_step,
        "recomputed": op.is_recomputed,
        "messages": _messages(op.messages),
    }


def _value(value: ValueDetails) -> list[Any]:
    """Return a value as [maker, shape, dtype, layout, local shape, local bytes]."""
    return [
        value.maker,
        list(value.shape),
        value.dtype,
        value.layout,
        list(value.local_shape),
        value.local_bytes,
    ]


def _messages(messages: Sequence[MessageDetails]) -> list[dict[str, Any]]:
    """Return collectives and p2p transfers as JSON data, with bytes and seconds."""
    data = []
    for message in messages:
        data.append(
            {
                "kind": message.kind,
                "axis": message.axis,
                "phase": message.phase,
                "count": message.count,
                "bytes": message.num_bytes,
                "seconds": short_number(message.seconds),
                "place": message.place,
                "value": message.value,
                "from": message.source,
                "to": message.target,
            }
        )
    return data


def _collective(collective: Collective) -> list[Any]:
    """Return a stage's collective as [kind, axis, phase, count, bytes, seconds, largest part]."""
    return [
        collective.kind,
        collective.axis,
        collective.phase,
        collective.count,
        collective.num_bytes,
        short_number(collective.seconds),
        collective.largest,
    ]


def _timeline(plan: Plan) -> dict[str, Any] | None:
    """Return the predicted step over time as JSON data; None if its schedule cannot be drawn.

    Actions are [kind, stage, micro-batch, mesh, start, seconds], messages [source stage, target
    stage, micro-batch, start, seconds].
    """
    drawn = drawn_schedule(plan)
    if drawn is None:
        return None
    timeline = drawn.timeline
    actions = []
    for a in timeline.timed:
        times = [short_number(a.start), short_number(a.end - a.start)]
        actions.append([a.kind, a.stage, a.microbatch, a.mesh, *times])
    messages = []
    for m in drawn.messages:
        times = [short_number(m.start), short_number(m.end - m.start)]
        messages.append([m.source, m.target, m.microbatch, *times])
    return {
        "seconds": short_number(timeline.seconds),
        "meshes": list(timeline.meshes),
        "stages": [list(stages) for stages in timeline.stages],
        "drawn": timeline.num_drawn,
        "idle": [round(share, 6) for share in timeline.idle],
        "waits": _waits(timeline),
        "idleSeconds": [short_number(seconds) for seconds in idle_seconds(plan)],
        "actions": actions,
        "messages": messages,
        "critical": list(drawn.critical),
    }


def _waits(timeline: ScheduleTimeline) -> list[list[list[Any]]]:
    """Return, of each mesh, what it waits for in the drawn micro-batches: [reason, seconds]."""
    of_meshes = []
    for rows in waits(timeline):
        of_meshes.append([[reason, short_number(seconds)] for reason, seconds in rows])
    return of_meshes


def _finite(seconds: float | None) -> float | None:
    """Return seconds, None if they are not known or infinite: JSON has no infinity."""
    if seconds is None or not math.isfinite(seconds):
        return None
    return short_number(seconds)
