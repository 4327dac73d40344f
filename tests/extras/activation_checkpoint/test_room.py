"""Eager steps whose activations do not fit: the smallest number of first blocks is recomputed in
the backward.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy
from alpa_strategy.extras.activation_checkpoint import saved_for_backward_bytes

RANKS = 2
WIDTH = 16
BLOCKS = 6
ROWS = 8
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.fc, self.proj = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return (
            x + self.drop(self.proj(F.gelu(self.fc(self.norm(x.flatten(0, 1)))))).view_as(x) * scale
        )


class Matching(pl.LightningModule):
    """Predictions are matched with targets by Python, as in DETR: [rows, queries, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.scale = nn.Parameter(torch.randn(6, WIDTH)), nn.Parameter(torch.ones(()))
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        x = x[:, None] + self.queries
        for block in self.blocks:
            x = block(x, scale=self.scale)
        found = self.head(x)
        losses = []
        for own, boxes in zip(found, target, strict=True):
            free = list(range(len(own)))
            for box in boxes:
                nearest = min(free, key=lambda i: float((own[i] - box).square().sum()))
                free.remove(nearest)
                losses.append((own[nearest] - box).square().sum())
        return torch.stack(losses).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(1)
        x, target = (
            torch.randn(RANKS * ROWS * STEPS, *shape, generator=draw, dtype=torch.float64)
            for shape in ((WIDTH,), (3, 4))
        )
        return DataLoader(TensorDataset(x, target), batch_size=ROWS)


class Kept(pl.Callback):
    """Bytes that autograd keeps, by step."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    def on_before_backward(
        self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor
    ) -> None:
        self.num_bytes.append(
            saved_for_backward_bytes(loss, (), [*module.parameters(), *module.buffers()])
        )


def train(root: str, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    module = Matching().double()
    kept = Kept()
    said = list[str]()
    used: Any = (
        strategy
        if strategy == "ddp"
        else AlpaStrategy(cluster="pcie_8gpu", verbose=False, **options)
    )
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    common: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_epochs": 1,
        "precision": "64-true",
    }
    try:
        trainer = pl.Trainer(
            strategy=used, default_root_dir=root, callbacks=[kept], **common, **QUIET
        )
        trainer.fit(module)
    finally:
        logger.removeHandler(handler)
    return {
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "buffers": {name: b.clone() for name, b in module.named_buffers()},
        "bytes": kept.num_bytes,
        "said": [line for line in said if "are recomputed in it" in line],
        "peak": 0 if strategy == "ddp" else trainer.strategy.plan.predicted.peak_bytes,
    }


def check_equal(expected: list[Any], found: list[Any]) -> None:
    for one, other in zip(expected, found, strict=True):
        for part in ("weights", "buffers"):
            assert all(
                torch.allclose(v, other[part][k], rtol=0, atol=1e-9) for k, v in one[part].items()
            ), part
    assert all(
        torch.equal(value, found[1]["weights"][key]) for key, value in found[0]["weights"].items()
    )


# Under ZeRO-2 modules are recomputed with unsharded parameters, as in "data".
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param("data", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        "zero3",
    ],
)
def test_what_does_not_fit_runs_again(pool, tmp_path, parallel: str) -> None:
    root = str(tmp_path)
    expected = pool.run(RANKS, train, root, "ddp", {})
    whole = pool.run(RANKS, train, root, "alpa", {"parallel": parallel})
    assert not any(each["said"] for each in whole)
    every = whole[0]["bytes"][-1]
    limit = whole[0]["peak"] + every // 2
    per_rank = pool.run(
        RANKS, train, root, "alpa", {"parallel": parallel, "memory_limit": float(limit)}
    )
    again = pool.run(RANKS, train, root, "alpa", {"parallel": parallel, "remat": True})
    for each in (whole, per_rank, again):
        check_equal(expected, each)
    for rank in range(RANKS):
        # the bytes that the step saves outside of the blocks are unknown in the first step
        kept = per_rank[rank]["bytes"][1:]
        assert max(kept) <= every // 2
        assert min(kept) > 2 * again[rank]["bytes"][-1]
        assert per_rank[rank]["bytes"][0] < every
    assert again[0]["bytes"][-1] < every / 5
    ((line,), nothing) = (each["said"] for each in per_rank)
    assert "of 6 modules are recomputed in it, from blocks.0 to blocks." in line
    assert not nothing


def test_a_name_that_is_no_modules_is_an_error(pool, tmp_path) -> None:
    with pytest.raises(WorkerError, match=r"remat='gelu_\*' names no module"):
        pool.run(RANKS, train, str(tmp_path), "alpa", {"remat": ["gelu_*"]})


def test_what_only_a_captured_step_can_meet_is_left_to_the_room(pool, tmp_path) -> None:
    kept, asked = (
        pool.run(RANKS, train, str(tmp_path), "alpa", {"remat": remat})
        for remat in (None, "selective")
    )
    assert asked[0]["bytes"] == kept[0]["bytes"]
    assert not asked[0]["said"]


def test_all_is_kept_where_that_is_asked_for(pool, tmp_path) -> None:
    kept = pool.run(RANKS, train, str(tmp_path), "alpa", {"remat": None})
    forced = pool.run(
        RANKS, train, str(tmp_path), "alpa", {"remat": False, "memory_limit": kept[0]["peak"] + 1e3}
    )
    assert forced[0]["bytes"] == kept[0]["bytes"]
    assert not forced[0]["said"]
