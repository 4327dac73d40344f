"""Programs call PyTorch's generated Python functions where these do exactly what the ops do."""

from __future__ import annotations

import pytest
import torch

from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.lower.bindings import python_function

aten = torch.ops.aten
X = TensorMeta((2, 8, 4), torch.float32)
SCALAR = TensorMeta((), torch.float32)
WEIGHT = TensorMeta((6, 4), torch.float32)
IDS = TensorMeta((2, 3), torch.int64)
A, B = Slot(0), Slot(1)


def call_of(target, args, operands, **kwargs) -> OpCall:
    return OpCall(target, args, tuple(sorted(kwargs.items())), tuple(operands), ())


WITH_FUNCTION = {
    "tensors": call_of(aten.add.Tensor, (A, B), (X, X)),
    "tensor without dims": call_of(aten.mul.Tensor, (A, B), (X, SCALAR)),
    "number": call_of(aten.mul.Tensor, (A, 0.5), (X,)),
    "scalar overload": call_of(aten.pow.Tensor_Scalar, (A, 2), (X,)),
    "keyword": call_of(aten.add.Tensor, (A, B), (X, X), alpha=2),
    "dtype": call_of(aten.to.dtype, (A, torch.bfloat16), (X,)),
    "list of sizes": call_of(aten.view.default, (A, (2, 8, 2, 2)), (X,)),
    "list of tensors": call_of(aten.cat.default, ((A, B), 1), (X, X)),
    "several results": call_of(aten.max.dim, (A, 1), (X,)),
    "neural network": call_of(aten.linear.default, (A, B), (X, WEIGHT)),
    "missing operand": call_of(aten.layer_norm.default, (A, (4,), None, None), (X,)),
    "another default": call_of(aten.mse_loss.default, (A, B), (X, X)),
    "lookup": call_of(aten.embedding.default, (A, B), (WEIGHT, IDS)),
    "attention": call_of(
        aten.scaled_dot_product_attention.default, (A, A, A, None, 0.0, True), (X,)
    ),
}


@pytest.mark.parametrize("name", WITH_FUNCTION)
def test_the_function_gives_the_same_bits(name):
    call = WITH_FUNCTION[name]
    function = python_function(call)
    assert not isinstance(function, torch._ops.OpOverload)
    torch.manual_seed(0)
    operands = []
    for meta in call.operands:
        is_index = meta.dtype == torch.int64
        operands.append(torch.randint(6, meta.shape) if is_index else torch.randn(meta.shape))
    expected = call.call(*operands)
    result = OpCall(function, call.args, call.kwargs, call.operands, ()).call(*operands)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


WITHOUT_FUNCTION = {
    # The function of this name takes other arguments, or does something else.
    "no function of the name": call_of(aten.upsample_nearest2d.vec, (A, None, (2.0, 2.0)), (X,)),
    # The function names a layout and a device as well.
    "factory": call_of(aten.arange.start, (0, 8), (), dtype=torch.int64),
    # Its results depend on values, which tensors without data do not have.
    "values": call_of(aten.nonzero.default, (A,), (X,)),
}


@pytest.mark.parametrize("name", WITHOUT_FUNCTION)
def test_other_calls_stay_ops(name):
    call = WITHOUT_FUNCTION[name]
    assert python_function(call) is call.target


def test_a_function_that_does_something_else_is_not_taken(monkeypatch):
    """`torch.mul` in the place of `torch.sub` takes the same arguments, and gives other values."""
    from alpa_strategy.lower import bindings

    class Wrong:
        sub = torch.mul

    monkeypatch.setattr(bindings, "_GENERATED", (Wrong,))
    monkeypatch.setattr(bindings, "_functions", {})
    call = call_of(aten.sub.Tensor, (A, B), (X, X))
    assert python_function(call) is aten.sub.Tensor


def test_a_function_that_drops_an_argument_is_not_taken(monkeypatch):
    from alpa_strategy.lower import bindings

    class Wrong:
        @staticmethod
        def add(x, y, alpha=1):
            return torch.add(x, y)

    monkeypatch.setattr(bindings, "_GENERATED", (Wrong,))
    monkeypatch.setattr(bindings, "_functions", {})
    call = call_of(aten.add.Tensor, (A, B), (X, X), alpha=2)
    assert python_function(call) is aten.add.Tensor
