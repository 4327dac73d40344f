"""Behaviours of checkpoints: which files are there, what is picked, and training that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from conformance.bench import Bench, Net
from lightning.pytorch.callbacks import ModelCheckpoint


def top_k_by_metric(bench: Bench) -> Any:
    keep = ModelCheckpoint(
        bench.root / "best",
        monitor="val_loss",
        save_top_k=2,
        filename="{epoch}-{step}",
        save_last=True,
    )
    outcome = bench.fit(validate=True, max_epochs=4, callbacks=[keep], enable_checkpointing=True)
    best = {Path(path).name: float(score) for path, score in keep.best_k_models.items()}
    return {
        **outcome,
        "best": best,
        "path": Path(keep.best_model_path).name,
        "last": Path(keep.last_model_path).name,
    }


def every_few_steps(bench: Bench) -> Any:
    keep = ModelCheckpoint(
        bench.root / "steps", every_n_train_steps=3, save_top_k=-1, filename="{step}"
    )
    return bench.fit(max_epochs=2, callbacks=[keep], enable_checkpointing=True)


def default_checkpoints(bench: Bench) -> Any:
    return bench.fit(validate=True, max_epochs=2, enable_checkpointing=True, logger=True)


def best_checkpoint_is_tested(bench: Bench) -> Any:
    keep = ModelCheckpoint(bench.root / "best", monitor="val_loss", save_top_k=1)
    module, trainer = (
        bench.module(),
        bench.trainer(max_epochs=3, callbacks=[keep], enable_checkpointing=True),
    )
    trainer.fit(module, bench.loader(), bench.evaluation_loader(16, 4))
    outcome = bench.outcome(trainer, module)
    tested = trainer.test(
        dataloaders=bench.evaluation_loader(16, 5),
        ckpt_path="best",
        verbose=False,
        weights_only=False,
    )
    validated = trainer.validate(
        module, bench.evaluation_loader(16, 4), ckpt_path=keep.best_model_path, verbose=False
    )
    return {**outcome, "tested": tested, "validated": validated}


class Scheduled(Net):
    """With a scheduler, state of its own and hyperparameters."""

    def __init__(self, width: int = 8, lr: float = 0.05) -> None:
        super().__init__(d_hidden=width, lr=lr)
        self.save_hyperparameters()
        self.seen = 0

    def on_train_batch_end(self, *unused: Any) -> None:
        self.seen += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
                "interval": "step",
            }
        ]


def resumed_from_last(bench: Bench) -> Any:
    """After the first epoch; shuffled. (In the midst of an epoch DDP forgets which rows it has
    seen.)
    """
    keep = ModelCheckpoint(
        bench.root, every_n_train_steps=2, save_last=True, save_top_k=1, monitor=None
    )
    first = bench.trainer(max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    first.fit(bench.module(Scheduled), bench.loader(shuffle=True))
    again = ModelCheckpoint(bench.root, save_last=True)
    module = bench.module(Scheduled, width=8, lr=0.1)
    trainer = bench.trainer(max_epochs=3, callbacks=[again], enable_checkpointing=True)
    trainer.fit(module, bench.loader(shuffle=True), ckpt_path="last", weights_only=False)
    return bench.outcome(
        trainer, module, seen=module.seen, rate=trainer.optimizers[0].param_groups[0]["lr"]
    )


class State(pl.Callback):
    """A callback with state."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *unused: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def saved_by_hand_and_resumed(bench: Bench) -> Any:
    path = bench.root / "by_hand.ckpt"
    first, state = bench.trainer(callbacks=[State()], accumulate_grad_batches=2), State()
    first.fit(bench.module(Scheduled), bench.loader())
    first.save_checkpoint(path)
    module, trainer = bench.module(Scheduled), bench.trainer(max_epochs=2, callbacks=[state])
    trainer.fit(module, bench.loader(), ckpt_path=path, weights_only=False)
    return bench.outcome(trainer, module, count=state.count, seen=module.seen)


def module_of_the_best_checkpoint(bench: Bench) -> Any:
    class Sized(Net):
        def __init__(self, d_hidden: int = 8) -> None:
            super().__init__(d_hidden=d_hidden)
            self.save_hyperparameters()

    best = ModelCheckpoint(bench.root / "saved", monitor="val_loss")
    trainer = bench.trainer(max_epochs=2, callbacks=[best], enable_checkpointing=True)
    trainer.fit(bench.module(Sized, d_hidden=5), bench.loader(), bench.evaluation_loader(16, 4))
    module = Sized.load_from_checkpoint(best.best_model_path, weights_only=False)
    return {"weights": module.state_dict(), "width": module.hparams.d_hidden}


def weights_only_checkpoint(bench: Bench) -> Any:
    path = bench.root / "weights.ckpt"
    trainer, module = bench.trainer(), bench.module(Scheduled)
    trainer.fit(module, bench.loader())
    trainer.save_checkpoint(path, weights_only=True)
    tested = bench.trainer().test(
        bench.module(Scheduled, seed=20),
        bench.evaluation_loader(16, 5),
        ckpt_path=path,
        verbose=False,
        weights_only=False,
    )
    return {"tested": tested, "files": bench.files()}
