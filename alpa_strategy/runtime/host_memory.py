"""The C library's allocator, where tensors lie in host memory: freed blocks are kept for the next step, or given back.

glibc gives a large freed block back to the system, and the next step pays a page fault for every 4 KB of it. Two ranks
on two cores were seen to run 10 % slower where blocks from 4 MB on are given back. Kept blocks share heaps with small
objects, which never shrink: data parallelism held 1.1 x what is alive, a step of ZeRO-3 1.8 x, and 1.1 x where they
are given back.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.ir.plan import Plan

TIGHT = 0.5  # of the limit: kept blocks were seen to hold up to twice what is alive
LARGE_BYTES = 250 * 10**6  # planned: what such a plan keeps in vain would be much
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Bytes from which blocks are given back (glibc allows no more than 32 MB), and that are kept at a heap's end.
GIVEN_BACK, KEPT = (2**20, 2**25), (2**25, 2**30)


@contextmanager
def tuned_for(plan: Plan, limit_bytes: float, device: torch.device) -> Iterator[None]:
    """Around what shards a module under `plan`: what the whole module and planning took is given back, and where
    tensors lie in host memory, freed blocks are treated as the training wants it.

    Args:
        limit_bytes: what the plan may use of a device.
    """
    if device.type == "cpu":
        keep_freed(_may_keep(plan, limit_bytes))
    yield
    if device.type == "cpu":
        trim()
    elif device.type == "cuda":
        torch.cuda.empty_cache()  # its blocks have other sizes than training wants


def _may_keep(plan: Plan, limit_bytes: float) -> bool:
    """Not where the limit leaves no room for it, nor under a large plan in which blocks of many sizes come and go."""
    if plan.predicted.peak_bytes > TIGHT * limit_bytes:
        return False
    is_whole = all(p.is_whole for stage in plan.stages for p in stage.parameter_plans.values())
    return plan.predicted.peak_bytes < LARGE_BYTES or (not plan.is_pipelined and is_whole)


def keep_freed(keep: bool) -> None:
    """Whether freed blocks are kept from now on, in this process; nothing is done without glibc.

    The user's `MALLOC_MMAP_THRESHOLD_` in the environment wins.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        from_bytes, kept_bytes = KEPT if keep else GIVEN_BACK
        mallopt(M_MMAP_THRESHOLD, from_bytes)
        mallopt(M_TRIM_THRESHOLD, kept_bytes)


def trim() -> None:
    """Give back all free memory that glibc holds."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def process_bytes(module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> int:
    """What this process takes of the host's memory beside tensors: Python, libraries and their pages. 0 on GPUs.

    The process's tensors are those of the module and of the optimizers.
    """
    if device.type != "cpu":
        return 0
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    state = (value for values in states for value in values.values() if isinstance(value, Tensor))
    tensors = (*module.parameters(), *module.buffers(), *state)
    return max(0, psutil.Process().memory_info().rss - sum(tensor.untyped_storage().nbytes() for tensor in tensors))
