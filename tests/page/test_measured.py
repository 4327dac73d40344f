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
from alpa_strategy.lightning.plan_pages import PlanPages
from alpa_strategy.page.page import models_of, page_path


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
    PlanPages().write(path, plan, measured)
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


def test_a_profile_keeps_the_prediction_of_its_own_run(capsys, tmp_path: Path) -> None:
    plan, _ = planned("mlp")
    path = tmp_path / "plan.json"
    plan.save(path)
    profiled = replace(measured_twice_as_long(plan), predicted_seconds=0.5)
    later = replace(profiled, predicted_seconds=0.75, earlier_predicted_seconds=0.5)
    PlanPages().write(path, plan, later)

    (model,) = models_of(page_path(path).read_text())
    shown = model["measured"]
    assert shown["predicted"] == pytest.approx(0.75, rel=1e-3)
    assert shown["profilePredicted"] == pytest.approx(0.5, rel=1e-3)
    assert shown["profileNotes"].startswith("An earlier run was profiled")
    assert main(["show", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "An earlier run was profiled" in printed
    assert "Predicted are 500 ms" in printed
    assert "750 ms" not in printed


def test_the_page_and_the_terminal_compare_with_the_prediction_of_the_run(capsys, tmp_path) -> None:
    plan, _ = planned("mlp")
    path = tmp_path / "plan.json"
    plan.save(path)
    in_run = plan.predicted.step_seconds + 0.5
    measured = replace(measured_twice_as_long(plan), predicted_seconds=in_run)
    PlanPages().write(path, plan, measured)

    (model,) = models_of(page_path(path).read_text())
    shown = model["measured"]
    assert shown["predicted"] == pytest.approx(in_run, rel=1e-3)
    predicted = [seconds for _, _, seconds in shown["parts"] if seconds is not None]
    assert sum(predicted) == pytest.approx(in_run, rel=1e-3)
    assert "by the plan, 500 ms more in the Trainer's loop" in shown["prediction"]

    assert main(["show", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Predicted are {shown['prediction']}." in printed


def test_the_seconds_of_a_step_alone_are_shown_too(tmp_path: Path, capsys) -> None:
    plan, _ = planned("mlp")
    path = tmp_path / "plan.json"
    plan.save(path)
    PlanPages().write(path, plan, MeasuredSteps(plan_digest(plan), 0.25, None))
    assert main(["show", str(path)]) == 0
    assert "a step took 250 ms" in capsys.readouterr().out
    (model,) = models_of(page_path(path).read_text())
    # 32 samples of a step.
    assert model["measured"]["step"] == 0.25
    assert model["measured"]["rates"] == "128 samples/s, MFU 0.0%"


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


class PageClock(pl.Callback):
    """Lists, after each batch, the endings of the files beside the plan."""

    def __init__(self, folder: Path, fails_at: int | None = None) -> None:
        self.folder = folder
        self.fails_at = fails_at
        self.endings: list[set[str]] = []
        # Of the page, since it is there.
        self.inodes: set[int] = set()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.look()
        if batch_idx == self.fails_at:
            raise RuntimeError("of the user")

    def look(self) -> None:
        files = list(self.folder.glob(".alpa/plans/*"))
        self.endings.append({file.name.partition(".")[2] for file in files})
        self.inodes |= {file.stat().st_ino for file in files if file.suffix == ".html"}


def fit(root: Path, num_steps: int, clock: PageClock) -> Path:
    """Train on one rank, and return the path of the plan."""
    model = MLP()
    rows = Rows(model.example_batch(2 * num_steps, torch.Generator().manual_seed(0)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AlpaStrategy(),
        max_steps=num_steps,
        callbacks=[clock],
        default_root_dir=root,
        **QUIET,
    )
    try:
        trainer.fit(model, DataLoader(rows, batch_size=2))
    finally:
        clock.look()
    (plan_file,) = [path for path in root.glob(".alpa/plans/*.json") if path.suffixes == [".json"]]
    return plan_file


@pytest.mark.parametrize(("num_steps", "is_measured"), [(8, False), (14, True)])
def test_a_short_training_says_its_measured_step_at_its_end(
    tmp_path: Path, capfd, num_steps: int, is_measured: bool
) -> None:
    """Steps are measured from the sixth on. The page waits for them."""
    clock = PageClock(tmp_path)
    plan_file = fit(tmp_path, num_steps, clock)
    printed = "".join(capfd.readouterr())
    assert ("step measured" in printed) == is_measured
    words = "".join(printed.split())
    assert words.count("theplan'spageis" + str(page_path(plan_file))) == 1
    measured = measured_of_file(plan_file, Plan.load(plan_file))
    assert (measured is not None) == is_measured

    assert clock.endings[:-1] == [{"json"}] * num_steps
    (model,) = models_of(page_path(plan_file).read_text())
    assert model["detailed"] == is_measured
    others = {"details.gz", "measured.gz"} if is_measured else set()
    assert clock.endings[-1] == {"json", "html"} | others


def test_the_page_of_a_longer_training_is_written_once_in_it(tmp_path: Path) -> None:
    """A training that was too short for details does not keep a later one from making them."""
    fit(tmp_path, 2, PageClock(tmp_path))
    clock = PageClock(tmp_path)
    plan_file = fit(tmp_path, 30, clock)
    everything = {"json", "html", "details.gz", "measured.gz"}
    assert clock.endings == [{"json", "html"}] * 26 + [everything] * 5
    # That of the short training, and the one of this.
    assert len(clock.inodes) == 2
    (model,) = models_of(page_path(plan_file).read_text())
    assert model["detailed"]
    assert model["measured"]["step"] > 0


def test_a_training_that_fails_leaves_the_page_of_the_plan_alone(tmp_path: Path) -> None:
    clock = PageClock(tmp_path, fails_at=3)
    with pytest.raises(RuntimeError, match="of the user"):
        fit(tmp_path, 8, clock)
    assert clock.endings == [{"json"}] * 4 + [{"json", "html"}]
    (plan_file,) = tmp_path.glob(".alpa/plans/*.json")
    page_path(plan_file).unlink()
    assert main(["show", str(plan_file), "--html"]) == 0
    (model,) = models_of(page_path(plan_file).read_text())
    assert not model["detailed"]
