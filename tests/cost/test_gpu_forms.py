"""What costs know of GPUs: tiles and waves, attention's backward, compiled pointwise ops, hops,
hidden reductions.
"""

from __future__ import annotations

from dataclasses import replace

import lightning
import pytest
import torch
from cost_op_calls import call, tensor

from alpa_strategy.cluster.devices import Link
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.cost.roofline import FUSED, tile_share
from alpa_strategy.ir.op import OpCall
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.planner import make_plan

aten = torch.ops.aten
H100 = ClusterSpec.load("dgx_h100")


def half(*shape: int) -> torch.Tensor:
    with torch.device("meta"):
        return tensor(*shape, dtype=torch.bfloat16)


def attention(width: int, tokens: int = 4096) -> OpCall:
    q = half(1, 2048 // width, tokens, width)
    return call(aten.scaled_dot_product_attention.default, q, q, q, is_causal=True)


def test_tiles_are_whole_and_dealt_out_in_whole_waves():
    units = H100.device.compute_units
    assert tile_share(H100.device, 1, 256 * units, 128) == pytest.approx(1.0)
    assert tile_share(H100.device, 1, 256 * (units + 1), 128) < 0.95, "a second wave for few tiles"
    assert tile_share(H100.device, 1, 64, 64) < 0.01, "one tile leaves the other processors idle"
    assert tile_share(H100.device, units, 256, 128) == pytest.approx(1.0), "batches are tiles, too"


def test_narrow_heads_and_the_backward_of_attention_are_slower():
    costs = RooflineCosts(H100.device)
    (wide, wide_back), (narrow, _) = (
        costs.op_seconds(attention(128)),
        costs.op_seconds(attention(32)),
    )
    assert narrow > 1.2 * wide
    assert wide_back > 2.5 * wide, "2.5 times the products, at a lower rate"


def test_compiled_pointwise_ops_are_faster_and_products_are_not():
    eager, compiled = RooflineCosts(H100.device), RooflineCosts(H100.device, compiled=True)
    gelu, linear = (
        call(aten.gelu.default, half(4096, 4096)),
        call(aten.linear.default, half(4096, 512), half(512, 512)),
    )
    assert compiled.op_seconds(gelu)[0] == pytest.approx(FUSED * eager.op_seconds(gelu)[0])
    assert compiled.op_seconds(linear) == eager.op_seconds(linear)
    assert compiled.name != eager.name, "plans are stored under it"


def test_hops_count_a_rings_devices_and_a_trees_levels():
    inside, across = Link(0.0, 1e30, hop=1.0), Link(0.0, 1e30, hop=100.0)
    axis = (
        replace(H100, num_nodes=4, intra_node=inside, inter_node=across).logical_mesh((32,)).axes[0]
    )
    assert axis.seconds("all_gather", 1) == pytest.approx(28 * 1.0 + 3 * 100.0)
    assert axis.seconds("all_reduce", 1) == pytest.approx(2 * (3 * 1.0 + 2 * 100.0))
    assert axis.seconds("p2p", 1) == pytest.approx(0.0, abs=1e-9)


def test_new_fields_are_read_as_they_are_written():
    assert ClusterSpec.from_dict(H100.to_dict()) == H100
    assert H100.overlap > 0
    assert H100.inter_node.hop > 0


def test_a_reduction_hides_as_far_as_the_backward_lasts():
    class Tower(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def seconds(rows: int, overlap: float) -> tuple[float, float]:
        cluster = replace(H100, num_nodes=1, overlap=overlap)
        with torch.device("meta"):
            module, x = Tower(), torch.zeros(rows, 2048)
        options = PlanOptions(batch_scope="global", parallel="data", logical_mesh=(8,))
        plan = make_plan(module, x, cluster, options)
        reduced = sum(c.seconds for c in plan.collectives() if c.phase == "step")
        return plan.predicted.step_seconds, reduced

    for rows, share in ((2**17, 0.75), (64, 0.0)):
        (alone, reduced), (hidden, _) = seconds(rows, 0.0), seconds(rows, 0.75)
        assert alone - hidden <= 0.76 * reduced
        if share:
            assert alone - hidden == pytest.approx(share * reduced, rel=0.1)
        else:
            assert hidden > 0.5 * alone, "there is little compute to hide behind"
