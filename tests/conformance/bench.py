"""What a behaviour of the conformance suite is written with: modules, data, Trainers of one kind,
and its outcome.

A behaviour is a function `(bench) -> outcome`. It runs on two ranks under "ddp", under "alpa" with
a plan of one stage whose parameters are sharded, and under "alpa" with a pipeline of two stages;
the outcomes must be equal. "plain" is one process on the batches of both ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

RANKS = 2
ROWS = 4  # of one rank's batch
PLANS: dict[str, dict[str, Any]] = {
    "alpa": {"parallel": "zero3"},
    "pipelined": {"num_stages": 2, "num_microbatches": 2},
}


class Net(pl.LightningModule):
    """Two linear layers, mean squared error; logs losses over all ranks."""

    def __init__(self, d_in: int = 6, d_hidden: int = 8, d_out: int = 4, lr: float = 0.05) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, d_hidden), nn.Tanh(), nn.Linear(d_hidden, d_out))
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("test_loss", F.mse_loss(self.net(x), y), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


@dataclass(frozen=True)
class Mean:
    """A value that DDP knows on each rank for its local samples: the mean over the ranks is
    compared.
    """

    value: Any


class AllRanks(Sampler):
    """The rows of all ranks' samplers, batch by batch."""

    def __init__(self, data: Any) -> None:
        self.ranks = [DistributedSampler(data, RANKS, rank, shuffle=True) for rank in range(RANKS)]

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.ranks:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Any:
        ranks = [list(sampler) for sampler in self.ranks]
        for start in range(0, len(ranks[0]), ROWS):
            for rows in ranks:
                yield from rows[start : start + ROWS]

    def __len__(self) -> int:
        return sum(map(len, self.ranks))


class Bench:
    """Makes Trainers of one kind ("ddp", "alpa", "pipelined" or "plain") below one folder, and
    everything for them.
    """

    def __init__(self, kind: str, root: str) -> None:
        self.kind = kind
        self.root = Path(root)

    @property
    def is_alpa(self) -> bool:
        return self.kind in PLANS

    @property
    def num_ranks(self) -> int:
        return 1 if self.kind == "plain" else RANKS

    def trainer(self, plan: dict[str, Any] | None = None, **arguments: Any) -> pl.Trainer:
        """A quiet fp64 Trainer; `arguments` are the Trainer's, `plan` replaces the options of the
        kind's plan.
        """
        quiet = {} if arguments.get("barebones") else QUIET
        common = {
            "accelerator": "cpu",
            "precision": "64-true",
            "max_epochs": 1,
            "default_root_dir": self.root,
        }
        parallel: dict[str, Any] = {"devices": self.num_ranks}
        if self.is_alpa:
            from alpa_strategy import AlpaStrategy

            # Plans are solved once for all behaviours of the session, whose folders lie side by
            # side.
            shared = {
                "cluster": "pcie_8gpu",
                "verbose": False,
                # DDP's loggers have no rows of plans.
                "log_plan": False,
                "plan_dir": self.root.parent / "plans",
            }
            options = {**shared, **(PLANS[self.kind] if plan is None else plan)}
            parallel["strategy"] = AlpaStrategy(**options)
        elif self.kind == "ddp":
            parallel["strategy"] = "ddp"
        return pl.Trainer(**{**common, **quiet, **parallel, **arguments})

    def seeded(self, make: Callable[..., Any], *args: Any, seed: int = 7, **kwargs: Any) -> Any:
        """`make(...)` in fp64 with seeded random numbers."""
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            return make(*args, **kwargs)
        finally:
            torch.set_default_dtype(torch.float32)

    def module(self, kind: type[pl.LightningModule] = Net, seed: int = 7, **kwargs: Any) -> Any:
        return self.seeded(kind, seed=seed, **kwargs)

    def data(self, rows: int = 32, seed: int = 3, d_in: int = 6, d_out: int = 4) -> TensorDataset:
        return self.seeded(
            lambda: TensorDataset(torch.randn(rows, d_in), torch.randn(rows, d_out)), seed=seed
        )

    def loader(self, rows: int = 32, seed: int = 3, **kwargs: Any) -> DataLoader:
        """Training batches of `ROWS` rows a rank; in one process those of all ranks (Lightning
        shuffles the ranks').
        """
        data = self.data(rows, seed)
        if self.kind == "plain":
            kwargs["sampler"] = AllRanks(data)
        return DataLoader(data, batch_size=ROWS * RANKS // self.num_ranks, **kwargs)

    def evaluation_loader(self, rows: int, seed: int, **kwargs: Any) -> DataLoader:
        """The same in the rows' own order."""
        return DataLoader(
            self.data(rows, seed), batch_size=ROWS * RANKS // self.num_ranks, **kwargs
        )

    def files(self) -> list[str]:
        """Files below the root, checkpoints in folders as one; seen by rank 0."""
        results = []
        for path in sorted(self.root.rglob("*")):
            relative = path.relative_to(self.root)
            inside = any(p.suffix == ".ckpt" for p in list(relative.parents)[:-1])
            if relative.parts[0] == ".alpa" or inside or (path.is_dir() and path.suffix != ".ckpt"):
                continue
            results.append(str(relative))
        return results if rank_zero_only.rank == 0 else []

    def outcome(
        self, trainer: pl.Trainer, module: pl.LightningModule, **more: Any
    ) -> dict[str, Any]:
        """What every training leaves behind."""
        return {
            "weights": {
                name: value.detach().clone() for name, value in module.state_dict().items()
            },
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "steps": (trainer.global_step, trainer.current_epoch),
            **more,
        }

    def fit(
        self,
        kind: type[pl.LightningModule] = Net,
        validate: bool = False,
        rows: int = 32,
        **arguments: Any,
    ) -> dict[str, Any]:
        """The outcome of an ordinary `fit`."""
        module, trainer = self.module(kind), self.trainer(**arguments)
        trainer.fit(module, self.loader(rows), self.evaluation_loader(16, 4) if validate else None)
        return self.outcome(trainer, module, files=self.files())


def differences(expected: list[Any], found: list[Any], tolerance: float = 1e-9) -> list[str]:
    """What differs between the outcomes (one a rank) of two kinds, as lines of text."""
    lines: list[str] = []
    if len(expected) != len(found):  # "plain" stands for every rank
        expected = expected * len(found)
    means = [_averaged(expected), _averaged(found)]
    for rank, (a, b) in enumerate(zip(*means, strict=True)):
        lines += [f"rank {rank}: {line}" for line in _compare(a, b, "", tolerance)]
    return lines


def _averaged(outcomes: list[Any]) -> list[Any]:
    """The outcomes with every Mean replaced by the mean over the ranks."""
    if isinstance(outcomes[0], Mean):
        return [_mean([o.value for o in outcomes])] * len(outcomes)
    if isinstance(outcomes[0], dict):
        keys = []
        for k in outcomes[0]:
            if all(isinstance(o, dict) and k in o for o in outcomes):
                keys.append(k)
        averaged = {}
        for key in keys:
            averaged[key] = _averaged([o[key] for o in outcomes])
        changed = []
        for rank, outcome in enumerate(outcomes):
            own_averages = {key: values[rank] for key, values in averaged.items()}
            changed.append({**outcome, **own_averages})
        return changed
    return outcomes


def _mean(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        means = {}
        for key in values[0]:
            means[key] = _mean([value[key] for value in values])
        return means
    if isinstance(values[0], list | tuple):
        return [_mean(list(items)) for items in zip(*values, strict=True)]
    return sum(values) / len(values)


def _compare(a: Any, b: Any, path: str, tolerance: float) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{path}.{k}: only expected: {_short(a[k])}" for k in a.keys() - b.keys()]
        surplus = [f"{path}.{k}: not expected: {_short(b[k])}" for k in b.keys() - a.keys()]
        both = [
            line for k in a if k in b for line in _compare(a[k], b[k], f"{path}.{k}", tolerance)
        ]
        return missing + surplus + both
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{path}: {len(a)} items expected, {len(b)} found: {_short(a)} / {_short(b)}"]
        return [
            line
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for line in _compare(x, y, f"{path}[{i}]", tolerance)
        ]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return [f"{path}: {a.dtype} {list(a.shape)} expected, {b.dtype} {list(b.shape)} found"]
        error = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        scale = max(1.0, a.double().abs().max().item()) if a.numel() else 1.0
        return (
            []
            if error <= tolerance * scale
            else [f"{path}: error {error:.3e} at scale {scale:.3e}"]
        )
    if isinstance(a, float) and isinstance(b, float):
        same = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (
            math.isnan(a) and math.isnan(b)
        )
        return [] if same else [f"{path}: {a!r} expected, {b!r} found"]
    return (
        []
        if type(a) is type(b) and a == b
        else [f"{path}: {_short(a)} expected, {_short(b)} found"]
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else text[:300] + "..."
