"""Numbers that change at every step, attributes or in the batch, are captured twice and are inputs
from then on.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from covering import in_tiers
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import alpa_strategy.lightning.run as run_module
from alpa_strategy import AlpaStrategy

ROWS = 8
STEPS = 16
WIDTH = 6


class Samples(Dataset):
    """Rank `rank`'s rows of each batch of ROWS rows."""

    def __init__(self, rank: int, ranks: int) -> None:
        share = ROWS // ranks
        self.rows = [b * ROWS + rank * share + k for b in range(STEPS) for k in range(share)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        row = self.rows[index]
        generator = torch.Generator().manual_seed(row)
        return (
            torch.randn(WIDTH, generator=generator, dtype=torch.float64),
            torch.tensor(row % 3),
            row,
        )


def collate(samples: list[Any]) -> dict[str, Any]:
    x, y, rows = zip(*samples, strict=True)
    return {
        "x": torch.stack(x),
        "y": torch.stack(y),
        "weight": 1.0 / (1 + rows[0] // ROWS),
        "name": "rows",
    }


class Gate(nn.Module):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * x)


class Net(pl.LightningModule):
    """Whose numbers change in hooks, in every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"entropy": 0.3, "kind": "net"})
        self.first = nn.Linear(WIDTH, 8)
        self.gate = Gate()
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(8, 3)
        self.beta = 0.5
        self.count = 3
        self.weights = {"kl": 1.0, "name": "kl"}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.beta *= 0.9
        self.count += 2
        self.gate.scale = 1.0 + 0.1 * math.sin(batch_idx)
        self.weights["kl"] /= 1.1
        self.hparams.entropy = 0.3 / (1 + batch_idx)

    def number(self, batch: Any) -> Any:
        warm = min(1.0, self.count / 100)  # always the left one, or another path is captured
        return self.beta * warm + math.exp(-self.weights["kl"]) + float(self.hparams.entropy)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        loss = (
            F.cross_entropy(logits, batch["y"]) * batch["weight"]
            + self.number(batch) * logits.square().mean()
        )
        self.log("loss", loss, sync_dist=True)
        self.log("beta", self.beta)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class OfACallback(Net):
    class Anneals(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            module.beta = 1.0 / (3 + trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_callbacks(self) -> Any:
        return [self.Anneals()]


class WithinTheStep(Net):
    """A number that the step itself counts with: an input, which is set after each step."""

    def number(self, batch: Any) -> Any:
        self.beta *= 0.95
        return self.beta


class AsAnIndex(Net):
    """Captured at each of a few values, as the slice is another one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count = batch_idx % 3
        self.beta *= 0.9

    def number(self, batch: Any) -> Any:
        return self.beta * batch["x"][:, self.count :].mean()


class Branching(Net):
    def number(self, batch: Any) -> Any:
        return self.beta if self.beta > 0.2 else 2 * self.beta


class OtherOnARank(Net):
    """From step 6 on; DDP has it so."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        late = torch.distributed.is_initialized() and batch_idx > 5
        self.beta = 0.5 / (1 + batch_idx) + late * self.global_rank


def train(name: str, strategy: Any) -> tuple[dict[str, Tensor], list[dict[str, float]], int, bool]:
    """Final state, what was logged by step, how often the step was captured, and whether it runs as
    written.
    """
    torch.manual_seed(5)
    model = globals()[name]().double()
    logged: list[dict[str, float]] = []
    captures: list[int] = []
    capture = run_module.capture

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    def counted(*args: Any) -> Any:
        captures.append(1)
        return capture(*args)

    devices = 1 if strategy is None else 2
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        strategy="auto" if strategy is None else strategy,
        callbacks=[Watch()],
        use_distributed_sampler=False,
        **QUIET,
    )
    samples = Samples(torch.distributed.get_rank() if devices > 1 else 0, devices)
    run_module.capture = counted
    try:
        trainer.fit(model, DataLoader(samples, ROWS // devices, collate_fn=collate))
    finally:
        run_module.capture = capture
    is_ours = isinstance(trainer.strategy, AlpaStrategy)
    return (
        model.state_dict(),
        logged,
        len(captures),
        is_ours and trainer.strategy.plan.is_eager,
    )


def train_sharded(name: str, root: str, options: dict[str, Any]) -> Any:
    return train(
        name, AlpaStrategy(cluster="pcie_8gpu", plan_dir=f"{root}/plans", verbose=False, **options)
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "zero3": {"parallel": "zero3"},
    "stages": {"num_stages": 2, "num_microbatches": 2},
}


@pytest.mark.parametrize(("name", "plan"), in_tiers(product(("Net", "OfACallback"), OPTIONS)))
def test_numbers_that_change_are_inputs(pool, tmp_path, name: str, plan: str) -> None:
    options = OPTIONS[plan]
    state, logged, *_ = train(name, None)
    for run in pool.run(2, train_sharded, name, str(tmp_path), options):
        torch.testing.assert_close(run[0], state, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(run[1], logged, rtol=1e-9, atol=1e-9)
        assert run[2:] == (2, False)
        assert len({each["beta"] for each in run[1]}) == STEPS == len(logged)


def train_both(name: str, root: str) -> Any:
    return train(name, "ddp"), train_sharded(name, root, {})


@pytest.mark.parametrize(
    ("name", "captures"), [("AsAnIndex", 4), ("Branching", 3), ("WithinTheStep", 2)]
)
def test_numbers_of_shapes_and_branches_are_captured_by_their_values(
    pool, tmp_path, name: str, captures: int
) -> None:
    for expected, run in pool.run(2, train_both, name, str(tmp_path)):
        torch.testing.assert_close(run[:2], expected[:2], rtol=1e-9, atol=1e-9)
        assert run[2:] == (captures, False)


def test_numbers_of_one_rank_run_in_eager_steps(pool, tmp_path) -> None:
    for expected, found in pool.run(2, train_both, "OtherOnARank", str(tmp_path)):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-9)
        betas = [step["beta"] for step in found[1]]
        assert betas == [step["beta"] for step in expected[1]]
        assert found[3]
