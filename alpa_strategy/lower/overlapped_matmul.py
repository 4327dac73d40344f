"""Products beside collectives (`intra_op/overlap.py`): tensor parallelism's sums go on while the
device multiplies.

PyTorch makes both gradients of a product in one autograd node, after which nothing is left to hide
the sum; so products of one input, with its resharding, are one node here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.intra_op.overlap import Product


@dataclass(frozen=True)
class MatmulSpec:
    """A product of an input [*rows, k] with a weight."""

    product: Product
    # whether this device does, where there is one: of results that are summed, only the first
    adds_bias: bool
    summed: Reshard | None = (
        None  # sums the result, where that is done here: in `parts` chunks of `dim`
    )
    dim: int = 0
    parts: int = 1

    def result(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[*rows, n], or [*rows, segments, n]"""
        matrix, flat_bias = (
            self._matrix(weight),
            bias.flatten() if bias is not None and self.adds_bias else None,
        )
        if self.summed is None:
            result = F.linear(rows, matrix, flat_bias)
            return result.unflatten(-1, weight.shape[:2]) if weight.dim() > 2 else result
        pieces = (F.linear(piece, matrix, flat_bias) for piece in rows.chunk(self.parts, self.dim))
        coming = [self.summed.start(piece) for piece in pieces]
        return torch.cat([piece.wait() for piece in coming], self.dim)

    def gradient_of_product(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Of the result as it was before it was summed, [*rows, n]."""
        return (grad if self.summed is None else self.summed.gradients(grad)).flatten(
            rows.dim() - 1
        )

    def gradient_of_rows(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad: of the product."""
        return F.linear(grad, self._matrix(weight).mH)

    def gradient_of_weight(self, grad: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        """grad: of the product."""
        matrix = grad.flatten(0, -2).t() @ rows.flatten(0, -2).conj()  # [n, k]
        return matrix.t() if self.product.is_transposed else matrix.view(weight.shape)

    def gradient_of_bias(self, grad: Tensor, bias: Tensor) -> Tensor:
        """grad: of the product."""
        return (
            grad.flatten(0, -2).sum(0).view(bias.shape)
            if self.adds_bias
            else torch.zeros_like(bias)
        )

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.t() if self.product.is_transposed else weight.flatten(0, -2)  # [n, k]


class OverlappedMatmul(torch.autograd.Function):
    """An input, and the weight and the bias (None: there is none) of each of its products -> their
    results.

    `into` brings the input into the layout that the products take; None: it is there.
    """

    @staticmethod
    def forward(
        ctx: Any, into: Reshard | None, products: Sequence[MatmulSpec], rows: Tensor, *operands: Any
    ) -> tuple[Tensor, ...]:
        rows = rows if into is None else into.values(rows)
        ctx.into, ctx.products = into, products
        ctx.save_for_backward(rows, *operands)
        given = zip(products, operands[::2], operands[1::2], strict=True)
        return tuple(product.result(rows, weight, bias) for product, weight, bias in given)

    @staticmethod
    @once_differentiable  # programs that may be differentiated twice have none, see `lower`
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        products: Sequence[MatmulSpec] = ctx.products
        rows, *operands = ctx.saved_tensors
        _, _, wants_rows, *wants = ctx.needs_input_grad
        of_products = [
            each.gradient_of_product(grad, rows) for each, grad in zip(products, grads, strict=True)
        ]
        given = list(zip(products, of_products, operands[::2], operands[1::2], strict=True))
        of_rows = coming = None
        if wants_rows:
            parts = [product.gradient_of_rows(grad, weight) for product, grad, weight, _ in given]
            of_rows = sum(parts[1:], start=parts[0])
            coming = None if ctx.into is None else ctx.into.start_gradients(of_rows)
        made: list[Tensor | None] = []
        for (product, grad, weight, bias), needs, needs_bias in zip(
            given, wants[::2], wants[1::2], strict=True
        ):
            made.append(product.gradient_of_weight(grad, rows, weight) if needs else None)
            made.append(product.gradient_of_bias(grad, bias) if needs_bias else None)
        return None, None, of_rows if coming is None else coming.wait(), *made
