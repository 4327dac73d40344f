"""What differs between gloo and NCCL jobs, as far as gloo can show it: hosts that agree by
themselves, messages of
tensors that are not in host memory."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist

from alpa_strategy.comm import collectives
from alpa_strategy.comm.messages import StagedThroughHost


def agree_beside_the_devices():
    """As if the job's group were NCCL's, which holds no tensor of the host."""
    rank = dist.get_rank()
    plain = collectives.host_group()
    with patch.object(dist, "get_backend", lambda group=None: "nccl"):
        group = collectives.host_group()
        found = collectives.all_reduce_max([rank, -rank]), collectives.any_rank([rank == 1, False])
        is_made_once = collectives.host_group() is group
    return plain is None, group is not dist.group.WORLD, is_made_once, found


def test_hosts_agree_in_a_group_of_their_own(pool):
    expected = (True, True, True, ([1, 0], [True, False]))
    assert pool.run(2, agree_beside_the_devices) == [expected] * 2


def pass_on():
    rank = dist.get_rank()
    send = StagedThroughHost(dist.P2POp(dist.isend, torch.full((5,), float(rank)), 1 - rank, tag=7))
    arrived = torch.zeros(5)
    StagedThroughHost(dist.P2POp(dist.irecv, arrived, 1 - rank, tag=7)).wait()
    send.wait()
    return arrived.tolist()


def test_messages_through_host_memory(pool):
    assert pool.run(2, pass_on) == [[1.0] * 5, [0.0] * 5]
