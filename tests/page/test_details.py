"""The details of a plan add up to its seconds, bytes and collectives."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import MODELS

from alpa_strategy.cli import main
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.findings import findings
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.plan import ParameterMode, ParameterPlan
from alpa_strategy.ir.plan_details import PlanDetails, details_of_file, details_path
from alpa_strategy.options import PlanOptions
from alpa_strategy.page.model import page_model
from alpa_strategy.planner.details import details_of
from alpa_strategy.planner.planner import captured_task, plan_captured
from alpa_strategy.units import format_seconds

PIPELINE = (("num_stages", 2), ("num_microbatches", 4), ("schedule", "1F1B"))
CASES = [
    ("gpt", ()),
    ("gpt", (("parallel", "zero3"),)),
    ("gpt", (("parallel", "tensor"),)),
    ("gpt", (("logical_mesh", (2, 2)),)),
    ("gpt", PIPELINE),
    ("gpt", (*PIPELINE, ("remat", True))),
    ("mlp", ()),
]


@cache
def planned(model: str, options: tuple = ()):
    """A plan on four devices with its task."""
    torch.manual_seed(0)
    module = MODELS[model]()
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 4})
    batch = module.example_batch(8)
    captured = captured_task(module, batch, cluster, PlanOptions.from_user(**dict(options)))
    return plan_captured(captured), captured.task


def totals_of(details, count, remat):
    """(kind, axis, phase) -> [calls, bytes, seconds] per step of a stage's messages."""
    totals = defaultdict(lambda: [0, 0, 0.0])
    for of in (*details.parameters, *details.ops):
        for message in of.messages:
            times = 1 if message.phase == "step" else count
            if remat and message.phase == "forward":
                times *= 2
            entry = totals[message.kind, message.axis, message.phase]
            entry[0] += times * message.count
            entry[1] += times * message.num_bytes
            entry[2] += times * message.seconds
    return totals


@pytest.mark.parametrize(("model", "options"), CASES)
def test_messages_add_up_to_the_collectives_of_the_plan(model, options):
    plan, task = planned(model, options)
    details = details_of(task, plan)
    for stage, of_stage in zip(plan.stages, details.stages, strict=True):
        totals = totals_of(of_stage, plan.num_microbatches, stage.remat)
        assert set(totals) == {(c.kind, c.axis, c.phase) for c in stage.collectives}
        for c in stage.collectives:
            calls, num_bytes, seconds = totals[c.kind, c.axis, c.phase]
            assert (calls, num_bytes) == (c.count, c.num_bytes)
            assert seconds == pytest.approx(c.seconds, rel=1e-9)


def test_a_stage_of_one_device_has_no_collectives():
    plan, task = planned("gpt", (("num_stages", 4), ("num_microbatches", 4)))
    details = details_of(task, plan)
    for stage, of_stage in zip(plan.stages, details.stages, strict=True):
        assert stage.logical_mesh == (1,)
        assert not stage.collectives
        assert not any(of.messages for of in (*of_stage.parameters, *of_stage.ops))
    assert "collective" not in " ".join(findings(plan))


@pytest.mark.parametrize(("model", "options"), CASES)
def test_seconds_add_up_to_the_step_of_the_stage(model, options):
    plan, task = planned(model, options)
    details = details_of(task, plan)
    for stage, of_stage in zip(plan.stages, details.stages, strict=True):
        forward = sum(op.forward_seconds for op in of_stage.ops if not op.is_per_step)
        backward = sum(op.backward_seconds for op in of_stage.ops)
        for op in of_stage.ops:
            forward += sum(m.seconds for m in op.messages if m.phase == "forward")
            backward += sum(m.seconds for m in op.messages if m.phase == "backward")
        if stage.remat:
            backward += forward
        assert forward == pytest.approx(stage.forward_seconds, rel=1e-6)
        assert backward == pytest.approx(stage.backward_seconds, rel=1e-6)
        step = plan.num_microbatches * (stage.forward_seconds + stage.backward_seconds)
        step += of_stage.once_seconds
        assert step == pytest.approx(stage.predicted.step_seconds, rel=1e-6)


@pytest.mark.parametrize(("model", "options"), CASES)
def test_the_seconds_of_the_model_tree_sum_to_the_step_and_what_overlaps(model, options):
    plan, task = planned(model, options)
    details = details_of(task, plan)
    for stage, data in zip(plan.stages, page_model(plan, details)["stages"], strict=True):
        total = sum(row["step"] for row in (*data["ops"], *data["parameters"]))
        overlapped = sum(c.seconds for c in stage.collectives)
        overlapped -= stage.predicted.communication_seconds
        assert total - overlapped == pytest.approx(stage.predicted.step_seconds, rel=1e-3)
        assert data["total"].endswith(f" of it overlapped: {format_seconds(data['seconds'])}") or (
            overlapped == pytest.approx(0.0, abs=1e-9)
        )


def test_the_slowest_ops_are_listed_with_their_lines(tmp_path, capsys):
    plan, task = planned("gpt", PIPELINE)
    details = details_of(task, plan)
    path = tmp_path / "plan.json"
    plan.save(path)
    details.save(details_path(path))
    rows = page_model(plan, details)["slowest"]
    assert len(rows) == 5
    of_rows = [row[-1] for row in rows]
    assert of_rows == sorted(of_rows, reverse=True)
    assert all(":" in source for _, source, _, _ in rows)
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    shown = "".join(out.split())
    assert "slowestops" in shown
    for _, source, _, seconds in rows:
        # The file without its folders, on one line however narrow the terminal is.
        assert f" {os.path.basename(source)} " in out
        assert "".join(format_seconds(seconds).split()) in shown


@pytest.mark.parametrize(("model", "options"), CASES)
def test_bytes_are_those_of_the_local_shards(model, options):
    plan, task = planned(model, options)
    details = details_of(task, plan)
    for stage, of_stage in zip(plan.stages, details.stages, strict=True):
        for parameter in of_stage.parameters:
            assert stage.shapes[parameter.name] == parameter.shape
            local = torch.Size(parameter.local_shape).numel()
            assert parameter.weight_bytes == 4 * local
            assert parameter.state_bytes == 8 * local
        memory = of_stage.memory
        parts = memory.weights + memory.gradients + memory.state + memory.gathered + memory.other
        assert parts <= stage.predicted.peak_bytes


def test_details_are_read_as_they_were_written(tmp_path):
    plan, task = planned("gpt", PIPELINE)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert details_of_file(path, plan) is None
    details = details_of(task, plan)
    details.save(details_path(path))
    assert PlanDetails.load(details_path(path)) == details
    assert details_of_file(path, plan) == details


def test_details_of_an_edited_plan_are_left_out(tmp_path):
    plan, task = planned("mlp")
    path = tmp_path / "plan.json"
    plan.save(path)
    details_of(task, plan).save(details_path(path))
    noted = replace(plan, notes=("another note",))
    assert details_of_file(path, noted) is not None
    other = replace(plan, num_microbatches=2)
    assert details_of_file(path, other) is None


def test_impossible_layouts_are_an_error():
    plan, task = planned("mlp")
    (stage,) = plan.stages
    name = next(iter(stage.parameter_plans))
    impossible = ParameterPlan((ParameterMode.parse("S7"),) * len(stage.logical_mesh))
    edited = replace(stage, parameter_plans={**stage.parameter_plans, name: impossible})
    with pytest.raises(PlanError, match=name):
        details_of(task, replace(plan, stages=(edited,)))
