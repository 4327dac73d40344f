"""What a run has measured is stored beside its plan, and shown with it."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from equality.harness import Rows
from models import MLP
from page.test_details import PIPELINE, planned
from quiet import QUIET
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy
from alpa_strategy.cli import main
from alpa_strategy.display.measured import measured_parts, predicted_parts
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.measured_steps import (
    MeasuredAction,
    MeasuredLane,
    MeasuredMessage,
    MeasuredSteps,
    ProfiledRank,
    ProfiledSteps,
    measured_of_file,
    measured_path,
)
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_companion import plan_digest
from alpa_strategy.page.page import models_of, page_path
from alpa_strategy.page.run_page import store_measured


def measured_twice_as_long(plan: Plan) -> MeasuredSteps:
    """A run in which every part takes twice the predicted seconds."""
    parts = {part: 2 * seconds for part, seconds in predicted_parts(plan).items()}
    ranks = []
    lanes = []
    for index in range(len(plan.stages)):
        ranks.append(ProfiledRank(index, (index,), parts, 0.97))
        actions = [
            MeasuredAction("F", index, 0, 0.001 * index, 0.001),
            MeasuredAction("B", index, 0, 0.005, 0.002),
            MeasuredAction("U", index, 0, 0.008, 0.001),
        ]
        lanes.append(MeasuredLane(index, (index,), tuple(actions)))
    messages = (MeasuredMessage(0, 1, 0, 0.001, 0.0005),) if len(plan.stages) > 1 else ()
    step = 2 * plan.predicted.step_seconds
    profiled = ProfiledSteps(10, 3, step, tuple(ranks), tuple(lanes), messages, "trace.json.gz")
    return MeasuredSteps(plan_digest(plan), step / 1.1, profiled)


@pytest.mark.parametrize("options", [(), PIPELINE])
def test_what_was_measured_is_stored_and_on_the_page(tmp_path: Path, options, capsys) -> None:
    plan, _ = planned("gpt", options)
    path = tmp_path / "plan.json"
    plan.save(path)
    measured = measured_twice_as_long(plan)
    store_measured(path, plan, measured)
    assert measured_of_file(path, plan) == measured
    assert measured_of_file(path, Plan.load(path)) == measured

    (model,) = models_of(page_path(path).read_text())
    for _, seconds, predicted in model["measured"]["parts"]:
        assert seconds == pytest.approx(2 * predicted)
    assert len(model["measured"]["timeline"]["actions"]) == 3 * len(plan.stages)

    assert main(["show", str(path), "--html"]) == 0
    shown = capsys.readouterr().out
    assert "alpa profiled steps 10 to 12" in shown
    assert "its ops, and recomputed ones" in shown
    (again,) = models_of(page_path(path).read_text())
    assert again["measured"] == model["measured"]


def test_the_seconds_of_a_step_alone_are_shown_too(tmp_path: Path, capsys) -> None:
    plan, _ = planned("mlp")
    path = tmp_path / "plan.json"
    plan.save(path)
    store_measured(path, plan, MeasuredSteps(plan_digest(plan), 0.25, None))
    assert main(["show", str(path)]) == 0
    assert "a step took 250 ms" in capsys.readouterr().out
    (model,) = models_of(page_path(path).read_text())
    # 32 samples of a step.
    assert model["measured"] == {"step": 0.25, "rates": "128 samples/s, MFU 0.0%"}


def test_predicted_parts_add_up_to_the_step() -> None:
    for options in ((), (("parallel", "zero3"),), (("parallel", "tensor"),), PIPELINE):
        plan, _ = planned("gpt", options)
        parts = predicted_parts(plan)
        assert sum(parts.values()) == pytest.approx(plan.predicted.step_seconds, rel=1e-6), options
        assert measured_parts(measured_twice_as_long(plan).profiled, plan).keys() == parts.keys()


def test_files_of_other_plans_are_ignored_and_broken_ones_are_errors(tmp_path: Path) -> None:
    plan, _ = planned("mlp")
    path = tmp_path / "plan.json"
    plan.save(path)
    assert measured_of_file(path, plan) is None
    other = replace(measured_twice_as_long(plan), plan="another")
    other.save(measured_path(path))
    assert measured_of_file(path, plan) is None
    measured_path(path).write_bytes(b"no gzip")
    with pytest.raises(PlanError, match="cannot be read"):
        measured_of_file(path, plan)
    measured_path(path).write_bytes(gzip.compress(b'{"measured_version": 99}'))
    with pytest.raises(PlanError, match="have version 99"):
        measured_of_file(path, plan)


@pytest.mark.parametrize(("num_steps", "is_measured"), [(8, False), (14, True)])
def test_a_short_training_says_its_measured_step_at_its_end(
    tmp_path: Path, capfd, num_steps: int, is_measured: bool
) -> None:
    """Steps are measured from the sixth on."""
    model = MLP()
    rows = Rows(model.example_batch(2 * num_steps, torch.Generator().manual_seed(0)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AlpaStrategy(),
        max_steps=num_steps,
        default_root_dir=tmp_path,
        **QUIET,
    )
    trainer.fit(model, DataLoader(rows, batch_size=2))
    (plan_file,) = [
        path for path in tmp_path.glob(".alpa/plans/*.json") if path.suffixes == [".json"]
    ]
    printed = "".join(capfd.readouterr())
    assert ("step measured" in printed) == is_measured
    assert f"its page in {page_path(plan_file).name}" in " ".join(printed.split())
    measured = measured_of_file(plan_file, Plan.load(plan_file))
    assert (measured is not None) == is_measured
