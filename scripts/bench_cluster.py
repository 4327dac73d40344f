"""Tokens per second on an emulated cluster, 2 nodes x 2 ranks and 200 Mbit/s between: alpa against what else there is.

    python scripts/bench_cluster.py                    # every case of cluster_cases.py; root and iproute2 needed
    python scripts/bench_cluster.py gpt mlp --rounds 3 --rate 200 --strategies ddp alpa
    python scripts/bench_cluster.py gpt --ranks 1 --rate 1000 --strategies 'alpa:{"parallel": "zero3"}' \
        "as planned, nothing ahead" fsdp                # what it brings to gather parameters ahead of their use
    python scripts/bench_cluster.py gpt --ranks 1 --rate 1000 --strategies 'alpa:{"parallel": "tensor"}' \
        "as planned, nothing beside sums" "as planned, sums in parts:2" tensor    # products beside sums

The same model, global batch and optimizer under the solved plan of alpa (costs measured there), DDP, FSDP (fully_shard
under ModelParallelStrategy; Lightning's FSDPStrategy is for GPUs only), tensor parallel inside the nodes with FSDP
across, and tensor parallel over all. All strategies of a case take turns in one job; the figure is the median over the
steps of all rounds.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STRATEGIES = ("alpa", "ddp", "fsdp", "tensor x data", "tensor")
MIN_BEST, MIN_EVERY = 1.5, 0.97  # of the best other strategy: on one case at least, and on all


def worker(args: argparse.Namespace) -> None:
    """One rank of one job: all strategies in turns; rank 0 writes step seconds and alpa's plan."""
    import lightning.pytorch as pl
    import torch
    from cluster_cases import CASES
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.utils.data import DataLoader, Dataset

    from alpa_strategy import AlpaStrategy
    from alpa_strategy.lower.codegen import lower
    from alpa_strategy.pipeline import step_programs

    torch.set_num_threads(1)
    case = CASES[args.cases[0]]
    num_ranks = args.nodes * args.ranks

    class Rows(Dataset):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return case.row(torch.Generator().manual_seed(index))

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_end(self, *unused: object) -> None:
            self.times.append(time.perf_counter())

    def edited(change: Callable[[dict[str, Any]], dict[str, Any]]) -> AlpaStrategy:
        """With the plan of the strategy before it, stages changed."""
        plan = next(found[f"plan of {other}"] for other in found if f"plan of {other}" in found)
        path = Path(args.folder) / f"edited_{os.environ['RANK']}.json"
        path.write_text(
            json.dumps({**plan, "stages": [{**stage, **change(stage)} for stage in plan["stages"]]})
        )
        return AlpaStrategy(plan=path, capture="require")

    def products_of(stage: dict[str, Any]) -> list[str]:
        return [name for name in stage["strategies"] if name.startswith("linear")]

    def strategy_of(name: str) -> tuple[Any, int]:
        """(strategy, rows that each loader yields)"""
        kind, _, detail = name.partition(":")
        step_programs.lower = lower
        own_rows = case.rows // num_ranks
        match kind:
            case "alpa":
                options = json.loads(detail) if detail else {}
                return AlpaStrategy(
                    **{"plan_dir": args.folder + "/plans", "capture": "require", **options}
                ), own_rows
            case (
                "as planned, nothing ahead"
            ):  # the plan before it, with gatherings where they are needed
                return edited(lambda stage: {"ahead_bytes": 0}), own_rows
            case "as planned, nothing beside sums":  # products wait for them
                step_programs.lower = lambda *args, overlaps: lower(*args, overlaps=False)
                return edited(lambda stage: {}), own_rows
            case "as planned, sums in parts":  # all of them, in so many
                return edited(
                    lambda stage: {"num_chunks": dict.fromkeys(products_of(stage), int(detail))}
                ), own_rows
            case "ddp":
                return DDPStrategy(gradient_as_bucket_view=True), own_rows
            case "fsdp":
                return ModelParallelStrategy(num_ranks, 1), own_rows
            case "tensor x data":
                return ModelParallelStrategy(args.nodes, args.ranks), case.rows // args.nodes
            case "tensor":
                return ModelParallelStrategy(1, num_ranks), case.rows
        raise SystemExit(f"unknown strategy {name!r}")

    found: dict[str, Any] = {name: [] for name in args.strategies}
    for turn in range(args.rounds):
        for name in args.strategies if turn % 2 == 0 else args.strategies[::-1]:
            strategy, rows = strategy_of(name)
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
            trainer.fit(model, DataLoader(Rows(), batch_size=rows))
            found[name] += [b - a for a, b in pairwise(clock.times)][args.warmup :]
            if isinstance(strategy, AlpaStrategy) and strategy.plan is not None:
                found[f"plan of {name}"] = strategy.plan.to_dict()
    if int(os.environ["RANK"]) == 0:
        Path(args.out).write_text(json.dumps(found))


def run_case(args: argparse.Namespace, name: str, strategies: list[str]) -> dict[str, Any]:
    """Everything that rank 0 of one job wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            str(HERE / "emulated_cluster.sh"),
            str(args.nodes),
            str(args.ranks),
            str(args.rate),
            __file__,
            name,
        ]
        command += ["--worker", "--out", str(out), "--folder", args.folder or folder]
        for option in ("nodes", "ranks", "steps", "warmup", "rounds"):
            command += [f"--{option}", str(getattr(args, option))]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHON": sys.executable,
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH")))
        )
        log = Path(args.folder or folder) / f"{name}.log"
        with log.open("w") as file:
            command += ["--strategies", *strategies]
            done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        if args.verbose or done.returncode:
            print(log.read_text()[-8000:] if done.returncode else log.read_text())
        if done.returncode:
            raise SystemExit(f"{name} failed")
        return json.loads(out.read_text())


def main() -> int:
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
        "--folder", help="where alpa keeps plans and measurements (default: nothing is kept)"
    )
    parser.add_argument(
        "--require", action="store_true", help="exit 1 unless alpa is as fast as issue 3 asks"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the jobs print")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < args.warmup + 2:
        parser.error(
            f"--steps {args.steps} leaves none to time: give at least {args.warmup + 2}, --warmup"
            " and two"
        )
    if args.worker:
        worker(args)
        return 0
    from cluster_cases import CASES
    from rich.console import Console
    from rich.table import Table

    from alpa_strategy.ir.plan import Plan

    console = Console(width=150)
    ratios: dict[str, float] = {}
    for name in args.cases or CASES:
        case = CASES[name]
        strategies = [
            s for s in args.strategies if case.tensor_parallel or not s.startswith("tensor")
        ]
        found = run_case(args, name, strategies)
        seconds = {s: statistics.median(found[s]) for s in strategies}
        best = min((seconds[s] for s in strategies if not s.startswith("alpa")), default=None)
        table = Table(
            title=f"{name}: {case.what}; {args.nodes} x {args.ranks} ranks, {args.rate} Mbit/s",
            title_justify="left",
        )
        for column in ("strategy", "step", "tokens/s", "x best other", "predicted", "plan"):
            table.add_column(column, justify="left" if column in ("strategy", "plan") else "right")
        for s in strategies:
            plan = Plan.from_dict(found[f"plan of {s}"]) if f"plan of {s}" in found else None
            ratio = "" if best is None else f"{best / seconds[s]:.2f}"
            predicted = "" if plan is None else f"{1e3 * plan.predicted.step_seconds:.0f} ms"
            rate = case.rows * case.tokens / seconds[s]
            table.add_row(
                s, f"{1e3 * seconds[s]:.0f} ms", f"{rate:,.0f}", ratio, predicted, _described(plan)
            )
        console.print(table)
        if best is not None and "alpa" in seconds:
            ratios[name] = best / seconds["alpa"]
    if not ratios:
        return 0
    console.print(", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    good = max(ratios.values()) >= MIN_BEST and min(ratios.values()) >= MIN_EVERY
    if good or not args.require:
        return 0
    return 1


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
