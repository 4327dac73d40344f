"""Seconds of a GRPO iteration as it runs against what `iteration_phases` has it priced at, on the
CPUs of this machine.

    python scripts/bench_phases.py              # one process and two ranks, a small and a larger policy
    python scripts/bench_phases.py --ranks 1

A job trains `recipes/grpo.py` under the strategy (its steps run as they are written), and times
whole training steps and the writing of answers within. Beside it the cluster is measured, as jobs
do, the phases are captured and their ops timed for at most `--budget` seconds; rank 0 prices the
iteration with parameters whole, as they lie there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 2,
        "hidden": 64,
        "num_heads": 4,
        "vocab_size": 32,
        "sequence_length": 12,
    },
    "larger": {
        "num_layers": 3,
        "hidden": 384,
        "num_heads": 6,
        "vocab_size": 512,
        "sequence_length": 32,
    },
}
LENGTHS = {"tiny": (4, 8), "larger": (16, 16)}  # of prompts and answers
PROMPTS = 4  # of a rank, with eight answers each


def worker(args: argparse.Namespace) -> None:
    """One rank; rank 0 writes what it found."""
    import lightning.pytorch as pl
    import torch

    sys.path.insert(0, str(ROOT / "recipes"))
    from grpo import GRPO, PromptData

    from alpa_strategy import AlpaStrategy, PlanOptions, RooflineCosts, make_plan
    from alpa_strategy.comm.measure import measure_cluster
    from alpa_strategy.comm.mesh import build_mesh
    from alpa_strategy.cost.measured import OpTable, measure_ops
    from alpa_strategy.lightning.planning import local_calls
    from alpa_strategy.planner.phases import capture_phases

    clock = time.process_time if args.cpu else time.perf_counter
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prompt, answer = LENGTHS[args.size]
    seconds: dict[str, list[float]] = {"step": [], "answers": []}
    found: dict[str, Any] = {}

    class Timed(GRPO):
        def answer(self, *given: Any) -> Any:
            began = clock()
            try:
                return super().answer(*given)
            finally:
                seconds["answers"].append(clock() - began)

    class Clock(pl.Callback):
        def on_fit_start(self, *unused: object) -> None:
            self.cluster = measure_cluster(
                1, args.rank_count, build_mesh, Path(args.folder), torch.device("cpu")
            )

        def on_train_batch_start(self, *unused: object) -> None:
            self._began = clock()

        def on_train_batch_end(self, *unused: object) -> None:
            seconds["step"].append(clock() - self._began)

    module, watch = Timed(SIZES[args.size], answer), Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.rank_count,
        strategy=AlpaStrategy(parallel="data", verbose=False),
        max_steps=2 * args.steps,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.folder,
    )
    trainer.fit(module, PromptData(PROMPTS, SIZES[args.size]["vocab_size"], prompt))
    if trainer.global_rank:
        return
    with torch.device("meta"):
        module = GRPO(SIZES[args.size], answer)
    batch = torch.zeros(PROMPTS, prompt, dtype=torch.int64), torch.arange(PROMPTS)
    phases = capture_phases(module, batch, args.rank_count, "rank", torch.enable_grad)
    calls = set().union(*(local_calls(step, (args.rank_count,)) for _, step in phases.values()))
    table = measure_ops(calls, "cpu", args.budget, OpTable(), name=watch.cluster.device.name)
    costs = RooflineCosts(watch.cluster.device, table)
    plan = make_plan(module, batch, watch.cluster, PlanOptions(parallel="data"), costs=costs)
    kept = {name: statistics.median(each[args.warmup :]) for name, each in seconds.items()}
    priced = {}
    for phase in plan.phases:
        priced[phase.name] = phase.times * (phase.staying_seconds or 0.0)
    found = {"measured": kept, "priced": priced, "timed": f"{len(table)} of {len(calls)}"}
    Path(args.out).write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--steps", type=int, default=12, help="iterations")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for timing ops")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU seconds, which a busy machine changes less"
    )
    for name in ("--out", "--folder", "--size"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank-count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        worker(args)
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="An iteration of GRPO, gloo, fp32: ms measured, and as priced")
    for column in ("policy", "ranks", "answers", "priced", "ratio", "iteration", "priced", "ratio"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    shown = [f"--steps={args.steps}", f"--warmup={args.warmup}", f"--budget={args.budget}"] + [
        "--cpu"
    ] * args.cpu
    for size, ranks in product(args.sizes, args.ranks):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={ranks}",
            ]
            given = [
                f"--size={size}",
                f"--rank-count={ranks}",
                f"--folder={folder}",
                f"--out={out}",
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            done = subprocess.run(
                [*command, __file__, *shown, *given],
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
            found = json.loads(out.read_text())
        measured, priced = found["measured"], found["priced"]
        written = priced["prompt"] + priced["answer"]
        pairs = ((measured["answers"], written), (measured["step"], sum(priced.values())))
        row = [
            text for a, b in pairs for text in (f"{1e3 * a:.1f}", f"{1e3 * b:.1f}", f"{a / b:.2f}")
        ]
        table.add_row(size, str(ranks), *row)
        print(
            size,
            ranks,
            "ops timed",
            found["timed"],
            {k: f"{1e3 * v:.1f} ms" for k, v in priced.items()},
            flush=True,
        )
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
