"""Behaviours of data loading: DataModules, several loaders, shuffling, iterable data, batches of
other sizes.
"""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from conformance.bench import RANKS, ROWS, Bench, Net
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info


class Module(pl.LightningDataModule):
    """Everything that a DataModule may have."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench, self.calls = bench, []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return self.bench.loader()

    def val_dataloader(self) -> Any:
        self.calls.append("val_dataloader")
        return self.bench.evaluation_loader(16, 4)

    def test_dataloader(self) -> Any:
        return self.bench.evaluation_loader(16, 5)

    def predict_dataloader(self) -> Any:
        return self.bench.evaluation_loader(16, 6)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


def data_module(bench: Bench) -> Any:
    module = bench.module()
    data = Module(bench)
    trainer = bench.trainer(max_epochs=2)
    trainer.fit(module, datamodule=data)
    outcome = bench.outcome(trainer, module)
    outcome["tested"] = trainer.test(module, datamodule=data, verbose=False)
    outcome["predicted"] = trainer.predict(module, datamodule=data)
    return {**outcome, "calls": data.calls}


def loaders_of_the_module(bench: Bench) -> Any:
    class Loads(Net):
        def train_dataloader(self) -> Any:
            return bench.loader()

        def val_dataloader(self) -> Any:
            return bench.evaluation_loader(16, 4)

    module, trainer = (
        bench.module(Loads),
        bench.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1),
    )
    trainer.fit(module)
    return bench.outcome(trainer, module)


def reloaded_loaders(bench: Bench) -> Any:
    class Loads(Net):
        def train_dataloader(self) -> Any:
            return bench.loader(seed=10 + self.current_epoch)

    module, trainer = (
        bench.module(Loads),
        bench.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1),
    )
    trainer.fit(module)
    return bench.outcome(trainer, module)


def several_training_loaders(bench: Bench) -> Any:
    class Both(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = {key: F.mse_loss(self(x), y) for key, (x, y) in batch.items()}
            self.log_dict(losses, sync_dist=True)
            return losses["a"] + 0.5 * losses["b"]

    module, trainer = bench.module(Both), bench.trainer()
    loaders = {"a": bench.loader(24), "b": bench.loader(24, 4)}
    trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"))
    return bench.outcome(trainer, module)


def smaller_last_batch(bench: Bench) -> Any:
    return bench.fit(rows=20, max_epochs=2)


def dropped_last_batch(bench: Bench) -> Any:
    module, trainer = bench.module(), bench.trainer()
    trainer.fit(module, bench.loader(20, drop_last=True))
    return bench.outcome(trainer, module)


def shuffled(bench: Bench) -> Any:
    torch.manual_seed(11)
    module, trainer = bench.module(), bench.trainer(max_epochs=2)
    trainer.fit(module, bench.loader(shuffle=True))
    return bench.outcome(trainer, module)


def own_sampler(bench: Bench) -> Any:
    module, trainer = bench.module(), bench.trainer(max_epochs=2, use_distributed_sampler=False)
    sampler = DistributedSampler(bench.data(), RANKS, trainer.global_rank, shuffle=True, seed=5)
    trainer.fit(module, bench.loader(sampler=sampler))
    return bench.outcome(trainer, module)


class Stream(IterableDataset):
    """Rows of this rank, without a length."""

    def __init__(self, bench: Bench, rank: int) -> None:
        self.rows, self.rank = bench.data(), rank

    def __iter__(self) -> Any:
        assert get_worker_info() is None
        return (self.rows[i] for i in range(self.rank, len(self.rows), RANKS))


def iterable_data(bench: Bench) -> Any:
    module, trainer = bench.module(), bench.trainer(max_epochs=2)
    loader = DataLoader(Stream(bench, trainer.global_rank), batch_size=ROWS)
    trainer.fit(module, loader, DataLoader(Stream(bench, trainer.global_rank), batch_size=ROWS))
    return bench.outcome(trainer, module)


def loader_workers(bench: Bench) -> Any:
    module, trainer = bench.module(), bench.trainer(max_epochs=2)
    trainer.fit(module, bench.loader(num_workers=1, persistent_workers=True))
    return bench.outcome(trainer, module)


def batches_with_more_than_tensors(bench: Bench) -> Any:
    class Named(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = batch["weight"] * F.mse_loss(self(batch["x"]), batch["y"])
            self.log("train_loss", loss, sync_dist=True)
            return loss

    def collate(rows: Any) -> Any:
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return {"x": x, "y": y, "names": [f"row {float(v[0]):.3f}" for v in x], "weight": 2.0}

    module, trainer = bench.module(Named), bench.trainer()
    trainer.fit(module, bench.loader(collate_fn=collate))
    return bench.outcome(trainer, module)


@dataclass
class Pair:
    x: Any
    y: Any


def batches_of_other_types(bench: Bench) -> Any:
    """Dataclasses, named tuples and mappings that are no dicts (as tokenizers give them)."""

    class Types(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, UserDict) else (batch.x, batch.y)
            return F.mse_loss(self.net(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log(
                "val_loss", self.training_step(batch, batch_idx), sync_dist=True, batch_size=ROWS
            )
            return batch

    def collate(kind: Any) -> Any:
        return lambda rows: kind(
            x=torch.stack([row[0] for row in rows]), y=torch.stack([row[1] for row in rows])
        )

    results = {}
    for name, kind in {
        "dataclass": Pair,
        "tuple": namedtuple("Point", "x y"),
        "mapping": UserDict,
    }.items():
        module, trainer = bench.module(Types), bench.trainer()
        loaders = [
            DataLoader(bench.data(seed=s), batch_size=ROWS, collate_fn=collate(kind))
            for s in (3, 4)
        ]
        trainer.fit(module, *loaders)
        results[name] = bench.outcome(trainer, module)
    return results


def transfer_hooks(bench: Bench) -> Any:
    class Transfers(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 3, batch[1]]

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0], batch[1] - 1]

    return bench.fit(Transfers, validate=True)


def sequences_of_changing_length(bench: Bench) -> Any:
    """Every batch has its own length, the same on all ranks."""

    class Recurrent(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = F.mse_loss(self.net(x).mean(1), y)
            self.log("train_loss", loss, sync_dist=True)
            return loss

    lengths = iter([3, 5, 3, 2] * 2)

    def collate(rows: Any) -> Any:
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return x.unsqueeze(1).repeat(1, next(lengths), 1), y

    module, trainer = bench.module(Recurrent), bench.trainer()
    trainer.fit(module, bench.loader(collate_fn=collate))
    return bench.outcome(trainer, module)


def batches_that_the_step_changes(bench: Bench) -> Any:
    """The loader yields the data's own tensors: what a step writes into them is there for hooks,
    and in the next epoch.
    """

    class Writes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = F.mse_loss(self(x.clone()), y)
            with torch.no_grad():
                x[:, 1:].mul_(0.5).add_(loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(float(batch[0].sum()))

    module, trainer = bench.module(Writes), bench.trainer(max_epochs=2)
    trainer.fit(module, DataLoader(list(bench.loader()), batch_size=None))
    return bench.outcome(trainer, module, seen=module.seen)


def module_inside_of_the_module(bench: Bench) -> Any:
    """A LightningModule within another one reads the Trainer's counters by itself."""

    class Inner(pl.LightningModule):
        def forward(self, loss: Any) -> Any:
            return loss * (1 + 0.1 * self.global_step + self.current_epoch)

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.inner(super().training_step(batch, batch_idx))

    return bench.fit(Outer, max_epochs=2)
