"""Seconds and bytes of one local op call: the only place where op costs come from
(docs/formulas.md#costs).

`RooflineCosts` combines the roofline of an op (`roofline.py`), what autograd saves of it
(`saved_tensors.py`), the kernels of a user's autograd.Function (`kernels.py`) and measured times
(`measured.py`). A measured time is used as it is for the very call that was measured. For other
calls the roofline is multiplied by the ratio measured/roofline of measured calls that are similar.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.flops import Work, is_view, op_work, product_kind
from alpa_strategy.cost.kernels import Kernels, kernels_of
from alpa_strategy.cost.measured import OpTable, call_family, call_key
from alpa_strategy.cost.roofline import (
    FUSED,
    PRODUCT_BYTES,
    reached_flops,
    roofline_seconds,
    tile_shares,
)
from alpa_strategy.cost.saved_tensors import Saved, find_saved
from alpa_strategy.ir.op import CUSTOM_OPS, OpCall
from alpa_strategy.ir.optimizer_info import OptimizerInfo

# Distances between calls are factors of e. Calls within this distance count alike.
NEAR = 0.1
# Distance between calls whose operands have other numbers of dims.
OTHER_RANKS = 10.0


class OpCosts(Protocol):
    """Costs of ops on one device of a cluster.

    A cost model of the user's goes to `costs=` of `make_plan`, options or strategy. Calls are
    local: what one device runs of an op, at the shapes of its shards. Every method is called many
    times with the same arguments, so an answer that takes time to compute should be cached.
    """

    @property
    def name(self) -> str:
        """Part of a plan's fingerprint: two models of one name give the same costs."""
        ...

    def op_seconds(self, call: OpCall) -> tuple[float, float]:
        """Return (forward, backward) seconds of `call` at its local shapes.

        Backward is 0 when nothing requires grad.
        """
        ...

    def saved(self, call: OpCall) -> Saved:
        """Return the tensors of the call that autograd saves until its backward."""
        ...

    def optimizer_seconds(
        self, num_elements: int, itemsize: int, optimizer: OptimizerInfo
    ) -> float:
        """Return the seconds to update `num_elements` parameter elements of `itemsize` bytes."""
        ...


class RooflineCosts:
    """`OpCosts` of one kind of device. Results are cached by call.

    Args:
        table: of measured ops; it must not change afterwards.
        compiled: whether pointwise ops run in chains, each chain one kernel
            (`PlanOptions.compile`).
    """

    def __init__(
        self, device: DeviceSpec, table: OpTable | None = None, compiled: bool = False
    ) -> None:
        self.device = device
        self.compiled = compiled
        self.table = table
        self._seconds: dict[OpCall, tuple[float, float]] = {}
        self._saved: dict[OpCall, Saved] = {}
        self._corrections: dict[str, list[_MeasuredCall]] = {}
        self._mode = FakeTensorMode()

    @property
    def name(self) -> str:
        """The class and the device: a derived class with other costs has another name."""
        suffix = ", compiled" if self.compiled else ""
        return f"{type(self).__qualname__} of {self.device.name}{suffix}"

    def op_seconds(self, call: OpCall) -> tuple[float, float]:
        """Return (forward, backward) seconds of `call` at its local shapes, times the device's
        slowdown.

        Backward is 0 when nothing requires grad.
        """
        if call not in self._seconds:
            forward, backward = self._op_seconds(call)
            # Measured times and the device's rates are those of one device alone.
            slowdown = self.device.slowdown
            self._seconds[call] = slowdown * forward, slowdown * backward
        return self._seconds[call]

    def saved(self, call: OpCall) -> Saved:
        """Return the tensors of `call` that autograd saves, read off a run on fake tensors; if
        compiled, with the temporary bytes of fused kernels.
        """
        if call not in self._saved:
            saved = find_saved(call, on_accelerator=not self.device.is_cpu, compiled=self.compiled)
            kernels = self._kernels_of(call) if self.compiled else None
            if kernels is not None:
                forward, backward = kernels
                temporary_bytes = (forward.fused_bytes, backward.fused_bytes)
                saved = replace(saved, temporary_bytes=temporary_bytes)
            self._saved[call] = saved
        return self._saved[call]

    def optimizer_seconds(
        self, num_elements: int, itemsize: int, optimizer: OptimizerInfo
    ) -> float:
        """Return the seconds to update `num_elements` parameter elements of `itemsize` bytes.

        Bound by memory. Launches are not counted: fused and foreach optimizers start a few kernels
        for all parameters together.
        """
        num_bytes = num_elements * optimizer.update_bytes(itemsize)
        return self.device.slowdown * num_bytes / self.device.memory_bandwidth

    def roofline(self, call: OpCall) -> tuple[float, float]:
        """Return (forward, backward) seconds without measurements."""
        kernels = self._kernels_of(call)
        if kernels is not None:
            forward_kernels, backward_kernels = kernels
            return self._kernel_seconds(forward_kernels), self._kernel_seconds(backward_kernels)

        device = self.device
        forward, backward = op_work(call)
        forward_rate = reached_flops(device, call)
        backward_rate = reached_flops(device, call, backward=True)
        if device.compute_units and product_kind(call) is not None:
            forward = replace(forward, num_bytes=PRODUCT_BYTES * forward.num_bytes)
            backward = replace(backward, num_bytes=PRODUCT_BYTES * backward.num_bytes)
            forward_share, backward_share = tile_shares(device, call)
            forward_rate *= forward_share
            backward_rate *= backward_share

        forward_seconds = roofline_seconds(forward, device, forward_rate)
        backward_seconds = roofline_seconds(backward, device, backward_rate)
        if self._fuses(call):
            return FUSED * forward_seconds, FUSED * backward_seconds
        return forward_seconds, backward_seconds

    def _kernels_of(self, call: OpCall) -> tuple[Kernels, Kernels] | None:
        """Kernels of a user's autograd.Function; None for other ops, or if they are unknown."""
        if call.target not in CUSTOM_OPS:
            return None
        return kernels_of(call, self._mode)

    def _fuses(self, call: OpCall) -> bool:
        """Return whether a compiler would fuse the op with its neighbours: all but matmuls and
        custom ops.
        """
        return self.compiled and call.target not in CUSTOM_OPS and product_kind(call) is None

    def _kernel_seconds(self, kernels: Kernels) -> float:
        """Return the seconds of the kernels of one direction of a user's autograd.Function."""
        if self.compiled:
            other_work = kernels.fused
        else:
            other_work = Work(0.0, sum(kernels.single), len(kernels.single))
        product_seconds = sum(self.roofline(product)[0] for product in kernels.products)
        # Other kernels have no FLOPs that count, so that any rate will do.
        return roofline_seconds(other_work, self.device, 1.0) + product_seconds

    def _op_seconds(self, call: OpCall) -> tuple[float, float]:
        """(forward, backward) seconds on a device that computes alone."""
        forward, backward = self.roofline(call)
        if self.table is None or is_view(call):
            return forward, backward
        measured = self.table.get(self.device.name, call)
        if measured is None:
            forward_ratio, backward_ratio = self._correction(call, forward + backward)
            return forward * forward_ratio, backward * backward_ratio
        # The op was measured uncompiled.
        share = FUSED if self._fuses(call) else 1.0
        backward_seconds = share * measured.backward if backward else 0.0
        return share * measured.forward, backward_seconds

    def _correction(self, call: OpCall, seconds: float) -> tuple[float, float]:
        """Return the (forward, backward) ratios measured/roofline expected of a call that was not
        measured itself; (1, 1) if none of its family was measured, or `seconds` is 0.

        A geometric mean over measured calls of its family. Those whose shapes are most similar
        count most: the shards of an op run as the full op does, while another op of its size may
        reach a third of its rate.

        Args:
            seconds: the call's roofline, forward and backward together.
        """
        family = call_family(call)
        measured_calls = self._corrections.get(family)
        if measured_calls is None:
            rate = reached_flops(self.device, call)
            measured_calls = self._measured_calls(family, rate)
            self._corrections[family] = measured_calls
        if not measured_calls or seconds <= 0:
            return 1.0, 1.0

        this = _MeasuredCall.of(call_key(call), math.log(seconds))
        # [calls, 2]
        ratios = np.array([(other.forward, other.backward) for other in measured_calls])
        distances = np.array([this.distance(other) for other in measured_calls])
        weights = (distances + NEAR) ** -4
        forward, backward = np.exp(weights @ ratios / weights.sum())
        return float(forward), float(backward)

    def _measured_calls(self, family: str, rate: float) -> list["_MeasuredCall"]:
        """Return how the table's calls of `family` compare with their roofline.

        Ratios are logarithms, 0 without a backward. Calls without a forward are left out.

        Args:
            rate: FLOP/s that the roofline assumes.
        """
        assert self.table is not None
        measured_calls = []
        for key, entry in self.table.family(self.device.name, family).items():
            forward = roofline_seconds(entry.forward_work, self.device, rate)
            backward = roofline_seconds(entry.backward_work, self.device, rate)
            if forward <= 0 or entry.forward <= 0:
                continue
            size = math.log(forward + backward)
            forward_ratio = math.log(entry.forward / forward)
            backward_ratio = 0.0
            if backward > 0 and entry.backward > 0:
                backward_ratio = math.log(entry.backward / backward)
            measured_calls.append(_MeasuredCall.of(key, size, forward_ratio, backward_ratio))
        return measured_calls


@dataclass(frozen=True)
class _MeasuredCall:
    """A call of a family: its shapes, and how its measured seconds compare with its roofline."""

    # Number of dims of each operand.
    ranks: tuple[int, ...]

    # Natural logarithms of the sizes of all operands' dims, [dims].
    dims: np.ndarray

    # Text of its other arguments.
    arguments: str

    # Natural logarithm of its roofline's seconds, forward and backward together.
    size: float

    # Natural logarithms of the ratios measured/roofline.
    forward: float = 0.0
    backward: float = 0.0

    @staticmethod
    def of(key: str, size: float, forward: float = 0.0, backward: float = 0.0) -> "_MeasuredCall":
        """Return the call whose shapes and arguments are those of `key`, as `call_key` writes it.

        Args:
            size: logarithm of its roofline's seconds.
            forward, backward: logarithms of measured / roofline.
        """
        shapes, arguments = key.split(" (", 1)
        ranks = []
        dims: list[int] = []
        for shape in shapes.split():
            shape_dims = [int(dim) for dim in re.findall(r"\d+", shape)]
            ranks.append(len(shape_dims))
            dims.extend(shape_dims)
        log_dims = np.log([max(dim, 1) for dim in dims])
        return _MeasuredCall(tuple(ranks), log_dims, arguments, size, forward, backward)

    def distance(self, other: "_MeasuredCall") -> float:
        """Return how many factors of e are between the two, all dims together.

        Other arguments count as one factor, operands of other ranks as `OTHER_RANKS`, sizes little.
        """
        apart = NEAR * abs(self.size - other.size) + (self.arguments != other.arguments)
        if self.ranks != other.ranks:
            return apart + OTHER_RANKS
        return apart + float(np.abs(self.dims - other.dims).sum())
