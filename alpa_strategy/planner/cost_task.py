"""What the stages of a plan are priced for, made from the planner's task."""

from typing import Any

from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.planner.task import PlanTask


def stage_cost_task(
    task: PlanTask,
    graph: StepGraph,
    cuts: tuple[int, ...],
    num_microbatches: int,
    **fields: Any,
) -> StageCostTask:
    """Return the task of pricing runs of layers of `graph`, with the costs and options of `task`.

    Args:
        graph: the step, or one of its micro-batches.
        cuts: positions of ops at which layers begin, and the number of ops.
        fields: other fields of StageCostTask; they win over those of `task`.
    """
    of_task: dict[str, Any] = {
        "cluster": task.cluster,
        "costs": task.op_costs,
        "options": task.options,
        "optimizer": task.optimizer,
        "memory_limit": task.memory_limit,
        "results": task.results,
    }
    return StageCostTask(graph, cuts, num_microbatches, **{**of_task, **fields})
