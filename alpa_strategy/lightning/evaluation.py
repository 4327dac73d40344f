"""Evaluation: validation, test and predict steps as captured, sharded, forward-only programs.

`Evaluation` finds the program of a step, or makes it; all ranks agree on it step by step. What cannot be captured runs
as the user wrote it, every rank on its own rows, with whole parameters. Where these do not fit, and the ranks have
batches of different shapes or numbers, they take turns: all evaluate one rank's batch, then the next one's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from alpa_strategy.comm.collectives import any_rank, shared, world_size
from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import AttributeCheck
from alpa_strategy.lightning.evaluation_loop import hooks_look, is_last_of_loader, step_counters, why_uneven
from alpa_strategy.lightning.full_parameters import WholeParameters, shapes_only
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.memory_headroom import Room
from alpa_strategy.lightning.metric_state import MetricStates
from alpa_strategy.lightning.own_rows import own_rows, row_cuts
from alpa_strategy.lightning.planning import capture
from alpa_strategy.lightning.programs import Program, Programs
from alpa_strategy.lightning.same_steps import shape_key
from alpa_strategy.lightning.step_effects import append_to_lists, output_of, replay_records, verify, write_buffers
from alpa_strategy.microbatch.microstep import Cut


def without_unused_parameters(step: StepGraph) -> StepGraph:
    """The step without the parameters that nothing in it reads: bringing them to it would cost communication."""
    escaping = set(step.escaping)
    used = (p for p in step.parameters if p.value in step.consumers or p.value in escaping)
    return replace(step, parameters=tuple(used))


MAX_SHAPES = 32  # of batches of which programs are kept
MAX_PROGRAMS = 16  # of one shape
MAX_FAILURES = 3  # batches at which a step could not be captured, before it is not tried any more
CAPTURE, EAGER, TURNS, ABSENT = -1, -2, -3, -4


class Home(Protocol):
    """Where the parameters lie that evaluation runs on: a training's, or an evaluation's own."""

    module: Any
    store: Any
    metrics: MetricStates
    room: Room

    def lower_evaluation(self, step: StepGraph) -> Any:
        """What runs an evaluation step. Collective. AlpaError when it cannot be planned around the parameters."""
        ...

    def evaluate(self, step: StepGraph, lowered: Any, batch: Any, counters: Mapping[str, int]) -> dict[int, Tensor]:
        """The step's escaping values, whole on every rank. Collective."""
        ...

    def drop(self, lowered: Any) -> None:
        """A program is not used any more."""
        ...

    def whole_parameters(self) -> WholeParameters:
        """Context: the module with its whole parameters. Collective on entry."""
        ...


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


@dataclass(frozen=True)
class EvaluationProgram(Program):
    """An evaluation step's; `cuts`: where this rank's rows are in its output, by value."""

    cuts: Mapping[int, Cut]


class Evaluation:
    """Runs the evaluation steps of a module whose parameters lie in shards. All methods are collective."""

    def __init__(self, home: Home, job: Job) -> None:
        self._home, self._job = home, job
        self._programs: Programs[EvaluationProgram] = Programs(MAX_SHAPES, MAX_PROGRAMS, home.drop)
        self._failed_at: dict[tuple[str, int | None], set[int]] = {}
        self._warned: set[str] = set()
        self._whole: WholeParameters | None = None
        self._against_whole: str | None = None
        self._runs_eagerly = self._is_uneven = self._is_capturing = False
        self._refusals: list[Any] = []
        self._global_metrics: list[Metric] = []  # those that the steps of this loop made so

    def start(self, kind: str) -> None:
        """Begin a loop over evaluation batches of `kind` (`validation`, `test` or `predict`)."""
        trainer = self._home.module.trainer
        against, uneven = self._home.room.for_whole(), why_uneven(trainer)
        if any_rank([against is not None])[0]:
            self._against_whole = against or "they do not fit into another device"
        self._is_uneven = uneven is not None
        self._runs_eagerly = self._is_uneven and self._against_whole is None
        if self._runs_eagerly:
            self._warn(str(uneven), f"{kind}_step")
        looked_at = hooks_look(trainer, kind)
        if self._against_whole is None and (self._runs_eagerly or looked_at):
            self.make_whole()
        elif looked_at:
            self._refuse_calls(self._against_whole)

    def end(self) -> None:
        """The loop has ended."""
        for handle in self._refusals:
            handle.remove()
        self._refusals.clear()
        self._make_metrics_local()
        if self._whole is not None:
            self._whole.__exit__(None, None, None)
            self._whole = None

    def _refuse_calls(self, against: str | None) -> None:
        """Let modules whose parameters are shards raise an error when hooks call them; they would compute nonsense."""

        def refuse(module: torch.nn.Module, args: Any) -> None:
            if not self._is_capturing:
                raise AlpaError(
                    f"a hook calls {type(module).__name__}, whose parameters lie in shards: its whole parameters do "
                    f"not fit into one device ({against})",
                    "use what the evaluation step returns",
                )

        sharded = set(self._home.store.parameters)
        for module in self._home.module.modules():
            if not sharded.isdisjoint(module.parameters(recurse=False)):
                self._refusals.append(module.register_forward_pre_hook(refuse))

    @property
    def fits(self) -> bool:
        """Whether the whole parameters fit into every device."""
        return self._against_whole is None

    @property
    def is_whole(self) -> bool:
        """Whether the module holds whole parameters now."""
        return self._whole is not None

    def make_whole(self) -> None:
        """Let the module hold whole parameters until `end`. AlpaError when they do not fit."""
        if self._whole is not None:
            return
        if self._against_whole is not None:
            raise AlpaError(
                f"an evaluation step needs the whole parameters on every device, and {self._against_whole}",
                "write the step so that it can be captured (see the warning above), or use more memory per device",
            )
        self._whole = self._home.whole_parameters()
        self._whole.__enter__()

    def step(self, name: str, args: tuple[Any, ...], eager: Callable[..., Any]) -> Any:
        """What `module.<name>(*args)` returns: its rows are those of this rank's batch.

        Args:
            args: (batch, batch_idx, dataloader_idx) as the Trainer gives them, or the first of these.
            eager: runs the step as the user wrote it.
        """
        if self._runs_eagerly:
            return self._run_eagerly(eager, args)
        call = Call(name, *args, *(0, None)[len(args) - 1 :])
        # The Trainer reduces what was logged when a loader ends: all ranks must have come to its end.
        is_last = is_last_of_loader(self._home.module.trainer, call.batch_idx, call.dataloader_idx)
        decision, all_are_last = self._decide(call, is_last)
        if decision == TURNS:
            output = self._take_turns(call)
        elif decision == EAGER:
            output = self._run_eagerly(eager, args)
        else:
            output = self._run(call, decision)
        while self._is_uneven and is_last and not all_are_last:  # those of other ranks that have some left
            _, all_are_last = self._decide(None, True)
            self._take_turns(None)
        return output

    def _take_turns(self, own: Call | None) -> Any:
        """What each rank's call returns on its rank, computed by all; `own` is this rank's, if it has one."""
        self._make_metrics_local()
        output = None
        for rank in range(world_size()):
            is_mine = rank == dist.get_rank()
            given = (own.name, own.batch, own.batch_idx, own.dataloader_idx) if is_mine and own is not None else None
            given = shared(given, rank, self._job.device)
            if given is not None:
                call = Call(*given, in_turn=True)
                decision, _ = self._decide(call, True)
                if decision == EAGER:
                    self.make_whole()  # which does not fit, and says so
                found = self._run(call, decision, is_mine)
                output = found if is_mine else output
        return output

    def _decide(self, call: Call | None, is_last: bool) -> tuple[int, bool]:
        """The index of the program that runs this call, EAGER, or TURNS; whether all ranks' loaders end with it.

        call: None where this rank has no batch left.
        """
        found = ABSENT if call is None else self._find(call)
        decision, all_are_last = self._agree(call, found, is_last)
        return self._capture(call) if decision == CAPTURE and call is not None else decision, all_are_last

    def _find(self, call: Call) -> int:
        failed = self._failed_at.get(call.step, set())
        if len(failed) >= MAX_FAILURES or call.batch_idx in failed:
            return EAGER
        index, _ = self._programs.fitting(call.key, self._counters(call), call.batch)
        return CAPTURE if index is None else index

    def _counters(self, call: Call) -> dict[str, int]:
        return step_counters(self._home.module.trainer, call.batch_idx)

    def _agree(self, call: Call | None, found: int, is_last: bool) -> tuple[int, bool]:
        """One decision for all ranks from what each found: different batches are evaluated by each rank alone."""
        if world_size() == 1:
            return found, is_last
        digest = 0 if call is None else int.from_bytes(hashlib.sha256(repr(call.key).encode()).digest()[:7], "big")
        own = torch.tensor([digest, found, is_last], device=self._job.device)
        all_found = [torch.empty_like(own) for _ in range(world_size())]
        dist.all_gather(all_found, own)
        digests, decisions, lasts = zip(*(each.tolist() for each in all_found), strict=True)
        if len(set(digests)) > 1 and self._against_whole is not None:
            return TURNS, all(lasts)
        if len(set(digests)) > 1 and call is not None:
            self._warn(f"{call.name} gets batches of different shapes on different ranks", call.name)
            return EAGER, all(lasts)
        if len(set(decisions)) > 1:
            return EAGER if EAGER in decisions else CAPTURE, all(lasts)
        return found, all(lasts)

    def _capture(self, call: Call) -> int:
        """Make a program for this call; its index, or EAGER."""
        home, module, job = self._home, self._home.module, self._job
        if call.in_turn:
            job = replace(job, options=replace(job.options, batch_scope="global"))
        self._is_capturing = True
        try:
            with torch.inference_mode(False), self._paused(), shapes_only(home.store):
                step = capture(module, call.batch, call.batch_idx, job, call.name, call.dataloader_idx)
                step = without_unused_parameters(step)
            if call.in_turn:
                _check_logs_in_turn(step)
            with self._paused():
                cuts = row_cuts(step, world_size())
                lowered = home.lower_evaluation(step)
        except AlpaError as error:
            self._failed_at.setdefault(call.step, set()).add(call.batch_idx)
            self._warn(error.problem, call.name)
            return EAGER
        finally:
            self._is_capturing = False
        program = EvaluationProgram(step, lowered, AttributeCheck(module, step.attributes), cuts)
        self._programs.add(call.key, program)
        return len(self._programs.of(call.key)) - 1

    def _run(self, call: Call, index: int, is_mine: bool = True) -> Any:
        """The output of a call that all ranks compute; another rank's has no effect here."""
        program, module = self._programs.of(call.key)[index], self._home.module
        self._programs.use(call.key)
        step, batch, counters = program.step, call.batch, self._counters(call)
        with torch.inference_mode(False), torch.no_grad(), self._paused():
            values = self._home.evaluate(step, program.lowered, batch, counters)
            write_buffers(module, step, values)
        verify(step, values)
        if not is_mine:
            return None
        with self._job.context():
            metrics = None if call.in_turn else self._home.metrics
            self._global_metrics += replay_records(module, step, values, counters, metrics, is_training=False)
        rank = dist.get_rank() if world_size() > 1 else 0
        own = own_rows(values, program.cuts, world_size(), rank)
        append_to_lists(module, step, own, batch, counters)
        return output_of(step, own, batch, counters)

    def _run_eagerly(self, eager: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.make_whole()
        if self._job.options.batch_scope == "global":  # every rank brings all rows
            self._global_metrics += self._home.metrics.make_all_global(self._home.module)
        else:
            self._make_metrics_local()
        return eager(*args)

    def _make_metrics_local(self) -> None:
        self._home.metrics.make_local(self._global_metrics)
        self._global_metrics.clear()

    def _paused(self) -> Any:
        return nullcontext() if self._whole is None else self._whole.paused()

    def _warn(self, why: str, name: str) -> None:
        """Once per step."""
        if name not in self._warned:
            self._warned.add(name)
            rank_zero_warn(
                f"alpa: {name} runs as it is written, each rank on its own rows with whole parameters, which takes "
                f"memory for them, and time to gather them at every evaluation: {why}"
            )


def _check_logs_in_turn(step: StepGraph) -> None:
    """AlpaError where a step logs what the ranks would have to synchronise while one of them logs."""
    for record in step.logs:
        kwargs = dict(record.kwargs)
        if kwargs.get("on_step") and kwargs.get("sync_dist"):
            raise AlpaError(
                f"self.log({record.name!r}, on_step=True, sync_dist=True) synchronises the ranks at every step, and "
                "their batches differ in shape or number",
                "leave on_step or sync_dist out",
            )
