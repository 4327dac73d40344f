"""Automatic parallelism for PyTorch Lightning: `Trainer(strategy="alpa")`.

`import alpa_strategy` registers the strategy and imports little else, as every process of a job
pays for it. All other names are imported at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from alpa_strategy import extras
from alpa_strategy.loading import without_collections

if TYPE_CHECKING:
    from alpa_strategy.capture.capture import capture_step
    from alpa_strategy.checkpoint.opening import open_checkpoint
    from alpa_strategy.checkpoint.saving import export_checkpoint
    from alpa_strategy.cluster.spec import ClusterSpec
    from alpa_strategy.cost.model import OpCosts, RooflineCosts
    from alpa_strategy.cost.saved_tensors import Saved
    from alpa_strategy.errors import AlpaError
    from alpa_strategy.extras.iteration_phases import Phase
    from alpa_strategy.ir.op import OpCall
    from alpa_strategy.ir.plan import Plan
    from alpa_strategy.options import PlanOptions
    from alpa_strategy.planner.planner import make_plan
    from alpa_strategy.schedules import Action, Schedule, register_schedule
    from alpa_strategy.sharding.register import prove_sharding, register_sharding
    from alpa_strategy.strategy import AlpaStrategy

__all__ = [
    "Action",
    "AlpaError",
    "AlpaStrategy",
    "ClusterSpec",
    "OpCall",
    "OpCosts",
    "Phase",
    "Plan",
    "PlanOptions",
    "RooflineCosts",
    "Saved",
    "Schedule",
    "capture_step",
    "export_checkpoint",
    "make_plan",
    "open_checkpoint",
    "prove_sharding",
    "register_schedule",
    "register_sharding",
]

# pyproject.toml reads it from here.
__version__ = "0.1.0"

_LAZY = {
    "Action": "alpa_strategy.schedules",
    "AlpaError": "alpa_strategy.errors",
    "AlpaStrategy": "alpa_strategy.strategy",
    "ClusterSpec": "alpa_strategy.cluster.spec",
    "OpCall": "alpa_strategy.ir.op",
    "OpCosts": "alpa_strategy.cost.model",
    "Phase": "alpa_strategy.extras.iteration_phases",
    "Plan": "alpa_strategy.ir.plan",
    "PlanOptions": "alpa_strategy.options",
    "RooflineCosts": "alpa_strategy.cost.model",
    "Saved": "alpa_strategy.cost.saved_tensors",
    "Schedule": "alpa_strategy.schedules",
    "capture_step": "alpa_strategy.capture.capture",
    "export_checkpoint": "alpa_strategy.checkpoint.saving",
    "make_plan": "alpa_strategy.planner.planner",
    "open_checkpoint": "alpa_strategy.checkpoint.opening",
    "prove_sharding": "alpa_strategy.sharding.register",
    "register_schedule": "alpa_strategy.schedules",
    "register_sharding": "alpa_strategy.sharding.register",
}


class NoFabric:
    """Raises an error for Fabric(strategy="alpa"): its users write the loop themselves, so there is
    no step to capture.
    """

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        from alpa_strategy.lightning.other_entries import fabric_error

        raise fabric_error()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'alpa_strategy' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def _register() -> None:
    """Make `strategy="alpa"` (and `alpa_notebook`) known to Lightning, and checkpoint directories
    to its loading and its CLI. Let Fabric and `pytorch_lightning` refuse alpa. Switch on all
    extras.
    """
    with without_collections():
        strategy = importlib.import_module("alpa_strategy.strategy")
        directory_loading = importlib.import_module("alpa_strategy.lightning.directory_loading")
        cli_checkpoints = importlib.import_module("alpa_strategy.lightning.cli_checkpoints")
        other_entries = importlib.import_module("alpa_strategy.lightning.other_entries")
    extras.register()
    directory_loading.register_directory_loading()
    cli_checkpoints.let_cli_read_directories()
    other_entries.wrap_other_entries()
    if "alpa" not in StrategyRegistry:
        about = "Solved shardings: plans how the module is parallelised"
        StrategyRegistry.register("alpa", strategy.AlpaStrategy, description=about)
        StrategyRegistry.register(
            "alpa_notebook", strategy.AlpaStrategy, description=about, start_method="fork"
        )
    if "alpa" not in FABRIC_REGISTRY:
        FABRIC_REGISTRY.register("alpa", NoFabric, description="Only for the Trainer")


_register()
