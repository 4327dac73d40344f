"""Examines `strategy="alpa"` on one GPU: equality, speed, memory, predictions, streams,
checkpoints. The result is one table and one JSON.

    scripts/gpu_exam.sh                       # all of it, under nine minutes on one GPU
    scripts/gpu_exam.sh --device cpu --small  # the same code on a CPU, as in the slow tests
    scripts/gpu_exam.sh --parts speed ranks --out now.json

Every part runs in processes of its own under a time limit, and what it has found until it fails
counts: one failure hides no other. Several ranks share the one device over gloo (NCCL refuses
that), so that the collectives' code path runs on CUDA tensors. Exit code 1 if a verdict is not
"ok".
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu_exam_jobs import Row, run_limited
from gpu_exam_models import (
    Exam,
)
from gpu_exam_parts import PARTS, run_part
from gpu_exam_ranks import rank_jobs


def examine(
    exam: Exam, parts: Sequence[str], seconds: float, patience: float, out: Path
) -> list[Row]:
    """Run every part in a process of its own, and return the rows of all of them.

    Args:
        exam: device and sizes.
        parts: names in `PARTS`.
        seconds: for all parts together; parts without time are left out.
        patience: factor of every part's own limit.
        out: file to which the rows are written after each part.
    """
    rows: list[Row] = []
    end = time.perf_counter() + seconds
    for name in parts:
        limit = min(PARTS[name][1] * patience, end - time.perf_counter())
        if limit < 5:
            rows.append(part_row(name, "left out", "no time left", {}))
            continue
        rows += examine_part(exam, name, limit)
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def examine_part(exam: Exam, name: str, limit: float) -> list[Row]:
    """Run one part for at most `limit` seconds; return its rows and one of its outcome."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "rows.jsonl"
        command = [sys.executable, __file__, "--device", exam.device]
        command += ["--part", name, "--rows", str(lines)]
        if exam.small:
            command.append("--small")
        failure = ""
        started = time.perf_counter()
        try:
            run_limited(command, limit, folder, own_session=True)
        except RuntimeError as error:
            failure = str(error)
        took = time.perf_counter() - started
        if lines.exists():
            rows += [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    if failure:
        verdict, text = "failed", failure[-600:]
    else:
        verdict, text = "ok", f"{took:.0f} s"
    rows.append(part_row(name, verdict, text, {"seconds": took}))
    print(f"{name}: {verdict}, {took:.0f} s", flush=True)
    return rows


def part_row(name: str, verdict: str, text: str, figures: dict[str, float]) -> Row:
    """Return the row of a part's outcome."""
    return {"part": name, "item": "", "verdict": verdict, "text": text, "figures": figures}


def show(rows: Sequence[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("part", "item", "verdict", "found"):
        table.add_column(column, overflow="fold")
    for row in rows:
        if row["verdict"]:
            style = {"ok": None, "left out": "dim"}.get(row["verdict"], "red")
            table.add_row(row["part"], row["item"], row["verdict"], row["text"], style=style)
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu")
    )
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument(
        "--parts", nargs="*", default=list(PARTS), choices=list(PARTS), metavar="PART"
    )
    parser.add_argument("--out", default="gpu_exam.json", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=520, help="for all parts; what comes too late is left out"
    )
    parser.add_argument(
        "--patience", type=float, default=1, help="times every part's own limit, for a busy machine"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank-jobs", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    exam = Exam(args.device, args.small)
    if args.rank_jobs:
        rank_jobs(exam, args.rank_jobs)
        return 0
    if args.part:
        run_part(exam, args.part, args.rows)
        return 0
    started = time.perf_counter()
    rows = examine(exam, args.parts, args.seconds, args.patience, args.out)
    show(rows, f"alpa on {exam.device}, {time.perf_counter() - started:.0f} s")
    if any(row["verdict"] == "failed" for row in rows):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
