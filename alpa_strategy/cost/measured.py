"""Measured op times: a table in a small JSON file, and how ops and devices are measured.

The table is keyed by device name, then op family (op, dtypes, which operands require grad), then
the call's shapes and arguments. All models on the same kind of device use it. `model.py` estimates
calls that are not in the table.
"""

import logging
import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.flops import CONVOLUTIONS, Work, is_view, op_base_name, op_work
from alpa_strategy.files import read_json, write_json
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta, bind, dtype_name

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2


@dataclass(frozen=True)
class OpTime:
    """A measurement of one call."""

    # seconds
    forward: float
    # seconds
    backward: float
    forward_work: Work
    backward_work: Work


def call_family(call: OpCall) -> str:
    """Return the name of the calls whose rates are similar to those of `call`.

    Such as `aten.linear.default float32* float32*`, where `*` stands for "requires grad". A
    convolution's contains its kernel (`3x3`, `3x3 grouped`), as the rates of these differ
    severalfold.
    """
    words = [call.target_name]
    for meta in call.operands:
        mark = "*" if meta.requires_grad else ""
        words.append(dtype_name(meta.dtype) + mark)
    if op_base_name(call) in CONVOLUTIONS:
        words.append("x".join(map(str, call.operands[1].shape[2:])))
        if bind(call)["groups"] > 1:
            words.append("grouped")
    return " ".join(words)


def call_key(call: OpCall) -> str:
    """Return the name of a call within its family: operand shapes, then the arguments.

    `$0` stands for operand 0.
    """
    shapes = " ".join(str(list(meta.shape)).replace(" ", "") for meta in call.operands)
    arguments = [_show(arg) for arg in call.args]
    arguments += [f"{name}={_show(value)}" for name, value in call.kwargs]
    return f"{shapes} ({', '.join(arguments)})"


class OpTable:
    """A table of measured op times.

    Args:
        path: of its file; None: it stays in memory.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else None
        # (device, family) -> call -> time
        self._families: dict[tuple[str, str], dict[str, OpTime]] = defaultdict(dict)

    @classmethod
    def load(cls, path: str | Path) -> "OpTable":
        """Read the table in `path`.

        Empty if there is no such file. If it cannot be read, or has another format version, that is
        logged and the table is empty as well, so that ops are measured again.
        """
        table = cls(path)
        file = Path(path)
        if not file.exists():
            return table
        try:
            data = read_json(file)
            if data["version"] != FORMAT_VERSION:
                raise ValueError(
                    f"format version {data['version']}, this package writes {FORMAT_VERSION}"
                )
            for device, families in data["devices"].items():
                for family, calls in families.items():
                    table._families[device, family] = {
                        key: _entry_from_dict(entry) for key, entry in calls.items()
                    }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            logger.warning(
                "op times in %s cannot be used (%s): ops are measured again", file, error
            )
            return cls(path)
        return table

    def save(self) -> None:
        """Write the table to its path, atomically, with what other jobs have added there, which it
        gets as well. Does nothing without a path.
        """
        if self.path is None:
            return
        if self.path.exists():
            for key, calls in OpTable.load(self.path)._families.items():
                self._families[key] = calls | self._families[key]
        devices: dict[str, dict[str, Any]] = defaultdict(dict)
        for (device, family), calls in self._families.items():
            devices[device][family] = {key: asdict(entry) for key, entry in calls.items()}
        write_json(self.path, {"version": FORMAT_VERSION, "devices": devices})

    def get(self, device: str, call: OpCall) -> OpTime | None:
        """Return the measurement of this call, if there is one."""
        return self._families.get((device, call_family(call)), {}).get(call_key(call))

    def put(self, device: str, call: OpCall, forward: float, backward: float) -> None:
        """Add a measurement, in seconds."""
        self._families[device, call_family(call)][call_key(call)] = OpTime(
            forward, backward, *op_work(call)
        )

    def times_of(self, device: str) -> list[tuple[str, str, OpTime]]:
        """Return every measurement of a device, as (family, call, time) in a fixed order."""
        times = []
        for (name, family), calls in sorted(self._families.items(), key=lambda item: item[0]):
            if name == device:
                times += [(family, key, calls[key]) for key in sorted(calls)]
        return times

    def family(self, device: str, family: str) -> dict[str, OpTime]:
        """Return every measurement of a family (`call_family`), by `call_key`."""
        return self._families.get((device, family), {})

    def __len__(self) -> int:
        return sum(map(len, self._families.values()))


def _show(arg: Any) -> str:
    """Return an argument as text of a key; `$0` is the first operand."""
    if isinstance(arg, Slot):
        return f"${arg.index}"
    return f"[{', '.join(map(_show, arg))}]" if isinstance(arg, tuple) else str(arg)


def _entry_from_dict(data: dict[str, Any]) -> OpTime:
    """Return an entry of the file of measured ops.

    Raises:
        ValueError: a time is negative or no number.
        KeyError, TypeError: a field is missing, or of another type.
    """
    seconds = float(data["forward"]), float(data["backward"])
    if min(seconds) < 0:
        raise ValueError(f"negative time {seconds}")
    return OpTime(*seconds, Work(**data["forward_work"]), Work(**data["backward_work"]))


# --- Measuring ops and the device, on the device that will run them. Needs no process group.
#
# Times are minima over a few repetitions: noise only ever adds time. All loops have a budget of
# seconds, so that measuring takes seconds for any model. `comm/measure.py` measures the links
# between devices.


REPETITIONS = 5
# Of a pass for one function: one that takes longer is repeated only in the next pass.
ENOUGH_SECONDS = 0.01
PASSES = 3
# Seconds a call that the host is ahead of a GPU, at most.
MOST_LEAD = 1e-3
# Of a GPU's clock, about.
CYCLES_PER_SECOND = 2e9
# Only to order calls by expected time: 20 FLOPs take about as long as one byte of traffic.
BYTES_PER_FLOP = 0.05
MEASURED_DTYPES = {
    "cpu": ("float32", "float64", "bfloat16"),
    "cuda": ("float32", "bfloat16", "float16"),
}


def measure_ops(
    calls: Iterable[OpCall],
    device: torch.device | str,
    budget_seconds: float,
    table: OpTable,
    name: str | None = None,
    later: Iterable[OpCall] = (),
) -> OpTable:
    """Measure the calls that `table` does not have, longest expected first, within the budget.

    Views are skipped. So are calls that do not run by themselves on random data, and calls that
    need more than half of the free memory. Calls are measured up to `PASSES` times while the budget
    lasts; the table gets the least seconds of forward and of backward.

    Args:
        budget_seconds: no call is started after as many seconds.
        table: is changed.
        name: of the device in the table; None: `device_name`.
        later: which of `calls` are measured last.

    Returns:
        `table` itself, with the new times added.
    """
    device = torch.device(device)
    name = name or device_name(device)
    started = time.perf_counter()
    missing = set()
    for call in calls:
        if not is_view(call) and table.get(name, call) is None:
            missing.add(call)
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )
    best: dict[OpCall, tuple[float, float]] = {}
    order = sorted(missing, key=_expected, reverse=True)
    order.sort(key=set(later).__contains__)
    # Several passes while time is left, so that a burst of other load does not count.
    for pass_index in range(PASSES):
        for call in order if pass_index == 0 else list(best):
            left = budget_seconds - (time.perf_counter() - started)
            if left <= 0:
                break
            if 3 * sum(meta.num_bytes for meta in (*call.operands, *call.results)) > free / 2:
                continue
            try:
                forward, backward = time_call(call, device, left)
            except Exception as error:
                # An op that cannot run alone has the costs of its roofline. It must not end the
                # job.
                logger.debug("%s cannot be timed: %s", call.target_name, error)
                continue
            best_forward, best_backward = best.get(call, (forward, backward))
            best[call] = (min(forward, best_forward), min(backward, best_backward))
    for call, (forward, backward) in best.items():
        table.put(name, call, forward, backward)
    return table


def time_call(
    call: OpCall, device: torch.device | str, budget_seconds: float = 1.0
) -> tuple[float, float]:
    """Measure (forward, backward) seconds of one call on random data.

    One run of each if that takes longer than the budget. Errors of the op are passed on. Backward
    is 0 if nothing requires grad.
    """
    device = torch.device(device)
    call = call.on(device)
    operands = [random_operand(meta, device) for meta in call.operands]
    with torch.enable_grad():
        results = [
            leaf for leaf in tree_leaves(call.call(*operands)) if isinstance(leaf, torch.Tensor)
        ]
        forward = _best_seconds(lambda: call.call(*operands), device, budget_seconds / 3)
        outputs = [result for result in results if result.requires_grad]
        inputs = [operand for operand in operands if operand.requires_grad]
        if not outputs or not inputs:
            return forward, 0.0
        grads = [torch.rand_like(output) for output in outputs]

        def backward() -> None:
            torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)

        return forward, _best_seconds(backward, device, budget_seconds / 2)


def random_operand(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """Return a tensor like `meta`, with its `requires_grad`, of data that every op accepts.

    Floats in [0, 1), integers 0 (a valid index of any tensor), booleans True.
    """
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        # There are no random float8 numbers.
        wide = meta.dtype if meta.dtype.itemsize > 1 else torch.float16
        return (
            torch.rand(meta.shape, dtype=wide, device=device)
            .to(meta.dtype)
            .requires_grad_(meta.requires_grad)
        )
    if meta.dtype == torch.bool:
        return torch.ones(meta.shape, dtype=meta.dtype, device=device)
    return torch.zeros(meta.shape, dtype=meta.dtype, device=device)


def measure_device(
    device: torch.device | str = "cpu", local_ranks: int = 1, budget_seconds: float = 1.0
) -> DeviceSpec:
    """Measure this device: matmuls per dtype, memory bandwidth, launch of an op, memory.

    Peaks are those that matmuls reach, so `efficiency` is 1. Dtypes without a matmul are left out.

    Args:
        local_ranks: of the job on this host, which share a CPU's memory.
        budget_seconds: of all measurements, about.
    """
    device = torch.device(device)
    share = budget_seconds / 6
    rates = []
    for dtype in MEASURED_DTYPES.get(device.type, ("float32",)):
        rate = _matmul_rate(getattr(torch, dtype), device, share)
        if rate:
            rates.append((dtype, rate))
    # Well beyond the caches.
    elements = 2**26 if device.type == "cuda" else 2**23
    source = torch.rand(elements, device=device)
    target = torch.empty_like(source)
    copy_seconds = _best_seconds(lambda: target.copy_(source), device, share, at_least=5)
    small = torch.rand(8, device=device)

    def launch() -> object:
        return small.add(1.0)

    launches = [_seconds(launch, device, 100) for _ in range(5)]
    return DeviceSpec(
        name=device_name(device),
        memory_bytes=device_memory_bytes(device, local_ranks),
        memory_bandwidth=2 * source.nbytes / copy_seconds,
        peak_flops=tuple(rates),
        launch_seconds=min(launches) / 100,
    )


def device_memory_bytes(device: torch.device | str, local_ranks: int = 1) -> int:
    """Return the bytes of the device's memory; of a CPU the host's divided by `local_ranks`."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return psutil.virtual_memory().total // local_ranks


def device_name(device: torch.device | str) -> str:
    """Return the name under which hosts share measurements: the device's model, a CPU's threads.

    A GPU that may use TensorFloat-32 (`torch.set_float32_matmul_precision`) has another name, as it
    is several times as fast.
    """
    device = torch.device(device)
    if device.type == "cuda":
        uses_tf32 = torch.get_float32_matmul_precision() != "highest"
        return torch.cuda.get_device_name(device) + (" (TF32)" if uses_tf32 else "")
    return f"cpu {_cpu_model()} ({torch.get_num_threads()} threads)"


def _cpu_model() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _matmul_rate(dtype: torch.dtype, device: torch.device, budget_seconds: float) -> float | None:
    """Return the best FLOP/s of square matmuls; None if the device has none of this dtype.

    Sizes grow while they fit in the budget.
    """
    best = None
    started = time.perf_counter()
    for size in (256, 512, 1024) if device.type == "cpu" else (1024, 4096, 8192):
        try:
            a = torch.rand(size, size, device=device).to(dtype)
            seconds = _best_seconds(
                partial(torch.matmul, a, a), device, budget_seconds / 4, at_least=4
            )
        except RuntimeError as error:
            logger.debug("no products of %s on %s: %s", dtype, device, error)
            return best
        best = max(best or 0.0, 2 * size**3 / seconds)
        # The next size takes at least 8 times as long.
        if time.perf_counter() - started + 20 * seconds > budget_seconds:
            break
    return best


def _best_seconds(
    fn: Callable[[], object], device: torch.device, budget_seconds: float, at_least: int = 1
) -> float:
    """Return the least seconds of a call of `fn`, over a warm-up and a few measurements.

    These end when the budget is spent, but not before `at_least` of them. If the warm-up alone
    exceeds the budget and `at_least` is 1, its seconds are returned.
    """
    once = _seconds(fn, device, 1)
    if once > budget_seconds and at_least <= 1:
        return once
    started = time.perf_counter()
    once = min(once, _seconds(fn, device, 1))
    lead = min(time.perf_counter() - started, MOST_LEAD) if device.type == "cuda" else 0.0
    once = min(once, _seconds(fn, device, 1, lead)) if lead else once
    # Short ops are measured several at a time, so that the clock and, on a GPU, the synchronisation
    # do not count.
    inner = max(1, min(100, math.ceil(2e-4 / max(once, 1e-7))))
    best = once if inner == 1 else math.inf
    spent = 0.0
    for repetition in range(REPETITIONS):
        seconds = _seconds(fn, device, inner, lead)
        best = min(best, seconds / inner)
        spent += seconds
        if spent > min(budget_seconds, ENOUGH_SECONDS) and repetition + 1 >= at_least:
            break
    return best


def _seconds(
    fn: Callable[[], object], device: torch.device, repetitions: int, lead: float = 0.0
) -> float:
    """Return the seconds of `repetitions` calls together; of a CPU with one thread, its time on a
    core.

    A GPU is kept busy for `lead` seconds a call first. The host may need longer to launch a kernel
    than the kernel runs; then it is ahead, as in a step that has long kernels as well.
    """
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            if lead:
                torch.cuda._sleep(int(lead * repetitions * CYCLES_PER_SECOND))
            begin.record()
            for _ in range(repetitions):
                fn()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3
    # With one thread its time on a core counts, which does not include other jobs'.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(repetitions):
        fn()
    return clock() - started


def _expected(call: OpCall) -> float:
    """A number that grows with the expected time of forward and backward."""
    return sum(work.flops * BYTES_PER_FLOP + work.num_bytes for work in op_work(call))
