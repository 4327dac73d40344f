"""On one device the strategy changes nothing of what a loader gives: batches, losses and weights
are the plain Trainer's, bit by bit, and a resumed training sees what an uninterrupted one would
have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from quiet import QUIET
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from alpa_strategy import AlpaStrategy

NUM_ROWS = 24
ROWS = TensorDataset(torch.arange(float(NUM_ROWS))[:, None] / NUM_ROWS)


class Recorded(pl.LightningModule):
    """Dropout makes the global random numbers part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen: list[tuple[str, list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        return (self.net(x) - 2 * x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("validate", batch[0].flatten().tolist()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("train", batch[0].flatten().tolist()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Augmented(Dataset):
    """Rows with noise from each of the three global generators."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        noise = torch.randn(1) + numpy.random.random()
        return (ROWS[index][0] + 0.01 * noise.float(),)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        for index in torch.randperm(NUM_ROWS):
            yield (ROWS[int(index)][0],)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return shuffled()

    def val_dataloader(self) -> DataLoader:
        return DataLoader(ROWS, batch_size=8, shuffle=True)


def shuffled(**arguments: Any) -> DataLoader:
    return DataLoader(ROWS, **{"batch_size": 4, "shuffle": True, **arguments})


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: shuffled(shuffle=False),
    "shuffled": shuffled,
    "a smaller last batch": lambda: shuffled(batch_size=5),
    "last batch dropped": lambda: shuffled(batch_size=5, drop_last=True),
    "generator of its own": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "random sampler with replacement": lambda: shuffled(
        shuffle=False, sampler=RandomSampler(ROWS, replacement=True, num_samples=12)
    ),
    "weighted": lambda: shuffled(
        shuffle=False, sampler=WeightedRandomSampler(torch.arange(24.0) + 1, 16)
    ),
    "subset": lambda: shuffled(shuffle=False, sampler=SubsetRandomSampler(range(0, 24, 2))),
    "batch sampler": lambda: DataLoader(
        ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 4, drop_last=False)
    ),
    "augmented": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "worker": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
}
TRAINERS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 2},
    "overfitted": {"overfit_batches": 2},
    "limited": {"limit_train_batches": 3},
    "loaders made anew": {"reload_dataloaders_every_n_epochs": 1},
    "validated often": {"val_check_interval": 2},
    "no sampler asked for": {"use_distributed_sampler": False},
}


def fit(strategy: str, root: str, loader: str, more: dict[str, Any], **given: Any) -> Recorded:
    """Two epochs on one device."""
    pl.seed_everything(3, verbose=False)
    chosen: Any = "auto"
    if strategy == "alpa":
        chosen = AlpaStrategy(cluster="pcie_8gpu", plan_dir=f"{root}/plans", verbose=False)
    module = Recorded()
    defaults = {"max_epochs": 2, "default_root_dir": root, **QUIET}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=chosen, **{**defaults, **more})
    data = Data() if loader == "datamodule" else LOADERS[loader]()
    trainer.fit(module, data, **given)
    return module


def compare(root: str, loader: str, more: dict[str, Any]) -> bool:
    expected, found = (fit(name, root, loader, more) for name in ("auto", "alpa"))
    assert found.seen == expected.seen
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    return True


@pytest.mark.parametrize("loader", [*LOADERS, "datamodule"])
def test_a_loader_gives_what_it_gives_without_the_strategy(pool, tmp_path: Path, loader: str):
    assert pool.run(1, compare, str(tmp_path), loader, {}, init_group=False) == [True]


@pytest.mark.parametrize("arguments", TRAINERS)
def test_under_other_arguments_of_the_trainer(pool, tmp_path: Path, arguments: str):
    more = TRAINERS[arguments]
    loader = "datamodule" if "val_check_interval" in more else "shuffled"
    assert pool.run(1, compare, str(tmp_path), loader, more, init_group=False) == [True]


def resume(root: str, stop: int) -> bool:
    """What the rest of a training sees is what the plain Trainer's whole training saw."""
    expected = fit("auto", root, "shuffled", {})
    first = fit("alpa", root, "shuffled", {"max_steps": stop})
    path = f"{root}/{stop}.ckpt"
    first.trainer.save_checkpoint(path)
    second = fit("alpa", root, "shuffled", {}, ckpt_path=path)
    assert first.seen + second.seen == expected.seen
    for name, value in expected.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    return True


@pytest.mark.parametrize("stop", [1, 3, 6, 7])
def test_a_resumed_training_goes_on_in_the_same_order(pool, tmp_path: Path, stop: int):
    assert pool.run(1, resume, str(tmp_path), stop, init_group=False) == [True]
