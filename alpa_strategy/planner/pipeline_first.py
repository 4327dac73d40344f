"""A pipeline on a large cluster, searched before one stage is solved.

On thousands of devices one stage is mostly far slower than a pipeline, or does not fit, and solving
it on every logical mesh takes as long as the search for pipelines. So its seconds are bounded
first; it is solved only if it may be the plan.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.one_stage_floor import least_one_stage_seconds
from alpa_strategy.inter_op.pins import layers_of
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.ir.plan import Plan
from alpa_strategy.partial_results import Key
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.pipeline_search import plan_pipeline
from alpa_strategy.planner.short_steps import is_short
from alpa_strategy.planner.task import PlanTask

# Layers are bounded with fewer layouts at their ends than stages have: one stage may be so much
# below its bound.
APPROXIMATION = 0.05

# One stage does not fit, or is of no interest, if its bound is this multiple of the evenly shared
# seconds of its ops: one stage with micro-batches is then searched among the pipelines.
HOPELESS = 4.0


@dataclass(frozen=True)
class PipelineFirst:
    """A pipeline that was searched before one stage was solved.

    Attributes:
        pipeline: the best one; None: there is none.
        least_seconds: that one stage takes at least.
        is_better: whether the pipeline is the plan whatever one stage takes.
    """

    pipeline: Plan | None
    least_seconds: float
    is_better: bool


def search_pipeline_first(
    task: PlanTask, shared_seconds: float, screen: float, margin: float
) -> PipelineFirst | None:
    """Search a pipeline if one stage is too slow to rule pipelines out; else return None.

    Args:
        shared_seconds: of the step's ops if the devices shared them evenly.
        screen: no pipeline is searched if one stage loses less than this share of its step.
        margin: by which a pipeline must be faster.
    """
    with task.progress("bound of one stage"):
        least_seconds = (1 - APPROXIMATION) * _least_seconds(task, shared_seconds)
    if shared_seconds > (1 - screen) * least_seconds or is_short(task, least_seconds):
        return None

    several = least_seconds < HOPELESS * shared_seconds
    pipeline: Plan | None = None
    with suppress(PlanError):
        pipeline = plan_pipeline(task.for_stages(), several=several)
    if pipeline is None:
        return PipelineFirst(None, least_seconds, False)
    is_better = pipeline.predicted.step_seconds <= (1 - margin) * least_seconds
    if is_better and len(pipeline.stages) > 1:
        factor = least_seconds / pipeline.predicted.step_seconds
        slower = f"would take at least {factor:.2f}x as long"
        note = f"a pipeline: one stage does not fit, or {slower}"
        pipeline = replace(pipeline, notes=(*pipeline.notes, note))
    return PipelineFirst(pipeline, least_seconds, is_better)


def _least_seconds(task: PlanTask, shared_seconds: float) -> float:
    """Return `least_one_stage_seconds` of the task, or what an interrupted planning has stored."""
    job = _whole_batch_in_layers(task)
    return task.results.get(
        "least",
        key=lambda: Key(job.content, shared_seconds),
        compute=lambda: least_one_stage_seconds(job, shared_seconds),
        encode=lambda seconds: {"seconds": seconds},
        decode=lambda record: float(record["seconds"]),
    )


def _whole_batch_in_layers(task: PlanTask) -> StageCostTask:
    """Return the full batch as one micro-batch, split into layers."""
    cuts, _ = layers_of(task.step, task.cluster, task.options)
    return stage_cost_task(task, task.step, cuts, 1, remat=False)
