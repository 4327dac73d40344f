"""The host's part of a step's prediction."""

from dataclasses import replace

import pytest
import torch
from page.test_details import PIPELINE, planned

from alpa_strategy.cluster.spec import NOMINAL
from alpa_strategy.cost.host import (
    OrderedCall,
    assumed_loop_seconds,
    optimizer_host_seconds,
    time_in_order,
    with_host,
)
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import Predicted
from alpa_strategy.lightning import host_costs
from alpa_strategy.lightning.loop_clock import WATCHED_STEPS, LoopClock
from alpa_strategy.planner.known_host import known_host_seconds
from alpa_strategy.planner.optimizer_info import inspect_optimizer

CPU_DEVICE = NOMINAL.device
GPU_DEVICE = replace(CPU_DEVICE, name="a GPU")
BUSY = Predicted(3e-3, 100, 2e-3, 0.5e-3, 0.5e-3)


def test_on_cpus_the_hosts_seconds_are_added():
    predicted = with_host(BUSY, 1e-3, 2e-3, CPU_DEVICE)

    assert abs(predicted.step_seconds - 6e-3) < 1e-12
    assert abs(predicted.hidden_seconds) < 1e-12
    assert abs(predicted.device_seconds - 3e-3) < 1e-12


def test_an_accelerator_and_the_host_work_side_by_side():
    hidden = with_host(BUSY, 1e-3, 1e-3, GPU_DEVICE)
    limiting = with_host(BUSY, 3e-3, 2e-3, GPU_DEVICE)

    assert abs(hidden.step_seconds - 3e-3) < 1e-12
    assert abs(limiting.step_seconds - 5e-3) < 1e-12


def test_the_hosts_part_can_be_replaced():
    assumed = with_host(BUSY, 1e-3, 2e-3, CPU_DEVICE)
    watched = with_host(assumed, assumed.host_seconds, 5e-3, CPU_DEVICE)

    assert abs(watched.step_seconds - 9e-3) < 1e-12
    assert abs(watched.device_seconds - 3e-3) < 1e-12


def linear_then_relu() -> list[OrderedCall]:
    """[8, 4] x [4, 4], then relu."""
    rows = TensorMeta((8, 4), torch.float32)
    weight = TensorMeta((4, 4), torch.float32, requires_grad=True)
    out = replace(rows, requires_grad=True)
    product = OpCall(torch.ops.aten.mm.default, (Slot(0), Slot(1)), (), (rows, weight), (out,))
    relu = OpCall(torch.ops.aten.relu.default, (Slot(0),), (), (out,), (out,))
    return [OrderedCall(product, (0, 1), (2,)), OrderedCall(relu, (2,), (3,))]


def test_ops_are_timed_forward_and_backward_in_their_order():
    seconds = time_in_order(linear_then_relu(), torch.device("cpu"))

    assert seconds is not None
    assert seconds > 0


def test_an_op_that_does_not_run_alone_gives_no_time():
    calls = linear_then_relu()
    wide = replace(calls[0].call.operands[0], shape=(8, 5))
    broken = replace(calls[0].call, operands=(wide, calls[0].call.operands[1]))

    assert time_in_order([replace(calls[0], call=broken)], torch.device("cpu")) is None


@pytest.mark.parametrize("options", [(), PIPELINE, (*PIPELINE, ("remat", True))])
def test_the_first_ops_of_pipelines_and_of_long_steps_stand_for_all(monkeypatch, options):
    plan, task = planned("gpt", options)
    num_timed = []

    def half_as_long_again(calls, device, num_rounds):
        num_timed.append(len(calls))
        return 1.5 * sum(sum(task.op_costs.op_seconds(of.call)) for of in calls)

    monkeypatch.setattr(host_costs, "time_in_order", half_as_long_again)
    monkeypatch.setattr(host_costs, "LONGEST_SECONDS", 0.0)
    monkeypatch.setattr(host_costs, "SAMPLE_SECONDS", 1e-3 * plan.predicted.compute_seconds)
    optimizer, _ = known_host_seconds(task)
    compute = plan.predicted.compute_seconds

    on_cpu = host_costs.add_host_seconds(plan, task, torch.device("cpu"))
    on_gpu = host_costs.add_host_seconds(plan, task, torch.device("cuda"))

    assert on_cpu.predicted.host_seconds == pytest.approx(optimizer + 0.5 * compute)
    assert on_gpu.predicted.host_seconds == pytest.approx(optimizer)
    (count,) = num_timed
    assert 0 < count < len(task.step.ops)


def test_an_optimizers_python_time_is_in_no_key():
    parameter = torch.nn.Parameter(torch.zeros(4))
    info = inspect_optimizer(torch.optim.Adam([parameter]))

    assert info.parameter_seconds > 0
    assert info == replace(info, step_seconds=1.0, parameter_seconds=1.0)


def test_cpus_update_parameters_one_by_one_and_share_their_cores():
    info = OptimizerInfo(step_seconds=1.0, parameter_seconds=0.5)
    shared = replace(CPU_DEVICE, slowdown=2.0)

    assert optimizer_host_seconds(info, 4, CPU_DEVICE) == 3.0
    assert optimizer_host_seconds(info, 4, shared) == 6.0
    assert optimizer_host_seconds(info, 4, GPU_DEVICE) == 1.0


def test_the_loop_is_assumed_to_take_more_with_logs():
    alone, logging = (assumed_loop_seconds(CPU_DEVICE, count) for count in (0, 2))

    assert 0 < alone < logging


def test_the_loops_time_is_that_outside_of_ops_and_backward(monkeypatch):
    now = 0.0
    monkeypatch.setattr("alpa_strategy.lightning.loop_clock.time.perf_counter", lambda: now)
    clock = LoopClock()

    for _ in range(WATCHED_STEPS.stop + 2):
        clock.end_step()
        now += 0.25  # guards, after the loader
        clock.enter()
        now += 10.0  # the ops
        clock.leave()
        now += 0.5  # logging
        clock.enter()
        now += 20.0  # the backward and the optimizer
        clock.leave()
        now += 1.0  # callbacks and the loader

    assert clock.seconds == 1.75


def test_a_loop_that_was_not_watched_has_no_time():
    assert LoopClock().seconds is None
