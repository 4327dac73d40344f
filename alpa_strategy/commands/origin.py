"""The task that a stored plan was made for, made once more from its recipe."""

from dataclasses import dataclass

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.commands.recipe_task import captured_recipe, split_overrides
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import PlanError
from alpa_strategy.fit.command import check_is_recipe
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
    task = task_of(details.origin, progress)
    check_fits(plan, task.fingerprint, path)
    return StoredPlan(plan, details, task)


def task_of(origin: Origin, progress: Progress) -> PlanTask:
    """Return the task of planning a recipe for a cluster."""
    check_is_recipe(origin.recipe)
    to_cluster, overrides = split_overrides(origin.overrides)
    cluster = ClusterSpec.load(origin.cluster, to_cluster)
    recipe = load_recipe(origin.recipe, overrides)
    return captured_recipe(recipe, cluster, progress).task
