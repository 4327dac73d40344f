"""Laws of resharding plans: valid for nested shards, no more bytes than the obvious way, costs that
add up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, REPLICATE, dual_layout, shard
from alpa_strategy.sharding.redistribute import reshard_steps, reshard_table

DUALS = [INVARIANT, REPLICATE, PARTIAL, shard(0), shard(1)]
VOLUME = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 0.5}


@dataclass(frozen=True)
class BytesAxis:
    """An axis whose collectives take as many seconds as they move bytes (roughly): costs are easy
    to say by hand.
    """

    size: int

    def seconds(self, kind: str, num_bytes: float) -> float:
        return VOLUME[kind] * num_bytes


def mesh(*shape: int) -> LogicalMesh:
    return LogicalMesh(shape, tuple(map(BytesAxis, shape)))


def steps(src: str, dst: str, mesh_shape=(2, 2)) -> list[str]:
    found = reshard_steps(dual_layout(src), dual_layout(dst), mesh_shape)
    return [f"axis {step.axis}: {step.src} -> {step.dst} of {step.share:g}" for step in found]


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("S0", "S0", []),
        ("S0", "R*", ["axis 0: S0 -> R* of 1"]),
        (
            "S0 S0",
            "R* R*",
            ["axis 1: S0 -> R* of 0.5", "axis 0: S0 -> R* of 1"],
        ),  # the later axis cut last
        (
            "R S0",
            "S0 S0",
            ["axis 1: S0 -> R of 1", "axis 0: R -> S0 of 1", "axis 1: R -> S0 of 0.5"],
        ),
        (
            "S0 P",
            "R* S1",
            ["axis 1: P -> S1 of 0.5", "axis 0: S0 -> R* of 0.5"],
        ),  # shrink first, gather last
        ("P P", "S0 S0", ["axis 0: P -> S0 of 1", "axis 1: P -> S0 of 0.5"]),
    ],
)
def test_steps_in_the_right_order(src, dst, expected):
    mesh_shape = (2,) * len(src.split())
    assert steps(src, dst, mesh_shape=mesh_shape) == expected


@pytest.mark.parametrize("num_axes", [1, 2])
def test_steps_connect_source_and_target(num_axes):
    for src, dst in itertools.product(itertools.product(DUALS, repeat=num_axes), repeat=2):
        layout = list(src)
        for step in reshard_steps(src, dst, (2, 3)[:num_axes]):
            assert layout[step.axis] == step.src
            touched = {step.src.shard_dim, step.dst.shard_dim} - {None}
            assert all(later.shard_dim not in touched for later in layout[step.axis + 1 :])
            layout[step.axis] = step.dst
        assert tuple(layout) == dst


def test_a_step_holds_the_share_of_the_axis():
    (step,) = reshard_steps(dual_layout("S0 S1"), dual_layout("S0 R*"), (2, 3))
    assert step.share == 0.5
    assert step.collectives(True) == (("all_gather", "forward"), ("reduce_scatter", "backward"))
    assert step.collectives(False) == (("all_gather", "forward"),)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_table_prices_the_steps(data):
    layouts = st.tuples(st.sampled_from(DUALS), st.sampled_from(DUALS))
    sources = tuple(data.draw(st.lists(layouts, min_size=1, max_size=4)))
    targets = tuple(data.draw(st.lists(layouts, min_size=1, max_size=4)))
    meta = TensorMeta((12, 12), torch.float32, data.draw(st.booleans()))
    forward, backward = reshard_table(
        sources, targets, meta.num_bytes, meta.requires_grad, mesh(2, 3)
    )
    for (p, src), (q, dst) in itertools.product(enumerate(sources), enumerate(targets)):
        expected = {"forward": 0.0, "backward": 0.0}
        for step in reshard_steps(src, dst, (2, 3)):
            for kind, phase in step.collectives(meta.requires_grad):
                expected[phase] += VOLUME[kind] * step.share * meta.num_bytes
        np.testing.assert_allclose(
            (forward[p, q], backward[p, q]), (expected["forward"], expected["backward"])
        )
