"""A backward in two halves gives the gradients of one, and does no work twice."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import linear

from alpa_strategy.pipeline.split_backward import SplitBackward


def chain(x, w):
    return [torch.tanh(linear(torch.tanh(linear(x, w[0])), w[1])).sum()]


def tied(x, w):
    h = torch.tanh(linear(x, w[0]))
    h = torch.tanh(linear(h, w[1]))
    return [torch.tanh(linear(h, w[0])), h.square()]


def residual(x, w):
    h = x + linear(torch.tanh(linear(x, w[0])), w[1])
    return [h + linear(torch.sin(h), w[2] * w[1]), x * 2]


def apart(x, w):
    """A result that does not depend on the input, a weight of a weight, an unused weight."""
    return [linear(x, w[0]), w[1].exp() * w[0].sum(), (w[1] * 2).relu()]


def views(x, w):
    a, b = linear(x, w[0]).chunk(2, 0)
    return [a.t(), torch.cat([b, a]).view(-1), linear(x.t().contiguous().t(), w[1])]


def weight_itself(x, w):
    return [w[0], x, x * w[1].sum()]


@pytest.mark.parametrize("function", [chain, tied, residual, apart, views, weight_itself])
@pytest.mark.parametrize("num_inputs", [1, 2])
def test_halves_make_the_whole(function, num_inputs):
    torch.manual_seed(0)
    xs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(num_inputs)]
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def run():
        return function(xs[0] if num_inputs == 1 else xs[0] * xs[1].sum(), weights)

    results = run()
    grads = [torch.randn_like(r) for r in results]
    expected = torch.autograd.grad(results, [*xs, *weights], grads, allow_unused=True)
    results = run()
    split = SplitBackward([get_gradient_edge(r) for r in results], grads, xs)
    found = split.run_inputs()
    assert all(w.grad is None for w in weights)
    split.run_weights()
    for tensor, other in zip([*found, *(w.grad for w in weights)], expected, strict=True):
        if other is None:
            assert tensor is None or not tensor.any()
        else:
            torch.testing.assert_close(tensor, other, rtol=1e-13, atol=1e-13)


def test_weights_take_no_input_gradient_twice():
    """The second half of a chain calls a matmul per weight: half of what the whole backward
    calls.
    """
    x = torch.randn(3, 3, requires_grad=True)
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(4)]
    h = x
    for w in weights:
        h = torch.tanh(h @ w)
    split = SplitBackward([get_gradient_edge(h)], [torch.ones_like(h)], [x])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as first:
        split.run_inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as second:
        split.run_weights()

    def count(profile):
        return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")

    assert (count(first), count(second)) == (4, 4)
