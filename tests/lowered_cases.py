"""Captured steps and what runs one stage of them on threads, for tests of lowering and of plans."""

from __future__ import annotations

import random as python_random
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from models import MODELS
from proofs.thread_mesh import ThreadMesh, run_on_threads

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.intra_op.build import IntraOp, build
from alpa_strategy.intra_op.decode import decode
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.placement import Layout, value_layout
from alpa_strategy.ir.plan import Predicted, StagePlan
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.lower.codegen import lower
from alpa_strategy.pipeline.of_this_rank import of_this_rank
from alpa_strategy.planner.execution import stage_execution

CASES = {
    "mlp": {},
    "gpt": {"ignore_fraction": 0.4, "num_layers": 1, "vocab_size": 33},
    "llama": {"num_layers": 1},
    "bert": {"num_layers": 1},
    "convnet": {},
    "spectral": {},
}
ADAM = OptimizerInfo(state_bytes=16)


@dataclass(frozen=True)
class Captured:
    """A step with inputs and the full step's results."""

    step: StepGraph
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    batch: list[torch.Tensor]
    outputs: dict[int, torch.Tensor]
    gradients: dict[str, torch.Tensor]


@cache
def captured(name: str, world_size: int) -> Captured:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        module = MODELS[name](**CASES[name])
        rows = 8
        whole = module.example_batch(rows, torch.Generator().manual_seed(2))
        part = torch.utils._pytree.tree_map(lambda t: t[: rows // world_size], whole)
        step = capture_step(module, part, world_size=world_size)
    finally:
        torch.set_default_dtype(torch.float32)
    parameters = {
        p.name: module.get_parameter(p.name).detach().view(p.meta.shape) for p in step.parameters
    }
    buffers = {b.name: module.get_buffer(b.name).detach() for b in step.buffers}
    leaves = torch.utils._pytree.tree_leaves(whole)
    batch = [leaves[b.leaf] for b in step.batch]
    leaf_parameters = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    outputs = run_step(step, leaf_parameters, buffers, batch)
    outputs[step.loss].backward()
    gradients = {}
    for n, p in leaf_parameters.items():
        if p.grad is not None:
            gradients[n] = p.grad
        else:
            gradients[n] = torch.zeros_like(p)
    return Captured(
        step, parameters, buffers, batch, {k: v.detach() for k, v in outputs.items()}, gradients
    )


@cache
def problem_of(name: str, mesh_shape: tuple[int, ...]) -> IntraOp:
    world_size = int(np.prod(mesh_shape))
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": world_size})
    tables = OptionTables(cluster.logical_mesh(mesh_shape), RooflineCosts(cluster.device), ADAM)
    return build(captured(name, world_size).step, tables)


def random_assignment(intra: IntraOp, rng: python_random.Random) -> list[int]:
    """Any strategies, repaired until every transfer is possible; biased towards divided work."""
    problem = intra.problem
    assignment = []
    for index, choice in enumerate(problem.choices):
        allowed = np.flatnonzero(np.isfinite(choice.cost))
        offset = index - len(intra.parameters)
        if 0 <= offset < len(intra.ops) and rng.random() < 0.8:
            divided = [
                k for k in allowed if any("S" in str(s) for s in intra.ops[offset].strategies[k])
            ]
            allowed = np.array(divided) if divided else allowed
        assignment.append(int(rng.choice(list(allowed))))
    for transfer in problem.transfers:
        source = transfer.source[assignment[transfer.producer]]
        for use in transfer.uses:
            assert np.isfinite(transfer.cost[source, use.layout[assignment[use.choice]]])
    return assignment


def stage_of(intra: IntraOp, assignment: list[int], mesh_shape: tuple[int, ...]) -> StagePlan:
    return decode(intra, assignment, (1, int(np.prod(mesh_shape))), Predicted(0.0, 0))


def run_lowered_stage(case: Captured, stage: StagePlan, mesh_shape: tuple[int, ...]) -> None:
    """Run it on a thread per device, compare each rank's results and gradients with the full
    step's.
    """
    step = case.step
    if stage.execution is None:
        stage = replace(stage, execution=stage_execution(step, stage, is_pipelined=False))

    def device(mesh: ThreadMesh):
        program = lower(step, stage, mesh, torch.device("cpu"), ShardedRandom(mesh, 0))
        parameters, batch = {}, []
        for p in step.parameters:
            layout = value_layout(stage.parameter_plans[p.name].step_layout(p.meta.requires_grad))
            parameters[p.name] = (
                cut(case.parameters[p.name], layout, mesh)
                .clone()
                .requires_grad_(p.meta.requires_grad)
            )
        for leaf, tensor in zip(step.batch, case.batch, strict=True):
            layout = Layout.parse(
                " ".join(["S0" if leaf.batch_dim == 0 else "R"] * len(mesh_shape))
            )
            batch.append(cut(tensor, layout, mesh))
        outputs, _, _ = program(parameters, case.buffers, batch)
        outputs[step.loss].backward()
        outputs = of_this_rank(step, outputs, 0, 1)
        gradients = {}
        for n, p in parameters.items():
            if p.grad is None:
                gradients[n] = torch.zeros_like(p)
            else:
                gradients[n] = p.grad
        for p in step.parameters:  # what the once-per-step reduction does
            for axis, mode in enumerate(stage.parameter_plans[p.name].modes):
                if str(mode) == "R*" or mode.is_gathered_once:
                    gradients[p.name] = mesh.axes[axis].all_reduce(gradients[p.name])
        return {k: v.detach() for k, v in outputs.items()}, gradients, mesh

    num_ranks = int(np.prod(mesh_shape))
    for rank, (outputs, gradients, mesh) in enumerate(run_on_threads(mesh_shape, device)):
        expected_outputs = of_this_rank(step, case.outputs, rank, num_ranks)
        for value in step.escaping:
            # The mean of the ranks' losses may be left as a sum: the ranks' losses are compared.
            if value != step.loss or step.loss_of_ranks < 0:
                torch.testing.assert_close(
                    outputs[value], expected_outputs[value].detach(), rtol=1e-10, atol=1e-12
                )
        for p in step.parameters:
            layout = value_layout(stage.parameter_plans[p.name].step_layout(p.meta.requires_grad))
            expected = cut(case.gradients[p.name], layout, mesh)
            error = (gradients[p.name] - expected).abs().max().item()
            assert error <= 1e-10 * max(1.0, expected.abs().max().item()), (
                p.name,
                stage.parameter_plans[p.name],
            )


def cut(tensor: torch.Tensor, layout: Layout, mesh: ThreadMesh) -> torch.Tensor:
    ranges = layout.slices(tensor.shape, mesh.shape, mesh.coordinate)
    return tensor[tuple(slice(a, b) for a, b in ranges)]
