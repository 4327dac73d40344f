"""Which library carries eager traffic: `torch.distributed` itself or DeepSpeed's layer over it. Chosen here only.

DeepSpeed adds its communication logger (`deepspeed.comm.log_summary`) at about 30 us a call; both end in NCCL or gloo
and work on the same process groups. DeepSpeed is imported only when chosen: its import takes more than a second.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from alpa_strategy.errors import OptionError

BACKEND_NAMES = ("auto", "torch", "deepspeed")


@dataclass(frozen=True)
class Backend:
    """The collectives of one library, with `torch.distributed`'s positional arguments.

    `all_reduce(tensor, op, group, async_op)`, `all_gather(output, input, group, async_op)`,
    `reduce_scatter(output, input, op, group, async_op)`, `all_to_all(output, input, output_splits, input_splits, group,
    async_op)`; each returns a work handle when `async_op`. `sum` and `max` are the library's reduce ops.
    """

    name: str
    all_reduce: Callable[..., Any]
    all_gather: Callable[..., Any]
    reduce_scatter: Callable[..., Any]
    all_to_all: Callable[..., Any]
    sum: Any
    max: Any


def select_backend(name: str = "auto", device_type: str = "cpu") -> Backend:
    """The backend called `name`: `torch`, `deepspeed`, or `auto` (DeepSpeed on CUDA where installed, else torch).

    `deepspeed` needs an initialised process group, to which it attaches.
    """
    if name not in BACKEND_NAMES:
        raise OptionError(
            f"{name!r} is not a communication backend", f"use one of {', '.join(map(repr, BACKEND_NAMES))}"
        )
    if name == "auto":
        installed = importlib.util.find_spec("deepspeed") is not None
        name = "deepspeed" if device_type == "cuda" and installed else "torch"
    elif name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise OptionError(
            'backend="deepspeed": the package deepspeed is not installed',
            "pip install 'alpa-strategy[deepspeed]', or leave backend at \"auto\"",
        )
    if name == "deepspeed" and dist.is_initialized():
        return _deepspeed_backend(device_type)
    return Backend(
        name="torch",
        all_reduce=dist.all_reduce,
        all_gather=_renamed("all_gather_single", "all_gather_into_tensor"),
        reduce_scatter=_renamed("reduce_scatter_single", "reduce_scatter_tensor"),
        all_to_all=dist.all_to_all_single,
        sum=dist.ReduceOp.SUM,
        max=dist.ReduceOp.MAX,
    )


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """A collective by its name since torch 2.13, or by the one before, which warns there."""
    return getattr(dist, new, None) or getattr(dist, old)


def _deepspeed_backend(device_type: str) -> Backend:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device_type == "cuda" else "cpu")
    import deepspeed.comm as ds

    ds_torch = importlib.import_module("deepspeed.comm.torch")  # the attribute of that name is torch itself

    if not ds.is_initialized():
        build_shm_op = ds_torch.build_shm_op
        # DeepSpeed would compile a shared-memory op (half a minute) that none of the calls below uses.
        ds_torch.build_shm_op = lambda: None
        try:
            ds.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        finally:
            ds_torch.build_shm_op = build_shm_op
    return Backend(
        name="deepspeed",
        all_reduce=ds.all_reduce,
        all_gather=ds.all_gather_into_tensor,
        reduce_scatter=ds.reduce_scatter_tensor,
        all_to_all=ds.all_to_all_single,
        sum=ds.ReduceOp.SUM,
        max=ds.ReduceOp.MAX,
    )
