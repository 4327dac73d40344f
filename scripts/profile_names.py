#!/usr/bin/env python
"""How much of a captured step's time has the user's names: the tiny GPT recipe on two CPU ranks.

    python scripts/profile_names.py [--only NAME]

Each case trains a few steps with `profile_steps=`, and prints the share of `training_step` and the
backward that modules, collectives and messages have by name, for both ranks. The exit code is 1 if
a share is below 95 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from alpa_strategy.ir.measured_steps import MeasuredSteps

ROOT = Path(__file__).resolve().parent.parent
LEAST_SHARE = 0.95
NUM_STEPS = 9
PIPELINE = ("num_stages=2", "num_microbatches=4", "schedule=1F1B")
CASES: dict[str, tuple[str, ...]] = {
    "data": ("parallel=data",),
    "tensor": ("parallel=tensor",),
    "two stages": PIPELINE,
    "zero3": ("parallel=zero3",),
    "compiled": ("parallel=data", "compile=true"),
}


def profile(options: tuple[str, ...], folder: str) -> MeasuredSteps:
    """Train the recipe with profiled steps, and return what was measured."""
    command = [sys.executable, "-m", "alpa_strategy", "train", str(ROOT / "recipes/gpt_tiny.yaml")]
    command += [
        "trainer.devices=2",
        f"trainer.max_steps={NUM_STEPS}",
        f"trainer.default_root_dir={folder}",
        "trainer.enable_progress_bar=false",
        "strategy.cluster=pcie_8gpu",
        "strategy.verbose=false",
        f"strategy.profile_steps=[{NUM_STEPS - 4},{NUM_STEPS - 1}]",
        *(f"strategy.{option}" for option in options),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (path,) = Path(folder, ".alpa", "plans").glob("*.measured.gz")
    return MeasuredSteps.load(path)


def main() -> int:
    """Run the cases and print their shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES, help="one case")
    only = parser.parse_args().only
    table = Table("plan", "rank", "named", "step", "parts")
    least = 1.0
    for name, options in CASES.items():
        if only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            profiled = profile(options, folder).profiled
        assert profiled is not None
        for rank in profiled.ranks:
            least = min(least, rank.named_share)
            parts = sorted(rank.parts.items(), key=lambda part: -part[1])
            shown = ", ".join(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in parts)
            seconds = f"{1e3 * profiled.step_seconds:.1f} ms"
            table.add_row(name, str(rank.rank), f"{rank.named_share:.1%}", seconds, shown)
    Console(width=160).print(table)
    return 0 if least >= LEAST_SHARE else 1


if __name__ == "__main__":
    raise SystemExit(main())
