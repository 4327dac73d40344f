"""`on_load_checkpoint` may compute with what is loaded, whose tensors are on disk, and change
it.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoint.test_save_hooks import Net, train
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy

Entries = dict[str, torch.Tensor]


def written(entries: Entries) -> Entries:
    file = io.BytesIO()
    torch.save(entries, file)
    file.seek(0)
    return torch.load(file)


def scaled_in_place(entries: Entries) -> Entries:
    for entry in entries.values():
        entry.mul_(2.0)
    return entries


def first_row_cleared(entries: Entries) -> Entries:
    entries["base.weight"][0].zero_()
    entries["up.weight"].data.view(-1)[:3].fill_(1.0)
    return entries


CHANGES: dict[str, Callable[[Entries], Entries]] = {
    "as they are": lambda entries: entries,
    "in place": scaled_in_place,
    "a view in place": first_row_cleared,
    "computed": lambda entries: {name: 0.5 * entry for name, entry in entries.items()},
    "copied": copy.deepcopy,
    "written": written,
    "numpy": lambda entries: {n: torch.from_numpy(e.numpy() + 1) for n, e in entries.items()},
    "lists": lambda entries: {n: torch.tensor(e.tolist()) for n, e in entries.items()},
    "merged": lambda entries: {
        **entries,
        "base.weight": entries["base.weight"] + entries["up.weight"] @ entries["down.weight"],
    },
    "float32": lambda entries: {name: entry.float() for name, entry in entries.items()},
    "data": lambda entries: {name: entry.data for name, entry in entries.items()},
}


class Loads(Net):
    change: Callable[[Entries], Entries]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self.change(checkpoint["state_dict"])

    def on_train_start(self) -> None:
        self.loaded = {key: value.clone() for key, value in self.state_dict().items()}
        # Nothing is trained.
        self.trainer.should_stop = True


def load(root: str, path: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """The weights with which the training goes on, for every change to what was loaded."""
    results = {}
    for name, change in CHANGES.items():
        strategy: Any = "ddp"
        if options is not None:
            strategy = AlpaStrategy(cluster="pcie_8gpu", plan_dir=f"{root}/plans", **options)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=2,
            **{**QUIET, "default_root_dir": root},
        )
        torch.manual_seed(2)
        data = TensorDataset(*torch.randn(2, 16, 6, dtype=torch.float64))
        net = Loads()
        net.change = change
        trainer.fit(net, DataLoader(data, batch_size=4), ckpt_path=path)
        results[name] = net.loaded
    return results


CASES = {"data": {"parallel": "data"}, "zero3": {"parallel": "zero3"}}


def save_and_load(pool: Any, folder: Path, options: dict[str, Any] | None) -> dict[str, Any]:
    """What rank 0 loads, with every change, of what a training under the same options saved."""
    saves = [("data", "module")]
    pool.run(2, train, str(folder / "saved"), options, saves, init_group=False)
    path = str(folder / "saved" / "data-module.ckpt")
    return pool.run(2, load, str(folder), path, options, init_group=False)[0]


@pytest.fixture(scope="module")
def under_ddp(pool, tmp_path_factory) -> dict[str, Any]:
    return save_and_load(pool, tmp_path_factory.mktemp("ddp"), None)


@pytest.mark.parametrize("case", CASES)
def test_hooks_change_what_is_loaded_as_under_ddp(
    pool, tmp_path: Path, under_ddp: dict[str, Any], case: str
) -> None:
    """The reader of an ordinary file, DDP, and of a directory or a file, ours, of one training."""
    result = save_and_load(pool, tmp_path, CASES[case])
    for name in CHANGES:
        torch.testing.assert_close(result[name], under_ddp[name], rtol=1e-9, atol=1e-9, msg=name)
