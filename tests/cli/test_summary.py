"""The plan on one screen of 80 x 40: what `alpa plan` and a training print."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from cli.test_display import gpt_plan
from rich.console import Console

from alpa_strategy.display.summary import plan_summary
from alpa_strategy.ir.plan import Plan, Predicted


def printed(plan: Plan, **arguments: float) -> list[str]:
    console = Console(file=StringIO(), width=80)
    console.print(plan_summary(plan, **arguments))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("num_stages", [1, 2, 6, 48])
@pytest.mark.parametrize("num_notes", [0, 1, 40])
def test_it_fits_one_screen(num_stages: int, num_notes: int) -> None:
    notes = tuple(f"note {index}: " + "many words " * 60 for index in range(num_notes))
    lines = printed(replace(gpt_plan(num_stages), notes=notes), memory_limit=2**34)
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert all("blocks.3.attn" not in line for line in lines)


def test_rate_utilization_and_parts_of_memory() -> None:
    plan = gpt_plan()
    memory = {"weights": 2**30, "gradients": 2**30, "state": 0, "activations": 9 * 2**30}
    predicted = replace(plan.predicted, memory=memory)
    stages = (replace(plan.stages[0], predicted=predicted),)
    plan = replace(plan, predicted=predicted, stages=stages)
    text = "\n".join(printed(plan, num_samples=80, seconds_at_peak=0.4, memory_limit=22 * 2**30))
    assert "100 samples/s" in text
    assert "MFU 50.0%" in text
    assert "50% of 22.0 GiB" in text
    assert "weights 1.00 GiB, gradients 1.00 GiB, activations 9.00" in text
    assert "state" not in text


def test_what_limits_a_step() -> None:
    plan = gpt_plan()
    predicted = Predicted(1.0, 1, 0.2, 0.7, 0.1)
    stages = (replace(plan.stages[0], predicted=predicted),)
    text = " ".join(printed(replace(plan, stages=stages, predicted=predicted)))
    assert "Communication takes 70% of the step" in text
    assert "The largest collective is all_reduce" in " ".join(text.split())
