"""Hooks and lists get the results of a step on this rank's batch, as under DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy

ROWS = 4
WIDTH = 6
RANKS = 2
PLANS: list[dict[str, Any]] = [
    {"parallel": "data"},
    {"parallel": "tensor"},
    {"num_stages": 2, "num_microbatches": 2},
]


class Net(pl.LightningModule):
    """Returns rows in many forms and keeps some in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.kept: list[Any] = []

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, label = batch
        logits = self(x)
        self.kept.append({"logits": logits, "batch": batch_idx})
        return {
            "loss": F.cross_entropy(logits, label),
            "logits": logits.detach(),
            "own": logits[torch.arange(len(x)), label],
            "centred": x - x.mean(0),
            "views": (
                torch.cat([x, x + 1]),
                x.flatten(),
                x.T,
                x[:, 0],
                x.unsqueeze(1).expand(-1, 2, -1),
            ),
            "correct": (logits.argmax(1) == label).sum(),
            "products": x @ x.T,
            "weight": self.last.weight.detach().clone(),
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Sees(pl.Callback):
    """Compares the outputs with what this rank's samples give."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        x, label = batch
        with trainer.strategy.whole_parameters():
            logits = module(x).detach()
        same = torch.testing.assert_close
        same(outputs["logits"], logits)
        same(outputs["own"].detach(), logits[torch.arange(len(x)), label])
        same(
            list(outputs["views"]),
            [torch.cat([x, x + 1]), x.flatten(), x.T, x[:, 0], x[:, None].expand(-1, 2, -1)],
        )
        same(module.kept[-1]["logits"], logits)
        same(outputs["centred"], x - x.mean(0))
        same(outputs["products"], x @ x.T)
        same(outputs["correct"], (logits.argmax(1) == label).sum())
        same(outputs["loss"].detach(), F.cross_entropy(logits, label))
        assert outputs["weight"].shape == (3, 8)


def train(strategy: dict[str, Any], root: str) -> int:
    torch.manual_seed(0)
    data = TensorDataset(
        torch.randn(RANKS * ROWS * 3, WIDTH), torch.randint(0, 3, (RANKS * ROWS * 3,))
    )
    module = Net()
    chosen = AlpaStrategy(cluster="pcie_8gpu", verbose=False, capture="require", **strategy)
    trainer = pl.Trainer(
        strategy=chosen,
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        default_root_dir=root,
        callbacks=[Sees()],
        **QUIET,
    )
    trainer.fit(module, DataLoader(data, batch_size=ROWS))
    return len(module.kept)


@pytest.mark.parametrize("strategy", PLANS, ids=["data", "tensor", "stages"])
def test_hooks_see_this_ranks_rows(pool, tmp_path, strategy) -> None:
    assert pool.run(RANKS, train, strategy, str(tmp_path)) == [3, 3]
