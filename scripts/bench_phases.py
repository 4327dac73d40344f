"""Seconds of a GRPO iteration as it runs against what `iteration_phases` has it priced at, on the
CPUs of this machine.

    # one process and two ranks, a small and a larger policy
    python scripts/bench_phases.py
    python scripts/bench_phases.py --ranks 1

A job trains `recipes/grpo.py` under the strategy in eager steps, and times full training steps and
the generation of answers within them. The job measures the cluster as jobs do, captures the phases
and times their ops for at most `--budget` seconds. Rank 0 prices the iteration with unsharded
parameters, as in this run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from bench_jobs import run_job, torchrun, user_threads
from rich.console import Console
from rich.table import Table

from alpa_strategy import AlpaStrategy, PlanOptions, RooflineCosts, make_plan
from alpa_strategy.comm.measure import measure_cluster
from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.cost.measured import OpTable, measure_ops
from alpa_strategy.extras.iteration_phases import capture_phases
from alpa_strategy.lightning.planning import local_calls

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

from grpo import GRPO, PromptData  # noqa: E402

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
# Tokens of (a prompt, an answer).
LENGTHS = {"tiny": (4, 8), "larger": (16, 16)}
# Prompts of a rank, with eight answers each.
PROMPTS = 4


class TimedGRPO(GRPO):
    """Stores the seconds of generating answers in `answer_seconds`."""

    clock: Callable[[], float]
    answer_seconds: list[float]

    def answer(self, *arguments: Any) -> Any:
        started = self.clock()
        try:
            return super().answer(*arguments)
        finally:
            self.answer_seconds.append(self.clock() - started)


class Clock(pl.Callback):
    """Measures the cluster at the start, then stores the seconds of each step."""

    def __init__(self, clock: Callable[[], float], num_ranks: int, folder: str) -> None:
        self._clock = clock
        self._num_ranks = num_ranks
        self._folder = Path(folder)
        self.step_seconds: list[float] = []

    def on_fit_start(self, *unused: object) -> None:
        device = torch.device("cpu")
        self.cluster = measure_cluster(1, self._num_ranks, build_mesh, self._folder, device)

    def on_train_batch_start(self, *unused: object) -> None:
        self._started = self._clock()

    def on_train_batch_end(self, *unused: object) -> None:
        self.step_seconds.append(self._clock() - self._started)


def worker(args: argparse.Namespace) -> None:
    """Train on one rank; rank 0 prices the phases and writes both."""
    clock = time.process_time if args.cpu else time.perf_counter
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prompt, answer = LENGTHS[args.size]
    module = TimedGRPO(SIZES[args.size], answer)
    module.clock = clock
    module.answer_seconds = []
    watch = Clock(clock, args.rank_count, args.folder)
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
    answer_seconds = module.answer_seconds
    with torch.device("meta"):
        module = GRPO(SIZES[args.size], answer)
    batch = torch.zeros(PROMPTS, prompt, dtype=torch.int64), torch.arange(PROMPTS)
    phases = capture_phases(module, batch, args.rank_count, "rank", torch.enable_grad)
    calls = set().union(*(local_calls(step, (args.rank_count,)) for _, step in phases.values()))
    table = measure_ops(calls, "cpu", args.budget, OpTable(), name=watch.cluster.device.name)
    costs = RooflineCosts(watch.cluster.device, table)
    plan = make_plan(module, batch, watch.cluster, PlanOptions(parallel="data"), costs=costs)
    measured = {
        "step": statistics.median(watch.step_seconds[args.warmup :]),
        "answers": statistics.median(answer_seconds[args.warmup :]),
    }
    priced = {}
    for phase in plan.phases:
        priced[phase.name] = phase.times * (phase.staying_seconds or 0.0)
    results = {"measured": measured, "priced": priced, "timed": f"{len(table)} of {len(calls)}"}
    Path(args.out).write_text(json.dumps(results))


def read_arguments() -> argparse.Namespace:
    """Return the command line's options."""
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
    return parser.parse_args()


def main() -> int:
    args = read_arguments()
    if args.out:
        worker(args)
        return 0
    table = Table(title="An iteration of GRPO, gloo, fp32: ms measured, and as priced")
    for column in ("policy", "ranks", "answers", "priced", "ratio", "iteration", "priced", "ratio"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    options = [f"--steps={args.steps}", f"--warmup={args.warmup}", f"--budget={args.budget}"]
    if args.cpu:
        options.append("--cpu")
    for size, ranks in product(args.sizes, args.ranks):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [*torchrun(__file__, ranks), *options, f"--size={size}"]
            command += [f"--rank-count={ranks}", f"--folder={folder}", f"--out={out}"]
            run_job(command, f"{size} on {ranks} ranks", folder, user_threads())
            figures = json.loads(out.read_text())
        measured, priced = figures["measured"], figures["priced"]
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
            figures["timed"],
            {k: f"{1e3 * v:.1f} ms" for k, v in priced.items()},
            flush=True,
        )
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
