"""Whoever reads a step's values, before its backward or afterwards, finds them complete."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from quiet import QUIET
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from alpa_strategy import AlpaStrategy

ROWS, CLASSES = 8, 5
IGNORED = -100


class Classes(pl.LightningModule):
    """Its loss is a mean over targets that are not ignored, of which the ranks have unequal
    numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES)
        )

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self.net(x)
        loss = torch.nn.functional.cross_entropy(logits, y, ignore_index=IGNORED)
        correct = (logits.argmax(1) == y).sum()
        self.log("loss", loss)
        self.log("correct", correct.double(), reduce_fx="sum")
        return {"loss": loss, "correct": correct}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Outputs(pl.Callback):
    """What a batch's end sees: the step's outputs and what was logged."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *unused: Any) -> None:
        logged = trainer.callback_metrics
        values = outputs["loss"], outputs["correct"], logged["loss"], logged["correct"]
        self.seen.append(tuple(float(value) for value in values))


class BeforeBackward(Outputs):
    """Reads the loss before its backward as well."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[float] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.before.append(float(loss))


WATCHES = {"afterwards": Outputs, "before": BeforeBackward}


def train(
    callback: Outputs, strategy: dict[str, Any] | None, root: str, world_size: int, **options: Any
) -> dict[str, Any]:
    """One epoch of four steps; the plain run takes the ranks' samples as one batch."""
    torch.set_default_dtype(torch.float64)
    try:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4 * ROWS, 6, generator=generator)
        y = torch.randint(CLASSES, (4 * ROWS,), generator=generator)
        y[::2][: 3 * ROWS // 2] = IGNORED  # nearly all of rank 0's rows at first
        data = TensorDataset(x, y)
        if strategy is None or strategy.get("batch_scope") == "global":
            order = [
                i
                for step in range(4)
                for rank in range(world_size)
                for i in range(step * ROWS + rank, (step + 1) * ROWS, world_size)
            ]
            loader = DataLoader(torch.utils.data.Subset(data, order), batch_size=ROWS)
        else:
            sampler = DistributedSampler(data, shuffle=False)
            loader = DataLoader(data, batch_size=ROWS // world_size, sampler=sampler)
        module = Classes()
        chosen = "auto" if strategy is None else AlpaStrategy(**strategy)
        trainer = pl.Trainer(
            **QUIET,
            strategy=chosen,
            default_root_dir=root,
            max_epochs=1,
            devices=world_size if strategy else 1,
            callbacks=[callback],
            **options,
        )
        trainer.fit(module, loader)
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        "seen": callback.seen,
        "before": getattr(callback, "before", None),
        "weight": module.net[0].weight.detach().clone(),
    }


def train_under(
    watch: str, strategy: dict[str, Any] | None, root: str, options: dict[str, Any]
) -> Any:
    return train(WATCHES[watch](), strategy, root, 2, **options)


@pytest.mark.parametrize("parallel", ["data", "tensor"])
@pytest.mark.parametrize("watch", WATCHES)
def test_values_are_complete_where_they_are_read(pool, tmp_path, watch, parallel):
    plain = pool.run(1, train_under, watch, None, str(tmp_path), {}, init_group=False)[0]
    strategy = {
        "cluster": "pcie_8gpu",
        "plan_dir": str(tmp_path),
        "verbose": False,
        "parallel": parallel,
        "batch_scope": "global",
    }
    for run in pool.run(2, train_under, watch, strategy, str(tmp_path), {}):
        torch.testing.assert_close(
            torch.tensor(run["seen"]), torch.tensor(plain["seen"]), rtol=1e-9, atol=0
        )
        if watch == "before":
            assert run["before"] == [seen[0] for seen in run["seen"]]
        torch.testing.assert_close(run["weight"], plain["weight"], rtol=1e-9, atol=1e-15)


def test_the_loss_is_there_where_gradients_are_accumulated(pool, tmp_path):
    options = {"accumulate_grad_batches": 2}
    plain = pool.run(1, train_under, "afterwards", None, str(tmp_path), options, init_group=False)[
        0
    ]
    strategy = {"cluster": "pcie_8gpu", "plan_dir": str(tmp_path), "verbose": False}
    strategy["batch_scope"] = "global"
    for run in pool.run(2, train_under, "afterwards", strategy, str(tmp_path), options):
        torch.testing.assert_close(
            torch.tensor(run["seen"]), torch.tensor(plain["seen"]), rtol=1e-9, atol=0
        )
