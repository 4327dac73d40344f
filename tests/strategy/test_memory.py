"""Peak memory is what the plan says, from process start on where a module is built without memory;
nothing leaks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from extras.host_allocator.limited_plans import planned_under_limit
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy
from alpa_strategy.extras.host_allocator.allocator import trim

BENCH = Path(__file__).parents[2] / "scripts" / "bench_memory.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["data", "zero3", "tensor", "1F1B", "GPipe", "large", "large, 6 layers"]
)
def test_measured_peaks_are_the_planned_ones(case: str) -> None:
    """Within 15 % (`data` is held to a limit), and the full process below plan and `process_bytes`
    + 10 %; `large`
    does not fit on one device, and is never whole on any rank."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{BENCH.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, str(BENCH), "--cases", case, "--require", "0.15", "--details"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


class Sequences(torch.utils.data.Dataset):
    """Rows of a length that changes from batch to batch, from one of four to another."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> torch.Tensor:
        length = (64, 96, 80, 128)[index // 2 % 4]
        return torch.randn(length, 64, generator=torch.Generator().manual_seed(index))


class Perceptron(pl.LightningModule):
    """A step keeps about 2 MB for its backward, so 80 steps that leak would hold 160."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))
        self.resident: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) - batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch) - batch).abs().mean())

    def on_validation_end(self) -> None:
        trim()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident.append(pages * os.sysconf("SC_PAGESIZE"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def resident_bytes(root: str, strategy: dict[str, Any]) -> list[int]:
    """Resident memory of this rank after every 10 of 120 steps."""
    given = AlpaStrategy(cluster="pcie_8gpu", plan_dir=f"{root}/plans", verbose=False, **strategy)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=given,
        max_epochs=2,
        default_root_dir=root,
        **QUIET,
        val_check_interval=10,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    torch.manual_seed(1)
    model = Perceptron()
    loaders = [DataLoader(Sequences(), batch_size=2) for _ in range(2)]
    trainer.fit(model, *loaders)
    return model.resident


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"parallel": "zero3"}, id="zero3"),
        pytest.param(
            {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"},
            id="1F1B",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_memory_does_not_grow_over_steps_of_changing_shapes(
    pool, tmp_path: Path, strategy: dict
) -> None:
    for resident in pool.run(2, resident_bytes, str(tmp_path), strategy):
        assert len(resident) == 12
        assert resident[-1] - resident[3] < 16e6


def planned_to_accumulate(root: str) -> list[int]:
    """Planned bytes: without accumulation, with it from the first epoch on, and from a later one
    on.
    """
    later = [GradientAccumulationScheduler({0: 1, 3: 2})]
    given: list[dict[str, Any]] = [{}, {"accumulate_grad_batches": 2}, {"callbacks": later}]
    return [planned_under_limit(root, None, **each)[0].peak_bytes for each in given]


def test_gradients_that_accumulate_later_are_planned(pool, tmp_path: Path) -> None:
    """They live through the forward then."""
    ((never, always, later),) = pool.run(1, planned_to_accumulate, str(tmp_path))
    assert never < always == later
