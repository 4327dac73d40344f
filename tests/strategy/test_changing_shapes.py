"""Batches of many shapes: each is captured, and a larger one planned around the running parameters;
the training stays the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from models import GPT
from quiet import QUIET
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy

TOLERANCE = 1e-9
# Of the sequences in each global batch: the second is shorter than the first, the third longer.
LENGTHS = (6, 5, 8, 6, 5, 8)
ROWS = 4  # of a global batch
VOCABULARY = 33
PIPELINE = {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}


class Texts(Dataset):
    """Rows of tokens as long as their batch wants, with a name and a number that the step does not
    look at.
    """

    def __len__(self) -> int:
        return len(LENGTHS) * ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (LENGTHS[index // ROWS] + 1,), generator=generator)
        return {"tokens": tokens, "name": f"row {index}", "number": index}


class Padded(Texts):
    """As a loader that pads on each rank for itself: the ranks' lengths differ in one batch."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        if index // ROWS == 3 and index % 2:
            row["tokens"] = row["tokens"][:-1]
        return row


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": torch.stack([row["tokens"] for row in rows]),
        "names": [row["name"] for row in rows],
        "number": rows[0]["number"],
    }


class Model(GPT):
    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY, num_layers=1)
        self.names: list[str] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        tokens = batch["tokens"]
        logits = self(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return {"loss": loss, "names": batch["names"], "number": batch["number"]}

    def on_train_batch_end(
        self, outputs: dict[str, Any], batch: dict[str, Any], batch_idx: int
    ) -> None:
        assert outputs["names"] == batch["names"]
        assert outputs["number"] == batch["number"]
        self.names += outputs["names"]


def train(root: str, strategy: dict[str, Any] | None, data: str = "Texts") -> dict[str, Any]:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        model = Model()
    finally:
        torch.set_default_dtype(torch.float32)
    texts = globals()[data]()
    parallel: dict[str, Any] = {"devices": 1}
    sampler: Any = [s + r + i for s in range(0, len(texts), ROWS) for r in range(2) for i in (0, 2)]
    if strategy is not None:
        options = {
            "cluster": "pcie_8gpu",
            "plan_dir": f"{root}/plans",
            "verbose": False,
            **strategy,
        }
        parallel = {"devices": 2, "strategy": AlpaStrategy(**options)}
        sampler = DistributedSampler(texts, 2, torch.distributed.get_rank(), shuffle=False)
    loader = DataLoader(texts, ROWS // parallel["devices"], sampler=sampler, collate_fn=collate)
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=2,
        **QUIET,
        default_root_dir=root,
        **parallel,
    )
    trainer.fit(model, loader)
    return {
        "state": model.state_dict(),
        "loss": float(trainer.callback_metrics["train_loss"]),
        "names": model.names,
    }


# One stage plans other shapes alike, whatever its layouts.
@pytest.mark.parametrize(
    "strategy",
    [
        {"parallel": "zero3"},
        pytest.param({"parallel": "tensor"}, marks=pytest.mark.slow),
        PIPELINE,
    ],
    ids=str,
)
def test_lengths_that_change_from_batch_to_batch(
    pool, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    reference = train(str(tmp_path), None)
    strategy = {"capture": "require", **strategy}  # three shapes in four steps
    runs = pool.run(2, train, str(tmp_path), strategy)
    for run in runs:
        torch.testing.assert_close(run["state"], reference["state"], rtol=TOLERANCE, atol=TOLERANCE)
    # Each rank logs the loss of its own batch.
    mean = sum(run["loss"] for run in runs) / len(runs)
    assert mean == pytest.approx(reference["loss"], rel=TOLERANCE)
    assert sorted(runs[0]["names"] + runs[1]["names"]) == sorted(reference["names"])
    plans = {path: path.stat().st_mtime_ns for path in (tmp_path / "plans").glob("*.json")}
    # A smaller batch runs under the running plan's layouts, but for pipelines.
    num_planned_shapes = 3 if strategy.get("num_stages") else 2
    assert len(plans) == num_planned_shapes
    # The second run finds a stored plan for every planned shape.
    pool.run(2, train, str(tmp_path), strategy)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "plans").glob("*.json")} == plans


def test_different_lengths_on_ranks_are_an_error_for_one_batch(pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"differ.*rank 0: \[2, 7\]; rank 1: \[2, 6\]"):
        pool.run(2, train, str(tmp_path), {"parallel": "zero3", "batch_scope": "rank"}, "Padded")
    # eager steps, as under DDP
    first, second = pool.run(2, train, str(tmp_path), {"parallel": "zero3"}, "Padded")
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)
