"""A GPT on one sample four times as long as a device's memory holds, on four ranks; nothing is
pinned but the limit.

    # 16384 tokens, heads exchanged and keys going around
    python scripts/bench_long_sequences.py
    python scripts/bench_long_sequences.py --length 4096 --hidden 128

The limit is the memory of a one-device plan for a quarter of the sequence with all activations
saved. Costs are measured by the job itself. `cpu` is the CPU seconds of a rank's process in a step:
how evenly the causal mask is divided.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

# torch.optim imports it at the first optimizer: loaded here, its memory is in the baseline.
import torch._dynamo
from bench_jobs import run_job, torchrun
from bench_memory import Watch, own_peak, resident_bytes
from torch.utils.data import DataLoader

# The first step would load them: loaded here, their memory is in the baseline.
import alpa_strategy.lightning.run
import alpa_strategy.planner.planner  # noqa: F401
from alpa_strategy import AlpaStrategy, ClusterSpec, PlanOptions, make_plan

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

from gpt import GPT  # noqa: E402

RANKS = 4
STEPS = 4


def model_of(args: argparse.Namespace, heads: int, length: int) -> Any:
    """Return the model of recipes/gpt.py for sequences of `length` tokens."""
    return GPT(args.layers, args.hidden, heads, vocab_size=512, sequence_length=length)


def limit_of(args: argparse.Namespace, heads: int) -> int:
    """Return the bytes that one device needs for a quarter of the sequence."""
    tokens = torch.zeros(1, args.length // RANKS, dtype=torch.int64)
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 1})
    options = PlanOptions.from_user(batch_scope="global", remat=False)
    return make_plan(
        model_of(args, heads, args.length // RANKS), (tokens, tokens), cluster, options
    ).predicted.peak_bytes


class Clock(pl.Callback):
    """Stores wall and CPU seconds of each step, and the peak memory of the last one."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_start(self, *unused: object) -> None:
        self._watch.peak, _ = resident_bytes()
        self._started = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *unused: object) -> None:
        wall, cpu = self._started
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        self.peak = self._watch.peak


def worker(args: argparse.Namespace) -> None:
    """Train on one rank, and write its measured figures."""
    torch.set_num_threads(1)
    rows = torch.randint(
        512, (STEPS + 1, args.length + 1), generator=torch.Generator().manual_seed(0)
    )
    base, _ = resident_bytes()
    watch = Watch()
    clock = Clock(watch)
    watch.start()
    strategy = AlpaStrategy(batch_scope="global", memory_limit=args.limit, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model_of(args, args.heads, args.length), DataLoader([(row[:-1], row[1:]) for row in rows])
    )
    plan = strategy.plan
    stage = plan.stages[0]
    results = {
        "mesh": list(stage.logical_mesh),
        "remat": stage.remat,
        "stages": len(plan.stages),
        "attention": sorted(
            {
                " ".join(map(str, s))
                for name, s in stage.strategies.items()
                if name.startswith("scaled_dot_product")
            }
        ),
        "predicted": plan.predicted.step_seconds,
        "measured": statistics.median(clock.wall[1:]),  # the first one plans
        "cpu": statistics.median(clock.cpu[1:]),
        "planned": own_peak(plan, trainer.global_rank),
        "peak": clock.peak - base,
    }
    Path(f"{args.out}.{trainer.global_rank}").write_text(json.dumps(results))


def run(heads: int, limit: int, arguments: list[str]) -> list[dict[str, Any]]:
    """What every rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "found")
        command = torchrun(__file__, RANKS)
        command += [*arguments, "--heads", str(heads), "--limit", str(limit), "--out", out]
        run_job(command, f"{heads} heads", folder)
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(RANKS)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=16384, help="tokens of the sample")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, help="one case only")
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        worker(args)
    else:
        table(args)


def table(args: argparse.Namespace) -> None:
    """All cases, printed."""
    for heads in (args.heads,) if args.heads else (4, 1):
        limit = limit_of(args, heads)
        sizes = [
            "--length",
            str(args.length),
            "--hidden",
            str(args.hidden),
            "--layers",
            str(args.layers),
        ]
        ranks = run(heads, limit, sizes)
        first, cpu = ranks[0], [rank["cpu"] for rank in ranks]
        quarter = args.length // RANKS
        print(
            f"{heads} heads, {args.length} tokens: the limit, {limit / 1e6:.0f} MB, holds {quarter}"
            " on one device"
        )
        print(
            f"  mesh {first['mesh']}, {first['stages']} stages, remat {first['remat']},"
            f" {first['attention']}"
        )
        print(f"  step {first['predicted']:.2f} s predicted, {first['measured']:.2f} s measured")
        print(
            f"  peak {first['planned'] / 1e6:.0f} MB planned,"
            f" {[round(r['peak'] / 1e6) for r in ranks]} MB measured"
        )
        share = max(cpu) / statistics.mean(cpu)
        print(
            f"  cpu {[round(seconds, 2) for seconds in cpu]} s a step, the largest {share:.3f}"
            " of the mean"
        )


if __name__ == "__main__":
    main()
