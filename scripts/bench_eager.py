"""Seconds of a step as written on 2 ranks (gloo, CPU): data parallel against DDP, ZeRO-3 against
FSDP2.

    python scripts/bench_eager.py            # a GPT and a ResNet
    python scripts/bench_eager.py --require  # exits 1 above 1.03 x DDP, or above 1.05 x FSDP2

One pair of processes trains the same module on the same data under every strategy in turn,
`--rounds` times; ratios are taken within a round, their median counts. FSDP2 is `fully_shard` on
each block and on the root.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What is measured -> what it is held against, and the ratio allowed.
HELD = {"alpa data": ("ddp", 1.03), "alpa zero3": ("fsdp2", 1.05)}


def modules() -> dict[str, Any]:
    """By name: (what makes the module, the names of the containers of its blocks, what makes a
    loader's batches).
    """
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.nn import functional as F

    sys.path.insert(0, str(ROOT / "recipes"))
    from gpt import GPT

    class Residual(nn.Module):
        def __init__(self, inner: int, outer: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outer),
                nn.ReLU(),
                nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outer),
            )
            self.skip = (
                nn.Conv2d(inner, outer, 1, stride, bias=False) if inner != outer else nn.Identity()
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.skip(x))

    class ResNet(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            widths = [64, 64, 128, 128, 256, 256, 512, 512]
            self.stem = nn.Sequential(
                nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
            )
            self.blocks = nn.ModuleList(
                Residual(a, b, 1 if a == b else 2)
                for a, b in zip([64, *widths], widths, strict=False)
            )
            self.head = nn.Linear(512, 100)

        def forward(self, x: Any) -> Any:  # FSDP2 gathers the root's parameters for it
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((2, 3)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, label = batch
            return F.cross_entropy(self(x), label)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def tokens(index: int) -> Any:
        row = torch.randint(256, (129,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]

    def image(index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), index % 100

    return {"GPT": (lambda: GPT(4, 384, 6, 256, 128), tokens, 4), "ResNet": (ResNet, image, 8)}


def worker(args: argparse.Namespace) -> None:
    """Both ranks: all trainings, one after the other; rank 0 writes model -> strategy -> rounds ->
    steps, seconds.
    """
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, Dataset

    from alpa_strategy import AlpaStrategy

    class Samples(Dataset):
        def __init__(self, of: Any) -> None:
            self.of = of

        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> Any:
            return self.of(index)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_end(self, *unused: object) -> None:
            self.times.append(time.perf_counter())

    def shard(module: Any) -> None:
        for block in module.blocks:
            fully_shard(block, mesh=module.device_mesh["data_parallel"])
        fully_shard(module, mesh=module.device_mesh["data_parallel"])

    def strategy(name: str) -> Any:
        kind, _, parallel = name.partition(" ")
        if kind == "alpa":
            return AlpaStrategy(parallel=parallel, capture="never", verbose=False)
        return (
            ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
            if kind == "fsdp2"
            else kind
        )

    torch.set_num_threads(1)
    seconds: dict[str, dict[str, list[list[float]]]] = {}
    for turn in range(args.rounds):
        for model, (make, of, batch) in modules().items():
            if args.models and model not in args.models:
                continue
            names = args.strategies or [
                name for held, (other, _) in HELD.items() for name in (other, held)
            ]
            for name in names if turn % 2 == 0 else names[::-1]:
                pl.seed_everything(0, verbose=False)
                module, clock = make(), Clock()
                if name == "fsdp2":
                    module.configure_model = lambda module=module: shard(module)
                trainer = pl.Trainer(
                    accelerator="cpu",
                    devices=2,
                    strategy=strategy(name),
                    max_steps=args.steps,
                    callbacks=[clock],
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                trainer.fit(module, DataLoader(Samples(of), batch_size=batch))
                steps = [after - before for before, after in pairwise(clock.times)][args.warmup :]
                seconds.setdefault(model, {}).setdefault(name, []).append(steps)
    if torch.distributed.get_rank() == 0:
        Path(args.out).write_text(json.dumps(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--models", nargs="*", help="GPT, ResNet")
    parser.add_argument("--strategies", nargs="*", help="'alpa data', 'alpa zero3', ddp, fsdp2")
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < args.warmup + 2:
        parser.error(
            f"--steps {args.steps} leaves none to time: give at least {args.warmup + 2}, --warmup"
            " and two"
        )
    if args.out:
        worker(args)
        return 0
    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            __file__,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(
            [*command, *sys.argv[1:], "--out", str(out)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        seconds = json.loads(out.read_text())
    table = Table(title="A step as written, 2 ranks, gloo, fp32")
    for column in ("module", "strategy", "ms a step", "ratio", "at most", "per round"):
        table.add_column(
            column, justify="left" if column in ("module", "strategy", "per round") else "right"
        )
    is_met = True
    for model, of_model in seconds.items():
        medians = {
            name: [statistics.median(steps) for steps in rounds]
            for name, rounds in of_model.items()
        }
        for name, mine in medians.items():
            row = [model, name, f"{1e3 * statistics.median(mine):.1f}"]
            other, limit = HELD.get(name, (None, None))
            if other in medians:
                ratios = [a / b for a, b in zip(mine, medians[other], strict=True)]
                ratio = statistics.median(ratios)
                is_met &= ratio <= limit
                row += [
                    f"{ratio:.3f} x {other}",
                    f"{limit}",
                    " ".join(f"{each:.3f}" for each in ratios),
                ]
            table.add_row(*row)
    Console(width=110).print(table)
    if is_met or not args.require:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
