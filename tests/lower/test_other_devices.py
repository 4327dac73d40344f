"""Programs make nothing on the host but what a CPU job does: on another device (here meta, CUDA's
stand-in where there
is no GPU) every value, gradient and random number is there. A tensor of the host among its
operands is an error."""

from __future__ import annotations

import random as python_random
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from lowered_cases import CASES, captured, cut, problem_of, random_assignment, stage_of
from proofs.thread_mesh import ThreadMesh, run_on_threads

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.cost.measured import time_call
from alpa_strategy.ir.placement import Layout, value_layout
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.lower.codegen import lower
from alpa_strategy.planner.execution import stage_execution

META = torch.device("meta")


@pytest.mark.parametrize("name", CASES)
def test_a_lowered_program_stays_on_its_device(name):
    case, intra = captured(name, 2), problem_of(name, (2,))
    for seed in range(3):
        stage = stage_of(
            intra, random_assignment(intra, python_random.Random(f"{name}{seed}")), (2,)
        )
        stage = replace(stage, execution=stage_execution(case.step, stage, is_pipelined=False))

        def run(mesh: ThreadMesh, stage=stage):
            program = lower(case.step, stage, mesh, META, ShardedRandom(mesh, 0))
            parameters = {}
            for p in case.step.parameters:
                layout = value_layout(
                    stage.parameter_plans[p.name].step_layout(p.meta.requires_grad)
                )
                local = cut(case.parameters[p.name], layout, mesh).to(META)
                parameters[p.name] = local.requires_grad_(p.meta.requires_grad)
            buffers = {name: buffer.to(META) for name, buffer in case.buffers.items()}
            batch = []
            for leaf, tensor in zip(case.step.batch, case.batch, strict=True):
                batch.append(
                    cut(tensor, Layout.parse("S0" if leaf.batch_dim == 0 else "R"), mesh).to(META)
                )
            outputs, _, _ = program(parameters, buffers, batch)
            outputs[case.step.loss].backward()
            return [*outputs.values(), *(p.grad for p in parameters.values() if p.grad is not None)]

        for tensors in run_on_threads((2,), run):
            assert len(tensors) > len(case.step.escaping)
            assert {tensor.device for tensor in tensors} == {META}


class Positions(LightningModule):
    """Makes tensors from nothing: positions, a mask, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))

    def training_step(self, batch, batch_idx):
        length = batch.shape[1]
        mask = torch.ones(length, length, device=batch.device).tril()
        scale = torch.arange(length, device=batch.device) * torch.tensor(2.0, device=batch.device)
        return ((batch @ self.weight) @ mask * scale).sum()


def test_the_reference_executor_uses_the_parameters_device():
    """It runs what a pipeline computes before and after its stages."""
    module = Positions()
    step = capture_step(module, torch.zeros(3, 4))
    assert any(not op.operands for op in step.ops)
    values = run_step(
        step, {"weight": module.weight.to(META)}, {}, [torch.zeros(3, 4, device=META)]
    )
    assert {value.device for value in values.values()} == {META}


def test_ops_that_make_tensors_are_timed_on_the_device():
    step = capture_step(Positions(), torch.zeros(3, 4))
    for op in step.ops:
        if not op.call.operands:
            assert op.call.on(META).call().device == META
            assert op.call.on(torch.device("cpu")) is op.call
            assert time_call(op.call, META)[1] == 0.0
