"""What a run has measured as plain data for the page's script."""

from typing import Any

from alpa_strategy.display.measured import (
    measured_parts,
    plan_in_run,
    predicted_parts,
    profile_notes,
)
from alpa_strategy.display.plan_words import rates_text
from alpa_strategy.display.table import prediction_text
from alpa_strategy.ir.measured_steps import MeasuredSteps, ProfiledSteps
from alpa_strategy.ir.plan import Plan
from alpa_strategy.page.numbers import short_number


def measured_model(plan: Plan, measured: MeasuredSteps | None) -> dict[str, Any] | None:
    """Return the measurements of a run as JSON data; None if there are none.

    `parts` are [part, measured seconds, predicted seconds or None]. The timeline has the form of
    the predicted one (`page/model.py`). Without profiled steps there is neither.
    """
    if measured is None:
        return None
    profiled = measured.profiled
    data: dict[str, Any] = {"step": measured.step_seconds}
    in_run = plan_in_run(plan, measured.predicted_seconds)
    predicted = in_run.predicted.step_seconds
    data["predicted"] = short_number(predicted)
    data["prediction"] = prediction_text(predicted, plan.predicted.step_seconds)
    data["rates"] = rates_text(plan.figures, measured.step_seconds or 0.0)
    if profiled is None:
        return data
    in_profile = plan_in_run(plan, measured.profile_predicted_seconds)
    of_plan = predicted_parts(in_profile)
    of_run = measured_parts(profiled, plan)
    parts = [[part, of_run.get(part, 0.0), of_plan.get(part)] for part in {**of_run, **of_plan}]
    data["profiled"] = profiled.step_seconds
    data["profilePredicted"] = short_number(in_profile.predicted.step_seconds)
    data["profileNotes"] = profile_notes(measured, plan)
    data["steps"] = [profiled.first, profiled.first + profiled.count - 1]
    data["trace"] = profiled.trace
    data["parts"] = parts
    data["timeline"] = _timeline(profiled, plan)
    return data


def _timeline(profiled: ProfiledSteps, plan: Plan) -> dict[str, Any]:
    """Return the profiled step over time as JSON data, with a lane per mesh: its first rank's.
    Fields as of `model._timeline`, without `idleSeconds`.
    """
    actions = []
    ends = []
    busy_seconds = []
    for lane, of_rank in enumerate(profiled.lanes):
        busy = 0.0
        for action in of_rank.actions:
            times = [short_number(action.start), short_number(action.seconds)]
            actions.append([action.kind, action.stage, action.microbatch, lane, *times])
            ends.append(action.start + action.seconds)
            busy += action.seconds
        busy_seconds.append(busy)
    seconds = max(ends, default=0.0)
    idle = []
    for busy in busy_seconds:
        idle.append(round(max(0.0, 1 - busy / seconds), 4) if seconds else 0.0)
    messages = []
    for message in profiled.messages:
        times = [short_number(message.start), short_number(message.seconds)]
        messages.append([message.source, message.target, message.microbatch, *times])
    stages = [list(lane.stages) for lane in profiled.lanes]
    return {
        "seconds": seconds,
        "meshes": [str(lane.rank) for lane in profiled.lanes],
        "stages": stages,
        "drawn": plan.num_microbatches,
        "idle": idle,
        "actions": actions,
        "messages": messages,
        "critical": [],
    }
