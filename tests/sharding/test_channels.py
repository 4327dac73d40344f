"""Which way values take between stages: from their maker, but to a mesh that has them already only
once.
"""

from __future__ import annotations

import pytest
import torch

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import Layout
from alpa_strategy.sharding.cross_mesh import StageSpec, plan_channels

ROWS, WHOLE = Layout.parse("S0"), Layout.parse("R")
METAS = [
    TensorMeta((), torch.int64),
    TensorMeta((8, 4), torch.float32, True),
    TensorMeta((8,), torch.int64),
]


def stage(ranks, received=(), sent=(), layout=ROWS):
    return StageSpec(
        ranks, (len(ranks),), dict.fromkeys(received, layout), dict.fromkeys(sent, layout)
    )


def between_ranks(channel):
    return sum(
        p.num_elements for plan in channel.forward for p in plan.pieces if p.source != p.target
    )


def test_a_value_crosses_to_a_mesh_once():
    """Stages 1 and 3 share a mesh: the later one gets it from the earlier, and hands its gradient
    back there.
    """
    stages = [
        stage((0, 1), sent=[1, 2]),
        stage((2, 3), [1, 2]),
        stage((0, 1), [1]),
        stage((2, 3), [1, 2]),
    ]
    channels = {(c.source, c.target): c for c in plan_channels(stages, METAS)}
    assert set(channels) == {(0, 1), (0, 2), (1, 3)}
    assert channels[1, 3].values == (1, 2)
    assert channels[1, 3].differentiable == (1,)
    assert [between_ranks(channels[key]) for key in sorted(channels)] == [40, 0, 0]


def test_another_layout_is_made_on_the_mesh():
    stages = [stage((0,), sent=[1]), stage((1, 2), [1]), stage((1, 2), [1], layout=WHOLE)]
    channels = {(c.source, c.target): c for c in plan_channels(stages, METAS)}
    assert set(channels) == {(0, 1), (1, 2)}
    assert between_ranks(channels[1, 2]) == 32  # each device gets the other's half


def test_a_value_that_nobody_makes():
    with pytest.raises(PlanError, match="value 1, which no earlier stage sends"):
        plan_channels([stage((0,)), stage((1,), [1])], METAS)
