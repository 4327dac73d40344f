"""The answers of `alpa plan hf:...`: whether a model fits, or a sweep over numbers of devices."""

from rich.console import Console, RenderableType

from alpa_strategy.errors import PlanError
from alpa_strategy.fit.changes import FitCase, nearest_changes, plan_case, with_changes
from alpa_strategy.fit.flags import flags_table
from alpa_strategy.fit.report import (
    changes_table,
    does_not_fit,
    headline,
    memory_by_stage,
    report,
    verdict,
)
from alpa_strategy.fit.sweep import best_point, read_sweep, sweep, sweep_table, write_picture
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.task import PlanTask, Progress


def answer_fit(
    case: FitCase, num_changes: int, progress: Progress, console: Console
) -> tuple[Plan, PlanTask]:
    """Plan a case, print the answer, and return the plan, with its changes in it, and its task.

    Args:
        case: what is asked.
        num_changes: the most changes that help to list; 0: none, and no table of them.

    Raises:
        PlanError: nothing fits; the answer has been printed.
    """
    task = case.task
    cluster = case.cluster
    top = _headline(case)
    plan_task = task.plan_task(cluster, case.options, progress)
    try:
        plan = plan_case(case, progress)
    except PlanError as error:
        changes = nearest_changes(case, None, progress, num_changes)
        answer: list[RenderableType] = [top, does_not_fit(error)]
        if num_changes > 0:
            answer.append(changes_table(changes, case, None))
        console.print(report(answer))
        raise

    changes = nearest_changes(case, plan, progress, num_changes)
    plan = with_changes(plan, changes, case)
    sections: list[RenderableType] = [
        top,
        verdict(plan, cluster, plan_task.memory_limit),
        memory_by_stage(plan),
    ]
    if num_changes > 0:
        sections.append(changes_table(changes, case, plan))
    sections.append(flags_table(plan, task.request))
    console.print(report(sections))
    return plan, plan_task


def answer_sweep(
    case: FitCase, sizes: str, picture: str | None, progress: Progress, console: Console
) -> tuple[Plan, PlanTask]:
    """Plan a case on several numbers of devices, print a table, and return the plan of the most
    tokens per second with its task.

    Args:
        case: what is asked.
        sizes: `devices=8,16,32`.
        picture: path of an SVG file of the table; None: none.

    Raises:
        OptionError: `sizes` has another form or a number that does not divide into nodes, or the
            picture cannot be written.
        PlanError: nothing fits on any number of devices; the table has been printed.
    """
    points = sweep(case, read_sweep(sizes, case.cluster), progress)
    console.print(report([_headline(case), sweep_table(points)]))
    if picture:
        write_picture(picture, points)
    best, plan = best_point(points)
    return plan, case.task.plan_task(best, case.options, progress)


def _headline(case: FitCase) -> RenderableType:
    task = case.task
    return headline(task.request, case.cluster, task.num_parameters, task.num_trained)
