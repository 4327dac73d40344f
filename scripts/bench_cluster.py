"""Tokens per second on an emulated cluster of 2 nodes x 2 ranks, 200 Mbit/s between the nodes.

    # every case of cluster_cases.py; root and iproute2 needed
    python scripts/bench_cluster.py
    python scripts/bench_cluster.py gpt mlp --rounds 3 --rate 200 --strategies ddp alpa

    # the effect of prefetching parameters
    python scripts/bench_cluster.py gpt --ranks 1 --rate 1000 \
        --strategies 'alpa:{"parallel": "zero3"}' "as planned, no prefetch" fsdp

    # the effect of matmuls overlapped with all-reduces
    python scripts/bench_cluster.py gpt --ranks 1 --rate 1000 \
        --strategies 'alpa:{"parallel": "tensor"}' "as planned, no overlap" \
        "as planned, chunked:2" tensor

The same model, global batch and optimizer under the solved plan of alpa (costs measured there),
DDP, FSDP (fully_shard under ModelParallelStrategy; Lightning's FSDPStrategy is for GPUs only),
tensor parallel inside the nodes with FSDP across them, and tensor parallel over all ranks. All
strategies of a case take turns in one job; the figure is the median over the steps of all rounds.
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
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from bench_jobs import check_steps
from cluster_cases import CASES, Case
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.ir.plan import Plan

HERE = Path(__file__).resolve().parent
STRATEGIES = ("alpa", "ddp", "fsdp", "tensor x data", "tensor")
# Required speed in multiples of the best other strategy's: on one case at least, and on all cases.
MIN_BEST = 1.5
MIN_EVERY = 0.97


class Samples(Dataset):
    """100,000 samples of a case."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._case.row(torch.Generator().manual_seed(index))


class Clock(pl.Callback):
    """Stores the time at the end of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *unused: object) -> None:
        self.times.append(time.perf_counter())


class Strategies:
    """Makes the strategies of one job, which change the plan of an earlier strategy of alpa."""

    def __init__(self, args: argparse.Namespace, case: Case) -> None:
        self._args = args
        self._case = case
        self._plan: dict[str, Any] | None = None

    def remember(self, plan: dict[str, Any]) -> None:
        """Store a plan for the strategies "as planned, ..."; the first one counts."""
        self._plan = self._plan or plan

    def make(self, name: str) -> tuple[Any, int]:
        """Return a strategy of `--strategies`, and the batch size of each loader."""
        args = self._args
        kind, _, detail = name.partition(":")
        num_samples = self._case.rows
        num_local_samples = num_samples // (args.nodes * args.ranks)
        match kind:
            case "alpa":
                options = json.loads(detail) if detail else {}
                options = {"plan_dir": f"{args.folder}/plans", "capture": "require", **options}
                return AlpaStrategy(**options), num_local_samples
            case "as planned, no prefetch":
                return self._edited(lambda stage: {"ahead_bytes": 0}), num_local_samples
            case "as planned, no overlap":
                return self._edited(without_overlap), num_local_samples
            case "as planned, chunked":
                return self._edited(partial(chunks_of, num_chunks=int(detail))), num_local_samples
            case "ddp":
                return DDPStrategy(gradient_as_bucket_view=True), num_local_samples
            case "fsdp":
                num_ranks = args.nodes * args.ranks
                return ModelParallelStrategy(num_ranks, 1), num_local_samples
            case "tensor x data":
                return ModelParallelStrategy(args.nodes, args.ranks), num_samples // args.nodes
            case "tensor":
                return ModelParallelStrategy(1, args.nodes * args.ranks), num_samples
        raise SystemExit(f"unknown strategy {name!r}")

    def _edited(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> AlpaStrategy:
        """Return alpa with the stored plan, the fields of each stage replaced by `change`."""
        if self._plan is None:
            raise SystemExit("name a strategy 'alpa' first: its plan is the one that is changed")
        stages = [{**stage, **change(stage)} for stage in self._plan["stages"]]
        path = Path(self._args.folder) / f"edited_{os.environ['RANK']}.json"
        path.write_text(json.dumps({**self._plan, "stages": stages}))
        return AlpaStrategy(plan=path, capture="require")


def without_overlap(stage: dict[str, Any]) -> dict[str, Any]:
    """Return the plan file's fields of a stage whose matmuls do not overlap with collectives."""
    return {"execution": {**stage["execution"], "fused_matmuls": [], "chunk_dims": {}}}


def chunks_of(stage: dict[str, Any], num_chunks: int) -> dict[str, Any]:
    """Return the plan file's fields of a stage whose matmuls are all split into `num_chunks`."""
    matmuls = [name for name in stage["strategies"] if name.startswith("linear")]
    # The dims of the chunks are decided when the plan is read.
    return {"in_parts": dict.fromkeys(matmuls, num_chunks), "execution": None}


def train(args: argparse.Namespace, case: Case, strategy: Any, batch_size: int) -> list[float]:
    """Train under `strategy`, and return the seconds of the steps after the warm-up."""
    pl.seed_everything(0, verbose=False)
    model = case.task()
    if isinstance(strategy, ModelParallelStrategy):
        model.configure_model = model.shard  # type: ignore[method-assign]
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        num_nodes=args.nodes,
        devices=args.ranks,
        strategy=strategy,
        max_steps=args.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.folder,
        use_distributed_sampler=True,
    )
    trainer.fit(model, DataLoader(Samples(case), batch_size=batch_size))
    step_seconds = [b - a for a, b in pairwise(clock.times)]
    return step_seconds[args.warmup :]


def worker(args: argparse.Namespace) -> None:
    """Train all strategies in turns on one rank; rank 0 writes step seconds and alpa's plans."""
    torch.set_num_threads(1)
    case = CASES[args.cases[0]]
    strategies = Strategies(args, case)
    figures: dict[str, Any] = {name: [] for name in args.strategies}
    for turn in range(args.rounds):
        for name in args.strategies if turn % 2 == 0 else args.strategies[::-1]:
            strategy, batch_size = strategies.make(name)
            figures[name] += train(args, case, strategy, batch_size)
            if isinstance(strategy, AlpaStrategy) and strategy.plan is not None:
                figures[f"plan of {name}"] = strategy.plan.to_dict()
                strategies.remember(figures[f"plan of {name}"])
    if int(os.environ["RANK"]) == 0:
        Path(args.out).write_text(json.dumps(figures))


def run_case(args: argparse.Namespace, name: str, strategies: list[str]) -> dict[str, Any]:
    """Run one job on the emulated cluster, and return the figures that its rank 0 wrote.

    Raises:
        SystemExit: the job failed; the end of its output is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        log = Path(args.folder or folder) / f"{name}.log"
        command = [str(HERE / "emulated_cluster.sh")]
        command += [str(args.nodes), str(args.ranks), str(args.rate), __file__, name]
        command += ["--worker", "--out", str(out), "--folder", args.folder or folder]
        for option in ("nodes", "ranks", "steps", "warmup", "rounds"):
            command += [f"--{option}", str(getattr(args, option))]
        command += ["--strategies", *strategies]
        paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        with log.open("w") as file:
            job = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        if job.returncode:
            print(log.read_text()[-8000:])
            raise SystemExit(f"{name} failed")
        if args.verbose:
            print(log.read_text())
        return json.loads(out.read_text())


def read_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*")
    parser.add_argument(
        "--strategies", nargs="*", default=list(STRATEGIES), help="'alpa:{json of options}' too"
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    parser.add_argument("--rate", type=int, default=200, help="Mbit/s between nodes")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--folder", help="where alpa stores plans and measurements (default: a temporary folder)"
    )
    parser.add_argument(
        "--require", action="store_true", help="exit 1 unless alpa is fast enough (MIN_BEST)"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the jobs print")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    check_steps(parser, args)
    return args


def main() -> int:
    args = read_arguments()
    if args.worker:
        worker(args)
        return 0
    console = Console(width=150)
    ratios: dict[str, float] = {}
    for name in args.cases or CASES:
        case = CASES[name]
        strategies = args.strategies
        if not case.tensor_parallel:
            strategies = [s for s in strategies if not s.startswith("tensor")]
        figures = run_case(args, name, strategies)
        seconds = {s: statistics.median(figures[s]) for s in strategies}
        others = [seconds[s] for s in strategies if not s.startswith("alpa")]
        best = min(others, default=None)
        console.print(table_of(args, name, figures, seconds, best))
        if best is not None and "alpa" in seconds:
            ratios[name] = best / seconds["alpa"]
    if not ratios:
        return 0
    console.print(", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    is_fast_enough = max(ratios.values()) >= MIN_BEST and min(ratios.values()) >= MIN_EVERY
    if args.require and not is_fast_enough:
        return 1
    return 0


def table_of(
    args: argparse.Namespace,
    name: str,
    figures: dict[str, Any],
    seconds: dict[str, float],
    best: float | None,
) -> Table:
    """Return the table of a case, a row a strategy.

    Args:
        args: the command line's options.
        name: of the case.
        figures: written by rank 0 of the job.
        seconds: strategy -> median seconds of a step.
        best: the smallest of `seconds` without alpa's.
    """
    case = CASES[name]
    title = f"{name}: {case.what}; {args.nodes} x {args.ranks} ranks, {args.rate} Mbit/s"
    table = Table(title=title, title_justify="left")
    for column in ("strategy", "step", "tokens/s", "x best other", "predicted", "plan"):
        table.add_column(column, justify="left" if column in ("strategy", "plan") else "right")
    for strategy, step_seconds in seconds.items():
        plan = None
        predicted = ""
        if f"plan of {strategy}" in figures:
            plan = Plan.from_dict(figures[f"plan of {strategy}"])
            predicted = f"{1e3 * plan.predicted.step_seconds:.0f} ms"
        ratio = "" if best is None else f"{best / step_seconds:.2f}"
        rate = f"{case.rows * case.tokens / step_seconds:,.0f}"
        step = f"{1e3 * step_seconds:.0f} ms"
        table.add_row(strategy, step, rate, ratio, predicted, _described(plan))
    return table


def _described(plan: Any) -> str:
    """A plan in a few words."""
    if plan is None:
        return ""
    meshes = " + ".join("x".join(map(str, stage.logical_mesh)) for stage in plan.stages)
    if not plan.is_pipelined:
        return f"one stage on {meshes}"
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    return f"{stages} on {meshes}, {plan.num_microbatches} micro-batches, {plan.schedule}"


if __name__ == "__main__":
    sys.exit(main())
