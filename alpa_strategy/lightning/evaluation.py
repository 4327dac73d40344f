"""Evaluation: validation, test and predict steps of a module whose parameters lie in parts. They run as they are
written, each rank on its own batches: DDP's semantics by construction.

Where whole parameters have room beside a training step, they are gathered once per evaluation loop; where they have
none, each is gathered while the module that owns it runs (`runtime/gather_on_use.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from alpa_strategy.comm.collectives import any_rank, cpu_group
from alpa_strategy.errors import CaptureError
from alpa_strategy.lightning.evaluation_loop import is_last_of_loader
from alpa_strategy.lightning.full_parameters import FullParameters
from alpa_strategy.lightning.job import Job, device_limit
from alpa_strategy.lightning.placed_module import PlacedModule, Sharding
from alpa_strategy.lightning.written_run import WrittenRun, start_written
from alpa_strategy.runtime.gather_on_use import GatherOnUse


class Evaluation:
    """Runs the evaluation steps of a module whose parameters lie in parts. `start` and `end` are collective."""

    def __init__(self, run: PlacedModule, job: Job) -> None:
        self._run, self._job = run, job
        self._whole: FullParameters | None = None
        self._on_use: GatherOnUse | None = None
        self._group: Any = None  # of all loops: each group of gloo's keeps connections and threads until the job ends

    def start(self) -> None:
        """Begin a loop over evaluation batches."""
        run = self._run
        if self._job.options.batch_scope == "global":  # every rank brings all rows
            run.metrics.make_all_global(run.module)
        else:
            run.metrics.make_local()
        if not run.store.sharded_parameters:
            return
        if any_rank([run.headroom.for_evaluation(run.plan.predicted.peak_bytes) is not None])[0]:
            self._group = self._group or cpu_group()
            self._on_use = GatherOnUse(run.module, run.store, self._group)
            run.whole.on_use = self._on_use
            self._on_use.enter()
        else:
            self._whole = run.whole
            self._whole.__enter__()

    def step(self, args: tuple[Any, ...], as_written: Callable[[], Any]) -> Any:
        """What `as_written` returns, a step on this rank's batch.

        Args:
            args: (batch, batch_idx, dataloader_idx) as the Trainer gives them, or the first of these.
        """
        if self._on_use is not None:
            self._on_use.rounds.begin()
        output = as_written()
        # The Trainer reduces what was logged when a loader ends: all ranks must have come to its end.
        if self._on_use is not None and is_last_of_loader(self._run.module.trainer, *(*args[1:], None)[:2]):
            self._on_use.rounds.finish()
        return output

    def meet(self) -> None:
        """See PlacedModule."""
        if self._on_use is not None:
            self._on_use.meet()

    def end(self) -> None:
        """The loop has ended."""
        self._run.metrics.make_local()
        if self._whole is not None:
            self._whole.__exit__(None, None, None)
            self._whole = None
        if self._on_use is not None:
            self._on_use.rounds.finish(for_good=True)
            self._on_use.leave()
            self._on_use.remove()
            self._on_use = self._run.whole.on_use = None


# Without a training: a model that does not fit into one device is sharded for its evaluation


def fits_one_device(module: torch.nn.Module, job: Job) -> bool:
    """Whether the whole parameters fit into what a plan may use of this job's devices. Collective."""
    return sum(p.numel() * p.element_size() for p in module.parameters()) <= device_limit(job)


def evaluation_run(module: Any, job: Job, sharding: Sharding) -> WrittenRun:
    """What holds the parameters of a module that does not fit into one device, in shards. Collective.

    Args:
        sharding: context around what shards the module, see `DeferredInit.sharding`.
    """
    job = replace(job, options=replace(job.options, parallel="zero3"))
    return start_written(module, [], job, sharding, CaptureError("an evaluation"))
