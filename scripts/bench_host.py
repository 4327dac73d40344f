"""What the host does for a step: CPU seconds of a GPT of many small layers, under the plain Trainer
and under alpa, as ratios of one run.

    python scripts/bench_host.py
    python scripts/bench_host.py --rounds 5 --most 1.1   # exit 1 if a ratio is larger

The layers are so small that nearly all of the time is Python, PyTorch's dispatcher and autograd.
This is what a step waits for if kernels are fast: small models, and fast GPUs. CPU seconds of one
process on one thread, so that other processes matter little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from gpu_exam_models import Exam, alpa, fit, tokens_of

PARTS = ("forward", "backward", "optimizer")

# Steps before the measured ones: planning, the measured step and the page come first.
WARMUP, MEASURED = 28, 32


class Clock(pl.Callback):
    """CPU seconds of the parts of each step after the first ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self._is_measured = False
        self._last = 0.0

    def _end_of(self, part: str) -> None:
        now = time.process_time()
        if self._is_measured:
            self.seconds[part].append(now - self._last)
        self._last = now

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self._is_measured = index >= WARMUP
        self._last = time.process_time()

    def on_before_backward(self, *unused: Any) -> None:
        self._end_of("forward")

    def on_after_backward(self, *unused: Any) -> None:
        self._end_of("backward")

    def on_train_batch_end(self, *unused: Any) -> None:
        self._end_of("optimizer")


def measure(strategy: Any, precision: str) -> dict[str, float]:
    """Return the lower quartile of the CPU seconds of each part of a step."""
    from gpt import GPT

    pl.seed_everything(0, verbose=False)
    model = GPT(24, 16, 2, 64, 8)
    clock = Clock()
    steps = WARMUP + MEASURED
    rows = tokens_of(2 * steps, 8, 64)
    fit(Exam("cpu", True), model, rows, 2, strategy, precision, steps, [clock])
    return {part: statistics.quantiles(clock.seconds[part], n=4)[0] for part in PARTS}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=float, help="the largest ratio that is right")
    args = parser.parse_args()

    from rich.console import Console
    from rich.table import Table

    torch.set_num_threads(1)
    table = Table("step", *PARTS, "all", "x plain", title="CPU ms of the host, a GPT of 24 layers")
    is_right = True
    cases = [("captured", precision) for precision in ("32-true", "bf16-mixed")]
    cases.append(("eager", "32-true"))
    for kind, precision in cases:
        seconds: dict[str, list[dict[str, float]]] = {"plain": [], kind: []}
        for _ in range(args.rounds):
            seconds["plain"].append(measure("auto", precision))
            capture = "require" if kind == "captured" else "never"
            seconds[kind].append(measure(alpa(capture=capture), precision))
        ratios = [
            sum(ours.values()) / sum(plain.values())
            for plain, ours in zip(seconds["plain"], seconds[kind], strict=True)
        ]
        ratio = statistics.median(ratios)
        for name, of_rounds in seconds.items():
            parts = []
            for part in PARTS:
                parts.append(1e3 * statistics.median(seen[part] for seen in of_rounds))
            figures = [f"{milliseconds:.1f}" for milliseconds in (*parts, sum(parts))]
            shown_ratio = "" if name == "plain" else f"{ratio:.2f}"
            table.add_row(f"{name}, {precision}", *figures, shown_ratio)
        if args.most is not None and ratio > args.most:
            is_right = False
    Console(width=100).print(table)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
