"""Seconds and memory from recipe to plan, no devices: the paper's GPT sizes on its p3.16xlarge
cluster.

    python scripts/bench_planning.py                         # 2.6B on 8 and 39B on 64 devices
    python scripts/bench_planning.py gpt_6_7b:2 gpt_15b:4:90 # recipe:number of nodes (of 8
    devices):most seconds

Every plan is made by `alpa plan` in a process of its own; the chosen plan is set against every
named baseline.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def plan(recipe: str, num_nodes: int, folder: str) -> tuple[float, float, Path]:
    """(seconds, GiB at the peak, plan file) of one planning."""
    out = Path(folder) / f"{recipe}_{num_nodes}.json"
    command = [
        sys.executable,
        "-m",
        "alpa_strategy",
        "plan",
        str(ROOT / "recipes" / f"{recipe}.yaml"),
    ]
    command += [
        "--cluster",
        "p3_16xlarge_x8",
        f"cluster.num_nodes={num_nodes}",
        "plan.baselines=true",
        "-o",
        str(out),
    ]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    output, _ = process.communicate()
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{recipe} failed:\n{output[-3000:]}")
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, out


def read_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", default=["gpt_2_6b:1:30", "gpt_39b:8:120"], help="recipe:nodes:seconds"
    )
    parser.add_argument("--max-seconds", type=float, default=60.0)
    parser.add_argument("--max-gib", type=float, default=8.0)
    return parser.parse_args()


def main() -> int:
    args = read_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rich.console import Console
    from rich.table import Table

    from alpa_strategy.ir.plan import Plan
    from alpa_strategy.units import format_seconds

    table = Table(title="recipe to plan, no devices")
    for column in (
        "recipe",
        "devices",
        "planning",
        "peak memory so far",
        "mesh",
        "step",
        "baselines",
        "where the time went",
    ):
        table.add_column(column)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases:
            recipe, nodes, most = (case + "::").split(":")[:3]
            seconds, gib, file = plan(recipe, int(nodes or 1), folder)
            stored_plan = Plan.load(file)
            step = stored_plan.predicted.step_seconds
            ratios = []
            for name, s in stored_plan.baselines.items():
                if s:
                    ratios.append(f"{name} {s / step:.2f}x")
                else:
                    ratios.append(f"{name} does not fit")
            mesh = " + ".join(
                "x".join(map(str, stage.logical_mesh)) for stage in stored_plan.stages
            )
            row = (
                recipe,
                str(8 * int(nodes or 1)),
                f"{seconds:.1f} s",
                f"{gib:.2f} GiB",
                mesh,
                format_seconds(step),
            )
            spent = sorted(stored_plan.solver_seconds.items(), key=lambda item: -item[1])
            table.add_row(
                *row,
                ", ".join(ratios),
                ", ".join(f"{name} {format_seconds(s)}" for name, s in spent[:5]),
            )
            if seconds > float(most or args.max_seconds) or gib > args.max_gib:
                failed.append(f"{recipe}: {seconds:.1f} s, {gib:.2f} GiB")
            if any(s is not None and s < step * (1 - 1e-9) for s in stored_plan.baselines.values()):
                failed.append(f"{recipe}: a baseline is faster")
    Console(width=140).print(table)
    for line in failed:
        print("over the limit:", line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
