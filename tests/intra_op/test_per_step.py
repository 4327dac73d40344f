"""What a stage can do once per step: found in captured steps."""

from __future__ import annotations

import pipeline_models_crossing  # noqa: F401  (more MODELS)
import pytest
import torch
from models import MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cost.flops import is_view, op_base_name
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.sharding.per_step import per_step


def graph_of(module, num_microbatches=2):
    step = capture_step(
        module, module.example_batch(4, torch.Generator().manual_seed(0)), world_size=1
    )
    return microbatch(step, num_microbatches, 1).graph


def names(graph, ops):
    return {op_base_name(graph.ops[op].call) for op in ops}


def test_weights_made_of_parameters():
    graph = graph_of(MODELS["derived"]())
    once = per_step(graph)
    assert {"_weight_norm", "softmax", "matmul", "exp", "square"} <= names(graph, once.ops)
    assert not {"linear", "tanh", "mse_loss"} & names(graph, once.ops)


@pytest.mark.parametrize("name", ["derived", "gpt", "llama", "convnet"])
def test_the_micro_batches_take_all_that_they_need_of_it(name):
    graph = graph_of(MODELS[name]())
    once = per_step(graph)
    left = [op for index, op in enumerate(graph.ops) if index not in once.ops]
    made = {value for op in left for value in op.results}
    inputs = {
        e.value
        for group in (graph.parameters, graph.buffers, graph.batch, graph.constants)
        for e in group
    }
    read = {value for op in left for value in op.operands} | set(graph.escaping)
    assert read <= made | inputs | set(graph.received) | once.values
    for derivation in once.derivations:
        part = graph.part([graph.ops[index] for index in derivation.ops])
        available = {
            e.value for group in (part.parameters, part.buffers, part.constants) for e in group
        }
        for op in part.ops:
            assert available.issuperset(op.operands)
            available.update(op.results)
        assert available.issuperset(derivation.values)
        assert not all(is_view(op.call) for op in part.ops)


class Changing(MODELS["mlp"]):
    """A weight masked at random, one scaled by a buffer that the step updates, and one used
    transposed.
    """

    def __init__(self):
        super().__init__(d_in=8, d_out=8)
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.register_buffer("count", torch.ones(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = (
            x @ torch.nn.functional.dropout(self.weight, 0.5)
            + x @ (self.weight * self.count)
            + x @ self.weight.t()
        )
        self.count += 1
        return torch.nn.functional.mse_loss(self.net(x), y)


def test_random_numbers_updated_buffers_and_mere_views_stay():
    assert not per_step(graph_of(Changing())).ops
