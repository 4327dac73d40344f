"""What limits a plan is said in sentences, with the plan's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cli.test_display import as_text, gpt_plan
from cli.test_timeline import staged

from alpa_strategy.display.communication import exposed_message_seconds, hidden_messages_text
from alpa_strategy.display.findings import findings
from alpa_strategy.display.full_plan import plan_table
from alpa_strategy.display.timeline import plan_timeline
from alpa_strategy.display.waits import waits, waits_text
from alpa_strategy.ir.plan import Collective, Predicted
from alpa_strategy.page.model import page_model
from alpa_strategy.units import format_seconds


def with_step(plan, **seconds):
    predicted = Predicted(
        sum(seconds.values()), 0, **{f"{k}_seconds": v for k, v in seconds.items()}
    )
    return replace(plan, predicted=predicted)


def test_the_largest_part_comes_first_and_small_ones_are_left_out():
    plan = with_step(staged("GPipe"), compute=1.0, communication=2.0, optimizer=0.01)
    lines = findings(plan)
    assert lines[0].startswith("Communication takes 66% of the step (2.00 s).")
    assert lines[1].startswith("The end of the step depends on the critical path: 17.0 ms of work")
    assert lines[2].startswith("Computation takes 33%")
    assert not any("optimizer" in line for line in lines)


def test_the_largest_collective_is_named():
    plan = staged("GPipe")
    collective = Collective("all_to_all", 0, "forward", 4, 2**30, 1.5)
    first = replace(plan.stages[0], collectives=(collective,))
    plan = replace(plan, stages=(first, *plan.stages[1:]))
    lines = findings(with_step(plan, compute=1.0, communication=2.0))
    assert "all_to_all on mesh axis 0 of stage 0, in the forward: 1.00 GiB in 1.50 s" in lines[0]
    assert "longest on the busiest devices (0-7) is" in lines[0]
    assert "bytes of all 2 devices of the axis: 512 MiB on each." in lines[0]
    # Once, even if communication takes little time.
    assert sum("all_to_all" in line for line in lines) == 1
    lines = findings(with_step(plan, compute=1.0, communication=0.01))
    assert "1.00 GiB in 1.50 s, in part while they compute." in lines[-1]
    assert "all_to_all" not in lines[0]


def test_collectives_of_devices_that_the_parts_are_not_of_are_left_out():
    plan = staged("GPipe")
    last = plan.stages[-1]
    longer = replace(last.predicted, step_seconds=2 * last.predicted.step_seconds)
    collective = Collective("all_to_all", 0, "forward", 4, 2**30, 1.5)
    first = replace(plan.stages[0], collectives=(collective,))
    plan = replace(plan, stages=(first, replace(last, predicted=longer)))
    text = " ".join(findings(with_step(plan, compute=1.0, communication=0.5)))
    assert "longest on the busiest devices (8-15) is all_reduce on mesh axis 1 of stage 1" in text
    assert "all_to_all" not in text


def test_a_slow_boundary_is_said_and_a_fast_one_is_not():
    plan = staged("GPipe")
    seconds = plan.stages[0].forward_seconds
    slow = replace(plan.stages[0], boundary_seconds=8 * seconds)
    lines = findings(replace(plan, stages=(slow, *plan.stages[1:])))
    (said,) = [line for line in lines if "this boundary is slow" in line]
    assert "from stage 0 to 1" in said
    # 8 micro-batches, both ways; the collectives take 50 ms.
    assert (
        "They are the communication that takes longest: 16 of them, 64.0 ms of links' time a step"
        in said
    )
    fast = replace(plan.stages[0], boundary_seconds=seconds / 10)
    lines = findings(replace(plan, stages=(fast, *plan.stages[1:])))
    assert not any("boundary" in line for line in lines)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_messages_are_listed_and_what_computation_hides_of_them(schedule):
    """The step is as much longer than without them as is said: it is laid out both ways."""
    plan = staged(schedule, num_meshes=3)
    slow = replace(plan.stages[1], boundary_seconds=0.004, boundary_bytes=2**21)
    plan = replace(plan, stages=(plan.stages[0], slow, plan.stages[2]))
    free = replace(plan, stages=tuple(replace(s, boundary_seconds=0.0) for s in plan.stages))
    exposed = plan_timeline(plan).seconds - plan_timeline(free).seconds
    assert exposed_message_seconds(plan) == pytest.approx(exposed)
    assert 0 < exposed < 16 * 0.002
    hidden = hidden_messages_text(plan)
    assert f"Without them a step would take {format_seconds(exposed)} less" in hidden
    model = page_model(plan)
    assert model["messages"] == hidden
    assert any(line.endswith(hidden) for line in model["findings"])
    text = " ".join(as_text(plan_table(plan)).split())
    assert "stage 1 to 2 and back 16 16.0 MiB 2.00 ms 32.0 ms" in text
    for mesh, rows in enumerate(waits(plan_timeline(plan))):
        idle = format_seconds(sum(seconds for _, seconds in rows))
        assert " ".join(f"{8 * mesh}-{8 * mesh + 7} {idle} {waits_text(rows)}".split()) in text
    assert "stage 0 to 1 and back" not in text
    assert hidden in text
    assert hidden_messages_text(free) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0625, "sum 62.5 ms, 12.5 ms overlapped with computation: 50.0 ms left"),
        (0.05, "sum 50.0 ms: the communication of the step"),
        (0.03, "sum 30.0 ms, and 20.0 ms of communication that is no collective: 50.0 ms"),
    ],
)
def test_the_collectives_of_a_stage_add_up_to_its_communication(seconds, text):
    (stage,) = gpt_plan().stages
    collective = Collective("all_reduce", 0, "step", 4, 2**30, seconds)
    predicted = replace(stage.predicted, communication_seconds=0.05)
    stage = replace(stage, collectives=(collective,), predicted=predicted)
    plan = replace(gpt_plan(), stages=(stage,))
    assert page_model(plan)["stages"][0]["sum"].startswith(text)
    assert text in " ".join(as_text(plan_table(plan)).split())


def working(stage, seconds):
    return replace(stage, predicted=replace(stage.predicted, step_seconds=seconds))


def test_the_busiest_stage_is_named_if_it_works_longer_than_the_mean():
    """It is the one that the parts of the step are of, on the page as well, although a micro-batch
    takes longer on another.
    """
    plan = staged("GPipe", num_meshes=3)
    first, second, last = plan.stages
    slow = replace(last, backward_seconds=3 * last.backward_seconds)
    plan = replace(plan, stages=(first, working(second, 1.4), slow))
    plan = with_step(plan, compute=1.0)
    lines = findings(plan)
    expected = "Stage 1 is the busiest: it works 1.40 s of a step, 40% more than the mean of all"
    assert any(line.startswith(expected) for line in lines)
    of_parts = "on the devices of stage 1 (8-15), the busiest"
    assert page_model(plan)["busiest"] == of_parts
    assert of_parts in " ".join(as_text(plan_table(plan)).split())
    assert not any("busiest:" in line for line in findings(staged("GPipe")))


def test_of_interleaved_stages_the_devices_are_compared():
    plan = staged("Interleaved1F1B")
    first, second, third, last = plan.stages
    longer = working(first, 3.0)
    # Stages 0 and 2 are on the same devices, 1 and 3 on the others.
    balanced = replace(plan, stages=(longer, second, third, replace(longer, first_device=8)))
    assert not any("busiest:" in line for line in findings(balanced))
    lines = findings(replace(plan, stages=(longer, second, third, last)))
    (said,) = [line for line in lines if "busiest:" in line]
    assert said.startswith("Devices 0-7, of stages 0, 2, are the busiest: they work 3.80 s of a")
    assert "41% more than the mean of all devices" in said
