"""How long ranks wait for a small collective between computations: gloo's, or through shared
memory.

    python scripts/bench_waits.py [--ranks 2 4] [--milliseconds 5] [--rounds 3]

The handle's own `wait` sleeps until gloo's thread wakes it, `comm.mesh.Pending` asks every 50
microseconds, ranks of one host look at each other's memory. The ways take turns. The ideal time is
that of the computations alone, where each rank has a core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from alpa_strategy.comm.mesh import AxisComm, build_mesh

STEPS, ELEMENTS = 100, 512
Way = Callable[[AxisComm, Tensor], object]
WAYS: dict[str, Way] = {
    "woken by gloo": lambda axis, tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "asking gloo": lambda axis, tensor: axis.start_all_reduce(tensor).wait(),
    "shared memory": lambda axis, tensor: axis.all_reduce(tensor),
}


def seconds(
    way: Callable[[AxisComm, Tensor], object], axis: AxisComm, busy_seconds: float
) -> tuple[float, list[float]]:
    """Of STEPS computations of `busy_seconds`, each followed by an all_reduce; and each wait's."""
    matrix = torch.randn(100, 100)
    tensor = torch.randn(ELEMENTS)
    waits = []
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        until = time.perf_counter() + busy_seconds
        while time.perf_counter() < until:
            matrix @ matrix
        started = time.perf_counter()
        way(axis, tensor)
        waits.append(time.perf_counter() - started)
    return time.perf_counter() - began, waits


def rank_main(rank: int, ranks: int, file: str, args: argparse.Namespace) -> None:
    """One rank of a job; the first prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    axis = build_mesh((ranks,)).all_devices
    rounds_of_way: dict[str, list[tuple[float, list[float]]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for name, way in WAYS.items():
            rounds_of_way[name].append(seconds(way, axis, args.milliseconds / 1e3))
    if rank == 0:
        table = Table(
            "way", "ms in all", "mean wait", "median", "90th percentile", title=f"{ranks} ranks"
        )
        for way, rounds in rounds_of_way.items():
            waits = sorted(
                1e3 * wait_seconds for _, of_round in rounds for wait_seconds in of_round
            )
            total = statistics.median(1e3 * wait_seconds for wait_seconds, _ in rounds)
            shown = statistics.mean(waits), statistics.median(waits), waits[int(0.9 * len(waits))]
            table.add_row(
                way, f"{total:.0f}", *(f"{wait_seconds:.2f} ms" for wait_seconds in shown)
            )
        Console().print(table)
    dist.destroy_process_group()


def main() -> None:
    """One job per number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--milliseconds", type=float, default=5.0, help="of a computation")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, (ranks, f"{folder}/store", args), ranks)


if __name__ == "__main__":
    main()
