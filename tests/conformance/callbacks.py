"""Behaviours of Lightning's callbacks and of callbacks that users write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from conformance.bench import Bench, Net
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import profilers
from lightning.pytorch.loggers import CSVLogger


def early_stopping(bench: Bench) -> Any:
    stop = lightning_callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.1)
    outcome = bench.fit(validate=True, max_epochs=10, callbacks=[stop])
    return {**outcome, "stopped": stop.stopped_epoch, "best": float(stop.best_score)}


def early_stopping_on_the_training_loss(bench: Bench) -> Any:
    stop = lightning_callbacks.EarlyStopping(
        "train_loss", patience=0, min_delta=0.05, check_on_train_epoch_end=True
    )
    outcome = bench.fit(max_epochs=10, callbacks=[stop])
    return {**outcome, "stopped": stop.stopped_epoch}


def learning_rate_monitor(bench: Bench) -> Any:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer), "interval": "step"}
            ]

    monitor = lightning_callbacks.LearningRateMonitor(
        "step", log_momentum=True, log_weight_decay=True
    )
    outcome = bench.fit(
        Scheduled, callbacks=[monitor], logger=CSVLogger(bench.root), log_every_n_steps=1
    )
    return {**outcome, "rates": monitor.lrs}


def weight_averaging(bench: Bench) -> Any:
    """The average is validated, saved, and left in the module."""
    average = lightning_callbacks.EMAWeightAveraging(decay=0.8)
    module = bench.module()
    trainer = bench.trainer(max_epochs=2, callbacks=[average])
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    return bench.outcome(trainer, module)


def weight_averaging_resumed(bench: Bench) -> Any:
    def average() -> Any:
        return lightning_callbacks.EMAWeightAveraging(decay=0.8)

    checkpoint = lightning_callbacks.ModelCheckpoint(bench.root / "saved", save_last=True)
    first = bench.trainer(callbacks=[average(), checkpoint], enable_checkpointing=True)
    first.fit(bench.module(), bench.loader())
    module, trainer = bench.module(), bench.trainer(max_epochs=3, callbacks=[average()])
    trainer.fit(
        module,
        bench.loader(),
        bench.evaluation_loader(16, 4),
        ckpt_path=bench.root / "saved/last.ckpt",
        weights_only=False,
    )
    return bench.outcome(trainer, module)


def stochastic_weight_averaging(bench: Bench) -> Any:
    average = lightning_callbacks.StochasticWeightAveraging(
        swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2
    )
    return bench.fit(validate=True, max_epochs=5, callbacks=[average])


def average_by_hand(bench: Bench) -> Any:
    class Averages(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            self.mean = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

        @torch.no_grad()
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
            for name, p in pl_module.named_parameters():
                self.mean[name].lerp_(p, 0.2)

    averages = Averages()
    return {**bench.fit(max_epochs=2, callbacks=[averages]), "mean": averages.mean}


def average_in_the_module(bench: Bench) -> Any:
    """A teacher that is a moving average of the student and takes part in the loss."""

    class Student(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = torch.nn.Sequential(
                torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
            )
            self.teacher.load_state_dict(self.net.state_dict())
            self.teacher.requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with torch.no_grad():
                wanted = self.teacher(x)
            return torch.nn.functional.mse_loss(self.net(x), y + 0.5 * wanted)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", torch.nn.functional.mse_loss(self.teacher(x), y), sync_dist=True)

        @torch.no_grad()
        def on_train_batch_end(self, *unused: Any) -> None:
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=self.lr)

    return bench.fit(Student, validate=True, max_epochs=2)


def average_in_a_submodule_that_is_called(bench: Bench) -> Any:
    """As in latent diffusion: nothing in the hook itself names parameters."""

    class Average(torch.nn.Module):
        def __init__(self, net: torch.nn.Module) -> None:
            super().__init__()
            for name, p in net.named_parameters():
                self.register_buffer(name.replace(".", ""), p.detach().clone())

        @torch.no_grad()
        def forward(self, net: torch.nn.Module) -> None:
            for name, p in net.named_parameters():
                self.get_buffer(name.replace(".", "")).lerp_(p, 0.2)

    class Averaged(Net):
        def __init__(self) -> None:
            super().__init__()
            self.average = Average(self.net)

        def on_train_batch_end(self, *unused: Any) -> None:
            self.average(self.net)

    return bench.fit(Averaged, max_epochs=2)


def weights_changed_and_read_by_a_callback(bench: Bench) -> Any:
    class Clamps(pl.Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        @torch.no_grad()
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
            for p in pl_module.parameters():
                p.clamp_(-0.3, 0.3)
            self.norms.append(float(sum(p.square().sum() for p in pl_module.parameters())))
            self.norms.append(float(pl_module.net[0].weight.norm()))

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
            self.norms.append(float(sum(v.abs().sum() for v in pl_module.state_dict().values())))

    clamps = Clamps()
    return {**bench.fit(max_epochs=2, callbacks=[clamps]), "norms": clamps.norms}


def finetuning(bench: Bench) -> Any:
    class Unfreezes(lightning_callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)

    class Partly(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    trainer = bench.trainer(max_epochs=3, callbacks=[Unfreezes()])
    module = bench.module(Partly)
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    return bench.outcome(trainer, module)


finetuning.reference = (
    "plain"  # DDP does not reduce the gradients of parameters that were frozen at first
)


def gradient_accumulation_scheduler(bench: Bench) -> Any:
    return bench.fit(
        max_epochs=3,
        callbacks=[lightning_callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})],
    )


def progress_bars_and_summaries(bench: Bench) -> Any:
    bars = [
        lightning_callbacks.RichProgressBar(refresh_rate=1),
        lightning_callbacks.RichModelSummary(max_depth=2),
        lightning_callbacks.DeviceStatsMonitor(cpu_stats=True),
    ]
    outcome = bench.fit(
        validate=True,
        callbacks=bars,
        enable_progress_bar=True,
        enable_model_summary=True,
        logger=CSVLogger(bench.root, name="rich"),
    )
    plain = bench.fit(
        validate=True,
        callbacks=[
            lightning_callbacks.TQDMProgressBar(refresh_rate=1),
            lightning_callbacks.ModelSummary(),
        ],
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    return {"rich": outcome, "plain": plain}


def profiled(bench: Bench) -> Any:
    def named(text: str) -> str:
        return text.replace("DDPStrategy", "Strategy").replace("AlpaStrategy", "Strategy")

    actions = []
    for kind in (profilers.SimpleProfiler, profilers.AdvancedProfiler):
        profiler = kind(dirpath=bench.root, filename=kind.__name__)
        bench.fit(profiler=profiler, limit_train_batches=2)
        if kind is profilers.SimpleProfiler:
            actions = sorted(
                (named(name), len(times)) for name, times in profiler.recorded_durations.items()
            )
    profiler = profilers.PyTorchProfiler(dirpath=bench.root, filename="torch")
    outcome = bench.fit(profiler=profiler, limit_train_batches=2)
    return {
        **outcome,
        "files": sorted({named(Path(name).name.split(".")[0]) for name in outcome["files"]}),
        "ran": actions,
    }


def timer_and_throughput(bench: Bench) -> Any:
    timer = lightning_callbacks.Timer(duration="00:00:10:00")
    throughput = lightning_callbacks.ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch[0]), window_size=2
    )
    logger = CSVLogger(bench.root, name="throughput")
    outcome = bench.fit(
        max_epochs=2, callbacks=[timer, throughput], logger=logger, log_every_n_steps=2
    )
    return {**outcome, "timed": timer.time_elapsed("train") > 0}


def lambda_callback(bench: Bench) -> Any:
    seen: list[float] = []
    look = lightning_callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append(
            batch[0].sum().item()
        ),
        on_before_optimizer_step=lambda trainer, module, optimizer: seen.append(
            sum(float(p.grad.square().sum()) for p in module.parameters())
        ),
    )
    return {**bench.fit(callbacks=[look]), "seen": seen}


def configure_callbacks(bench: Bench) -> Any:
    class Configures(Net):
        def configure_callbacks(self) -> Any:
            return [lightning_callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)]

    return bench.fit(Configures, validate=True, max_epochs=5)


def learning_rate_finder(bench: Bench) -> Any:
    finder = lightning_callbacks.LearningRateFinder(min_lr=1e-3, max_lr=0.5, num_training_steps=12)
    outcome = bench.fit(callbacks=[finder], max_epochs=3)
    return {**outcome, "suggested": finder.optimal_lr.suggestion(skip_begin=2, skip_end=1)}
