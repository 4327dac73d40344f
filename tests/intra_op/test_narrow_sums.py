"""In a step of double precision, what is computed in a narrower type is not summed over devices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.roofline import RooflineCosts
from alpa_strategy.intra_op.build import OptionTables, build
from alpa_strategy.options import OptimizerInfo
from alpa_strategy.sharding.layout import BROADCAST, PARTIAL

CLUSTER = ClusterSpec.load("pcie_8gpu").with_devices(2)


class Router(LightningModule):
    """Probabilities in float32, as routers of experts compute them, summed over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        logits = self.gate(x)
        shares = logits.float().softmax(-1).sum(0)
        return F.cross_entropy(logits, logits.argmax(-1)) + (shares * shares).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_of_float32_are_split_in_a_float32_step_alone(dtype: torch.dtype) -> None:
    step = capture_step(Router().to(dtype), torch.randn(8, 8, dtype=dtype))
    tables = OptionTables(CLUSTER.logical_mesh((2,)), RooflineCosts(CLUSTER.device), OptimizerInfo())
    intra = build(step, tables)
    summed = [
        op.name
        for op, options in zip(step.ops, intra.ops, strict=True)
        for outputs in options.outputs
        for layout, meta in zip(outputs, op.call.results, strict=True)
        if meta.dtype == torch.float32 and {PARTIAL, BROADCAST} & set(layout)
    ]
    assert bool(summed) == (dtype == torch.float32)
    assert all(len(options.strategies) for options in intra.ops)
