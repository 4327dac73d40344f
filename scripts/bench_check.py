"""Seconds that the check of a stored plan takes, against a whole warm start: process start to the
first step's end.

    python scripts/bench_check.py [RECIPE] [--options num_stages=2 num_microbatches=4] [--rounds 3]

Both are processor seconds of rank 0, so that other load says nothing; the limit is 1 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from bench_jobs import output_tail, run_job

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import json, os, sys, time
import lightning.pytorch as pl
from alpa_strategy import AlpaStrategy
from alpa_strategy.lightning import planning
from alpa_strategy.recipe import build_data, build_model, load_recipe

checked, check = [], planning._check_computes

def timed(*arguments):
    started = time.process_time()
    check(*arguments)
    checked.append(time.process_time() - started)

class First(pl.Callback):
    def on_train_batch_end(self, trainer, *unused):
        if trainer.global_rank == 0 and trainer.global_step == 1:
            print("CHECK", json.dumps([sum(checked), time.process_time()]), flush=True)

planning._check_computes = timed
recipe = load_recipe(sys.argv[1], [])
pl.seed_everything(0, verbose=False)
options = json.loads(sys.argv[3])
strategy = AlpaStrategy(cluster="pcie_8gpu", capture="require", verbose=False, **options)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_steps=1,
    callbacks=[First()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=sys.argv[2],
)
trainer.fit(build_model(recipe), datamodule=build_data(recipe))
"""


def seconds(recipe: str, folder: str, options: dict[str, object]) -> tuple[float, float]:
    """Return CPU seconds of rank 0 in one job of two ranks: (of the check, of the full start)."""
    script = Path(folder) / "job.py"
    script.write_text(CODE)
    command = [sys.executable, str(script), recipe, folder, json.dumps(options)]
    job = run_job(command, recipe)
    lines = [line for line in job.stdout.splitlines() if line.startswith("CHECK")]
    if not lines:
        raise SystemExit(f"{recipe} made no step:\n{output_tail(job)}")
    check, start = json.loads(lines[0].removeprefix("CHECK"))
    return check, start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default=str(ROOT / "recipes" / "gpt_tiny.yaml"))
    parser.add_argument("--options", nargs="*", default=[], metavar="name=value")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = {
        name: json.loads(value)
        for name, _, value in (option.partition("=") for option in arguments.options)
    }
    with tempfile.TemporaryDirectory() as folder:
        seconds(arguments.recipe, folder, options)  # makes the plan
        results = [seconds(arguments.recipe, folder, options) for _ in range(arguments.rounds)]
    check, step = (statistics.median(values) for values in zip(*results, strict=True))
    print(
        f"{arguments.recipe} {options}: check {check * 1e3:.1f} ms of {step:.2f} s:"
        f" {check / step:.2%}"
    )
    return 1 if check > 0.01 * step else 0


if __name__ == "__main__":
    sys.exit(main())
