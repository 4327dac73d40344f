"""Memory of this process around a training.

Freed host memory is tuned by the extra `extras/host_allocator`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.hook_points import HOST_ALLOCATOR
from alpa_strategy.ir.held_optimizers import states_in
from alpa_strategy.ir.plan import Plan


@contextmanager
def tuned(device: torch.device) -> Iterator[None]:
    """Context in which a module is sharded on `device`. At its end, unless it fails, the memory
    that planning used is free: in glibc's or this package's allocator on CPUs, in CUDA's cache on
    GPUs.
    """
    allocator = HOST_ALLOCATOR.extra if device.type == "cpu" else None
    if allocator is not None:
        allocator.keep_freed(True)
    yield
    if allocator is not None:
        allocator.trim()
    elif device.type == "cuda":
        # Blocks of the planning have other sizes than those of training.
        torch.cuda.empty_cache()


def enforce_memory_plan(
    owner: object,
    plan: Plan,
    limit_bytes: float,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    device: torch.device,
) -> Callable[[], object]:
    """Let freed host memory be used again only as far as the plan leaves memory headroom. Nothing
    is done on accelerators, and without the extra `host_allocator`.

    Args:
        owner: ends it when it is freed.
        plan: whose predicted peak bytes count.
        limit_bytes: of tensors, for this process.
        module: of the tensors that the process has now.
        optimizers: of the other tensors that it has now.
        device: of the training.

    Returns:
        A function that ends it.
    """
    allocator = HOST_ALLOCATOR.extra if device.type == "cpu" else None
    if allocator is None:
        return _nothing

    return allocator.enforce_memory_plan(owner, plan, limit_bytes, tensor_bytes(module, optimizers))


def _nothing() -> None:
    pass


def process_bytes(module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> int:
    """Return the bytes of host memory that this process takes without tensors: Python, libraries
    and their pages. 0 on GPUs.

    Args:
        module: of the process's tensors.
        optimizers: of the process's other tensors.
        device: of the training.
    """
    if device.type != "cpu":
        return 0
    return max(0, psutil.Process().memory_info().rss - tensor_bytes(module, optimizers))


def tensor_bytes(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Return the bytes of the storages of parameters, buffers and optimizer states on this rank."""
    tensors = [*module.parameters(), *module.buffers()]
    for optimizer in optimizers:
        for states in states_in(optimizer):
            for state in states.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
