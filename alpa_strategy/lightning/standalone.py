"""Evaluation without a training: a model that does not fit into one device is planned and sharded for its evaluation.

A model that fits runs as it is written, as under DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import RankZero, agree_on_seed, on_all_ranks, shared
from alpa_strategy.cost.measured import device_memory_bytes
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.planning import Prepared, capture, find_or_make_plan, job_cluster
from alpa_strategy.lightning.run import NO_OPTIMIZER, Run
from alpa_strategy.lightning.same_steps import shape_key


def fits_one_device(module: torch.nn.Module, job: Job) -> bool:
    """Whether the whole parameters fit into what a plan may use of this job's devices. Collective."""
    needed = sum(p.numel() * p.element_size() for p in module.parameters())
    limits = on_all_ranks(lambda: _limit(job), lambda limit: limit)[1]
    return needed <= min(limits)


def _limit(job: Job) -> float:
    """Bytes: by option, by the declared cluster, or of the device as it is."""
    options = job.options
    if options.memory_limit is not None:
        return options.memory_limit
    if job.cluster is None:
        return options.usable_bytes(device_memory_bytes(job.device, job.devices_per_node))
    spec = job.cluster if isinstance(job.cluster, ClusterSpec) else ClusterSpec.load(job.cluster)
    return options.usable_bytes(spec.device.memory_bytes)


def evaluation_run(
    module: Any,
    name: str,
    args: tuple[Any, ...],
    job: Job,
    sharding: Callable[[Any], AbstractContextManager[Callable[[Tensor], Tensor]]],
) -> Run:
    """A run that holds the parameters for evaluation steps, planned for `module.<name>(*args)`. Collective.

    Where the ranks' batches differ in shape, they will take turns: it is planned for rank 0's, evaluated by all.

    Args:
        sharding: context around what shards the module, see `DeferredInit.sharding`.

    Raises:
        CaptureError, PlanError: the step cannot be captured, or nothing fits.
    """
    seed, rank_zero = agree_on_seed(), RankZero(job.limits.plan_timeout_seconds)
    batch, batch_idx, dataloader_idx = (*args, *(0, None)[len(args) - 1 :]) if len(args) < 3 else args
    capturing = job
    if len(set(on_all_ranks(lambda: shape_key(batch), repr)[1])) > 1:
        batch, batch_idx, dataloader_idx = shared((batch, batch_idx, dataloader_idx), 0, job.device)
        capturing = replace(job, options=replace(job.options, batch_scope="global"))
    step = capture(module, batch, batch_idx, capturing, name, dataloader_idx)
    cluster = job_cluster(job)
    plan = find_or_make_plan(step, job, cluster, NO_OPTIMIZER, rank_zero)
    nothing = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)
    prepared = Prepared(step, plan, cluster)
    with sharding(module) as whole:
        return Run(module, nothing, NO_OPTIMIZER, prepared, batch, job, rank_zero, seed, whole)
