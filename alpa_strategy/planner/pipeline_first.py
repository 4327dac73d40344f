"""A pipeline on a large cluster, searched before one stage is solved.

On thousands of devices one stage is mostly far slower than a pipeline, or does not fit, and solving
it on every logical mesh takes as long as the search for pipelines. So its seconds are bounded
first; it is solved only on the logical meshes on which it may be the plan.
"""

import math
from collections.abc import Mapping
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
        least_seconds: logical mesh -> the seconds that one stage takes at least.
        slower_meshes: the logical meshes on which the pipeline is better than one stage.
        has_one_stage: whether one stage that computes micro-batches was among the candidates.
    """

    pipeline: Plan | None
    least_seconds: Mapping[tuple[int, ...], float]
    slower_meshes: frozenset[tuple[int, ...]] = frozenset()
    has_one_stage: bool = False

    @property
    def is_better(self) -> bool:
        """Whether the pipeline is the plan whatever one stage takes."""
        return self.pipeline is not None and len(self.slower_meshes) == len(self.least_seconds)

    @property
    def noted_pipeline(self) -> Plan | None:
        """The pipeline; None: there is none. With several stages it gets a note that one stage does
        not fit, or takes longer on `slower_meshes`: true if it does not fit on other meshes.
        """
        if self.pipeline is None or len(self.pipeline.stages) == 1:
            return self.pipeline
        note = "a pipeline: one stage does not fit"
        if self.slower_meshes:
            factor = self.least_on_slower_meshes / self.pipeline.predicted.step_seconds
            note += f", or would take at least {factor:.2f}x as long"
        return replace(self.pipeline, notes=(*self.pipeline.notes, note))

    @property
    def least_on_slower_meshes(self) -> float:
        """The seconds that one stage takes at least on `slower_meshes`; inf if there are none."""
        return min((self.least_seconds[shape] for shape in self.slower_meshes), default=math.inf)


def search_pipeline_first(
    task: PlanTask, shared_seconds: float, screen: float, margin: float
) -> PipelineFirst | None:
    """Search a pipeline if one stage is too slow to rule pipelines out; else, and for short steps
    (`is_short`), return None. The result has no pipeline if none is found.

    Args:
        shared_seconds: of the step's ops if the devices shared them evenly.
        screen: no pipeline is searched if one stage loses less than this share of its step.
        margin: by which a pipeline must be faster.

    Raises:
        OptionError, PlanError: a pin cannot be met.
    """
    with task.progress("bound of one stage"):
        bounds = _least_seconds(task, shared_seconds)
    least_on = {shape: (1 - APPROXIMATION) * seconds for shape, seconds in bounds.items()}
    least_seconds = min(least_on.values(), default=math.inf)
    if shared_seconds > (1 - screen) * least_seconds or is_short(task, least_seconds):
        return None

    several = least_seconds < HOPELESS * shared_seconds
    pipeline: Plan | None = None
    with suppress(PlanError):
        pipeline = plan_pipeline(task.for_stages(), several=several)
    if pipeline is None:
        return PipelineFirst(None, least_on)

    pipeline_seconds = pipeline.predicted.step_seconds
    slower_meshes = frozenset(
        shape for shape, seconds in least_on.items() if pipeline_seconds <= (1 - margin) * seconds
    )
    return PipelineFirst(pipeline, least_on, slower_meshes, has_one_stage=not several)


def _least_seconds(task: PlanTask, shared_seconds: float) -> dict[tuple[int, ...], float]:
    """Return `least_one_stage_seconds` of the task, or what an interrupted planning has stored."""
    job = _whole_batch_in_layers(task)
    return task.results.get(
        "least",
        key=lambda: Key(job.content, shared_seconds),
        compute=lambda: least_one_stage_seconds(job, shared_seconds),
        encode=lambda seconds: {"seconds": [*seconds.items()]},
        decode=lambda record: {tuple(shape): float(bound) for shape, bound in record["seconds"]},
    )


def _whole_batch_in_layers(task: PlanTask) -> StageCostTask:
    """Return the full batch as one micro-batch, split into layers."""
    cuts, _ = layers_of(task.step, task.cluster, task.options)
    return stage_cost_task(task, task.step, cuts, 1, remat=False)
