"""Matmuls that are overlapped with collectives (`intra_op/overlap.py`).

Sums over devices, as tensor parallelism has them, run while the device computes.

PyTorch computes both gradients of a matmul in one autograd node, after which nothing is left to
overlap the sum with. So matmuls of one input, with its resharding, are one node here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from alpa_strategy.capture.products import Product
from alpa_strategy.comm.reshard import Reshard


@dataclass(frozen=True)
class MatmulSpec:
    """A matmul of an input [*batch, k] with a weight."""

    product: Product
    # whether this device adds the bias, if there is one: of results that are summed, only the first
    # device does
    adds_bias: bool
    # sums the result over devices, in `num_chunks` chunks of `dim`; None: it is not summed here
    summed: Reshard | None = None
    dim: int = 0
    num_chunks: int = 1

    def result(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result, [*batch, n] or [*batch, segments, n]; summed over devices, in chunks,
        if `summed` is set.

        Args:
            rows: the input, [*batch, k].
            weight: [n, k] or [segments, n, k].
            bias: [n] or [segments, n]; ignored unless `adds_bias` is set.
        """
        matrix = self._matrix(weight)
        flat_bias = None
        if bias is not None and self.adds_bias:
            flat_bias = bias.flatten()
        if self.summed is None:
            result = F.linear(rows, matrix, flat_bias)
            is_in_segments = weight.dim() > 2
            return result.unflatten(-1, weight.shape[:2]) if is_in_segments else result
        # Each chunk is summed while the next one is computed.
        coming = []
        for chunk in rows.chunk(self.num_chunks, self.dim):
            coming.append(self.summed.start(F.linear(chunk, matrix, flat_bias)))
        return torch.cat([chunk.wait() for chunk in coming], self.dim)

    def gradient_of_product(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient of the result before it was summed, [*batch, n]."""
        local_grad = grad if self.summed is None else self.summed.gradients(grad)
        return local_grad.flatten(rows.dim() - 1)

    def gradient_of_rows(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input, from that of the matmul."""
        return F.linear(grad, self._matrix(weight).mH)

    def gradient_of_weight(self, grad: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weight, from that of the matmul."""
        # [n, k]
        matrix = grad.flatten(0, -2).t() @ rows.flatten(0, -2).conj()
        return matrix.t() if self.product.is_transposed else matrix.view(weight.shape)

    def gradient_of_bias(self, grad: Tensor, bias: Tensor) -> Tensor:
        """Return the gradient of the bias, from that of the matmul; zeros if another device adds
        the bias.
        """
        if not self.adds_bias:
            return torch.zeros_like(bias)
        return grad.flatten(0, -2).sum(0).view(bias.shape)

    def _matrix(self, weight: Tensor) -> Tensor:
        """The weight as [n, k]."""
        return weight.t() if self.product.is_transposed else weight.flatten(0, -2)


class OverlappedMatmul(torch.autograd.Function):
    """Matmuls of one input.

    Operands: the input, then the weight and the bias (None: there is none) of each matmul. Results:
    one of each matmul. `into` redistributes the input to the layout that the matmuls take; None: it
    has that already.
    """

    @staticmethod
    def forward(
        ctx: Any, into: Reshard | None, products: Sequence[MatmulSpec], rows: Tensor, *operands: Any
    ) -> tuple[Tensor, ...]:
        """Return one result of each matmul.

        Args:
            into: redistributes the input first; None: it has its layout.
            products: the matmuls.
            rows: the input, [*samples, k].
            operands: weight and bias (None: there is none) of each matmul in turn.
        """
        if into is not None:
            rows = into.values(rows)
        ctx.into = into
        ctx.products = products
        ctx.save_for_backward(rows, *operands)
        weights = operands[::2]
        biases = operands[1::2]
        results = []
        for product, weight, bias in zip(products, weights, biases, strict=True):
            results.append(product.result(rows, weight, bias))
        return tuple(results)

    @staticmethod
    # Programs that may be differentiated twice have no such node, see `lower`.
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`.

        Args:
            grads: of each matmul's result.
        """
        specs: Sequence[MatmulSpec] = ctx.products
        rows, *operands = ctx.saved_tensors
        weights = operands[::2]
        biases = operands[1::2]
        _, _, rows_need_grad, *operands_need_grad = ctx.needs_input_grad

        product_grads = []
        for spec, grad in zip(specs, grads, strict=True):
            product_grads.append(spec.gradient_of_product(grad, rows))

        # The input's gradient comes first: it is summed while the others are computed.
        rows_grad = None
        coming = None
        if rows_need_grad:
            input_grads = []
            for spec, grad, weight in zip(specs, product_grads, weights, strict=True):
                input_grads.append(spec.gradient_of_rows(grad, weight))
            rows_grad = sum(input_grads[1:], start=input_grads[0])
            if ctx.into is not None:
                coming = ctx.into.start_gradients(rows_grad)

        operand_grads: list[Tensor | None] = []
        for index, (spec, grad) in enumerate(zip(specs, product_grads, strict=True)):
            weight_grad = None
            bias_grad = None
            if operands_need_grad[2 * index]:
                weight_grad = spec.gradient_of_weight(grad, rows, weights[index])
            if operands_need_grad[2 * index + 1]:
                bias_grad = spec.gradient_of_bias(grad, biases[index])
            operand_grads += [weight_grad, bias_grad]

        if coming is not None:
            rows_grad = coming.wait()
        return None, None, rows_grad, *operand_grads
