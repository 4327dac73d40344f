"""`import alpa_strategy` registers the strategy and loads little: every process of a job pays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from jobs import run_job
from lightning.pytorch.demos.boring_classes import BoringModel
from quiet import QUIET

import alpa_strategy  # noqa: F401  (registers the strategy)

JOB = """
import gc, json, sys
gc.set_threshold(700, 10, 10)
import lightning.pytorch as pl
import alpa_strategy
from lightning.pytorch.strategies import StrategyRegistry
seen = {
    "loaded": [name for name in sys.modules if name.startswith(("alpa_strategy.", "omegaconf"))],
    "is_registered": "alpa" in StrategyRegistry,
    "collects_garbage": gc.isenabled(),
}
from options.test_import import train
train(sys.argv[1])
seen["loaded by a training"] = list(sys.modules)
seen["names"] = [name for name in alpa_strategy.__all__ if str(getattr(alpa_strategy, name))]
print(json.dumps(seen))
"""
# What only planning, capture and checkpoints' files need.
LATE = (
    "alpa_strategy.planner.planner",
    "alpa_strategy.inter_op",
    "alpa_strategy.intra_op",
    "alpa_strategy.lower",
    "alpa_strategy.capture.trace",
    "alpa_strategy.cost.measured",
    "alpa_strategy.display.table",
    "omegaconf",
)


def train(folder: str) -> None:
    """One step under `folder`, which stores its plan or has one."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="alpa",
        max_steps=1,
        default_root_dir=folder,
        limit_val_batches=0,
        **QUIET,
    )
    trainer.fit(BoringModel())


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> dict[str, Any]:
    """What a process sees that imports the package and trains under a stored plan."""
    folder = tmp_path_factory.mktemp("job")
    train(str(folder))
    (plan,) = Path(folder).rglob(".alpa/plans/*.json")
    stored = plan.stat().st_mtime_ns

    done = run_job(folder, JOB, str(folder))
    assert done.returncode == 0, done.stderr
    assert plan.stat().st_mtime_ns == stored
    return json.loads(done.stdout.splitlines()[-1])


def test_the_import_loads_the_strategy_alone(job):
    assert job["is_registered"]
    assert job["collects_garbage"]
    assert not [name for name in job["loaded"] if name.startswith(LATE)]
    assert {"AlpaStrategy", "make_plan"} <= set(job["names"])


def test_a_training_with_a_stored_plan_loads_no_planner(job):
    planner = {"alpa_strategy.planner.planner", "alpa_strategy.inter_op.stage_costs"}
    assert not planner & set(job["loaded by a training"])
