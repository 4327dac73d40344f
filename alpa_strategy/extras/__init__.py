"""Extras: what the core (capture to pipeline, and the strategy) works without.

Each is a package or a file of this folder. The core calls it at a hook point
(`alpa_strategy/hook_points.py`) and imports nothing of it; the table below switches it on.
"""

from typing import TYPE_CHECKING

from alpa_strategy import hook_points

if TYPE_CHECKING:
    from alpa_strategy.extras.deferred_init import DeferredInit


def _failure_watch() -> hook_points.FailureWatchExtra:
    from alpa_strategy.extras.failure_watch import job_watch

    return job_watch


def _host_groups() -> hook_points.HostGroupsExtra:
    from alpa_strategy.extras import shared_memory

    return shared_memory


def _host_allocator() -> hook_points.HostAllocatorExtra:
    from alpa_strategy.extras.host_allocator import tuning

    return tuning


def _deferred_init() -> "type[DeferredInit]":
    from alpa_strategy.extras.deferred_init import DeferredInit

    return DeferredInit


def _iteration_phases() -> hook_points.IterationPhasesExtra:
    from alpa_strategy.extras import iteration_phases

    return iteration_phases


def _activation_checkpoint() -> hook_points.ActivationCheckpointExtra:
    from alpa_strategy.extras.activation_checkpoint import Recomputation

    return Recomputation


def _planned_submodules() -> hook_points.PlannedSubmodulesExtra:
    from alpa_strategy.extras.planned_submodules import hook

    return hook


def _eager_sharding() -> hook_points.EagerShardingExtra:
    from alpa_strategy.extras.eager_sharding import hook

    return hook


def register() -> None:
    """Switch on all extras. Each is imported at its first use."""
    hook_points.FAILURE_WATCH.register(_failure_watch)
    hook_points.HOST_GROUPS.register(_host_groups)
    hook_points.HOST_ALLOCATOR.register(_host_allocator)
    hook_points.DEFERRED_INIT.register(_deferred_init)
    hook_points.ITERATION_PHASES.register(_iteration_phases)
    hook_points.ACTIVATION_CHECKPOINT.register(_activation_checkpoint)
    hook_points.PLANNED_SUBMODULES.register(_planned_submodules)
    hook_points.EAGER_SHARDING.register(_eager_sharding)
