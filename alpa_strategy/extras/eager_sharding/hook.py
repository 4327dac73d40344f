"""The extra at its hook point."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from alpa_strategy.extras.eager_sharding.fully_shard import EagerFullyShard
from alpa_strategy.extras.eager_sharding.sharded_gradients import ShardedGradients
from alpa_strategy.runtime.owner_step import OwnerStep
from alpa_strategy.runtime.parameters import ParameterStore


def gather_on_use(
    module: nn.Module, store: ParameterStore, group: Any, keeps: bool, has_room: bool
) -> EagerFullyShard:
    """Return the `EagerFullyShard` that gathers the module's parameters on use. Args: as of
    `hook_points.EagerShardingExtra`.
    """
    return EagerFullyShard(module, store, group, keeps, has_room)


def sharded_gradients(
    module: nn.Module,
    store: ParameterStore,
    owner_steps: Sequence[OwnerStep],
    meet: Callable[[], None],
) -> ShardedGradients:
    """Return the contexts of steps that read gradients; see `hook_points.EagerShardingExtra`."""
    return ShardedGradients(module, store, owner_steps, meet)
