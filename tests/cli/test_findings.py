"""What limits a plan is said in sentences, with the plan's numbers."""

from __future__ import annotations

from dataclasses import replace

from cli.test_timeline import staged

from alpa_strategy.display.findings import findings
from alpa_strategy.ir.plan import Collective, Predicted


def with_step(plan, **seconds):
    predicted = Predicted(
        sum(seconds.values()), 0, **{f"{k}_seconds": v for k, v in seconds.items()}
    )
    return replace(plan, predicted=predicted)


def test_the_largest_part_comes_first_and_small_ones_are_left_out():
    plan = with_step(staged("GPipe"), compute=1.0, communication=2.0, optimizer=0.01)
    lines = findings(plan)
    assert lines[0].startswith("Communication takes 66% of the step (2.00 s).")
    assert lines[1].startswith("Computation takes 33%")
    assert not any("optimizer" in line for line in lines)


def test_the_largest_collective_is_named():
    plan = staged("GPipe")
    collective = Collective("all_to_all", 0, "forward", 4, 2**30, 1.5)
    first = replace(plan.stages[0], collectives=(collective,))
    plan = replace(plan, stages=(first, *plan.stages[1:]))
    lines = findings(with_step(plan, compute=1.0, communication=2.0))
    assert "all_to_all on mesh axis 0 of stage 0, in the forward: 1.00 GiB in 1.50 s" in lines[0]
    assert "longest on the busiest devices (0-7) is" in lines[0]
    assert "bytes of all devices of the axis: one has 512 MiB." in lines[0]
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
    slow = replace(plan.stages[0], boundary_seconds=4 * seconds)
    lines = findings(replace(plan, stages=(slow, *plan.stages[1:])))
    (said,) = [line for line in lines if "this boundary is slow" in line]
    assert "from stage 0 to 1" in said
    fast = replace(plan.stages[0], boundary_seconds=seconds / 10)
    lines = findings(replace(plan, stages=(fast, *plan.stages[1:])))
    assert not any("boundary" in line for line in lines)


def test_the_slowest_stage_is_named_if_it_is_slower_than_the_mean():
    plan = staged("GPipe")
    last = plan.stages[-1]
    slow = replace(last, backward_seconds=3 * last.backward_seconds)
    lines = findings(replace(plan, stages=(*plan.stages[:-1], slow)))
    assert any(line.startswith(f"Stage {len(plan.stages) - 1} is the slowest") for line in lines)
    assert not any("slowest" in line for line in findings(plan))


def test_of_interleaved_stages_the_devices_are_compared():
    plan = staged("Interleaved1F1B")
    first, second, third, last = plan.stages
    longer = replace(first, backward_seconds=3 * first.backward_seconds)
    # Stages 0 and 2 are on the same devices, 1 and 3 on the others.
    balanced = replace(plan, stages=(longer, second, third, replace(longer, first_device=8)))
    assert not any("slowest" in line for line in findings(balanced))
    lines = findings(replace(plan, stages=(longer, second, third, last)))
    (said,) = [line for line in lines if "slowest" in line]
    assert said.startswith("Devices 0-7 are the slowest: a micro-batch takes 10.0 ms in their")
    assert "stages 0, 2, 25% more than the mean of all devices" in said
