"""Values of the Trainer that the step reads are guarded; a step that changes any is refused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from capture.test_globals_and_closures import Model, changed

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.capture.python_reads import numbers_now
from alpa_strategy.errors import CaptureError


def of_a_trainer(model: Model) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=True
    )
    trainer.strategy.connect(model)
    model.trainer = trainer
    return trainer


class Counts(pl.Callback):
    count = 0


@pytest.mark.parametrize("what", ["should_stop", "callbacks"])
def test_a_step_that_changes_something_of_the_trainer_is_refused(what: str) -> None:
    class Changes(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if what == "should_stop":
                self.trainer.should_stop = True
            else:
                self.trainer.callbacks[-1].count += 1
            return super().training_step(batch, batch_idx)

    model = Changes()
    trainer = of_a_trainer(model)
    trainer.callbacks.append(Counts())
    with pytest.raises(CaptureError, match=f"trainer.{what}"):
        capture_step(model, torch.randn(6, 4))
    assert (trainer.should_stop, trainer.callbacks[-1].count) == (False, 0)


def test_what_the_trainer_does_not_have_yet_is_guarded() -> None:
    model = Model(
        lambda model, loss: (
            loss * getattr(model.trainer, "factor", 1.0) + model.trainer.strategy.warmth
        )
    )
    trainer = of_a_trainer(model)
    trainer.strategy.warmth = 1.0
    for owner, name in ((trainer, "factor"), (trainer.strategy, "warmth")):
        step = capture_step(model, torch.randn(6, 4))
        assert changed(model, step) is None
        setattr(owner, name, 2.0)
        assert name in str(changed(model, step))


def test_a_step_that_changes_its_dataset_is_refused() -> None:
    class Rows(torch.utils.data.TensorDataset):
        epoch = 0

    class Changes(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trainer.train_dataloader.dataset.epoch += 1
            return super().training_step(batch[0], batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    refused: list[CaptureError] = []

    class Tries(pl.Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int
        ) -> None:
            with pytest.raises(CaptureError, match="the dataset") as error:
                capture_step(module, batch)
            refused.append(error.value)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        callbacks=[Tries()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    rows = Rows(torch.randn(6, 4))
    trainer.fit(Changes(), torch.utils.data.DataLoader(rows, batch_size=6))
    assert refused
    assert rows.epoch == 1  # Lightning's own step


def test_values_of_the_trainer_are_guarded() -> None:
    class Reads(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return (
                loss * 2 if self.trainer.should_stop or self.trainer.fit_loop.restarting else loss
            )

    model = Reads()
    trainer = of_a_trainer(model)
    step = capture_step(model, torch.randn(6, 4))
    assert changed(model, step) is None
    trainer.fit_loop._restarting = True
    assert "fit_loop.restarting" in str(changed(model, step))
    trainer.fit_loop._restarting = False
    trainer.should_stop = True
    assert "should_stop" in str(changed(model, step))


def test_numbers_of_optimizers_are_inputs() -> None:
    class Reads(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            group = self.optimizers().param_groups[0]
            self.log("rate", group["lr"])
            momentum = self.trainer.optimizers[0].param_groups[0].get("momentum")
            return super().training_step(batch, batch_idx) * momentum

    model = Reads()
    trainer = of_a_trainer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    trainer.optimizers = [optimizer]
    step = capture_step(model, torch.randn(6, 4))
    optimizer.param_groups[0]["lr"] = 0.05
    assert numbers_now(step.numbers, model, None) == {
        "optimizers[0].param_groups[0]['lr']": 0.05,
        "optimizers[0].param_groups[0]['momentum']": 0.5,
    }
    assert changed(model, step) is None
    assert str(step.logs[0].value) == "optimizers[0].param_groups[0]['lr']"


@pytest.mark.parametrize(
    "read",
    [
        lambda optimizer: optimizer.step(),
        lambda optimizer: optimizer.state,
        lambda optimizer: optimizer.param_groups[0]["params"],
        lambda optimizer: optimizer.param_groups[0].update(lr=0.1),
        lambda optimizer: optimizer.param_groups[0].__setitem__("lr", 0.1),
    ],
)
def test_what_else_optimizers_have_is_refused(read: Any) -> None:
    class Reads(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            read(self.optimizers())
            return super().training_step(batch, batch_idx)

    model = Reads()
    of_a_trainer(model).optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    with pytest.raises(CaptureError):
        capture_step(model, torch.randn(6, 4))
