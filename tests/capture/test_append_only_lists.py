"""What a step appends to lists of the module is part of its result; lists that it looks at are refused."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import ValueRef
from alpa_strategy.ir.guards import AttributeCheck, CounterRef


class Keeps(LightningModule):
    """Appends in every way."""

    of_class: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.plain: list[Any] = []
        self.by_loader: dict[int, list[Any]] = {0: [], 1: []}
        self.made: dict[str, list[Any]] = defaultdict(list)
        self.nested: list[Any] = [{"a": []}, []]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.plain.append({"loss": loss, "batch": batch_idx})
        self.by_loader[1].extend([loss, "text"])
        self.made["a"] += [loss]
        self.nested[0]["a"].append(1)
        self.of_class.append(loss)
        return loss


def test_appended_items_are_results() -> None:
    module = Keeps()
    step = capture_step(module, torch.ones(4, 3))
    found = {str(record.place): record.items for record in step.appended}
    loss = ValueRef(step.loss)
    assert found == {
        "plain": ({"loss": loss, "batch": CounterRef("batch_idx")},),
        "by_loader[1]": (loss, "text"),
        "made['a']": (loss,),
        "nested[0]['a']": (1,),
        "of_class": (loss,),
    }
    assert (module.plain, module.by_loader, module.nested) == ([], {0: [], 1: []}, [{"a": []}, []])
    assert not module.made
    assert not Keeps.of_class
    assert "of_class" not in vars(module)


def test_what_lies_in_the_lists_does_not_matter() -> None:
    module = Keeps()
    module.plain.append(torch.ones(2))
    step = capture_step(module, torch.ones(4, 3))
    assert AttributeCheck(module, step.attributes).changed() is None
    for record in step.appended:
        record.place.find(module).extend(record.items)
    module.by_loader[0].append(3)
    assert AttributeCheck(module, step.attributes).changed() is None
    assert len(module.plain) == 2
    module.plain, module.made = [], defaultdict(list)
    assert AttributeCheck(module, step.attributes).changed() is None
    module.by_loader = None
    assert AttributeCheck(module, step.attributes).changed() == "by_loader"


def looks_at_length(module: Keeps) -> float:
    return float(len(module.plain))


def looks_at_items(module: Keeps) -> Tensor:
    return torch.stack(module.plain).sum()


def empties(module: Keeps) -> float:
    module.plain.clear()
    return 0.0


def changes_a_nested_dict(module: Keeps) -> float:
    module.nested[0]["b"] = 1
    return 0.0


def puts_elsewhere(module: Keeps) -> float:
    module.nested[0] = {}
    return 0.0


@pytest.mark.parametrize("act", [looks_at_length, looks_at_items, empties, changes_a_nested_dict, puts_elsewhere])
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
