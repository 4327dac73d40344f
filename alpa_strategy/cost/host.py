"""The host's time of a step: Python, the Trainer's loop and the loader, in addition to the devices'
time.

Ops are priced one by one (`model.py`), from times that were measured in a loop of one op. In a step
each op has a line of Python around it, autograd calls its backward, and the ops before it have
filled the caches. `time_in_order` measures a device's ops in the order of the step. The optimizer's
Python is measured by `planner/optimizer_info.py`. The loop between steps is measured when it runs
(`lightning/loop_clock.py`); `assumed_loop_seconds` estimates it until then.
"""

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.ir.op import OpCall, TensorMeta
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import Plan, Predicted

logger = logging.getLogger(__name__)

# Of longer steps, and of pipelines, a part of the ops is measured: of about as many seconds.
LONGEST_SECONDS = 0.3
SAMPLE_SECONDS = 0.03
# Rounds whose median counts, after one that warms up.
ROUNDS = 5
# Of a part of the ops.
SAMPLE_ROUNDS = 2
# Bytes of a buffer that is read between rounds. It evicts the caches nearest to a core, as the
# Trainer and the loader do between two steps.
BETWEEN_BYTES = 2**22
# The loop of Lightning 2.6 around a step, in launches of a small op on the same core
# (`launch_seconds`). Measured on one core with no callbacks and without a loader.
LOOP_LAUNCHES = 400
# One `self.log` in it, in such launches.
LOG_LAUNCHES = 150


@dataclass(frozen=True)
class OrderedCall:
    """An op as one device runs it."""

    call: OpCall
    # values of the step, in the order of the call's
    operands: tuple[int, ...]
    # values of the step, in the order of the call's
    results: tuple[int, ...]


def time_in_order(
    calls: Sequence[OrderedCall], device: torch.device, num_rounds: int = ROUNDS
) -> float | None:
    """Measure the seconds of forward and backward of `calls`, one after the other on random data.

    Calls read the values that earlier ones compute, if these have the shape that they expect. Else
    (there is a resharding in between) they read random data. On an accelerator the device's queue
    is empty at the end, so the result is the larger of the host's and the device's time.

    Args:
        num_rounds: that count, after one that warms up.

    Returns:
        The median of the rounds; None if an op does not run by itself on random data.
    """
    rounds: list[float] = []
    inputs: dict[tuple[int, TensorMeta], Tensor] = {}
    between = torch.zeros(BETWEEN_BYTES // 4)
    try:
        for _ in range(1 + num_rounds):
            between.add_(1.0)
            started = _now(device)
            roots = _forward(calls, inputs, device)
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            rounds.append(_now(device) - started)
            for tensor in inputs.values():
                tensor.grad = None
    except Exception as error:
        # An op that cannot run alone must not end the job.
        logger.debug("the step's ops cannot be timed in order: %s", error)
        return None
    return statistics.median(rounds[1:])


def _now(device: torch.device) -> float:
    """Return the time in seconds: with a GPU after all of its work; of a CPU with one thread the
    time on a core, which does not include other jobs'.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _forward(
    calls: Sequence[OrderedCall], inputs: dict[tuple[int, TensorMeta], Tensor], device: torch.device
) -> list[Tensor]:
    """Run all calls; return the differentiable results that none of them has read."""
    computed: dict[int, Tensor] = {}
    unread: dict[int, Tensor] = {}
    for ordered in calls:
        operands = []
        for value, meta in zip(ordered.operands, ordered.call.operands, strict=True):
            tensor = computed.get(value)
            if tensor is None or not _fits(tensor, meta):
                tensor = _input(value, meta, inputs, device)
            else:
                unread.pop(value, None)
            operands.append(tensor)
        results = ordered.call.on(device).call(*operands)
        tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        for value, tensor in zip(ordered.results, tensors, strict=False):
            computed[value] = tensor
            if tensor.requires_grad:
                unread[value] = tensor
    return list(unread.values())


def _fits(tensor: Tensor, meta: TensorMeta) -> bool:
    """Return whether a tensor has the shape and dtype that `meta` describes."""
    return tuple(tensor.shape) == tuple(meta.shape) and tensor.dtype == meta.dtype


def _input(
    value: int,
    meta: TensorMeta,
    inputs: dict[tuple[int, TensorMeta], Tensor],
    device: torch.device,
) -> Tensor:
    """Return the data of a value that no call computes: small floats, integers 0, True.

    Args:
        value: its index.
        inputs: data so far, which are returned again; gets the new ones.
    """
    key = value, meta
    if key not in inputs:
        if meta.dtype.is_floating_point:
            # Around zero, so that sums neither grow from layer to layer nor become denormal.
            tensor = torch.rand(meta.shape, device=device).sub_(0.5).mul_(0.2).to(meta.dtype)
            inputs[key] = tensor.requires_grad_(meta.requires_grad)
        elif meta.dtype == torch.bool:
            inputs[key] = torch.ones(meta.shape, dtype=meta.dtype, device=device)
        else:
            inputs[key] = torch.zeros(meta.shape, dtype=meta.dtype, device=device)
    return inputs[key]


# --- The prediction with the host's time.


def with_host(predicted: Predicted, host: float, loop: float, device: DeviceSpec) -> Predicted:
    """Return the prediction with the host's time added.

    On CPUs the host is the device: its seconds are added. With an accelerator it runs ahead: the
    step takes as long as the slower of the two.

    Args:
        host: seconds of Python in a step.
        loop: seconds between steps.
    """
    busy = predicted.device_seconds
    if device.is_cpu:
        seconds = busy + host + loop
    else:
        seconds = max(busy, host + loop)
    return replace(
        predicted,
        step_seconds=seconds,
        host_seconds=host,
        loop_seconds=loop,
        hidden_seconds=busy + host + loop - seconds,
    )


def plan_with_host(plan: Plan, host: float, loop: float, device: DeviceSpec) -> Plan:
    """Return the plan with the host's time added, to its baselines as well; `host` and `loop` are
    seconds of a step, as of `with_host`.
    """
    baselines: dict[str, float | None] = {}
    for name, seconds in plan.baselines.items():
        baselines[name] = None
        if seconds is not None:
            alone = Predicted(seconds, 0)
            baselines[name] = with_host(alone, host, loop, device).step_seconds
    predicted = with_host(plan.predicted, host, loop, device)
    return replace(plan, predicted=predicted, baselines=baselines)


def optimizer_host_seconds(
    optimizer: OptimizerInfo, num_parameters: int, device: DeviceSpec
) -> float:
    """Return the seconds of the optimizer's Python; the bytes that it moves are not included.

    On accelerators a few kernels update all parameters together. On CPUs each takes its own, all
    times the device's slowdown.
    """
    if not device.is_cpu:
        return optimizer.step_seconds
    seconds = optimizer.step_seconds + num_parameters * optimizer.parameter_seconds
    return device.slowdown * seconds


def assumed_loop_seconds(device: DeviceSpec, num_logs: int) -> float:
    """Estimate the seconds of the Trainer's loop around a step that logs `num_logs` values."""
    launches = LOOP_LAUNCHES + num_logs * LOG_LAUNCHES
    return launches * device.launch_seconds * device.slowdown
