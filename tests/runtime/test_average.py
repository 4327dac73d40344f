"""The mean of gradients over replicas has the same bits wherever a gradient is in a bucket."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alpa_strategy.comm.mesh import divide
from alpa_strategy.runtime.gradients import average

RANKS, SIZES = 4, (7, 1, 130, 0, 64)


def gradients(rank: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    results: list[Tensor | None] = [torch.randn(size, generator=generator) for size in SIZES]
    results[4] = None
    if rank == 1:
        results[2] = None
    return results


def averaged(order: list[int], bucket_bytes: int) -> list[Tensor | None]:
    replica = divide(RANKS)
    own, parameters = gradients(replica.index), [nn.Parameter(torch.zeros(SIZES[i])) for i in order]
    for i, parameter in zip(order, parameters, strict=True):
        parameter.grad = own[i]
    average(parameters, replica.across, torch.device("cpu"), bucket_bytes)
    return [parameters[order.index(i)].grad for i in range(len(SIZES))]


def both(bucket_bytes: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
    return averaged([0, 1, 2, 3, 4], 2**20), averaged([4, 3, 2, 1, 0], bucket_bytes)


def test_the_mean_is_that_of_the_replicas_in_their_order(pool):
    given = [gradients(rank) for rank in range(RANKS)]
    for found in (each for ranks in pool.run(RANKS, both, 100) for each in ranks):
        # no rank has one
        assert found[4] is None
        for i in range(3):
            parts = []
            for each in given:
                if each[i] is None:
                    parts.append(torch.zeros(SIZES[i]))
                else:
                    parts.append(each[i] / RANKS)
            assert torch.equal(found[i], ((parts[0] + parts[1]) + parts[2]) + parts[3])
