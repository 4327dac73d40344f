"""Effects of a captured step besides its loss: return value, `self.log` calls, metric updates.

A step has the effects that it has on this rank's batch, as under DDP. With `batch_scope="global"`
captured steps update torchmetrics objects on every rank with the samples of all ranks, so that
metrics must not be summed over ranks. `MetricStates` records which samples a metric's state stands
for.
"""

import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from alpa_strategy.comm.collectives import rank_in, world_size
from alpa_strategy.comm.mesh import Replica
from alpa_strategy.errors import FailedCheckError
from alpa_strategy.ir.graph import BufferInput, Check, LeafRef, MetricRef, StepGraph, ValueRef
from alpa_strategy.ir.guards import CounterRef

# Values in place of a process group. GLOBAL: the value is that of all ranks already, nothing is
# reduced. REPLICAS: the value is that of each replica, replicas are reduced.
GLOBAL = "global"
REPLICAS = "replicas"

_PLAIN = (bool, int, float, str)


def materialize_output(
    structure: Any,
    values: Mapping[int, Tensor],
    leaves: Sequence[Any] = (),
    counters: Mapping[str, int] | None = None,
) -> Any:
    """Return `structure` with its references replaced by values.

    Args:
        structure: a pytree; its leaves may be ValueRef, LeafRef and CounterRef.
        values: index of a ValueRef -> tensor.
        leaves: leaves of the batch, for LeafRef.
        counters: counters by name, for CounterRef.
    """
    # Most structures are one tensor, an argument of `self.log`, or a plain container of these: a
    # walk by pytree takes ten times as long.
    if isinstance(structure, ValueRef):
        return values[structure.index]
    if structure is None or isinstance(structure, _PLAIN):
        return structure
    kind = type(structure)
    if kind is dict:
        return {
            key: materialize_output(item, values, leaves, counters)
            for key, item in structure.items()
        }
    if kind is list or kind is tuple:
        return kind([materialize_output(item, values, leaves, counters) for item in structure])

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, ValueRef):
            return values[leaf.index]
        if isinstance(leaf, CounterRef):
            return leaf.value({} if counters is None else counters)
        return leaves[leaf.leaf] if isinstance(leaf, LeafRef) else leaf

    return pytree.tree_map(filled, structure)


def append_to_lists(
    module: nn.Module,
    step: StepGraph,
    values: Mapping[int, Tensor],
    leaves: Sequence[Any],
    counters: Mapping[str, int],
) -> None:
    """Append the step's values, detached, to the module's lists, as the user's step would.

    Args:
        values, leaves, counters: as of `materialize_output`.
    """
    if not step.appended:
        return
    detached = _detached(values)
    for record in step.appended:
        if record.place.leaf is None:
            record.place.value(module).extend(
                materialize_output(list(record.items), detached, leaves, counters)
            )


def set_attributes(
    module: nn.Module,
    step: StepGraph,
    values: Mapping[int, Tensor],
    leaves: Sequence[Any],
    counters: Mapping[str, int],
) -> None:
    """Set the attributes of modules that the user's step would set.

    Args: as of `append_to_lists`.
    """
    if not step.assigned:
        return
    detached = _detached(values)
    for record in step.assigned:
        attributes = record.place.holder(module)
        attributes[record.place.item] = materialize_output(record.value, detached, leaves, counters)


def _detached(values: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the values detached: attributes of a module must not keep the graph."""
    return {index: value.detach() for index, value in values.items()}


def without_writes(step: StepGraph, leaves: Sequence[Any]) -> Sequence[Any]:
    """Return the leaves of the batch with copies of those that the step writes in place.

    The program has saved them for the backward when `write_batch` changes them.
    """
    if not step.appended:
        return leaves
    written = {record.place.leaf for record in step.appended if record.place.leaf is not None}
    inputs = list(leaves)
    for index in written:
        inputs[index] = inputs[index].clone()
    return inputs


def write_batch(step: StepGraph, values: Mapping[int, Tensor], leaves: Sequence[Any]) -> None:
    """Write into tensors of the batch, in place, the values that the user's step would write: hooks
    and the data set may read them.

    Args:
        values: value index -> tensor.
        leaves: of the batch.
    """
    for record in step.appended:
        if record.place.leaf is not None:
            (ref,) = record.items
            leaves[record.place.leaf].copy_(values[ref.index].detach())


def verify(step: StepGraph, values: Mapping[int, Tensor]) -> None:
    """Check that the step's checks (`assert`, `if ...: raise`) pass. On GPUs this waits for them.

    Args:
        values: value index -> tensor.

    Raises:
        FailedCheckError: one does not.
    """
    for check in step.checks:
        if bool(values[check.value.index]) != check.expected:
            raise FailedCheckError(
                f"a check in the step failed: {check.source}",
                "look at the data of this batch",
                _exception_of(check),
            )


def _exception_of(check: Check) -> Exception | None:
    """Return the exception that the user's step raises if this check fails; None if it is no
    exception's name, or cannot be made of a text alone.
    """
    module, _, name = check.raised.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        return kind(check.text or check.source)
    except TypeError:
        # A class of the user's that wants something else.
        return None


def write_buffers(
    module: nn.Module, buffers: Sequence[BufferInput], values: Mapping[int, Tensor]
) -> None:
    """Copy the step's new buffer values (BatchNorm statistics) into the module's buffers.

    Args:
        buffers: of the step; those that it does not update are left alone.
        values: value index -> tensor.
    """
    if not buffers:
        return
    with torch.no_grad():
        for buffer in buffers:
            if buffer.update is not None:
                attrgetter(buffer.name)(module).copy_(values[buffer.update])


def update_metrics_and_log(
    module: Any,
    step: StepGraph,
    values: Mapping[int, Tensor],
    leaves: Sequence[Any],
    counters: Mapping[str, int],
    metrics: "MetricStates",
) -> None:
    """Repeat the step's torchmetrics and `self.log` calls with the user's arguments and this step's
    values.

    Values of this rank's batch are logged as under DDP: the user's arguments say whether they are
    reduced. With `batch_scope="global"` they are equal on every rank: nothing is left to
    synchronize, neither logs nor the state of metrics. Those of a replica (`metrics.replica`) are
    reduced over replicas if the user requires it.

    Args:
        leaves: of this rank's batch.
        counters: the values of `batch_idx`, `global_step` and `current_epoch`.
    """
    metric_values: dict[str, Any] = {}
    for record in step.metrics:
        metric = module.get_submodule(record.metric)
        if step.batch_scope == "global":
            metrics.make_global(metric)
        kwargs = {
            key: materialize_output(value, values, leaves, counters) for key, value in record.kwargs
        }
        with torch.no_grad():
            args = materialize_output(record.args, values, leaves, counters)
            metric_values[record.metric] = getattr(metric, record.method)(*args, **kwargs)
    for log in step.logs:
        value = log.value
        if isinstance(value, MetricRef):
            value = _metric_value(
                module.get_submodule(value.metric), value, metric_values.get(value.metric)
            )
        kwargs = {
            key: materialize_output(item, values, leaves, counters) for key, item in log.kwargs
        }
        value = materialize_output(value, values, leaves, counters)
        if step.batch_scope == "global":
            kwargs |= _sync_arguments(kwargs, metrics.replica)
        module.log(log.name, value, **kwargs)


def _sync_arguments(kwargs: Mapping[str, Any], replica: Replica | None) -> dict[str, Any]:
    """Return the arguments that a `self.log` call gets in addition to the user's `kwargs`.

    Values of all ranks' rows need no reduction, but where epochs' means are logged Lightning asks
    the user for `sync_dist=True`. A log of steps alone is spared its copies.
    """
    if replica is not None:
        return {"sync_dist_group": REPLICAS} if kwargs.get("sync_dist") else {}
    if kwargs.get("sync_dist") or kwargs.get("on_epoch"):
        return {"sync_dist": True, "sync_dist_group": GLOBAL}
    return {}


def _metric_value(metric: Any, ref: MetricRef, last: Any) -> Any:
    """Return the value of a log call: the metric itself, or its value.

    Args:
        metric: a Metric or a MetricCollection.
        ref: which of both, and of which member.
        last: value of its last `forward`; None: it is computed from the state.
    """
    if ref.kind == "metric":
        if ref.key is None:
            return metric
        # As Lightning asks for them: without it, metrics that share their state do not see its
        # updates.
        return dict(metric.items(keep_base=False, copy_state=False))[ref.key]
    value = metric.compute() if last is None else last
    return value if ref.key is None else value[ref.key]


# Whose rows the state of a metric stands for: this rank's, as users write them, or all ranks'


class MetricStates:
    """The metrics of a module whose state stands for all ranks' rows at the moment. All methods are
    collective.

    Args:
        replica: of which all ranks have the same rows, and other replicas others; None: captured
            steps have all rows.
    """

    def __init__(self, replica: Replica | None) -> None:
        self.replica, self._group = replica, None if replica is None else replica.group
        # By id, as the hash of a metric changes with its state: the metric, its own
        # `sync_on_compute` and group.
        self._global: dict[int, tuple[Metric, bool, Any]] = {}

    def make_global(self, metric: nn.Module) -> None:
        """Mark the state of a metric, and of those inside it, as one of all ranks' samples, which a
        captured step updates. Collective if the metric has been updated before.
        """
        changed = [
            member
            for member in metric.modules()
            if isinstance(member, Metric) and id(member) not in self._global
        ]
        if changed and isinstance(metric, MetricCollection):
            # Metrics that share one state (compute groups) get one each.
            metric.values()
        for member in changed:
            self._global[id(member)] = member, member.sync_on_compute, member.process_group
            if member.sync_on_compute and member.update_called and world_size(self._group) > 1:
                member.process_group = self._group or member.process_group
                _keep_synced(member)
            if self.replica is None or self.replica.across.size == 1:
                _set_sync(member, False)
            else:
                member.process_group = self.replica.across.group

    def make_local(self) -> None:
        """Let the states stand for each rank's own rows again; their sum over the ranks stays the
        same.
        """
        num_ranks, rank = world_size(self._group), rank_in(self._group)
        for metric, sync, group in self._global.values():
            _set_sync(metric, sync)
            metric.process_group = group
            if num_ranks > 1 and sync:
                _keep_part(metric, num_ranks, rank)
        self._global.clear()


def _set_sync(metric: Metric, sync: bool) -> None:
    """Set whether the metric reduces its state over ranks when it computes; `compute` reads
    `_to_sync`.
    """
    metric.sync_on_compute = metric._to_sync = sync


def _keep_synced(metric: Metric) -> None:
    """Give the metric the state of all ranks, which stays. Collective."""
    # Lists become one tensor there, which `update` could not append to.
    metric.sync()
    for name, default in metric._defaults.items():
        state = getattr(metric, name)
        if isinstance(default, list) and not isinstance(state, list):
            setattr(metric, name, [state])
    # Else `update` refuses, and `compute` brings the old state back.
    metric._is_synced, metric._cache = (
        False,
        None,
    )


def _keep_part(metric: Metric, num_ranks: int, rank: int) -> None:
    """Divide a metric's state, which is equal on all ranks, so that torchmetrics' reduction of all
    ranks' states gives it again.

    Sums stay on rank 0 alone, stored samples are dealt out to the ranks in order, means and
    extremes stay. Every rank has a tensor of stored samples then, maybe an empty one: torchmetrics
    cannot gather `[]`.
    """
    for name, reduction in metric._reductions.items():
        state, default = getattr(metric, name), metric._defaults[name]
        if reduction is dim_zero_cat and len(state):
            part = dim_zero_cat(state).tensor_split(num_ranks)[rank]
            setattr(metric, name, [part] if isinstance(default, list) else part)
        elif reduction is None and isinstance(state, list):
            setattr(
                metric,
                name,
                state[len(state) * rank // num_ranks : len(state) * (rank + 1) // num_ranks],
            )
        elif reduction is dim_zero_sum and rank > 0:
            setattr(
                metric,
                name,
                [] if isinstance(default, list) else default.detach().clone().to(metric.device),
            )
    metric._computed = None
