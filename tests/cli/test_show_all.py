"""`alpa show` prints all that `alpa plan` did, with the same numbers; so does the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa_strategy.cli import main
from alpa_strategy.display.op_times import op_label
from alpa_strategy.display.plan_words import flops_text, rates_text
from alpa_strategy.ir.plan import Plan
from alpa_strategy.page.page import models_of, page_path

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "gpt_tiny.yaml")
P3 = str(ROOT / "configs" / "clusters" / "p3_16xlarge_x8.yaml")
SMALL = ["model.num_layers=1", "cluster.num_nodes=1", "cluster.devices_per_node=2"]
CASES = {
    "one": ["plan.num_stages=1"],
    "two": ["plan.num_stages=2", "plan.num_microbatches=4", "trainer.precision=bf16-mixed"],
}


@pytest.fixture(params=CASES)
def shown(request, tmp_path, capsys, monkeypatch) -> tuple[Path, str, str]:
    """A plan's path, what `alpa plan` printed, and what `alpa show` prints."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.json"
    # A long path would be folded.
    command = ["plan", TINY, "--cluster", P3, *SMALL, *CASES[request.param], "-o", path.name]
    assert main(command) == 0
    planned = capsys.readouterr().out
    assert main(["show", str(path)]) == 0
    return path, planned, capsys.readouterr().out


def test_every_line_of_a_plan_is_shown_again(shown):
    _, planned, again = shown
    words = " ".join(again.split())
    lines = planned.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("Alpa plan"))
    # Behind the plan: the files, and the memory that planning took.
    end = next(at for at, line in enumerate(lines) if line.startswith("plan stored"))
    for line in lines[start:end]:
        text, is_last, _ = line.partition("; peak")
        if "alpa show " not in text:
            assert " ".join(text.split()) in words
        if is_last:
            break


def test_the_rates_are_the_same_wherever_they_are_shown(shown):
    path, planned, again = shown
    plan = Plan.load(path)
    rates = rates_text(plan.figures, plan.predicted.step_seconds)
    assert "tokens/s" in rates
    (model,) = models_of(page_path(path).read_text())
    assert model["rates"] == rates
    assert model["flops"] == flops_text(plan.figures)
    assert "attention's" in model["flops"]
    for text in (planned, again):
        assert rates in " ".join(text.split())
        assert model["flops"] in " ".join(text.split())
        assert plan.figures.precision in text
    # 8 samples of 128 tokens on each of two devices.
    assert (plan.figures.num_samples, plan.figures.num_tokens) == (16, 2048)
    assert model["change"] is not None


def test_a_cluster_without_a_rate_is_warned_of(shown):
    path, planned, again = shown
    is_bfloat16 = Plan.load(path).figures.precision == "bf16-mixed"
    (model,) = models_of(page_path(path).read_text())
    for text in (planned, again, model["warning"]):
        assert ("no FLOP/s for bfloat16" in " ".join(text.split())) is is_bfloat16
        assert ('or take precision="16-mixed"' in " ".join(text.split())) is is_bfloat16
    assert "MFU" in planned
    # Before the planning, too.
    assert planned.startswith("warning") is is_bfloat16
    assert ("no FLOP/s for bfloat16)" in " ".join(planned.split())) is is_bfloat16


@pytest.mark.parametrize(
    ("target", "label"),
    [
        ("aten.linear.default", "linear"),
        ("ops.segmented_linear", "segmented_linear"),
        ("per_rank.batch_norm.1f2e3d4c", "batch_norm"),
        ("my_library.attention.default", "my_library.attention"),
        ("relu", "relu"),
    ],
)
def test_ops_are_shown_by_their_short_names(target, label):
    assert op_label(target) == label
