"""An autograd.Function is cut where its ops prove that it works element by element, and registered
rules say more.
"""

import pytest
import torch
from sharding.calls import make_call

from alpa_strategy import register_sharding
from alpa_strategy.capture.ops import _FunctionCall, _Structure
from alpa_strategy.sharding.strategies import _advice, axis_strategies, is_random, rule_origin

CALLS = []


def function(forward, backward):
    """An autograd.Function of these two."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.save_for_backward(*(a for a in args if isinstance(a, torch.Tensor)))
            return forward(*args)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, *ctx.saved_tensors)

    return Made


def call_of(made, *args):
    """The call of an op as capture makes it of `made.apply(*args)`."""
    op = _FunctionCall(made, _Structure.of(args), None)
    CALLS.append(op)  # the op lives as long as what it calls
    return make_call(op.op, [a for a in args if isinstance(a, torch.Tensor)])


def ways(made, *args, n=2):
    return set(map(str, axis_strategies(call_of(made, *args), n)))


def rows(*shape):
    return torch.randn(shape).requires_grad_()


ELEMENTWISE = {
    "straight through": (lambda x: x.round(), lambda grad, x: grad),
    "gradient reversal": (lambda x: x.view_as(x), lambda grad, x: -0.5 * grad),
    "swish": (
        lambda x: x * x.sigmoid(),
        lambda grad, x: grad * x.sigmoid() * (1 + x * (1 - x.sigmoid())),
    ),
    "clipped gradient": (
        lambda x: x * 2,
        lambda grad, x: torch.where(x > 1, torch.zeros_like(grad), grad.clamp(-1, 1)),
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_by_element_is_cut_along_every_dim(name):
    made = function(*ELEMENTWISE[name])
    assert ways(made, rows(4, 6)) == {"R->R", "S0->S0", "S1->S1"}
    assert ways(made, rows(5, 2), n=3) == {"R->R", "S0->S0"}
    assert rule_origin(call_of(made, rows(4, 6))) == "pointwise"


def count(x, _calls=[0]):  # noqa: B006 - the state is the point
    _calls[0] += 1
    return x * _calls[0]


def change_a_corner(x):
    y = x.clone()
    y[0, 0] = 0.0
    return y


TABLE = torch.rand(4, 6)
WHOLE = {
    "any": (lambda x: x * (x == 1984).any(), lambda grad, x: grad),
    "any in the backward": (lambda x: x.clone(), lambda grad, x: grad * (1 + (grad == 1984).any())),
    "the sum": (lambda x: x / x.sum(), lambda grad, x: grad),
    "neighbours": (lambda x: x.roll(1, 0), lambda grad, x: grad.roll(-1, 0)),
    "transposed": (lambda x: x.reshape(6, 4), lambda grad, x: grad.reshape(4, 6)),
    "a table": (lambda x: x * TABLE, lambda grad, x: grad * TABLE),
    "a count of calls": (count, lambda grad, x: grad),
    "a value read": (lambda x: x * x.max().item(), lambda grad, x: grad),
    "written in place": (change_a_corner, lambda grad, x: grad),
    "a number made of the shape": (
        lambda x: x * torch.tensor(float(x.shape[0])),
        lambda grad, x: grad,
    ),
    "as many as there are": (lambda x: x * torch.ones(x.shape[0]).sum(), lambda grad, x: grad),
}


@pytest.mark.parametrize("name", WHOLE)
def test_anything_else_is_whole(name):
    made = function(*WHOLE[name])
    assert ways(made, rows(4, 6)) == {"R->R"}
    assert not is_random(call_of(function(*WHOLE["any"]), rows(4, 6)))


def test_a_dim_whose_length_is_read_stays_unsharded():
    mean_of_gradients = function(
        forward=lambda x: x.clone(),
        backward=lambda grad, x: grad / grad.shape[0],
    )
    by_the_size = function(
        forward=lambda x: x if x.shape[0] > 3 else -x,
        backward=lambda grad, x: grad,
    )
    assert (
        ways(mean_of_gradients, rows(4, 6)) == ways(by_the_size, rows(4, 6)) == {"R->R", "S1->S1"}
    )


def test_a_transposed_square_is_replicated():
    made = function(
        forward=lambda x: x.t() + 0,
        backward=lambda grad, x: grad.t(),
    )
    assert ways(made, rows(6, 6)) == {"R->R"}


def test_random_functions_are_replicated():
    made = function(
        forward=lambda x: x * torch.rand_like(x),
        backward=lambda grad, x: grad,
    )
    assert ways(made, rows(4, 6)) == {"R->R"}
    assert is_random(call_of(made, rows(4, 6)))


def test_two_operands_of_one_shape_and_a_number():
    made = function(
        forward=lambda x, y, s: x * y + s,
        backward=lambda grad, x, y, s: (grad * y, grad * x, None),
    )
    assert ways(made, rows(4, 6), rows(4, 6), torch.tensor(2.0)) == {
        "R,R,R->R",
        "S0,S0,R->S0",
        "S1,S1,R->S1",
    }
    shared = function(
        forward=lambda x, y: x * y,
        backward=lambda grad, x, y: (grad * y, (grad * x).sum(0)),
    )
    assert ways(shared, rows(4, 6), rows(6)) == {"R,R->R"}


def test_a_registered_rule_shards_it():
    made = function(
        forward=lambda x: x.softmax(-1),
        backward=lambda grad, x: grad,
    )
    call = call_of(made, rows(4, 6))
    assert "register_sharding(Made, ...)" in _advice(call.target)
    register_sharding(made, "[*b, k!] -> [*b, k!]")
    assert ways(made, rows(4, 6)) == {"R->R", "S0->S0"}
    assert rule_origin(call) == "registered"


def test_foreign_ops_without_a_rule_are_replicated():
    op = torch.library.custom_op(
        "alpa_test::whole", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    call = make_call(torch.ops.alpa_test.whole.default, torch.rand(4, 6))
    assert set(map(str, axis_strategies(call, 2))) == {"R->R"}
    assert is_random(call)
    register_sharding("alpa_test::whole", "[*b] -> [*b]")
    assert not is_random(call)
    assert op is not None
