"""SubmoduleRun: eager steps that call planned programs as the forwards of submodules.

The ranks of a replica run the user's step on the same samples and random numbers, and divide the
work of the programs. Gradients are complete as soon as the backward has computed them, and are
averaged over replicas, as under DDP with one rank per replica. The first step runs unsharded and
records the submodules that can be planned.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from alpa_strategy.capture.non_tensor_inputs import leaves_hold
from alpa_strategy.capture.python_state import outermost_metrics, patched
from alpa_strategy.capture.submodules import Call, capture_calls, hooks_in, plannable
from alpa_strategy.comm.collectives import RankZero, all_gather_object, broadcast_object
from alpa_strategy.comm.mesh import divide
from alpa_strategy.errors import CaptureError, RuntimeMismatchError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import changed_value
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.dataloader_state import random_state, set_random_state
from alpa_strategy.lightning.eager_run import parameter_inputs
from alpa_strategy.lightning.job import Job, device_limit
from alpa_strategy.lightning.joint_batch import joint_batch
from alpa_strategy.lightning.planning import check_optimizer, find_or_make_plan, job_cluster
from alpa_strategy.lightning.shape_key import shape_key
from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun
from alpa_strategy.lightning.step_effects import REPLICAS, materialize_output
from alpa_strategy.options import PlanOptions
from alpa_strategy.pipeline.step_programs import PlanRuntime
from alpa_strategy.planner.eager_plan import plan_eager
from alpa_strategy.planner.optimizer_info import inspect_optimizer, joint_info
from alpa_strategy.runtime.activation_checkpoint import forward_of_copy
from alpa_strategy.runtime.eager_fully_shard import UnshardOnAccess
from alpa_strategy.runtime.gradients import average
from alpa_strategy.runtime.host_memory import tuned
from alpa_strategy.runtime.synced_norms import synced


class SubmoduleRun(ShardedRun):
    """A run with planned submodules; see the file's docstring. Making one is collective.

    Args:
        given: the module, its optimizers and the job.
        why: the reason for which the step itself is not captured.
        recorded: calls of submodules in the first step; None: this run records them.

    Raises:
        CaptureError: `why`, if no submodule can be planned either.
    """

    _placed: PlanRuntime

    def __init__(
        self, inputs: RunInputs, why: CaptureError, recorded: Sequence[Call] | None
    ) -> None:
        module, job = inputs.module, inputs.job
        assert job.submodules is not None
        num_replicas, options = job.submodules
        # Whether each rank loads samples of its own.
        self._joins = job.replica is None and job.options.batch_scope != "global"
        self._replica = replica = divide(num_replicas)
        limit = device_limit(job)
        seed = broadcast_object(torch.initial_seed()) + replica.index
        job = replace(job, replica=replica, options=replace(options, memory_limit=limit))
        inputs = replace(inputs, job=job)
        infos = [inspect_optimizer([optimizer], module) for optimizer in inputs.optimizers]
        info = joint_info(infos)
        parameters = {
            parameter.name: parameter for parameter in parameter_inputs(module, trains=True)
        }
        plan = plan_eager([*parameters.values()], job.options, infos, job.step_devices, limit, why)

        calls: list[Call] = []
        cluster = None
        if recorded is not None:
            graph, calls = _captured(module, recorded, job, why)
            cluster = job_cluster(job)
            names = {name for parameter in graph.parameters for name in parameter.names}
            others = [parameter for name, parameter in parameters.items() if name not in names]
            plan_of_others = plan_eager(others, job.options, infos, job.step_devices, limit, why)
            free_bytes = limit - plan_of_others.predicted.peak_bytes
            job_of_calls = _job_of_calls(job, options, names, free_bytes)
            rank_zero = RankZero(job.limits.plan_timeout_seconds)
            plan_of_calls = find_or_make_plan(graph, job_of_calls, cluster, info, rank_zero)
            plan = _combined(plan, plan_of_calls)
            parameters |= {parameter.name: parameter for parameter in graph.parameters}

        check_optimizer(info, plan.stages)
        with tuned(job.device), inputs.sharding(module) as values:
            self._placed = PlanRuntime(
                module,
                [*parameters.values()],
                plan,
                job.device,
                cluster,
                seed,
                lambda: 1.0,
                job.backend,
                job.compile,
                replica,
            )
            super().__init__(inputs, info, plan, self._placed.store, limit, values)

        self._metrics = [metric for _, metric in outermost_metrics(module)]
        # The user's code between the programs.
        self._glue = UnshardOnAccess(self.store)
        programs = [Program(call, self._placed, plan) for call in calls]
        self._forwards = Forwards(programs, job, recorded is None)
        self._adapted.enter_context(self._forwards.installed(module))
        # Trainer(sync_batchnorm=True).
        every = module.trainer.strategy._layer_sync is not None
        self._adapted.enter_context(patched(synced(module, every, lambda: replica.across)))

    # A training step

    @override
    def training_step(self, batch: Any, batch_idx: int, eager_step: Any) -> Any:
        """Run the module's own step on the replica's batch; planned submodules run as programs."""
        self.take_buffers()
        for metric in self._metrics:
            self.metrics.make_global(metric)
        full_batch = self._of_replica(batch)
        step = partial(eager_step.func, full_batch, *eager_step.args[1:], **eager_step.keywords)
        module_log = self.module.log

        def log(*args: Any, **kwargs: Any) -> None:
            kwargs["sync_dist_group"] = kwargs.get("sync_dist_group") or REPLICAS
            module_log(*args, **kwargs)

        plugin = self.module.trainer.precision_plugin
        clip = self._sharded_access()(plugin.clip_gradients)
        changed = [(self.module, "log", log), (plugin, "clip_gradients", clip)]
        self.peers = REPLICAS
        try:
            with (
                self.in_step(),
                patched(changed),
                self._glue if self.store.sharded_parameters else nullcontext(),
            ):
                return step()
        finally:
            self.peers = None
            # As under DDP.
            self.buffers_differ = self.syncs and self.module.automatic_optimization

    def _of_replica(self, batch: Any) -> Any:
        """Return the joint batch of the replica's ranks, and equalize their random states.

        Collective.
        """
        axis = self.store.mesh.all_devices
        if axis.size == 1:
            return batch
        set_random_state(all_gather_object(random_state(), self._replica.group)[0])
        return joint_batch(batch, axis, self._joins)

    def _sharded_access(self) -> Any:
        """Return a context, or decorator, of code that works on shards: nothing is gathered."""
        return patched([(self._glue, "sees", False)])

    @override
    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of a training step, in which planned submodules run as programs."""
        active = patched([(self._forwards, "is_active", True), (self._glue, "sees", True)])
        with super().in_step(), active:
            yield

    @override
    def finish_backward(self) -> None:
        """Average the gradients over replicas. Collective."""
        if self.syncs:
            with self._sharded_access():
                average(
                    self.store.parameters,
                    self._replica.across,
                    self.store.device,
                    self._job.limits.bucket_bytes,
                )

    @override
    def check_gradients(self) -> None:
        """Check the gradients with sharded parameters in place."""
        with self._sharded_access():
            super().check_gradients()

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        """Context of an optimizer step: gradients are averaged, parameters are shards."""
        # With manual optimization, `loss.backward()` may have run before. Averaging twice changes
        # nothing.
        if not self.module.automatic_optimization:
            self.finish_backward()
        with self.full_parameters.suspended(True), self._sharded_access():
            yield

    @override
    def stepped(self) -> None:
        super().stepped()
        self._glue.forget()

    @override
    def changed_parameters(self) -> str | None:
        """Return why a new plan is needed, None if it is not."""
        if self._num_updates and self._forwards.recorded is not None:
            self.calls = self._forwards.recorded
            return "the first step has shown which submodules can be planned"
        return super().changed_parameters()


def _captured(
    module: Any, recorded: Sequence[Call], job: Job, why: CaptureError
) -> tuple[StepGraph, list[Call]]:
    """Return the graph of the submodules' calls that can be planned, and these calls. Collective.

    Raises:
        CaptureError: `why`, if there are none.
        RuntimeMismatchError: the ranks' submodules differ.
    """
    with job.progress("capture"):
        rank_zero = RankZero(job.limits.plan_timeout_seconds)
        calls, others = rank_zero.result_of(
            lambda: plannable(module, recorded, job.context), "capturing submodules"
        )
        text = "".join(f"; not {other}" for other in others)
        if not calls:
            raise type(why)(
                f"{why.problem}; nor can the forward of a submodule be planned{text}", why.fix
            )
        graph, parts = capture_calls(module, calls, job.context)
    if len(set(all_gather_object((graph.parameter_digest, graph.graph_digest)))) > 1:
        raise RuntimeMismatchError(
            "the ranks' submodules are not the same", "build the same module on every rank"
        )
    assert job.replica is not None
    problem = " ".join(why.problem.split())
    paths = ", ".join(dict.fromkeys(call.path for call in calls))
    rank_zero_info(
        f"alpa: the step runs eagerly in {job.replica.count} replicas ({problem}), as under DDP"
        f" with one rank per replica; planned are {paths}{text}"
    )
    return graph, parts


def _job_of_calls(job: Job, options: PlanOptions, names: set[str], free_bytes: float) -> Job:
    """Return the job with the options for planning the submodules' calls.

    Args:
        job: the job.
        options: the user's options.
        names: names of the calls' parameters; pins of other parameters are dropped, and logged.
        free_bytes: bytes per device that the other parameters leave free.
    """
    pins = []
    unused = set()
    for pattern, modes in options.placements:
        if any(fnmatchcase(name, pattern) for name in names):
            pins.append((pattern, modes))
        else:
            unused.add(pattern)
    if unused:
        rank_zero_info(
            f"alpa: placements of {', '.join(unused)}: not sharded, as no planned submodule uses"
            " them"
        )

    options = replace(options, memory_limit=max(free_bytes, 1.0), placements=tuple(pins))
    return replace(job, options=options)


def _combined(plan: Plan, plan_of_calls: Plan) -> Plan:
    """Return the plan of the calls with the parameters and notes of the module's eager `plan`."""
    stage = plan.stages[0]
    stage_of_calls = plan_of_calls.stages[0]
    # Nothing is prefetched: the user's code runs between the programs.
    combined_stage = replace(
        stage_of_calls,
        parameter_plans=stage.parameter_plans | stage_of_calls.parameter_plans,
        shapes=stage.shapes,
        prefetched_bytes=0,
    )
    notes = (*plan.notes, *plan_of_calls.notes)
    figures = plan.figures
    if figures is not None and plan_of_calls.figures is not None:
        # Samples and seconds of the calls are not those of the step.
        figures = replace(figures, precision=plan_of_calls.figures.precision)
    return replace(
        plan_of_calls,
        stages=(combined_stage,),
        schedule=plan.schedule,
        notes=notes,
        figures=figures,
    )


class Program:
    """Runs the calls of a submodule that have the same signature as the recorded one.

    Args:
        call: the recorded call.
        runtime: the runtime of the plan.
        plan: the plan.
    """

    def __init__(self, call: Call, runtime: PlanRuntime, plan: Plan) -> None:
        assert call.step is not None
        self.path = call.path
        self._step = call.step
        self._output = call.output
        self._program = runtime.training_program(call.step, plan)
        self._device = runtime.store.device.type
        self._key = shape_key(call.inputs)
        self._trained = _trained(call.inputs)
        self._hooks = hooks_in(runtime.module.get_submodule(call.path))
        # Stand for the inputs of earlier calls in the graph.
        self._before = [None] * call.first

    def serves(self, inputs: Any) -> bool:
        """Whether it can compute the forward for inputs (args, kwargs), with the submodule's state
        now.
        """
        if shape_key(inputs) != self._key or any(self._hooks):
            return False
        if not _trained(inputs) <= self._trained:
            return False

        is_same = changed_value(self._step.attributes) is None
        return is_same and leaves_hold(self._step.leaves, [self._before, inputs])

    def __call__(self, inputs: Any) -> Any:
        """Return the submodule's output for the inputs (args, kwargs)."""
        with torch._C.DisableTorchFunction(), torch.autocast(self._device, enabled=False):
            batch = pytree.tree_map_only(Tensor, Tensor.contiguous, [self._before, inputs])
            leaves = pytree.tree_leaves(batch)
            return materialize_output(self._output, self._program.run(leaves, {}))


def _trained(inputs: Any) -> set[int]:
    """Return the indices of the leaves that require gradients."""
    indices = set()
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            indices.add(index)
    return indices


class Forwards:
    """Forwards of submodules: eager, eager and recorded, or computed by a program.

    Copies and pickles are inactive.

    Args:
        programs: the programs.
        job: the job; None: inactive.
        records: whether calls are recorded.
    """

    def __init__(
        self, programs: Sequence[Program] = (), job: Job | None = None, records: bool = False
    ) -> None:
        self._programs = programs
        # Recorded calls, callers before callees; None: calls are not recorded.
        self.recorded = list[Call]() if records else None
        # Path and signature of a recorded call -> its index.
        self._indices: dict[Any, int] = {}
        # Indices of the calls that are running, outermost first.
        self._callers: list[int] = []
        # True in a step and in its backward, which may recompute forwards.
        self.is_active = False
        self._device = "cpu" if job is None else job.device.type
        with nullcontext() if job is None else job.context():
            self._casts = _casts(self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def installed(self, root: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the forwards of submodules are replaced."""
        paths = {program.path for program in self._programs}
        patches = []
        for path, module in root.named_modules():
            if not path or isinstance(module, torch.jit.ScriptModule):
                continue
            has_parameters = next(module.parameters(), None) is not None
            is_recorded = self.recorded is not None and has_parameters
            if path in paths or is_recorded:
                forward = partial(self._forward, path, module, module.forward)
                patches.append((module, "forward", forward))
        return patched(patches)

    @torch.compiler.disable
    def _forward(
        self,
        path: str,
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a planned module: by its program if one serves these inputs, else by its own forward.

        While a capture records, the call is recorded.
        """
        copied_forward = forward_of_copy(module)
        if copied_forward is not None:
            return copied_forward(*args, **kwargs)
        # Programs cannot compute with the tensors of torch.func's transforms.
        if not self.is_active or torch._C._functorch.peek_interpreter_stack() is not None:
            return forward(*args, **kwargs)

        inputs = (args, kwargs) if _casts(self._device) == self._casts else None
        if self.recorded is None:
            for program in self._programs if inputs else ():
                if program.path == path and program.serves(inputs):
                    return program(inputs)
            return forward(*args, **kwargs)

        self._callers.append(self._record(self.recorded, path, inputs))
        try:
            return forward(*args, **kwargs)
        finally:
            self._callers.pop()

    def _record(self, recorded: list[Call], path: str, inputs: Any) -> int:
        """Return the index of the recorded call with the same signature; record it if new.

        Args:
            recorded: the recorded calls.
            path: path of the submodule.
            inputs: (args, kwargs); None: they cannot be planned.
        """
        key: tuple[str, Any] = path, None
        planned_inputs = None
        # Inputs that cannot be compared, or sent to other ranks, raise errors of many types. Such a
        # call is recorded without inputs.
        with suppress(Exception):
            to_meta = partial(torch.empty_like, device="meta")
            on_meta = pytree.tree_map_only(
                Tensor, lambda x: to_meta(x, requires_grad=x.requires_grad), inputs
            )
            pickle.dumps(on_meta)
            signature = shape_key(inputs)
            if hash(signature) and inputs:
                key = path, signature
                planned_inputs = on_meta

        index = self._indices.setdefault(key, len(recorded))
        if index == len(recorded):
            caller = self._callers[-1] if self._callers else None
            recorded.append(Call(path, planned_inputs, caller))
        # An input requires a gradient if it does in any call.
        for leaf in _trained(inputs):
            pytree.tree_leaves(recorded[index].inputs)[leaf].requires_grad_(True)
        return index


def _casts(device: str) -> tuple[bool, torch.dtype, torch.dtype]:
    """Return whether autocast is on, its dtype, and the default dtype."""
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
    )
