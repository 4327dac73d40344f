"""Behaviours of validation, testing and prediction."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from conformance.bench import ROWS, Bench, Net
from lightning.pytorch.callbacks import BasePredictionWriter


def validate_test_predict_after_fit(bench: Bench) -> Any:
    module, trainer = bench.module(), bench.trainer(max_epochs=2)
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    outcome = bench.outcome(trainer, module)
    validated = trainer.validate(module, bench.evaluation_loader(16, 4), verbose=False)
    tested = trainer.test(module, bench.evaluation_loader(16, 5), verbose=False)
    return {
        **outcome,
        "validated": validated,
        "tested": tested,
        "predicted": trainer.predict(module, bench.evaluation_loader(16, 6)),
    }


def evaluation_without_fit(bench: Bench) -> Any:
    module, trainer = bench.module(), bench.trainer()
    validated = trainer.validate(module, bench.evaluation_loader(16, 4), verbose=False)
    tested = trainer.test(module, bench.evaluation_loader(16, 5), verbose=False)
    predicted = trainer.predict(module, bench.evaluation_loader(16, 6))
    return {"validated": validated, "tested": tested, "predicted": predicted}


def several_validation_loaders(bench: Bench) -> Any:
    class Several(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            x, y = batch
            loss = F.mse_loss(self(x), y)
            self.log("val_loss", loss, sync_dist=True)
            self.log(f"own_{dataloader_idx}", loss * 2, sync_dist=True, add_dataloader_idx=False)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"dataloader": dataloader_idx, "batch": batch_idx, "prediction": self(batch[0])}

    module, trainer = bench.module(Several), bench.trainer()
    trainer.fit(
        module, bench.loader(), [bench.evaluation_loader(16, 4), bench.evaluation_loader(24, 5)]
    )
    outcome = bench.outcome(trainer, module)
    tested = trainer.test(
        module, [bench.evaluation_loader(16, 4), bench.evaluation_loader(8, 5)], verbose=False
    )
    predicted = trainer.predict(
        module, [bench.evaluation_loader(16, 4), bench.evaluation_loader(8, 5)]
    )
    return {**outcome, "tested": tested, "predicted": predicted}


def nested_predictions(bench: Bench) -> Any:
    class Nested(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            y = self(batch[0])
            return {
                "best": y.argmax(1),
                "all": [y, (y.softmax(1), batch_idx)],
                "first": batch[0][0],
                "none": None,
            }

    module, trainer = bench.module(Nested), bench.trainer()
    trainer.fit(module, bench.loader())
    return bench.outcome(
        trainer, module, predicted=trainer.predict(module, bench.evaluation_loader(20, 6))
    )


def prediction_writer(bench: Bench) -> Any:
    seen: list[Any] = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(
            self,
            trainer: Any,
            pl_module: Any,
            prediction: Any,
            batch_indices: Any,
            batch: Any,
            *index: int,
        ) -> None:
            seen.append((prediction.clone(), list(batch_indices), index))

        def write_on_epoch_end(
            self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
        ) -> None:
            seen.append((len(predictions), [list(b) for b in batch_indices]))

    module, trainer = bench.module(), bench.trainer(callbacks=[Writer("batch_and_epoch")])
    trainer.fit(module, bench.loader())
    trainer.predict(module, bench.evaluation_loader(20, 6), return_predictions=False)
    return {"seen": seen}


def outputs_reach_the_hooks(bench: Bench) -> Any:
    class Collects(Net):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            error = (self(x) - y).square().mean(1)
            self.outputs.append(error)
            return {"error": error, "rows": len(x)}

        def on_validation_batch_end(
            self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            assert outputs["error"].shape == (outputs["rows"],)

        def on_validation_epoch_end(self) -> None:
            everything = self.all_gather(torch.cat(self.outputs))
            self.log("val_loss", everything.mean(), rank_zero_only=False)
            self.log("val_worst", everything.max())
            self.outputs.clear()

    module, trainer = bench.module(Collects), bench.trainer(max_epochs=2)
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    outcome = bench.outcome(trainer, module)
    return {
        **outcome,
        "validated": trainer.validate(module, bench.evaluation_loader(16, 4), verbose=False),
    }


def smaller_last_evaluation_batch(bench: Bench) -> Any:
    module, trainer = bench.module(), bench.trainer()
    trainer.fit(module, bench.loader(), bench.evaluation_loader(22, 4))
    outcome = bench.outcome(trainer, module)
    return {**outcome, "predicted": trainer.predict(module, bench.evaluation_loader(22, 6))}


def values_that_python_needs(bench: Bench) -> Any:
    """Evaluation steps may do what no graph can hold."""

    class Looks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            error = F.mse_loss(self(x), y).item()
            self.log("val_loss", error if error > 0 else 0.0, sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]).numpy().tolist()

    module, trainer = bench.module(Looks), bench.trainer(max_epochs=2)
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    outcome = bench.outcome(trainer, module)
    return {**outcome, "predicted": trainer.predict(module, bench.evaluation_loader(16, 6))}


def training_mode_comes_back(bench: Bench) -> Any:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5)).eval()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((self.frozen(batch[0]), batch[1]), batch_idx)

    class Modes(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[bool] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *unused: Any) -> None:
            self.seen += [pl_module.training, pl_module.frozen.training]

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.seen += [pl_module.training, pl_module.frozen.training]

    modes = Modes()
    return {
        **bench.fit(Frozen, validate=True, val_check_interval=2, callbacks=[modes]),
        "modes": modes.seen,
    }


def outputs_kept_in_lists(bench: Bench) -> Any:
    """As Lightning's guides write it: steps append to lists of the module, epochs' ends read and
    clear them.
    """

    class Keeps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.training_step_outputs: list[Any] = []
            self.validation_step_outputs: dict[int, list[Any]] = {0: [], 1: []}
            self.rows: dict[str, list[Any]] = defaultdict(list)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.training_step_outputs.append(loss)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("train_mean", torch.stack(self.training_step_outputs).mean(), sync_dist=True)
            self.training_step_outputs.clear()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            x, y = batch
            prediction = self(x)
            loss = F.mse_loss(prediction, y)
            self.validation_step_outputs[dataloader_idx].append({"loss": loss, "batch": batch_idx})
            self.rows[f"errors_{dataloader_idx}"] += [prediction - y]
            return loss

        def on_validation_epoch_end(self) -> None:
            for number, outputs in self.validation_step_outputs.items():
                assert [o["batch"] for o in outputs] == list(range(len(outputs)))
                assert all(len(e) == ROWS for e in self.rows[f"errors_{number}"])
                mean = torch.stack([o["loss"] for o in outputs]).mean()
                self.log(f"val_mean_{number}", mean, sync_dist=True)
                errors = self.all_gather(torch.cat(self.rows[f"errors_{number}"]))
                self.log(f"val_worst_{number}", errors.abs().max())
                outputs.clear()
            self.rows.clear()

    module, trainer = bench.module(Keeps), bench.trainer(max_epochs=2)
    trainer.fit(
        module, bench.loader(), [bench.evaluation_loader(16, 4), bench.evaluation_loader(24, 5)]
    )
    return bench.outcome(trainer, module)


def sums_and_counts_of_outputs(bench: Bench) -> Any:
    """A rank's hooks see the sums over its local samples, and how many they are."""

    class Sums(Net):
        def __init__(self) -> None:
            super().__init__()
            self.sums: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            error = (self(x) - y).square().sum()
            self.sums.append((error, len(x)))
            return {"error": error, "rows": len(x), "scaled": F.mse_loss(self(x), y) * len(x)}

        def on_validation_epoch_end(self) -> None:
            error, rows = (sum(column) for column in zip(*self.sums, strict=True))
            self.log("val_mean", error / rows, sync_dist=True)
            self.log("val_sum", error, sync_dist=True, reduce_fx="sum")
            self.sums.clear()

    return bench.fit(Sums, validate=True, max_epochs=2)


def outputs_in_pieces(bench: Bench) -> Any:
    """A list of the batch's rows holds this rank's."""
    seen: list[Any] = []

    class Pieces(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            prediction = self(batch[0])
            return {"rows": list(prediction), "half": prediction.chunk(2), "number": batch_idx + 1}

        def on_validation_batch_end(
            self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            seen.append(outputs)

    return {**bench.fit(Pieces, validate=True), "seen": seen}
