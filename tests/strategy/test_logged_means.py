"""Logged values over ranks with unequal numbers of samples: means weigh every sample alike, in
training, validation and test, captured or not; all else is DDP's.

DDP itself rounds the average of batch sizes down (Lightning #21859), so means are compared with
what the samples give; sums, extremes and values of steps with DDP's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from covering import slow_but
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from alpa_strategy import AlpaStrategy

Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # samples of every batch of either rank
SIZES: dict[str, Sizes] = {
    "one and two": ((1,), (2,)),
    "seven and eight": ((4, 3), (4, 4)),
    "equal": ((3, 3), (3, 3)),
    "equal with a short last batch": ((4, 4, 1), (4, 4, 1)),
    "all differ": ((5, 1, 2), (3, 3, 1)),
}


def samples(sizes: Sizes, rank: int) -> list[torch.Tensor]:
    """The batches of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.rand(n, 4, generator=generator, dtype=torch.float64) for n in sizes[rank]]


class Batches(IterableDataset):
    def __init__(self, sizes: Sizes, rank: int) -> None:
        self.sizes, self.rank = sizes, rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from samples(self.sizes, self.rank)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1, dtype=torch.float64)
        self.mean_metric = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.on_steps: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        value = batch[:, 0].mean()
        self.log("train/mean", value, on_step=False, on_epoch=True, sync_dist=True)
        self.log("train/fork", value, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train/const", 0.25, on_step=False, on_epoch=True, sync_dist=True)
        self.log(
            "train/by_batch", value, on_step=False, on_epoch=True, sync_dist=True, batch_size=1
        )
        return self.net(batch).pow(2).mean()

    def _evaluate(self, stage: str, batch: torch.Tensor) -> None:
        values = batch[:, 0]
        mean = values.mean()
        self.log(f"{stage}/mean", mean, sync_dist=True)
        self.log(f"{stage}/sized", mean, sync_dist=True, batch_size=len(batch))
        self.log(f"{stage}/by_batch", mean, sync_dist=True, batch_size=1)
        self.log(f"{stage}/by_rank", mean, sync_dist=True, batch_size=1 + 4 * self.global_rank)
        self.log(f"{stage}/fork", mean, sync_dist=True, on_step=True, on_epoch=True)
        self.log(f"{stage}/const", 0.25, sync_dist=True)
        self.log_dict({f"{stage}/dict": mean, f"{stage}/three": 3}, sync_dist=True)
        self.log(f"{stage}/float32", mean.float(), sync_dist=True)
        self.log(f"{stage}/plain", mean)
        for name in ("sum", "min", "max"):
            self.log(f"{stage}/{name}", mean, sync_dist=True, reduce_fx=name)
        self.mean_metric.update(values)
        self.log(f"{stage}/metric", self.mean_metric, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def run(root: str, sizes: Sizes, options: dict[str, Any] | None) -> dict[str, Any]:
    """What is logged in a training with a validation, and in a test; what callbacks watch."""
    strategy: Any = "ddp"
    if options is not None:
        strategy = AlpaStrategy(cluster="pcie_8gpu", plan_dir=f"{root}/plans", **options)
    best = ModelCheckpoint(f"{root}/best", monitor="val/mean", enable_version_counter=False)
    stopping = EarlyStopping("val/mean", patience=3)
    arguments = {**QUIET, "enable_checkpointing": True, "default_root_dir": root}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        callbacks=[best, stopping],
        **arguments,
    )
    torch.manual_seed(0)
    net = Net()
    loader = DataLoader(Batches(sizes, int(os.environ["LOCAL_RANK"])), batch_size=None)
    trainer.fit(net, loader, loader)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(net, loader, verbose=False)
    found |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {**found, "best": float(best.best_model_score), "stops": float(stopping.best_score)}


def true_means(sizes: Sizes) -> dict[str, float]:
    """What means are, by the samples."""
    batches = [(rank, batch[:, 0]) for rank in (0, 1) for batch in samples(sizes, rank)]
    means = torch.stack([values.mean() for _, values in batches])
    by_sample = torch.cat([values for _, values in batches]).mean()
    by_rank = torch.tensor([1.0 + 4 * rank for rank, _ in batches], dtype=torch.float64)
    found: dict[str, Any] = {"best": by_sample, "stops": by_sample}
    for stage in ("val", "test"):
        names = ("mean", "sized", "fork", "fork_epoch", "dict", "float32", "plain", "metric")
        found |= {f"{stage}/{name}": by_sample for name in names}
        found[f"{stage}/by_batch"] = means.mean()
        found[f"{stage}/by_rank"] = (means * by_rank).sum() / by_rank.sum()
        found |= {f"{stage}/const": 0.25, f"{stage}/three": 3.0}
    found |= {"train/mean": by_sample, "train/fork_epoch": by_sample, "train/const": 0.25}
    found["train/by_batch"] = means.mean()
    return {name: float(value) for name, value in found.items()}


def run_all(root: str, name: str) -> list[dict[str, Any]]:
    results = []
    for number, options in enumerate((None, {}, {"capture": "never"}, {"parallel": "zero3"})):
        results.append(run(f"{root}/{number}", SIZES[name], options))
    return results


@pytest.mark.parametrize("name", slow_but(SIZES, ("equal with a short last batch", "all differ")))
def test_means_weigh_samples_alike(pool, tmp_path, name: str) -> None:
    expected = true_means(SIZES[name])
    for ddp, *ours in pool.run(2, run_all, str(tmp_path), name, init_group=False, timeout=240):
        for found in ours:
            assert found.keys() == ddp.keys()
            means = {key: found[key] for key in expected}
            assert means == pytest.approx(expected, rel=1e-7), name
            others = found.keys() - expected.keys() - {"train/fork", "train/fork_step"}
            assert {key: found[key] for key in others} == pytest.approx(
                {key: ddp[key] for key in others}, rel=1e-12
            )
