"""Behaviours of the training loop: when it validates, how long it goes on, what the step may
return, hooks in order.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from conformance.bench import Bench, Net
from conformance.hooks import recording_callback, recording_module
from torch.utils.checkpoint import checkpoint


class Validations(pl.Callback):
    """At which steps validation began, and what it found."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.seen.append(
            (
                trainer.global_step,
                int(trainer.sanity_checking),
                float(trainer.callback_metrics["val_loss"]),
            )
        )


def fit(bench: Bench) -> Any:
    return bench.fit(max_epochs=2)


def hooks_in_order(bench: Bench) -> Any:
    calls: list[str] = []
    module = bench.module(recording_module(Net, calls))
    trainer = bench.trainer(
        callbacks=[recording_callback(calls)], limit_train_batches=2, gradient_clip_val=0.5
    )
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    trainer.validate(module, bench.evaluation_loader(16, 4), verbose=False)
    trainer.test(module, bench.evaluation_loader(16, 5), verbose=False)
    trainer.predict(module, bench.evaluation_loader(16, 6))
    return bench.outcome(trainer, module, calls=calls)


def hooks_in_order_with_accumulation(bench: Bench) -> Any:
    calls: list[str] = []
    module = bench.module(recording_module(Net, calls))
    trainer = bench.trainer(callbacks=[recording_callback(calls)], accumulate_grad_batches=2)
    trainer.fit(module, bench.loader())
    return bench.outcome(trainer, module, calls=calls)


def sanity_check_and_val_check_interval(bench: Bench) -> Any:
    seen = Validations()
    outcome = bench.fit(validate=True, max_epochs=2, val_check_interval=0.5, callbacks=[seen])
    return {**outcome, "validations": seen.seen}


def validation_every_few_batches_and_epochs(bench: Bench) -> Any:
    batches, epochs = Validations(), Validations()
    by_batch = bench.fit(
        validate=True,
        max_epochs=2,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        callbacks=[batches],
    )
    by_epoch = bench.fit(
        validate=True,
        max_epochs=3,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=0,
        callbacks=[epochs],
    )
    return {"batches": by_batch, "epochs": by_epoch, "validations": [batches.seen, epochs.seen]}


def limited_batches(bench: Bench) -> Any:
    module = bench.module()
    trainer = bench.trainer(
        limit_train_batches=3,
        limit_val_batches=1,
        limit_test_batches=0.5,
        limit_predict_batches=1,
        max_epochs=2,
    )
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    outcome = bench.outcome(trainer, module)
    tested = trainer.test(module, bench.evaluation_loader(16, 5), verbose=False)
    return {
        **outcome,
        "tested": tested,
        "predicted": trainer.predict(module, bench.evaluation_loader(16, 6)),
    }


def fast_dev_run(bench: Bench) -> Any:
    return bench.fit(validate=True, fast_dev_run=True)


def overfit_batches(bench: Bench) -> Any:
    return bench.fit(validate=True, overfit_batches=2, max_epochs=3)


def max_steps_within_an_epoch(bench: Bench) -> Any:
    return bench.fit(max_epochs=-1, max_steps=6)


def max_time(bench: Bench) -> Any:
    """No time at all: training ends by itself at the first chance, on both ranks."""
    return bench.fit(max_epochs=-1, max_time=timedelta(seconds=0), min_steps=2)


def should_stop(bench: Bench) -> Any:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

    return bench.fit(max_epochs=4, callbacks=[Stops()])


def fit_twice(bench: Bench) -> Any:
    module, trainer = bench.module(), bench.trainer()
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    first = bench.outcome(trainer, module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    return {"first": first, "second": bench.outcome(trainer, module)}


def another_trainer_with_the_same_module(bench: Bench) -> Any:
    module = bench.module()
    bench.trainer().fit(module, bench.loader())
    trainer = bench.trainer(gradient_clip_val=0.1)
    trainer.fit(module, bench.loader(seed=9))
    return bench.outcome(trainer, module)


def batch_start_ends_the_epoch(bench: Bench) -> Any:
    class Skips(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    return bench.fit(Skips, max_epochs=2)


def step_returns_a_dict(bench: Bench) -> Any:
    class Returns(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self.net(x)
            return {
                "loss": F.mse_loss(prediction, y),
                "scale": prediction.abs().mean().detach(),
                "name": "step",
            }

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = {
                **getattr(self, "seen", {}),
                batch_idx: (outputs["scale"].clone(), outputs["name"]),
            }

    module, trainer = bench.module(Returns), bench.trainer()
    trainer.fit(module, bench.loader())
    numbers = {i: float(scale) for i, (scale, _) in module.seen.items()}
    seen = {"names": [name for _, name in module.seen.values()]}
    return bench.outcome(
        trainer, module, **seen, scale=sum(numbers.values()), batches=list(numbers)
    )


def activation_checkpointing_in_the_module(bench: Bench) -> Any:
    class Checkpointed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            hidden = checkpoint(self.net[:2], x, use_reentrant=False)
            loss = F.mse_loss(self.net[2](hidden), y)
            self.log("train_loss", loss, sync_dist=True)
            return loss

    return bench.fit(Checkpointed)


def compiled_parts_of_the_module(bench: Bench) -> Any:
    """A captured step takes the place of the compiled module, which is not compiled again."""

    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net, backend="eager")

    return bench.fit(Compiled, validate=True)


def names_for_a_profiler(bench: Bench) -> Any:
    class Named(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.profiler.record_function("forward"):
                return super().training_step(batch, batch_idx)

    return bench.fit(Named)


def trainer_reads_in_the_step(bench: Bench) -> Any:
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = F.mse_loss(self(x), y)
            if self.trainer.current_epoch >= 1 or self.global_step % 3 == 1:
                loss = 0.5 * loss
            if self.trainer.is_last_batch:
                loss = 2 * loss
            if self.trainer.max_epochs > 1 and self.trainer.training:
                self.log("epoch", float(self.trainer.max_epochs))
            self.log("train_loss", loss, sync_dist=True)
            return loss

    return bench.fit(Reads, max_epochs=2)


def epoch_in_the_loss(bench: Bench) -> Any:
    """`float(epoch)` holds for one epoch: it is captured in every epoch; a number made by operators
    for all.
    """

    class Anneals(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("epoch", float(self.current_epoch))
            return (
                loss * min(1.0, 0.5 + self.current_epoch / 4)
                - torch.tensor(0.01) * self.current_epoch * loss
            )

    return bench.fit(Anneals, max_epochs=3)


class Scheduled(Net):
    """Weights, temperatures, thresholds and averages that follow the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        beta = min(1.0, self.global_step / 3)
        temperature = 1.5 + 0.5 * math.cos(
            math.pi * self.global_step / (4 * self.trainer.max_epochs)
        )
        number = self.current_epoch * self.trainer.num_training_batches + batch_idx
        decay = (1 + self.global_step) / (10 + self.global_step)
        with torch.no_grad():
            self.mean.mul_(decay).add_(beta * (1 - decay))
        y = torch.where(x[:, :4].sigmoid() < 1 - number / 10, y, self.mean[:4])
        loss = (
            F.mse_loss(self.net[2](hidden) / temperature, y)
            + beta * hidden.square().mean()
            + 0.01 * number
        )
        self.log_dict({"beta": beta, "temperature": temperature, "decayed": 0.9**number})
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "number": number}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log(
            "val_loss",
            F.mse_loss(self.net(x), y) * (1 + self.global_step / 10) + batch_idx,
            sync_dist=True,
        )


def numbers_of_the_step(bench: Bench) -> Any:
    """The Trainer of a resumed run goes on with its numbers."""
    numbers = []

    class Watch(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            numbers.append(outputs["number"])

    path = str(bench.root / "half.ckpt")
    arguments = {"accumulate_grad_batches": 2, "callbacks": [Watch()]}
    first, trainer = bench.module(Scheduled), bench.trainer(**arguments)
    trainer.fit(first, bench.loader(), bench.evaluation_loader(16, 4))
    trainer.save_checkpoint(path)
    module, trainer = bench.module(Scheduled, seed=8), bench.trainer(max_epochs=2, **arguments)
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4), ckpt_path=path)
    return bench.outcome(trainer, module, numbers=numbers)


def barebones(bench: Bench) -> Any:
    return bench.fit(barebones=True)


def detect_anomaly(bench: Bench) -> Any:
    return bench.fit(detect_anomaly=True)


def deterministic(bench: Bench) -> Any:
    try:
        return bench.fit(deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


def training_without_inference_mode(bench: Bench) -> Any:
    return bench.fit(validate=True, inference_mode=False, max_epochs=2)


def batch_norm_over_all_ranks(bench: Bench) -> Any:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, torch.nn.BatchNorm1d(8))

    plan = {**_PLANS_OF_ONE_BATCH.get(bench.kind, {})}
    module = bench.module(Normed)
    trainer = bench.trainer(plan=plan or None, sync_batchnorm=True, max_epochs=2)
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    return bench.outcome(trainer, module)


# Statistics are those of what is computed at once: all rows here, whatever the number of stages.
_PLANS_OF_ONE_BATCH = {"pipelined": {"num_stages": 2, "num_microbatches": 1}}


batch_norm_over_all_ranks.reference = "plain"
