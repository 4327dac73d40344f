"""MemoryHeadroom: whether whole tensors fit into this device beside the parts that a training keeps."""

from __future__ import annotations

from typing import Any

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import on_all_ranks
from alpa_strategy.cost.measured import device_memory_bytes
from alpa_strategy.lightning.job import Job
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.units import format_bytes


class MemoryHeadroom:
    """Each answer is None where they fit, else why they do not, for a message.

    Args:
        store: the run's parameters (a `ParameterStore`).
        limit: bytes of the device that may be used.
    """

    def __init__(self, store: Any, optimizer: OptimizerInfo, limit: float) -> None:
        self._store, self._optimizer, self._limit = store, optimizer, limit

    def for_whole(self, with_gradients: bool = False) -> str | None:
        """Whole parameters (and gradients) for a while, beside the parts with their gradients and optimizer state."""
        whole = sum(self._whole_elements(p) * p.element_size() for p in self._store.parameters)
        parts = sum(p.numel() * p.element_size() for p in self._store.parameters)
        state = sum(p.numel() for p in self._store.parameters) * self._optimizer.state_bytes
        return self._against("they and what training keeps", 2 * parts + state + whole * (2 if with_gradients else 1))

    def for_evaluation(self, step_bytes: int) -> str | None:
        """Copies of all that lies in shards, for a while, beside the largest that a step of `step_bytes` needs."""
        copies = sum(self._whole_elements(p) * p.element_size() for p in self._store.sharded_parameters)
        return self._against("they and a training step", step_bytes + copies)

    def for_release(self) -> str | None:
        """Whole parameters and optimizer state, for good."""
        whole = sum(self._whole_elements(p) * p.element_size() for p in self._store.parameters)
        trained = sum(self._whole_elements(p) for p in self._store.parameters if p.requires_grad)
        return self._against("whole parameters and optimizer state", whole + trained * self._optimizer.state_bytes)

    def _whole_elements(self, parameter: Any) -> int:
        return self._store.whole_shape(self._store.name_of(parameter)).numel()

    def _against(self, what: str, needed: float) -> str | None:
        if needed <= self._limit:
            return None
        return f"{what} need {format_bytes(needed)} per device of {format_bytes(self._limit)}"


def device_limit(job: Job) -> float:
    """Bytes of a device that may be used, the least of all ranks. Collective."""
    return min(on_all_ranks(lambda: _limit(job), lambda limit: limit)[1])


def _limit(job: Job) -> float:
    """Bytes: by option, by the declared cluster, or of the device as it is."""
    options = job.options
    if options.memory_limit is not None:
        return options.memory_limit
    if job.cluster is None:
        return options.usable_bytes(device_memory_bytes(job.device, job.devices_per_node))
    spec = job.cluster if isinstance(job.cluster, ClusterSpec) else ClusterSpec.load(job.cluster)
    return options.usable_bytes(spec.device.memory_bytes)
