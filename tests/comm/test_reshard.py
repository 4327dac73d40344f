"""Laws of resharding: the value stays the same value, and the gradient of the value is the gradient
of its parts.

Every pair of dual layouts is tried. A local tensor's meaning is decided here independently of the
code under test:
`parts` splits a full tensor for a layout, `combine` puts the devices' parts together again.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from proofs.prove import grad_layout
from proofs.thread_mesh import run_on_threads
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.ir.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    chunk_range,
    shard,
    value_layout,
)


def coordinates(mesh_shape):
    return list(itertools.product(*map(range, mesh_shape)))


def parts(whole, layout: Layout, mesh_shape, seed=0):
    """coordinate -> local tensor. Partial: random addends that sum to the whole."""
    found = {(): whole}
    generator = torch.Generator().manual_seed(seed)
    for placement, size in zip(layout, mesh_shape, strict=True):
        next_found = {}
        for coordinate, tensor in found.items():
            rest = tensor.clone()
            for i in range(size):
                if isinstance(placement, Shard):
                    start, stop = chunk_range(tensor.shape[placement.dim], size, i)
                    part = tensor.narrow(placement.dim, start, stop - start)
                elif isinstance(placement, Partial):
                    part = (
                        rest
                        if i == size - 1
                        else torch.randint(-4, 5, tensor.shape, generator=generator).to(tensor)
                    )
                    rest = rest - part
                else:
                    part = tensor
                next_found[(*coordinate, i)] = part.clone()
        found = next_found
    return found


def combine(locals_, layout: Layout, mesh_shape):
    """Inverse of `parts`; replicas must agree."""
    for placement in reversed(layout):
        grouped = {}
        for coordinate, tensor in locals_.items():
            grouped.setdefault(coordinate[:-1], []).append(tensor)
        locals_ = {}
        for coordinate, tensors in grouped.items():
            if isinstance(placement, Shard):
                locals_[coordinate] = torch.cat(tensors, placement.dim)
            elif isinstance(placement, Partial):
                locals_[coordinate] = torch.stack(tensors).sum(0)
            else:
                assert isinstance(placement, Replicate)
                assert all(torch.equal(t, tensors[0]) for t in tensors)
                locals_[coordinate] = tensors[0]
    return locals_[()]


def whole_tensors(shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return [torch.randint(-9, 10, shape, generator=generator).to(torch.float64) for _ in range(2)]


def all_layouts(num_dims, num_axes):
    duals = [INVARIANT, REPLICATE, PARTIAL, *map(shard, range(num_dims))]
    return list(itertools.product(duals, repeat=num_axes))


def reshard_one(mesh, src, dst, shape):
    """This device's (value under dst, gradient under src) for the full tensors of `shape`."""
    value, grad = whole_tensors(shape)
    mine = parts(value, value_layout(src), mesh.shape)[mesh.coordinate].requires_grad_()
    out = Reshard(src, dst, shape, mesh)(mine)
    out.backward(parts(grad, grad_layout(dst), mesh.shape, seed=1)[mesh.coordinate])
    return out.detach(), mine.grad


def check(results, mesh_shape, src, dst, shape):
    value, grad = whole_tensors(shape)
    by_coordinate = dict(zip(coordinates(mesh_shape), results, strict=True))
    values = combine({c: r[0] for c, r in by_coordinate.items()}, value_layout(dst), mesh_shape)
    grads = combine({c: r[1] for c, r in by_coordinate.items()}, grad_layout(src), mesh_shape)
    assert torch.equal(values, value), f"value of {src} -> {dst} {shape}"
    assert torch.equal(grads, grad), f"gradient of {src} -> {dst} {shape}"


def reshard_many(mesh_shape, cases):
    mesh = build_mesh(mesh_shape)
    return [reshard_one(mesh, src, dst, shape) for src, dst, shape in cases]


@pytest.mark.parametrize(
    ("mesh_shape", "shape"), [((2,), (4, 3)), ((3,), (5, 3)), ((4,), (2, 7, 4))], ids=str
)
def test_all_pairs_on_one_axis(mesh_shape, shape):
    layouts = all_layouts(len(shape), 1)
    for src, dst in itertools.product(layouts, layouts):
        check(
            run_on_threads(mesh_shape, lambda m, s=src, d=dst: reshard_one(m, s, d, shape)),
            mesh_shape,
            src,
            dst,
            shape,
        )


@pytest.mark.parametrize(("mesh_shape", "shape"), [((2, 2), (5, 7)), ((2, 3), (7, 4))], ids=str)
def test_all_pairs_on_two_axes(mesh_shape, shape):
    layouts = all_layouts(len(shape), 2)
    cases = list(itertools.product(layouts, layouts))

    def work(mesh):
        return [reshard_one(mesh, source, target, shape) for source, target in cases]

    per_rank = run_on_threads(mesh_shape, work)
    for (src, dst), results in zip(cases, zip(*per_rank, strict=True), strict=True):
        check(results, mesh_shape, src, dst, shape)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mesh_shape_and_tensor(data):
    mesh_shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    layouts = st.tuples(
        *[st.sampled_from([INVARIANT, REPLICATE, PARTIAL, *map(shard, range(len(shape)))])]
        * len(mesh_shape)
    )
    src, dst = data.draw(layouts), data.draw(layouts)
    check(
        run_on_threads(mesh_shape, lambda m: reshard_one(m, src, dst, shape)),
        mesh_shape,
        src,
        dst,
        shape,
    )


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_on_process_groups(pool, mesh_shape):
    shapes = [(4, 6), (5, 3)] if len(mesh_shape) == 1 else [(6, 5)]
    cases = [
        (s, d, shape)
        for shape in shapes
        for s, d in itertools.product(all_layouts(2, len(mesh_shape)), repeat=2)
    ]
    if len(mesh_shape) == 2:
        cases = cases[::4]  # all of them run on threads, above
    per_rank = pool.run(torch.tensor(mesh_shape).prod().item(), reshard_many, mesh_shape, cases)
    for (src, dst, shape), results in zip(cases, zip(*per_rank, strict=True), strict=True):
        check(results, mesh_shape, src, dst, shape)


def test_second_derivative_and_tensors_without_gradient():
    def work(mesh):
        gather = Reshard((shard(0),), (REPLICATE,), (4,), mesh)
        x = torch.full((4 // mesh.shape[0],), 2.0, requires_grad=True)
        y = (gather(x) ** 3).sum() / mesh.shape[0]
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        ints = gather(torch.arange(2) + 2 * mesh.coordinate[0])
        with torch.no_grad():
            assert not gather(x).requires_grad
        assert Reshard((shard(0),), (shard(0),), (4,), mesh)(x) is x
        return first.detach(), second, ints

    for first, second, ints in run_on_threads((2,), work):
        assert torch.equal(first, torch.full((2,), 12.0))
        assert torch.equal(second, torch.full((2,), 12.0))
        assert ints.tolist() == [0, 1, 2, 3]
