"""Job: devices, options and folders of one run of the Trainer; `torch.compile` of its module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
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
from alpa_strategy.hook_points import PLANNED_SUBMODULES
from alpa_strategy.lightning.plan_pages import PlanPages
from alpa_strategy.lightning.run_plans import RunPlans
from alpa_strategy.options import LEAST_BUCKET_BYTES, Limits, PlanOptions
from alpa_strategy.planner.eager_plan import captured_only_option


@dataclass(frozen=True)
class Job:
    """The devices, options and folders that planning and running need."""

    # Number of nodes of the job.
    num_nodes: int

    # Number of devices of each node.
    devices_per_node: int

    # This rank's replica, if replicas run captured steps; None: all ranks run them together.
    replica: Replica | None

    # The number of replicas whose submodules are planned, and the options inside each of them.
    # None: submodules are not planned.
    submodules: tuple[int, PlanOptions] | None

    # This rank's device.
    device: torch.device

    # Options that plans depend on.
    options: PlanOptions

    # Arguments of `torch.compile` for the stages' programs; None: they are not compiled.
    compile: dict[str, Any] | None

    # Timeouts and sizes that no plan depends on.
    limits: Limits

    # Library of the collectives: `auto`, `torch` or `deepspeed`.
    backend: str

    # The folder `.alpa`; its subfolder `costs` has the measurements.
    folder: Path

    # Folder of stored plans, or of copies of those at `plan_url`.
    plan_folder: Path

    # URL of a folder of stored plans, which other jobs use, too.
    plan_url: str | None

    # Path or URL of a plan file to run; None: a stored plan or a new one.
    plan_file: Path | str | None

    # Declared costs; None: they are measured.
    cluster: ClusterSpec | None

    # Context of `training_step` (autocast of the precision plugin).
    context: Callable[[], AbstractContextManager[None]]

    # Context of logging after a captured step.
    log_context: Callable[[], AbstractContextManager[None]]

    # Plans of this run of the Trainer, and of the run that it resumes.
    plans: RunPlans

    # Prints phases, lines and tables on the rank that prints.
    progress: Progress

    # Pages of the plans that are made, to be written after the first steps.
    pages: PlanPages

    @property
    def group(self) -> Any:
        """The ranks that run a captured step together; None: all."""
        return None if self.replica is None else self.replica.group

    @property
    def step_devices(self) -> tuple[int, int]:
        """The number of nodes, and of devices per node, that run a captured step: those of one
        replica if there are replicas.
        """
        num_replicas = 1 if self.replica is None else self.replica.count
        num_nodes = max(1, self.num_nodes // num_replicas)
        num_devices = self.num_nodes * self.devices_per_node // num_replicas
        return num_nodes, num_devices // num_nodes

    @property
    def may_run_eagerly(self) -> bool:
        """Whether a step that cannot be captured may run eagerly."""
        is_open = self.limits.capture == "auto" and self.options.batch_scope == "auto"
        return is_open and self.plan_file is None and captured_only_option(self.options) is None


def options_of_run(
    options: PlanOptions, trainer: Any, replica: Replica | None, is_compiled: bool
) -> PlanOptions:
    """Return the user's `options` with the settings of the Trainer's run filled in.

    Args:
        replica: this rank's, if the ranks are divided into replicas.
        is_compiled: whether programs are compiled.
    """
    accumulated = most_accumulated(trainer)
    options = replace(options, accumulate_grad_batches=accumulated, compile=is_compiled)
    if replica is not None:
        # Every rank of a replica loads the replica's full batch.
        options = replace(options, batch_scope="global")
    return options


def submodule_options(
    options: PlanOptions, limits: Limits, num_devices: int
) -> tuple[int, PlanOptions] | None:
    """Return `Job.submodules` for a job of `num_devices`; None: submodules are not planned.

    Args:
        options: the user's, of planning.
        limits: the user's other options.

    Raises:
        OptionError: the options contradict each other.
        SetupError: they require planned submodules, and that extra is switched off.
    """
    extra = PLANNED_SUBMODULES.extra
    if extra is not None:
        return extra.submodule_options(options, limits, num_devices)
    if limits.capture == "submodules":
        raise PLANNED_SUBMODULES.missing('capture="submodules"')
    return None


def most_accumulated(trainer: Any) -> int:
    """Return the largest number of training steps per optimizer step in the run.

    Schedulers of the accumulation may change the number; plans must fit into memory for all.
    """
    counts = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            counts += callback.scheduling.values()
    return max(counts)


def compiled_by_user(module: nn.Module, context: Any = None) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` with which the user compiled the module.

    The arguments of the first compiled submodule count, if there are several.

    Args:
        module: the module, of which submodules may be compiled.
        context: Dynamo's context of the full module, if the user compiled that.

    Returns:
        Its `options` or `backend` as for `torch.compile`, {} if neither is known; None if nothing
        is compiled.
    """
    contexts = []
    compiled_calls = []
    for submodule in module.modules():
        if isinstance(submodule, OptimizedModule):
            contexts.append(submodule.dynamo_ctx)
        if submodule._compiled_call_impl is not None:
            compiled_calls.append(vars(submodule)["_compiled_call_impl"])

    # `module.compile()` stores its context in the closure of the compiled call.
    for call in compiled_calls:
        for cell in call.__closure__ or ():
            if isinstance(cell.cell_contents, OptimizeContext):
                contexts.append(cell.cell_contents)

    if context is None and not contexts:
        return {} if compiled_calls else None

    backend = getattr(context or contexts[0], "callback", None)
    # Dynamo wraps the user's backend, more than once.
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner

    # Inductor's backend has a dict of options. CUDA graphs are off as in `compile_options`.
    config = getattr(backend, "config", None)
    if isinstance(config, dict):
        return {"options": {**config, "triton.cudagraphs": False}}

    if backend is None or isinstance(backend, CatchErrorsWrapper):
        return {}
    return {"backend": backend}


@contextmanager
def compiled_as_written(
    module: nn.Module, options: Mapping[str, Any], bucket_bytes: int
) -> Iterator[None]:
    """Context in which calls of the module, its children and the items of its lists are compiled.

    Code that cannot be compiled runs uncompiled, with Dynamo's warning. A module of which the user
    has compiled submodules is left alone. As under DDP, Dynamo ends graphs where buckets end: a
    compiled backward returns its gradients all at its end.

    Args:
        module: the eager module.
        options: arguments of `torch.compile`.
        bucket_bytes: bytes of a gradient bucket.
    """
    modules = list(module.modules())
    for submodule in modules:
        if submodule._compiled_call_impl is not None or isinstance(submodule, OptimizedModule):
            yield
            return

    compiled = [module, *module.children()]
    for submodule in modules:
        if isinstance(submodule, nn.ModuleList | nn.ModuleDict):
            compiled += submodule.children()

    ddp: Any = SimpleNamespace(bucket_bytes_cap=max(bucket_bytes, LEAST_BUCKET_BYTES))
    with torch._dynamo.config.patch(suppress_errors=True), DDP._inside_ddp_forward(ddp):
        for submodule in compiled:
            call = submodule._call_impl
            # Dynamo skips methods of torch.nn's own classes; a wrapped one it compiles.
            if isinstance(submodule, nn.Sequential):
                call = partial(call)
            submodule._compiled_call_impl = torch.compile(call, **options)
        try:
            yield
        finally:
            for submodule in compiled:
                submodule._compiled_call_impl = None


def device_limit(job: Job) -> float:
    """Return the bytes of a device that a plan may use, the least of all ranks. Collective."""
    from alpa_strategy.cost.measured import device_memory_bytes

    if job.cluster is None:
        memory_bytes = device_memory_bytes(job.device, job.devices_per_node)
    else:
        memory_bytes = job.cluster.device.memory_bytes
    return min(all_gather_object(job.options.usable_bytes(memory_bytes)))
