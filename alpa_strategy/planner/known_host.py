"""What is known of the host's time of a step before it runs: the same whatever the plan."""

from alpa_strategy.cost.host import assumed_loop_seconds, optimizer_host_seconds, with_host
from alpa_strategy.ir.plan import Predicted
from alpa_strategy.planner.task import PlanTask


def known_host_seconds(task: PlanTask) -> tuple[float, float]:
    """Return seconds per step of (the optimizer's Python, the Trainer's loop)."""
    device = task.cluster.device
    num_trained = sum(parameter.meta.requires_grad for parameter in task.step.parameters)
    optimizer = optimizer_host_seconds(task.optimizer, num_trained, device)
    return optimizer, assumed_loop_seconds(device, len(task.step.logs))


def seconds_with_host(seconds: float, task: PlanTask) -> float:
    """Return the seconds of a step whose devices take `seconds`, in a job whose devices are
    measured; `seconds` in others.
    """
    if not task.cluster.measured:
        return seconds
    optimizer, loop = known_host_seconds(task)
    return with_host(Predicted(seconds, 0), optimizer, loop, task.cluster.device).step_seconds
