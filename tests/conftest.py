"""Fixtures for all tests: one worker pool per session plays the ranks of multi-device jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # silences DeepSpeed's probe on machines without GPUs
sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """`pool.run(world_size, fn, *args)`: run a top-level test function on several ranks."""
    workers = WorkerPool()
    yield workers
    workers.close()
