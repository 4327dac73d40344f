"""The task that a stored plan was made for, made once more from its recipe or its model by name."""

from dataclasses import dataclass

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.commands.recipe_task import captured_recipe, split_overrides
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import PlanError
from alpa_strategy.fit.command import fit_request, is_by_name
from alpa_strategy.fit.request import FitRequest
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import Origin, PlanDetails, details_of_file, details_path
from alpa_strategy.planner.task import PlanTask, check_fits
from alpa_strategy.recipe import load_recipe


@dataclass(frozen=True)
class StoredPlan:
    """A plan file with its details and its task."""

    plan: Plan
    details: PlanDetails
    task: PlanTask


def stored_plan(path: str, progress: Progress) -> StoredPlan:
    """Return a plan file with the task that it was made for.

    Raises:
        PlanError: nothing beside it names its recipe, or the recipe has changed since.
        AlpaError: the plan, its recipe or cluster cannot be read, or the step not captured.
    """
    plan = Plan.load(path)
    details = details_of_file(path, plan)
    if details is None:
        raise PlanError(
            f"there is no {details_path(path).name} of this plan beside {path}",
            "make the plan with `alpa plan RECIPE --cluster CLUSTER -o PLAN.json`",
        )
    if details.origin is None:
        raise PlanError(
            f"{path} was not made from a recipe, so its model is not known here",
            "ask in the program that has the model:"
            " alpa_strategy.make_plan(module, batch, cluster).explain(NAME); or plan a recipe of"
            " it: alpa plan RECIPE --cluster CLUSTER -o PLAN.json",
        )
    check_has_flags(path, details.origin)
    task = task_of(details.origin, progress)
    check_fits(plan, task.fingerprint, path)
    return StoredPlan(plan, details, task)


def task_of(origin: Origin, progress: Progress) -> PlanTask:
    """Capture a recipe, or a model by name, and return the task of planning it for a cluster.

    Args:
        origin: recipe, cluster and overrides.
        progress: shows the phases.

    Raises:
        AlpaError: recipe or cluster cannot be read, or the step cannot be captured.
    """
    from alpa_strategy.fit.variation import CapturedRequests

    to_cluster, overrides = split_overrides(origin.overrides)
    cluster = ClusterSpec.load(origin.cluster, to_cluster)
    request = request_of(origin, cluster)
    if request is not None:
        task, _ = CapturedRequests(progress).planning(request, cluster, overrides)
        return task
    recipe = load_recipe(origin.recipe, overrides)
    return captured_recipe(recipe, cluster, progress).task


def check_has_flags(path: str, origin: Origin) -> None:
    """Check that the origin of a stored plan says what was asked of a model by name.

    Args:
        path: of the plan.
        origin: of the plan.

    Raises:
        PlanError: it does not.
    """
    if is_by_name(origin.recipe) and not origin.flags:
        raise PlanError(
            f"{path} was stored by an older version, without the flags that it was made with",
            f"make it once more: alpa plan {origin.recipe} --cluster {origin.cluster} -o {path}",
        )


def request_of(origin: Origin, cluster: ClusterSpec) -> FitRequest | None:
    """Return the request of a model by name; None if the origin is a recipe.

    Args:
        origin: a recipe or a model by name.
        cluster: that it is planned for.

    Raises:
        OptionError: a flag is unknown, or has a wrong value.
    """
    if not is_by_name(origin.recipe):
        return None
    return fit_request(origin.recipe, origin.flags, cluster.num_devices)
