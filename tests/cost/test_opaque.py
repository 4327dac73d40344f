"""An autograd.Function of a user's costs what the kernels cost that it runs."""

from __future__ import annotations

import lightning
import pytest
import torch
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.flops import is_plain_view, is_view
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.ir.op import OpCall

H100 = ClusterSpec.load("dgx_h100").device


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Normalised(torch.autograd.Function):
    """Each element over its row's largest: one kernel when fused, four otherwise."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.abs() / x.abs().amax(-1, keepdim=True)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 2


class BackwardWantsData(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * (1 if gradient.isnan().any().item() else 2)


class Module(lightning.LightningModule):
    def __init__(self, function: type[torch.autograd.Function] | None) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.empty(4096, 4096)), function

    def training_step(self, x: Tensor) -> Tensor:
        y = Product.apply(x, self.weight) if self.function is Product else x @ self.weight
        return (y if self.function in (None, Product) else self.function.apply(y)).sum()


def seconds(
    function: type[torch.autograd.Function] | None, compiled: bool = False
) -> dict[str, tuple[float, float]]:
    with torch.device("meta"):
        module, batch = Module(function).bfloat16(), torch.zeros(8192, 4096, dtype=torch.bfloat16)
    costs = RooflineCosts(H100, compiled=compiled)
    calls: list[OpCall] = [
        op.call for op in capture_step(module, batch, world_size=1, batch_scope="global").ops
    ]
    return {
        call.target_name.partition("_function.")[2] or call.target_name: costs.op_seconds(call)
        for call in calls
    }


def one(found: dict[str, tuple[float, float]], name: str) -> tuple[float, float]:
    return next(value for key, value in found.items() if key.startswith(name))


def test_a_product_of_the_users_is_a_product():
    """Forward and both gradients, though autograd needs only the weight's of the plain one here."""
    (forward, backward), plain = one(seconds(Product), "Product"), one(seconds(None), "aten.matmul")
    assert forward == pytest.approx(plain[0], rel=0.01)
    assert backward == pytest.approx(2 * plain[0], rel=0.05)


def test_kernels_fuse_where_steps_are_compiled():
    single, fused = (
        one(seconds(Normalised, compiled), "Normalised")[0] for compiled in (False, True)
    )
    num_bytes = 8192 * 4096 * 2
    assert fused == pytest.approx(3 * num_bytes / H100.memory_bandwidth, rel=0.2), (
        "read, read again, written"
    )
    assert single > 2 * fused


def test_what_cannot_run_without_data_is_priced_by_its_size():
    forward, backward = one(seconds(BackwardWantsData), "BackwardWantsData")
    num_bytes = 8192 * 4096 * 2
    assert forward == pytest.approx(2 * num_bytes / H100.memory_bandwidth, rel=0.2), (
        "read and written"
    )
    assert backward > 0


class view(Normalised):
    """A Function that has the name of an op of ATen's."""


def test_a_function_is_not_taken_for_the_op_whose_name_it_has():
    with torch.device("meta"):
        step = capture_step(Module(view), torch.zeros(8, 4096), world_size=1, batch_scope="global")
    (call,) = (op.call for op in step.ops if "_function." in op.call.target_name)
    assert not is_view(call)
    assert not is_plain_view(call)
