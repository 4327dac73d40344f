"""Elimination orders: sizes as announced, and small on what the paper's models are made of. Counts,
never seconds.
"""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import MODELS
from recipe_models import MoE

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.inter_op.equal_layers import structure
from alpa_strategy.inter_op.subgraph import cluster_layers
from alpa_strategy.intra_op.build import build
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.intra_op.solver.elimination import (
    Factor,
    Network,
    elimination_order,
    network_of,
    plan_order,
)
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.stage_graph import stage_on
from alpa_strategy.options import PlanOptions


def test_order_and_sizes_of_a_known_graph():
    """A star of five leaves: leaves first, each with the centre; never the centre, which would join
    them all.
    """
    order = elimination_order([7, 2, 3, 4, 5, 6], [(0, leaf) for leaf in range(1, 6)])
    assert sorted(v for v, _ in order) == list(range(6))
    assert max(size for _, size in order) == 7 * 6
    assert 0 in [v for v, _ in order[-2:]]


def test_kept_variables_stay():
    order = elimination_order([3, 3, 3], [(0, 1), (1, 2)], outer=(0, 2))
    assert order == [(1, 27.0)]


@given(st.integers(0, 10**6))
def test_an_order_within_a_limit_is_found(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([2, 4, 30, 50]) for _ in range(9)]
    scopes = [draw.sample(range(9), 2) for _ in range(14)]
    largest = [
        max(s for _, s in elimination_order(sizes, scopes, (), rule)) for rule in (False, True)
    ]
    factors = []
    for scope in scopes:
        factors.append(Factor(tuple(scope), np.zeros([1, *(sizes[v] for v in scope)])))
    network = Network(tuple(sizes), tuple(factors), len(sizes))
    order = plan_order(network, min(largest), float("inf"))
    assert sorted(order.variables) == list(range(9))
    assert order.most_entries <= min(largest)
    assert plan_order(network, min(largest) - 1, float("inf")) is None
    around = {}
    for v in range(9):
        around[v] = {u for s in scopes if v in s for u in s} - {v}
    for v in order.variables:
        others = around.pop(v)
        assert math.prod((sizes[u] for u in others), start=sizes[v]) <= min(largest)
        for u in others:
            around[u] = (around[u] | others) - {u, v}


@pytest.fixture(scope="module")
def moe():
    with torch.device("meta"):
        model = MoE(4, 512, 8, 16, 1024, 512, group_size=512)
    batch = torch.zeros(64, 512, dtype=torch.int64)
    return capture_step(model, (batch, batch), world_size=1, batch_scope="global")


def test_tables_of_a_mixture_of_experts_stay_small(moe):
    """Its routing hangs many small ops on a few values; smallest table first made tables of 1e8
    entries of it.
    """
    cluster = ClusterSpec.load("p3_16xlarge_x8")
    cuts = cluster_layers(moe)
    tables = OptionTables(
        cluster.logical_mesh((2, 4), (1, 8)), RooflineCosts(cluster.device), OptimizerInfo()
    )
    for first, last in list(pairwise(cuts))[:2]:
        network = network_of(build(stage_on(moe, first, last, 8), tables).problem)
        order = elimination_order(network.sizes, (factor.scope for factor in network.factors))
        assert max(size for _, size in order) < 2e7


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_layers_to_price_do_not_grow_with_depth(name):
    """Equal layers are priced once: the distinct ones are the first, the last and what is
    between.
    """
    counts = []
    for depth in (4, 12):
        module = MODELS[name](num_layers=depth)
        batch = module.example_batch(8, torch.Generator().manual_seed(0))
        step = capture_step(module, batch, world_size=1, batch_scope="global")
        cuts = cluster_layers(step)
        assert len(cuts) - 1 == depth
        counts.append(
            len({structure(stage_on(step, a, b, 4), PlanOptions()) for a, b in pairwise(cuts)})
        )
    assert counts[1] == counts[0] <= 4


def test_large_tables_do_not_grow_with_depth():
    """Values with several users (rotary positions) have tables of megabytes: equal layers share
    them.
    """
    cluster = ClusterSpec.load("p3_16xlarge_x8")
    tables = OptionTables(
        cluster.logical_mesh((4, 2), (1, 8)), RooflineCosts(cluster.device), OptimizerInfo()
    )
    counts = []
    for depth in (2, 4):
        module = MODELS["llama"](num_layers=depth)
        step = capture_step(
            module, module.example_batch(16, torch.Generator().manual_seed(0)), batch_scope="global"
        )
        large = [
            f.table
            for f in network_of(build(step, tables).problem).factors
            if f.table.size > 50_000
        ]
        assert len(large) >= 3 * depth
        counts.append(len({id(table) for table in large}))
    assert counts[0] == counts[1]
