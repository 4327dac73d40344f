"""What `gpu_exam.py` trains, times and compares: models of every kind, one way to fit them, their
differences.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import alpa_strategy  # noqa: E402

COSTS = ROOT / "configs" / "clusters" / "dgx_h200.yaml"  # where measuring is not what is examined
Made = tuple[pl.LightningModule, tuple[Tensor, Tensor], int]  # (module, rows, rows of a batch)


@dataclass(frozen=True)
class Exam:
    """Where a part runs, and how large."""

    device: str
    small: bool

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def gpt(exam: Exam, dropout: float = 0.0) -> Made:
    """A small one, for equality."""
    from gpt import GPT

    layers, hidden, length = (4, 32, 16) if exam.small else (4, 256, 128)
    vocabulary = 64 if exam.small else 1024
    return (
        GPT(layers, hidden, 2, vocabulary, length, dropout, lr=1e-3),
        tokens_of(256, length, vocabulary),
        8,
    )


def large_gpt(exam: Exam) -> Made:
    """350 M parameters, for speed and memory."""
    from gpt import GPT

    if exam.small:
        return GPT(2, 64, 2, 128, 32), tokens_of(256, 32, 128), 4
    return GPT(24, 1024, 16, 51200, 1024), tokens_of(512, 1024, 51200), 8


def moe(exam: Exam) -> Made:
    from moe import MoE

    hidden, length = (32, 16) if exam.small else (256, 128)
    model = MoE(2, hidden, 2, 4, 256, length, group_size=length, mlp_factor=2, capacity_factor=1.25)
    return model, tokens_of(256, length, 256), 8


def wide_resnet(exam: Exam) -> Made:
    from wide_resnet import WideResNet

    channels, size = (4, 8) if exam.small else (32, 32)
    model = WideResNet((1, 1, 1), channels, 2, 10, 3, small_images=True, lr=0.01)
    numbers = torch.Generator().manual_seed(0)
    images = torch.randn(256, 3, size, size, generator=numbers)
    return model, (images, torch.randint(10, (256,), generator=numbers)), 16


class NextToken(pl.LightningModule):
    """The training of a causal language model of Hugging Face, which is in `model`."""

    model: Any

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch  # [rows, sequence] each
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def llama(exam: Exam) -> Made:
    """Hugging Face's, where `transformers` is installed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(NextToken):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config)

    hidden, length = (32, 16) if exam.small else (256, 128)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )
    return Llama(config), tokens_of(256, length, 256), 8


def tokens_of(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=numbers)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Losses(pl.Callback):
    """The loss of every step, without waiting for the device."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *unused: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self._losses.append(loss.detach().clone())

    def values(self) -> list[float]:
        return [float(loss) for loss in self._losses]


class Clock(pl.Callback):
    """Steps after `warmup`: seconds of all, the host's seconds of each, the device's memory,
    kernels of two more.

    Phases: warm-up; `timed` steps with one synchronisation at each end; `probed` steps, each begun
    with an idle device: what the host needs for one if nothing holds it up; two steps under the
    profiler.
    """

    def __init__(
        self, exam: Exam, warmup: int, timed: int, probed: int = 3, profiled: bool = True
    ) -> None:
        self._exam = exam
        self._warmup = warmup
        self._end = warmup + timed
        self._probe_end = self._end + probed
        self._profiled = profiled and exam.on_gpu
        self.steps = self._probe_end + (2 if self._profiled else 0)
        self._timed = timed
        self._host: list[float] = []
        self._begun = 0.0
        self._profiler: Any = None
        self.figures: dict[str, Any] = {}
        gc.collect()  # of earlier trainings in this process, whose tensors would count
        self._before = torch.cuda.memory_allocated() if exam.on_gpu else 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self._warmup:
            self._exam.synchronize()
            if self._exam.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self._started = time.perf_counter()
        if self._end <= index < self._probe_end:
            self._exam.synchronize()
            self._begun = time.perf_counter()
        if index == self._probe_end and self._profiled:
            kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == self._end - 1:
            self._exam.synchronize()
            self.figures["step_seconds"] = (time.perf_counter() - self._started) / self._timed
            if self._exam.on_gpu:
                self.figures["peak_bytes"] = torch.cuda.max_memory_allocated() - self._before
                self.figures["reserved_bytes"] = torch.cuda.max_memory_reserved()
        if self._end <= index < self._probe_end:
            self._host.append(time.perf_counter() - self._begun)
            self.figures["host_seconds"] = statistics.median(self._host)
        if index == self.steps - 1 and self._profiler is not None:
            self._exam.synchronize()
            self._profiler.__exit__(None, None, None)
            on_device = [
                e
                for e in self._profiler.events()
                if e.device_type == torch.autograd.DeviceType.CUDA
            ]
            kernels = [e for e in on_device if not e.is_user_annotation]
            self.figures["kernels"] = len(kernels) / 2
            self.figures["kernel_seconds"] = sum(e.time_range.elapsed_us() for e in kernels) / 2e6
            self._profiler = None


def fit(
    exam: Exam,
    model: Any,
    rows: tuple[Tensor, Tensor],
    batch_size: int,
    strategy: Any = "auto",
    precision: str = "32-true",
    steps: int = 8,
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: str | None = None,
    **trainer: Any,
) -> pl.Trainer:
    """Train on `rows`, in their order."""
    loader = DataLoader(TensorDataset(*rows), batch_size, pin_memory=exam.on_gpu)
    return fit_loader(
        exam, model, loader, strategy, precision, steps, callbacks, ckpt_path, **trainer
    )


def fit_loader(
    exam: Exam,
    model: Any,
    loader: DataLoader,
    strategy: Any = "auto",
    precision: Any = "32-true",
    steps: int = 8,
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: str | None = None,
    **trainer: Any,
) -> pl.Trainer:
    """Train on the batches of a loader."""
    trainer_options: dict[str, Any] = {
        "devices": 1,
        "enable_checkpointing": False,
        "default_root_dir": os.getcwd(),
        **trainer,
    }
    lightning_trainer = pl.Trainer(
        accelerator="gpu" if exam.on_gpu else "cpu",
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # Lightning's would shuffle
        **trainer_options,
    )
    lightning_trainer.fit(model, loader, ckpt_path=ckpt_path)
    return lightning_trainer


def alpa(**options: Any) -> alpa_strategy.AlpaStrategy:
    """Return the strategy, with an error for a step that is not captured.

    An eager step equals the plain Trainer's in any case, so it would examine nothing.
    """
    return alpa_strategy.AlpaStrategy(
        **{"verbose": False, "cluster": str(COSTS), "capture": "require", **options}
    )


def compile_blocks(model: Any) -> None:
    """A GPT's blocks, compiled: one compilation serves all (`torch.compile(module)` trips over the
    Trainer).
    """
    for block in model.blocks:
        block.compile()


def to_float8(exam: Exam, model: Any, recipe: str) -> None:
    """A GPT's blocks with float8 linears; emulated where no kernels are."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not exam.on_gpu)
    convert_to_float8_training(model.blocks, config=config)


Trained = tuple[list[float], dict[str, Tensor]]  # losses, weights


def trained(
    exam: Exam,
    make: Callable[[Exam], Made],
    strategy: Any = "auto",
    precision: str = "32-true",
    steps: int = 8,
    callbacks: Sequence[pl.Callback] = (),
    **trainer_options: Any,
) -> Trained:
    """What comes of a model and rows that `make` makes of the same random numbers every time."""
    pl.seed_everything(0, verbose=False)
    model, rows, batch = make(exam)
    losses = Losses()
    fit(
        exam,
        model,
        rows,
        batch,
        strategy,
        precision,
        steps,
        [losses, *callbacks],
        **trainer_options,
    )
    return losses.values(), state_of(model)


def state_of(model: pl.LightningModule) -> dict[str, Tensor]:
    """Return a module's state on the CPU in float64, to be compared."""
    return {name: value.detach().cpu().double() for name, value in model.state_dict().items()}


def apart(mine: Trained, theirs: Trained) -> tuple[float, float]:
    """Relative differences of weights and losses."""
    return difference(mine[1], theirs[1]), losses_apart(mine[0], theirs[0])


def difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Of all weights as one vector, relative; nan where one is nan or missing."""
    if mine.keys() != theirs.keys():
        return float("nan")
    apart = sum(float((mine[name] - theirs[name]).square().sum()) for name in mine)
    return (apart / sum(float(value.square().sum()) for value in theirs.values())) ** 0.5


def losses_apart(mine: Sequence[float], theirs: Sequence[float]) -> float:
    if len(mine) != len(theirs):
        return float("nan")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(mine, theirs, strict=True))


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that add in one order, where there are any: what differs then is ours."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_mem_efficient_sdp(True)
