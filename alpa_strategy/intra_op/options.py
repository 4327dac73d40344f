"""What each parameter and op may choose on one logical mesh, with its cost in seconds and bytes.

Everything here depends only on an op's `OpCall` or a parameter's metadata, so identical layers
share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch

from alpa_strategy.cluster.logical_mesh import LogicalMesh, MeshAxis
from alpa_strategy.cost.flops import is_plain_view, is_view
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.cost.saved_tensors import Saved
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.op import AxisStrategy, OpCall, TensorMeta
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.placement import DualLayout, value_layout
from alpa_strategy.ir.plan import ParameterMode, ParameterPlan, Storage
from alpa_strategy.options import BUCKET_BYTES
from alpa_strategy.sharding.strategies import RING, localize, op_strategies, priced_call, ring_bytes

REDUCTIONS = ("all_reduce", "reduce_scatter")  # collectives of gradients
BESIDE_BACKWARD = (
    0.99  # of a message's own price: how much is hidden is not known, so this only decides ties
)


@dataclass(frozen=True)
class ParameterOptions:
    """The ways to store one parameter; all arrays and tuples are indexed by option."""

    plans: tuple[ParameterPlan, ...]  # modes per mesh axis
    sources: tuple[DualLayout, ...]  # the dual layout that its uses start from
    # once-per-step collectives and optimizer; of a problem with `with_offload`, all of the
    # following too
    seconds: np.ndarray
    num_bytes: np.ndarray  # parameter, gradient, optimizer state and gathered copies
    gradient_bytes: np.ndarray  # the stored gradient's part of it
    # fetch_seconds, return_seconds: from host memory for a use, and of a gradient back; each
    # micro-batch
    fetch_seconds: np.ndarray
    return_seconds: np.ndarray
    backward_seconds: np.ndarray  # of both, the backward's part
    host_bytes: np.ndarray
    update_seconds: np.ndarray  # the optimizer's part of `seconds`


@dataclass(frozen=True)
class OpOptions:
    """The strategies of one op."""

    strategies: tuple[tuple[AxisStrategy, ...], ...]  # one AxisStrategy per mesh axis, per option
    # inputs, outputs: dual layout per operand or result, per option
    inputs: tuple[tuple[DualLayout, ...], ...]
    outputs: tuple[tuple[DualLayout, ...], ...]
    saved: Saved
    # compute_seconds, comm_seconds: compute (forward and backward), and the collectives inside
    # implementations
    compute_seconds: np.ndarray
    comm_seconds: np.ndarray
    num_bytes: np.ndarray  # what autograd keeps besides operands: masks, statistics, saved results
    # temporary memory: of the forward, operands and results that are not kept; of the backward,
    # gradients of both
    forward_bytes: np.ndarray
    backward_bytes: np.ndarray
    forward_seconds: (
        np.ndarray
    )  # the forward's part of compute and collectives (what recomputation repeats)

    @property
    def temporary_bytes(self) -> np.ndarray:
        """The largest temporary memory of an option."""
        return np.maximum(self.forward_bytes, self.backward_bytes)


@lru_cache(maxsize=1 << 16)
def local_bytes(meta: TensorMeta, layout: DualLayout, mesh_shape: tuple[int, ...]) -> int:
    """Bytes of the largest local piece of a value in `layout` (device 0 holds the largest
    chunk).
    """
    origin = (0,) * len(mesh_shape)
    return meta.with_shape(
        value_layout(layout).local_shape(meta.shape, mesh_shape, origin)
    ).num_bytes


def parameter_modes(meta: TensorMeta, axis_size: int, num_segments: int) -> list[ParameterMode]:
    """Modes of one parameter on one mesh axis. Dims shorter than the axis are not sharded, nor is
    the segments' dim.
    """
    dims = [
        d
        for d, size in enumerate(meta.shape)
        if size >= axis_size and not (num_segments > 1 and d == 0)
    ]
    shards = [ParameterMode.parse(f"S{d}") for d in dims]
    invariant, replicate = map(ParameterMode.parse, ("R", "R*"))
    if not meta.requires_grad:
        return [invariant, *shards]
    # Gathering once per step costs the same whichever dim is cut evenly, so the first such stands
    # for all of them.
    even_first = sorted(dims, key=lambda d: (meta.shape[d] % axis_size != 0, d))
    return [replicate, invariant, *shards, *[ParameterMode.parse(f"G{d}") for d in even_first[:1]]]


def step_collectives_of(
    plan: ParameterPlan, meta: TensorMeta, read: torch.dtype, mesh_shape: tuple[int, ...]
) -> list[tuple[str, int, int]]:
    """(kind, mesh axis, bytes of the full tensor on the axis) of a parameter's once-per-step
    collectives.

    read: what the step takes it in. A copy of it in bfloat16 is gathered, and its gradients are
    summed, so.
    """
    found: list[tuple[str, int, int]] = []
    num_bytes = local_bytes(meta, plan.step_layout(meta.requires_grad), mesh_shape)
    in_half = num_bytes * read.itemsize // meta.dtype.itemsize
    is_summed_so = plan.is_gathered_once and read == torch.bfloat16 and not plan.sums_in_fp32
    gathered, reduced = in_half, in_half if is_summed_so else num_bytes
    for axis, mode in enumerate(plan.modes):  # scattering first leaves less for the later axes
        if mode.is_gathered_once:
            found += [("all_gather", axis, gathered), ("reduce_scatter", axis, reduced)]
            gathered, reduced = (-(-each // mesh_shape[axis]) for each in (gathered, reduced))
    found += [
        ("all_reduce", axis, reduced)
        for axis, mode in enumerate(plan.modes)
        if mode.storage is Storage.REPLICATE
    ]
    return found


def bucketed_seconds(
    axis: MeshAxis, kind: str, num_bytes: int, bucket_bytes: int = BUCKET_BYTES
) -> float:
    """Seconds of a once-per-step collective: many parameters share a bucket, so each pays for its
    share of one.

    Its share of the bucket at which the axis moves bytes fastest (caches favour small ones), and a
    little less than a
    message of its own would cost: it runs beside the backward, for which a resharding in the
    backward makes all wait.
    """
    sizes = {
        num_bytes,
        *(bucket_bytes >> shift for shift in range(6) if bucket_bytes >> shift > num_bytes),
    }
    return (
        BESIDE_BACKWARD * min(axis.seconds(kind, size) * num_bytes / size for size in sizes)
        if num_bytes
        else 0.0
    )


def parameter_options(
    given: ParameterInput,
    read: torch.dtype,
    mesh: LogicalMesh,
    costs: OpCosts,
    optimizer: OptimizerInfo,
    num_steps: int,
    on_host: bool,
) -> ParameterOptions:
    """Every combination of modes over the mesh axes, with once-per-step seconds and bytes.

    `read`: what the step takes it in, if not its own dtype. `on_host`: what is stored lies in host
    memory.
    `num_steps`: gradient accumulation; what happens once per optimizer step is shared by that many
    steps.
    """
    meta, num_segments = given.meta, given.num_segments
    plans = []
    sources = []
    rows = []
    for modes in product(*(parameter_modes(meta, size, num_segments) for size in mesh.shape)):
        plan = ParameterPlan(modes, num_segments, on_host, optimizer.gradient_itemsize == 4)
        try:
            stored = plan.layout.local_shape(
                meta.shape, mesh.shape, tuple(n - 1 for n in mesh.shape)
            )
        except IndexError:
            continue
        if (
            meta.num_elements and 0 in stored
        ):  # nested shards of a short dim would leave devices empty
            continue
        origin = (0,) * len(mesh.shape)
        stored_meta = meta.with_shape(plan.layout.local_shape(meta.shape, mesh.shape, origin))
        source = plan.step_layout(meta.requires_grad)
        whole = local_bytes(meta, source, mesh.shape)
        kept = stored_meta.num_bytes
        gathered = 0
        grad = 0
        cost = update = fetch = back = 0.0
        if meta.requires_grad:
            scale = optimizer.gradient_scale(meta.dtype.itemsize)
            cost += sum(
                bucketed_seconds(mesh.axes[a], kind, int(b * (scale if kind in REDUCTIONS else 1)))
                for kind, a, b in step_collectives_of(plan, meta, read, mesh.shape)
            )
            if on_host and mesh.host is not None:  # bound by a device's share of the host's memory
                update_bytes = stored_meta.num_elements * optimizer.update_bytes(
                    meta.dtype.itemsize
                )
                update = update_bytes / mesh.host.memory_bandwidth
            else:
                update = costs.optimizer_seconds(
                    stored_meta.num_elements, meta.dtype.itemsize, optimizer
                )
            cost += update
            grad = int(scale * kept)
            kept += int(stored_meta.num_elements * optimizer.state_bytes) + grad
            if plan.is_gathered_once or (on_host and not plan.is_fetched):
                # The gathered copy, and its gradient before the scatter.
                gathered = whole * read.itemsize // meta.dtype.itemsize + int(scale * whole)
        if on_host and mesh.host is not None:
            fetch, back = (
                float(size) / mesh.host.link_bandwidth for size in (stored_meta.num_bytes, grad)
            )
            if not plan.is_fetched:
                cost += fetch + back
                fetch = 0.0
                back = 0.0
        plans.append(plan)
        sources.append(source)
        on_device = gathered if on_host else kept + gathered
        cost /= num_steps
        update /= num_steps
        if on_host:
            grad = 0
        rows.append((cost, on_device, grad, fetch, back, 0.0, kept if on_host else 0, update))
    return ParameterOptions(
        tuple(plans), tuple(sources), *np.array(rows, dtype=float).reshape(-1, 8).T
    )


def op_options(call: OpCall, mesh: LogicalMesh, costs: OpCosts) -> OpOptions:
    """Every strategy of an op on the mesh with its compute seconds, inner collectives and saved
    bytes.
    """
    strategies = op_strategies(call, mesh.shape)
    origin = (0,) * len(mesh.shape)
    saved = costs.saved(call)
    rows = []
    for strategy in strategies:
        local = localize(call, strategy, mesh.shape, origin).call
        is_ring = any(s.implementation == RING for s in strategy)
        priced = priced_call(call, strategy, mesh.shape, origin) if is_ring else local
        seconds = costs.op_seconds(priced)
        inner = [
            (c.phase, mesh.axes[axis].seconds(c.kind, c.num_bytes))
            for axis, s in enumerate(strategy)
            for c in s.collectives
        ]
        forward = seconds[0] + sum(each for phase, each in inner if phase == "forward")
        share = (
            local.results[0].num_elements / max(1, call.results[0].num_elements)
            if call.results
            else 1.0
        )
        divided = _work_share(call, local, share)
        kept = saved.extra_bytes * divided
        if not saved.fuses:  # else they are values like others, see `build.kept_values`
            kept += sum(
                meta.num_bytes
                for meta, keep in zip(local.results, saved.results, strict=True)
                if keep
            )
        keeps = (*saved.operands, *saved.results)  # counted with what is kept for the backward
        tensors = (*local.operands, *local.results)
        around = (
            0
            if is_view(call)
            else sum(m.num_bytes for m, keep in zip(tensors, keeps, strict=True) if not keep)
        )
        grads = 0
        if not is_plain_view(call):
            grads = sum(meta.num_bytes for meta in tensors if meta.requires_grad)
        ring, (first, then) = ring_bytes(call, strategy, local), saved.temporary_bytes
        short = around + ring + first * divided, max(0.0, grads + ring + then * divided)
        rows.append((sum(seconds), sum(each for _, each in inner), kept, *short, forward))
    inputs = tuple(
        tuple(zip(*(s.inputs for s in strategy), strict=True)) for strategy in strategies
    )
    outputs = tuple(
        tuple(zip(*(s.outputs for s in strategy), strict=True)) for strategy in strategies
    )
    return OpOptions(strategies, inputs, outputs, saved, *np.array(rows, dtype=float).T.copy())


Options = TypeVar("Options", OpOptions, ParameterOptions)


def picked(options: Options, which: Sequence[int] | np.ndarray) -> Options:
    """Only these of the options."""
    every = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "saved"}
    own: dict[str, Any] = {
        n: tuple(x[k] for k in which) if isinstance(x, tuple) else x[which]
        for n, x in every.items()
    }
    return replace(options, **own)


def joined(one: Options, other: Options) -> Options:
    """The options of both, of `one` first."""
    pairs = {
        f.name: (getattr(one, f.name), getattr(other, f.name))
        for f in fields(one)
        if f.name != "saved"
    }
    both: dict[str, Any] = {
        n: sum(pair, ()) if isinstance(pair[0], tuple) else np.concatenate(pair)
        for n, pair in pairs.items()
    }
    return replace(one, **both)


def without_parameters(
    options: OpOptions, metas: Sequence[TensorMeta | None], mesh: LogicalMesh
) -> OpOptions:
    """The op where some operands are parameters (their `metas`, None elsewhere): these are no
    temporary memory.

    A stored parameter counts where it is stored, a gathered one with the largest gathered copy.
    """
    resident = np.zeros(len(options.strategies))
    for position, (meta, keep) in enumerate(zip(metas, options.saved.operands, strict=True)):
        if meta is not None and not keep:
            resident += [
                local_bytes(meta, inputs[position], mesh.shape) for inputs in options.inputs
            ]
    return (
        replace(options, forward_bytes=options.forward_bytes - resident)
        if resident.any()
        else options
    )


def _work_share(call: OpCall, local: OpCall, result_share: float) -> float:
    """Share of an op's saved temporaries that one device keeps: that of its largest tensor."""
    whole = max(call.operands, key=lambda m: m.num_elements, default=None)
    if whole is None or whole.num_elements == 0:
        return result_share
    position = call.operands.index(whole)
    return min(result_share, local.operands[position].num_elements / whole.num_elements)


def is_gather(source: DualLayout, target: DualLayout) -> bool:
    """True when some axis goes from a shard to the whole: the target is a copy that can be gathered
    again.
    """
    return any(
        s.shard_dim is not None and t.shard_dim is None for s, t in zip(source, target, strict=True)
    )


def gathers(sources: Sequence[DualLayout], targets: Sequence[DualLayout]) -> np.ndarray:
    """[source, target] `is_gather`."""
    cut, kept = (
        np.array([[p.shard_dim is not None for p in x] for x in layouts])
        for layouts in (sources, targets)
    )
    return (cut[:, None] & ~kept[None]).any(axis=2)
