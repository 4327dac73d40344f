"""The note on an error of memory: what was planned, what was there, and what to change.

The error itself stays: code that catches `torch.OutOfMemoryError` catches it.
"""

import re
from collections import Counter
from dataclasses import dataclass

import psutil
import torch

from alpa_strategy.ir.plan import Plan, StagePlan, stage_ranks
from alpa_strategy.units import format_bytes

# How allocators report it with other types of errors (PyTorch's on CPUs, cuBLAS, cuDNN, NCCL).
_TEXTS = re.compile(
    "can't allocate memory|out of memory|not enough memory|ALLOC_FAILED", re.IGNORECASE
)

# More changes are of little use: they are in the order of the bytes that they save.
_MAX_CHANGES = 3

# Share of a device from which on bytes of others, or unused ones, are reported.
_NOTABLE = 0.02


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device when an allocation failed, or of the host."""

    total: int

    # Of this process's tensors, at their peak; of a CPU, what it has resident now.
    used: int

    # That the allocator of this process has, and no tensor uses.
    unused: int

    # That other processes have.
    others: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocation, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_TEXTS.search(str(error)))


def memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory of this process's device now; of the host for a CPU. On GPUs `used` is the
    peak.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return DeviceMemory(
            total=total,
            used=torch.cuda.max_memory_allocated(device),
            unused=reserved - torch.cuda.memory_allocated(device),
            others=max(0, total - free - reserved),
        )
    host = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    others = max(0, host.total - host.available - resident)
    return DeviceMemory(host.total, resident, unused=0, others=others)


def memory_note(plan: Plan | None, rank: int, memory: DeviceMemory) -> str:
    """Return the text for the user after memory ran out: planned and used bytes, and what to
    change.

    Args:
        plan: of the step that failed; None: nothing was planned yet, and no change is proposed.
        rank: of this process.
        memory: of its device.
    """
    beginning = f"alpa: rank {rank} ran out of memory."
    there = f"  There: {_there(memory)}"
    if plan is None:
        return f"{beginning}\n  Planned: nothing yet\n{there}"

    parts: Counter[str] = Counter()
    planned_bytes = 0
    for stage in plan.stages:
        if rank in stage_ranks(stage):
            parts.update(stage.predicted.memory)
            # Stages on one mesh share its memory.
            planned_bytes += stage.predicted.peak_bytes
    planned_bytes = planned_bytes or plan.predicted.peak_bytes

    largest = [f"{name} {format_bytes(size)}" for name, size in parts.most_common() if size > 0]
    of_parts = f": {', '.join(largest)}" if largest else ""
    planned = f"  Planned: {format_bytes(planned_bytes)} at the peak{of_parts}"
    changes = [*_changes_of_run(planned_bytes, memory), *_changes_of_plan(plan, parts)]
    lines = [beginning, planned, there]
    lines += [f"  What to do: {change}" for change in changes[:_MAX_CHANGES]]
    return "\n".join(lines)


def _there(memory: DeviceMemory) -> str:
    """Return as text how much memory a device has, and who uses it."""
    words = [
        f"{format_bytes(memory.total)} on the device",
        f"{format_bytes(memory.used)} used by this process",
    ]
    if memory.unused > _NOTABLE * memory.total:
        words.append(f"{format_bytes(memory.unused)} in free blocks of its allocator")
    if memory.others > _NOTABLE * memory.total:
        words.append(f"{format_bytes(memory.others)} used by others")
    return ", ".join(words)


def _changes_of_run(planned_bytes: int, memory: DeviceMemory) -> list[str]:
    """Return sentences on changes of the run that free memory which no plan includes: of other
    processes, or in the allocator's free blocks.
    """
    changes = []
    if memory.others > max(_NOTABLE * memory.total, memory.total - planned_bytes):
        changes.append(
            f"end the other processes on the device, or plan around them:"
            f" memory_limit={_option_text(memory.total - memory.others)}"
        )
    if memory.unused > 5 * _NOTABLE * memory.total:
        changes.append(
            "set PYTORCH_ALLOC_CONF=expandable_segments:True: free blocks are too small (no cost)"
        )
    excess = memory.used - planned_bytes
    if excess > 5 * _NOTABLE * memory.total and planned_bytes > 0:
        limit = max(planned_bytes - excess, planned_bytes // 2)
        changes.append(
            f"find what else the step allocates ({format_bytes(excess)} more than planned: tensors"
            " that your code keeps, outputs that it collects), or plan with less:"
            f" memory_limit={_option_text(limit)}"
        )
    return changes


def _option_text(num_bytes: int) -> str:
    """Return bytes as a value of `memory_limit`, rounded down."""
    num_mib = num_bytes >> 20
    return f'"{num_mib}MiB"' if num_mib else str(num_bytes)


def _changes_of_plan(plan: Plan, parts: Counter[str]) -> list[str]:
    """Return changes of the plan that save memory, those that cost the user least first."""
    activations = parts["activations"]
    stored = parts["weights"] + parts["gradients"] + parts["state"]
    num_devices = max(len(stage_ranks(stage)) for stage in plan.stages)
    savings: list[tuple[str, float]] = []
    if activations and plan.num_microbatches == 1:
        text = "num_microbatches=2, or half the batch: half the activations, less work per kernel"
        savings.append((text, activations / 2))
    if activations and not all(stage.remat for stage in plan.stages):
        text = "remat=True: activations are recomputed in the backward, a step takes up to a third"
        savings.append((f"{text} longer", activations))
    if stored and num_devices > 1 and not _is_sharded(plan):
        text = 'parallel="zero3": every device stores its share of weights, gradients and state,'
        savings.append((f"{text} which are gathered for each use", stored * (1 - 1 / num_devices)))
    if stored and not any(_on_host(stage) for stage in plan.stages):
        text = "offload=True: weights, gradients and state are in host memory, and copied for each"
        savings.append((f"{text} use", stored))
    least_bytes = _NOTABLE * plan.predicted.peak_bytes
    changes = []
    for text, num_bytes in savings:
        if num_bytes > least_bytes:
            changes.append(f"{text} (at most {format_bytes(num_bytes)} less)")
    return changes


def _on_host(stage: StagePlan) -> bool:
    """Whether parameters of a stage are stored in host memory."""
    return any(plan.on_host for plan in stage.parameter_plans.values())


def _is_sharded(plan: Plan) -> bool:
    """Whether most parameters are used in shards, or in host memory."""
    num_parameters = 0
    num_sharded = 0
    for stage in plan.stages:
        for parameter_plan in stage.parameter_plans.values():
            num_parameters += 1
            num_sharded += parameter_plan.uses_shards or parameter_plan.on_host
    return 2 * num_sharded > num_parameters
