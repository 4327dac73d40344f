"""Seconds and bytes of one local op call: the only place where op costs come from
(docs/formulas.md#costs).
"""

import logging
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from alpa_strategy.cluster.spec import DeviceSpec
from alpa_strategy.cost.flops import (
    ATTENTION,
    DROPOUTS,
    PRODUCTS,
    Work,
    is_view,
    op_base_name,
    op_work,
    product_kind,
    product_shape,
)
from alpa_strategy.cost.measured import OpTable, call_family, call_key
from alpa_strategy.ir.op import CUSTOM_OPS, OpCall, TensorMeta, aten_name, with_slots
from alpa_strategy.options import OptimizerInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """What autograd keeps of one op until its backward."""

    # of each, whether it is saved
    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    extra_bytes: int  # of saved tensors that are neither (dropout masks, log-sum-exp, ...)
    # alive only while the op runs, besides operands and results, and while its backward does,
    # besides the gradients of both (less than 0 where these are not all there at once)
    temporary_bytes: tuple[int, int] = (0, 0)
    # a compiler makes its results again in the backward, where its operands are there: none of them
    # is kept
    fuses: bool = False


class OpCosts(Protocol):
    """Costs of ops on one device of a cluster. One of your own goes to `costs=` of `make_plan`,
    options or strategy.

    Calls are local: what one device runs of an op, at the shapes of its shards. Every method is
    asked again and again for the same call, so an answer that takes time should be remembered.
    """

    @property
    def name(self) -> str:
        """Part of a plan's fingerprint: two models of one name give the same costs."""
        ...

    def op_seconds(self, call: OpCall) -> tuple[float, float]:
        """(forward, backward) seconds of `call` at its own (local) shapes. Backward is 0 when
        nothing requires grad.
        """
        ...

    def saved(self, call: OpCall) -> Saved:
        """What autograd keeps of the call until its backward."""
        ...

    def optimizer_seconds(
        self, num_elements: int, itemsize: int, optimizer: OptimizerInfo
    ) -> float:
        """Seconds to update `num_elements` parameter elements of `itemsize` bytes each."""
        ...


# --- What autograd keeps of one op: asked of a run on fake CPU tensors, not guessed
# (docs/formulas.md#costs).
#
# Two conventions differ from what such a run shows, because the devices that matter run other
# kernels: attention keeps what flash and memory-efficient kernels keep (query, key, value, mask,
# result, the log-sum-exp per row), and dropout on an accelerator keeps a mask of one byte per
# element.


# Kernels that PyTorch's partitioner makes again besides those tagged pointwise, with a number per
# row kept of them.
FUSED_KERNELS = {
    *(
        "native_layer_norm",
        "_fused_rms_norm",
        "_softmax",
        "_log_softmax",
        "nll_loss_forward",
        "mean",
        "sum",
    ),
    *("var_mean", "cat", "_to_copy", "clone", "expand", "_unsafe_view"),
}


def ask_saved(
    call: OpCall, mode: FakeTensorMode, *, on_accelerator: bool = False, compiled: bool = False
) -> Saved:
    """Which tensors autograd keeps when `call` runs at its own shapes, forward and backward (about
    a millisecond).

    A saved tensor counts as operand or result when it shares that one's storage; the others count
    in bytes, each storage once. An op that cannot run on fake tensors is taken to keep all its
    operands. Of `compiled` ops that fuse, only numbers per row are kept besides operands and
    results.
    """
    nothing = Saved((False,) * len(call.operands), (False,) * len(call.results), 0)
    if not any(meta.requires_grad for meta in call.operands) or not any(
        meta.requires_grad for meta in call.results
    ):
        return nothing
    name, num_rows = op_base_name(call), math.prod(call.operands[0].shape[:-1])
    learned = any(
        meta.requires_grad for meta in call.operands[3:]
    )  # a bias added to scores: CPUs write these out then
    if name in ATTENTION and (
        on_accelerator or not learned
    ):  # with the log-sum-exp per row (float32)
        kept = tuple(meta.dtype != torch.bool for meta in call.operands)
        flags = sum(
            meta.num_elements for meta in call.operands if meta.dtype == torch.bool
        )  # kept as numbers
        return Saved(
            kept,
            (True, *nothing.results[1:]),
            4 * num_rows + flags * call.operands[0].dtype.itemsize,
        )
    if on_accelerator and name in DROPOUTS and not is_view(call):
        return Saved(nothing.operands, nothing.results, call.results[0].num_elements)
    if (
        on_accelerator and name == "rms_norm"
    ):  # one kernel there, which keeps a reciprocal per row (in float32)
        kept = tuple(index < 2 for index in range(len(call.operands)))
        return Saved(kept, nothing.results, 4 * num_rows, fuses=compiled)
    try:
        return _run(call, mode, compiled)
    except Exception as error:
        # whatever a fake kernel may raise: an estimate on the safe side must still come back
        logger.debug(
            "%s does not run on fake tensors (%s): taken to keep its operands",
            call.target_name,
            error,
        )
        return Saved(
            tuple(meta.dtype.is_floating_point for meta in call.operands), nothing.results, 0
        )


def _run(call: OpCall, mode: FakeTensorMode, compiled: bool) -> Saved:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    watch = LiveStorages()
    with mode, torch.enable_grad():
        operands = without_data(call)
        with watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = tensors_in(call.call(*operands))
        num_forward = len(watch.kernels)
        fuses = compiled and all(
            torch.Tag.pointwise in kernel.tags
            or kernel.is_view
            or aten_name(kernel) in FUSED_KERNELS
            for kernel in watch.kernels
            if kernel.namespace == "aten"
        )
        if fuses:
            whole = max(m.num_elements for m in (*call.operands, *call.results))
            own = {_storage(tensor) for tensor in (*operands, *results)}
            kept = [tensor for tensor in kept if tensor.numel() < whole or _storage(tensor) in own]
        storages = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
        kept.clear()  # kernels of the backward let go of what they have used
        cotangents, _ = differentiated(operands, results, watch)
    operand_storages = [_storage(tensor) for tensor in operands]
    result_storages = [_storage(tensor) for tensor in results]
    known = {*operand_storages, *result_storages}
    extra_bytes = sum(num_bytes for storage, num_bytes in storages.items() if storage not in known)
    backward_bytes = (
        watch.peak_bytes({*known, *map(_storage, cotangents)}, num_forward) - extra_bytes
    )
    backward_bytes -= sum(
        meta.num_bytes for meta in call.operands if meta.requires_grad
    )  # counted with others'
    return Saved(
        operands=tuple(storage in storages for storage in operand_storages),
        # a result that is a view of an operand is not kept a second time
        results=tuple(
            storage in storages and storage not in operand_storages for storage in result_storages
        ),
        extra_bytes=extra_bytes,
        temporary_bytes=(watch.peak_bytes({*known, *storages}, 0, num_forward), backward_bytes),
        fuses=fuses,
    )


class LiveStorages(TorchDispatchMode):
    """Notes the kernels, and after each of them which storages made under it are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[
            int, tuple[StorageWeakRef, int]
        ] = {}  # the weak reference keeps the key from being used again
        self._live: list[set[int]] = []
        self.kernels: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.kernels.append(func)
        for tensor in tensors_in(out):
            if _storage(tensor) not in self._made:
                storage = tensor.untyped_storage()
                self._made[_storage(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self._live.append(
            {key for key, (reference, _) in self._made.items() if not reference.expired()}
        )
        return out

    def peak_bytes(self, around: set[int], first: int = 0, end: int | None = None) -> int:
        """Most bytes alive at once, after the kernels from `first` to `end`, besides the storages
        in `around`.
        """
        return max(
            (sum(self._made[key][1] for key in live - around) for live in self._live[first:end]),
            default=0,
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of a nested structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def without_data(call: OpCall, device: str | None = None) -> list[Tensor]:
    """Operands of the call, on a device (None: the default one), or as a mode of fake tensors makes
    them.
    """
    made = call.operands
    return [
        torch.empty(m.shape, dtype=m.dtype, device=device, requires_grad=m.requires_grad)
        for m in made
    ]


def differentiated(
    operands: list[Tensor], results: list[Tensor], watch: TorchDispatchMode
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the results, and those that operands get of them while `watch` looks on."""
    outputs = [result for result in results if result.requires_grad]
    inputs = [operand for operand in operands if operand.requires_grad]
    cotangents = [torch.empty_like(output) for output in outputs]
    if not outputs or not inputs:
        return cotangents, []
    with watch:
        found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    return cotangents, [gradient for gradient in found if gradient is not None]


# --- What a user's autograd.Function costs: by the kernels that it runs on tensors without data,
# forward and backward.
#
# Products are priced as the ops that they are, at the dtype of their data: float8 under a wrapper
# such as torchao's. All else moves bytes: kernel by kernel, or fused, where a tensor is read once,
# or twice if its sum comes first.


@dataclass
class Kernels:
    """Products, and what the other kernels move: bytes of each, or fused, and then write for
    products to read.
    """

    products: list[OpCall] = field(default_factory=list)
    single: list[int] = field(default_factory=list)
    fused: Work = field(default_factory=Work)
    fused_bytes: int = 0


def kernels_of(call: OpCall, mode: FakeTensorMode) -> tuple[Kernels, Kernels] | None:
    """What `call` runs, forward and backward; None where fake tensors are not enough for the user's
    code.
    """
    forward, backward = _KernelRecorder(), _KernelRecorder()
    with mode, torch.enable_grad():
        operands = without_data(call)
        try:
            with forward:
                results = tensors_in(call.call(*operands))
            _, gradients = differentiated(operands, results, backward)
        except Exception:  # the user's code, of any type: it wants data
            return None
        return forward.kernels(results), backward.kernels(gradients)


class _KernelRecorder(TorchDispatchMode):
    """Notes products, and of which whole tensors the results of the other kernels are made."""

    def __init__(self) -> None:
        super().__init__()
        self._found = Kernels()
        self._alive: list[Tensor] = []  # a storage's number is not used again while it is there
        self._made_of: dict[
            int, set[int]
        ] = {}  # storage that a kernel wrote -> those in memory that it was made of
        self._summed: set[int] = set()  # that a reduction reads
        self._read_whole: set[int] = set()  # by products, so that it must be in memory
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or func.is_view:
            return out
        operands: list[Tensor] = []
        frozen = with_slots(tuple(args), Tensor, operands)
        results = tensors_in(out)
        self._alive += [*operands, *results]
        read, written = (
            [self._note(tensor) for tensor in tensors] for tensors in (operands, results)
        )
        if aten_name(func) in PRODUCTS:
            metas = tuple(map(_meta, operands)), tuple(map(_meta, results))
            self._found.products.append(OpCall(func, frozen, (), *metas))
            self._read_whole.update(read)
            return out
        self._found.single.append(sum(_meta(tensor).num_bytes for tensor in (*operands, *results)))
        roots = set().union(*(self._made_of.get(key, {key}) for key in read))
        if operands and max(t.numel() for t in operands) > max(
            (t.numel() for t in results), default=0
        ):
            self._summed |= roots
        self._made_of.update(dict.fromkeys(written, roots))
        return out

    def _note(self, tensor: Tensor) -> int:
        key = _data(tensor).untyped_storage()._cdata
        self._bytes.setdefault(key, _meta(tensor).num_bytes)
        return key

    def kernels(self, results: list[Tensor]) -> Kernels:
        """What was found; `results` leave the op, so they are written."""
        leaving = {self._note(tensor) for tensor in results}
        written = [key for key in self._made_of if key in self._read_whole | leaving]
        read = set().union(*self._made_of.values()) if self._made_of else set()
        moved = sum(self._bytes[key] for key in written)
        moved += sum(self._bytes[key] * (1 + (key in self._summed)) for key in read)
        self._found.fused = Work(0.0, moved, len(written) + len(self._summed))
        self._found.fused_bytes = sum(self._bytes[key] for key in written if key not in leaving)
        return self._found


def _data(tensor: Tensor) -> Tensor:
    """The first tensor inside of a wrapper, which holds its elements."""
    while is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), _data(tensor).dtype)


# --- RooflineCosts: seconds of an op, measured where that was done, else FLOPs/rate +
# bytes/bandwidth + launch.
#
# The sum, not the larger of the two: kernels load their first tiles before they compute, store the
# last ones after, and read operands again for every wave of tiles, so that small products reach
# less than large ones (of fp16 on a V100: 83 TFLOP/s at 8192, as measured, 80 at 4096, 57 at 1024).
# A table of measured ops corrects it: exactly where the very call was measured, else by the ratio
# measured/roofline of the op's neighbours in size.


# Where a device names no peak for a dtype: the first of these that it names. bfloat16 does not fall
# back to float16: devices without bfloat16 units (V100) emulate it in float32.
FALLBACKS: dict[str, tuple[str, ...]] = {
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float32",),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("float8_e4m3fn", "bfloat16", "float16", "float32"),
    "float32": ("tfloat32", "float64", "bfloat16", "float16"),
}


def peak_flops(device: DeviceSpec, dtype: torch.dtype) -> float:
    """FLOP/s of `device` for operands of `dtype`; half the float32 peak for a float64 that it does
    not name.
    """
    peaks = dict(device.peak_flops)
    name = str(dtype).removeprefix("torch.")
    for candidate in (name, *FALLBACKS.get(name, ("float32",))):
        if candidate not in peaks:
            continue
        if name == "float64" and candidate == "float32":
            return peaks[candidate] / 2
        return peaks[candidate]
    return min(peaks.values())


def reached_flops(device: DeviceSpec, call: OpCall, backward: bool = False) -> float:
    """FLOP/s that `call` reaches where memory does not bind it: its dtype's peak times the
    efficiency of its kind.

    Products run at the dtype of their first operand; everything else computes in float32 or wider.
    """
    dtype = call.operands[0].dtype if call.operands else torch.float32
    kind = product_kind(call)
    if kind is None and dtype != torch.float64:
        dtype = torch.float32
    if backward and kind == "attention":
        kind = "attention_backward"
    return peak_flops(device, dtype) * device.efficiency_of(
        kind or "matmul", str(dtype).removeprefix("torch.")
    )


# Tiles in which kernels compute a product (rows, columns), and the share of the largest one's rate
# that each reaches (NVIDIA, Matrix Multiplication Background User's Guide, sections 2 and 3: tile
# and wave quantization).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (64, 64, 0.6))
# Fitted on published runs (docs/published.md), for devices whose processors are known: of a
# product's memory traffic what its compute does not hide; the width at which an attention head
# reaches half of the rate of wide ones. Of the time of pointwise ops, what is left where they are
# compiled (on any device).
PRODUCT_BYTES, HALF_WIDTH, FUSED = 0.5, 15, 0.5


def tile_shares(device: DeviceSpec, call: OpCall) -> tuple[float, float]:
    """Shares of its rate at which a product's forward and backward run on a device whose processors
    are known.
    """
    if product_kind(call) == "attention":  # the rate in the cluster file is that of heads of 128
        width = call.operands[0].shape[-1]
        share = width / (width + HALF_WIDTH) * (128 + HALF_WIDTH) / 128
        return share, share
    shape = product_shape(call)
    if shape is None:
        return 1.0, 1.0
    batches, rows, inner, columns = shape
    # The gradients of both operands are products of their own shapes, of as many FLOPs.
    left, right = (
        tile_share(device, batches, rows, inner),
        tile_share(device, batches, inner, columns),
    )
    return tile_share(device, batches, rows, columns), 2 / (1 / left + 1 / right)


def tile_share(device: DeviceSpec, batches: int, rows: int, columns: int) -> float:
    """Share of its rate at which a product of [rows, columns] runs: its tiles are whole and dealt
    out in whole waves.

    That of the best of `TILES`.
    """
    best, useful = 0.0, batches * rows * columns
    for height, width, rate in TILES:
        waves = -(-batches * -(-rows // height) * -(-columns // width) // device.compute_units)
        best = (
            max(best, rate * useful / (waves * device.compute_units * height * width))
            if useful
            else 1.0
        )
    return best


def roofline_seconds(work: Work, device: DeviceSpec, flops_per_second: float) -> float:
    """FLOPs / rate + bytes / bandwidth + one launch per kernel; 0 for no work."""
    if work.kernels == 0:
        return 0.0
    seconds = work.flops / flops_per_second + work.num_bytes / device.memory_bandwidth
    return seconds + work.kernels * device.launch_seconds


class RooflineCosts:
    """`OpCosts` of one kind of device. Everything is remembered per call; `table` must not change
    afterwards.

    compiled: pointwise ops run in chains, each chain one kernel (`PlanOptions.compile`).
    """

    def __init__(
        self, device: DeviceSpec, table: OpTable | None = None, compiled: bool = False
    ) -> None:
        self.device = device
        self.compiled = compiled
        self.table = table
        self._seconds: dict[OpCall, tuple[float, float]] = {}
        self._saved: dict[OpCall, Saved] = {}
        self._corrections: dict[str, list[_Point]] = {}
        self._mode = FakeTensorMode()

    @property
    def name(self) -> str:
        """The class and the device: a derived class with other costs has another name."""
        return f"{type(self).__qualname__} of {self.device.name}" + (
            ", compiled" if self.compiled else ""
        )

    def op_seconds(self, call: OpCall) -> tuple[float, float]:
        """(forward, backward) seconds of `call` at its own (local) shapes. Backward is 0 when
        nothing requires grad.
        """
        if call not in self._seconds:
            forward, backward = self._op_seconds(call)
            slowdown = (
                self.device.slowdown
            )  # measured times and the device's rates are those of one device alone
            self._seconds[call] = slowdown * forward, slowdown * backward
        return self._seconds[call]

    def saved(self, call: OpCall) -> Saved:
        """What autograd saves: asked of a fake-tensor run, remembered per call."""
        if call not in self._saved:
            saved = ask_saved(
                call, self._mode, on_accelerator=not self.device.is_cpu, compiled=self.compiled
            )
            if (
                self.compiled
                and call.target in CUSTOM_OPS
                and (kernels := kernels_of(call, self._mode)) is not None
            ):
                saved = replace(
                    saved, temporary_bytes=(kernels[0].fused_bytes, kernels[1].fused_bytes)
                )
            self._saved[call] = saved
        return self._saved[call]

    def optimizer_seconds(
        self, num_elements: int, itemsize: int, optimizer: OptimizerInfo
    ) -> float:
        """Time to update `num_elements` parameters of `itemsize` bytes; bound by memory, without
        launches of their own:
        fused and foreach optimizers start a few kernels for all parameters together."""
        num_bytes = num_elements * optimizer.update_bytes(itemsize)
        return self.device.slowdown * num_bytes / self.device.memory_bandwidth

    def roofline(self, call: OpCall) -> tuple[float, float]:
        """(forward, backward) seconds without measurements."""
        if call.target in CUSTOM_OPS and (kernels := kernels_of(call, self._mode)) is not None:
            return self._seconds_of(kernels[0]), self._seconds_of(kernels[1])
        device, kind = self.device, product_kind(call)
        forward, backward = op_work(call)
        rates = [reached_flops(device, call), reached_flops(device, call, backward=True)]
        if device.compute_units and kind is not None:
            forward, backward = (
                replace(w, num_bytes=PRODUCT_BYTES * w.num_bytes) for w in (forward, backward)
            )
            rates = [
                rate * share for rate, share in zip(rates, tile_shares(device, call), strict=True)
            ]
        found = (
            roofline_seconds(forward, device, rates[0]),
            roofline_seconds(backward, device, rates[1]),
        )
        return (FUSED * found[0], FUSED * found[1]) if self._fuses(call) else found

    def _fuses(self, call: OpCall) -> bool:
        return self.compiled and call.target not in CUSTOM_OPS and product_kind(call) is None

    def _seconds_of(self, kernels: Kernels) -> float:
        rest = (
            kernels.fused if self.compiled else Work(0.0, sum(kernels.single), len(kernels.single))
        )
        return roofline_seconds(rest, self.device, 1.0) + sum(
            self.roofline(product)[0] for product in kernels.products
        )

    def _op_seconds(self, call: OpCall) -> tuple[float, float]:
        forward, backward = self.roofline(call)
        if self.table is None or is_view(call):
            return forward, backward
        measured = self.table.get(self.device.name, call)
        if measured is not None:  # of the op by itself
            share = FUSED if self._fuses(call) else 1.0
            return share * measured.forward, share * measured.backward if backward else 0.0
        ratio_forward, ratio_backward = self._correction(call, forward + backward)
        return forward * ratio_forward, backward * ratio_backward

    def _correction(self, call: OpCall, seconds: float) -> tuple[float, float]:
        """measured/roofline of the op's measured calls, those counting most whose shapes are most
        like the call's: a
        part of an op runs as the whole does, where another op of its size may reach a third of its
        rate."""
        family = call_family(call)
        points = self._corrections.get(family)
        if points is None:
            points = self._corrections[family] = self._family_points(
                family, reached_flops(self.device, call)
            )
        if not points or seconds <= 0:
            return 1.0, 1.0
        own = _Point.of(call_key(call), math.log(seconds))
        ratios = np.array([(point.forward, point.backward) for point in points])  # [points, 2]
        weights = np.array([own.unlike(point) + NEAR for point in points]) ** -4
        forward, backward = np.exp(weights @ ratios / weights.sum())
        return float(forward), float(backward)

    def _family_points(self, family: str, rate: float) -> list["_Point"]:
        """Every measured call of the family."""
        assert self.table is not None
        points = []
        for key, entry in self.table.family(self.device.name, family).items():
            forward = roofline_seconds(entry.forward_work, self.device, rate)
            backward = roofline_seconds(entry.backward_work, self.device, rate)
            if forward <= 0 or entry.forward <= 0:
                continue
            ratio = (
                math.log(entry.backward / backward) if backward > 0 and entry.backward > 0 else 0.0
            )
            points.append(
                _Point.of(
                    key, math.log(forward + backward), math.log(entry.forward / forward), ratio
                )
            )
        return points


NEAR = 0.1  # of a factor e: calls as near as that count alike
OTHER_RANKS = 10.0  # factors of e that lie between calls with other numbers of dims


@dataclass(frozen=True)
class _Point:
    """A call of a family, measured or asked for."""

    ranks: tuple[int, ...]  # of its operands
    dims: np.ndarray  # logarithms of all operands' dims
    arguments: str
    size: float  # logarithm of its roofline seconds
    forward: float = 0.0  # forward, backward: logarithms of measured/roofline
    backward: float = 0.0

    @staticmethod
    def of(key: str, size: float, forward: float = 0.0, backward: float = 0.0) -> "_Point":
        """key: see `call_key`."""
        shapes, arguments = key.split(" (", 1)
        ranks = []
        dims: list[int] = []
        for shape in shapes.split():
            shape_dims = [int(dim) for dim in re.findall(r"\d+", shape)]
            ranks.append(len(shape_dims))
            dims.extend(shape_dims)
        log_dims = np.log([max(dim, 1) for dim in dims])
        return _Point(tuple(ranks), log_dims, arguments, size, forward, backward)

    def unlike(self, other: "_Point") -> float:
        """How many factors of e lie between the two, all dims together; other arguments count as
        one.
        """
        apart = NEAR * abs(self.size - other.size) + (self.arguments != other.arguments)
        return apart + (
            float(np.abs(self.dims - other.dims).sum())
            if self.ranks == other.ranks
            else OTHER_RANKS
        )
