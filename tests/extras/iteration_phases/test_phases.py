"""An iteration of several phases is priced: each in the cheaper of two layouts, moves between them
included.
"""

from __future__ import annotations

import re

import lightning
import pytest
import torch
from covering import slow_but
from torch import nn

from alpa_strategy import ClusterSpec, Phase, Plan, PlanOptions, make_plan
from alpa_strategy.cli import main
from alpa_strategy.errors import CaptureError, PlanError
from alpa_strategy.extras.iteration_phases import capture_phases

WIDTH = 512
LAYERS = 6
ROWS = 4
DEVICES = 4
LAYER = 4 * WIDTH**2  # bytes


class Actor(lightning.LightningModule):
    """Acts often on few rows, is judged twice by a frozen net, and learns."""

    def __init__(self, acts: int = 50, learns: int = 1, width: int = WIDTH) -> None:
        super().__init__()
        self.acts, self.learns = acts, learns
        self.automatic_optimization = False
        self.actor = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.judge = nn.Linear(width, width, bias=False).requires_grad_(False)

    def act(self, x_NW, past):
        return [self.actor(x_NW)[:, None] + old_NTW for old_NTW in past]

    def iteration_phases(self, batch):
        (x_NW,) = batch
        update = Phase(
            lambda x_NW: self.actor(x_NW).square().mean(), (x_NW.repeat(8, 1),), trains=True
        )
        judge = Phase(self.judge, (x_NW,))
        past = [x_NW.new_empty(len(x_NW), 384, x_NW.shape[1])]
        named = {
            "judge": judge,
            "again": judge,
            "act": Phase(self.act, (x_NW, past), times=self.acts),
        }
        return named | {f"learn{number}": update for number in range(self.learns)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.actor.parameters())


def cluster(name="pcie_8gpu"):
    return ClusterSpec.load(name, {"num_nodes": 1, "devices_per_node": DEVICES})


def planned(name="pcie_8gpu", acts=50, **options):
    plan = make_plan(
        Actor(acts), (torch.zeros(ROWS, WIDTH),), cluster(name), PlanOptions.from_user(**options)
    )
    return plan, {phase.name: phase for phase in plan.phases}


def is_whole(phase):
    """Whether a device has all of most parameters."""
    return set(phase.layout.split()[1:]) == {"R"}


def test_only_the_training_phase_has_gradients():
    module = Actor()
    found = capture_phases(module, (torch.zeros(ROWS, WIDTH),), DEVICES, "rank", torch.enable_grad)
    assert list(found) == ["judge", "again", "act", "learn0"]
    for name, (phase, step) in found.items():
        assert {p.name.split(".")[0] for p in step.parameters} == {
            "judge" if name in ("judge", "again") else "actor"
        }
        made = [step.values[value] for op in step.ops for value in op.results]
        parameters = [parameter.meta for parameter in step.parameters]
        assert any(meta.requires_grad for meta in (*made, *parameters)) == phase.trains
        if phase.trains:
            given = step.batch
        else:
            given = [step.values[value] for value in step.received]
        rows = set()
        for entry in given:
            rows.add((entry.meta if phase.trains else entry).shape[0])
        assert rows == {DEVICES * ROWS * (8 if phase.trains else 1)}
    assert all(p.requires_grad for p in module.actor.parameters())
    assert not module.judge.weight.requires_grad


CHOICES = [
    ("pcie_8gpu", {"parallel": "zero3"}),
    ("dgx_h100", {}),
    ("dgx_h100", {"logical_mesh": (2, 2)}),
    ("pcie_8gpu", {}),
    ("pcie_8gpu", {"logical_mesh": (2, 2)}),
    ("dgx_h100", {"parallel": "zero3"}),
]


@pytest.mark.parametrize(("name", "options"), slow_but(CHOICES, CHOICES[:3]))
def test_no_choice_is_worse_than_training_s_layout(name, options):
    plan, phases = planned(name, **options)
    for phase in phases.values():
        assert phase.total_seconds <= phase.times * phase.staying_seconds
    assert plan.iteration_seconds == pytest.approx(
        sum(phase.total_seconds for phase in phases.values())
    )
    assert phases["learn0"].seconds == plan.predicted.step_seconds
    assert phases["learn0"].moved_seconds is None


def test_what_is_gathered_often_is_moved_once():
    plan, phases = planned(parallel="zero2")
    assert plan.stages[0].logical_mesh == (DEVICES,)
    act = phases["act"]
    axis = cluster().logical_mesh((DEVICES,)).axes[0]
    assert is_whole(act)
    most = axis.seconds("all_gather", LAYERS * LAYER)
    assert most / 2 < act.moved_seconds <= most
    assert act.total_seconds < act.times * act.staying_seconds
    # Of training, the shards with their state stay; the copy comes on top.
    assert act.peak_bytes >= LAYERS * LAYER * 3 / DEVICES
    _, at_once = planned(parallel="zero2", acts=0)
    assert at_once["act"].total_seconds == 0.0


def test_whole_parameters_are_brought_anywhere_for_nothing():
    _, phases = planned(parallel="data")
    assert phases["act"].moved_seconds in (None, 0.0)


def test_frozen_parameters_keep_the_placement_of_their_first_phase():
    _, phases = planned(parallel="zero3")
    assert phases["judge"].moved_seconds is None
    assert phases["again"].moved_seconds is None
    assert phases["again"].seconds == pytest.approx(phases["judge"].seconds)


def test_where_no_copy_fits_parameters_stay():
    first, free = planned(parallel="zero3", logical_mesh=(DEVICES,))
    assert is_whole(free["act"])
    limit = 0.9 * free["act"].peak_bytes
    assert free["learn0"].peak_bytes < limit
    plan, phases = planned(parallel="zero3", logical_mesh=(DEVICES,), memory_limit=limit)
    assert max(phase.peak_bytes for phase in phases.values()) <= limit
    assert plan.stages == first.stages
    assert phases["act"].seconds > free["act"].seconds
    assert not is_whole(phases["act"])


def test_training_in_stages_leaves_others_their_own_layout():
    plan, phases = planned(num_stages=2, num_microbatches=4)
    assert len(plan.stages) == 2
    act = phases["act"]
    assert act.staying_seconds is None
    assert act.moved_seconds > 0


def test_a_decoding_step_on_few_rows_is_tensor_parallel():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            module, batch = Actor(acts=500, width=8192), (torch.zeros(1, 8192),)
    finally:
        torch.set_default_dtype(torch.float32)
    plan = make_plan(
        module, batch, cluster("dgx_h100"), PlanOptions.from_user(parallel="zero2", num_stages=1)
    )
    act = next(phase for phase in plan.phases if phase.name == "act")
    assert set(act.layout.split()[1:]) == {"S"}
    assert 0 < act.moved_seconds < act.seconds * act.times / 10
    assert act.seconds < 0.8 * act.staying_seconds


def test_a_plan_file_has_the_phases(tmp_path):
    plan, _ = planned()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").phases == plan.phases


def test_just_one_phase_trains():
    for learns in (0, 2):
        with pytest.raises(CaptureError, match="of which not just one trains"):
            make_plan(Actor(learns=learns), (torch.zeros(ROWS, WIDTH),), cluster())


def test_what_fits_in_no_layout_is_said():
    with pytest.raises(PlanError, match="no plan fits"):
        planned(memory_limit=LAYER / 4, num_stages=1, remat=False)


def test_the_command_shows_a_recipe_s_phases(capsys):
    command = [
        "plan",
        "grpo_tiny",
        "--cluster",
        "pcie_8gpu",
        "cluster.num_nodes=1",
        "cluster.devices_per_node=2",
    ]
    assert main([*command, "model.policy.num_layers=1"]) == 0
    shown = capsys.readouterr().out
    assert "if all parameters stay as they lie for training" in shown
    for name, times in {"prompt": 1, "answer": 7, "old": 1, "reference": 1, "update": 2}.items():
        assert re.search(rf"^{name} +2 R\*? +{times} ", shown, re.MULTILINE), name
