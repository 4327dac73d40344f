"""Parameters that the step itself changes are state, like buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.run_step import run_step


class Follows(LightningModule):
    def __init__(self, change: Callable[[nn.Parameter, Tensor], Any], trains: bool = False) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.requires_grad_(trains)
        self.change = change

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        with torch.no_grad():
            for teacher, student in pairs:
                self.change(teacher, student)
            target = self.teacher(batch)
        return (self.student(batch) - target).square().mean()


def in_place(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.mul_(0.9).add_(student, alpha=0.1)


def through_data(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.data.lerp_(student.data, 0.1)


def by_new_data(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.data = teacher.data * 0.9 + student.data * 0.1


def one_row(teacher: nn.Parameter, student: Tensor) -> None:
    teacher[0] = student[0]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("change", [in_place, through_data, by_new_data, one_row])
def test_a_teacher_follows(change, trains) -> None:
    torch.manual_seed(0)
    module = Follows(change, trains)
    batch = torch.randn(3, 4)
    step = capture_step(module, batch)
    state = [buffer for buffer in step.buffers if buffer.is_parameter]
    assert [buffer.name for buffer in state] == ["teacher.weight", "teacher.bias"]
    assert [parameter.name for parameter in step.parameters] == ["student.weight", "student.bias"]

    tensors = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    values = run_step(step, tensors, tensors, [batch])
    torch.testing.assert_close(values[step.loss], module.training_step(batch, 0).detach())
    for buffer in state:
        after = module.get_parameter(buffer.name)
        assert buffer.update is not None
        torch.testing.assert_close(values[buffer.update], after.detach())


def shares_memory(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.data = student.data


def of_other_shape(teacher: nn.Parameter, student: Tensor) -> None:
    teacher.data = student.data[:2]


@pytest.mark.parametrize("change", [shares_memory, of_other_shape])
def test_other_data_is_refused(change) -> None:
    with pytest.raises(CaptureError, match="assigns the"):
        capture_step(Follows(change), torch.ones(3, 4))


def test_weights_that_train_are_not_changed_in_the_step() -> None:
    class Normalizes(Follows):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.student.weight.copy_(self.student.weight / self.student.weight.norm())
            return self.student(batch).square().mean()

    with pytest.raises(CaptureError, match=r"parameter student\.weight in place"):
        capture_step(Normalizes(in_place), torch.ones(3, 4))


def test_each_ranks_own_change_of_a_parameter_is_refused() -> None:
    class ByBatch(Follows):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.teacher.bias.add_(batch.mean(0))
            return self.student(batch).square().mean()

    with pytest.raises(CaptureError, match=r"parameter teacher\.bias by its own batch"):
        capture_step(ByBatch(in_place), torch.ones(3, 4), world_size=2)


def test_a_step_that_changes_other_parameters_than_the_first_one_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"parameter teacher\.weight in place"):
        capture_step(Follows(in_place), torch.ones(3, 4), state=frozenset())
