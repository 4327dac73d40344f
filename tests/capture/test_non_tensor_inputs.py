"""Leaves of the batch that are no tensors: what the step does not look at may change, what it looks
at is guarded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import MLP
from torch import Tensor

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.capture.non_tensor_inputs import leaves_hold
from alpa_strategy.ir.graph import LeafRef, StepGraph


class Reading(MLP):
    """Uses leaves of its batch in the way that the test names."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.__dict__["use"] = use

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        prediction = self.net(batch["x"])
        return self.__dict__["use"](prediction, batch)


def batch_of(**leaves: Any) -> dict[str, Any]:
    return {"x": torch.zeros(4, 8), **leaves}


def captured(use: Any, batch: dict[str, Any]) -> StepGraph:
    return capture_step(Reading(use), batch)


def test_what_is_only_returned_is_not_read() -> None:
    batch = batch_of(ids=["a", "b"], number=3)
    step = captured(lambda p, b: {"loss": p.sum(), "ids": b["ids"], "n": (b["number"],)}, batch)
    assert step.leaves == ()
    assert step.output["ids"] == [LeafRef(1), LeafRef(2)]
    assert step.output["n"] == (LeafRef(3),)


USES = {
    "comparison": lambda p, b: p.sum() * (2 if b["n"] > 3 else 1),
    "operand": lambda p, b: (p * b["n"]).sum(),
    "slice": lambda p, b: p[: b["n"]].sum(),
    "range": lambda p, b: sum(p.sum() for _ in range(b["n"])),
    "isinstance": lambda p, b: p.sum() * (2 if isinstance(b["n"], int) else 1),
    "size": lambda p, b: (p + torch.ones(b["n"], 1)).sum(),
    "format": lambda p, b: p.sum() * len(f"{b['n']}"),
    "key": lambda p, b: p.sum() * {4: 2.0}.get(b["n"], 1.0),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_read_is_guarded_and_alone(use: str) -> None:
    batch = batch_of(n=4, other=7, text="t")
    step = captured(USES[use], batch)
    assert leaves_hold(step.leaves, {**batch, "other": 8, "text": "u"})
    assert not leaves_hold(step.leaves, {**batch, "n": 5})


def test_a_swallowed_look_counts(pytestconfig: Any) -> None:
    def use(p: Tensor, b: dict[str, Any]) -> Tensor:
        try:
            factor = len(b["text"])
        except BaseException:
            factor = 1
        return p.sum() * factor

    step = captured(use, batch_of(text="four"))
    assert not leaves_hold(step.leaves, batch_of(text="three"))


def test_texts_in_a_list_are_read_together() -> None:
    batch = batch_of(texts=["a", "bb"])
    step = captured(lambda p, b: p.sum() * len("".join(b["texts"])), batch)
    assert leaves_hold(step.leaves, batch)
    assert not leaves_hold(step.leaves, batch_of(texts=["a", "b"]))
