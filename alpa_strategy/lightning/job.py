"""Job: where a run takes place, and what the user asked of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.eval_frame import OptimizeContext
from torch.nn.parallel import DistributedDataParallel as DDP

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import all_gather_object
from alpa_strategy.comm.mesh import Replica
from alpa_strategy.display.progress import Progress
from alpa_strategy.lightning.batch_rows import BatchHooks
from alpa_strategy.lightning.run_plans import RunPlans
from alpa_strategy.options import LEAST_BUCKET_BYTES, Limits, PlanOptions
from alpa_strategy.planner.eager_plan import against_written


@dataclass(frozen=True)
class Job:
    """What planning and running need to know of the job."""

    num_nodes: int
    devices_per_node: int
    # Of this rank, where captured steps are run by replicas; None: by all ranks.
    replica: Replica | None
    # See `submodule_options`.
    submodules: tuple[int, PlanOptions] | None
    # This rank's.
    device: torch.device
    options: PlanOptions
    # Arguments of `torch.compile` for the stages' programs; None: they are not compiled.
    compile: dict[str, Any] | None
    # Timeouts and sizes that no plan depends on.
    limits: Limits
    # Library of the collectives: `auto`, `torch` or `deepspeed`.
    backend: str
    # `.alpa`: measurements below `costs`.
    folder: Path
    # The plan store.
    plan_folder: Path
    # A plan to use instead.
    plan_file: Path | None
    # Declared costs, or None to measure.
    cluster: ClusterSpec | None
    # Around `training_step` (autocast of the precision plugin).
    context: Callable[[], AbstractContextManager[None]]
    # Around logging instead, where a captured step ran.
    log_context: Callable[[], AbstractContextManager[None]]
    # What they make of a loader's batch.
    hooks: BatchHooks
    # Of this run of the Trainer, and of the run that it resumes.
    plans: RunPlans
    # Shows phases, lines and tables, where this rank shows anything.
    progress: Progress

    @property
    def group(self) -> Any:
        """The ranks that run a captured step together; None: all."""
        return None if self.replica is None else self.replica.group

    @property
    def step_devices(self) -> tuple[int, int]:
        """Nodes, and devices on each, that run a captured step."""
        count = 1 if self.replica is None else self.replica.count
        nodes = max(1, self.num_nodes // count)
        return nodes, self.num_nodes * self.devices_per_node // count // nodes

    @property
    def may_run_eagerly(self) -> bool:
        """Whether a step that cannot be captured runs as it is written instead."""
        is_open = self.limits.capture == "auto" and self.options.batch_scope == "auto"
        return is_open and self.plan_file is None and against_written(self.options) is None


def most_accumulated(trainer: Any) -> int:
    """Training steps per optimizer step, the most that a scheduler of them will ask for: plans must
    hold it, too.
    """
    schedulers = (
        each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)
    )
    return max(
        [
            trainer.accumulate_grad_batches,
            *(n for each in schedulers for n in each.scheduling.values()),
        ]
    )


def compiled_by_user(module: nn.Module, context: Any = None) -> dict[str, Any] | None:
    """How the user wants the module compiled, as of `options.compile_options`: as the first part of
    it that was given
    to `torch.compile`, if any. `context`: what `torch.compile` made of the whole module runs in."""
    contexts = [m.dynamo_ctx for m in module.modules() if isinstance(m, OptimizedModule)]
    calls = [
        vars(m)["_compiled_call_impl"]
        for m in module.modules()
        if m._compiled_call_impl is not None
    ]
    cells = (cell.cell_contents for call in calls for cell in call.__closure__ or ())
    if context is None and not (
        contexts := [*contexts, *(c for c in cells if isinstance(c, OptimizeContext))]
    ):
        return {} if calls else None
    backend = getattr(context or contexts[0], "callback", None)
    # Dynamo's own around it.
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    config = getattr(backend, "config", None)
    # Inductor's; see `options.compile_options`.
    if isinstance(config, dict):
        return {"options": {**config, "triton.cudagraphs": False}}
    return (
        {} if isinstance(backend, CatchErrorsWrapper) or backend is None else {"backend": backend}
    )


@contextmanager
def compiled_as_written(
    module: nn.Module, options: Mapping[str, Any], bucket_bytes: int
) -> Iterator[None]:
    """Context in which the module, its children and items of its lists are compiled where they are
    called.

    What cannot be compiled runs as it is, with Dynamo's warning. A module of which the user has
    compiled parts stays as
    it is. Dynamo ends graphs where buckets end, as under DDP: a compiled backward gives its
    gradients all at its end.
    """
    modules = list(module.modules())
    if any(
        each._compiled_call_impl is not None or isinstance(each, OptimizedModule)
        for each in modules
    ):
        yield
        return
    lists = (each for each in modules if isinstance(each, nn.ModuleList | nn.ModuleDict))
    parts = [module, *module.children(), *(item for each in lists for item in each.children())]
    ddp: Any = SimpleNamespace(bucket_bytes_cap=max(bucket_bytes, LEAST_BUCKET_BYTES))
    with torch._dynamo.config.patch(suppress_errors=True), DDP._inside_ddp_forward(ddp):
        # Dynamo passes over calls of torch.nn's own, but for those that it gets wrapped.
        for part in parts:
            call = partial(part._call_impl) if isinstance(part, nn.Sequential) else part._call_impl
            part._compiled_call_impl = torch.compile(call, **options)
        try:
            yield
        finally:
            for part in parts:
                part._compiled_call_impl = None


def device_limit(job: Job) -> float:
    """Bytes of a device that may be used, the least of all ranks. Collective."""
    from alpa_strategy.cost.measured import device_memory_bytes

    cluster = job.cluster
    own = (
        device_memory_bytes(job.device, job.devices_per_node)
        if cluster is None
        else cluster.device.memory_bytes
    )
    return min(all_gather_object(job.options.usable_bytes(own)))
