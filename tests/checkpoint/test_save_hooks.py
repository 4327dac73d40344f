"""`on_save_checkpoint` may compute with what is saved, in callbacks and in the module, on all ranks
or on one: the checkpoint holds what it holds under DDP.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from covering import slow_but
from quiet import QUIET
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy, open_checkpoint
from alpa_strategy.checkpoint.opening import is_checkpoint

Checkpoint = dict[str, Any]
Hook = Callable[[Checkpoint, pl.Trainer], None]
HOOKS: dict[str, Hook] = {}


def hook(function: Hook) -> Hook:
    HOOKS[function.__name__] = function
    return function


def changed_entries(change: Callable[[torch.Tensor], Any]) -> Hook:
    """A hook that puts `change(entry)` in the place of every entry."""

    def function(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
        entries = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: change(entry) for name, entry in entries.items()}

    return function


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda entry: entry.data,
    "clone": lambda entry: entry.detach().cpu().clone(),
    "data_clone": lambda entry: entry.data.clone(),
    "bfloat16": lambda entry: entry.to(torch.bfloat16),
    "half": lambda entry: entry.half(),
    "transposed": lambda entry: entry.t(),
    "scaled": lambda entry: 2 * entry,
    "first_row": lambda entry: entry[0],
    "copied": copy.deepcopy,
    "shallow": copy.copy,
    "from_numpy": lambda entry: torch.from_numpy(entry.numpy().copy()),
    "from_detached_numpy": lambda entry: torch.from_numpy(entry.detach().cpu().numpy() + 1),
    "from_list": lambda entry: torch.tensor(entry.tolist()),
    "filled": lambda entry: torch.zeros_like(entry).copy_(entry),
    "parameter": lambda entry: nn.Parameter(entry).data,
    "norm": lambda entry: float(entry.norm()),
}
HOOKS |= {name: changed_entries(change) for name, change in CHANGES.items()}


@hook
def merged(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    entries = checkpoint["state_dict"]
    product = entries["up.weight"] @ entries["down.weight"]
    entries["base.weight"] = entries["base.weight"] + 0.5 * product
    del entries["up.weight"], entries["down.weight"]


@hook
def filtered(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    entries = checkpoint["state_dict"]
    checkpoint["state_dict"] = {f"net.{n}": e for n, e in entries.items() if "base" not in n}


@hook
def filtered_by_rank_zero(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    if trainer.is_global_zero:
        for name in [name for name in checkpoint["state_dict"] if "base" in name]:
            del checkpoint["state_dict"][name]


@hook
def computed_by_rank_zero(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    if trainer.is_global_zero:
        entries = checkpoint["state_dict"]
        checkpoint["norms"] = {name: float(entry.norm()) for name, entry in entries.items()}


@hook
def computed_by_rank_one(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    if trainer.global_rank == 1:
        checkpoint["sum"] = sum(float(entry.sum()) for entry in checkpoint["state_dict"].values())


@hook
def computed_before_a_barrier(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    if trainer.is_global_zero:
        checkpoint["largest"] = checkpoint["state_dict"]["base.weight"].max().item()
    trainer.strategy.barrier()
    checkpoint["shape"] = tuple(checkpoint["state_dict"]["base.weight"].shape)


@hook
def written_to_a_file(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    file = io.BytesIO()
    torch.save(checkpoint["state_dict"], file)
    file.seek(0)
    checkpoint["written"] = torch.load(file)


@hook
def in_a_tuple(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    entries = checkpoint["state_dict"]
    checkpoint["pair"] = (entries["up.weight"], [entries["down.weight"]])


@hook
def concatenated(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    entries = [entry.flatten() for entry in checkpoint["state_dict"].values()]
    checkpoint["state_dict"] = {"all": torch.cat(entries)}


@hook
def loaded_elsewhere(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    other = nn.Linear(6, 6, dtype=torch.float64)
    other.load_state_dict(
        {"weight": checkpoint["state_dict"]["base.weight"], "bias": torch.ones(6)}
    )
    checkpoint["other"] = other.state_dict()


@hook
def changed_in_place(checkpoint: Checkpoint, trainer: pl.Trainer) -> None:
    entries = checkpoint["state_dict"]
    entries["up.weight"].mul_(1.5)
    entries["down.weight"][0].zero_()
    entries["base.bias"].data.fill_(2.0)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 6, dtype=torch.float64).requires_grad_(False)
        self.down = nn.Linear(6, 3, bias=False, dtype=torch.float64)
        self.up = nn.Linear(3, 6, bias=False, dtype=torch.float64)
        self.active: Hook | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.base(batch[0]) + self.up(self.down(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.down.parameters(), *self.up.parameters()], lr=0.1)

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self.active is not None:
            self.active(checkpoint, self.trainer)


class Active(pl.Callback):
    active: Hook | None = None

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: Checkpoint) -> None:
        if self.active is not None:
            self.active(checkpoint, trainer)


class SavesAll(pl.Callback):
    """After the first step checkpoints of hooks, as the module's and as a callback's."""

    def __init__(self, root: str, active: Active, saves: list[tuple[str, str]]) -> None:
        self.root = root
        self.active = active
        self.saves = saves

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *unused: Any) -> None:
        if trainer.global_step > 1:
            return
        for name, kind in self.saves:
            owner = module if kind == "module" else self.active
            owner.active = HOOKS[name]
            trainer.save_checkpoint(f"{self.root}/{name}-{kind}.ckpt")
            owner.active = None


# Of every hook as the module's and as a callback's; by default each hook is one of them, in turn.
ALL_SAVES = list(product(HOOKS, ("module", "callback")))
QUICK_SAVES = [(name, ("module", "callback")[i % 2]) for i, name in enumerate(HOOKS)]


def train(
    root: str, options: dict[str, Any] | None, saves: list[tuple[str, str]] = ALL_SAVES
) -> dict[str, Any]:
    """Two steps, with the checkpoints after the first; the weights at the end."""
    torch.manual_seed(1)
    data = TensorDataset(*torch.randn(2, 16, 6, dtype=torch.float64))
    strategy: Any = "ddp"
    if options is not None:
        strategy = AlpaStrategy(cluster="pcie_8gpu", plan_dir=f"{root}/plans", **options)
    active = Active()
    arguments = {**QUIET, "enable_checkpointing": False, "default_root_dir": root}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2,
        callbacks=[active, SavesAll(root, active, saves)],
        **arguments,
    )
    net = Net()
    trainer.fit(net, DataLoader(data, batch_size=4))
    return {name: value.clone() for name, value in net.state_dict().items()}


def read(path: str) -> Any:
    """What a checkpoint holds besides the Trainer's own, all of it in memory."""
    checkpoint = open_checkpoint(path, weights_only=False)
    of_trainer = {"loops", "callbacks", "pytorch-lightning_version"}
    own = {key: checkpoint[key] for key in checkpoint.keys() - of_trainer}
    return pytree.tree_map_only(torch.Tensor, torch.clone, own)


CASES = {
    "data": {"parallel": "data"},
    "zero3": {"parallel": "zero3"},
    "zero2": {"parallel": "zero2"},
    "uncaptured zero3": {"parallel": "zero3", "capture": "never"},
    "sharded data": {"parallel": "data", "checkpoint": "sharded"},
    "single zero3": {"parallel": "zero3", "checkpoint": "single"},
    "background zero3": {"parallel": "zero3", "async_checkpoint": True},
    "background data": {"parallel": "data", "async_checkpoint": True},
}


# One whole file and a directory, written now and in the background, by one rank and by each.
QUICK = ("data", "single zero3", "background zero3")


@pytest.fixture(scope="module")
def under_ddp(pool, tmp_path_factory) -> Callable[[list[tuple[str, str]]], Any]:
    """Return a function: the folder of a training's checkpoints and its weights, computed once."""
    results: dict[int, Any] = {}

    def get(saves: list[tuple[str, str]]) -> Any:
        if len(saves) not in results:
            root = tmp_path_factory.mktemp("ddp")
            weights = pool.run(2, train, str(root), None, saves, init_group=False)[0]
            results[len(saves)] = root, weights
        return results[len(saves)]

    return get


@pytest.mark.parametrize("case", slow_but(CASES, QUICK))
def test_hooks_compute_as_under_ddp(pool, tmp_path: Path, under_ddp: Any, case: str) -> None:
    saves = QUICK_SAVES if case in QUICK else ALL_SAVES
    folder, weights = under_ddp(saves)
    per_rank = pool.run(2, train, str(tmp_path), CASES[case], saves, init_group=False)
    for of_rank in per_rank if "single" not in case else ():  # whose entries are copies
        torch.testing.assert_close(of_rank, weights, rtol=1e-9, atol=1e-9)
    for name, kind in saves:
        if "single" in case and name == "changed_in_place":
            continue  # the second of these checkpoints shows that of the first
        path = f"{name}-{kind}.ckpt"
        expected, saved = read(str(folder / path)), read(str(tmp_path / path))
        for part in expected.keys() - {"optimizer_states"}:
            torch.testing.assert_close(
                saved[part], expected[part], rtol=1e-9, atol=1e-9, msg=f"{path}: {part}"
            )
        moments = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (saved, expected)]
        torch.testing.assert_close(*moments, rtol=1e-9, atol=1e-9)
    assert is_checkpoint(tmp_path / "data-module.ckpt") == (
        ("data" not in case and "single" not in case) or "sharded" in case
    )
