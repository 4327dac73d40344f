"""Behaviours of modules that are built without memory: under "ddp" `configure_model` makes them as
they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conformance.bench import ROWS, Bench
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

WIDTH = 96  # a matrix is large enough to be deferred


class Built(pl.LightningModule):
    """Layers that `configure_model` makes; `num_deferred` of them had no memory when the training
    began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None
        self.num_deferred = 0

    def configure_model(self) -> None:
        if self.net is None:
            torch.set_default_dtype(torch.float64)
            self.net = self.layers()
            torch.set_default_dtype(torch.float32)

    def layers(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, 8),
        )

    def on_fit_start(self) -> None:
        self.num_deferred = sum(p.is_meta for p in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(bench: Bench, rows: int = 16, seed: int = 5) -> DataLoader:
    return DataLoader(bench.data(rows, seed, WIDTH, 8), batch_size=ROWS)


def built(kind: type[Built] = Built, seed: int = 3) -> Built:
    torch.manual_seed(seed)
    return kind()


def without_memory(bench: Bench, kind: type[Built] = Built) -> Built:
    """A module on the meta device, where the strategy can give it values."""
    with torch.device("meta" if bench.is_alpa else "cpu"):
        module = built(kind)
        module.configure_model()
    return module


def ordinary_file(bench: Bench, name: str = "plain.ckpt") -> str:
    """A checkpoint as one process writes it: that of other weights."""
    path = bench.root / name
    if dist.get_rank() == 0:
        module = built(seed=8)
        module.configure_model()
        torch.save(
            {"state_dict": module.state_dict(), "pytorch-lightning_version": pl.__version__}, path
        )
    dist.barrier()
    return str(path)


class Symmetric(nn.Module):
    """A parametrization of a user's own."""

    def forward(self, w: Tensor) -> Tensor:
        return w.tril() + w.tril(-1).T


class Table(nn.Module):
    """A matrix beside buffers that are large, computed, some of them not saved, and a tensor that
    is no buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(256.0), 1 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.ones(256, 256).tril().bool())
        self.scale = torch.full((128, 128), 0.5)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (
            x @ self.weight * self.cos[3, 4] + self.sin[1, 0] + self.mask[3, 2] * self.scale[0, 0]
        )


class Everything(Built):
    """Tied weights, parametrizations, buffers, weights that are made and changed in many ways."""

    def layers(self) -> nn.Module:
        normed, own = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(own, "weight", Symmetric())
        first, second, tied, filled = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        nn.init.orthogonal_(first.weight)
        nn.init.trunc_normal_(second.weight, std=0.02, a=-0.04, b=0.04)
        tied.weight = first.weight
        with torch.no_grad():
            noise = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4))
            filled.weight.copy_(torch.eye(WIDTH) + 0.01 * noise)
            filled.weight[0].fill_(0.5)
            second.weight[:, 3] *= 2
            second.weight.div_(second.weight.norm())
            filled.weight.add_(second.weight.T)
        first.weight.data = first.weight.data * 0.7
        return nn.Sequential(
            Table(),
            normed,
            nn.Tanh(),
            own,
            first,
            nn.Tanh(),
            second,
            tied,
            filled,
            nn.Tanh(),
            nn.Linear(WIDTH, 8),
        )


def weights_made_in_many_ways(bench: Bench) -> Any:
    """Trained, saved, and trained on from the checkpoint by a module without memory."""
    first, second = built(Everything), built(Everything, seed=50)
    trainer = bench.trainer()
    trainer.fit(first, loader(bench))
    saved = bench.outcome(trainer, first)
    trainer.save_checkpoint(bench.root / "saved.ckpt")
    trainer = bench.trainer(max_epochs=2)
    trainer.fit(second, loader(bench), ckpt_path=bench.root / "saved.ckpt", weights_only=False)
    if bench.is_alpa:
        assert min(first.num_deferred, second.num_deferred) >= 7
    return {"saved": saved, "resumed": bench.outcome(trainer, second)}


def evaluated_from_a_file(bench: Bench) -> Any:
    """An ordinary file is read into modules without memory that are not trained; whole, and where
    they do not fit.
    """
    path = ordinary_file(bench)
    plans: list[dict[str, Any]] = (
        [{}, {"plan": {"memory_limit": 1.1e5}}] if bench.is_alpa else [{}, {}]
    )
    found: list[Any] = []
    for plan in plans:
        for module in (built(), without_memory(bench)):
            trainer = bench.trainer(**plan)
            found += trainer.validate(module, loader(bench, 12, 7), ckpt_path=path, verbose=False)
            found.append(trainer.predict(module, loader(bench, 12, 7), ckpt_path=path))
    return found


class FromFile(Built):
    """Reads its weights while it is built."""

    path = Path()

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.load_state_dict(torch.load(self.path, mmap=True)["state_dict"])


def weights_read_while_built(bench: Bench) -> Any:
    """From `configure_model`, and evaluated before they are trained."""
    FromFile.path = Path(ordinary_file(bench))
    module, trainer = built(FromFile), bench.trainer()
    trainer.fit(module, loader(bench))
    outcome = bench.outcome(trainer, module)
    untrained = bench.trainer().validate(built(FromFile), loader(bench, 12, 7), verbose=False)
    return {
        "fit": outcome,
        "untrained": untrained,
        "predicted": trainer.predict(module, loader(bench, 12, 7)),
    }


def checkpoints_read_after_training(bench: Bench) -> Any:
    """Into a module that does not fit whole, and is in shards still when the training has ended.

    Batches of 13 rows and of 9 are of different shapes, or numbers, on the ranks."""
    plan: dict[str, Any] = {"plan": {"memory_limit": 4.0e5}} if bench.is_alpa else {}
    module = built()
    trainer = bench.trainer(**plan)
    path = ordinary_file(bench)
    trainer.fit(module, loader(bench))
    if bench.is_alpa:
        assert trainer.strategy.run is not None
    found = trainer.validate(module, loader(bench, 12, 7), verbose=False)
    found += trainer.validate(module, loader(bench, 12, 7), ckpt_path=path, verbose=False)
    return [*found, *(trainer.predict(module, loader(bench, rows, 7)) for rows in (12, 13, 9))]
