"""The work of an optimizer's update of full tensors: FLOPs of its matrix products (Newton-Schulz),
counted while a small copy of each parameter is stepped.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from alpa_strategy.ir.optimizer_info import FullUpdate, Reads
from alpa_strategy.ir.owners import matrix_work
from alpa_strategy.planner.optimizer_copies import rebuilt
from alpa_strategy.planner.optimizer_reads import shape_like

# Rows or columns of the matrices that are stepped, whichever are fewer. FLOPs of larger ones of the
# same proportions grow with the cube.
_SMALL_SIDE = 32


def full_updates_of(
    optimizer: Optimizer, reads: Mapping[nn.Parameter, Reads], names: Mapping[nn.Parameter, str]
) -> tuple[tuple[str, FullUpdate], ...]:
    """Return (name, update) of each parameter that the optimizer needs in full, but for some dims.

    Args:
        optimizer: of the parameters, with their full shapes.
        reads: what it looks at, by parameter.
        names: in the module. Parameters without one are left out.
    """
    known: dict[tuple[Any, ...], FullUpdate] = {}
    updates = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            of_parameter = reads[parameter]
            if of_parameter.is_element_wise or parameter not in names:
                continue
            key = index, parameter.shape, parameter.dtype, of_parameter
            if key not in known:
                known[key] = _measured(optimizer, parameter, of_parameter)
            updates.append((names[parameter], known[key]))
    return tuple(updates)


def _measured(optimizer: Optimizer, parameter: nn.Parameter, reads: Reads) -> FullUpdate:
    """Return the update of a parameter, measured on a small one of the same proportions."""
    num_batch_dims = int(0 in reads.free_dims)
    small = _small_shape(parameter.shape, num_batch_dims)
    try:
        flops, dtype = _products(optimizer, parameter, small)
    # It steps some shapes only. Any class of any package is tried here, so any error may come.
    except Exception:
        small = shape_like(parameter)
        flops, dtype = _products(optimizer, parameter, small)
    scale = matrix_work(parameter.shape, num_batch_dims) / matrix_work(small, num_batch_dims)
    return FullUpdate(reads, flops * scale, dtype)


def _products(
    optimizer: Optimizer, like: nn.Parameter, shape: tuple[int, ...]
) -> tuple[float, torch.dtype]:
    """Return FLOPs and dtype of the matrix products in a step of a parameter of `shape`: the last
    product's dtype, that of `like` if there is none. Raises whatever the optimizer does.
    """
    stepped = nn.Parameter(torch.ones(shape, dtype=like.dtype))
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    stepped.grad = grad.to(like.dtype)
    copied = rebuilt(optimizer, like, [stepped])
    # The first step makes the state.
    copied.step()
    counter = FlopCounterMode(display=False)
    dtypes = _ProductDtypes()
    with counter, dtypes:
        copied.step()
    return counter.get_total_flops(), dtypes.last or like.dtype


def _small_shape(shape: torch.Size, num_batch_dims: int) -> tuple[int, ...]:
    """Return a shape of about the same proportions: one matrix whose first two dims are smaller,
    with batch dims of 1. A vector is cut to `_SMALL_SIDE`.
    """
    matrix = shape[num_batch_dims:]
    if len(matrix) < 2:
        return (1,) * num_batch_dims + tuple(min(size, _SMALL_SIDE) for size in matrix)
    columns = math.prod(matrix[1:])
    factor = max(1.0, min(matrix[0], columns) / _SMALL_SIDE)
    first_two = [max(1, round(size / factor)) for size in matrix[:2]]
    return (*(1,) * num_batch_dims, *first_two, *matrix[2:])


class _ProductDtypes(TorchDispatchMode):
    """Records the dtype of the last matrix product."""

    last: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            self.last = result.dtype
        return result


_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
