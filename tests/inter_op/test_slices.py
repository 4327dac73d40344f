"""A step cut anywhere and run stage after stage, each under any plan of its own, equals the whole
step.
"""

from __future__ import annotations

import random as python_random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS
from proofs.thread_mesh import run_on_threads

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.intra_op.build import build
from alpa_strategy.intra_op.decode import decode
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.placement import Layout, value_layout
from alpa_strategy.ir.plan import Fingerprint, Plan, Predicted
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.ir.stage_graph import crossing_values, slice_stage
from alpa_strategy.lower.codegen import lower
from alpa_strategy.planner.execution import stage_execution

ADAM = OptimizerInfo(state_bytes=16)
CLUSTER = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
COSTS = RooflineCosts(CLUSTER.device)
CASES = {
    "mlp": {},
    "gpt": {"ignore_fraction": 0.4, "num_layers": 1, "vocab_size": 33},
    "llama": {"num_layers": 1},
    "convnet": {},
}


def slice_stages(step, cuts):
    """The stages between cut positions: `cuts` ascends from 0 to the number of ops."""
    return tuple(slice_stage(step, a, b) for a, b in pairwise(cuts))


def shard_of(tensor, layout, mesh):
    """The view of `tensor` that `layout` places on this device."""
    ranges = layout.slices(tensor.shape, mesh.shape, mesh.coordinate)
    return tensor[tuple(slice(a, b) for a, b in ranges)]


def run_stages(step, stages, plans, mesh, parameters, buffers, batch):
    """Run all stages, one after the other, on one device.

    Returns:
        The escaping values of all stages, and (name, local parameter, its layout, its storage
        placement) of every parameter of every stage.
    """
    # value -> (tensor, its layout in the stage that sent it)
    handed: dict[int, tuple[torch.Tensor, str]] = {}
    escaping = {}
    local = []
    for stage, plan in zip(stages, plans, strict=True):
        program = lower(stage, plan, mesh, torch.device("cpu"), ShardedRandom(mesh, 0))
        own = {}
        for p in stage.parameters:
            parameter_plan = plan.parameter_plans[p.name]
            layout = value_layout(parameter_plan.step_layout(p.meta.requires_grad))
            shard = shard_of(parameters[p.name], layout, mesh).clone()
            own[p.name] = shard.requires_grad_(p.meta.requires_grad)
            local.append((p.name, own[p.name], layout, parameter_plan.modes[0]))
        samples = []
        for b in stage.batch:
            layout = Layout.parse("S0" if b.batch_dim == 0 else "R")
            samples.append(shard_of(batch[b.leaf], layout, mesh))
        # both stages are on one mesh here: a boundary is a resharding
        received = []
        for value in stage.received:
            tensor, layout = handed[value]
            reshard = Reshard(layout, plan.received[value], step.values[value].shape, mesh)
            received.append(reshard(tensor))
        of_stage, sent, _ = program(own, buffers, samples, received)
        escaping.update(of_stage)
        handed.update({value: (tensor, plan.sent[value]) for value, tensor in sent.items()})
    return escaping, local


def summed_gradients(local, gradients, mesh):
    """Unsharded gradients, summed over the stages that share a parameter; `local`: `run_stages`."""
    axis = mesh.axes[0]
    summed = {name: torch.zeros_like(g) for name, g in gradients.items()}
    for name, shard, layout, mode in local:
        gradient = torch.zeros_like(shard) if shard.grad is None else shard.grad
        if str(mode) == "R*" or mode.is_gathered_once:
            gradient = axis.all_reduce(gradient)
        full = torch.zeros_like(summed[name])
        shard_of(full, layout, mesh).copy_(gradient)
        summed[name] += full if layout == Layout.parse("R") else axis.all_reduce(full)
    return summed


def shared_parameters(stages):
    """Name of every parameter that several stages hold -> these stages: its gradient is summed over
    them.
    """
    names = dict.fromkeys(p.name for stage in stages for p in stage.parameters)
    users = {}
    for name in names:
        users[name] = tuple(
            i for i, s in enumerate(stages) if name in [p.name for p in s.parameters]
        )
    return {name: found for name, found in users.items() if len(found) > 1}


@cache
def captured(name: str):
    """(step at 8 rows, parameters, buffers, batch, outputs, gradients) of a model in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        module = MODELS[name](**CASES[name])
        whole = module.example_batch(8, torch.Generator().manual_seed(2))
        part = torch.utils._pytree.tree_map(lambda t: t[:4], whole)
        step = capture_step(module, part, world_size=2)
    finally:
        torch.set_default_dtype(torch.float32)
    parameters = {
        p.name: module.get_parameter(p.name).detach().view(p.meta.shape) for p in step.parameters
    }
    buffers = {b.name: module.get_buffer(b.name).detach() for b in step.buffers}
    leaves = torch.utils._pytree.tree_leaves(whole)
    batch = {b.leaf: leaves[b.leaf] for b in step.batch}
    trained = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    outputs = run_step(step, trained, buffers, [batch[b.leaf] for b in step.batch])
    outputs[step.loss].backward()
    gradients = {}
    for n, p in trained.items():
        if p.grad is not None:
            gradients[n] = p.grad
        else:
            gradients[n] = torch.zeros_like(p)
    return step, parameters, buffers, batch, {k: v.detach() for k, v in outputs.items()}, gradients


def random_cuts(num_ops: int, num_stages: int, rng: python_random.Random) -> list[int]:
    return [0, *sorted(rng.sample(range(1, num_ops), num_stages - 1)), num_ops]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(1, 4), st.integers(0, 10**6))
def test_slices_cover_the_step_and_hand_on_what_is_read_later(name, num_stages, seed):
    step = captured(name)[0]
    cuts = random_cuts(len(step.ops), num_stages, python_random.Random(seed))
    stages = slice_stages(step, cuts)
    assert tuple(op for stage in stages for op in stage.ops) == step.ops
    assert sum(stage.loss == step.loss for stage in stages) == 1
    assert sorted(record.name for s in stages for record in s.logs) == sorted(
        record.name for record in step.logs
    )
    assert {v for s in stages for v in s.escaping} == set(step.escaping)
    assert sorted(b.name for s in stages for b in s.buffers if b.update is not None) == sorted(
        b.name for b in step.buffers if b.update is not None
    )
    for index, stage in enumerate(stages):
        inputs = {
            i.value
            for group in (stage.parameters, stage.buffers, stage.batch, stage.constants)
            for i in group
        }
        made = {v for op in stage.ops for v in op.results}
        assert {v for op in stage.ops for v in op.operands} <= inputs | made | set(stage.received)
        assert set(stage.received) <= {v for s in stages[:index] for v in s.sent}
        assert set(stage.sent) == made & {v for s in stages[index + 1 :] for v in s.received}
        if index:
            assert set(stage.received) <= set(crossing_values(step, cuts[index]))
    for parameter, users in shared_parameters(stages).items():
        assert [
            i for i, s in enumerate(stages) if parameter in {p.name for p in s.parameters}
        ] == list(users)


def test_a_tied_weight_belongs_to_both_its_stages():
    step = captured("gpt")[0]
    head = next(i for i, op in enumerate(step.ops) if op.module == "head")
    assert list(shared_parameters(slice_stages(step, [0, head, len(step.ops)])).values()) == [
        (0, 1)
    ]


def test_rotary_tables_reach_later_stages_in_full():
    """A layout for them to choose would tie all layers of a stage together."""
    step = captured("llama")[0]
    buffers = {buffer.value for buffer in step.buffers}
    tables: set[int] = set()
    for op in step.ops:
        if op.operands and buffers.issuperset(op.operands):
            tables.update(op.results)
    assert len(tables) == 2
    last_table = max(step.makers[value] for value in tables)
    stage = slice_stage(step, last_table + 1, len(step.ops))
    assert tables <= set(stage.received_constants) < set(stage.received)

    mesh = CLUSTER.logical_mesh((2,))
    intra = build(stage, OptionTables(mesh, COSTS, ADAM))
    for value, boundary in intra.received.items():
        is_constant = value in stage.received_constants
        assert (len(boundary.layouts) == 1) == is_constant
    # A slice of the stage knows it, too.
    later = slice_stage(step, last_table + 2, len(step.ops))
    assert set(later.received_constants) <= set(stage.received_constants)


def test_slices_outside_the_step_are_refused():
    step = captured("mlp")[0]
    with pytest.raises(ValueError, match="ops"):
        slice_stage(step, 2, 2)


@pytest.mark.parametrize("name", CASES)
def test_stages_under_random_plans_equal_the_whole_step(name):
    """Forward through all stages, backward by autograd across them; layouts change at every
    boundary.
    """
    step, parameters, buffers, batch, outputs, gradients = captured(name)
    mesh_shape = (2,)
    for seed in range(3):
        rng = python_random.Random(f"{name}{seed}")
        stages = slice_stages(step, random_cuts(len(step.ops), 3, rng))
        plans = []
        for stage in stages:
            intra = build(stage, OptionTables(CLUSTER.logical_mesh(mesh_shape), COSTS, ADAM))
            assignment = [
                rng.choice([k for k, seconds in enumerate(choice.cost) if seconds < float("inf")])
                for choice in intra.problem.choices
            ]
            plan = decode(intra, assignment, (1, 2), Predicted(0.0, 0))
            plan = replace(plan, execution=stage_execution(stage, plan, is_pipelined=False))
            assert (set(plan.received), set(plan.sent)) == (set(stage.received), set(stage.sent))
            plans.append(plan)
        plan = Plan(Fingerprint(*"abcdef"), tuple(plans), Predicted(1.0, 1))
        assert Plan.from_dict(plan.to_dict()) == plan

        def device(mesh, stages=stages, plans=plans):
            escaping, local = run_stages(step, stages, plans, mesh, parameters, buffers, batch)
            escaping[step.loss].backward()
            summed = summed_gradients(local, gradients, mesh)
            return {k: v.detach() for k, v in escaping.items()}, summed

        for found, summed in run_on_threads(mesh_shape, device):
            for value in step.escaping:
                torch.testing.assert_close(found[value], outputs[value], rtol=1e-10, atol=1e-12)
            for parameter, expected in gradients.items():
                torch.testing.assert_close(summed[parameter], expected, rtol=1e-10, atol=1e-12)
