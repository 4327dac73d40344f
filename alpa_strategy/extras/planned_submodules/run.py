"""SubmoduleRun: eager steps that call planned programs as the forwards of submodules.

Every rank runs the user's step on its own batch, as under DDP, and the ranks of a replica divide
the work of the programs: a program has been merged over them (`capture/merge_ranks.py`), takes the
inputs of all and gives each rank its own results. So the ranks call it together (`CallOrder`). With
`batch_scope="global"` or `replicas=` the ranks of a replica load the same batch, and run the step
on it with the same random numbers.

Gradients of the programs are complete, and divided by the number of the replica's ranks, as soon as
the backward has computed them; those of the user's own code are averaged then. The first step runs
unsharded and records the submodules that can be planned.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from alpa_strategy.capture.python_state import outermost_metrics, patched
from alpa_strategy.comm.collectives import (
    RankZero,
    all_gather_object,
    broadcast_object,
    world_size,
)
from alpa_strategy.comm.mesh import build_mesh, divide
from alpa_strategy.errors import CaptureError, RuntimeMismatchError
from alpa_strategy.extras.planned_submodules.call_order import CallOrder
from alpa_strategy.extras.planned_submodules.calls import Call, capture_calls, plannable
from alpa_strategy.extras.planned_submodules.forwards import Forwards, Program
from alpa_strategy.extras.planned_submodules.unshard_on_access import UnshardOnAccess
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.dataloader_state import random_state, set_random_state
from alpa_strategy.lightning.digests import SameBatchCheck
from alpa_strategy.lightning.eager_run import parameter_inputs
from alpa_strategy.lightning.job import Job, device_limit
from alpa_strategy.lightning.planning import check_optimizer, find_or_make_plan, job_cluster
from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun
from alpa_strategy.lightning.step_effects import REPLICAS
from alpa_strategy.options import PlanOptions
from alpa_strategy.pipeline.step_programs import PlanRuntime
from alpa_strategy.planner.eager_plan import plan_eager
from alpa_strategy.planner.optimizer_info import inspect_optimizer, joint_info
from alpa_strategy.runtime.gradients import average
from alpa_strategy.runtime.process_memory import tuned
from alpa_strategy.runtime.synced_norms import synced


class SubmoduleRun(ShardedRun):
    """A run with planned submodules; see the file's docstring. Making one is collective.

    Args:
        inputs: the module, its optimizers and the job.
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
        self._replica = replica = divide(num_replicas)

        # Whether the ranks of a replica load the same batch.
        self._loads_alike = options.rows == "global"
        num_batches = 1 if self._loads_alike else world_size(replica.group)
        self._all_ranks = build_mesh((world_size(),), job.backend).all_devices
        self._order = CallOrder(replica.group)
        self._same_batch = SameBatchCheck(replica.group)

        limit = device_limit(job)
        seed = broadcast_object(torch.initial_seed()) + replica.index
        job = replace(job, replica=replica, options=replace(options, memory_limit=limit))
        inputs = replace(inputs, job=job)
        infos = [inspect_optimizer([optimizer], module) for optimizer in inputs.optimizers]
        info = joint_info(infos)
        parameters = {entry.name: entry for entry in parameter_inputs(module, trains=True)}
        plan = plan_eager([*parameters.values()], job.options, infos, job.step_devices, limit, why)

        calls: list[Call] = []
        cluster = None
        if recorded is not None:
            graph, calls = _captured(module, recorded, job, why, num_batches)
            # A rank's device has that rank's samples.
            cluster = replace(job_cluster(job), order="numbered")
            names = {name for parameter in graph.parameters for name in parameter.names}
            others = [entry for name, entry in parameters.items() if name not in names]
            plan_of_others = plan_eager(others, job.options, infos, job.step_devices, limit, why)
            free_bytes = limit - plan_of_others.predicted.peak_bytes
            job_of_calls = _job_of_calls(job, options, names, free_bytes)
            rank_zero = RankZero(job.limits.plan_timeout_seconds)
            plan_of_calls = find_or_make_plan(graph, job_of_calls, cluster, info, rank_zero)
            plan = _combined(plan, plan_of_calls)
            parameters |= {entry.name: entry for entry in graph.parameters}

        check_optimizer(info, plan.stages)
        with tuned(job.device), inputs.sharding(module) as values:
            devices = (job.device, cluster, seed, lambda: 1.0, job.backend, job.compile, replica)
            self._placed = PlanRuntime(
                module, [*parameters.values()], plan, *devices, gradient_scale=1.0 / num_batches
            )
            super().__init__(inputs, info, plan, self._placed.store, limit, values)

        # The user's code between the programs.
        self._glue = UnshardOnAccess(self.store, self._order)
        programs = [Program(call, self._placed, plan, self._order) for call in calls]
        self._forwards = Forwards(programs, job, recorded is None, self._order)
        self._adapted.enter_context(self._forwards.installed(module))
        self._sync_batch_norms()

    def _sync_batch_norms(self) -> None:
        """Synchronize statistics of batch norms over the ranks, as the user's modules demand."""
        # Trainer(sync_batchnorm=True).
        every = self.module.trainer.strategy._layer_sync is not None
        ranks = self._replica.across if self._loads_alike else self._all_ranks
        self._adapted.enter_context(patched(synced(self.module, every, lambda: ranks)))

    # A training step

    @override
    def training_step(self, batch: Any, batch_idx: int, eager_step: Any) -> Any:
        """Run the module's own step on this rank's batch, and return its output; planned submodules
        run as programs.

        Args:
            eager_step: calls the module's `training_step`; the batch is bound to it already.

        Raises:
            RuntimeMismatchError: ranks have loaded different batches, or make other calls.
        """
        self.take_buffers()
        changed = [self._clipping()]
        if self._loads_alike:
            self._equalize(batch)
            changed.append(self._log_of_replica())
            self.peers = REPLICAS
        try:
            with (
                self.noting_writes(),
                self.in_step(),
                patched(changed),
                self._glue if self.store.sharded_parameters else nullcontext(),
            ):
                output = eager_step()
                self._order.meet("the end of the step")
                return output
        finally:
            self.peers = None
            # As under DDP.
            self.buffers_differ = self.syncs and self.module.automatic_optimization

    def _equalize(self, batch: Any) -> None:
        """Let the ranks of the replica go on alike: random states and metrics. Collective.

        Raises:
            RuntimeMismatchError: they have loaded different batches.
        """
        self._same_batch.begin(batch)
        for _, metric in outermost_metrics(self.module):
            self.metrics.make_global(metric)
        if self.store.mesh.all_devices.size > 1:
            set_random_state(all_gather_object(random_state(), self._replica.group)[0])
        self._same_batch.finish()

    def _log_of_replica(self) -> tuple[Any, str, Any]:
        """Return (module, name, function) that replaces `module.log`: it averages over replicas,
        unless it is given a group.
        """
        module_log = self.module.log

        def log(*args: Any, **kwargs: Any) -> None:
            kwargs["sync_dist_group"] = kwargs.get("sync_dist_group") or REPLICAS
            module_log(*args, **kwargs)

        return self.module, "log", log

    def _clipping(self) -> tuple[Any, str, Any]:
        """Return the replacement of the plugin's clipping, which works on shards."""
        plugin = self.module.trainer.precision_plugin
        return plugin, "clip_gradients", self._sharded_access()(plugin.clip_gradients)

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
        """Average the gradients over the ranks that lack those of others, unless more batches are
        accumulated. Collective.

        Gradients of programs are complete on the replica's ranks. So a parameter that is full there
        has the same part of its gradient on all of them, and its mean over all ranks is right, too.
        """
        self._order.meet("the end of the backward")
        if not self.syncs:
            return
        with self._sharded_access():
            self._glue.reduce_gradients()
            sharded = self.store.sharded_parameters
            full = [p for p in self.store.parameters if p not in sharded]
            for parameters, ranks in ((full, self._all_ranks), (sharded, self._replica.across)):
                if ranks.size > 1:
                    bucket_bytes = self._job.limits.bucket_bytes
                    average(parameters, ranks, self.store.device, bucket_bytes)

    @override
    def check_gradients(self) -> None:
        """Check the gradients with sharded parameters in place."""
        with self._sharded_access():
            super().check_gradients()

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        """Context of an optimizer step: parameters are shards. With manual optimization, gradients
        are averaged first (collective).
        """
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
        """Return why a new plan is needed, None if it is not. After a first step that recorded
        calls, `recorded` gets these.
        """
        if self._num_updates and self._forwards.recorded is not None:
            self.recorded = self._forwards.recorded
            return "the first step has shown which submodules can be planned"
        return super().changed_parameters()


def _captured(
    module: Any, recorded: Sequence[Call], job: Job, why: CaptureError, num_batches: int
) -> tuple[StepGraph, list[Call]]:
    """Return the graph of the submodules' calls that can be planned, and these calls. Collective.

    Submodules whose calls differ between ranks are left out. Rank 0 logs what is planned and why
    the whole step is not.

    Args:
        module: the LightningModule.
        recorded: the calls of submodules in an eager step, callers first.
        job: the job, with the user's options.
        why: the error of capturing the whole step.
        num_batches: number of ranks that make each call together, with inputs of their own.

    Raises:
        CaptureError: `why`, if no call can be planned.
        RuntimeMismatchError: the ranks' graphs differ, and no call explains it.
    """
    # Paths of submodules that compute with tensors of each rank's own besides their inputs, such
    # as attributes that an earlier call has set.
    unlike: set[str] = set()
    with job.progress("capture"):
        while True:
            calls, text = _plannable(module, recorded, job, why, unlike)
            graph, parts = capture_calls(module, calls, job.context, num_batches)
            if len(set(all_gather_object((graph.parameter_digest, graph.graph_digest)))) == 1:
                break
            differing = _differing_calls(module, calls, job)
            if not differing:
                raise RuntimeMismatchError(
                    "the ranks' submodules are not the same", "build the same module on every rank"
                )
            unlike |= differing
    problem = " ".join(why.problem.split())
    paths = ", ".join(dict.fromkeys(call.path for call in calls))
    contract = "as under DDP"
    if job.options.rows == "global":
        assert job.replica is not None
        contract = f"as under DDP with one rank for each of {job.replica.count} replicas"
    rank_zero_info(
        f"alpa: the step runs eagerly, {contract} ({problem}); planned are {paths}{text}"
    )
    return graph, parts


def _plannable(
    module: Any, recorded: Sequence[Call], job: Job, why: CaptureError, unlike: Collection[str]
) -> tuple[list[Call], str]:
    """Return the calls that can be planned, and a text about others. Collective.

    Args:
        unlike: paths of submodules whose calls differ between ranks.
        recorded, job, why: as of `_captured`.

    Raises:
        CaptureError: `why`, if there are none.
    """
    rank_zero = RankZero(job.limits.plan_timeout_seconds)
    calls, others = rank_zero.result_of(
        lambda: plannable(module, recorded, job.context, unlike), "capturing submodules"
    )
    text = "".join(f"; not {other}" for other in others)
    if not calls:
        raise type(why)(
            f"{why.problem}; nor can the forward of a submodule be planned{text}", why.fix
        )
    return calls, text


def _differing_calls(module: Any, calls: Sequence[Call], job: Job) -> set[str]:
    """Return the paths of submodules whose calls differ between ranks. Collective."""
    digests = []
    for call in calls:
        graph, _ = capture_calls(module, [call], job.context)
        digests.append(graph.graph_digest)
    differing = set()
    for call, *of_ranks in zip(calls, *all_gather_object(digests), strict=True):
        if len(set(of_ranks)) > 1:
            differing.add(call.path)
    return differing


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
    """Return the plan of the calls with the parameters, schedule, figures and notes of the module's
    eager `plan`; nothing is prefetched or fused.
    """
    stage = plan.stages[0]
    stage_of_calls = plan_of_calls.stages[0]
    # The user's code may differentiate the programs twice.
    execution = stage_of_calls.execution
    if execution is not None:
        execution = replace(execution, fused_matmuls=(), chunk_dims={})
    # Nothing is prefetched: the user's code runs between the programs.
    combined_stage = replace(
        stage_of_calls,
        execution=execution,
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
