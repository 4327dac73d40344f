"""Products beside collectives (`intra_op/overlap.py`): tensor parallelism's sums go on while the device multiplies.

PyTorch makes both gradients of a product in one autograd node, after which nothing is left to hide the sum; so products
of one input, with its resharding, are one node here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.intra_op.overlap import Product


class Multiplied:
    """A product of an input [*rows, k] with a weight.

    Args:
        adds_bias: whether this device does, where there is one: of results that are summed, only the first.
        summed: sums the result, where that is done here: in `parts` chunks of `dim`.
    """

    def __init__(
        self, product: Product, adds_bias: bool, summed: Reshard | None = None, dim: int = 0, parts: int = 1
    ) -> None:
        self.has_bias, self._adds_bias = product.bias is not None, adds_bias
        self._is_transposed, self._summed, self._dim, self._parts = product.is_transposed, summed, dim, parts

    def result(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[*rows, n], or [*rows, segments, n]"""
        matrix, flat_bias = self._matrix(weight), bias.flatten() if bias is not None and self._adds_bias else None
        if self._summed is None:
            result = F.linear(rows, matrix, flat_bias)
            return result.unflatten(-1, weight.shape[:2]) if weight.dim() > 2 else result
        pieces = (F.linear(piece, matrix, flat_bias) for piece in rows.chunk(self._parts, self._dim))
        coming = [self._summed.start(piece) for piece in pieces]
        return torch.cat([piece.wait() for piece in coming], self._dim)

    def gradient_of_product(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Of the result as it was before it was summed, [*rows, n]."""
        return (grad if self._summed is None else self._summed.gradients(grad)).flatten(rows.dim() - 1)

    def gradient_of_rows(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad: of the product."""
        return F.linear(grad, self._matrix(weight).t())

    def gradient_of_weight(self, grad: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        """grad: of the product."""
        matrix = grad.flatten(0, -2).t() @ rows.flatten(0, -2)  # [n, k]
        return matrix.t() if self._is_transposed else matrix.view(weight.shape)

    def gradient_of_bias(self, grad: Tensor, bias: Tensor) -> Tensor:
        """grad: of the product."""
        return grad.flatten(0, -2).sum(0).view(bias.shape) if self._adds_bias else torch.zeros_like(bias)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.t() if self._is_transposed else weight.flatten(0, -2)  # [n, k]


class Products:
    """Callable on an input and the weights and biases of its products, one after the other; returns their results.

    `into` brings the input into the layout that the products take; None: it is there.
    """

    def __init__(self, into: Reshard | None, products: Sequence[Multiplied]) -> None:
        self.into, self._products = into, tuple(products)

    def __call__(self, rows: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        return _Node.apply(self, rows, *operands)

    def with_operands(self, operands: Sequence[Any]) -> Iterator[tuple[Multiplied, Any, Any]]:
        """(product, its weight, its bias or None) of what is given one after the other."""
        left = iter(operands)
        for product in self._products:
            yield product, next(left), next(left) if product.has_bias else None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, rows: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        rows = rows if products.into is None else products.into.values(rows)
        ctx.products = products
        ctx.save_for_backward(rows, *operands)
        return tuple(product.result(rows, weight, bias) for product, weight, bias in products.with_operands(operands))

    @staticmethod
    @once_differentiable  # programs that may be differentiated twice have none, see `lower`
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        products: Products = ctx.products
        rows, *operands = ctx.saved_tensors
        given = list(products.with_operands(operands))
        grads = tuple(given[i][0].gradient_of_product(grad, rows) for i, grad in enumerate(grads))
        _, wants_rows, *wants = ctx.needs_input_grad
        of_rows = coming = None
        if wants_rows:
            parts = [p.gradient_of_rows(grad, weight) for grad, (p, weight, _) in zip(grads, given, strict=True)]
            of_rows = sum(parts[1:], start=parts[0])
            coming = None if products.into is None else products.into.start_gradients(of_rows)
        made: list[Tensor | None] = []
        for grad, (product, weight, bias), (_, needs, needs_bias) in zip(
            grads, given, products.with_operands(wants), strict=True
        ):
            made.append(product.gradient_of_weight(grad, rows, weight) if needs else None)
            if product.has_bias:
                made.append(product.gradient_of_bias(grad, bias) if needs_bias else None)
        return None, of_rows if coming is None else coming.wait(), *made
