"""Layer clustering equals the exhaustive search of its own definition, on any graph, and is fast on
large ones.
"""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cost.flops import op_flops
from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.subgraph import (
    best_cuts,
    boundary_bytes,
    cluster_layers,
    default_num_layers,
    span_name,
)
from alpa_strategy.ir.stage_graph import crossing_values


def layer_flops(step, cuts):
    """Return the forward FLOPs of every layer."""
    flops = []
    for first, last in pairwise(cuts):
        flops.append(sum(op_flops(op.call) for op in step.ops[first:last]))
    return flops


def step_of(name: str, **sizes):
    module = MODELS[name](**sizes)
    return capture_step(module, module.example_batch(4, torch.Generator().manual_seed(0)))


def key(cuts, bytes_at, flops):
    inner = [bytes_at[c] for c in cuts[1:-1]]
    work = [sum(flops[a:b]) for a, b in pairwise(cuts)]
    return max(inner, default=0), sum(inner), sum(w * w for w in work)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 5))
def test_the_best_of_all_ways_to_cut(data, num_ops, num_layers):
    num_layers = min(num_layers, num_ops)
    flops = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=num_ops, max_size=num_ops)), dtype=float
    )
    inner = data.draw(st.lists(st.integers(0, 5), min_size=num_ops - 1, max_size=num_ops - 1))
    bytes_at = np.array([0, *inner, 0], dtype=float)
    found = best_cuts(bytes_at, flops, num_layers)
    assert len(found) == num_layers + 1
    every = [(0, *cuts, num_ops) for cuts in combinations(range(1, num_ops), num_layers - 1)]
    largest = max(sum(flops[a:b]) for a, b in pairwise(found))
    limit = max(1.5 * flops.sum() / num_layers, largest) + 1e-9
    allowed = []
    for cuts in every:
        if all(sum(flops[a:b]) <= limit for a, b in pairwise(cuts)):
            allowed.append(cuts)
    assert key(found, bytes_at, flops) == min(key(cuts, bytes_at, flops) for cuts in allowed)


def test_every_block_of_a_gpt_becomes_a_layer_of_its_own():
    step = step_of("gpt", num_layers=6, d_model=32, vocab_size=16)
    cuts = cluster_layers(step)
    assert default_num_layers(step) == 6
    for index, (first, last) in enumerate(pairwise(cuts)):
        inside = {
            op.module.split(".")[1]
            for op in step.ops[first:last]
            if op.module.startswith("blocks.")
        }
        assert inside == {str(index)}
    names = [span_name(step, *ends) for ends in pairwise(cuts)]
    assert names[1:-1] == [f"blocks.{i}" for i in (1, 2, 3, 4)]
    assert span_name(step, cuts[1], cuts[4]) == "blocks.1-blocks.3"
    assert span_name(step, 0, cuts[2]) == "wte, wpe, blocks.0-blocks.1"
    work = layer_flops(step, cuts)
    assert max(work) <= 1.5 * sum(work) / len(work)


def test_bytes_at_a_cut_are_those_of_all_values_that_cross_it():
    step = step_of("llama", num_layers=2)
    at = boundary_bytes(step)
    for position in range(len(step.ops) + 1):
        assert at[position] == sum(
            step.values[v].num_bytes for v in crossing_values(step, position)
        )


def test_two_thousand_ops_in_a_second():
    rng = np.random.default_rng(0)
    bytes_at = rng.integers(1, 4, 2001).astype(float)
    flops = rng.random(2000)
    started = time.process_time()
    cuts = best_cuts(bytes_at, flops, 48)
    assert time.process_time() - started < 1.0
    assert len(cuts) == 49


def test_more_layers_than_ops_is_an_error():
    step = step_of("mlp")
    with pytest.raises(PlanError, match="cannot make 1000 layers"):
        cluster_layers(step, 1000)


def test_every_run_of_ops_has_a_short_name():
    for name in ("gpt", "llama", "mlp", "convnet"):
        step = step_of(name)
        for a, b in combinations(range(len(step.ops) + 1), 2):
            assert 0 < len(span_name(step, a, b)) < 60
