"""What of Lightning reads and writes checkpoints by their paths works as under DDP: with the
ordinary files of replicated plans, and with the directories of sharded ones.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from covering import covering, slow_but
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.tuner import Tuner
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.checkpoint.opening import is_checkpoint
from alpa_strategy.errors import CheckpointError


class Net(pl.LightningModule):
    def __init__(self, weight: float = 1.0, width: int = 8, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return self.hparams.weight * F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)


class Wide(Net):
    """A subclass, for the CLI's subclass mode."""


class Data(pl.LightningDataModule):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.hparams.size, 6, generator=generator)
        return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader


class Bench:
    """What a behaviour gets: a folder, and the strategy under which it is tried."""

    def __init__(self, root: str, options: dict[str, Any] | None) -> None:
        self.root, self.options = root, options

    def strategy(self) -> Any:
        if self.options is None:
            return "ddp"
        return AlpaStrategy(plan_dir=f"{self.root}/plans", cluster="pcie_8gpu", **self.options)

    def trainer(self, **arguments: Any) -> pl.Trainer:
        callbacks = arguments.get("callbacks", ())
        saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        return pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=self.strategy(),
            default_root_dir=self.root,
            **{**QUIET, "enable_checkpointing": saves, "max_epochs": 1, **arguments},
        )

    def saved(self, name: str = "saved", **model: Any) -> str:
        """A checkpoint that is saved while a model trains."""
        callback = ModelCheckpoint(self.root, name, enable_version_counter=False)
        self.trainer(callbacks=[callback]).fit(Net(**model), Data())
        return f"{self.root}/{name}.ckpt"

    def cli(self, *arguments: str, **kinds: Any) -> LightningCLI:
        strategy = ["--trainer.strategy=ddp"]
        if self.options is not None:
            own = {**self.options, "cluster": "pcie_8gpu", "plan_dir": f"{self.root}/plans"}
            strategy = ["--trainer.strategy=alpa_strategy.AlpaStrategy"]
            strategy += [f"--trainer.strategy.{name}={value}" for name, value in own.items()]
        quiet = [f"--trainer.{name}=false" for name in QUIET]
        place = [f"--trainer.default_root_dir={self.root}", "--trainer.accelerator=cpu"]
        subcommand, *rest = arguments
        args = [subcommand, *strategy, *quiet, *place, "--trainer.devices=2", *rest]
        kinds = {"model_class": Net, "datamodule_class": Data, **kinds}
        return LightningCLI(args=args, save_config_callback=None, **kinds)


def logged(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def weights(state_dict: Any) -> dict[str, list[float]]:
    return {name: value.double().flatten().tolist() for name, value in state_dict.items()}


def cli_fit(bench: Bench) -> Any:
    path = bench.saved(weight=5.0)
    cli = bench.cli("fit", "--trainer.max_epochs=2", f"--ckpt_path={path}")
    return cli.model.hparams.weight, logged(cli.trainer), cli.config["fit"]["ckpt_path"] == path


def cli_fit_with_an_option(bench: Bench) -> Any:
    path = bench.saved(weight=5.0)
    arguments = ("--trainer.max_epochs=2", f"--ckpt_path={path}", "--model.lr=0.5")
    cli = bench.cli("fit", *arguments)
    return dict(cli.model.hparams), logged(cli.trainer)


def cli_test(bench: Bench) -> Any:
    cli = bench.cli("test", f"--ckpt_path={bench.saved(width=24)}")
    return cli.model.hparams.width, logged(cli.trainer)


def cli_validate(bench: Bench) -> Any:
    cli = bench.cli("validate", f"--ckpt_path={bench.saved(width=24, weight=2.0)}")
    return cli.model.hparams.width, logged(cli.trainer)


def cli_in_subclass_mode(bench: Bench) -> Any:
    first = bench.cli(
        "fit",
        "--trainer.max_epochs=1",
        f"--model={Wide.__module__}.Wide",
        "--model.width=12",
        model_class=Net,
        subclass_mode_model=True,
    )
    path = f"{bench.root}/subclass.ckpt"
    first.trainer.save_checkpoint(path)
    kinds = {"model_class": Net, "subclass_mode_model": True}
    model = f"--model={Wide.__module__}.Wide"
    cli = bench.cli("test", model, f"--ckpt_path={path}", **kinds)
    return type(cli.model).__name__, cli.model.hparams.width, logged(cli.trainer)


def cli_without_a_checkpoint(bench: Bench) -> Any:
    cli = bench.cli("fit", "--trainer.max_epochs=1", "--model.width=5")
    return cli.model.hparams.width, logged(cli.trainer)


def module_from_checkpoint(bench: Bench) -> Any:
    path = bench.saved(width=10)
    plain = Net.load_from_checkpoint(path)
    other = Net.load_from_checkpoint(Path(path), weight=3.0, map_location="cpu", strict=True)
    return dict(plain.hparams), weights(plain.state_dict()), dict(other.hparams)


def data_module_from_checkpoint(bench: Bench) -> Any:
    path = f"{bench.root}/data"
    callback = ModelCheckpoint(bench.root, "data", enable_version_counter=False)
    bench.trainer(callbacks=[callback]).fit(Net(), Data(size=24))
    return dict(Data.load_from_checkpoint(f"{path}.ckpt").hparams)


def best_and_last(bench: Bench) -> Any:
    for save_last in (True, "link"):
        folder = f"{bench.root}/{save_last}"
        callback = ModelCheckpoint(folder, "{epoch}", monitor="val", save_last=save_last)
        trainer = bench.trainer(callbacks=[callback], max_epochs=2)
        trainer.fit(Net(), Data())
        results = [trainer.test(ckpt_path=path, verbose=False) for path in ("best", "last")]
        again = bench.trainer(
            callbacks=[ModelCheckpoint(folder, save_last=save_last)], max_epochs=4
        )
        again.fit(Net(), Data(), ckpt_path="last")
        results.append([logged(again)])
    return results, sorted(os.listdir(folder))


def weight_averaging(bench: Bench) -> Any:
    callbacks = [
        EMAWeightAveraging(decay=0.5),
        ModelCheckpoint(bench.root, "ema", enable_version_counter=False),
    ]
    trainer = bench.trainer(callbacks=callbacks)
    trainer.fit(Net(), Data())
    read = Net.load_from_checkpoint(f"{bench.root}/ema.ckpt")
    return weights(read.state_dict())


def rate_finder(bench: Bench) -> Any:
    model = Net()
    trainer = bench.trainer()
    finder = Tuner(trainer).lr_find(model, datamodule=Data(64), num_training=8, min_lr=1e-4)
    left = sorted(name for name in os.listdir(bench.root) if name.startswith(".lr_find"))
    assert finder is not None
    # Not the losses: DDP's are those of one rank's rows.
    return finder.results["lr"], left, weights(model.state_dict())


def rate_finder_callback(bench: Bench) -> Any:
    model = Net()
    trainer = bench.trainer(callbacks=[LearningRateFinder(num_training_steps=6, min_lr=1e-4)])
    trainer.fit(model, Data(64))
    return model.hparams.lr, logged(trainer)


def saved_after_the_fit(bench: Bench) -> Any:
    trainer, model = bench.trainer(), Net(width=7)
    trainer.fit(model, Data())
    path = f"{bench.root}/after.ckpt"
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    return content["hyper_parameters"], weights(content["state_dict"])


def state_dict_after_the_fit(bench: Bench) -> Any:
    trainer, model = bench.trainer(), Net()
    trainer.fit(model, Data())
    entries = trainer.strategy.lightning_module_state_dict()
    other = Net()
    other.load_state_dict(entries)
    file = io.BytesIO()
    torch.save(entries, file)
    file.seek(0)
    scaled = {name: (2 * value).numpy().tolist() for name, value in entries.items()}
    return scaled, weights(other.state_dict()), weights(torch.load(file))


def weights_only_checkpoint(bench: Bench) -> Any:
    callback = ModelCheckpoint(
        bench.root, "weights", save_weights_only=True, enable_version_counter=False
    )
    bench.trainer(callbacks=[callback]).fit(Net(), Data())
    read = Net.load_from_checkpoint(f"{bench.root}/weights.ckpt")
    return weights(read.state_dict())


def saved_twice_under_one_name(bench: Bench) -> Any:
    """A checkpoint takes the place of one of the other form."""
    model = Net()
    callback = ModelCheckpoint(bench.root, "one", every_n_epochs=1, enable_version_counter=False)
    trainer = bench.trainer(callbacks=[callback], max_epochs=2)
    trainer.fit(model, Data())
    for _ in range(2):
        trainer.save_checkpoint(f"{bench.root}/one.ckpt")
    again = bench.trainer(callbacks=[callback], max_epochs=3)
    again.fit(Net(), Data(), ckpt_path=f"{bench.root}/one.ckpt")
    return logged(again), [name for name in os.listdir(bench.root) if name.endswith(".ckpt")]


def remote_folder(bench: Bench) -> Any:
    callback = ModelCheckpoint(f"memory://{bench.root}", "far", enable_version_counter=False)
    trainer = bench.trainer(callbacks=[callback])
    trainer.fit(Net(width=5), Data())
    found: Any = None
    if trainer.is_global_zero:  # each process has a memory of its own
        read = Net.load_from_checkpoint(callback.best_model_path)
        found = dict(read.hparams), weights(read.state_dict())
    return found


BEHAVIOURS: list[Callable[[Bench], Any]] = [
    cli_fit,
    cli_fit_with_an_option,
    cli_test,
    cli_validate,
    cli_in_subclass_mode,
    cli_without_a_checkpoint,
    module_from_checkpoint,
    data_module_from_checkpoint,
    best_and_last,
    weight_averaging,
    rate_finder,
    rate_finder_callback,
    saved_after_the_fit,
    state_dict_after_the_fit,
    weights_only_checkpoint,
    saved_twice_under_one_name,
    remote_folder,
]
CASES: dict[str, dict[str, Any]] = {
    "files": {"parallel": "data"},
    "directories": {"parallel": "zero3"},
}


NAMES = {behaviour.__name__: behaviour for behaviour in BEHAVIOURS}


def try_it(name: str, root: str, options: dict[str, Any] | None) -> Any:
    """The result of a behaviour on this rank, or its error as text."""
    try:
        return NAMES[name](Bench(root, options))
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


ROWS = list(product(NAMES, CASES))
# The CLI validates as it tests, and fits with an option as without. Data modules are read as
# modules are; the callback finds rates as the tuner does.
SLOW_NAMES = {
    "cli_validate",
    "cli_fit_with_an_option",
    "data_module_from_checkpoint",
    "rate_finder",
}
# By default each of the others is tried with one kind of checkpoint, in turn.
DEFAULT_ROWS = [row for row in covering(ROWS) if row[0] not in SLOW_NAMES]


@pytest.mark.parametrize(("name", "case"), slow_but(ROWS, DEFAULT_ROWS))
def test_readers_work_as_under_ddp(pool, tmp_path: Path, name: str, case: str) -> None:
    results = []
    for kind, options in (("ddp", None), (case, CASES[case])):
        root = tmp_path / kind
        root.mkdir()
        arguments = (name, str(root), options)
        results.append(pool.run(2, try_it, *arguments, init_group=False, timeout=200)[0])
    expected, result = results
    try:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    except (AssertionError, TypeError):
        assert result == expected
    if name == "cli_fit":
        assert is_checkpoint(tmp_path / case / "saved.ckpt") == (case == "directories")


def fit_into(root: str, folder: str) -> str:
    """What a training that is to write directories to `folder` says."""
    bench = Bench(root, {"checkpoint": "sharded"})
    trainer = bench.trainer(callbacks=[ModelCheckpoint(folder), Started()])
    try:
        trainer.fit(Net(), Data())
    except CheckpointError as error:
        return str(error)
    return "no error"


class Started(pl.Callback):
    def on_train_start(self, *unused: Any) -> None:
        raise AssertionError("the training has begun")


def test_directories_in_the_memory_of_a_rank_are_refused_before_the_training(
    pool, tmp_path: Path
) -> None:
    folder = "memory://a/b"
    for text in pool.run(2, fit_into, str(tmp_path), folder, init_group=False):
        assert folder in text
        assert "dirpath" in text
