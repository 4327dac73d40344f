"""The extra at its hook point."""

from typing import TYPE_CHECKING, Any

from alpa_strategy.extras.planned_submodules.options import submodule_options

if TYPE_CHECKING:
    from alpa_strategy.errors import CaptureError
    from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun

__all__ = ["new_run", "submodule_options"]


def new_run(inputs: "RunInputs", why: "CaptureError", recorded: Any) -> "ShardedRun":
    """Return a run with planned submodules; see `hook_points.PlannedSubmodulesExtra`."""
    # What steps need comes with the first one.
    from alpa_strategy.extras.planned_submodules.run import SubmoduleRun

    return SubmoduleRun(inputs, why, recorded)
