"""The timeline of a schedule: what is drawn is what runs, in a terminal and in a picture."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from cli.test_display import as_text, gpt_plan

from alpa_strategy.display.full_plan import plan_svg, plan_table
from alpa_strategy.display.table import stage_overview, step_parts
from alpa_strategy.display.timeline import SIGNS, plan_timeline
from alpa_strategy.display.waits import waits
from alpa_strategy.ir.plan import Predicted
from alpa_strategy.page.model import page_model
from alpa_strategy.schedules import SCHEDULES, actions, mesh_of


def staged(schedule, num_microbatches=8, num_meshes=2):
    """A plan with equal stages: backward is twice the forward, boundaries are free."""
    v = SCHEDULES[schedule].stages_per_mesh[0]
    plan = gpt_plan(num_meshes * v)
    stages = tuple(
        replace(
            stage,
            first_device=8 * mesh_of(schedule, num_meshes, i),
            forward_seconds=0.001,
            backward_seconds=0.002,
            layers=f"blocks.{i}",
        )
        for i, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages, schedule=schedule, num_microbatches=num_microbatches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_actions_of_a_step_are_on_the_clock(schedule):
    plan = staged(schedule)
    drawn = plan_timeline(plan)
    v = len(plan.stages) // 2
    assert drawn.num_drawn == 8
    assert len(drawn.timed) == sum(map(len, actions(schedule, 2, 8, v)))
    for mesh in range(2):
        own = [done for done in drawn.timed if done.mesh == mesh]
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(own))
        assert {done.stage for done in own} == set(drawn.stages[mesh])


def test_gpipes_bubble_is_the_known_one():
    """(S - 1) / (B + S - 1) of the step, for equal stages."""
    drawn = plan_timeline(staged("GPipe", 6, 3))
    for mesh in range(3):
        busy = sum(done.end - done.start for done in drawn.timed if done.mesh == mesh)
        assert 1 - busy / drawn.seconds == pytest.approx(2 / 8)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("boundary", [0.0, 0.0015])
def test_all_idle_time_of_a_mesh_has_a_reason(schedule, boundary):
    plan = staged(schedule)
    stages = tuple(replace(stage, boundary_seconds=boundary) for stage in plan.stages)
    drawn = plan_timeline(replace(plan, stages=stages))
    for mesh, rows in enumerate(waits(drawn)):
        busy = sum(done.end - done.start for done in drawn.timed if done.mesh == mesh)
        assert sum(seconds for _, seconds in rows) == pytest.approx(drawn.seconds - busy)
        has_messages = any(reason.startswith("messages") for reason, _ in rows)
        assert has_messages == (boundary > 0)


def test_what_the_stages_of_gpipe_wait_for():
    """Backward takes 2 ms: the first of three stages waits for its first gradient."""
    drawn = plan_timeline(staged("GPipe", 6, 3))
    first, middle, last = map(dict, waits(drawn))
    # After the last stage's first forward, 2 ms later than its own last one, two backwards.
    assert first == pytest.approx({"the backward of stage 1": 0.006})
    assert middle == pytest.approx(
        {
            "the forward of stage 0": 0.001,
            "the backward of stage 2": 0.003,
            "the end of the step, when their work is done": 0.002,
        }
    )
    assert "the forward of stage 1" in last


def test_idle_is_the_step_less_the_work_of_all_stages_on_the_devices():
    """In the terminal, on the page, and in the bar of the busiest devices."""
    plan = staged("Interleaved1F1B")
    seconds = (0.3, 0.2, 0.19, 0.2)
    stages = [
        replace(stage, predicted=Predicted(took, 0, took))
        for stage, took in zip(plan.stages, seconds, strict=True)
    ]
    plan = replace(plan, stages=tuple(stages), predicted=Predicted(0.5, 0, 0.49, host_seconds=0.0))
    assert plan_timeline(plan).idle == pytest.approx((0.02, 0.2))

    rows = [line.split()[-1] for line in as_text(stage_overview(plan)).splitlines()]
    assert rows[2:] == ["2.0%", "20%"] * 2
    timeline = page_model(plan)["timeline"]
    assert timeline["idle"] == pytest.approx([0.02, 0.2])
    assert timeline["idleSeconds"] == pytest.approx([0.01, 0.1])
    assert step_parts(plan)["waiting"] == pytest.approx(0.01)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lines_show_every_mesh_and_micro_batch(schedule):
    plan = staged(schedule)
    lines = as_text(plan_timeline(plan, 8), 110).splitlines()
    rows = [line for line in lines if line.startswith("devices ")]
    assert [row.split()[1] for row in rows] == ["0-7", "8-15"]
    assert max(map(len, lines)) <= 110
    for row in rows:
        assert set(SIGNS["F"][:8]) <= set(row.split()[2])
        assert set(SIGNS["B"][:8]) <= set(row.split()[2])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_micro_batches_are_drawn_with_fewer(schedule):
    drawn = plan_timeline(staged(schedule, 512), 8)
    assert 2 <= drawn.num_drawn <= 8
    assert "of 512 micro-batches" in as_text(drawn, 110)
    assert plan_timeline(staged(schedule, 512)).num_drawn == 512


def test_a_plan_without_stages_or_times_has_none():
    assert plan_timeline(gpt_plan(1)) is None
    assert plan_timeline(gpt_plan(2)) is None


def test_table_and_pictures_show_stages_and_schedule():
    plan = staged("Interleaved1F1B")
    text = as_text(plan_table(plan), 120)
    for expected in ("blocks.3", "8-15", "2 x 4", "1.00 ms", "idle", "schedule  8 micro-batches"):
        assert expected in text
    narrow = as_text(plan_table(plan), 80).splitlines()
    assert max(map(len, narrow)) <= 80
    devices = [line for line in narrow if line.startswith("devices ")]
    assert sum(line.endswith(" idle") for line in devices) == 2
    drawn = plan_svg(plan).replace("&#160;", " ")
    for expected in ("16 devices", "blocks.3", "8-15", "schedule"):
        assert expected in drawn
