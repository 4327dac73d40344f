"""`import alpa_strategy` registers the strategy and loads little: every process of a job pays."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import gc, json, sys
gc.set_threshold(700, 10, 10)
import lightning.pytorch as pl
import alpa_strategy
from lightning.pytorch.strategies import StrategyRegistry
loaded = [name for name in sys.modules if name.startswith(("alpa_strategy.", "omegaconf"))]
names = {name: str(getattr(alpa_strategy, name)) for name in alpa_strategy.__all__}
print(json.dumps([loaded, "alpa" in StrategyRegistry, gc.isenabled(), list(names)]))
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


def test_the_import_loads_the_strategy_alone():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    loaded, is_registered, collects_garbage, names = json.loads(found.stdout.splitlines()[-1])
    assert is_registered
    assert collects_garbage
    assert not [name for name in loaded if name.startswith(LATE)]
    assert {"AlpaStrategy", "make_plan"} <= set(names)


TRAINING = """
import json, sys
import lightning.pytorch as pl
import alpa_strategy
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = pl.Trainer(
    accelerator="cpu", devices=1, strategy="alpa", max_steps=1, default_root_dir=sys.argv[1],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0,
)
trainer.fit(BoringModel())
planner = ("alpa_strategy.planner.planner", "alpa_strategy.inter_op.stage_costs")
print(json.dumps([name in sys.modules for name in planner]))
"""


def test_a_training_with_a_stored_plan_loads_no_planner(tmp_path):
    loaded = []
    for _ in ("makes the plan", "finds it"):
        command = [sys.executable, "-c", TRAINING, str(tmp_path)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        loaded.append(json.loads(found.stdout.splitlines()[-1]))
    assert loaded == [[True, True], [False, False]]
