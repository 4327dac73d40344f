"""A schedule of one's own, from outside: a function that writes the orders. Public names only."""

from __future__ import annotations

import pytest
import torch
from models import ReluTower

from alpa_strategy import (
    Action,
    AlpaError,
    ClusterSpec,
    Plan,
    PlanOptions,
    Schedule,
    make_plan,
    register_schedule,
)

WAVE = 2


def waves(num_stages: int, num_microbatches: int, num_meshes: int) -> list[list[Action]]:
    """GPipe in waves of two micro-batches: less memory, a bubble after every wave."""
    return [
        [
            Action(stage, kind, microbatch)
            for start in range(0, num_microbatches, WAVE)
            for kind in "FB"
            for microbatch in range(start, min(start + WAVE, num_microbatches))
        ]
        for stage in range(num_stages)
    ]


CLUSTER = {"num_nodes": 1, "devices_per_node": 2}


def plan(schedule) -> Plan:
    options = PlanOptions.from_user(
        batch_scope="global", schedule=schedule, num_stages=2, num_microbatches=8
    )
    return make_plan(
        ReluTower(256), torch.zeros(4096, 256), ClusterSpec.load("p3_16xlarge_x8", CLUSTER), options
    )


def test_a_function_is_a_schedule(tmp_path):
    own = plan(waves)
    gpipe = plan("GPipe")
    one = plan("1F1B")
    assert own.schedule == "waves"
    assert one.predicted.step_seconds < own.predicted.step_seconds  # a bubble after every wave
    assert (
        own.predicted.peak_bytes < gpipe.predicted.peak_bytes
    )  # two micro-batches are alive, not eight
    own.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == own


def test_a_schedule_by_its_name():
    register_schedule(Schedule("waves of two", waves))
    assert PlanOptions.from_user(schedule="Waves of two").schedule == "waves of two"
    assert plan("waves of two").schedule == "waves of two"
    with pytest.raises(AlpaError, match="another schedule"):
        register_schedule(Schedule("waves of two", waves, stages_per_mesh=(2,)))


def test_work_that_a_schedule_leaves_out_is_named():
    def forgetful(num_stages, num_microbatches, num_meshes):
        return [
            [action for action in order if action != Action(1, "B", 3)]
            for order in waves(2, num_microbatches, 2)
        ]

    with pytest.raises(
        AlpaError,
        match="does the backward of micro-batch 3 in stage 1 on mesh 1 0 times instead of 1",
    ):
        plan(forgetful)


def test_a_schedule_that_locks_up_is_an_error():
    def backwards_first(num_stages, num_microbatches, num_meshes):
        return [order[::-1] for order in waves(num_stages, num_microbatches, num_meshes)]

    with pytest.raises(AlpaError, match="locks up"):
        plan(backwards_first)
