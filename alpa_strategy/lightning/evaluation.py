"""Evaluation: validation, test and predict steps of a module whose parameters lie in shards.

Where whole parameters have room beside a training step, they are gathered once per evaluation loop and steps run as
they are written, each rank on its own batches: DDP's semantics by construction. Where they have none, steps are
captured and run on shards: on all ranks' batches as one, or, where that would show, on one rank's after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.collectives import RankZero, agree_on_seed, any_rank, on_all_ranks, shared, world_size
from alpa_strategy.cost.measured import device_memory_bytes
from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import AttributeCheck
from alpa_strategy.lightning.captured_steps import CapturedStep, CapturedSteps
from alpa_strategy.lightning.evaluation_loop import is_last_of_loader, sees_outputs, step_counters
from alpa_strategy.lightning.full_parameters import FullParameters, shapes_only
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.metric_state import MetricStates
from alpa_strategy.lightning.planning import Prepared, capture, find_or_make_plan, job_cluster
from alpa_strategy.lightning.run import NO_OPTIMIZER, Run
from alpa_strategy.lightning.same_steps import shape_key
from alpa_strategy.lightning.step_effects import (
    append_to_lists,
    output_of,
    update_metrics_and_log,
    verify,
    write_buffers,
)
from alpa_strategy.microbatch.states import ancestors

MAX_SHAPES = 32  # of batches of which programs are kept
MAX_PROGRAMS = 16  # of one shape
CAPTURE, TURNS, ABSENT = -1, -2, -3


@dataclass(frozen=True)
class Call:
    """A step's call: `module.<name>(batch, batch_idx, dataloader_idx)`, the last one None where there is one loader.

    in_turn: whether the batch is one rank's, which all ranks evaluate together, instead of part of all ranks'.
    """

    name: str
    batch: Any
    batch_idx: int
    dataloader_idx: int | None
    in_turn: bool = False

    @property
    def step(self) -> tuple[str, int | None]:
        """Which step is called."""
        return self.name, self.dataloader_idx

    @property
    def key(self) -> tuple[Any, ...]:
        """What kind of batch a program is for."""
        return *self.step, self.in_turn, shape_key(self.batch)


class NotCapturable(Exception):
    """A step cannot run on shards; all ranks find that out together."""


class Evaluation:
    """Runs the evaluation steps of a module whose parameters lie in shards. All methods are collective."""

    def __init__(self, run: Run, job: Job) -> None:
        self._run, self._job = run, job
        self._captured: CapturedSteps = CapturedSteps(MAX_SHAPES, MAX_PROGRAMS, run.drop)
        self._whole: FullParameters | None = None
        self._against_whole: str | None = None
        self._uncapturable: set[str] = set()  # steps by name
        self._appending: set[tuple[str, int | None]] = set()  # steps that keep values of their rank's rows in lists
        self._outputs_are_seen = self._is_capturing = False
        self._refusals: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def is_whole(self) -> bool:
        """Whether the module holds whole parameters now, and steps run as they are written."""
        return self._whole is not None

    def start(self, kind: str) -> None:
        """Begin a loop over evaluation batches of `kind` (`validation`, `test` or `predict`)."""
        run = self._run
        against = run.headroom.for_whole()
        is_tight = run.headroom.for_evaluation(run.plan.predicted.peak_bytes) is not None
        is_tight, is_against = any_rank([is_tight, against is not None])
        self._against_whole = (against or "they do not fit into another device") if is_against else None
        if not is_tight or (f"{kind}_step" in self._uncapturable and not is_against):
            self._gather()
            return
        self._outputs_are_seen = kind == "predict" or sees_outputs(run.module.trainer, kind)
        self._refuse_calls()

    def end(self) -> None:
        """The loop has ended."""
        for handle in self._refusals:
            handle.remove()
        self._refusals.clear()
        self._run.metrics.make_local()
        if self._whole is not None:
            self._whole.__exit__(None, None, None)
            self._whole = None

    def step(self, name: str, args: tuple[Any, ...], as_written: Callable[..., Any]) -> Any:
        """What `module.<name>(*args)` returns for this rank's batch.

        Args:
            args: (batch, batch_idx, dataloader_idx) as the Trainer gives them, or the first of these.
            as_written: runs the step as the user wrote it.
        """
        if self._whole is None:
            call = Call(name, *args, *(0, None)[len(args) - 1 :])
            try:
                return self._on_shards(call)
            except NotCapturable as error:
                self._stop_capturing(name, error)
        return as_written(*args)

    # As it is written, on whole parameters

    def _gather(self) -> None:
        """Let the module hold whole parameters until `end`."""
        for handle in self._refusals:
            handle.remove()
        self._whole = self._run.whole
        self._whole.__enter__()
        if self._job.options.batch_scope == "global":  # every rank brings all rows
            self._run.metrics.make_all_global(self._run.module)
        else:
            self._run.metrics.make_local()

    def _stop_capturing(self, name: str, why: NotCapturable) -> None:
        """From here on the step runs as it is written. AlpaError where whole parameters do not fit."""
        if self._against_whole is not None:
            raise AlpaError(
                f"{name} cannot run on shards ({why}); as it is written it needs the whole parameters on every device, "
                f"and {self._against_whole}",
                "write the step so that it can be captured, or use more memory per device",
            ) from why.__cause__
        self._uncapturable.add(name)
        rank_zero_warn(
            f"alpa: {name} runs as it is written, each rank on its own rows with whole parameters, which may not fit "
            f"beside what else it needs: {why}"
        )
        self._gather()

    # Captured, on shards

    def _refuse_calls(self) -> None:
        """Let modules whose parameters are shards raise an error when hooks call them; they would compute nonsense."""

        def refuse(module: torch.nn.Module, args: Any) -> None:
            if not self._is_capturing:
                raise AlpaError(
                    f"a hook calls {type(module).__name__}, whose parameters lie in shards: whole parameters do not "
                    f"fit into one device beside the training ({self._against_whole or 'with its activations'})",
                    "use what the evaluation step returns",
                )

        sharded = set(self._run.store.parameters)
        for module in self._run.module.modules():
            if not sharded.isdisjoint(module.parameters(recurse=False)):
                self._refusals.append(module.register_forward_pre_hook(refuse))

    def _on_shards(self, call: Call) -> Any:
        # The Trainer reduces what was logged when a loader ends: all ranks must have come to its end.
        is_last = is_last_of_loader(self._run.module.trainer, call.batch_idx, call.dataloader_idx)
        found, all_are_last = self._meet(call, is_last)
        captured = None if found == TURNS else self._captured_step(call, found)
        if captured is None:
            output = self._take_turns(call)
        else:
            output = self._finish(call, captured, self._values(call, captured), self._run.metrics)
        while is_last and not all_are_last:  # those of other ranks that have some left
            _, all_are_last = self._meet(None, True)
            self._take_turns(None)
        return output

    def _take_turns(self, own: Call | None) -> Any:
        """What each rank's call returns on its rank, computed by all; `own` is this rank's, if it has one."""
        self._run.metrics.make_local()
        mine: tuple[CapturedStep, dict[int, Tensor]] | None = None
        steps: list[StepGraph] = []
        for rank in range(world_size()):
            is_mine = rank == dist.get_rank()
            # Each rank in turn sends its call to all others; None: it has no batch left.
            given = (own.name, own.batch, own.batch_idx, own.dataloader_idx) if is_mine and own is not None else None
            given = shared(given, rank, self._job.device)
            if given is None:
                continue
            name, batch, batch_idx, dataloader_idx = given
            call = Call(name, batch, batch_idx, dataloader_idx, in_turn=True)
            captured = self._captured_step(call, self._meet(call, True)[0])
            assert captured is not None
            values = self._values(call, captured)
            steps.append(captured.step)
            if is_mine:
                mine = captured, values
        if len(steps) < world_size():
            for step in steps:
                _check_logs_of_some_ranks(step)
        # Logs may synchronise the ranks: each one's come when all batches are computed.
        return None if own is None or mine is None else self._finish(own, *mine, None)

    def _meet(self, call: Call | None, is_last: bool) -> tuple[int, bool]:
        """The index of the program that runs this call, CAPTURE, or TURNS where the ranks' batches differ; whether all
        ranks' loaders end with it.

        call: None where this rank has no batch left.
        """
        found = ABSENT
        if call is not None:
            index, _ = self._captured.fitting(call.key, self._counters(call), call.batch)
            found = CAPTURE if index is None else index
        if world_size() == 1:
            return found, is_last
        # 7 bytes of a hash: as many as an int64 holds without a sign.
        digest = 0 if call is None else int.from_bytes(hashlib.sha256(repr(call.key).encode()).digest()[:7], "big")
        own = torch.tensor([digest, found, is_last], device=self._job.device)  # one small collective per step
        all_found = [torch.empty_like(own) for _ in range(world_size())]
        dist.all_gather(all_found, own)
        digests, indices, lasts = zip(*(each.tolist() for each in all_found), strict=True)
        if len(set(digests)) > 1:
            return TURNS, all(lasts)
        # Guards may hold on one rank and not on another (an attribute that only one has changed): all capture again.
        return found if len(set(indices)) == 1 else CAPTURE, all(lasts)

    def _counters(self, call: Call) -> dict[str, int]:
        return step_counters(self._run.module.trainer, call.batch_idx)

    def _captured_step(self, call: Call, index: int) -> CapturedStep | None:
        """The program of that index, or a new one; None where ranks must take turns, as their own values are seen."""
        is_joint = not call.in_turn and world_size() > 1 and self._job.options.batch_scope == "rank"
        if is_joint and (self._outputs_are_seen or call.step in self._appending):
            return None
        if index != CAPTURE:
            self._captured.use(call.key)
            return self._captured.of(call.key)[index]
        run, module, job = self._run, self._run.module, self._job
        if call.in_turn:  # every rank has been given the same rows
            job = replace(job, options=replace(job.options, batch_scope="global"))
        self._is_capturing = True
        try:
            with torch.inference_mode(False), shapes_only(run.store):
                step = capture(module, call.batch, call.batch_idx, job, call.name, call.dataloader_idx)
            if is_joint and step.appended:
                self._appending.add(call.step)
                return None
            # Nobody sees what a joint step returns: its rows need not be gathered on every rank.
            step = _only_what_is_read(replace(step, output=None) if is_joint else step)
            captured = CapturedStep(step, run.lower_evaluation(step), AttributeCheck(module, step.attributes))
        except AlpaError as error:
            raise NotCapturable(error.problem) from error
        finally:
            self._is_capturing = False
        self._captured.add(call.key, captured)
        return captured

    def _values(self, call: Call, captured: CapturedStep) -> dict[int, Tensor]:
        """What the step computes, whole on every rank."""
        with torch.inference_mode(False), torch.no_grad():
            values = captured.program(call.batch, self._counters(call))
            write_buffers(self._run.module, captured.step, values)
        verify(captured.step, values)
        return values

    def _finish(
        self, call: Call, captured: CapturedStep, values: dict[int, Tensor], metrics: MetricStates | None
    ) -> Any:
        """What the step does besides computing, and its output.

        metrics: None where the values are those of this rank's rows.
        """
        module, step, counters = self._run.module, captured.step, self._counters(call)
        with self._job.context():
            update_metrics_and_log(module, step, values, counters, metrics, is_training=False)
        append_to_lists(module, step, values, call.batch, counters)
        return output_of(step, values, call.batch, counters)


def _check_logs_of_some_ranks(step: StepGraph) -> None:
    """AlpaError where a step logs what the ranks would have to synchronise, and some have no batch left to log it."""
    for record in step.logs:
        kwargs = dict(record.kwargs)
        if kwargs.get("on_step") and kwargs.get("sync_dist"):
            raise AlpaError(
                f"self.log({record.name!r}, on_step=True, sync_dist=True) synchronises the ranks at every step, and "
                "they have different numbers of batches",
                "leave on_step or sync_dist out",
            )


def _only_what_is_read(step: StepGraph) -> StepGraph:
    """The step without ops and parameters that nothing reads: bringing them to it would cost communication."""
    step = replace(step, ops=tuple(step.ops[index] for index in ancestors(step, step.escaping)))
    escaping = set(step.escaping)
    used = (p for p in step.parameters if p.value in step.consumers or p.value in escaping)
    return replace(step, parameters=tuple(used))


# Without a training: a model that does not fit into one device is planned and sharded for its evaluation


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
    # A run wants an optimizer; this one has no parameter of the module.
    nothing = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.0)
    prepared = Prepared(step, plan, cluster)
    with sharding(module) as whole:
        return Run(module, nothing, NO_OPTIMIZER, prepared, batch, job, rank_zero, seed, whole)
