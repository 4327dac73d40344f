"""Whose rows the state of a torchmetrics object stands for: this rank's, as users write them, or all ranks'.

Captured steps update metrics with the rows of all ranks, on every rank: nothing is to be summed over ranks then. Steps
that run as they are written add their own rank's rows, and the metric sums over ranks when it computes.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from alpa_strategy.comm.collectives import rank_in, world_size
from alpa_strategy.comm.mesh import Replica


class MetricStates:
    """The metrics of a module whose state stands for all ranks' rows at the moment. All methods are collective.

    Args:
        replica: of which all ranks have the same rows, and other replicas others; None: captured steps have all rows.
    """

    def __init__(self, replica: Replica | None = None) -> None:
        self._replica, self._group = replica, None if replica is None else replica.group
        # By id, as the hash of a metric changes with its state: the metric, its own `sync_on_compute` and group.
        self._global: dict[int, tuple[Metric, bool, Any]] = {}

    def make_global(self, metric: nn.Module) -> None:
        """Let the state stand for all ranks' rows, as a captured step updates it."""
        changed = [each for each in metric.modules() if isinstance(each, Metric) and id(each) not in self._global]
        if changed and isinstance(metric, MetricCollection):
            metric.values()  # metrics that share one state (compute groups) get one each
        for each in changed:
            self._global[id(each)] = each, each.sync_on_compute, each.process_group
            if each.sync_on_compute and each.update_called and world_size(self._group) > 1:
                each.process_group = self._group or each.process_group
                _keep_synced(each)
            if self._replica is None or self._replica.across.size == 1:
                _set_sync(each, False)
            else:
                each.process_group = self._replica.across.group

    def make_local(self) -> None:
        """Let the states stand for each rank's own rows again; their sum over the ranks stays the same."""
        num_ranks, rank = world_size(self._group), rank_in(self._group)
        for each, sync, group in self._global.values():
            _set_sync(each, sync)
            each.process_group = group
            if num_ranks > 1 and sync:
                _keep_part(each, num_ranks, rank)
        self._global.clear()


def _set_sync(metric: Metric, sync: bool) -> None:
    """Whether the metric sums over ranks when it computes; `_to_sync` is what `compute` looks at."""
    metric.sync_on_compute = metric._to_sync = sync


def _keep_synced(metric: Metric) -> None:
    """Every rank's state becomes that of all ranks."""
    metric.sync()  # lists become one tensor there, which `update` could not append to
    for name, default in metric._defaults.items():
        state = getattr(metric, name)
        if isinstance(default, list) and not isinstance(state, list):
            setattr(metric, name, [state])
    metric._is_synced, metric._cache = False, None  # else `update` refuses, and `compute` brings the old state back


def _keep_part(metric: Metric, num_ranks: int, rank: int) -> None:
    """Forget what the ranks' sum would count again: sums stay on rank 0, rows that were kept are dealt out in order.

    Every rank has rows of the same kind then, maybe none: torchmetrics could not gather `[]` with them. Means and
    extremes stay.
    """
    for name, reduction in metric._reductions.items():
        state, default = getattr(metric, name), metric._defaults[name]
        if reduction is dim_zero_cat and len(state):
            part = dim_zero_cat(state).tensor_split(num_ranks)[rank]
            setattr(metric, name, [part] if isinstance(default, list) else part)
        elif reduction is None and isinstance(state, list):
            setattr(metric, name, state[len(state) * rank // num_ranks : len(state) * (rank + 1) // num_ranks])
        elif reduction is dim_zero_sum and rank > 0:
            setattr(metric, name, [] if isinstance(default, list) else default.detach().clone().to(metric.device))
    metric._computed = None
