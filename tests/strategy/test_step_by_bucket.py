"""Buckets of complete gradients are stepped while other gradients are reduced; the result is that
of one step.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from alpa_strategy import AlpaStrategy

STEPS, ROWS = 4, 4
ADAM = sys.modules["torch.optim.adam"]  # hidden by the package
WRITTEN = {"capture": "never"}
WAYS = {
    "data": {
        "placements": {"*": "R*"}
    },  # by measured costs a gradient may be summed as soon as it is made
    "zero1": {"parallel": "zero1"},
    "zero3": {"parallel": "zero3"},
    "data, written": {**WRITTEN, "parallel": "data"},
    "zero2, written": {**WRITTEN, "parallel": "zero2"},
}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)), nn.Linear(8, 1)
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LooksAtGradients(Net):
    """Changes them too: what the step uses must be what comes out of this."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5)


class Watch(pl.Callback):
    """Counts how often torch's own step runs, and keeps the gradients that are there after each."""

    def __init__(self) -> None:
        self.calls, self.grads = 0, []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.update = update = ADAM.adam

        def counted(parameters: list[Tensor], *args: Any, **kwargs: Any) -> None:
            self.calls += bool(parameters)
            update(parameters, *args, **kwargs)

        ADAM.adam = counted

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:  # planning has tried the optimizer
            self.calls = 0
        self.grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        ADAM.adam = self.update


KINDS = {kind.__name__: kind for kind in (Net, LooksAtGradients)}


def train(
    kind: str, options: dict[str, Any] | None, trainer_options: dict[str, Any]
) -> dict[str, Any]:
    torch.manual_seed(0)
    module, watch = KINDS[kind](), Watch()
    rows = torch.randn(2 * STEPS * ROWS, 8, dtype=torch.float64)
    alone = options is None
    strategy = {} if alone else {"strategy": AlpaStrategy(bucket_bytes=100, **options)}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if alone else 2,
        max_epochs=1,
        callbacks=[watch],
        **strategy,
        **trainer_options,
        **QUIET,
    )
    data = TensorDataset(rows)
    sampler = None if alone else DistributedSampler(data, 2, int(os.environ["RANK"]), shuffle=False)
    trainer.fit(module, DataLoader(data, 2 * ROWS if alone else ROWS, sampler=sampler))
    return {
        "calls": watch.calls,
        "weights": [p.detach() for p in module.parameters()],
        "grads": watch.grads,
    }


def both(
    pool: Any, kind: str, way: str, trainer_options: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What each of two ranks found, and what one device did."""
    alone = pool.run(1, train, kind, None, trainer_options, init_group=False)[0]
    return [
        (ours, alone)
        for ours in pool.run(2, train, kind, WAYS[way], trainer_options, init_group=False)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_a_step_are_a_step(pool, way: str) -> None:
    for ours, alone in both(pool, "Net", way, {}):
        assert alone["calls"] == STEPS - 1
        # What ZeRO sums while the backward runs is all there at its end.
        assert ours["calls"] > STEPS - 1 or way in ("zero1", "zero3")
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=1e-9, atol=1e-12)
        assert len(ours["grads"]) == STEPS


def test_gradients_are_there_after_it(pool) -> None:
    for ours, alone in both(pool, "Net", "data", {"accumulate_grad_batches": 2}):
        assert ours["calls"] > alone["calls"]
        torch.testing.assert_close(ours["grads"][1::2], alone["grads"][1::2], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "trainer_options"),
    [("LooksAtGradients", {}), ("Net", {"gradient_clip_val": 0.01})],
    ids=["hook", "clipping"],
)
def test_who_changes_gradients_before_a_step_has_them_all(
    pool, kind: str, trainer_options: dict[str, Any]
) -> None:
    for ours, alone in both(pool, kind, "data", trainer_options):
        assert ours["calls"] == alone["calls"]
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=1e-9, atol=1e-12)
