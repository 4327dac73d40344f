"""Proof by experiment: an op on shards, recombined, must equal the unsharded op, forward and
backward.

The judge of rules: the tests prove every rule of the table with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from proofs.thread_mesh import ThreadMesh, run_on_threads
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from alpa_strategy.errors import ShardingError
from alpa_strategy.ir.op import AxisStrategy, LocalCall, OpCall, TensorMeta
from alpa_strategy.ir.placement import DualLayout, Layout, chunk_range, value_layout
from alpa_strategy.lower.local_ops import build_local_op
from alpa_strategy.sharding.strategies import localize

Coordinate = tuple[int, ...]
Tensors = tuple[Tensor | None, ...]


def grad_layout(layout: DualLayout) -> Layout:
    """The gradients' layout of a dual layout."""
    return Layout(dual.grad for dual in layout)


def prove(
    call: OpCall,
    strategies: Sequence[AxisStrategy],
    mesh_shape: int | Sequence[int],
    operands: Sequence[Tensor] | None = None,
    seed: int = 0,
    rtol: float = 1e-6,
) -> None:
    """Run `call` unsharded and sharded over a mesh by `strategies`, and compare.

    Args:
        call: the op at its global shapes.
        strategies: one per mesh axis.
        mesh_shape: axis sizes (an int for one axis).
        operands: data to use; `random_operands(call)` when None. Floating data is taken in float64.
        seed: of the data, of the cotangents, and of the random split of partial values.
        rtol: relative tolerance; outputs that the op itself gives in a narrower dtype are compared
            at that dtype's.

    Raises:
        ShardingError: results or gradients differ, or the op cannot run on its shards.
    """
    mesh = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    strategies = tuple(strategies)
    generator = torch.Generator().manual_seed(seed)
    data = tuple(operands) if operands is not None else random_operands(call, generator)
    data = tuple(_to_float64(d) for d in data)
    outputs, grads, cotangents = _run_whole(call, data, generator)

    operand_duals = list(zip(*(strategy.inputs for strategy in strategies), strict=True))
    output_duals = list(zip(*(strategy.outputs for strategy in strategies), strict=True))
    value_layouts = [list(value_layout(duals)) for duals in operand_duals]
    inputs_at = _spread(data, value_layouts, mesh, generator)
    output_grads = [list(grad_layout(duals)) for duals in output_duals]
    cotangents_at = _spread(cotangents, output_grads, mesh, generator)

    local_results = _run_on_mesh(call, strategies, mesh, inputs_at, cotangents_at)

    name = _describe(call, strategies, mesh)
    for i, expected in enumerate(outputs):
        pieces = {c: results[i] for c, (results, _) in local_results.items()}
        layout = list(value_layout(output_duals[i]))
        _compare(expected, pieces, layout, mesh, rtol, f"result {i} of {name}")
    for i, expected in enumerate(grads):
        if expected is None:
            continue
        pieces = {c: gradients[i] for c, (_, gradients) in local_results.items()}
        layout = list(grad_layout(operand_duals[i]))
        _compare(expected, pieces, layout, mesh, rtol, f"gradient of operand {i} of {name}")


def _run_on_mesh(
    call: OpCall,
    strategies: tuple[AxisStrategy, ...],
    mesh: tuple[int, ...],
    inputs_at: dict[Coordinate, Tensors],
    cotangents_at: dict[Coordinate, Tensors],
) -> dict[Coordinate, tuple[Tensors, Tensors]]:
    """Return (results, gradients of the operands) of every device of the mesh.

    Raises:
        ShardingError: the op cannot run on its shards.
    """

    def local(coordinate: Coordinate, mesh_comm: ThreadMesh | None) -> tuple[Tensors, Tensors]:
        local_call = localize(call, strategies, mesh, coordinate)
        _check_shapes(local_call, inputs_at[coordinate])
        function = _local_function(call, strategies, local_call, mesh_comm)
        return _run_local(
            call, function, local_call, inputs_at[coordinate], cotangents_at[coordinate]
        )

    coordinates = list(itertools.product(*map(range, mesh)))
    try:
        if any(s.implementation for s in strategies):
            # the implementations communicate: a thread per device
            per_device = run_on_threads(mesh, lambda m: local(m.coordinate, m))
            return dict(zip(coordinates, per_device, strict=True))
        return {c: local(c, None) for c in coordinates}
    except ShardingError:
        raise
    except Exception as error:
        raise ShardingError(
            f"{_describe(call, strategies, mesh)} cannot run on shards: {error}"
        ) from error


def random_operands(call: OpCall, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    """Data that nearly every op accepts: floats in (0, 1), indices that no floating operand's dim
    is too short for.
    """
    generator = generator or torch.Generator().manual_seed(0)
    dims = [size for o in call.operands if o.dtype.is_floating_point for size in o.shape]
    limit = min(dims, default=8)
    return tuple(_random(meta, limit, generator) for meta in call.operands)


def distribute(
    tensor: Tensor,
    layout: Sequence[Placement],
    mesh_shape: Sequence[int],
    generator: torch.Generator,
) -> dict[Coordinate, Tensor]:
    """Return the local tensor of each device; a partial value is split at random."""
    if not mesh_shape:
        return {(): tensor}
    num_chunks = mesh_shape[0]
    match layout[0]:
        case Shard(dim=dim):
            ranges = [chunk_range(tensor.shape[dim], num_chunks, i) for i in range(num_chunks)]
            parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        case Partial():
            parts = [
                _random(_meta(tensor), 8, generator).to(tensor.dtype) for _ in range(num_chunks - 1)
            ]
            parts.append(tensor - sum(parts))
        case _:
            parts = [tensor] * num_chunks
    return {
        (i, *rest): piece
        for i, part in enumerate(parts)
        for rest, piece in distribute(part, layout[1:], mesh_shape[1:], generator).items()
    }


def combine(
    pieces: Mapping[Coordinate, Tensor],
    layout: Sequence[Placement],
    mesh_shape: Sequence[int],
    rtol: float = 1e-6,
) -> Tensor:
    """Inverse of `distribute`: concatenate, sum, or check that replicas are equal (ValueError when
    they are not).
    """
    if not mesh_shape:
        return pieces[()]
    parts = [
        combine(
            {c[1:]: p for c, p in pieces.items() if c[0] == i}, layout[1:], mesh_shape[1:], rtol
        )
        for i in range(mesh_shape[0])
    ]
    match layout[0]:
        case Shard(dim=dim):
            return torch.cat(parts, dim)
        case Partial():
            return sum(parts[1:], parts[0])
    for part in parts[1:]:
        if part.shape != parts[0].shape or not _close(part, parts[0], rtol):
            raise ValueError("replicas differ")
    return parts[0]


def _describe(call: OpCall, strategies: Sequence[AxisStrategy], mesh: Sequence[int]) -> str:
    shapes = ", ".join(str(list(o.shape)) for o in call.operands)
    return (
        f"{call.target_name}({shapes}) as {' | '.join(map(str, strategies))} on mesh {tuple(mesh)}"
    )


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.dtype)


def _random(meta: TensorMeta, limit: int, generator: torch.Generator) -> Tensor:
    if meta.dtype.is_complex:
        return torch.complex(
            *(torch.rand(meta.shape, generator=generator, dtype=torch.float64) for _ in range(2))
        )
    if meta.dtype.is_floating_point:
        return torch.rand(meta.shape, generator=generator, dtype=torch.float64) * 0.9 + 0.05
    if meta.dtype == torch.bool:
        return torch.rand(meta.shape, generator=generator) < 0.7
    return torch.randint(0, max(limit, 1), meta.shape, generator=generator, dtype=meta.dtype)


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.dtype.is_floating_point else tensor.detach()


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _leaves(call: OpCall, data: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Fresh copies that require gradients where the call's operands do."""
    return tuple(
        d.clone().requires_grad_(m.requires_grad) for d, m in zip(data, call.operands, strict=True)
    )


def _gradients(
    call: OpCall, leaves: Sequence[Tensor], outputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> Tensors:
    pairs = [(o, g) for o, g in zip(outputs, cotangents, strict=True) if o.requires_grad]
    wanted = [i for i, m in enumerate(call.operands) if m.requires_grad]
    grads: list[Tensor | None] = [None] * len(leaves)
    if pairs and wanted:
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            [leaves[i] for i in wanted],
            [g for _, g in pairs],
            allow_unused=True,
        )
        for i, grad in zip(wanted, found, strict=True):
            grads[i] = torch.zeros_like(leaves[i]) if grad is None else grad
    return tuple(grads)


def _run_whole(
    call: OpCall, data: Sequence[Tensor], generator: torch.Generator
) -> tuple[tuple[Tensor, ...], Tensors, tuple[Tensor, ...]]:
    leaves = _leaves(call, data)
    outputs = _as_tuple(call.call(*leaves))
    cotangents = tuple(_random(_meta(o), 8, generator).to(o.dtype) for o in outputs)
    grads = _gradients(call, leaves, outputs, cotangents)
    return tuple(o.detach() for o in outputs), grads, cotangents


def _spread(
    tensors: Sequence[Tensor],
    layouts: Sequence[Sequence[Placement]],
    mesh: Sequence[int],
    generator: torch.Generator,
) -> dict[Coordinate, tuple[Tensor, ...]]:
    each = [
        distribute(t, layout, mesh, generator) for t, layout in zip(tensors, layouts, strict=True)
    ]
    pieces = {}
    for coordinate in itertools.product(*map(range, mesh)):
        pieces[coordinate] = tuple(shards[coordinate] for shards in each)
    return pieces


def _check_shapes(local: LocalCall, operands: Sequence[Tensor]) -> None:
    for meta, tensor in zip(local.call.operands, operands, strict=True):
        if meta.shape != tuple(tensor.shape):
            raise ShardingError(
                f"local operand of {local.call.target_name} should be {meta.shape}: {tensor.shape}"
            )


def _local_function(
    call: OpCall,
    strategies: tuple[AxisStrategy, ...],
    local: LocalCall,
    mesh_comm: ThreadMesh | None,
) -> Any:
    if local.implementation is None or mesh_comm is None:
        return local.call.call
    return build_local_op(call, strategies, local, mesh_comm)


def _run_local(
    call: OpCall,
    function: Any,
    local: LocalCall,
    data: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> tuple[Tensors, Tensors]:
    leaves = _leaves(call, data)
    outputs = _as_tuple(function(*leaves))
    for meta, output in zip(local.call.results, outputs, strict=True):
        if meta.shape != tuple(output.shape):
            raise ShardingError(
                f"local result of {local.call.target_name} should have shape {meta.shape}, has"
                f" {tuple(output.shape)}"
            )
    grads = _gradients(call, leaves, outputs, cotangents)
    return tuple(o.detach() for o in outputs), grads


def _close(left: Tensor, right: Tensor, rtol: float) -> bool:
    if left.dtype.is_floating_point and left.dtype.itemsize < 8:
        rtol = max(rtol, 20 * torch.finfo(left.dtype).eps)
    if left.dtype.is_floating_point or left.dtype.is_complex:
        scale = float(right.abs().nan_to_num(0.0, 0.0, 0.0).max()) if right.numel() else 0.0
        return torch.allclose(left, right, rtol=rtol, atol=rtol * max(scale, 1.0), equal_nan=True)
    return torch.equal(left, right)


def _compare(
    whole: Tensor,
    pieces: Mapping[Coordinate, Tensor | None],
    layout: Sequence[Placement],
    mesh: Sequence[int],
    rtol: float,
    what: str,
) -> None:
    if any(p is None for p in pieces.values()):
        raise ShardingError(f"{what}: a device has none")
    try:
        combined = combine(pieces, layout, mesh, rtol)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise ShardingError(f"{what}: {error}") from error
    if combined.shape != whole.shape or not _close(combined, whole, rtol):
        raise ShardingError(f"{what}: the recombined value differs from the whole op's")
