"""What it costs that one device steps a full parameter: seconds of work and exchange, and bytes of
state, as shares of the devices of a mesh.

Owners are balanced (`ir/owners.py`), so each device has 1 / n of the work and state of all
parameters.
"""

import math
from typing import NamedTuple

import torch

from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.ir.optimizer_info import FullUpdate, OptimizerInfo
from alpa_strategy.ir.owners import needs_owner
from alpa_strategy.ir.plan import ParameterPlan

# Sizes of the square product whose rate is that of an update's products.
_PRODUCT_SIZE = 1024

# Reads and writes each byte.
_COPY = OptimizerInfo(state_bytes=0.0, moved_bytes=2.0)


class FullUpdateCost(NamedTuple):
    """One device's share of the update of a parameter that an optimizer needs in full."""

    seconds: float

    # Of elements whose state the device has.
    num_state_elements: float


def full_update_cost(
    update: FullUpdate,
    plan: ParameterPlan,
    meta: TensorMeta,
    mesh: LogicalMesh,
    costs: OpCosts,
    optimizer: OptimizerInfo,
) -> FullUpdateCost:
    """Return (seconds, number of elements) of one device's share of an update.

    Args:
        update: of the parameter.
        plan: how the parameter is stored.
        meta: of the full parameter.
    """
    num_devices = math.prod(mesh.shape)
    if needs_owner(plan, update.reads):
        elements = meta.num_elements / num_devices
        exchange = _exchange_seconds(plan, meta, mesh) + _copy_seconds(plan, meta, mesh, costs)
        flops = update.flops / num_devices
    else:
        # A batch of matrices: each device steps its own.
        shape = plan.layout.local_shape(meta.shape, mesh.shape, (0,) * len(mesh.shape))
        elements = float(math.prod(shape))
        exchange = 0.0
        flops = update.flops * elements / max(1, meta.num_elements)
    memory = costs.optimizer_seconds(math.ceil(elements), meta.dtype.itemsize, optimizer)
    compute = flops * _seconds_per_flop(update.dtype, costs)
    return FullUpdateCost(memory + compute + exchange, elements)


def _exchange_seconds(plan: ParameterPlan, meta: TensorMeta, mesh: LogicalMesh) -> float:
    """Return the seconds of moving shards to owners, and new values back.

    On an axis without shards every device gets the owner's values; on one with shards value and
    gradient go to the owner, and the value comes back.
    """
    seconds = 0.0
    num_bytes = float(meta.num_bytes)
    for mode, axis in zip(plan.modes, mesh.axes, strict=True):
        if mode.dim is None:
            seconds += axis.seconds("all_gather", num_bytes)
        else:
            seconds += 3 * axis.seconds("all_to_all", num_bytes / axis.size)
    return seconds


def _copy_seconds(
    plan: ParameterPlan, meta: TensorMeta, mesh: LogicalMesh, costs: OpCosts
) -> float:
    """Return the seconds of a device's copies in an exchange: the owner's full value and gradient,
    what is packed for other devices, and what is unpacked from them.
    """
    num_bytes = 2 * meta.num_bytes / math.prod(mesh.shape)
    for mode, axis in zip(plan.modes, mesh.axes, strict=True):
        crossing = meta.num_bytes * (axis.size - 1) / axis.size
        # The new value; where it is sharded, a shard of value, gradient and new value.
        moved = crossing if mode.dim is None else 3 * crossing / axis.size
        num_bytes += 2 * moved
    return costs.optimizer_seconds(math.ceil(num_bytes), 1, _COPY)


def _seconds_per_flop(dtype: torch.dtype, costs: OpCosts) -> float:
    """Return the seconds of one FLOP in matrix products of `dtype`."""
    square = TensorMeta((_PRODUCT_SIZE, _PRODUCT_SIZE), dtype, False)
    call = OpCall(torch.ops.aten.mm.default, (Slot(0), Slot(1)), (), (square, square), (square,))
    forward, _ = costs.op_seconds(call)
    return forward / (2.0 * _PRODUCT_SIZE**3)
