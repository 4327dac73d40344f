"""A rank that has no batch of a dataloader, in an evaluation of several: an error on all ranks
instead of a hang.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from jobs import run_job
from models import MLP
from quiet import QUIET
from torch.utils.data import DataLoader, IterableDataset
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy
from alpa_strategy.errors import RuntimeMismatchError

SECOND = ((2, 2, 1), (2, 0, 1))  # rows in each loader, by rank
FIRST = ((1, 2), (0, 2))


class Rows(IterableDataset):
    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self):
        return iter(torch.ones(self.number, 8))


class Logging(MLP):
    def __init__(self, sync: bool) -> None:
        super().__init__(d_in=8, d_out=8)
        self.sync = sync

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("loss", self.net(batch).square().mean(), sync_dist=self.sync)


def evaluate(root: str, rows: tuple, sync: bool, limit: float, trains: bool) -> list[str] | str:
    """Names of what was logged on this rank, or the error."""
    strategy = AlpaStrategy(
        cluster="pcie_8gpu", parallel="zero3", memory_limit=limit, plan_dir=root, verbose=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        num_sanity_val_steps=0,
        max_epochs=1,
        default_root_dir=root,
        **QUIET,
    )
    model = Logging(sync)
    loaders = [DataLoader(Rows(number)) for number in rows[torch.distributed.get_rank()]]
    try:
        if trains:
            trainer.fit(model, DataLoader(torch.ones(4, 8)), loaders)
        else:
            trainer.validate(model, loaders, verbose=False)
    except RuntimeMismatchError as error:
        return error.problem
    return sorted(trainer.callback_metrics)


@pytest.mark.parametrize("trains", [False, True], ids=["validate", "fit"])
@pytest.mark.parametrize(("rows", "loader"), [(SECOND, 1), (FIRST, 0)], ids=["second", "first"])
def test_a_rank_without_a_batch_of_a_loader(
    pool, tmp_path, rows: tuple, loader: int, trains: bool
) -> None:
    """Nothing is synchronised: as under DDP. Otherwise every rank says who lacks what."""
    args = (str(tmp_path), rows)
    names = pool.run(2, evaluate, *args, False, float("inf"), trains)
    assert [f"loss/dataloader_idx_{loader}" in found for found in names] == [True, False]
    for found in pool.run(2, evaluate, *args, True, float("inf"), trains):
        assert (
            found
            == f"ranks [1] have no batch of dataloader {loader} in this evaluation, the others have"
        )


def test_a_rank_without_a_batch_where_parameters_are_gathered_for_use(pool, tmp_path) -> None:
    names = pool.run(2, evaluate, str(tmp_path), FIRST, False, 1e3, False)
    assert ["loss/dataloader_idx_0" in found for found in names] == [True, False]


class Streams(IterableDataset):
    """A rank's own stream: rank 0 has one batch more."""

    def __iter__(self):
        return iter(torch.ones(3 - torch.distributed.get_rank(), 8))


def train_unevenly(root: str, parallel: str, max_steps: int) -> Any:
    """The steps that were made, or the error."""
    strategy = AlpaStrategy(cluster="pcie_8gpu", parallel=parallel, plan_dir=root, verbose=False)
    epochs = 1 if max_steps == -1 else -1
    steps = {"max_epochs": epochs, "max_steps": max_steps}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, default_root_dir=root, **steps, **QUIET
    )
    try:
        trainer.fit(Logging(sync=False), DataLoader(Streams()))
    except RuntimeMismatchError as error:
        return error.problem
    return trainer.global_step


@pytest.mark.parametrize("parallel", ["data", "zero3"])
def test_a_rank_without_a_training_batch_ends_the_run_on_all(pool, tmp_path, parallel: str) -> None:
    per_rank = pool.run(2, train_unevenly, str(tmp_path), parallel, -1, timeout=60)
    assert per_rank == ["some ranks have no more training batches, others have"] * 2


def test_streams_of_other_lengths_train_for_as_many_steps(pool, tmp_path) -> None:
    assert pool.run(2, train_unevenly, str(tmp_path), "data", 7) == [7, 7]


SCRIPT = """
import sys
import lightning.pytorch as pl
from torch.utils.data import DataLoader
import torch
from quiet import QUIET
from strategy.test_missing_batches import Logging, Rows
from alpa_strategy import AlpaStrategy

class Ends(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.strategy.barrier()

strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, collective_timeout_seconds=1000)
callbacks = [Ends()] if sys.argv[1] == "epoch" else []
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_steps=9, callbacks=callbacks, **QUIET
)

class Uneven(Logging):
    def train_dataloader(self):
        return DataLoader(Rows(3 - self.global_rank))

    def val_dataloader(self):
        return DataLoader(Rows(2)) if sys.argv[1] == "evaluation" else []

trainer.fit(Uneven(sync=True))
"""


class Uneven(Logging):
    """Rank 1 comes to its evaluation a training batch sooner."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(3 - self.global_rank))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Rows(2))


def train_to_an_evaluation(root: str) -> None:
    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, collective_timeout_seconds=1000)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=9,
        default_root_dir=root,
        **QUIET,
    )
    trainer.fit(Uneven(sync=True))


def test_a_rank_of_the_pool_that_waits_for_others_that_train(pool, tmp_path) -> None:
    text = "rank 1 is at an evaluation, where it needs all ranks: others still train"
    with pytest.raises(WorkerError, match=text):
        pool.run(2, train_to_an_evaluation, str(tmp_path), timeout=60)


# By default ranks of the pool do, in the test above.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "said"), [("epoch", "the end of an epoch"), ("evaluation", "an evaluation")]
)
def test_a_rank_that_waits_between_batches_for_others_that_train(
    tmp_path, where: str, said: str
) -> None:
    """DDP's ranks wait for each other there until the process group's timeout."""
    job = run_job(tmp_path, SCRIPT, where)
    assert job.returncode
    assert (
        f"RuntimeMismatchError: rank 1 is at {said}, where it needs all ranks: others still train"
        in job.stderr
    )
