"""The notes that a training shows are those of its own step: a plan that is stored, or in a file,
was made for an equal graph, which another code may have given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from models import MLP
from quiet import QUIET
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy


class Checkpointed(MLP):
    """The graph of an MLP, and a note: the plan decides what is recomputed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(checkpoint(self.net, x, use_reentrant=False), y)
        self.log("train_loss", loss)
        return loss


def notes_of(kind: type, root: str, **options: object) -> tuple[str, ...]:
    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, plan_dir=f"{root}/plans", **options)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=1, default_root_dir=root, **QUIET
    )
    module = kind()
    trainer.fit(module, DataLoader(TensorDataset(*module.example_batch(8)), batch_size=4))
    assert strategy.plan is not None
    return strategy.plan.notes


def compare(root: str) -> tuple[tuple[str, ...], ...]:
    first = notes_of(Checkpointed, root)
    assert len(list(Path(root, "plans").glob("*.json"))) == 1
    second = notes_of(MLP, root)
    third = notes_of(Checkpointed, root)
    (file,) = Path(root, "plans").glob("*.json")  # the graphs are equal: one plan is for all
    fourth = notes_of(MLP, root, plan=str(file))
    return first, second, third, fourth


def test_notes_of_the_step_that_runs(pool, tmp_path: Path):
    ((first, second, third, fourth),) = pool.run(1, compare, str(tmp_path), init_group=False)
    assert any("checkpointing" in note for note in first)
    assert third == first
    assert not any("checkpointing" in note for note in second)
    assert fourth == second
