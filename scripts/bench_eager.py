"""Seconds of an eager step on 2 ranks (gloo, CPU): data parallel against DDP, ZeRO-3 against FSDP2.

    python scripts/bench_eager.py            # a GPT and a ResNet
    python scripts/bench_eager.py --require  # exits 1 above 1.03 x DDP, or above 1.05 x FSDP2

One pair of processes trains the same module on the same data under every strategy in turn,
`--rounds` times; ratios are taken within a round, their median counts. FSDP2 is `fully_shard` on
each block and on the root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from bench_jobs import check_steps, run_job, torchrun, user_threads
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from alpa_strategy import AlpaStrategy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

from gpt import GPT  # noqa: E402

# Strategy -> (its baseline, the largest allowed ratio of step seconds to the baseline's).
COMPARED = {"alpa data": ("ddp", 1.03), "alpa zero3": ("fsdp2", 1.05)}


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        if inner != outer:
            self.skip = nn.Conv2d(inner, outer, 1, stride, bias=False)
        else:
            self.skip = nn.Identity()

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.skip(x))


class ResNet(pl.LightningModule):
    """Eight residual blocks on images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        self.blocks = nn.ModuleList()
        before = 64
        for width in [64, 64, 128, 128, 256, 256, 512, 512]:
            stride = 1 if width == before else 2
            self.blocks.append(Residual(before, width, stride))
            before = width
        self.head = nn.Linear(512, 100)

    # FSDP2 gathers the root's parameters for `forward`.
    def forward(self, x: Any) -> Any:
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
    """Return sample `index` of the GPT: (tokens, targets), 128 each."""
    row = torch.randint(256, (129,), generator=torch.Generator().manual_seed(index))
    return row[:-1], row[1:]


def image(index: int) -> Any:
    """Return sample `index` of the ResNet: (image, label)."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 32, 32, generator=generator), index % 100


# Name -> (function that makes the module, function that makes sample `index`, batch size).
MODULES: dict[str, tuple[Any, Any, int]] = {
    "GPT": (lambda: GPT(4, 384, 6, 256, 128), tokens, 4),
    "ResNet": (ResNet, image, 8),
}


class Samples(Dataset):
    """10,000 samples made by a function of their index."""

    def __init__(self, sample_of: Any) -> None:
        self.sample_of = sample_of

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        return self.sample_of(index)


class Clock(pl.Callback):
    """Stores the time at the end of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *unused: object) -> None:
        self.times.append(time.perf_counter())


def shard(module: Any) -> None:
    """Apply FSDP2 to every block and to the root."""
    for block in module.blocks:
        fully_shard(block, mesh=module.device_mesh["data_parallel"])
    fully_shard(module, mesh=module.device_mesh["data_parallel"])


def strategy_of(name: str) -> Any:
    """Return the Trainer's `strategy` for a name of `--strategies`."""
    kind, _, parallel = name.partition(" ")
    if kind == "alpa":
        return AlpaStrategy(parallel=parallel, capture="never", verbose=False)
    if kind == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return kind


def train(model: str, name: str, num_steps: int) -> list[float]:
    """Train `model` under strategy `name`, and return the seconds of each step after the first."""
    make, sample_of, batch_size = MODULES[model]
    pl.seed_everything(0, verbose=False)
    module = make()
    clock = Clock()
    if name == "fsdp2":
        module.configure_model = lambda: shard(module)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_of(name),
        max_steps=num_steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Samples(sample_of), batch_size=batch_size))
    return [after - before for before, after in pairwise(clock.times)]


def worker(args: argparse.Namespace) -> None:
    """Run all trainings on one of both ranks, one after the other.

    Rank 0 writes model -> strategy -> rounds -> seconds of each step.
    """
    torch.set_num_threads(1)
    names = args.strategies
    if not names:
        names = [name for mine, (baseline, _) in COMPARED.items() for name in (baseline, mine)]
    seconds: dict[str, dict[str, list[list[float]]]] = {}
    for turn in range(args.rounds):
        for model in MODULES:
            if args.models and model not in args.models:
                continue
            # every second round the other way round, so that none always goes first
            for name in names if turn % 2 == 0 else names[::-1]:
                steps = train(model, name, args.steps)[args.warmup :]
                seconds.setdefault(model, {}).setdefault(name, []).append(steps)
    if torch.distributed.get_rank() == 0:
        Path(args.out).write_text(json.dumps(seconds))


def read_arguments() -> argparse.Namespace:
    """Return the command line's options."""
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
    check_steps(parser, args)
    return args


def main() -> int:
    args = read_arguments()
    if args.out:
        worker(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [*torchrun(__file__, 2), *sys.argv[1:], "--out", str(out)]
        run_job(command, "the training", folder, user_threads())
        seconds = json.loads(out.read_text())
    table = Table(title="An eager step, 2 ranks, gloo, fp32")
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
            other, limit = COMPARED.get(name, (None, None))
            if other in medians:
                ratios = [a / b for a, b in zip(mine, medians[other], strict=True)]
                ratio = statistics.median(ratios)
                is_met &= ratio <= limit
                row += [
                    f"{ratio:.3f} x {other}",
                    f"{limit}",
                    " ".join(f"{ratio:.3f}" for ratio in ratios),
                ]
            table.add_row(*row)
    Console(width=110).print(table)
    if is_met or not args.require:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
