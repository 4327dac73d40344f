"""Peak memory of every rank against the plan's prediction; and a model of three times a device's
memory, on four.

    python scripts/bench_memory.py                          # the table: one stage and pipelines, 500 MB and more
    python scripts/bench_memory.py --cases large            # parameters and Adam state are 3 x memory_limit, 4 ranks
    python scripts/bench_memory.py --require 0.15           # exit 1 where they differ by more

`ru_maxrss` is what the system says of the whole process, libraries included, from its start to the
last step (then a module that fits is made whole again); it is compared with the plan's bytes and
`AlpaStrategy.process_bytes`. On CPUs what a plan puts into host memory lies in the same memory, and
is planned as well. A single stage of whole parameters is
held to its limit, not to its plan: far from the limit freed blocks are kept. Apart from it,
measured is resident memory
beyond what the process held when its imports were done, every few milliseconds: the highest from
there on, and the highest during the training steps after the first. Pages of files (the libraries'
code) do not count there: the kernel takes them and gives them back as it likes, 200 MB and more of
them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.003
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """One job: `gpt` are sizes of recipes/gpt.py, `strategy` options of AlpaStrategy."""

    ranks: int
    gpt: dict[str, int]
    rows: int
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
LARGE_CASES = [
    name for name in CASES if name.startswith("large")
]  # their memory_limit is a third of the state


def state_bytes(gpt: dict[str, int]) -> int:
    """Parameters and Adam's two moments in float32, gradients apart."""
    h = gpt["hidden"]
    vocab = gpt["vocab_size"]
    length = gpt["sequence_length"]
    block = 12 * h * h + 13 * h
    return 12 * (gpt["num_layers"] * block + (vocab + length) * h + 2 * h)


def resident_bytes() -> tuple[int, int]:
    """Resident memory of this process: pages of files apart, and those."""
    _, resident, files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    page = os.sysconf("SC_PAGESIZE")
    return (resident - files) * page, files * page


class Watch(threading.Thread):
    """Remembers the highest resident memory since `peak` was set, and the most pages of files of
    all.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.files = resident_bytes()

    def run(self) -> None:
        while True:
            own, files = resident_bytes()
            self.peak, self.files = max(self.peak, own), max(self.files, files)
            time.sleep(SAMPLE_SECONDS)


def worker(case: Case, out: Path) -> None:
    """One rank of one job; writes what it measured."""
    import lightning.pytorch as pl
    import torch
    import torch._dynamo  # what torch.optim imports at the first optimizer
    from torch.utils.data import DataLoader, Dataset

    sys.path.insert(0, str(ROOT / "recipes"))
    from gpt import GPT

    import alpa_strategy
    import alpa_strategy.lightning.run
    import alpa_strategy.planner.planner

    class Tokens(Dataset):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            row = torch.randint(
                case.gpt["vocab_size"], (case.gpt["sequence_length"] + 1,), generator=generator
            )
            return row[:-1], row[1:]

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt: GPT | None = None

        def configure_model(self) -> None:
            if self.gpt is None:
                self.gpt = GPT(**case.gpt)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens, targets = batch
            return torch.nn.functional.cross_entropy(
                self.gpt(tokens).flatten(0, 1), targets.flatten()
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Marks(pl.Callback):
        def __init__(self) -> None:
            self.marks: dict[str, int] = {}

        def on_train_batch_start(self, trainer: pl.Trainer, *unused: object) -> None:
            if trainer.global_step == 1:
                self.marks["until the first step"] = watch.peak
                watch.peak, _ = resident_bytes()

        def on_train_batch_end(self, trainer: pl.Trainer, *unused: object) -> None:
            self.marks[f"after step {trainer.global_step}"], _ = resident_bytes()
            # Before a module that fits is made whole again.
            self.steps, self.total = (
                watch.peak,
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            )

    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    baseline, files = resident_bytes()
    watch = Watch()
    watch.start()
    marks = Marks()
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
    trainer.fit(Model(), DataLoader(Tokens(), batch_size=case.rows))
    steps = marks.steps
    with torch.device("meta"):
        whole = {
            f"gpt.{name}": parameter.nbytes
            for name, parameter in GPT(**case.gpt).named_parameters()
        }
    found = {
        "rank": trainer.global_rank,
        "planned": own_peak(strategy.plan, trainer.global_rank) + host_bytes(strategy.plan, whole),
        "steps": steps - baseline,
        "start": max(steps, marks.marks["until the first step"]) - baseline,
        "baseline": baseline,
        "files": watch.files - files,
        "total": marks.total,
        "process": strategy.process_bytes,
        "marks": {name: value - baseline for name, value in marks.marks.items()},
    }
    out.with_suffix(f".{trainer.global_rank}").write_text(json.dumps(found))


def own_peak(plan: Any, rank: int) -> int:
    """The prediction for one rank: of its stages together."""
    return sum(
        stage.predicted.peak_bytes
        for stage in plan.stages
        if 0 <= rank - stage.first_device < stage.submesh[0] * stage.submesh[1]
    )


def host_bytes(plan: Any, whole: dict[str, int]) -> float:
    """Of a rank's parts of what lies in host memory: with its gradient and Adam's two moments.
    whole: bytes by name.
    """
    total = 0.0
    for stage in plan.stages:
        for name, how in stage.parameter_plans.items():
            parts = math.prod(
                n for n, mode in zip(stage.logical_mesh, how.modes, strict=True) if mode.is_shard
            )
            total += 4 * whole[name] / parts if how.on_host else 0.0
    return total


def run_case(name: str, plans: str) -> list[dict[str, Any]]:
    """What every rank measured."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={case.ranks}",
        ]
        command += [__file__, "--worker", name, "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ALPA_PLANS": plans}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(case.ranks)]


def main() -> int:
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
    args = parser.parse_args()
    for name in LARGE_CASES:
        CASES[name].strategy["memory_limit"] = state_bytes(CASES[name].gpt) / 3
    if args.worker:
        worker(CASES[args.worker], args.out)
        return 0
    from rich.console import Console
    from rich.table import Table

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
            for found in run_case(name, plans):
                planned = found["planned"]
                steps = found["steps"]
                start = found["start"]
                row = [name, str(found["rank"]), f"{planned / 1e6:.0f}", f"{steps / 1e6:.0f}"]
                row += [f"{steps / planned:.2f}", f"{start / 1e6:.0f}", f"{start / planned:.2f}"]
                row += [
                    f"{found['files'] / 1e6:.0f}",
                    f"{found['process'] / 1e6:.0f}",
                    f"{found['total'] / 1e6:.0f}",
                ]
                row += [f"{found['total'] / (planned + found['process']):.2f}"]
                table.add_row(*row)
                if args.require is not None:
                    wrong |= abs(steps / planned - 1) > args.require
                    wrong |= found["total"] > 1.1 * (planned + found["process"])
                    wrong |= (
                        name in LARGE_CASES and found["total"] > 1.1 * planned + found["process"]
                    )
                if args.details:
                    console.print(
                        name,
                        found["rank"],
                        {k: f"{v / 1e6:.0f}" for k, v in found["marks"].items()},
                    )
    console.print(table)
    for name in (name for name in args.cases or () if name in LARGE_CASES):
        whole = state_bytes(CASES[name].gpt)
        console.print(
            f"{name}: parameters and Adam state {whole / 1e6:.0f} MB, memory_limit"
            f" {whole / 3e6:.0f} MB"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
