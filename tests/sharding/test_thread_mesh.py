"""The thread mesh keeps the laws of the collectives: what process groups give, it gives."""

import pytest
import torch
from proofs.thread_mesh import run_on_threads

from alpa_strategy.ir.placement import chunk_range


def _chunk(tensor, dim, axis):
    start, stop = chunk_range(tensor.shape[dim], axis.size, axis.index)
    return tensor.narrow(dim, start, stop - start)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2), (2, 3)])
def test_collectives_on_every_axis(shape):
    whole = torch.arange(7.0 * 5).reshape(7, 5)

    def work(mesh):
        for axis in mesh.axes:
            mine = _chunk(whole, 0, axis)
            assert torch.equal(axis.all_gather(mine, 0, 7), whole)
            assert torch.equal(axis.all_to_all(mine, 0, 7, 1), _chunk(whole, 1, axis))
            assert torch.equal(axis.reduce_scatter(whole, 1), _chunk(whole * axis.size, 1, axis))
            assert axis.all_reduce(torch.tensor(float(axis.index)), "max") == axis.size - 1
        return sum(axis.all_reduce(torch.tensor(float(axis.index))) for axis in mesh.axes)

    expected = sum(n * (n - 1) // 2 for n in shape)
    assert run_on_threads(shape, work) == [expected] * torch.Size(shape).numel()


def test_first_cause_is_raised():
    def work(mesh):
        if mesh.axes[0].index == 1:
            raise KeyError("the cause")
        mesh.axes[0].all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="the cause"):
        run_on_threads((3,), work)
