"""An error of memory keeps its type, and its note names what was planned, what was there, and what
to change.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from quiet import QUIET
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy
from alpa_strategy.ir.plan import Fingerprint, ParameterPlan, Plan, Predicted, StagePlan
from alpa_strategy.lightning.out_of_memory import (
    DeviceMemory,
    is_out_of_memory,
    memory_note,
)

GB = 10**9
ERRORS: dict[str, Any] = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B"),
    "Python": MemoryError(),
}


class Greedy(pl.LightningModule):
    """Runs out of memory in the hook before the second step."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.layers(batch) - batch).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ERRORS[self.error]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(root: str, error: str, options: dict[str, Any]) -> tuple[str, list[str], bool]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AlpaStrategy(
            cluster="pcie_8gpu", plan_dir=f"{root}/plans", verbose=False, **options
        ),
        max_steps=3,
        default_root_dir=root,
        **QUIET,
    )
    try:
        trainer.fit(Greedy(error), DataLoader(torch.randn(32, 64), batch_size=4))
    except Exception as caught:
        notes = getattr(caught, "__notes__", [])
        return type(caught).__name__, notes, caught is ERRORS[error]
    return "", [], False


@pytest.mark.parametrize("error", ERRORS)
def test_a_step_that_runs_out_of_memory(pool, tmp_path, error: str) -> None:
    options = {"parallel": "data"}
    for name, notes, is_same in pool.run(2, train, str(tmp_path), error, options, init_group=False):
        assert is_same, name
        (note,) = [text for text in notes if "memory" in text]
        assert "ran out of memory" in note
        for part in ("weights", "state", "gradients"):
            assert part in note.partition("Planned:")[2].partition("\n")[0]
        assert "used by this process" in note
        assert 'parallel="zero3"' in note


def plan_of(peak_bytes: int) -> Plan:
    parts = {"weights": peak_bytes // 4, "state": peak_bytes // 2, "activations": peak_bytes // 4}
    predicted = Predicted(1.0, peak_bytes, memory=parts)
    plans = {"w": ParameterPlan.parse("R*")}
    stage = StagePlan((1, 2), 0, (2,), (0, 1), plans, ((),), (), predicted)
    return Plan(Fingerprint("g", "p", "b", "c", "o", "1"), (stage,), predicted)


def test_other_errors_are_not_of_memory() -> None:
    for error in (ValueError("out of memory"), RuntimeError("shape mismatch"), KeyError("memory")):
        assert not is_out_of_memory(error)


def test_memory_of_others_and_fragments_come_first() -> None:
    memory = DeviceMemory(total=80 * GB, used=30 * GB, unused=20 * GB, others=28 * GB)
    note = memory_note(plan_of(peak_bytes=60 * GB), 0, memory)
    first, second, *_ = note.partition("What to do: ")[2].split("What to do: ")
    assert "end the other processes" in first
    assert "expandable_segments" in second


def test_more_than_was_planned_is_named() -> None:
    memory = DeviceMemory(total=80 * GB, used=78 * GB, unused=0, others=0)
    note = memory_note(plan_of(peak_bytes=60 * GB), 0, memory)
    assert "16.8 GiB more than planned" in note


def test_without_a_plan_there_is_what_is_there() -> None:
    note = memory_note(None, 3, DeviceMemory(total=80 * GB, used=78 * GB, unused=0, others=0))
    assert "rank 3" in note
    assert "Planned: nothing yet" in note
