"""Plans that the host's time makes alike are not told apart."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from alpa_strategy.cluster.spec import NOMINAL
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.planner.planner import make_plan


class Wide(pl.LightningModule):
    """Large weights and few rows: dividing the weights halves what the devices do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 2048)
        self.second = nn.Linear(2048, 512)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(torch.relu(self.first(batch))).square().mean()


@pytest.mark.parametrize(
    ("measured", "host_seconds", "is_divided"),
    [(True, 0.0, True), (True, 1.0, False), (False, 1.0, True)],
    ids=["quick host", "slow host", "declared devices"],
)
def test_data_parallelism_stays_if_the_host_dominates(measured, host_seconds, is_divided):
    cluster = replace(NOMINAL, devices_per_node=2, measured=measured)
    optimizer = OptimizerInfo(step_seconds=host_seconds)

    plan = make_plan(Wide(), torch.zeros(4, 512), cluster, optimizer=optimizer)

    assert plan.stages[0].parameter_plans["first.weight"].is_unsharded is not is_divided
