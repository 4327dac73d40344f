"""A plan around the parameters of another: they stay where and as they lie, whatever the batch and
the solver.
"""

from __future__ import annotations

import pytest
import torch
from models import MLP, MODELS

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.plan import Plan
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.plan_check import check_plan
from alpa_strategy.planner.planner import make_plan

ONE = {
    "placements": {"blocks.*": "S0 R*", "ln_f.*": "R* R*"},
    "logical_mesh": (2, 2),
    "num_stages": 1,
}
TWO = {"num_stages": 2, "num_microbatches": 4, "schedule": "1F1B", "device_map": {"wte.*": "0-0"}}


class Shallow(MLP):
    """A step that uses a part of the parameters."""

    def training_step(self, batch, batch_idx):
        return self.net[0](batch[0]).square().mean()


def cluster(devices=4):
    return ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": devices})


def plan(model, rows, around=None, devices=4, length=None, **options):
    torch.manual_seed(0)
    module = MODELS[model]() if isinstance(model, str) else model()
    batch = module.example_batch(rows)
    options = PlanOptions.from_user(**options)
    if length is not None:
        batch = tuple(part[:, :length] for part in batch)
    chosen_plan = make_plan(module, batch, cluster(devices), options, around=around)
    step = capture_step(module, batch, world_size=devices, batch_scope=options.rows)
    if chosen_plan.is_pipelined:
        micro = microbatch(step, chosen_plan.num_microbatches, devices)
        check_plan(chosen_plan, micro.graph, devices, micro.from_prologue)
    else:
        check_plan(chosen_plan, step, devices, ())
    return chosen_plan


def stored(found):
    return [
        (
            stage.first_device,
            stage.submesh,
            stage.logical_mesh,
            dict(sorted(stage.parameter_plans.items())),
        )
        for stage in found.stages
    ]


@pytest.mark.parametrize("solver", ["ilp", "propagation"])
@pytest.mark.parametrize("options", [ONE, TWO], ids=["one stage", "two stages"])
def test_parameters_stay_as_they_lie(options, solver, tmp_path):
    first = plan("gpt", 8, **options)
    first.save(tmp_path / "plan.json")
    around = Plan.load(tmp_path / "plan.json")
    other = plan("gpt", 2, around, length=6, solver=solver)
    assert stored(other) == stored(first)
    assert other.fingerprint.batch != first.fingerprint.batch


def test_the_same_step_around_its_own_plan_is_that_plan():
    first = plan("gpt", 8, **ONE)
    again = plan("gpt", 8, first)
    assert again.predicted.step_seconds == pytest.approx(first.predicted.step_seconds)
    assert again.stages[0].strategies == first.stages[0].strategies


@pytest.mark.parametrize(
    "options",
    [pytest.param(ONE, id="one stage", marks=pytest.mark.slow), pytest.param(TWO, id="two stages")],
)
def test_propagation_around_a_plan_is_no_faster_than_the_solver(options):
    first = plan("gpt", 8, **options)
    solved = plan("gpt", 8, first, solver="ilp")
    propagated = plan("gpt", 8, first, solver="propagation")
    seconds = solved.predicted.step_seconds
    assert seconds <= propagated.predicted.step_seconds * (1 + 1e-9)


def test_two_steps_of_one_module_share_storage_placements():
    first = plan("mlp", 8, placements={"net.0.*": "S0 R*", "net.2.*": "R* R"}, logical_mesh=(2, 2))
    other = plan(Shallow, 4, first)
    assert stored(other) == stored(first)
    assert len(other.stages[0].strategies) < len(first.stages[0].strategies)


def test_what_cannot_be_is_said():
    first = plan("gpt", 8, **TWO)
    with pytest.raises(PlanError, match="the stages lie on devices 0-0, 1-3, the job has 2"):
        plan("gpt", 8, first, devices=2)
    with pytest.raises(PlanError, match="which the running pipeline's stages do not have"):
        plan("mlp", 8, first)
    with pytest.raises(PlanError, match="the plan has none of the step's parameters"):
        plan("mlp", 8, plan("gpt", 8, **ONE))
    with pytest.raises(
        PlanError, match=r"for net\.0\.weight of shape \[16, 8\], the model's has \[24, 8\]"
    ):
        plan(lambda: MLP(d_hidden=24), 8, plan("mlp", 8, logical_mesh=(2, 2), num_stages=1))
