"""Seconds from process start to the end of the first training step: `alpa` with a stored plan
against `ddp`.

    python scripts/bench_startup.py [RECIPE] [--rounds 5]

The plan is made by one run that is not timed. Then the strategies take turns; the ratio is that of
the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_jobs import compile_package, output_tail, run_job

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import os, sys, time
import lightning.pytorch as pl
import alpa_strategy
from alpa_strategy.recipe import build_data, build_model, load_recipe

class First(pl.Callback):
    def on_train_batch_end(self, trainer, *unused):
        if trainer.global_rank == 0 and trainer.global_step == 1:
            print("FIRST_STEP", time.time(), flush=True)

recipe = load_recipe(sys.argv[2], [])
pl.seed_everything(0, verbose=False)
strategy = sys.argv[1]
if strategy == "alpa":
    strategy = alpa_strategy.AlpaStrategy(capture="require")
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_steps=2,
    callbacks=[First()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=sys.argv[3],
)
trainer.fit(build_model(recipe), datamodule=build_data(recipe))
"""


def seconds_to_first_step(strategy: str, recipe: str, folder: str) -> float:
    """Return wall seconds to the end of the first step of one job of two ranks.

    Lightning itself launches the second rank.
    """
    script = Path(folder) / "job.py"
    script.write_text(CODE)
    started = time.time()
    job = run_job([sys.executable, str(script), strategy, recipe, folder], strategy)
    for line in job.stdout.splitlines():
        if line.startswith("FIRST_STEP"):
            return float(line.split()[1]) - started
    raise SystemExit(f"{strategy} made no step:\n{output_tail(job)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "recipes" / "gpt_tiny.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--require", type=float, help="exit 1 unless alpa takes at most this multiple of ddp"
    )
    args = parser.parse_args()
    from rich.console import Console
    from rich.table import Table

    compile_package(ROOT)
    seconds: dict[str, list[float]] = {"ddp": [], "alpa": []}
    with tempfile.TemporaryDirectory() as folder:
        first = seconds_to_first_step("alpa", args.recipe, folder)
        for turn in range(args.rounds):
            for name in ("ddp", "alpa") if turn % 2 == 0 else ("alpa", "ddp"):
                seconds[name].append(seconds_to_first_step(name, args.recipe, folder))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["alpa"] / medians["ddp"]
    table = Table(title="process start to first step, 2 CPU ranks")
    for column in ("strategy", "seconds", "each"):
        table.add_column(column)
    table.add_row("alpa, first run (measures and solves)", f"{first:.2f}", "")
    for name, values in seconds.items():
        table.add_row(name, f"{medians[name]:.2f}", " ".join(f"{v:.2f}" for v in values))
    Console().print(table)
    Console().print(f"alpa with a stored plan / ddp = {ratio:.3f}")
    if args.require is None or ratio <= args.require:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
