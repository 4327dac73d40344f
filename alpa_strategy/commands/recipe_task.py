"""A recipe's step as the planner's task: for every command that plans a recipe for a cluster.

The model is built on the meta device: no devices and no weights are needed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import OptionError, check_names
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.job import compiled_by_user
from alpa_strategy.lightning.master_weights import with_masters
from alpa_strategy.loading import rare_collections
from alpa_strategy.options import Limits, PlanOptions
from alpa_strategy.partial_results import NOT_STORED, PartialResults
from alpa_strategy.planner.eager_plan import eager_option
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.recipe import KEYS, Recipe, build_data, build_model, load_recipe

if TYPE_CHECKING:
    from alpa_strategy.planner.planner import CapturedTask

# First keys of overrides that only commands that plan accept: fields of the cluster, and `plan` as
# another name of the recipe's section `strategy`.
PLAN_KEYS = ("cluster", "plan")


def captured_recipe(
    recipe: Recipe,
    cluster: ClusterSpec,
    progress: Progress,
    results: PartialResults = NOT_STORED,
) -> "CapturedTask":
    """Return the task of planning a recipe's step on `cluster`, captured from a model on the meta
    device.

    Args:
        recipe: the recipe.
        cluster: the devices.
        progress: shows what is being done.
        results: partial results of an interrupted planning.

    Raises:
        OptionError: the recipe is wrong.
        CaptureError: its step cannot be captured.
    """
    from alpa_strategy.planner.optimizer_info import optimizer_info_of
    from alpa_strategy.planner.planner import captured_task

    options = plan_options(recipe)
    # Planning needs shapes alone: a model of 39 B parameters takes no memory here.
    with progress("build the model on the meta device"), torch.device("meta"):
        model = build_model(recipe)
    if recipe.strategy.get("compile") is None:
        options = replace(options, compile=compiled_by_user(model) is not None)

    batch = example_batch(build_data(recipe), recipe)
    precision = precision_plugin(recipe)
    precision.convert_module(model)
    optimizer = optimizer_info_of(model)
    context = precision.train_step_context
    with rare_collections():
        return captured_task(
            model, batch, cluster, options, optimizer, progress, context, None, results
        )


def planned_recipe(
    name: str, cluster: ClusterSpec, overrides: Sequence[str], progress: Progress
) -> tuple[Plan, PlanTask]:
    """Return the plan of a recipe with `overrides` on `cluster`, and its task.

    Raises:
        AlpaError: the recipe cannot be read, or nothing fits.
    """
    from alpa_strategy.planner.planner import plan_captured

    captured = captured_by_name(name, cluster, overrides, progress)
    with rare_collections():
        return plan_captured(captured), captured.task


def captured_by_name(
    name: str, cluster: ClusterSpec, overrides: Sequence[str], progress: Progress
) -> "CapturedTask":
    """Return the captured step of a recipe with `overrides`, ready to plan on `cluster`.

    Raises:
        AlpaError: the recipe cannot be read, planned or captured.
    """
    recipe = load_recipe(name, overrides)
    check_plannable(recipe)
    return captured_recipe(recipe, cluster, progress)


def check_plannable(recipe: Recipe) -> None:
    """Check that there is a plan of all devices, with captured steps.

    Raises:
        OptionError: an option of the recipe leaves none.
    """
    limits = recipe_limits(recipe)
    option = eager_option(plan_options(recipe), limits)
    if option is None and limits.replicas:
        option = f"replicas={limits.replicas}"
    if option is not None:
        raise OptionError(
            f"{option}: there is no plan of all devices",
            "leave it out; to plan one of several replicas, give a cluster of its devices and"
            " batch_scope=global",
        )


def plan_options(recipe: Recipe) -> PlanOptions:
    """Return the recipe's strategy options that plans depend on, and the Trainer's
    `accumulate_grad_batches`.

    Raises:
        OptionError: an option has a value that it cannot have.
    """
    names = {option.name for option in fields(PlanOptions)}
    values = {key: value for key, value in recipe.strategy.items() if key in names}
    if "accumulate_grad_batches" in recipe.trainer:
        values["accumulate_grad_batches"] = recipe.trainer["accumulate_grad_batches"]
    return PlanOptions.from_user(**values)


def recipe_limits(recipe: Recipe) -> Limits:
    """Return the recipe's strategy options that only the runtime uses."""
    names = {option.name for option in fields(Limits)}
    values = {key: value for key, value in recipe.strategy.items() if key in names}
    return Limits.from_user(**values)


def split_overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the overrides of `alpa plan` into those of the cluster and those of the recipe.

    Returns:
        The cluster's fields with their values, as text, and the recipe's overrides, with `plan.` as
        `strategy.`.

    Raises:
        OptionError: the first name of an override is unknown, `cluster` or `plan` stands without a
            field, or a cluster's override has no `=`. The recipe's are not checked further.
    """
    to_cluster: dict[str, Any] = {}
    to_recipe: list[str] = []
    for text in overrides:
        section = re.split(r"[.=]", text, maxsplit=1)[0]
        check_names([section], (*PLAN_KEYS, *KEYS), f"override {text!r}: unknown key")
        if section in PLAN_KEYS and not text.startswith(f"{section}."):
            raise OptionError(
                f"override {text!r} names no field of {section!r}",
                "write cluster.num_nodes=2, or plan.parallel=tensor",
            )
        if section == "cluster":
            key, equals, value = text.removeprefix("cluster.").partition("=")
            if not equals:
                raise OptionError(
                    f"override {text!r} is not of the form key=value", "write cluster.num_nodes=2"
                )
            to_cluster[key] = value
        else:
            to_recipe.append(re.sub(r"^plan\.", "strategy.", text))
    return to_cluster, to_recipe


def example_batch(data: Any, recipe: Recipe) -> Any:
    """Return a batch of the right shapes: of `data.example_batch()`, or of the first samples of the
    training dataset, as many as its loader puts into the first batch.

    For the latter, the data is prepared and set up as for `fit`.

    Args:
        data: a LightningDataModule, or an object with its methods.
        recipe: for the message.

    Raises:
        OptionError: the data module has neither `example_batch()` nor a map-style dataset, or its
            loader has no batch.
    """
    if hasattr(data, "example_batch"):
        return data.example_batch()
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    try:
        num_samples = min(loader.batch_size, len(loader.dataset))
        # Not by iterating the loader, which would start its workers.
        samples = [loader.dataset[i] for i in range(num_samples)]
    except (AttributeError, TypeError, NotImplementedError):
        raise OptionError(
            f"{recipe.path}: data: {type(data).__name__} has neither example_batch() nor a"
            " map-style training dataset",
            "add a method example_batch() that returns a batch of the right shapes",
        ) from None
    if num_samples == 0 or (loader.drop_last and num_samples < loader.batch_size):
        raise OptionError(
            f"{recipe.path}: data: the training loader has no batch: it has {num_samples} samples,"
            f" and batch_size={loader.batch_size}",
            "choose a smaller batch_size, or a dataset with more samples",
        )
    return loader.collate_fn(samples)


def precision_name(recipe: Recipe) -> str:
    """Return the Trainer's full name of the recipe's precision: `bf16-mixed` for `bf16`."""
    precision = str(recipe.trainer.get("precision") or "32-true")
    full_names = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
    return full_names.get(precision, precision)


def precision_plugin(recipe: Recipe) -> Precision:
    """Return the Trainer's plugin for the recipe's precision, with master weights if its strategy
    has them.

    Its autocast is that of the CPU, on which steps are captured for any cluster.

    Raises:
        OptionError: the precision cannot be planned.
    """
    precision = precision_name(recipe)
    plugins: dict[str, Callable[[], Precision]] = {
        "32-true": Precision,
        "64-true": DoublePrecision,
        "16-mixed": lambda: MixedPrecision("16-mixed", "cpu"),
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "16-true": lambda: HalfPrecision("16-true"),
        "bf16-true": lambda: HalfPrecision("bf16-true"),
    }
    check_names([precision], plugins, f"{recipe.path}: trainer.precision cannot be planned:")
    plugin = plugins[precision]()
    return with_masters(plugin) if recipe.strategy.get("master_weights") else plugin
