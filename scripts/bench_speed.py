"""Tokens per second of a GPT under strategies side by side, as ratios within one run.

    python scripts/bench_speed.py                      # 2 ranks: solved plan against DDP
    python scripts/bench_speed.py --devices 1          # 1 rank: alpa against the plain Trainer
    python scripts/bench_speed.py --strategies ddp alpa alpa:zero2

Every strategy runs the same module on the same data for the same steps, in jobs of their own that
take turns (`--rounds` times), so that a busy machine slows all of them alike; the figure is the
median over steps and rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bench_jobs import check_steps, torchrun, user_threads
from bench_jobs import run_job as run_process

ROOT = Path(__file__).resolve().parent.parent

# Indices of the clocks in the seconds of a step.
WALL = 0
CPU = 1


def worker(args: argparse.Namespace, strategy: str) -> None:
    """One rank of one job: train, and let rank 0 write the seconds of every step after warm-up."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, Dataset

    sys.path.insert(0, str(ROOT / "recipes"))
    from gpt import GPT

    import alpa_strategy

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    class Tokens(Dataset):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            row = torch.randint(args.vocab, (args.sequence + 1,), generator=generator)
            return row[:-1], row[1:]

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.times: list[tuple[float, float]] = []

        def on_train_batch_end(self, *unused: object) -> None:
            self.times.append((time.perf_counter(), time.process_time()))

    def make_strategy() -> object:
        name, _, parallel = strategy.partition(":")
        if name == "alpa":
            return alpa_strategy.AlpaStrategy(
                parallel=parallel or "auto",
                capture="require",
                plan_dir=args.plan_dir,
                bucket_bytes=args.bucket_bytes,
            )
        return "auto" if name == "plain" else name

    pl.seed_everything(0, verbose=False)
    model = GPT(args.layers, args.hidden, args.hidden // 64, args.vocab, args.sequence)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=make_strategy(),
        max_steps=args.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Tokens(), batch_size=args.batch))
    if trainer.global_rank == 0:
        seconds = [(b - a, d - c) for (a, c), (b, d) in pairwise(clock.times)][args.warmup :]
        Path(args.out).write_text(json.dumps(seconds))


def run_job(args: argparse.Namespace, strategy: str, plan_dir: str) -> list[tuple[float, float]]:
    """Run one job, and return (wall, CPU of rank 0) seconds of every step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        if args.devices == 1:
            command = [sys.executable, __file__]
        else:
            command = torchrun(__file__, args.devices)
        command += ["--worker", strategy, "--out", str(out), "--plan-dir", plan_dir]
        for name in (
            "devices",
            "layers",
            "hidden",
            "vocab",
            "sequence",
            "batch",
            "steps",
            "warmup",
            "bucket_bytes",
        ):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        run_process(command, strategy, folder, user_threads())
        return json.loads(out.read_text())


def median_of(steps: list[tuple[float, float]], clock: int) -> float:
    """Return the median seconds of a job's steps by one clock, `WALL` or `CPU`."""
    return statistics.median(step[clock] for step in steps)


def read_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="rows per rank and step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-bytes", type=int, default=25 * 2**20)
    parser.add_argument(
        "--strategies", nargs="*", help="ddp, plain, fsdp, alpa, alpa:data, alpa:zero2, ..."
    )
    parser.add_argument(
        "--require",
        type=float,
        help="exit 1 unless the last strategy reaches this ratio to the first",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--plan-dir", help=argparse.SUPPRESS)
    args = parser.parse_args()
    check_steps(parser, args)
    return args


def main() -> int:
    args = read_arguments()
    if args.worker:
        worker(args, args.worker)
        return 0
    from rich.console import Console
    from rich.table import Table

    baseline = "plain" if args.devices == 1 else "ddp"
    strategies = args.strategies or [baseline, "alpa"]
    seconds: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in strategies}
    with tempfile.TemporaryDirectory() as plan_dir:
        for turn in range(args.rounds):
            order = strategies if turn % 2 == 0 else strategies[::-1]  # neither always goes first
            for name in order:
                seconds[name].append(run_job(args, name, plan_dir))
    tokens = args.devices * args.batch * args.sequence
    rates = {}
    for name, rounds in seconds.items():
        rates[name] = [tokens / median_of(round_, WALL) for round_ in rounds]
    work = {}
    for name, rounds in seconds.items():
        work[name] = min(median_of(round_, CPU) for round_ in rounds)
    first = strategies[0]
    table = Table(
        title=(
            f"GPT {args.layers} x {args.hidden}, sequence {args.sequence}, {args.devices} ranks,"
            " fp32"
        )
    )
    for column in ("strategy", "tokens/s", f"x {first}", "CPU ms a step", "per round"):
        table.add_column(column, justify="left" if column in ("strategy", "per round") else "right")
    # The ratio is taken round by round: both sides of it saw the same machine.
    ratios = {
        name: statistics.median(
            mine / theirs for mine, theirs in zip(rates[name], rates[first], strict=True)
        )
        for name in strategies
    }
    for name in strategies:
        table.add_row(
            name,
            f"{statistics.median(rates[name]):,.0f}",
            f"{ratios[name]:.3f}",
            f"{1e3 * work[name]:.0f}",
            " ".join(
                f"{mine / theirs:.3f}"
                for mine, theirs in zip(rates[name], rates[first], strict=True)
            ),
        )
    Console().print(table)
    if args.require is None or ratios[strategies[-1]] >= args.require:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
