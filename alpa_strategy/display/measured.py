"""Measured beside predicted: the parts of a step as a table for a terminal."""

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_strategy.display.console import plain
from alpa_strategy.display.findings import busiest_text
from alpa_strategy.display.plan_words import rates_text
from alpa_strategy.display.stage_groups import busiest_stage
from alpa_strategy.display.table import prediction_text, step_parts
from alpa_strategy.ir.measured_steps import MeasuredSteps, ProfiledSteps
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.units import format_seconds

# Parts in the order of the table, and what they are. Other parts are kinds of collectives.
_FIRST = ("forward", "backward")
_LAST = ("boundaries", "optimizer", "waiting", "host")
_MEANINGS = {
    "forward": "its ops",
    "backward": "its ops, and recomputed ones",
    "boundaries": "messages between stages",
    "optimizer": "the update",
    "waiting": "for other devices",
    "host": "Python, Trainer, loader",
}
# Parts below this share of the step are left out if they are not predicted.
_LEAST_SHARE = 0.001


def plan_in_run(plan: Plan, seconds: float | None) -> Plan:
    """Return the plan with the prediction that a run is compared to: the Trainer's loop takes as
    long as the run has measured.

    Args:
        plan: of the run.
        seconds: predicted for a step of the run; None: as planned.
    """
    if seconds is None:
        return plan
    planned = plan.predicted
    loop_seconds = planned.loop_seconds + seconds - planned.step_seconds
    return replace(
        plan, predicted=replace(planned, step_seconds=seconds, loop_seconds=loop_seconds)
    )


def predicted_parts(plan: Plan) -> dict[str, float]:
    """Return the predicted seconds of a step by part, on the devices of the busiest stage.

    Forward and backward are without their collectives. Empty if the plan predicts no parts.
    """
    totals = step_parts(plan)
    if not totals:
        return {}
    stage = plan.stages[busiest_stage(plan)]
    of_stage = stage.predicted
    parts = {}
    both = stage.forward_seconds + stage.backward_seconds
    # The forward's share of compute is that of all seconds.
    share = stage.forward_seconds / both if both else 1 / 3
    parts["forward"] = share * of_stage.compute_seconds
    parts["backward"] = (1 - share) * of_stage.compute_seconds
    parts |= _collective_seconds(stage)
    if plan.is_pipelined:
        parts["boundaries"] = stage.boundary_seconds * plan.num_microbatches
    parts["optimizer"] = of_stage.optimizer_seconds
    parts["host"] = totals.get("host", 0.0)
    if len(plan.stages) > 1:
        parts["waiting"] = max(0.0, plan.predicted.step_seconds - sum(parts.values()))
    return parts


def _collective_seconds(stage: StagePlan) -> dict[str, float]:
    """Return the predicted seconds of a stage's collectives by kind, without what is hidden; all
    under `communication` if the plan has no collectives.
    """
    by_kind: dict[str, float] = {}
    for collective in stage.collectives:
        kind = collective.kind
        by_kind[kind] = by_kind.get(kind, 0.0) + collective.seconds
    total = sum(by_kind.values())
    exposed = stage.predicted.communication_seconds
    if not total:
        return {"communication": exposed} if exposed else {}
    return {kind: seconds * exposed / total for kind, seconds in by_kind.items()}


def measured_parts(profiled: ProfiledSteps, plan: Plan) -> dict[str, float]:
    """Return the measured seconds of a step by part: means over the devices of the busiest stage,
    or over all if none of these was profiled.

    Args:
        profiled: of a run.
        plan: of the run.
    """
    stage = 0 if plan.is_eager else busiest_stage(plan)
    chosen = [rank for rank in profiled.ranks if stage in rank.stages]
    if not chosen:
        chosen = list(profiled.ranks)
    parts: dict[str, float] = {}
    for rank in chosen:
        for part, seconds in rank.parts.items():
            parts[part] = parts.get(part, 0.0) + seconds / len(chosen)
    return parts


def measured_table(measured: MeasuredSteps, plan: Plan) -> RenderableType:
    """Return a table of the parts of a step, measured beside predicted; a line of the seconds of a
    step if none was profiled.

    Args:
        measured: of a run of the plan.
        plan: with the predictions.
    """
    profiled = measured.profiled
    if profiled is None:
        return _step_line(measured, plan)
    in_run = plan_in_run(plan, measured.profile_predicted_seconds)
    of_plan = predicted_parts(in_run)
    of_run = measured_parts(profiled, plan)
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    table.add_column("part of the step")
    for name in ("measured", "predicted"):
        table.add_column(name, justify="right")
    table.add_column("")
    least = _LEAST_SHARE * profiled.step_seconds
    for part in _order(of_plan, of_run):
        seconds = of_run.get(part, 0.0)
        expected = of_plan.get(part)
        if max(seconds, expected or 0.0) < least:
            continue
        meaning = Text(_MEANINGS.get(part, ""), "dim")
        table.add_row(plain(part), format_seconds(seconds), _seconds(expected), meaning)
    step = in_run.predicted.step_seconds or None
    table.add_row(Text("step", "bold"), format_seconds(profiled.step_seconds), _seconds(step), "")
    where = ""
    if len(plan.stages) > 1:
        where = f" {busiest_text(plan)}"
    last = profiled.first + profiled.count - 1
    title = f"alpa profiled steps {profiled.first} to {last}{where}"
    return Group(plain(title, "bold"), table, plain(profile_notes(measured, plan), "dim"))


def profile_notes(measured: MeasuredSteps, plan: Plan) -> str:
    """Return a text below the table of profiled steps: of which run they are, and the seconds that
    were predicted for them.

    Args:
        measured: of a run of the plan, with a profile.
        plan: with the predictions.
    """
    is_earlier = measured.earlier_predicted_seconds is not None
    notes = "Profiled steps are slower: recording takes time."
    if is_earlier:
        notes = f"An earlier run was profiled, with a loop and loader of its own. {notes}"
    planned = plan.predicted.step_seconds
    predicted = measured.profile_predicted_seconds
    if predicted is not None and format_seconds(predicted) != format_seconds(planned):
        notes += f" Predicted are {prediction_text(predicted, planned)}."
    if measured.step_seconds is not None:
        other = "Steps of the last run" if is_earlier else "Other steps"
        notes += f" {other} take {format_seconds(measured.step_seconds)}."
    return notes


def _step_line(measured: MeasuredSteps, plan: Plan) -> Text:
    """Return a line with the measured and the predicted seconds of a step, and its rates."""
    seconds = measured.step_seconds
    shown = "not known" if seconds is None else format_seconds(seconds)
    in_run = plan_in_run(plan, measured.predicted_seconds).predicted.step_seconds
    predicted = prediction_text(in_run, plan.predicted.step_seconds)
    rates = rates_text(plan.figures, seconds or 0.0)
    line = f"a step took {shown}, predicted {predicted}"
    return Text.assemble(("measured  ", "bold"), f"{line}, {rates}" if rates else line)


def _order(of_plan: Mapping[str, float], of_run: Mapping[str, float]) -> list[str]:
    """Return all parts in the order of the table."""
    known = (*_FIRST, *_LAST)
    collectives = sorted(part for part in {*of_plan, *of_run} if part not in known)
    return [*_FIRST, *collectives, *_LAST]


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
