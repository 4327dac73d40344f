"""Evaluation: validation, test and predict steps as captured, sharded, forward-only programs.

`Evaluation` finds the program of a step, or makes it; all ranks agree on it step by step. What cannot be captured runs
as the user wrote it, every rank on its own rows, with whole parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from alpa_strategy.capture.guards import AttributeCheck
from alpa_strategy.capture.step_graph import StepGraph
from alpa_strategy.errors import AlpaError
from alpa_strategy.inter_op.stage import Cut
from alpa_strategy.lightning.agree import world_size
from alpa_strategy.lightning.evaluation_stage import without_unused_parameters
from alpa_strategy.lightning.job import Job
from alpa_strategy.lightning.loops import hooks_look, step_counters, why_uneven
from alpa_strategy.lightning.metric_state import MetricStates
from alpa_strategy.lightning.own_rows import own_rows, row_cuts
from alpa_strategy.lightning.planning import capture
from alpa_strategy.lightning.programs import Program, Programs
from alpa_strategy.lightning.replay import append_to_lists, output_of, replay_records, verify, write_buffers
from alpa_strategy.lightning.room import Room
from alpa_strategy.lightning.shape_key import shape_key
from alpa_strategy.lightning.whole import WholeParameters, shapes_only

MAX_SHAPES = 32  # of batches of which programs are kept
MAX_PROGRAMS = 16  # of one shape
MAX_FAILURES = 3  # batches at which a step could not be captured, before it is not tried any more
CAPTURE, EAGER = -1, -2
Which = tuple[str, int | None]  # name of a step, dataloader_idx


class Home(Protocol):
    """Where the parameters lie that evaluation runs on: a training's, or an evaluation's own."""

    module: Any
    store: Any
    metrics: MetricStates
    room: Room

    def lower_evaluation(self, step: StepGraph) -> Any:
        """What runs an evaluation step. Collective. AlpaError when it cannot be planned around the parameters."""
        ...

    def evaluate(self, step: StepGraph, lowered: Any, batch: Any) -> dict[int, Tensor]:
        """The step's escaping values, whole on every rank. Collective."""
        ...

    def drop(self, lowered: Any) -> None:
        """A program is not used any more."""
        ...

    def whole_parameters(self) -> WholeParameters:
        """Context: the module with its whole parameters. Collective on entry."""
        ...


@dataclass(frozen=True)
class EvaluationProgram(Program):
    """An evaluation step's; `cuts`: where this rank's rows are in its output, by value."""

    cuts: Mapping[int, Cut]


class Evaluation:
    """Runs the evaluation steps of a module whose parameters lie in shards. All methods are collective."""

    def __init__(self, home: Home, job: Job) -> None:
        self._home, self._job = home, job
        self._programs: Programs[EvaluationProgram] = Programs(MAX_SHAPES, MAX_PROGRAMS, home.drop)
        self._failed_at: dict[Which, set[int]] = {}
        self._warned: set[str] = set()
        self._whole: WholeParameters | None = None
        self._runs_eagerly = self._is_capturing = False
        self._refusals: list[Any] = []
        self._global_metrics: list[Metric] = []  # those that the steps of this loop made so

    def start(self, kind: str) -> None:
        """Begin a loop over evaluation batches of `kind` (`validation`, `test` or `predict`)."""
        trainer = self._home.module.trainer
        against, uneven = self._home.room.for_whole(), why_uneven(trainer)
        self._runs_eagerly = uneven is not None and against is None
        if self._runs_eagerly:
            self._warn(str(uneven), f"{kind}_step")
        elif uneven is not None:
            rank_zero_warn(f"alpa: {uneven}: without whole parameters ({against}) the others would wait for it forever")
        looked_at = hooks_look(trainer, kind)
        if against is None and (self._runs_eagerly or looked_at):
            self.make_whole()
        elif looked_at:
            self._refuse_calls(against)

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
    def is_whole(self) -> bool:
        """Whether the module holds whole parameters now."""
        return self._whole is not None

    def make_whole(self) -> None:
        """Let the module hold whole parameters until `end`. AlpaError when they do not fit."""
        if self._whole is not None:
            return
        against = self._home.room.for_whole()
        if against is not None:
            raise AlpaError(
                f"an evaluation step needs the whole parameters on every device, and {against}",
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
        batch, batch_idx, dataloader_idx = (*args, *(0, None)[len(args) - 1 :]) if len(args) < 3 else args
        which = (name, dataloader_idx)
        key = (*which, shape_key(batch))
        counters = step_counters(self._home.module.trainer, batch_idx)
        found = self._find(which, key, counters, batch)
        decision = self._agree(name, key, found)
        if decision == CAPTURE:
            decision = self._capture(which, key, args, batch_idx)
        if decision == EAGER:
            return self._run_eagerly(eager, args)
        self._programs.use(key)
        return self._run(self._programs.of(key)[decision], batch, counters)

    def _find(self, which: Which, key: tuple[Any, ...], counters: dict[str, int], batch: Any) -> int:
        failed = self._failed_at.get(which, set())
        if len(failed) >= MAX_FAILURES or counters["batch_idx"] in failed:
            return EAGER
        index, _ = self._programs.fitting(key, counters, batch)
        return CAPTURE if index is None else index

    def _agree(self, name: str, key: tuple[Any, ...], found: int) -> int:
        """One decision for all ranks from what each found: different batches are evaluated by each rank alone."""
        if world_size() == 1:
            return found
        digest = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
        own = torch.tensor([digest, found], device=self._job.device)
        all_found = [torch.empty_like(own) for _ in range(world_size())]
        dist.all_gather(all_found, own)
        digests, decisions = zip(*(each.tolist() for each in all_found), strict=True)
        if len(set(digests)) > 1:
            self._warn(f"{name} gets batches of different shapes on different ranks", name)
            return EAGER
        if len(set(decisions)) > 1:
            return EAGER if EAGER in decisions else CAPTURE
        return found

    def _capture(self, which: Which, key: tuple[Any, ...], args: tuple[Any, ...], batch_idx: int) -> int:
        """Make a program for this batch; its index, or EAGER."""
        name, dataloader_idx = which
        home, module = self._home, self._home.module
        self._is_capturing = True
        try:
            with torch.inference_mode(False), self._paused(), shapes_only(home.store):
                step = capture(module, args[0], batch_idx, self._job, name, dataloader_idx)
                step = without_unused_parameters(step)
            with self._paused():
                cuts = row_cuts(step, world_size())
                lowered = home.lower_evaluation(step)
        except AlpaError as error:
            self._failed_at.setdefault(which, set()).add(batch_idx)
            self._warn(error.problem, name)
            return EAGER
        finally:
            self._is_capturing = False
        program = EvaluationProgram(step, lowered, AttributeCheck(module, step.attributes), cuts)
        self._programs.add(key, program)
        return len(self._programs.of(key)) - 1

    def _run(self, program: EvaluationProgram, batch: Any, counters: dict[str, int]) -> Any:
        step, module = program.step, self._home.module
        with torch.inference_mode(False), torch.no_grad(), self._paused():
            values = self._home.evaluate(step, program.lowered, batch)
            write_buffers(module, step, values)
        verify(step, values)
        with self._job.context():
            self._global_metrics += replay_records(
                module, step, values, counters, self._home.metrics, is_training=False
            )
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
