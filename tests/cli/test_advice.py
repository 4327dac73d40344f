"""The change that would help a plan most follows from what takes its time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cli.test_display import gpt_plan
from cli.test_summary import FIGURES, MEMORY, with_predicted
from cli.test_timeline import staged

from alpa_strategy.display.advice import best_change
from alpa_strategy.display.timeline import plan_timeline
from alpa_strategy.ir.execution import CompiledExecution, Execution
from alpa_strategy.ir.plan import Collective, Plan, Predicted, TaskFigures


def one_stage(phase: str = "step", **seconds: float) -> Plan:
    """A plan of one stage whose only collective is of `phase`."""
    parts = {f"{name}_seconds": value for name, value in seconds.items()}
    total = sum(seconds.values())
    predicted = Predicted(total, 11 * 2**30, memory=MEMORY, **parts)
    plan = gpt_plan()
    collective = Collective("all_reduce", 0, phase, 1, 2**30, seconds.get("communication", 0.0))
    stage = replace(plan.stages[0], collectives=(collective,))
    return with_predicted(replace(plan, stages=(stage,)), predicted)


def first_change(plan: Plan, memory_limit: float | None = None) -> str:
    """The change that is named first."""
    text = best_change(plan, memory_limit)
    assert text is not None
    return text.partition(";")[0]


def test_what_only_planning_tells_is_named_after_the_change_that_is_estimated() -> None:
    plan = one_stage("forward", compute=0.6, communication=0.4)
    text = best_change(plan, plan.predicted.peak_bytes)
    assert text is not None
    assert "compile=True may shorten computation (60% of the step)" in text
    assert "memory is full: `alpa whatif --set device.memory_bytes=2x`" in text
    roomy = best_change(replace(plan), 2 * plan.predicted.peak_bytes)
    assert roomy is not None
    assert "memory is full" not in roomy


def test_half_precision_is_proposed_where_matmuls_take_the_time() -> None:
    plan = replace(one_stage(compute=0.6, communication=0.2), figures=FIGURES)
    # Half of 0.6 seconds of 0.8.
    assert first_change(plan) == 'precision="bf16-mixed": about 1.60x the samples/s'


def test_what_is_done_once_per_step_is_shared_by_a_larger_batch() -> None:
    plan = one_stage(compute=0.5, communication=0.3, optimizer=0.1, host=0.1)
    # Half of 0.5 seconds is saved; activations take 9 GiB more.
    expected = "a batch twice as large (20.0 GiB a device): about 1.33x the samples/s"
    assert first_change(plan, 22 * 2**30) == expected
    # Without the host's seconds, and without more memory.
    text = best_change(plan, 16 * 2**30)
    assert text is not None
    assert text.startswith("accumulate_grad_batches twice as large: about 1.25x the samples/s")
    assert "a batch twice as large, with more memory: about 1.33x" in text


def test_twice_the_batch_in_one_stage_keeps_the_size_of_micro_batches() -> None:
    plan = replace(one_stage(compute=0.5, optimizer=0.1, host=0.4), num_microbatches=4)
    text = best_change(plan, 22 * 2**30)
    assert text is not None
    # The activations are those of one micro-batch.
    assert "a batch twice as large in 8 micro-batches of the present size (11.0 GiB a" in text


def test_collectives_between_ops_need_faster_links() -> None:
    plan = one_stage("forward", compute=0.5, communication=0.5)
    assert first_change(plan) == "links twice as fast: about 1.33x the samples/s with this plan"


def test_a_step_of_computation_needs_devices() -> None:
    plan = one_stage(compute=0.97, communication=0.03)
    text = best_change(plan)
    assert text is not None
    assert text.startswith("computation takes 97% of the step: compile=True may shorten it")
    assert text.endswith("more or faster devices do")
    execution = Execution((), (), {}, (), compiled=CompiledExecution((), ()))
    compiled = replace(plan.stages[0], execution=execution)
    text = best_change(replace(plan, stages=(compiled,)))
    assert text == "computation takes 97% of the step: only more or faster devices shorten it"


def test_more_micro_batches_shorten_the_waiting_of_a_pipeline() -> None:
    plan = staged("1F1B")
    busy = 0.5 * plan.predicted.step_seconds
    predicted = replace(
        plan.predicted,
        compute_seconds=busy,
        communication_seconds=0.0,
        optimizer_seconds=0.0,
        memory={"activations": 100},
    )
    stages = tuple(replace(stage, predicted=predicted) for stage in plan.stages)
    plan = replace(plan, predicted=predicted, stages=stages)
    text = best_change(plan, 101)
    # Under 1F1B twice as many micro-batches need no more memory.
    assert text is not None
    assert text.startswith("a batch twice as large in 16 micro-batches of the present size")
    assert "(100 B a device): about 1.33x" in text
    stored = replace(plan, schedule="GPipe")
    assert "with more memory" in (best_change(stored, 101) or "")


def pipeline(boundary_seconds: float = 0.0, last_forward: float = 0.001) -> Plan:
    """Two stages under 1F1B with 512 micro-batches, and the step that their seconds give."""
    plan = staged("1F1B", 512)
    first, last = plan.stages
    first = replace(first, boundary_seconds=boundary_seconds)
    last = replace(last, forward_seconds=last_forward)
    plan = replace(plan, stages=(first, last))
    schedule = plan_timeline(plan)
    assert schedule is not None
    return with_predicted(plan, Predicted(schedule.seconds, 100, 512 * 0.003))


def test_a_pipeline_that_waits_for_messages_needs_faster_links() -> None:
    text = best_change(pipeline(boundary_seconds=0.012))
    assert text is not None
    assert "links twice as fast, first of all between stages: about " in text
    # Messages take as long with more micro-batches.
    assert "a batch twice as large" not in text


def test_waiting_that_no_change_shortens_is_named() -> None:
    plan = pipeline(last_forward=0.004)
    text = best_change(plan)
    assert text is not None
    assert text.startswith("none that is known: devices are idle for 50% of the step")
    assert "faster" not in text
    pinned = replace(plan, figures=TaskFigures(pins=("parallel=zero3", "num_microbatches=512")))
    assert best_change(pinned) == (
        "waiting takes 50% of the step: without num_microbatches=512 another plan may wait less"
    )
    # Without waiting there is nothing of it to say.
    assert (best_change(pipeline()) or "").startswith("computation takes")


def test_devices_are_not_the_advice_where_most_are_idle() -> None:
    plan = pipeline(last_forward=0.02)
    busy = replace(plan.predicted, compute_seconds=plan.predicted.step_seconds)
    stages = []
    for stage in plan.stages:
        work = 512 * (stage.forward_seconds + stage.backward_seconds)
        stages.append(replace(stage, predicted=Predicted(work, 100, work)))
    plan = replace(plan, stages=tuple(stages), predicted=busy)
    assert (best_change(plan) or "").startswith("none that is known: devices are idle for 43%")
    first, last = plan.stages
    slow = replace(plan, stages=(replace(first, boundary_seconds=0.002), last))
    assert best_change(slow) == (
        "faster links between stages 0 and 1: beside a slow boundary stages are unequal, and"
        " devices are idle for 43% of the step (one for 86%)"
    )


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_without_seconds_of_the_parts_nothing_is_proposed(seconds: float) -> None:
    assert best_change(with_predicted(gpt_plan(), Predicted(seconds, 1))) is None
