"""A copy that is gathered in half precision is counted once: the casts of its uses return it."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from alpa_strategy import ClusterSpec, PlanOptions, make_plan

DEVICES = 4
WIDTH = 512
NUM_LAYERS = 3
# Of a parameter: fp32 and bfloat16.
STORED, READ = 4, 2


class Tower(pl.LightningModule):
    """Weights that take far more memory than what few samples leave."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize(
    ("parallel", "bytes_of_an_element"),
    [
        # The shard and the gathered copy, which is in bfloat16.
        ("zero1", STORED / DEVICES + READ),
        # The full weight, and its cast.
        ("data", STORED + READ),
    ],
)
def test_weights_are_stored_and_in_the_dtype_of_their_use_once(parallel, bytes_of_an_element):
    cluster = ClusterSpec.load("dgx_h100", {"num_nodes": 1, "devices_per_node": DEVICES})
    options = PlanOptions(parallel=parallel, num_microbatches=2, batch_scope="global")
    with torch.device("meta"):
        module, batch = Tower(), torch.empty(2 * DEVICES, WIDTH)
    plan = make_plan(module, batch, cluster, options)

    (stage,) = plan.stages
    assert stage.execution.per_step_ops
    num_elements = NUM_LAYERS * WIDTH**2
    weights = stage.predicted.memory["weights"]
    assert weights == pytest.approx(num_elements * bytes_of_an_element, rel=0.02)
