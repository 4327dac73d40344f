"""The worker pool behaves as a job of several ranks, and recovers from failing ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from quiet import QUIET
from worker_pool import WorkerError


def rank_and_sum(value: float) -> tuple[int, float]:
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("the reason")
    dist.barrier()


def never_answer() -> None:
    time.sleep(1000)


def has_group() -> tuple[bool, str]:
    return dist.is_initialized(), os.environ["LOCAL_RANK"]


def test_results_come_in_rank_order(pool):
    assert pool.run(2, rank_and_sum, 2.0) == [(0, 6.0), (1, 6.0)]
    assert pool.run(3, rank_and_sum, 1.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_group_is_left_to_the_function_on_request(pool):
    assert pool.run(2, has_group, init_group=False) == [(False, "0"), (False, "1")]


def train_with_lightning() -> list[float]:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    model = BoringModel()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        limit_val_batches=0,
        **QUIET,
    )
    trainer.fit(model)
    return [trainer.world_size, trainer.global_rank, model.layer.weight.sum().item()]


def test_a_lightning_trainer_finds_its_ranks(pool):
    for _ in range(2):  # workers are used again
        first, second = pool.run(2, train_with_lightning, init_group=False)
        assert (first[:2], second[:2]) == ([2, 0], [2, 1])
        assert first[2] == second[2]


def test_failure_shows_the_cause_and_the_pool_lives_on(pool):
    with pytest.raises(WorkerError, match=r"rank 1 raised[\s\S]*the reason"):
        pool.run(2, fail_on_last_rank)
    assert pool.run(2, rank_and_sum, 1.0) == [(0, 3.0), (1, 3.0)]


def test_timeout_kills_workers_and_the_pool_lives_on(pool):
    with pytest.raises(WorkerError, match="did not answer"):
        pool.run(2, never_answer, timeout=1)
    assert pool.run(1, has_group) == [(True, "0")]
