"""The options of each parameter and op on one logical mesh, with their costs in seconds and bytes.

Everything here depends only on an op's `OpCall` or a parameter's metadata, so identical layers
share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from alpa_strategy.cluster.logical_mesh import LogicalMesh, MeshAxis
from alpa_strategy.cost.flops import is_plain_view, is_view
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.cost.saved_tensors import Saved
from alpa_strategy.intra_op.owner_costs import full_update_cost
from alpa_strategy.ir.gathers import is_sharded, local_bytes
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.op import AxisStrategy, OpCall, TensorMeta
from alpa_strategy.ir.optimizer_info import FullUpdate, OptimizerInfo
from alpa_strategy.ir.placement import DualLayout
from alpa_strategy.ir.plan import ParameterMode, ParameterPlan, Storage
from alpa_strategy.options import BUCKET_BYTES
from alpa_strategy.sharding.strategies import RING, localize, op_strategies, priced_call, ring_bytes

# Collectives of gradients.
REDUCTIONS = ("all_reduce", "reduce_scatter")

# Price of a message that overlaps with the backward, as a share of its own. How much of it is
# hidden is not known, so this only decides ties.
BESIDE_BACKWARD = 0.99


@dataclass(frozen=True)
class ParameterOptions:
    """The ways to store one parameter; all arrays and tuples are indexed by option."""

    # One storage mode per mesh axis.
    plans: tuple[ParameterPlan, ...]

    # The dual layout that the parameter's uses start from.
    sources: tuple[DualLayout, ...]

    # Seconds of the once-per-step collectives and the optimizer. In a problem with
    # `with_offload`, also those of the transfers below.
    seconds: np.ndarray

    # Bytes of parameter, gradient, optimizer state and gathered copies.
    num_bytes: np.ndarray

    # The stored gradient's share of `num_bytes`.
    gradient_bytes: np.ndarray

    # The shares of the parameter with its gathered copy, and of the optimizer's state. The rest
    # are gradients.
    weight_bytes: np.ndarray
    state_bytes: np.ndarray

    # The gathered copy's share of `weight_bytes`.
    copy_bytes: np.ndarray

    # Seconds per micro-batch to fetch the parameter from host memory for a use, and to return a
    # gradient there.
    fetch_seconds: np.ndarray
    return_seconds: np.ndarray

    # The backward's share of these two.
    backward_seconds: np.ndarray

    host_bytes: np.ndarray

    # The optimizer's share of `seconds`.
    update_seconds: np.ndarray


@dataclass(frozen=True)
class OpOptions:
    """The strategies of one op; all arrays and tuples but `saved` are indexed by option."""

    # One AxisStrategy per mesh axis.
    strategies: tuple[tuple[AxisStrategy, ...], ...]

    # Dual layouts of the operands and of the results.
    inputs: tuple[tuple[DualLayout, ...], ...]
    outputs: tuple[tuple[DualLayout, ...], ...]

    # Which of the op's operands and results autograd saves for the backward.
    saved: Saved

    # Seconds of computation, forward and backward.
    compute_seconds: np.ndarray

    # Seconds of the collectives inside implementations.
    comm_seconds: np.ndarray

    # Bytes that autograd saves in addition to operands: masks, statistics, saved results.
    num_bytes: np.ndarray

    # Temporary bytes of the forward: operands and results that are not saved.
    forward_bytes: np.ndarray

    # Temporary bytes of the backward: the gradients of both.
    backward_bytes: np.ndarray

    # The forward's share of computation and collectives, which recomputation repeats.
    forward_seconds: np.ndarray

    @property
    def temporary_bytes(self) -> np.ndarray:
        """The largest temporary memory of each option."""
        return np.maximum(self.forward_bytes, self.backward_bytes)


@lru_cache(maxsize=1 << 16)
def parameter_modes(meta: TensorMeta, axis_size: int, num_segments: int) -> list[ParameterMode]:
    """Return the storage modes of one parameter on one mesh axis.

    Dims shorter than the axis are not sharded, nor is the dim of the segments. `R*`, and `G` of one
    dim, are for trainable parameters alone.
    """
    first_dim = 1 if num_segments > 1 else 0
    dims = [dim for dim in range(first_dim, len(meta.shape)) if meta.shape[dim] >= axis_size]
    shards = [ParameterMode.parse(f"S{dim}") for dim in dims]
    invariant = ParameterMode.parse("R")
    if not meta.requires_grad:
        return [invariant, *shards]

    # Gathering once per step costs the same for all dims that are split evenly, so the first such
    # dim stands for all.
    even_first = sorted(dims, key=lambda dim: (meta.shape[dim] % axis_size != 0, dim))
    gathered = [ParameterMode.parse(f"G{dim}") for dim in even_first[:1]]
    return [ParameterMode.parse("R*"), invariant, *shards, *gathered]


def step_collectives_of(
    plan: ParameterPlan, meta: TensorMeta, read: torch.dtype, mesh_shape: tuple[int, ...]
) -> list[tuple[str, int, int]]:
    """Return (kind, mesh axis, bytes of the full tensor on the axis) of a parameter's once-per-step
    collectives.

    Args:
        read: dtype in which the step uses the parameter. A copy in bfloat16 is gathered in that
            dtype, and its gradients are summed in it.
    """
    num_bytes = local_bytes(meta, plan.step_layout(meta.requires_grad), mesh_shape)
    in_half = num_bytes * read.itemsize // meta.dtype.itemsize
    is_summed_in_half = plan.is_gathered_once and read == torch.bfloat16 and not plan.sums_in_fp32
    gathered = in_half
    reduced = in_half if is_summed_in_half else num_bytes

    collectives: list[tuple[str, int, int]] = []
    # Gradients are scattered first: that leaves fewer bytes for the other axes.
    for axis, mode in enumerate(plan.modes):
        if mode.is_gathered_once:
            collectives.append(("all_gather", axis, gathered))
            collectives.append(("reduce_scatter", axis, reduced))
            gathered = -(-gathered // mesh_shape[axis])
            reduced = -(-reduced // mesh_shape[axis])
    for axis, mode in enumerate(plan.modes):
        if mode.storage is Storage.REPLICATE:
            collectives.append(("all_reduce", axis, reduced))
    return collectives


def bucketed_seconds(
    axis: MeshAxis, kind: str, num_bytes: int, bucket_bytes: int = BUCKET_BYTES
) -> float:
    """Return the seconds of a once-per-step collective of kind `kind` (as `all_reduce`) with
    `num_bytes`, in buckets of at most `bucket_bytes`.

    Many parameters share a bucket, so each pays for its share of one: of the bucket size at which
    the axis moves bytes fastest (caches favour small ones). It costs a little less than a message
    of its own, as it overlaps with the backward; a resharding in the backward makes all devices
    wait.
    """
    if not num_bytes:
        return 0.0
    sizes = {num_bytes}
    for shift in range(6):
        if bucket_bytes >> shift > num_bytes:
            sizes.add(bucket_bytes >> shift)
    return BESIDE_BACKWARD * min(axis.seconds(kind, size) * num_bytes / size for size in sizes)


def parameter_options(
    parameter: ParameterInput,
    read: torch.dtype,
    mesh: LogicalMesh,
    costs: OpCosts,
    optimizer: OptimizerInfo,
    num_steps: int,
    on_host: bool,
) -> ParameterOptions:
    """Return every combination of storage modes over the mesh axes, with seconds and bytes.

    Combinations under which a device would have no shard are left out.

    Args:
        read: dtype in which the step uses the parameter.
        num_steps: of gradient accumulation; work that is done once per optimizer step is shared by
            that many steps.
        on_host: whether the stored shards are in host memory.
    """
    meta = parameter.meta
    num_segments = parameter.num_segments
    modes_of_axes = [parameter_modes(meta, size, num_segments) for size in mesh.shape]
    full_update = optimizer.full_update(parameter.names)
    plans = []
    option_costs = []
    for modes in product(*modes_of_axes):
        plan = ParameterPlan(modes, num_segments, on_host, optimizer.gradient_itemsize == 4)
        if _gives_all_a_shard(plan, meta, mesh.shape):
            plans.append(plan)
            option_costs.append(
                _storage_cost(plan, meta, read, mesh, costs, optimizer, num_steps, full_update)
            )

    sources = tuple(plan.step_layout(meta.requires_grad) for plan in plans)
    # [field][option]
    columns = np.array(option_costs, dtype=float).reshape(-1, len(_StorageCost._fields)).T
    arrays: dict[str, Any] = dict(zip(_StorageCost._fields, columns, strict=True))
    return ParameterOptions(tuple(plans), sources, **arrays)


def _gives_all_a_shard(plan: ParameterPlan, meta: TensorMeta, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every device stores elements: nested shards of a short dim leave devices empty."""
    last = tuple(size - 1 for size in mesh_shape)
    try:
        shape = plan.layout.local_shape(meta.shape, mesh_shape, last)
    except IndexError:
        return False
    return not meta.num_elements or 0 not in shape


class _StorageCost(NamedTuple):
    """The costs of one option of a parameter, as in `ParameterOptions`."""

    seconds: float
    num_bytes: float
    gradient_bytes: float
    weight_bytes: float
    state_bytes: float
    copy_bytes: float
    fetch_seconds: float
    return_seconds: float
    backward_seconds: float
    host_bytes: float
    update_seconds: float


def _storage_cost(
    plan: ParameterPlan,
    meta: TensorMeta,
    read: torch.dtype,
    mesh: LogicalMesh,
    costs: OpCosts,
    optimizer: OptimizerInfo,
    num_steps: int,
    full_update: FullUpdate | None,
) -> _StorageCost:
    """Return the costs of storing a parameter, whose full tensor is `meta`, as in `plan`. Args: as
    of `parameter_options`, and of `_update_cost`.
    """
    origin = (0,) * len(mesh.shape)
    stored = meta.with_shape(plan.layout.local_shape(meta.shape, mesh.shape, origin))
    on_host = plan.on_host
    seconds = 0.0
    update = 0.0
    gradient_bytes = state_bytes = 0
    gathered_weight_bytes = gathered_gradient_bytes = 0
    if meta.requires_grad:
        scale = optimizer.gradient_scale(meta.dtype.itemsize)
        seconds += _step_collective_seconds(plan, meta, read, mesh, scale)
        update, num_stepped = _update_cost(plan, meta, stored, mesh, costs, optimizer, full_update)
        seconds += update
        gradient_bytes = int(scale * stored.num_bytes)
        state_bytes = int(num_stepped * optimizer.state_bytes)
        if plan.is_gathered_once or (on_host and not plan.is_fetched):
            # The gathered copy, and its gradient before it is scattered.
            full = local_bytes(meta, plan.step_layout(True), mesh.shape)
            gathered_weight_bytes = full * read.itemsize // meta.dtype.itemsize
            gathered_gradient_bytes = int(scale * full)

    stored_bytes = stored.num_bytes + gradient_bytes + state_bytes
    gathered_bytes = gathered_weight_bytes + gathered_gradient_bytes
    fetch = 0.0
    return_seconds = 0.0
    if on_host and mesh.host is not None:
        fetch = float(stored.num_bytes) / mesh.host.link_bandwidth
        return_seconds = float(gradient_bytes) / mesh.host.link_bandwidth
        if not plan.is_fetched:
            # Once per step.
            seconds += fetch + return_seconds
            fetch = 0.0
            return_seconds = 0.0

    return _StorageCost(
        seconds=seconds / num_steps,
        num_bytes=gathered_bytes if on_host else stored_bytes + gathered_bytes,
        gradient_bytes=0 if on_host else gradient_bytes,
        weight_bytes=gathered_weight_bytes + (0 if on_host else stored.num_bytes),
        state_bytes=0 if on_host else state_bytes,
        copy_bytes=gathered_weight_bytes,
        fetch_seconds=fetch,
        return_seconds=return_seconds,
        backward_seconds=0.0,
        host_bytes=stored_bytes if on_host else 0,
        update_seconds=update / num_steps,
    )


def _step_collective_seconds(
    plan: ParameterPlan, meta: TensorMeta, read: torch.dtype, mesh: LogicalMesh, scale: float
) -> float:
    """Return the seconds of a parameter's once-per-step collectives.

    Args:
        scale: bytes of a gradient per byte of the parameter.
    """
    seconds = 0.0
    for kind, axis, num_bytes in step_collectives_of(plan, meta, read, mesh.shape):
        moved = int(num_bytes * (scale if kind in REDUCTIONS else 1))
        seconds += bucketed_seconds(mesh.axes[axis], kind, moved)
    return seconds


def _update_cost(
    plan: ParameterPlan,
    meta: TensorMeta,
    stored: TensorMeta,
    mesh: LogicalMesh,
    costs: OpCosts,
    optimizer: OptimizerInfo,
    full_update: FullUpdate | None,
) -> tuple[float, float]:
    """Return the seconds of a device's part of an update, and the elements whose state it has.

    Args:
        stored: a device's shard of the parameter `meta`.
        full_update: of a parameter that the optimizer does not step element by element.
    """
    if full_update is not None:
        return full_update_cost(full_update, plan, meta, mesh, costs, optimizer)
    return _update_seconds(stored, mesh, costs, optimizer, plan.on_host), stored.num_elements


def _update_seconds(
    stored: TensorMeta, mesh: LogicalMesh, costs: OpCosts, optimizer: OptimizerInfo, on_host: bool
) -> float:
    """Return the seconds of the optimizer's update of a parameter's shard, in host memory if
    `on_host`.
    """
    if on_host and mesh.host is not None:
        # Bound by a device's share of the host's memory bandwidth.
        update_bytes = stored.num_elements * optimizer.update_bytes(stored.dtype.itemsize)
        return update_bytes / mesh.host.memory_bandwidth
    return costs.optimizer_seconds(stored.num_elements, stored.dtype.itemsize, optimizer)


def op_options(call: OpCall, mesh: LogicalMesh, costs: OpCosts) -> OpOptions:
    """Return every strategy of an op on the mesh, with its seconds and bytes on a device."""
    strategies = op_strategies(call, mesh.shape)
    saved = costs.saved(call)
    option_costs = [_strategy_cost(call, strategy, mesh, costs, saved) for strategy in strategies]

    inputs = []
    outputs = []
    for strategy in strategies:
        inputs.append(tuple(zip(*(axis.inputs for axis in strategy), strict=True)))
        outputs.append(tuple(zip(*(axis.outputs for axis in strategy), strict=True)))
    columns = np.array(option_costs, dtype=float).T.copy()
    arrays: dict[str, Any] = dict(zip(_StrategyCost._fields, columns, strict=True))
    return OpOptions(strategies, tuple(inputs), tuple(outputs), saved, **arrays)


class _StrategyCost(NamedTuple):
    """The costs of one strategy of an op, as in `OpOptions`."""

    compute_seconds: float
    comm_seconds: float
    num_bytes: float
    forward_bytes: float
    backward_bytes: float
    forward_seconds: float


def _strategy_cost(
    call: OpCall,
    strategy: tuple[AxisStrategy, ...],
    mesh: LogicalMesh,
    costs: OpCosts,
    saved: Saved,
) -> _StrategyCost:
    """Return the costs of one device's share of an op.

    Args:
        saved: of the op at full shapes.
    """
    origin = (0,) * len(mesh.shape)
    local = localize(call, strategy, mesh.shape, origin).call
    is_ring = any(axis.implementation == RING for axis in strategy)
    priced = priced_call(call, strategy, mesh.shape, origin) if is_ring else local
    seconds = costs.op_seconds(priced)

    comm_seconds = 0.0
    forward_comm = 0.0
    for axis, axis_strategy in enumerate(strategy):
        for collective in axis_strategy.collectives:
            took = mesh.axes[axis].seconds(collective.kind, collective.num_bytes)
            comm_seconds += took
            if collective.phase == "forward":
                forward_comm += took

    work_share = _work_share(call, local)
    result_bytes = 0
    # If a compiler recomputes the results, they are values like others (`build.kept_values`).
    if not saved.fuses:
        for meta, is_saved in zip(local.results, saved.results, strict=True):
            if is_saved:
                result_bytes += meta.num_bytes

    # Saved tensors are counted with what is stored for the backward.
    tensors = (*local.operands, *local.results)
    are_saved = (*saved.operands, *saved.results)
    operand_bytes = 0
    if not is_view(call):
        for meta, is_saved in zip(tensors, are_saved, strict=True):
            if not is_saved:
                operand_bytes += meta.num_bytes
    gradient_bytes = 0
    if not is_plain_view(call):
        gradient_bytes = sum(meta.num_bytes for meta in tensors if meta.requires_grad)

    ring = ring_bytes(call, strategy, local)
    forward_temporary, backward_temporary = saved.temporary_bytes
    backward_bytes = gradient_bytes + ring + backward_temporary * work_share
    return _StrategyCost(
        compute_seconds=sum(seconds),
        comm_seconds=comm_seconds,
        num_bytes=saved.extra_bytes * work_share + result_bytes,
        forward_bytes=operand_bytes + ring + forward_temporary * work_share,
        backward_bytes=max(0.0, backward_bytes),
        forward_seconds=seconds[0] + forward_comm,
    )


def _work_share(call: OpCall, local: OpCall) -> float:
    """Return the share of an op's saved temporaries that one device stores.

    It is the share of the op's largest operand, at most that of its first result.
    """
    result_share = 1.0
    if call.results:
        result_share = local.results[0].num_elements / max(1, call.results[0].num_elements)
    largest = max(call.operands, key=lambda meta: meta.num_elements, default=None)
    if largest is None or largest.num_elements == 0:
        return result_share
    position = call.operands.index(largest)
    return min(result_share, local.operands[position].num_elements / largest.num_elements)


Options = TypeVar("Options", OpOptions, ParameterOptions)


def picked(options: Options, which: Sequence[int] | np.ndarray) -> Options:
    """Return the options with the indices `which`."""
    chosen: dict[str, Any] = {}
    for name, column in _columns(options).items():
        if isinstance(column, tuple):
            chosen[name] = tuple(column[index] for index in which)
        else:
            chosen[name] = column[which]
    return replace(options, **chosen)


def joined(one: Options, other: Options) -> Options:
    """Return the options of both, those of `one` first."""
    others = _columns(other)
    both: dict[str, Any] = {}
    for name, column in _columns(one).items():
        if isinstance(column, tuple):
            both[name] = column + others[name]
        else:
            both[name] = np.concatenate([column, others[name]])
    return replace(one, **both)


def _columns(options: OpOptions | ParameterOptions) -> dict[str, Any]:
    """Return the fields that have an entry per option."""
    names = [field.name for field in fields(options) if field.name != "saved"]
    return {name: getattr(options, name) for name in names}


def without_parameters(
    options: OpOptions, metas: Sequence[TensorMeta | None], mesh: LogicalMesh
) -> OpOptions:
    """Return the options of an op some of whose operands are parameters: these are no temporary
    memory.

    A stored parameter counts where it is stored, a gathered one with the largest gathered copy.

    Args:
        metas: of each operand that is a parameter; None for the others.
    """
    resident = np.zeros(len(options.strategies))
    for position, (meta, is_saved) in enumerate(zip(metas, options.saved.operands, strict=True)):
        if meta is not None and not is_saved:
            for index, inputs in enumerate(options.inputs):
                resident[index] += local_bytes(meta, inputs[position], mesh.shape)
    if not resident.any():
        return options
    return replace(options, forward_bytes=options.forward_bytes - resident)


def gathers(sources: Sequence[DualLayout], targets: Sequence[DualLayout]) -> np.ndarray:
    """Return [source, target] whether some axis goes from a shard to the full value."""
    before = np.array([is_sharded(layout) for layout in sources])
    after = np.array([is_sharded(layout) for layout in targets])
    return (before[:, None] & ~after[None]).any(axis=2)
