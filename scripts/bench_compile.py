"""Training by default against DDP, and with `compile=True` against DDP + `torch.compile`: steps and
second starts, as ratios within one run.

    # GPT 4 x 512, a LLaMA-like model, a ResNet and a U-Net on 2 CPU ranks
    python scripts/bench_compile.py
    python scripts/bench_compile.py --models gpt --rounds 1 --turns 6

Each strategy starts `--rounds` times: seconds from the launch to the end of the first step. It has
an Inductor cache of its own, which is empty in the first round and filled afterwards (the second
start). Steps are then timed in turns (`bench_turns.py`), and ratios are medians over the turns with
their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from bench_jobs import run_job as run_process
from bench_jobs import torchrun, user_threads
from bench_turns import PLACE_VARIABLE, TurnJob, TurnTaker, ratio, run_in_turns
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = (
    "ddp",
    "ddp+compile",
    "alpa",
    "alpa+compile",
)  # and "replica+compile": with `batch_scope="replica"`
VOCABULARY, SEQUENCE = 256, 256
# Of a rank, in an epoch.
NUM_BATCHES = 14
# Goals: steps a second and later starts, as ratios of DDP's.
LEAST_SPEED = 1.0
MOST_START = 1.2
# Quartiles need several turns after the warm-up.
LEAST_TURNS = 6


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention, SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, T, K]

        def rotated(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        h = self.norm1(x_BTD)
        y = F.scaled_dot_product_attention(
            rotated(split(self.q(h))), rotated(split(self.k(h))), split(self.v(h)), is_causal=True
        )
        x_BTD = x_BTD + self.o(y.transpose(1, 2).flatten(-2))
        h = self.norm2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(pl.LightningModule):
    """Four LLaMA-like blocks. Batch: (tokens [B, T], targets [B, T])."""

    def __init__(self, width: int = 512, layers: int = 4, heads: int = 8) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.Linear(width, VOCABULARY, bias=False),
        )
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        size = width // heads
        angles = torch.outer(
            torch.arange(SEQUENCE), 1e4 ** (-torch.arange(0, size, 2) / size)
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos())  # [T, K]
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-4)


class UNet(pl.LightningModule):
    """A small U-Net with BatchNorm: two levels down, two up. Batch: (images, masks)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def block(channels_in: int, channels_out: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels_out),
                nn.ReLU(),
                nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels_out),
                nn.ReLU(),
            )

        self.down = nn.ModuleList([block(3, width), block(width, 2 * width)])
        self.middle = block(2 * width, 4 * width)
        self.widen = nn.ModuleList(
            [
                nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
                nn.ConvTranspose2d(2 * width, width, 2, 2),
            ]
        )
        self.up = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = images  # [B, 3, H, W]
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), widen(x)], dim=1))
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, masks = batch
        return F.binary_cross_entropy_with_logits(self(images), masks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def model_and_data(name: str, rows: int) -> tuple[pl.LightningModule, TensorDataset, int]:
    """The model, `rows` batches of its data per rank, and a rank's samples of one."""
    sys.path.insert(0, str(ROOT / "recipes"))
    generator = torch.Generator().manual_seed(0)
    if name == "resnet":
        from wide_resnet import WideResNet

        images = torch.randn(rows * 16, 3, 64, 64, generator=generator)
        labels = torch.randint(10, (rows * 16,), generator=generator)
        return WideResNet((2, 2, 2), 32, 1, 10, small_images=True), TensorDataset(images, labels), 8
    if name == "unet":
        images = torch.randn(rows * 16, 3, 64, 64, generator=generator)
        masks = (images.mean(1, keepdim=True) > 0).float()
        return UNet(), TensorDataset(images, masks), 8
    from gpt import GPT

    model = GPT(4, 512, 8, VOCABULARY, SEQUENCE) if name == "gpt" else Llama()
    tokens = torch.randint(VOCABULARY, (rows * 8, SEQUENCE + 1), generator=generator)
    return model, TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), 4


class FirstStep(pl.Callback):
    """When the first step ended."""

    def __init__(self) -> None:
        self.end = 0.0

    def on_train_batch_end(self, *unused: object) -> None:
        self.end = self.end or time.time()


def worker(args: argparse.Namespace, model_name: str, strategy: str) -> None:
    """One rank of one job: rank 0 writes when its first step ended, or it takes turns."""
    import alpa_strategy

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    name, _, compiled = strategy.partition("+")
    pl.seed_everything(0, verbose=False)
    model, data, rows = model_and_data(model_name, NUM_BATCHES)
    is_timed_in_turns = PLACE_VARIABLE in os.environ
    first_step = FirstStep()
    callback = TurnTaker.from_environment() if is_timed_in_turns else first_step
    scope = "replica" if name == "replica" else "auto"
    capture = "auto" if name == "replica" else "require"
    alpa = alpa_strategy.AlpaStrategy(
        compile=bool(compiled),
        batch_scope=scope,
        capture=capture,
        plan_dir=args.folder,
        verbose=False,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if name == "ddp" else alpa,
        max_epochs=-1,
        max_steps=args.turns * args.steps if is_timed_in_turns else 2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=rows, drop_last=True)
    if compiled and name == "ddp":
        model.compile()  # its forward: Dynamo stumbles over `self.log`, so not the full step
    trainer.fit(model, loader)
    if trainer.global_rank == 0 and not is_timed_in_turns:
        Path(args.out).write_text(json.dumps(first_step.end), encoding="utf-8")


@dataclass(frozen=True)
class Job:
    """A model's training under one strategy, with a folder for its plan and compiled code."""

    model: str
    strategy: str
    folder: Path

    def command(self, args: argparse.Namespace) -> list[str]:
        """Return the command of its ranks."""
        return [
            *torchrun(ROOT / "scripts" / "bench_compile.py", 2),
            *("--worker", self.model, self.strategy),
            *("--steps", str(args.steps), "--turns", str(args.turns)),
            *("--folder", str(self.folder), "--out", str(self.out)),
        ]

    @property
    def out(self) -> Path:
        """The file that rank 0 writes."""
        return self.folder / "first_step.json"

    @property
    def variables(self) -> dict[str, str]:
        """Its environment variables."""
        return {**user_threads(), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}


def start_seconds(args: argparse.Namespace, job: Job) -> float:
    """Return the seconds from a job's launch to the end of its first step."""
    begun = time.time()
    run_process(job.command(args), f"{job.model}, {job.strategy}", job.folder, job.variables)
    return json.loads(job.out.read_text(encoding="utf-8")) - begun


def measure(args: argparse.Namespace, model: str, folder: Path) -> bool:
    """Measure one model under all strategies and print the figures; return whether they reach the
    goals.
    """
    jobs = [Job(model, strategy, folder / model / strategy) for strategy in args.strategies]
    starts: dict[str, list[float]] = {job.strategy: [] for job in jobs}
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
    for round_number in range(args.rounds):
        # None of them always goes first.
        for job in jobs if round_number % 2 == 0 else reversed(jobs):
            starts[job.strategy].append(start_seconds(args, job))

    turn_jobs = [TurnJob(job.strategy, job.command(args), job.variables) for job in jobs]
    seconds = run_in_turns(turn_jobs, 2, args.turns, args.steps, folder / model / "turns")
    reaches_goals = True
    for strategy, of_turns in seconds.items():
        step = 1e3 * statistics.median(of_turns)
        of_rounds = " ".join(f"{start:.0f}" for start in starts[strategy])
        print(f"{model:7} {strategy:13} step {step:.0f} ms, starts {of_rounds} s", flush=True)
    for strategy in seconds:
        of_ddp = "ddp+compile" if strategy.endswith("+compile") else "ddp"
        if strategy == of_ddp or of_ddp not in seconds:
            continue
        speed = ratio(seconds[of_ddp], seconds[strategy])
        later_starts = zip(starts[strategy][1:], starts[of_ddp][1:], strict=True)
        start_ratios = [mine / theirs for mine, theirs in later_starts]
        line = f"{model:7} {strategy}: {speed} x {of_ddp}'s steps/s"
        reaches_goals &= speed.median >= LEAST_SPEED
        if start_ratios:
            start = statistics.median(start_ratios)
            line += f", {start:.2f} x its later start"
            reaches_goals &= strategy == "alpa" or start <= MOST_START
        print(line, flush=True)
    return reaches_goals


def main() -> int:
    """Runs the jobs, prints a table; 1 if a goal is missed (with `--require`)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["gpt", "llama", "resnet", "unet"])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--turns", type=int, default=24, help="turns of each strategy")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each strategy")
    parser.add_argument(
        "--require", action="store_true", help="exit 1 unless 1.0 x in steps, 1.2 x in starts"
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args, *args.worker)
        return 0
    if args.turns < LEAST_TURNS or args.steps < 2:
        parser.error(f"give at least --turns {LEAST_TURNS} and --steps 2")
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(args, model, Path(folder)) for model in args.models]
    return int(args.require and not all(results))


if __name__ == "__main__":
    sys.exit(main())
