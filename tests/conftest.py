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


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """What a test leaves in the environment (seed_everything: PL_GLOBAL_SEED) would reach workers that start later."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
