"""Branches on tensors that only raise are captured: their conditions become values that are looked
at at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from capture.raising import (
    asserted,
    compound,
    decides,
    decides_first,
    decides_in_a_loop,
    decides_in_bool,
    last_of_and,
    nested,
    otherwise,
    raised,
)
from models import MLP
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.run_step import run_step


class Checked(MLP):
    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.__dict__["check"] = check

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        prediction = self.net(batch)
        self.__dict__["check"](prediction)
        return prediction.sum()


def passes(step: StepGraph, module: MLP, batch: Tensor) -> bool:
    values = run_step(step, dict(module.named_parameters()), {}, [batch])
    return all(bool(values[check.value.index]) == check.expected for check in step.checks)


@pytest.mark.parametrize("check", [asserted, raised, compound, last_of_and, nested, otherwise])
def test_a_check_passes_and_fails_as_the_users(check: Callable[[Tensor], None]) -> None:
    module = Checked(check)
    step = capture_step(module, torch.ones(4, 8))
    assert step.checks
    for batch in (torch.ones(4, 8), torch.full((4, 8), float("inf")), torch.full((4, 8), 1e6)):
        try:
            module.training_step(batch, 0)
        except (AssertionError, ValueError):
            assert not passes(step, module, batch)
        else:
            assert passes(step, module, batch)


@pytest.mark.parametrize("check", [decides, decides_first, decides_in_bool, decides_in_a_loop])
def test_what_decides_more_is_refused(check: Callable[[Tensor], None]) -> None:
    with pytest.raises(CaptureError, match="any"):
        capture_step(Checked(check), torch.ones(4, 8))


def test_checks_are_found_in_specialised_bytecode() -> None:
    for _ in range(
        20
    ):  # CPython runs other instructions in place of those that it has seen a few times
        assert len(capture_step(Checked(compound), torch.ones(4, 8)).checks) == 3


class Drops(MLP):
    """Drops its net at random, as Hugging Face's encoders do their layers."""

    def __init__(
        self, layerdrop: float, drawn: Callable[[], Tensor] = lambda: torch.rand([])
    ) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.__dict__["drawn"] = drawn

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.__dict__["drawn"]() < self.layerdrop:
            return sum(p.sum() for p in self.parameters())
        return self.net(batch).sum()


@pytest.mark.parametrize("layerdrop", [0.0, 1.0])
def test_what_random_numbers_cannot_decide_is_captured(layerdrop: float) -> None:
    module = Drops(layerdrop)
    step = capture_step(module, torch.ones(4, 8))
    values = run_step(step, dict(module.named_parameters()), {}, [torch.ones(4, 8)])
    torch.testing.assert_close(values[step.loss], module.training_step(torch.ones(4, 8), 0))


def test_what_random_numbers_decide_is_refused() -> None:
    def changed() -> Tensor:
        drawn = torch.rand([])
        drawn.view(1).sub_(1)
        return drawn

    for module in (Drops(0.5), Drops(0.0, changed)):
        with pytest.raises(CaptureError, match="layerdrop"):
            capture_step(module, torch.ones(4, 8))


class Variance(MLP):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        prediction = self.net(x)
        return F.gaussian_nll_loss(prediction, y, prediction.square())


def test_checks_inside_torch() -> None:
    module = Variance()
    step = capture_step(module, module.example_batch(4))
    assert [check.expected for check in step.checks] == [False]


def is_fake_tensor(tensor: object) -> bool:
    """Whether a tensor is fake, as transformers asks."""
    return isinstance(tensor, getattr(torch, "_subclasses").FakeTensor)  # noqa: B009


def test_libraries_see_fake_tensors_with_values() -> None:
    """transformers builds a mask for fake tensors where it would ask whether one is needed."""

    class Masks(MLP):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            positions = torch.arange(batch.shape[1], device=batch.device)
            is_packed = is_fake_tensor(positions) or bool((positions.diff() != 1).any())
            prediction = self.net(batch)
            return (
                prediction.sum()
                if is_packed or not is_fake_tensor(prediction)
                else prediction.square().sum()
            )

    module, x = Masks(), torch.randn(4, 8)
    step = capture_step(module, x)
    assert torch._subclasses.FakeTensor is FakeTensor
    values = run_step(step, dict(module.named_parameters()), {}, [x])
    torch.testing.assert_close(values[step.loss], module.net(x).square().sum())


def test_what_an_import_reads_is_not_read_by_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads_itself.py").write_text("scale = float(len(open(__file__).read()) > 0)\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Imports(MLP):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            from reads_itself import scale

            return self.net(batch).sum() * scale

    capture_step(Imports(), torch.randn(4, 8))
