"""`zero3` and `tensor` are what they say under every precision: their collectives, counted in
bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.plan import Plan
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.planner import make_plan

WIDTH, ROWS = 1024, 4096
WEIGHTS = 2 * 4 * WIDTH * WIDTH  # elements of the two matrices
HIDDEN = ROWS * WIDTH  # elements of what tensor parallelism passes on


class Mlp(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def planned(precision: str, parallel: str, count: int | None, **more: Any) -> Plan:
    with torch.device("meta"):
        module, x = Mlp(), torch.zeros(ROWS, WIDTH)
        if precision == "bf16-true":
            module, x = module.bfloat16(), x.bfloat16()
    if precision == "bf16-mixed":
        context = partial(torch.autocast, "cpu", torch.bfloat16)
    else:
        context = None
    options = PlanOptions(
        batch_scope="global",
        parallel=parallel,
        logical_mesh=(8,),
        num_microbatches=count,
        num_stages=count and 1,
        **more,
    )
    return make_plan(
        module, x, ClusterSpec.load("dgx_h100", {"num_nodes": 1}), options, context=context
    )


def moved(plan: Plan) -> dict[tuple[str, str], int]:
    """(kind, phase) -> bytes, the loss and its like left out."""
    return {(c.kind, c.phase): c.num_bytes for c in plan.collectives() if c.num_bytes > 1000}


PRECISIONS = {
    "32-true": 4,
    "bf16-true": 2,
    "bf16-mixed": 2,
}  # bytes of an element that is computed with


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize(("precision", "itemsize"), PRECISIONS.items())
def test_zero3_gathers_and_scatters_what_it_computes_with(
    precision: str, itemsize: int, count: int | None
):
    found = moved(planned(precision, "zero3", count))
    times = count or 1
    assert found["all_gather", "forward"] == times * WEIGHTS * itemsize
    assert found["reduce_scatter", "backward"] == times * WEIGHTS * itemsize
    assert not {key for key in found if key[0] == "all_reduce"}, (
        "no gradient is whole on every device"
    )


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize(("precision", "itemsize"), PRECISIONS.items())
def test_tensor_moves_activations_and_no_weights(precision: str, itemsize: int, count: int | None):
    found = moved(planned(precision, "tensor", count))
    assert found
    assert sum(found.values()) <= 4 * HIDDEN * itemsize, (
        "at most two all-reduces, or what they are made of"
    )
    assert all(phase != "step" for _, phase in found), "weights stay where they are"


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_sums_in_fp32_are_priced(precision: str, count: int | None):
    plans = [planned(precision, "zero3", count, fp32_reduction=wide) for wide in (False, True)]
    half, wide = map(moved, plans)
    assert wide == half | {("reduce_scatter", "backward"): 2 * half["reduce_scatter", "backward"]}
    assert plans[1].predicted.step_seconds > plans[0].predicted.step_seconds
    stored = plans[1].stages[0].parameter_plans
    assert stored
    assert all(each.sums_in_fp32 for each in stored.values())
    assert Plan.from_dict(plans[1].to_dict()).stages[0].parameter_plans == stored


def test_zero3_under_autocast_gathers_again_and_keeps_no_copy():
    """Casts of parameters are gathered as parameters are: once more for the backward, and not kept
    until then.
    """
    mixed, plain = planned("bf16-mixed", "zero3", None), planned("bf16-true", "zero3", None)
    assert moved(mixed)["all_gather", "backward"] == moved(plain)["all_gather", "backward"] > 0
