"""Which ops are matmuls of samples and a weight, whatever their form."""

from dataclasses import dataclass
from typing import Any

import torch

from alpa_strategy.capture.ops import segmented_linear
from alpa_strategy.ir.op import OpCall, Slot, bind

aten = torch.ops.aten

# Names of the arguments input [*rows, k], weight and bias; whether the weight is [k, n], else
# [*segments, n, k].
_PRODUCTS: dict[Any, tuple[str, str, str | None, bool]] = {
    aten.linear.default: ("input", "weight", "bias", False),
    segmented_linear: ("x", "weight", "bias", False),
    aten.mm.default: ("self", "mat2", None, True),
    aten.matmul.default: ("self", "other", None, True),
    aten.addmm.default: ("mat1", "mat2", "self", True),
}


@dataclass(frozen=True)
class Product:
    """A matmul of samples and a weight."""

    # rows, weight, bias: numbers of the op's operands
    rows: int
    weight: int
    bias: int | None

    # Whether the weight is [k, n], else [*segments, n, k].
    is_transposed: bool


def product_of(call: OpCall) -> Product | None:
    """Return the matmul that an op is. None if it is none, its input has one dim, its weight is no
    matrix or no tensor, its bias is no vector, or it scales by `alpha` or `beta`.
    """
    if call.target not in _PRODUCTS:
        return None
    rows, weight, bias, is_transposed = _PRODUCTS[call.target]
    arguments = bind(call)
    x = _operand_number(arguments[rows])
    w = _operand_number(arguments[weight])
    b = _operand_number(arguments.get(bias)) if bias else None
    if x is None or w is None:
        return None
    if any(arguments.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None

    num_segment_dims = 1 if call.target is segmented_linear else 0
    has_rows = len(call.operands[x].shape) >= 2
    is_matrix = len(call.operands[w].shape) == 2 + num_segment_dims
    is_vector = b is None or len(call.operands[b].shape) <= 1 + num_segment_dims
    if not (has_rows and is_matrix and is_vector):
        return None
    return Product(x, w, b, is_transposed)


def _operand_number(argument: Any) -> int | None:
    """Return the number of the operand that an argument is; None if it is no tensor."""
    return argument.index if isinstance(argument, Slot) else None
