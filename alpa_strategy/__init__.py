"""Automatic parallelism for PyTorch Lightning: `import alpa_strategy`, then
`Trainer(strategy="alpa")`.

The import registers the strategy; capture and the planner are loaded by the first use of a name, or
the first step.
"""

import importlib
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from alpa_strategy.checkpoint.opening import open_checkpoint
from alpa_strategy.checkpoint.saving import export_checkpoint
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts, RooflineCosts, Saved
from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.checkpointing import let_directories_load
from alpa_strategy.lightning.cli_checkpoints import let_cli_read_directories
from alpa_strategy.lightning.other_entries import fabric_error, name_the_cures
from alpa_strategy.options import PlanOptions
from alpa_strategy.schedules import Action, Schedule, register_schedule
from alpa_strategy.strategy import AlpaStrategy

if TYPE_CHECKING:
    from alpa_strategy.capture.capture import capture_step
    from alpa_strategy.planner.phases import Phase
    from alpa_strategy.planner.planner import make_plan
    from alpa_strategy.sharding.register import prove_sharding, register_sharding

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

_LAZY = {
    "Phase": "alpa_strategy.planner.phases",
    "capture_step": "alpa_strategy.capture.capture",
    "make_plan": "alpa_strategy.planner.planner",
    "prove_sharding": "alpa_strategy.sharding.register",
    "register_sharding": "alpa_strategy.sharding.register",
}


class NoFabric:
    """Registered as the "alpa" of Fabric, whose users write the loop themselves: there is no step
    to capture.
    """

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise fabric_error()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'alpa_strategy' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


let_directories_load()
let_cli_read_directories()
name_the_cures()
if "alpa" not in StrategyRegistry:
    StrategyRegistry.register(
        "alpa", AlpaStrategy, description="Solved shardings: plans how the module is parallelised"
    )
if "alpa" not in FABRIC_REGISTRY:
    FABRIC_REGISTRY.register("alpa", NoFabric, description="Only for the Trainer")
