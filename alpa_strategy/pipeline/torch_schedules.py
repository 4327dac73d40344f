"""The seam to `torch.distributed.pipelining`: its schedules drive our stages. Its private parts are used here only.

The schedules decide in which order a mesh runs forwards and backwards of its stages. Messages are ours: a stage sends
as soon as it has computed, posts receives when the schedule says so, and waits for them when it computes. So stages may
lie on any number of devices, values may skip stages, and a send never holds up a schedule. For torch 2.11 to 2.13.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from alpa_strategy.errors import PlanError
from alpa_strategy.pipeline.stage_worker import StageWorker

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble")
_logger = logging.getLogger("torch.distributed.pipelining.schedules")


class _Stage(_PipelineStageBase):
    """A worker in the shape that schedules expect."""

    def __init__(
        self, worker: StageWorker, num_stages: int, mesh_index: int, num_meshes: int, device: torch.device
    ) -> None:
        # The base wants one rank per stage; a stage of ours is a mesh, so it is told of more stages than there are.
        super().__init__(nn.Module(), worker.index, max(num_stages, dist.get_world_size()), device)
        self.worker = worker
        self.num_stages = num_stages
        self.group_rank, self.group_size = mesh_index, num_meshes
        self.args_recv_info = {0: ()}  # what the schedules look at: no tensors of their own to receive

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[()]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.worker.post_forward(fwd_chunk_id)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.worker.post_backward(bwd_chunk_id)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return []  # sent by the worker

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.worker.forward(fwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if full_backward:
            self.worker.backward(bwd_chunk_id)
        else:
            self.worker.backward_inputs(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self.worker.backward_weights(bwd_chunk_id)

    # Two adjacent stages on one mesh: the worker hands over by itself.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        pass

    def get_local_bwd_output(self, mb_index: int) -> tuple[()]:
        return ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        pass

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.worker.reduce()


class Schedule:
    """One of torch's schedules over this mesh's stages.

    Args:
        name: as in `get_schedule_class`, any case.
        workers: this mesh's stages, ascending.
        num_stages: in the whole pipeline.
        stage_meshes: stage -> index of its mesh; meshes are numbered by their first stage.

    Raises:
        PlanError: the schedule does not exist or cannot run so many stages or micro-batches on these meshes.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[StageWorker],
        stage_meshes: Sequence[int],
        num_microbatches: int,
        device: torch.device,
    ) -> None:
        num_stages, num_meshes = len(stage_meshes), len(set(stage_meshes))
        self._name = name
        mesh_index = stage_meshes[workers[0].index]
        stages = [_Stage(worker, num_stages, mesh_index, num_meshes, device) for worker in workers]
        self._schedule = self._make(stages, num_meshes, num_microbatches)
        mapping = self._schedule.stage_index_to_group_rank
        if [mapping[stage] for stage in range(num_stages)] != list(stage_meshes):
            raise PlanError(
                f"schedule {name} puts stages on meshes {[mapping[s] for s in range(num_stages)]}, the plan on "
                f"{list(stage_meshes)}",
                "use another schedule, or place the stages as it does",
            )
        self._schedule._loss_fn = None  # losses are values of our stages
        self._schedule._has_backward = True  # without a loss function of its own it would not know

    def _make(self, stages: list[_Stage], num_meshes: int, num_microbatches: int) -> _PipelineScheduleRuntime:
        try:
            kind = get_schedule_class(self._name)
            if not issubclass(kind, PipelineScheduleSingle):
                return kind(stages, num_microbatches, scale_grads=False)
            if len(stages) != 1 or num_meshes != stages[0].num_stages:
                raise ValueError("it runs one stage per mesh")
            if kind not in (ScheduleGPipe, Schedule1F1B):
                raise ValueError("it is no schedule for training")
            # As data, for the runtime that posts receives early; torch's own loops wait for a send with each receive.
            order = _gpipe_order if kind is ScheduleGPipe else _one_f_one_b_order
            actions = {mesh: order(mesh, num_meshes, num_microbatches) for mesh in range(num_meshes)}
            runtime = _PipelineScheduleRuntime(stages, num_microbatches, scale_grads=False)
            runtime.pipeline_order = actions
            runtime._prepare_schedule_with_comms(actions)
            return runtime
        except (ValueError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise PlanError(
                f"schedule {self._name} cannot run {stages[0].num_stages} stages on {num_meshes} meshes with "
                f"{num_microbatches} micro-batches: {reason}",
                f"choose another of {', '.join(SCHEDULES)}, or other numbers",
            ) from error

    def run(self) -> None:
        """All micro-batches of a step, forward and backward."""
        was_disabled, _logger.disabled = _logger.disabled, True  # it would print the whole schedule before each error
        try:
            self._schedule.step(return_outputs=False)
        except RuntimeError:
            self._schedule.fwd_recv_ops.clear()
            self._schedule.bwd_recv_ops.clear()
            raise
        finally:
            _logger.disabled = was_disabled

    @property
    def actions(self) -> dict[int, list[str]]:
        """Mesh -> its computations in order (`0F1`: stage 0, forward, micro-batch 1), as torch writes them."""
        rows = self._schedule.pipeline_order
        return {mesh: [str(action) for action in row if action is not None] for mesh, row in rows.items()}


def _gpipe_order(stage: int, num_stages: int, num_microbatches: int) -> list[_Action]:
    """All forwards, then all backwards."""
    kinds = (_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD)
    return [_Action(stage, kind, m) for kind in kinds for m in range(num_microbatches)]


def _one_f_one_b_order(stage: int, num_stages: int, num_microbatches: int) -> list[_Action]:
    """As `Schedule1F1B` runs: stage s of n holds at most n - s micro-batches."""
    num_ahead = min(num_microbatches, num_stages - stage - 1)
    forwards = [_Action(stage, _ComputationType.FORWARD, m) for m in range(num_microbatches)]
    backwards = [_Action(stage, _ComputationType.FULL_BACKWARD, m) for m in range(num_microbatches)]
    steady = [action for pair in zip(forwards[num_ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:num_ahead], *steady, *backwards[num_microbatches - num_ahead :]]
