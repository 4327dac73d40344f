"""Training by default against DDP, and with `compile=True` against DDP + `torch.compile`: steps and
second starts, as ratios within one run.

    # GPT 4 x 512, a LLaMA-like model, a ResNet and a U-Net on 2 CPU ranks
    python scripts/bench_compile.py
    python scripts/bench_compile.py --models gpt --rounds 1 --steps 6

Jobs take turns (`--rounds` times). A round's first figure is its quickest step after warm-up (a
busy machine only adds
to a step: medians of one round after the other differ by 10 %), and a strategy's is that of its
quickest round. The second is the seconds from the job's launch to the end of its first step. Each
strategy has an Inductor cache of its
own: empty in the first round, filled afterwards (the second start).
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

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from bench_jobs import check_steps, torchrun, user_threads
from bench_jobs import run_job as run_process
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


class Clock(pl.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *unused: object) -> None:
        self.times.append(time.time())


def worker(args: argparse.Namespace, model_name: str, strategy: str) -> None:
    """One rank of one job; rank 0 writes when its steps ended."""
    import alpa_strategy

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    name, _, compiled = strategy.partition("+")
    pl.seed_everything(0, verbose=False)
    model, data, rows = model_and_data(model_name, args.steps)
    clock = Clock()
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
        max_steps=args.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=rows, drop_last=True)
    if compiled and name == "ddp":
        model.compile()  # its forward: Dynamo stumbles over `self.log`, so not the full step
    trainer.fit(model, loader)
    if trainer.global_rank == 0:
        Path(args.out).write_text(json.dumps(clock.times), encoding="utf-8")


def run_job(
    args: argparse.Namespace, model: str, strategy: str, folder: Path
) -> tuple[float, float]:
    """(seconds of the quickest step, seconds to the end of the first one) of one job."""
    job_folder = folder / model / strategy
    job_folder.mkdir(parents=True, exist_ok=True)
    out = job_folder / "times.json"
    command = torchrun(__file__, 2)
    command += [
        "--worker",
        model,
        strategy,
        "--steps",
        str(args.steps),
        "--folder",
        str(job_folder),
    ]
    command += ["--out", str(out)]
    variables = {**user_threads(), "TORCHINDUCTOR_CACHE_DIR": str(job_folder / "inductor")}
    started = time.time()
    run_process(command, f"{model}, {strategy}", job_folder, variables)
    times = json.loads(out.read_text(encoding="utf-8"))
    step_seconds = [b - a for a, b in pairwise(times)]
    return min(step_seconds[args.warmup :]), times[0] - started


def main() -> int:
    """Runs the jobs, prints a table; 1 if a goal is missed (with `--require`)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["gpt", "llama", "resnet", "unet"])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--require", action="store_true", help="exit 1 unless 1.0 x in steps, 1.2 x in starts"
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.worker:
        check_steps(parser, args)
    if args.worker:
        worker(args, *args.worker)
        return 0
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            results: dict[str, list[tuple[float, float]]] = {name: [] for name in args.strategies}
            for turn in range(args.rounds):
                for name in args.strategies[
                    :: 1 if turn % 2 == 0 else -1
                ]:  # neither always goes first
                    results[name].append(run_job(args, model, name, Path(folder)))
            for name, rounds in results.items():
                starts = [start for _, start in rounds]
                steps = " ".join(f"{1e3 * step:.0f}" for step, _ in rounds)
                later_starts = [f"{start:.0f}" for start in starts[1:]]
                later = " ".join(later_starts or ["-"])
                print(
                    f"{model:7} {name:13} steps {steps} ms, first start {starts[0]:.0f} s, later"
                    f" {later} s",
                    flush=True,
                )
            for name in results:
                is_compiled = name.endswith("+compile")
                of_ddp = "ddp+compile" if is_compiled else "ddp"
                if name == of_ddp or of_ddp not in results:
                    continue
                pairs = list(zip(results[of_ddp], results[name], strict=True))
                ddp_seconds = min(theirs[0] for theirs, _ in pairs)
                alpa_seconds = min(mine[0] for _, mine in pairs)
                speed = ddp_seconds / alpa_seconds
                ratios = [mine[1] / theirs[1] for theirs, mine in pairs][1:]
                start = statistics.median(ratios) if ratios else None
                of_starts = "no later start" if start is None else f"{start:.2f} x its later start"
                print(f"{model:7} {name}: {speed:.3f} x {of_ddp}'s steps/s, {of_starts}")
                missed |= speed < 1.0
                missed |= is_compiled and start is not None and start > 1.2
    return int(missed and args.require)


if __name__ == "__main__":
    sys.exit(main())
