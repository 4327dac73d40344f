"""Steps of a few milliseconds: most of such a step is the host's time, which no op's time shows.

The host needs a fraction of a millisecond of Python for every collective that a step waits for, and
for every action of a pipeline. Costs that were measured in the job are those of ops and of
collectives alone, so plans with many of either look better than they run.
"""

from alpa_strategy.planner.task import PlanTask

# Below, a predicted step is so short that the host decides how long it takes.
SHORT_SECONDS = 5e-3
# By these factors data parallelism must be predicted slower for another plan to be taken: times
# measured in a running job are seldom noisier than the first.
TOLD_APART, TOLD_APART_IN_SHORT_STEPS = 1.1, 2.0


def is_short(task: PlanTask, seconds: float) -> bool:
    """Whether the host decides how long a step of `seconds` predicted seconds takes in a running
    job.
    """
    return task.cluster.measured and seconds < SHORT_SECONDS


def why_data_parallel(task: PlanTask, data_seconds: float, best_seconds: float) -> str | None:
    """Return why data parallelism is taken in place of the solver's plan; None if it is not.

    Args:
        data_seconds: predicted for a step under data parallelism whose gradient reduction is hidden
            behind the backward.
        best_seconds: the same of the solver's plan.
    """
    if data_seconds == best_seconds:
        return None
    if data_seconds < best_seconds:
        return "the reduction of gradients runs beside the backward"
    if not task.cluster.measured:
        return None
    faster = f"another plan is predicted {data_seconds / best_seconds - 1:.0%} faster"
    if data_seconds < TOLD_APART * best_seconds:
        return f"{faster}, too little to tell the two apart"
    if is_short(task, data_seconds) and data_seconds < TOLD_APART_IN_SHORT_STEPS * best_seconds:
        return f"{faster}, which is less than the host needs for its collectives"
    return None
