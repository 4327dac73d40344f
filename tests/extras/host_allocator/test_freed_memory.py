"""Freed host memory is kept for the next step within a limit that binds, and page faults are priced
where there is no headroom for it.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import torch
from extras.host_allocator.limited_plans import Deep, planned_under_limit
from quiet import QUIET
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy
from alpa_strategy.extras.host_allocator.allocator import KEPT_BLOCKS, LEAST_BYTES, THREAD, trim
from alpa_strategy.extras.host_allocator.page_faults import PAGE_FAULTS


class Most(pl.Callback):
    """The most that this process held within the steps after the first, beyond what it held before
    the first.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._steps = 0
        self._before = 0
        self.threads = 0

    def on_train_batch_start(self, *unused: object) -> None:
        self._steps += 1
        if self._steps == 1:
            self._before = self.held()
        threading.Thread(target=self._watch, args=(self._steps,), daemon=True).start()

    def _watch(self, step: int) -> None:
        while 1 < step == self._steps:
            self.num_bytes = max(self.num_bytes, self.held() - self._before)
            time.sleep(0.002)

    def on_train_end(self, *unused: object) -> None:
        self._steps, self.threads = 0, threads_that_trim()

    @staticmethod
    def held() -> int:
        info = psutil.Process().memory_info()
        return info.rss - info.shared


def threads_that_trim() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


def held_under_limit(root: str, limit: float) -> tuple[int, int, int, float]:
    """(most bytes held, threads that give memory back: in the fit, and after it; bytes planned)."""
    most = Most()
    strategy = AlpaStrategy(
        cluster="pcie_8gpu",
        plan_dir=f"{root}/plans",
        verbose=False,
        memory_limit=limit,
        num_stages=1,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=6,
        default_root_dir=root,
        callbacks=[most],
        **QUIET,
    )
    torch.manual_seed(1)
    trainer.fit(Deep(), DataLoader(torch.randn(6 * 12288, 128), batch_size=12288))
    time.sleep(0.2)  # it looks every few milliseconds
    assert strategy.plan is not None
    return most.num_bytes, most.threads, threads_that_trim(), strategy.plan.predicted.peak_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_within_a_limit_that_binds(pool, tmp_path: Path) -> None:
    limit = 378e6  # keeping all takes 630
    ((held, threads, left, planned),) = pool.run(1, held_under_limit, str(tmp_path), limit)
    assert held < 1.1 * limit
    assert (threads, left) == (1, 0)
    assert planned <= limit / KEPT_BLOCKS  # freed blocks have room in addition


def test_a_plan_without_room_counts_page_faults(pool, tmp_path: Path) -> None:
    ((roomy, said),) = pool.run(1, planned_under_limit, str(tmp_path), None)
    ((tight, notes),) = pool.run(1, planned_under_limit, str(tmp_path), 1.05 * roomy.peak_bytes)
    assert tight.peak_bytes == roomy.peak_bytes > LEAST_BYTES
    assert tight.step_seconds == pytest.approx((1 + PAGE_FAULTS) * roomy.step_seconds)
    parts = tight.compute_seconds + tight.communication_seconds + tight.optimizer_seconds
    assert tight.step_seconds == pytest.approx(parts)
    (note,) = set(notes) - set(said)
    assert "page faults" in note


def test_giving_memory_back_leaves_nothing_behind() -> None:
    """A thread does it up to 250 times a second."""
    trim()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        trim()
    assert len(gc.get_objects()) - before < 20
