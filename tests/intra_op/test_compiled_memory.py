"""What a compiled step keeps for its backward, against the minimum cut that PyTorch's partitioner
finds.
"""

from __future__ import annotations

import pytest
import torch
from functorch.compile import aot_module, make_boxed_func, min_cut_rematerialization_partition
from models import MODELS
from torch._inductor.decomposition import select_decomp_table

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.intra_op.build import build
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.ir.optimizer_info import OptimizerInfo

CLUSTER = ClusterSpec.load("dgx_h100", {"num_nodes": 1, "devices_per_node": 1})


def kept_by_plan(module, batch, compiled: bool) -> float:
    """Bytes that the problem of one device counts for the backward: values in their one layout, and
    ops' own.
    """
    step = capture_step(module, batch, world_size=1, batch_scope="global")
    mesh = CLUSTER.logical_mesh((1,), (1, 1))
    intra = build(
        step, OptionTables(mesh, RooflineCosts(CLUSTER.device, compiled=compiled), OptimizerInfo())
    )
    ops = intra.problem.choices[len(intra.parameters) :][: len(intra.ops)]
    return sum(float(c.memory.min()) for c in ops) + sum(
        float(t.memory.min()) for t in intra.problem.transfers
    )


class Step(torch.nn.Module):
    """The training step as a module's forward."""

    def __init__(self, module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch):
        found = self.module.training_step(batch, 0)
        return found["loss"] if isinstance(found, dict) else found


def kept_by_partitioner(module, batch) -> int:
    """Bytes of what the compiled forward hands to its backward, but for parameters and the batch,
    and views of them.
    """
    sizes: list[int] = []

    def is_given(node) -> bool:
        if node.op == "placeholder":
            return True
        is_view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
        return is_view and is_given(node.args[0])

    def forward(graph, inputs):
        output = next(node for node in graph.graph.nodes if node.op == "output")
        made = [
            node
            for node in output.args[0][1:]
            if isinstance(node, torch.fx.Node) and not is_given(node)
        ]
        values = []
        for node in made:
            if isinstance(value := node.meta["val"], torch.Tensor):
                values.append(value)
        sizes.extend(value.numel() * value.element_size() for value in values)
        return make_boxed_func(graph.forward)

    aot_module(
        Step(module),
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )(batch).backward()
    return sum(sizes)


@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [
        ("mlp", {"d_hidden": 64, "num_layers": 4}, 1.0),
        ("bert", {"num_layers": 3}, 1.0),
        pytest.param("llama", {"num_layers": 3}, 0.8, marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_keep_what_the_partitioner_keeps(name, sizes, most):
    module = MODELS[name](**sizes)
    batch = module.example_batch(8, torch.Generator().manual_seed(0))
    eager, compiled = (kept_by_plan(module, batch, compiled) for compiled in (False, True))
    assert compiled == pytest.approx(kept_by_partitioner(module, batch), rel=0.1)
    assert compiled <= most * eager
