"""TrainingRun: a prepared training. The plan, the sharded parameters, and one lowered program per shape of batch."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from alpa_strategy.capture.guards import AttributeCheck
from alpa_strategy.capture.step_graph import StepGraph
from alpa_strategy.errors import RuntimeMismatchError
from alpa_strategy.lightning.agree import RankZero, world_size
from alpa_strategy.lightning.optimizer_state import shard_state, unshard_state, whole_state_dict
from alpa_strategy.lightning.planning import Job, Prepared, capture, check_optimizer, find_or_make_plan
from alpa_strategy.lightning.replay import fill, replay_records, resolve, write_buffers
from alpa_strategy.lower.lower import lower
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.random import ShardedRandom
from alpa_strategy.runtime.torch_comm import build_mesh

MEET_SECONDS = 60.0
MEASURED_STEPS = range(5, 25)
MAX_PROGRAMS = 16  # of one batch shape
MANY_CAPTURES = 5


@dataclass(frozen=True)
class Program:
    """A captured step and what this device runs for it."""

    step: StepGraph
    lowered: Any  # LoweredStep; under a pipeline what runs its stages
    attributes: AttributeCheck

    def fits(self, counters: dict[str, int]) -> bool:
        """True when the step's Python would take the same path for these counters."""
        return all(guard.holds(**counters) for guard in self.step.guards)


class TrainingRun:
    """Plans and shards `module` in place (collective), then runs its steps.

    Args:
        module: the LightningModule; its parameters are swapped to local shards, the objects stay.
        optimizer: made on the whole parameters; its state, if any, is sharded too.
        prepared: the captured first step and its plan.
        batch: the first batch, on this rank's device.
        seed: the run's seed, the same on all ranks.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Optimizer,
        optimizer_info: OptimizerInfo,
        prepared: Prepared,
        batch: Any,
        job: Job,
        rank_zero: RankZero,
        seed: int,
        bucket_bytes: int,
        backend: str,
    ) -> None:
        self.module, self._job, self._rank_zero = module, job, rank_zero
        self._optimizer_info, self._seed, self.say = optimizer_info, seed, job.say
        self.step, self.plan, self._cluster = prepared.step, prepared.plan, prepared.cluster
        for stage in self.plan.stages:
            check_optimizer(optimizer_info, stage)
        self._optimizer = optimizer
        with job.progress("lower"):
            lowered = self._set_up(bucket_bytes, backend)
        program = Program(self.step, lowered, AttributeCheck(module, self.step.attributes))
        self._programs: dict[tuple[Any, ...], list[Program]] = {_shape_key(batch): [program]}
        self._num_captures_for_attributes = 0
        self._step_starts: list[float] = []

    def _set_up(self, bucket_bytes: int, backend: str) -> Any:
        """Build meshes, shard parameters and optimizer; what runs the first step. Collective."""
        self.stage = self.plan.stages[0]
        self._gathers_at_use = any(mode[0] == "S" for p in self.stage.parameter_plans.values() for mode in p.modes)
        self.mesh = build_mesh(self.stage.logical_mesh, backend=backend)
        self._random = ShardedRandom(self.mesh, self._seed)
        lowered = lower(self.step, self.stage, self.mesh, self._job.device, self._random)
        plans = self.stage.parameter_plans
        self.store = ParameterStore(self.module, self.step.parameters, plans, self.mesh, bucket_bytes)
        self.store.shard()
        shard_state(self._optimizer, self.store)
        return lowered

    def _lowered_again(self, step: StepGraph) -> Any:
        """What runs a step of another shape or content under the running plan's parameters."""
        plan = find_or_make_plan(
            step, self._job, self._cluster, self._optimizer_info, self._rank_zero, running=self.stage
        )
        return lower(step, plan.stages[0], self.mesh, self._job.device, self._random)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """What `module.training_step(batch, batch_idx)` returns, computed by all ranks on all their rows."""
        self._measure()
        program = self._program(batch, batch_idx)
        step = program.step
        values = self._values(program, batch)
        write_buffers(self.module, step, values)
        with self._job.context():  # the default dtype and autocast under which the user's step would have logged
            replay_records(self.module, step, values)
        return fill(step.output, values)

    def _values(self, program: Program, batch: Any) -> dict[int, Tensor]:
        """The step's escaping values; the loss can be differentiated."""
        step = program.step
        buffers = {b.name: resolve(self.module, b.name) for b in step.buffers}
        with self.store.regather_hooks() if self._gathers_at_use else nullcontext():
            return program.lowered(self.store.step_inputs(), buffers, batch_rows(step, batch))

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """The module with its whole parameters, for evaluation and checkpoints. Collective on entry."""
        shards = []
        # Under inference mode (validation) the gathered tensors would be unfit for the training that goes on later.
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self.store.parameters:
                shards.append((parameter, parameter.data))
                parameter.data = self.store.gather(self.store.name_of(parameter))
        try:
            yield
        finally:
            with torch.inference_mode(False), torch.no_grad():
                for parameter, shard in shards:
                    parameter.data = shard

    def whole_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict as a plain Trainer would write it. Collective."""
        return whole_state_dict(optimizer, self.store)

    def release(self) -> None:
        """Give the module and the optimizer their whole tensors back, for good. Collective."""
        unshard_state(self._optimizer, self.store)
        self.store.unshard()

    def close(self) -> None:
        """End what runs beside the main thread. No communication."""

    def _program(self, batch: Any, batch_idx: int) -> Program:
        trainer = self.module.trainer
        counters = {
            "batch_idx": batch_idx,
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
        }
        programs = self._programs.setdefault(_shape_key(batch), [])
        changed: str | None = None
        for program in reversed(programs):
            if program.fits(counters):
                changed = program.attributes.changed()
                if changed is None:
                    return program
        if not programs:
            self._meet_for_shape(batch)
            rank_zero_info(f"alpa: a batch of another shape, planned once more: {_shapes(batch)}")
        elif changed is not None:
            self._meet_for_attribute(changed)
        with self.whole_parameters():
            step = capture(self.module, batch, batch_idx, self._job)
        lowered = next((p.lowered for p in programs if p.step.graph_digest == step.graph_digest), None)
        if lowered is None:
            lowered = self._lowered_again(step)
        program = Program(step, lowered, AttributeCheck(self.module, step.attributes))
        programs.append(program)
        del programs[:-MAX_PROGRAMS]
        return program

    def _meet_for_shape(self, batch: Any) -> None:
        """Wait until every rank has a batch of a new shape; RuntimeMismatchError when some go on with the old one."""
        came, missing = self._meet(f"shape{len(self._programs)}", _shapes(batch))
        if missing:
            raise RuntimeMismatchError(
                f"batches differ between ranks: {'; '.join(f'rank {r}: {s}' for r, s in came.items())}, "
                f"ranks {missing} go on with the shape of before",
                "let every rank load equally many rows (drop_last=True drops a shorter last batch)",
            )

    def _meet_for_attribute(self, name: str) -> None:
        """The same for an attribute of the module that the step reads; a word of warning when it happens often."""
        self._num_captures_for_attributes += 1
        came, missing = self._meet(f"attribute{self._num_captures_for_attributes}", name)
        if missing:
            raise RuntimeMismatchError(
                f"attributes of the module that the step reads changed on some ranks only: "
                f"{'; '.join(f'rank {r}: {s}' for r, s in came.items())}, unchanged on ranks {missing}",
                "change them on every rank, at the same step",
            )
        if self._num_captures_for_attributes == MANY_CAPTURES:
            rank_zero_warn(
                f"alpa: attributes of the module that the step reads, the last one {name}, changed {MANY_CAPTURES} "
                "times; each change captures the step again. A number that changes often is better a buffer: "
                f"`self.register_buffer(name, torch.tensor(value))`, changed by `fill_`"
            )

    def _meet(self, name: str, text: str) -> tuple[dict[int, str], list[int]]:
        """What the ranks that came say, by rank, and the ranks that did not come.

        In the job's store, not by a collective: the ranks that see nothing new are already in the step's collectives.
        """
        came = self._rank_zero.meet(name, text, MEET_SECONDS)
        return came, sorted(set(range(world_size())) - set(came))

    def _measure(self) -> None:
        """Remember when steps begin; after some, say how long a step takes against the prediction."""
        count = len(self._step_starts)
        if count > MEASURED_STEPS.stop:
            return
        self._step_starts.append(time.perf_counter())
        if count == MEASURED_STEPS.stop:
            from alpa_strategy.display import measured_line

            starts = self._step_starts[MEASURED_STEPS.start :]
            seconds = statistics.median(b - a for a, b in itertools.pairwise(starts))
            self._job.say(measured_line(self.plan, seconds))


def _shape_key(batch: Any) -> tuple[Any, ...]:
    """What a program depends on: shapes and dtypes of the tensors, the other leaves themselves, the structure."""
    leaves, spec = pytree.tree_flatten(batch)
    described = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (spec, *described)


def _shapes(batch: Any) -> str:
    leaves = pytree.tree_leaves(batch)
    others = hashlib.sha256(repr([x for x in leaves if not isinstance(x, Tensor)]).encode()).hexdigest()[:6]
    text = ", ".join(str(list(x.shape)) for x in leaves if isinstance(x, Tensor))
    return text if all(isinstance(x, Tensor) for x in leaves) else f"{text} and values #{others}"


def batch_rows(step: StepGraph, batch: Any) -> list[Tensor]:
    """The batch's tensor leaves in `step.batch` order: this rank's rows, or all of them (`batch_scope="global"`)."""
    leaves = pytree.tree_leaves(batch)
    return [leaves[given.leaf] for given in step.batch]
