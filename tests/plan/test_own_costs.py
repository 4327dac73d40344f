"""A cost model of one's own, from outside: through `make_plan`, the options and the strategy.
Public names only.
"""

from __future__ import annotations

import pytest
import torch
from models import ReluTower

from alpa_strategy import (
    AlpaError,
    AlpaStrategy,
    ClusterSpec,
    OpCall,
    Plan,
    PlanOptions,
    RooflineCosts,
    make_plan,
)

CLUSTER = ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": 1, "devices_per_node": 2})


class SlowLinears(RooflineCosts):
    """Linears take three times as long as the roofline says."""

    def op_seconds(self, call: OpCall) -> tuple[float, float]:
        forward, backward = super().op_seconds(call)
        return (3 * forward, 3 * backward) if "linear" in call.target_name else (forward, backward)


def plan(**options) -> Plan:
    return make_plan(
        ReluTower(512),
        torch.zeros(4096, 512),
        CLUSTER,
        PlanOptions.from_user(parallel="data", **options),
    )


def test_a_plan_is_priced_by_the_model_that_is_given():
    usual, slow = plan(), plan(costs=SlowLinears(CLUSTER.device))
    assert slow.predicted.compute_seconds > 2 * usual.predicted.compute_seconds
    assert slow.fingerprint.differences(usual.fingerprint) == ["options"]
    same = make_plan(
        ReluTower(512),
        torch.zeros(4096, 512),
        CLUSTER,
        PlanOptions(parallel="data"),
        costs=SlowLinears(CLUSTER.device),
    )
    assert (same.fingerprint, same.predicted) == (slow.fingerprint, slow.predicted)


def test_the_strategy_takes_a_model():
    costs = SlowLinears(CLUSTER.device)
    assert AlpaStrategy(cluster=CLUSTER, costs=costs).options.costs is costs


def test_what_is_no_model_says_what_it_lacks():
    with pytest.raises(AlpaError, match="lacks op_seconds, saved, optimizer_seconds, name"):
        AlpaStrategy(costs=object())
