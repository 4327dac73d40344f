"""Seconds per GB that a sharded checkpoint's checksums (CRC-32) take, against writing and reading
it.

    python scripts/bench_checksum.py [--gigabytes 1] [--rounds 3] [--folder /tmp]

Of one process; wall seconds with the disk's, and processor seconds, of which other load says
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alpa_strategy import open_checkpoint
from alpa_strategy.checkpoint import opening
from alpa_strategy.checkpoint.saving import CheckpointWriter
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards, StoredTensor, map_tensors

TENSOR_BYTES = 1 << 24


class Clock:
    """Wall and processor seconds of all calls of what it wraps."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0

    def __call__(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            wall, processor = time.perf_counter(), time.process_time()
            try:
                return work(*arguments)
            finally:
                self.wall += time.perf_counter() - wall
                self.processor += time.process_time() - processor

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    count = max(1, round(arguments.gigabytes * 1e9 / TENSOR_BYTES))
    gigabytes = count * TENSOR_BYTES / 1e9
    value = torch.randn(TENSOR_BYTES // 4)
    state = {
        f"w{i}": LocalShards(value.shape, value.dtype, [Chunk((0,), value)]) for i in range(count)
    }
    checksum = opening.checksum
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "checkpoint"
        for _ in range(arguments.rounds):
            writing, write_sums, reading, read_sums = (Clock() for _ in range(4))
            opening.checksum = write_sums(checksum)  # type: ignore[assignment]
            writing(CheckpointWriter(None, None, is_rank_zero=True).save)(
                {"state_dict": state}, path
            )
            opening.checksum = read_sums(checksum)  # type: ignore[assignment]
            reading(
                lambda: map_tensors(
                    open_checkpoint(path), StoredTensor, lambda stored: stored.full_tensor()
                )
            )()
            rows.append([writing, write_sums, reading, read_sums])
            opening.checksum = checksum
    for name, total, sums in (("writing", 0, 1), ("reading", 2, 3)):
        for clock in ("wall", "processor"):
            seconds, of_sums = (
                statistics.median(getattr(row[i], clock) for row in rows) for i in (total, sums)
            )
            share = f"{of_sums / seconds:.0%}"
            print(
                f"{name}, {clock}: {seconds / gigabytes:.2f} s/GB, checksums"
                f" {of_sums / gigabytes:.2f} ({share})"
            )


if __name__ == "__main__":
    main()
