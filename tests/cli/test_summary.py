"""The plan on one screen of 80 x 40: what `alpa plan` and a training print."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from cli.test_display import gpt_plan
from rich.console import Console, RenderableType

from alpa_strategy.display.full_plan import plan_table
from alpa_strategy.display.summary import plan_summary
from alpa_strategy.display.table import proof_of, step_parts
from alpa_strategy.ir.plan import Plan, Predicted, TaskFigures
from alpa_strategy.ir.task_figures import StepFlops
from alpa_strategy.page.model import page_model

MEMORY = {"weights": 2**30, "gradients": 2**30, "state": 0, "activations": 9 * 2**30}
FIGURES = TaskFigures(
    num_samples=80,
    num_tokens=81920,
    precision="32-true",
    peak_seconds=0.4,
    half_precision="bf16-mixed",
    half_share=0.5,
    memory_limit=22 * 2**30,
)


def lines_of(renderable: RenderableType) -> list[str]:
    console = Console(file=StringIO(), width=80)
    console.print(renderable)
    return console.file.getvalue().splitlines()


def printed(plan: Plan, **arguments: float) -> list[str]:
    return lines_of(plan_summary(plan, **arguments))


def words_of(lines: list[str]) -> str:
    """The lines as one, however they were broken."""
    return " ".join(" ".join(lines).split())


def with_predicted(plan: Plan, predicted: Predicted) -> Plan:
    stages = tuple(replace(stage, predicted=predicted) for stage in plan.stages)
    return replace(plan, predicted=predicted, stages=stages)


@pytest.mark.parametrize("num_stages", [1, 2, 6, 48])
@pytest.mark.parametrize("num_notes", [0, 1, 40])
def test_it_fits_one_screen(num_stages: int, num_notes: int) -> None:
    notes = tuple(f"note {index}: " + "many words " * 60 for index in range(num_notes))
    plan = replace(gpt_plan(num_stages), notes=notes, figures=FIGURES)
    assumed = {"bfloat16": "float32", "float8_e4m3fn": "float16"}
    for shown in (plan, replace(plan, figures=replace(FIGURES, assumed_rates=assumed))):
        lines = printed(shown)
        assert len(lines) <= 36
        assert max(map(len, lines)) <= 80
        assert all("blocks.3.attn" not in line for line in lines)
        is_left_out = any(line.startswith("the table of the 48 stages, layouts") for line in lines)
        assert is_left_out == (num_stages == 48)


def test_rates_utilization_precision_and_parts_of_memory() -> None:
    plan = gpt_plan()
    plan = with_predicted(plan, replace(plan.predicted, memory=MEMORY))
    text = words_of(printed(replace(plan, figures=FIGURES)))
    for expected in (
        "mesh 2 x 4, 32-true, proved optimal",
        "800 ms, 100 samples/s, 102 k tokens/s, MFU 50.0%",
        "peak 11.0 GiB of 22.0 GiB per device (50%), 11.0 GiB left",
        "weights 1.00 GiB, gradients 1.00 GiB, activations 9.00 GiB",
    ):
        assert expected in text
    assert "state" not in text
    assert "warning" not in text


@pytest.mark.parametrize(
    ("by_dtype", "expected"),
    [
        (
            {"float32": 3e15},
            "3.00 PFLOP a step in float32: 900 TFLOP forward, 2.10 PFLOP backward; 10% of them are",
        ),
        (
            {"bfloat16": 2e15, "float32": 1e15},
            "3.00 PFLOP a step (2.00 PFLOP in bfloat16, 1.00 PFLOP in float32): 900 TFLOP forward",
        ),
    ],
)
def test_the_flops_that_mfu_counts_are_printed(by_dtype, expected) -> None:
    figures = replace(FIGURES, flops=StepFlops(9e14, 2.1e15, 3e14, by_dtype))
    plan = replace(gpt_plan(), figures=figures)
    for show in (plan_summary, plan_table):
        assert expected in words_of(lines_of(show(plan)))
    assert Plan.from_dict(plan.to_dict()).figures == figures


def test_what_is_not_known_is_left_out() -> None:
    figures = TaskFigures(num_samples=8)
    text = words_of(printed(replace(gpt_plan(), figures=figures)))
    assert "10.0 samples/s" in text
    assert "tokens/s" not in text
    assert "MFU" not in text


def test_dtypes_without_a_rate_are_warned_of() -> None:
    figures = replace(FIGURES, assumed_rates={"bfloat16": "float32"})
    plan = replace(gpt_plan(), figures=figures)
    for show in (plan_summary, plan_table):
        text = words_of(lines_of(show(plan)))
        assert "warning the cluster has no FLOP/s for bfloat16" in text
        assert "priced by those of float32" in text


def test_the_full_plan_has_memory_by_parts_for_each_stage() -> None:
    plan = gpt_plan(num_stages=2)
    stages = []
    for index, stage in enumerate(plan.stages):
        memory = {"weights": (index + 1) * 2**30, "activations": 4 * 2**30}
        stages.append(replace(stage, predicted=replace(stage.predicted, memory=memory)))
    lines = lines_of(plan_table(replace(plan, stages=tuple(stages))))
    assert max(map(len, lines)) <= 80
    start = next(at for at, line in enumerate(lines) if "memory of a device" in line)
    assert "".join(lines[start + 1].split()) == "stageweightsgradsstateactivationstemporarysum"
    rows = ["".join(line.split()) for line in lines[start + 2 : start + 4]]
    assert rows == ["01.00GiB0B0B4.00GiB0B5.00GiB", "12.00GiB0B0B4.00GiB0B6.00GiB"]


def test_what_limits_a_step() -> None:
    plan = gpt_plan()
    (stage,) = plan.stages
    named = replace(stage.collectives[0], largest="the gradient of embed.weight")
    plan = replace(plan, stages=(replace(stage, collectives=(named,)),))
    plan = with_predicted(plan, Predicted(1.0, 1, 0.2, 0.7, 0.1))
    for show in (plan_summary, plan_table):
        text = words_of(lines_of(show(plan)))
        assert "Communication takes 70% of the step" in text
        assert "The collective that takes longest is all_reduce" in text
        assert "Its largest part moves the gradient of embed.weight." in text


def test_what_the_plan_was_made_for_is_shown() -> None:
    figures = replace(FIGURES, optimizer_name="AdamW")
    plan = replace(gpt_plan(), figures=figures, num_microbatches=4)
    for show in (plan_summary, plan_table):
        text = words_of(lines_of(show(plan)))
        assert "for 80 samples of 1024 tokens, 20 a micro-batch, 32-true, AdamW" in text


@pytest.mark.parametrize(
    ("gap", "least"), [(0.66, "340 ms (66.00% less)"), (0.25, "750 ms (25.00%")]
)
def test_how_far_the_optimum_may_be_is_said_in_seconds(gap: float, least: str) -> None:
    plan = gpt_plan()
    plan = replace(plan, gap=gap, predicted=replace(plan.predicted, step_seconds=1.0))
    assert f"takes less than {least}" in proof_of(plan)
    assert page_model(plan)["proof"] == proof_of(plan)


def test_devices_of_one_stage_wait_for_no_others() -> None:
    plan = gpt_plan()
    longer = plan.predicted.step_seconds + 0.01
    plan = replace(plan, num_microbatches=4, predicted=replace(plan.predicted, step_seconds=longer))
    parts = step_parts(plan)
    assert "waiting" not in parts
    assert sum(parts.values()) == pytest.approx(longer)
