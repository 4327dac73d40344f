"""A rank's slice of a value with a leading dim of ranks costs nothing where the rank is alone."""

from __future__ import annotations

import pytest
import torch

from alpa_strategy.ir.per_rank import stacked_over_ranks


def double_batch_norm(images):
    return torch.nn.functional.batch_norm(images, None, None, training=True) * 2


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_rank_gets_its_own_slice(num_ranks):
    images = torch.randn(num_ranks, 4, 3, 5, 5, dtype=torch.float64)
    stacked = stacked_over_ranks(double_batch_norm, (images,), (True,), num_ranks)
    alone = torch.stack([double_batch_norm(images[rank]) for rank in range(num_ranks)])
    assert torch.equal(stacked, alone)


def test_the_gradient_of_a_single_rank_keeps_its_memory_format():
    # A copy into zeros in the usual format made the kernels of a compiled ResNet's backward up to
    # four times as slow.
    images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    operand = images.unsqueeze(0).requires_grad_()
    squares = stacked_over_ranks(torch.square, (operand,), (True,), 1)
    (gradient,) = torch.autograd.grad(squares, operand, torch.ones_like(squares))
    assert torch.equal(gradient, 2 * operand)
    assert gradient[0].is_contiguous(memory_format=torch.channels_last)
