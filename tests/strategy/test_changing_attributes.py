"""Attributes that the step reads may change during training: the step is captured again, the
numbers stay eager's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from models import MLP
from quiet import QUIET
from test_training import assert_same, train
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy


class Annealed(MLP):
    """Its loss has a factor that a hook changes, a mask that is changed in place, and a layer that
    is frozen late.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta, self.mask = 0.5, torch.ones(4, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.beta * ((self.net(x) - y) * self.mask).pow(2).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.beta = (0.5, 0.5, 0.8, 0.5)[batch_idx]
        if batch_idx == 3:
            self.mask[0] = 0.0


def run_train(root: str, strategy: dict[str, Any]) -> dict[str, Any]:
    return train(Annealed, root, strategy)


@pytest.mark.parametrize("parallel", ["data", "zero3"])
def test_numbers_and_masks_that_change(pool, tmp_path: Path, parallel: str) -> None:
    reference = train(Annealed, str(tmp_path), None)
    for run in pool.run(2, run_train, str(tmp_path), {"parallel": parallel}):
        assert_same(run, reference)


class Ramp(pl.Callback):
    """Its factor changes, beside a function: no record of plain values."""

    def __init__(self) -> None:
        self.shape, self.factor = float, 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.factor = self.shape(trainer.global_step + 1)


class Ramped(MLP):
    """Its loss, and a log, take the factor from the callback, by way of the Trainer."""

    def configure_callbacks(self) -> list[pl.Callback]:
        return [Ramp()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = next(
            callback for callback in self.trainer.callbacks if isinstance(callback, Ramp)
        ).factor
        self.log("factor", factor)
        return factor * super().training_step(batch, batch_idx)


def run_ramped(root: str) -> dict[str, Any]:
    return train(Ramped, root, {})


def test_what_other_objects_hold_may_change(pool, tmp_path: Path) -> None:
    reference = train(Ramped, str(tmp_path), None)
    for run in pool.run(2, run_ramped, str(tmp_path)):
        assert_same(run, reference)


class Refitted(MLP):
    """Hooks change what torch's layers do, are, and call; the step says in which phase it is, as
    does a validation.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.phase = ""
        self.pool = torch.nn.AvgPool1d(1, 1)
        self.phases = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.phase = "train"
        x, y = batch
        loss = self.pool(self.net(x)).sub(y[:, :1]).pow(2).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.phase = "validate"

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(4, 1), 2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step, first = (
            self.global_step,
            next(each for each in self.net.modules() if isinstance(each, torch.nn.Linear)),
        )
        if step == 1:
            self.pool.kernel_size, self.pool.stride = 2, 2
        if step == 2:
            first.register_forward_hook(lambda module, args, output: 0.5 * output)
        if step == 3:
            first.forward = lambda x: torch.nn.functional.linear(x, 2.0 * first.weight, first.bias)

    def on_train_batch_end(self, *_: Any) -> None:
        self.phases.append(self.phase)

    def on_train_end(self) -> None:
        assert set(self.phases) == {"train"}


def run_refitted(root: str) -> dict[str, Any]:
    return train(Refitted, root, {}, val_check_interval=2)


class Grown(MLP):
    """A layer gets a successor, and another one is put behind it, while it trains."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        last, generator = len(self.net) - 1, torch.Generator().manual_seed(5)
        if self.global_step in (1, 2):
            old = self.net[last]
            new = torch.nn.Linear(
                old.out_features if self.global_step == 2 else old.in_features, old.out_features
            )
            with torch.no_grad():
                new.weight.copy_(
                    torch.randn(new.weight.shape, generator=generator, dtype=torch.float64)
                )
                new.bias.zero_()
            if self.global_step == 1:
                self.net[last] = new.double()
            else:
                self.net.append(new.double())
            self.trainer.optimizers[0].add_param_group({"params": list(new.parameters())})


def run_grown(root: str) -> dict[str, Any]:
    return train(Grown, root, {})


def test_layers_that_are_replaced_and_added_are_trained(pool, tmp_path: Path) -> None:
    reference = train(Grown, str(tmp_path), None)
    for run in pool.run(2, run_grown, str(tmp_path)):
        assert_same(run, reference)


def test_what_hooks_do_to_layers_of_torch_counts(pool, tmp_path: Path) -> None:
    reference = train(Refitted, str(tmp_path), None, val_check_interval=2)
    for run in pool.run(2, run_refitted, str(tmp_path)):
        assert_same(run, reference)


class ChangesOnOneRank(MLP):
    """Multiplies its loss by a number that one rank changes."""

    beta = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.beta * super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 2:
            self.beta = 0.5


def change_on_one_rank(root: str) -> None:
    model = ChangesOnOneRank()
    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, capture="require")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        default_root_dir=root,
        **QUIET,
    )
    trainer.fit(model, DataLoader(TensorDataset(*model.example_batch(64)), batch_size=4))


def test_a_change_on_one_rank_only_is_an_error(pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as error:
        pool.run(2, change_on_one_rank, str(tmp_path))
    text = str(error.value)
    assert (
        "the ranks differ in the computation of training_step: rank 0: "
        "aten.mul.Tensor(Slot(index=0), 1.0)" in text
    )
    assert "rank 1: aten.mul.Tensor(Slot(index=0), 0.5)" in text
