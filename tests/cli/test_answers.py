"""What limits a plan is worked out once, however often the plan is shown."""

from __future__ import annotations

from dataclasses import replace

from page.test_details import PIPELINE, planned
from rich.console import Console

from alpa_strategy.display import answers
from alpa_strategy.display.answers import answers_of
from alpa_strategy.display.full_plan import plan_table
from alpa_strategy.display.summary import plan_summary
from alpa_strategy.page.page import models_of, plan_page


def test_terminal_and_page_share_the_answers_of_a_plan(monkeypatch) -> None:
    shown, _ = planned("gpt", PIPELINE)
    # Not shown by another test.
    plan = replace(shown)
    calls: list[object] = []
    best_change = answers.best_change

    def counted(*arguments: object) -> str | None:
        calls.append(arguments)
        return best_change(*arguments)

    monkeypatch.setattr(answers, "best_change", counted)
    console = Console(width=400, record=True)
    console.print(plan_summary(plan), plan_table(plan, plan.figures.memory_limit))
    (model,) = models_of(plan_page(plan))
    assert len(calls) == 1
    assert model["change"] in console.export_text()

    # Another limit, and another plan that is equal, have their own.
    assert answers_of(plan, 1.0) is not answers_of(plan)
    assert answers_of(replace(plan)) is not answers_of(plan)
    assert answers_of(plan) == answers_of(replace(plan))
