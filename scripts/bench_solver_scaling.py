"""How long the intra-op solver takes on GPT-shaped instances: python
scripts/bench_solver_scaling.py [num_layers ...].

One row per size and memory limit (as a share of the way from the least bytes to those of the
fastest assignment).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from proofs.synthetic import gpt_like, least_bytes
from rich.console import Console
from rich.table import Table

from alpa_strategy.intra_op.problem import Problem
from alpa_strategy.intra_op.solver.solve import solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_layers", nargs="*", type=int, default=[4, 16, 53])
    parser.add_argument(
        "--memory", nargs="*", type=float, default=[0.7, 0.3, 0.1], help="shares; 1 is the loosest"
    )
    parser.add_argument(
        "--noise", type=float, default=0.0, help="relative noise on costs: makes all layers differ"
    )
    parser.add_argument("--time-limit", type=float, default=30.0)
    options = parser.parse_args()

    table = Table(
        title="solve()",
        caption="CPU seconds of one core; gap = (objective - proved bound) / objective",
    )
    for column in (
        "layers",
        "choices",
        "strategies",
        "memory",
        "method",
        "objective",
        "gap",
        "CPU s",
    ):
        table.add_column(column, justify="right")
    for num_layers in options.num_layers:
        problem = gpt_like(num_layers, noise=options.noise)
        most = solve(problem).num_bytes
        least = least_bytes(problem)
        limits = [("none", float("inf"))]
        limits += [(f"{share:.0%}", least + share * (most - least)) for share in options.memory]
        for name, limit in limits:
            table.add_row(
                str(num_layers),
                *_row(replace(problem, memory_limit=limit), name, options.time_limit),
            )
    Console().print(table)


def _row(problem: Problem, memory: str, time_limit: float) -> list[str]:
    start = time.process_time()
    solution = solve(problem, time_limit)
    took = time.process_time() - start
    sizes = [str(len(problem.choices)), str(sum(len(choice.cost) for choice in problem.choices))]
    figures = [
        solution.method,
        f"{solution.seconds * 1e3:.3f} ms",
        f"{solution.gap:.4%}",
        f"{took:.2f}",
    ]
    return [*sizes, memory, *figures]


if __name__ == "__main__":
    main()
