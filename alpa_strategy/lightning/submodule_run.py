"""SubmoduleRun: steps run as they are written, but for submodules, whose forwards are planned
programs.

The ranks of a replica run the user's step alike, on the same rows and random numbers, and divide
the work of the programs. Gradients are complete when they are made, and averaged over replicas, as
under DDP with a rank for each. The first step runs whole and shows which submodules can be planned.
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
from alpa_strategy.lightning import batch_rows
from alpa_strategy.lightning.dataloader_state import random_state, set_random_state
from alpa_strategy.lightning.eager_run import parameter_inputs
from alpa_strategy.lightning.job import Job, device_limit
from alpa_strategy.lightning.planning import check_optimizer, find_or_make_plan, job_cluster
from alpa_strategy.lightning.shape_key import shape_key
from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun
from alpa_strategy.lightning.step_effects import REPLICAS, materialize_output
from alpa_strategy.pipeline.step_programs import PlanRuntime
from alpa_strategy.planner.eager_plan import plan_eager
from alpa_strategy.planner.optimizer_info import inspect_optimizer
from alpa_strategy.runtime.activation_checkpoint import forward_of_copy
from alpa_strategy.runtime.eager_fully_shard import UnshardOnAccess
from alpa_strategy.runtime.gradients import average
from alpa_strategy.runtime.host_memory import tuned
from alpa_strategy.runtime.synced_norms import synced


class SubmoduleRun(ShardedRun):
    """See the file's docstring. Collective.

    Args:
        why: why the step itself is not captured.
        recorded: calls of submodules in the first step; None: this run records them.

    Raises:
        CaptureError: `why`, where no submodule can be planned either.
    """

    _placed: PlanRuntime

    def __init__(
        self, given: RunInputs, why: CaptureError, recorded: Sequence[Call] | None
    ) -> None:
        module, job = given.module, given.job
        assert job.submodules is not None
        count, options = job.submodules
        # Each rank loads rows of its own.
        self._joins = job.replica is None and job.options.batch_scope != "global"
        self._replica = replica = divide(count)
        limit, seed = device_limit(job), broadcast_object(torch.initial_seed()) + replica.index
        job = replace(job, replica=replica, options=replace(options, memory_limit=limit))
        infos = [inspect_optimizer([optimizer]) for optimizer in given.optimizers]
        info = max(infos, key=lambda each: each.state_bytes)
        info = replace(info, element_wise=all(each.element_wise for each in infos))
        inputs = {each.name: each for each in parameter_inputs(module, trains=True)}
        plan = plan_eager([*inputs.values()], job.options, infos, job.step_devices, limit, why)
        parts, cluster = list[Call](), None
        if recorded is not None:
            graph, parts = _captured(module, recorded, job, why)
            cluster, whole, notes = job_cluster(job), plan.stages[0], plan.notes
            names = {name for each in graph.parameters for name in each.names}
            rest = [each for name, each in inputs.items() if name not in names]
            taken = plan_eager(
                rest, job.options, infos, job.step_devices, limit, why
            ).predicted.peak_bytes
            pins = tuple(
                pin
                for pin in options.placements
                if any(fnmatchcase(name, pin[0]) for name in names)
            )
            if unmet := [pattern for pattern, _ in {*options.placements} - {*pins}]:
                rank_zero_info(
                    f"alpa: placements of {', '.join(unmet)}: whole, as nothing is planned that"
                    " uses them"
                )
            beside = replace(
                job, options=replace(options, memory_limit=max(limit - taken, 1.0), placements=pins)
            )
            found = find_or_make_plan(
                graph, beside, cluster, info, RankZero(job.limits.plan_timeout_seconds)
            )
            modes = whole.parameter_plans | found.stages[0].parameter_plans
            # Nothing is begun ahead: the user's code is in between.
            stage = replace(
                found.stages[0], parameter_plans=modes, shapes=whole.shapes, ahead_bytes=0
            )
            plan = replace(
                found, stages=(stage,), schedule=plan.schedule, notes=(*notes, *found.notes)
            )
            inputs |= {each.name: each for each in graph.parameters}
        check_optimizer(info, plan.stages)
        place = job.device, cluster, seed, lambda: 1.0, job.backend, job.compile, replica
        with tuned(job.device), given.sharding(module) as values:
            self._placed = PlanRuntime(module, [*inputs.values()], plan, *place)
            super().__init__(replace(given, job=job), info, plan, self._placed.store, limit, values)
        self._metrics = [metric for _, metric in outermost_metrics(module)]
        self._glue = UnshardOnAccess(self.store)
        programs = [Program(part, self._placed, plan) for part in parts]
        self._forwards = Forwards(programs, job, recorded is None)
        self._adapted.enter_context(self._forwards.installed(module))
        # Trainer(sync_batchnorm=True).
        every = module.trainer.strategy._layer_sync is not None
        self._adapted.enter_context(patched(synced(module, every, lambda: replica.across)))

    # A training step

    @override
    def training_step(self, batch: Any, batch_idx: int, eager_step: Any) -> Any:
        self.take_buffers()
        for metric in self._metrics:
            self.metrics.make_global(metric)
        step = partial(
            eager_step.func, self._of_replica(batch), *eager_step.args[1:], **eager_step.keywords
        )
        own = self.module.log

        def log(*args: Any, **kwargs: Any) -> None:
            own(*args, **{**kwargs, "sync_dist_group": kwargs.get("sync_dist_group") or REPLICAS})

        plugin = self.module.trainer.precision_plugin
        clip = self._in_parts()(plugin.clip_gradients)
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
            # As DDP has it.
            self.buffers_differ = self.syncs and self.module.automatic_optimization

    def _of_replica(self, batch: Any) -> Any:
        """The batch of all ranks of the replica, which draw the same random numbers from here on.
        Collective.
        """
        axis = self.store.mesh.whole
        if axis.size == 1:
            return batch
        set_random_state(all_gather_object(random_state(), self._replica.group)[0])
        return batch_rows.of_replica(self.module.trainer, batch, self._job.hooks, axis, self._joins)

    def _in_parts(self) -> Any:
        """Context, or decorator, of code that knows of parts."""
        return patched([(self._glue, "sees", False)])

    @override
    @contextmanager
    def in_step(self) -> Iterator[None]:
        with (
            super().in_step(),
            patched([(self._forwards, "is_active", True), (self._glue, "sees", True)]),
        ):
            yield

    @override
    def finish_backward(self) -> None:
        if self.syncs:
            with self._in_parts():
                average(
                    self.store.parameters,
                    self._replica.across,
                    self.store.device,
                    self._job.limits.bucket_bytes,
                )

    @override
    def check_gradients(self) -> None:
        with self._in_parts():
            super().check_gradients()

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        # Perhaps after `loss.backward()`; a mean's mean is itself.
        if not self.module.automatic_optimization:
            self.finish_backward()
        with self.whole.suspended(True), self._in_parts():
            yield

    @override
    def stepped(self) -> None:
        super().stepped()
        self._glue.forget()

    @override
    def changed_parameters(self) -> str | None:
        if self._num_updates and self._forwards.recorded is not None:
            self.calls = self._forwards.recorded
            return "the first step has shown which submodules can be planned"
        return super().changed_parameters()


def _captured(
    module: Any, recorded: Sequence[Call], job: Job, why: CaptureError
) -> tuple[StepGraph, list[Call]]:
    """What is planned, as rank 0 finds it out; the same on every rank. Collective."""
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
    rank_zero_info(
        f"alpa: the step runs as it is written in {job.replica.count} replicas"
        f" ({' '.join(why.problem.split())}), as "
        "under DDP with a rank for each; planned are"
        f" {', '.join(dict.fromkeys(call.path for call in calls))}{text}"
    )
    return graph, parts


class Program:
    """What runs calls of a submodule that are like the one which it was made for."""

    def __init__(self, part: Call, placed: PlanRuntime, plan: Plan) -> None:
        assert part.step is not None
        self.path, self._step, self._output, root = part.path, part.step, part.output, placed.module
        self._run, self._device = placed.training_program(part.step, plan), placed.store.device.type
        self._key, self._trained = shape_key(part.given), _trained(part.given)
        # Leaves of others.
        self._hooks, self._before = (
            hooks_in(root.get_submodule(part.path)),
            [None] * part.first,
        )

    def serves(self, given: Any) -> bool:
        """Whether it is for inputs (args, kwargs) like these, and for the submodule as it is
        now.
        """
        if (
            shape_key(given) != self._key
            or not _trained(given) <= self._trained
            or any(self._hooks)
        ):
            return False
        is_same = changed_value(self._step.attributes) is None
        return is_same and leaves_hold(self._step.leaves, [self._before, given])

    def __call__(self, given: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.autocast(self._device, enabled=False):
            batch = pytree.tree_map_only(Tensor, Tensor.contiguous, [self._before, given])
            return materialize_output(self._output, self._run(pytree.tree_leaves(batch), {}))


def _trained(given: Any) -> set[int]:
    """The places of tensors that want gradients."""
    return {
        i
        for i, x in enumerate(pytree.tree_leaves(given))
        if isinstance(x, Tensor) and x.requires_grad
    }


class Forwards:
    """Forwards of submodules: as they are written, recorded or not, or as a program does them.
    Copies are inactive.
    """

    def __init__(
        self, programs: Sequence[Program] = (), job: Job | None = None, records: bool = False
    ) -> None:
        self._programs = programs
        # Callers first.
        self.recorded = list[Call]() if records else None
        # Of recorded calls, by what they are.
        self._places: dict[Any, int] = {}
        self._callers: list[int] = []
        # True in a step, and in its backward, where forwards may run again.
        self.is_active = False
        self._device = "cpu" if job is None else job.device.type
        with nullcontext() if job is None else job.context():
            self._casts = _casts(self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def installed(self, root: nn.Module) -> AbstractContextManager[None]:
        """Context in which the forwards of submodules are ours."""
        paths = {program.path for program in self._programs}
        modules = {
            k: m for k, m in root.named_modules() if k and not isinstance(m, torch.jit.ScriptModule)
        }
        own = {
            k: m
            for k, m in modules.items()
            if k in paths or (self.recorded is not None and [*m.parameters()])
        }
        return patched(
            (m, "forward", partial(self._forward, k, m, m.forward)) for k, m in own.items()
        )

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
        if (of_copy := forward_of_copy(module)) is not None:
            return of_copy(*args, **kwargs)
        # Not tensors of a program.
        if not self.is_active or torch._C._functorch.peek_interpreter_stack() is not None:
            return forward(*args, **kwargs)
        given = (args, kwargs) if _casts(self._device) == self._casts else None
        if self.recorded is None:
            program = next(
                (p for p in self._programs if given and p.path == path and p.serves(given)), None
            )
            return forward(*args, **kwargs) if program is None else program(given)
        self._callers.append(self._record(self.recorded, path, given))
        try:
            return forward(*args, **kwargs)
        finally:
            self._callers.pop()

    def _record(self, recorded: list[Call], path: str, given: Any) -> int:
        """The number of the recorded call that is like this one."""
        key: tuple[str, Any] = path, None
        usable = None
        # Of many kinds: what cannot be compared, or sent to other ranks.
        with suppress(Exception):
            to_meta = partial(torch.empty_like, device="meta")
            found = pytree.tree_map_only(
                Tensor, lambda x: to_meta(x, requires_grad=x.requires_grad), given
            )
            pickle.dumps(found)
            if hash(kind := shape_key(given)) and given:
                key, usable = (path, kind), found
        place = self._places.setdefault(key, len(recorded))
        if place == len(recorded):
            recorded.append(Call(path, usable, self._callers[-1] if self._callers else None))
        # In this call or another one.
        for leaf in _trained(usable):
            pytree.tree_leaves(recorded[place].given)[leaf].requires_grad_(True)
        return place


def _casts(device: str) -> tuple[bool, torch.dtype, torch.dtype]:
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
    )
