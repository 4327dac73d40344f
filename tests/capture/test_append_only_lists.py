"""What a step appends to lists of the module is part of its result; lists that it looks at are
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import ValueRef
from alpa_strategy.ir.guards import CounterRef, changed_value


class Keeps(LightningModule):
    """Appends in every way."""

    of_class: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.plain: list[Any] = []
        self.more: list[Any] = []
        self.nested: list[Any] = [{"a": []}, []]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.plain.append({"loss": loss, "batch": batch_idx})
        self.more.extend([loss, "text"])
        self.more += [1]
        self.of_class.append(loss)
        return loss


def test_appended_items_are_results() -> None:
    module = Keeps()
    step = capture_step(module, torch.ones(4, 3))
    results = {record.place.attribute: record.items for record in step.appended}
    loss = ValueRef(step.loss)
    assert results == {
        "plain": ({"loss": loss, "batch": CounterRef("batch_idx")},),
        "more": (loss, "text", 1),
        "of_class": (loss,),
    }
    assert (module.plain, module.more) == ([], [])
    assert not Keeps.of_class
    assert "of_class" not in vars(module)


def test_what_lies_in_the_lists_does_not_matter() -> None:
    module = Keeps()
    module.plain.append(torch.ones(2))
    step = capture_step(module, torch.ones(4, 3))
    assert changed_value(step.attributes) is None
    for record in step.appended:
        record.place.value(module).extend(record.items)
    assert len(module.plain) == 2
    module.plain = []
    assert changed_value(step.attributes) is None


def looks_at_length(module: Keeps) -> float:
    return float(len(module.plain))


def looks_at_items(module: Keeps) -> Tensor:
    return torch.stack(module.plain).sum()


def empties(module: Keeps) -> float:
    module.plain.clear()
    return 0.0


def appends_inside(module: Keeps) -> float:
    # such a step is eager
    module.nested[0]["a"].append(1)
    return 0.0


def changes_a_nested_dict(module: Keeps) -> float:
    module.nested[0]["b"] = 1
    return 0.0


def puts_elsewhere(module: Keeps) -> float:
    module.nested[0] = {}
    return 0.0


@pytest.mark.parametrize(
    "act",
    [
        looks_at_length,
        looks_at_items,
        empties,
        appends_inside,
        changes_a_nested_dict,
        puts_elsewhere,
    ],
)
def test_other_uses_are_refused(act: Any) -> None:
    class Looks(Keeps):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss + act(self)

    module = Looks()
    module.plain.append(torch.ones(()))
    with pytest.raises((CaptureError, TypeError)):
        capture_step(module, torch.ones(4, 3))
    assert len(module.plain) == 1
    assert module.nested == [{"a": []}, []]
