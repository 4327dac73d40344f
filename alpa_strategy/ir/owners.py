"""Owners: which device of a mesh steps which parameter, if the optimizer needs the full tensor.

Planning and runs call `assign_owners` with the same parameters, and get the same owners.
"""

import math
from collections.abc import Sequence

from alpa_strategy.ir.optimizer_info import Reads
from alpa_strategy.ir.parameter_plan import ParameterPlan


def needs_owner(plan: ParameterPlan, reads: Reads) -> bool:
    """Whether one device steps the full parameter: its devices have shards that the optimizer
    cannot step alone, or all of them would do the same work. Never for updates that are
    element-wise or read other parameters.

    Args:
        plan: how the parameter is stored.
        reads: what the optimizer's update of it looks at.
    """
    if reads.is_element_wise or not reads.is_parameter_wise:
        return False
    dims = {mode.dim for mode in plan.module_modes if mode.dim is not None}
    return not dims or not dims <= reads.free_dims


def matrix_work(shape: Sequence[int], num_batch_dims: int = 0) -> float:
    """Return the work of an optimizer that multiplies or factors a parameter's matrix.

    It is m * n * min(m, n) of the matrix [m, n] that optimizers make of a tensor: all dims after
    the first are flattened. Vectors count as [1, n].

    Args:
        shape: of the parameter.
        num_batch_dims: leading dims that count matrices.
    """
    num_matrices = math.prod(shape[:num_batch_dims])
    dims = tuple(shape[num_batch_dims:])
    rows = dims[0] if len(dims) > 1 else 1
    columns = math.prod(dims) // max(1, rows)
    return float(num_matrices * rows * columns * min(rows, columns))


def assign_owners(
    work: Sequence[float], num_elements: Sequence[int], num_devices: int
) -> list[int]:
    """Return the device of each parameter such that all have about the same work and state.

    The longest processing time first: each next largest parameter goes to the device that has the
    least so far. Work and state count alike, as fractions of their sums.

    Args:
        work: of a step, by parameter, in any unit.
        num_elements: by parameter: its state is proportional to them.
        num_devices: of the mesh.
    """
    total_work = sum(work) or 1.0
    total_elements = sum(num_elements) or 1
    loads = []
    for one_work, elements in zip(work, num_elements, strict=True):
        loads.append(one_work / total_work + elements / total_elements)

    owners = [0] * len(loads)
    load_of_device = [0.0] * num_devices
    # Sorting is stable: equal parameters stay in order, on every rank.
    for index in sorted(range(len(loads)), key=lambda i: -loads[i]):
        device = load_of_device.index(min(load_of_device))
        owners[index] = device
        load_of_device[device] += loads[index]
    return owners
