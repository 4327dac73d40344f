"""Peak memory of every rank against the plan's prediction; and a model of three times a device's
memory, on four.

    python scripts/bench_memory.py                  # the table: one stage and pipelines, >= 500 MB
    python scripts/bench_memory.py --cases large    # parameters and Adam state: 3 x memory_limit
    python scripts/bench_memory.py --require 0.15   # exit 1 if they differ by more

`ru_maxrss` is the system's figure for the full process, libraries included, from its start to the
last step (afterwards the parameters of a module that fits are unsharded). It is compared with the
plan's bytes plus `AlpaStrategy.process_bytes`. On CPUs, tensors that a plan offloads to host memory
are in the same memory and are planned as well. A single stage of unsharded parameters has to stay
within its limit, not within its plan: far from the limit freed blocks stay allocated.

The other figures are resident memory in addition to that of the process after its imports, measured
every few milliseconds: the highest from there on, and the highest during the training steps after
the first. Pages of files (the libraries' code) do not count there: the kernel maps and drops 200 MB
and more of them at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

# torch.optim imports it at the first optimizer: loaded here, its memory is in the baseline.
import torch._dynamo
from bench_jobs import run_job, torchrun
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

# The first step would load them: loaded here, their memory is in the baseline.
import alpa_strategy.lightning.run
import alpa_strategy.planner.planner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

from gpt import GPT  # noqa: E402

SAMPLE_SECONDS = 0.003


@dataclass(frozen=True)
class Case:
    """One job."""

    ranks: int

    # sizes of recipes/gpt.py
    gpt: dict[str, int]

    # samples of a rank's batch
    rows: int

    # options of AlpaStrategy
    strategy: dict[str, Any] = field(default_factory=dict)


WIDE = {
    "num_layers": 4,
    "hidden": 1024,
    "num_heads": 16,
    "vocab_size": 2048,
    "sequence_length": 128,
}
LONG = {"num_layers": 6, "hidden": 512, "num_heads": 8, "vocab_size": 2048, "sequence_length": 512}
DEEP = {
    "num_layers": 8,
    "hidden": 1024,
    "num_heads": 16,
    "vocab_size": 2048,
    "sequence_length": 128,
}
LARGE = {
    "num_layers": 12,
    "hidden": 1024,
    "num_heads": 16,
    "vocab_size": 2048,
    "sequence_length": 64,
}
TWO_STAGES = {"num_stages": 2, "num_microbatches": 4, "schedule": "1F1B"}
CASES = {
    "data": Case(2, WIDE, 2, {"parallel": "data", "memory_limit": "1150MB"}),
    "data, activations": Case(2, LONG, 4, {"parallel": "data", "memory_limit": "1150MB"}),
    "data, far from its limit": Case(2, WIDE, 2, {"parallel": "data"}),
    "zero2": Case(2, WIDE, 2, {"parallel": "zero2"}),
    "zero3": Case(2, DEEP, 2, {"parallel": "zero3"}),
    "tensor": Case(2, DEEP, 2, {"parallel": "tensor"}),
    "1F1B": Case(2, DEEP, 4, TWO_STAGES),
    "GPipe": Case(2, {**LONG, "num_layers": 8}, 8, {**TWO_STAGES, "schedule": "GPipe"}),
    "interleaved": Case(
        2, DEEP, 4, {"num_stages": 4, "num_microbatches": 4, "schedule": "Interleaved1F1B"}
    ),
    "zero bubble": Case(
        2, DEEP, 4, {"num_stages": 4, "num_microbatches": 4, "schedule": "ZBVZeroBubble"}
    ),
    "1F1B of zero2": Case(4, DEEP, 4, {**TWO_STAGES, "parallel": "zero2"}),
    "1F1B, recomputed": Case(2, {**LONG, "num_layers": 16}, 8, {**TWO_STAGES, "remat": True}),
    "GPipe, recomputed": Case(
        2, {**LONG, "num_layers": 16}, 16, {**TWO_STAGES, "schedule": "GPipe", "remat": True}
    ),
    "GPipe, recomputed, short rows": Case(
        2, DEEP, 4, {**TWO_STAGES, "schedule": "GPipe", "remat": True}
    ),
    "data, recomputed": Case(
        2, {**LONG, "num_layers": 12}, 8, {"parallel": "data", "num_stages": 1, "remat": True}
    ),
    "large": Case(4, LARGE, 1),
    "large, 6 layers": Case(4, {**LARGE, "num_layers": 6}, 1),
    "large, 30 layers": Case(4, {**LARGE, "num_layers": 30}, 1),
}
# Their memory_limit is a third of the state.
LARGE_CASES = [name for name in CASES if name.startswith("large")]


def state_bytes(gpt: dict[str, int]) -> int:
    """Parameters and Adam's two moments in float32, gradients apart."""
    h = gpt["hidden"]
    vocab = gpt["vocab_size"]
    length = gpt["sequence_length"]
    block = 12 * h * h + 13 * h
    return 12 * (gpt["num_layers"] * block + (vocab + length) * h + 2 * h)


def resident_bytes() -> tuple[int, int]:
    """Return the resident bytes of this process: (without pages of files, pages of files)."""
    _, resident, files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    page = os.sysconf("SC_PAGESIZE")
    return (resident - files) * page, files * page


class Watch(threading.Thread):
    """Samples resident memory: its maximum since `peak` was set, and the maximum of file pages."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.files = resident_bytes()

    def run(self) -> None:
        while True:
            resident, files = resident_bytes()
            self.peak, self.files = max(self.peak, resident), max(self.files, files)
            time.sleep(SAMPLE_SECONDS)


class Tokens(Dataset):
    """10,000 samples (tokens, targets) of a case's GPT."""

    def __init__(self, gpt: dict[str, int]) -> None:
        self.vocab_size = gpt["vocab_size"]
        self.length = gpt["sequence_length"]

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(self.vocab_size, (self.length + 1,), generator=generator)
        return row[:-1], row[1:]


class Model(pl.LightningModule):
    """A GPT that is made in `configure_model`, so that a rank need not hold it unsharded."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:
            self.gpt = GPT(**self.sizes)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        logits = self.gpt(tokens)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Marks(pl.Callback):
    """Stores resident bytes before and after steps, and their peaks.

    Attributes:
        marks: name of the moment -> resident bytes.
        steps: peak of the training steps after the first, bytes.
        total: peak of the process according to the system, bytes.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.marks: dict[str, int] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: object) -> None:
        if trainer.global_step == 1:
            self.marks["until the first step"] = self.watch.peak
            self.watch.peak, _ = resident_bytes()

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: object) -> None:
        self.marks[f"after step {trainer.global_step}"], _ = resident_bytes()
        # Read here, before the parameters of a module that fits are unsharded at the end.
        self.steps = self.watch.peak
        self.total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(case: Case, out: Path) -> None:
    """Train on one rank of one job, and write its measured bytes."""
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    baseline, files = resident_bytes()
    watch = Watch()
    watch.start()
    marks = Marks(watch)
    strategy = alpa_strategy.AlpaStrategy(
        cluster="pcie_8gpu",
        capture="require",
        verbose=False,
        plan_dir=os.environ["ALPA_PLANS"],
        **case.strategy,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy,
        max_steps=4,
        callbacks=[marks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(case.gpt), DataLoader(Tokens(case.gpt), batch_size=case.rows))
    steps = marks.steps
    with torch.device("meta"):
        full_model = GPT(**case.gpt)
    full_bytes = {}
    for name, parameter in full_model.named_parameters():
        full_bytes[f"gpt.{name}"] = parameter.nbytes
    planned = own_peak(strategy.plan, trainer.global_rank) + host_bytes(strategy.plan, full_bytes)
    results = {
        "rank": trainer.global_rank,
        "planned": planned,
        "steps": steps - baseline,
        "start": max(steps, marks.marks["until the first step"]) - baseline,
        "baseline": baseline,
        "files": watch.files - files,
        "total": marks.total,
        "process": strategy.process_bytes,
        "marks": {name: value - baseline for name, value in marks.marks.items()},
    }
    out.with_suffix(f".{trainer.global_rank}").write_text(json.dumps(results))


def own_peak(plan: Any, rank: int) -> int:
    """Return the planned peak bytes of one rank, all its stages together."""
    return sum(
        stage.predicted.peak_bytes
        for stage in plan.stages
        if 0 <= rank - stage.first_device < stage.submesh[0] * stage.submesh[1]
    )


def host_bytes(plan: Any, full_bytes: dict[str, int]) -> float:
    """Return the bytes of a rank's offloaded shards, with their gradients and Adam's two moments.

    Args:
        plan: of the run.
        full_bytes: parameter name -> bytes of the unsharded parameter.
    """
    total = 0.0
    for stage in plan.stages:
        for name, how in stage.parameter_plans.items():
            if not how.on_host:
                continue
            num_shards = 1
            for size, mode in zip(stage.logical_mesh, how.modes, strict=True):
                if mode.is_shard:
                    num_shards *= size
            total += 4 * full_bytes[name] / num_shards
    return total


def run_case(name: str, plans: str) -> list[dict[str, Any]]:
    """Run one job, and return the figures that each rank measured."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        command = [*torchrun(__file__, case.ranks), "--worker", name, "--out", str(out)]
        run_job(command, name, folder, {"ALPA_PLANS": plans})
        return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(case.ranks)]


def read_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="*", choices=CASES, help="all but the large ones by default"
    )
    parser.add_argument(
        "--require", type=float, help="exit 1 where a peak differs by more than this share"
    )
    parser.add_argument("--details", action="store_true", help="also print memory after every step")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = read_arguments()
    for name in LARGE_CASES:
        CASES[name].strategy["memory_limit"] = state_bytes(CASES[name].gpt) / 3
    if args.worker:
        worker(CASES[args.worker], args.out)
        return 0
    table = Table(title="peak memory per rank, MB of RSS beyond the imports'")
    for column in (
        "plan",
        "rank",
        "planned",
        "steps",
        "ratio",
        "from start on",
        "ratio",
        "and of files",
        "process",
        "ru_maxrss",
        "ratio",
    ):
        table.add_column(column, justify="left" if column == "plan" else "right")
    wrong = False
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as plans:
        for name in args.cases or [name for name in CASES if name not in LARGE_CASES]:
            for figures in run_case(name, plans):
                table.add_row(name, *row_of(figures))
                if args.require is not None:
                    wrong |= exceeds(name, figures, args.require)
                if args.details:
                    marks = {k: f"{v / 1e6:.0f}" for k, v in figures["marks"].items()}
                    console.print(name, figures["rank"], marks)
    console.print(table)
    for name in args.cases or ():
        if name not in LARGE_CASES:
            continue
        state = state_bytes(CASES[name].gpt)
        console.print(
            f"{name}: parameters and Adam state {state / 1e6:.0f} MB, memory_limit"
            f" {state / 3e6:.0f} MB"
        )
    return 1 if wrong else 0


def row_of(figures: dict[str, Any]) -> list[str]:
    """Return the columns of one rank after its case's name; bytes are shown in MB."""
    planned = figures["planned"]
    steps = figures["steps"]
    start = figures["start"]
    total = figures["total"]
    process = figures["process"]
    return [
        str(figures["rank"]),
        f"{planned / 1e6:.0f}",
        f"{steps / 1e6:.0f}",
        f"{steps / planned:.2f}",
        f"{start / 1e6:.0f}",
        f"{start / planned:.2f}",
        f"{figures['files'] / 1e6:.0f}",
        f"{process / 1e6:.0f}",
        f"{total / 1e6:.0f}",
        f"{total / (planned + process):.2f}",
    ]


def exceeds(name: str, figures: dict[str, Any], tolerance: float) -> bool:
    """Return whether the peaks of one rank differ too much from its plan.

    Args:
        name: of the case.
        figures: measured by the rank, bytes.
        tolerance: largest relative difference of the peak during the steps.
    """
    planned = figures["planned"]
    process = figures["process"]
    if abs(figures["steps"] / planned - 1) > tolerance:
        return True
    if name in LARGE_CASES and figures["total"] > 1.1 * planned + process:
        return True
    return figures["total"] > 1.1 * (planned + process)


if __name__ == "__main__":
    sys.exit(main())
