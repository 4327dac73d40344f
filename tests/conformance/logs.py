"""Behaviours of logging: `self.log` with every argument, dicts, torchmetrics objects, loggers,
printing.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from conformance.bench import Bench, Mean, Net
from lightning.pytorch.loggers import CSVLogger


class Everything(pl.Callback):
    """All metrics of the Trainer after every batch and epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, dict[str, float]]] = []

    def _look(self, trainer: pl.Trainer, *unused: Any) -> None:
        kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        metrics = {}
        for kind in kinds:
            metrics[kind] = {name: float(v) for name, v in getattr(trainer, kind).items()}
        self.seen.append(metrics)

    on_train_batch_end = on_train_epoch_end = on_validation_end = _look


def fit_and_look(bench: Bench, kind: type[Net], **arguments: Any) -> Any:
    seen = Everything()
    outcome = bench.fit(
        kind, callbacks=[seen], log_every_n_steps=2, **{"max_epochs": 2, **arguments}
    )
    return {**outcome, "seen": seen.seen}


def log_with_every_argument(bench: Bench) -> Any:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self.net(x)
            loss = F.mse_loss(prediction, y)
            self.log("plain", loss, sync_dist=True)
            self.log("step", loss, on_step=True, on_epoch=False, prog_bar=True, sync_dist=True)
            self.log("epoch", loss, on_step=False, on_epoch=True, logger=False, sync_dist=True)
            self.log("both", loss, on_step=True, on_epoch=True, batch_size=len(x), sync_dist=True)
            self.log("weighted", loss, on_epoch=True, batch_size=1 + batch_idx % 2, sync_dist=True)
            self.log("number", 2.5, prog_bar=True, on_step=True, on_epoch=True)
            self.log("integer", torch.tensor(3), on_step=True, on_epoch=False)
            self.log("group/name", loss.detach() * 2, sync_dist=True, enable_graph=False)
            self.log("main", loss, rank_zero_only=False, add_dataloader_idx=False, sync_dist=True)
            return loss

    return fit_and_look(bench, Logs)


def log_with_a_number_of_the_batch(bench: Bench) -> Any:
    class Counted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.mse_loss(self.net(batch["x"]), batch["y"])
            self.log("train_loss", loss, on_epoch=True, sync_dist=True, batch_size=batch["rows"])
            return loss

    def collate(samples: list[Any]) -> dict[str, Any]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y), "rows": len(samples)}

    module, trainer = bench.module(Counted), bench.trainer()
    trainer.fit(module, bench.loader(collate_fn=collate))
    return bench.outcome(trainer, module)


def log_reduced_over_an_epoch(bench: Bench) -> Any:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = F.mse_loss(self.net(x), y)
            for name in ("min", "max", "sum", "mean"):
                self.log(name, loss, on_step=True, on_epoch=True, reduce_fx=name, sync_dist=True)
            self.log(
                "function", loss, on_step=False, on_epoch=True, reduce_fx=torch.max, sync_dist=True
            )
            return loss

    return fit_and_look(bench, Logs)


def logs_of_validation(bench: Bench) -> Any:
    class Logs(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            rows = F.mse_loss(self.net(x), y, reduction="none").mean(1)
            loss = rows.mean()
            # What is logged is the global batch's: it is DDP's where the step reduces rows as
            # `reduce_fx` does ranks.
            for name in ("min", "max", "sum", "mean"):
                self.log(name, getattr(rows, name)(), reduce_fx=name, sync_dist=True)
            self.log(
                "on_step", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(x)
            )
            self.log_dict({"a": loss, "b": 2 * loss}, prog_bar=True, logger=False, sync_dist=True)
            self.log("number", float(batch_idx), sync_dist=True)

    return fit_and_look(bench, Logs, validate=True)


def logs_of_one_rank(bench: Bench) -> Any:
    """Without `sync_dist` DDP logs what each rank sees, and alpa the mean over the ranks when the
    loader ends.
    """
    results = []

    class Logs(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("own", F.mse_loss(self.net(batch[0]), batch[1]))
            self.log("first", float(self.global_rank + 1), rank_zero_only=True)

        def on_validation_epoch_end(self) -> None:
            results.append(sorted(self.trainer.callback_metrics))

    outcome = bench.fit(Logs, validate=True)
    return {**outcome, "metrics": Mean(outcome["metrics"]), "found": results}


def logs_of_hooks(bench: Bench) -> Any:
    class Logs(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("start", float(batch_idx))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.log("rate", optimizer.param_groups[0]["lr"])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("end", outputs["loss"], on_epoch=True, sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.log_dict({"epoch_end": 1.0 + self.current_epoch})

    return fit_and_look(bench, Logs)


def log_dict(bench: Bench) -> Any:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = F.mse_loss(self.net(x), y)
            values = {"loss": loss, "half": loss / 2, "one": 1}
            self.log_dict(values, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
            return loss

    return fit_and_look(bench, Logs)


class Measured(Net):
    """Metric objects in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.train_error = torchmetrics.MeanSquaredError()
        self.val_error = torchmetrics.MeanSquaredError()
        self.train_all = torchmetrics.MetricCollection(
            {"mae": torchmetrics.MeanAbsoluteError(), "worst": torchmetrics.MaxMetric()},
            prefix="train_",
        )
        self.val_all = self.train_all.clone(prefix="val_")
        self.set_dtype()

    def set_dtype(self) -> None:
        for metric in self.modules():
            if isinstance(metric, torchmetrics.Metric):
                metric.set_dtype(torch.float64)


def metric_objects(bench: Bench) -> Any:
    class Logs(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self.net(x)
            self.train_error(prediction, y)
            self.log("train_error", self.train_error, on_step=True, on_epoch=True)
            self.train_all["mae"].update(prediction, y)
            self.log("mae", self.train_all["mae"], on_epoch=True)
            return F.mse_loss(prediction, y)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.val_error.update(self.net(x), y)
            self.log("val_error", self.val_error, metric_attribute="val_error")

    return fit_and_look(bench, Logs, validate=True)


def metric_collections(bench: Bench) -> Any:
    class Logs(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.train_all = torchmetrics.MetricCollection(
                [torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()], prefix="train_"
            )
            self.val_all = self.train_all.clone(prefix="val_")
            self.set_dtype()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self.net(x)
            self.train_all.update(prediction, y)
            self.log_dict(self.train_all, on_step=False, on_epoch=True)
            return F.mse_loss(prediction, y)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.val_all.update(self.net(x), y)

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.val_all.compute())
            self.val_all.reset()

    return fit_and_look(bench, Logs, validate=True)


def metrics_computed_by_hand(bench: Bench) -> Any:
    class Logs(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self.net(x)
            self.train_error.update(prediction, y)
            return F.mse_loss(prediction, y)

        def on_train_epoch_end(self) -> None:
            self.log("train_error", self.train_error.compute())
            self.train_error.reset()

    return fit_and_look(bench, Logs)


def metrics_that_keep_rows(bench: Bench) -> Any:
    class Logs(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.rank_order = torchmetrics.SpearmanCorrCoef(num_outputs=4)
            self.set_dtype()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self.net(x)
            self.rank_order.update(prediction, y)
            return F.mse_loss(prediction, y)

        def on_train_epoch_end(self) -> None:
            self.log("rank_order", self.rank_order.compute().mean())
            self.rank_order.reset()

    return fit_and_look(bench, Logs, max_epochs=2)


def csv_logger(bench: Bench) -> Any:
    class Logs(Net):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics({"by_hand": 2.0 * self.current_epoch}, step=self.global_step)

    trainer = bench.trainer(
        logger=CSVLogger(bench.root, name="logs"), max_epochs=3, log_every_n_steps=1
    )
    module = bench.module(Logs)
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    text = (
        (bench.root / "logs/version_0/metrics.csv").read_text() if trainer.is_global_zero else "\n"
    )
    header, *lines = (line.split(",") for line in text.splitlines())
    rows = []
    for line in lines:
        rows.append({k: float(v) for k, v in zip(header, line, strict=True) if v})
    hparams = (
        (bench.root / "logs/version_0/hparams.yaml").read_text() if trainer.is_global_zero else ""
    )
    return bench.outcome(trainer, module, rows=rows, hparams=hparams, files=bench.files())


def printing(bench: Bench) -> Any:
    class Prints(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.print("in the step")
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.print("after the epoch")

    return bench.fit(Prints)
