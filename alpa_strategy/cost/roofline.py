"""Roofline of one op: FLOPs / rate + bytes / bandwidth + launches, from a device's figures alone.

The sum, not the larger of the two. Kernels load their first tiles before they compute, store the
last ones after, and read operands again for every wave of tiles. So small matmuls reach less than
large ones (of fp16 on a V100: 83 TFLOP/s at 8192, as measured, 80 at 4096, 57 at 1024).
"""

import torch

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.flops import Work, product_kind, product_shape
from alpa_strategy.ir.op import OpCall, dtype_name

# For a dtype whose peak a device does not name: the first of these that it names. bfloat16 does not
# fall back to float16: devices without bfloat16 units (V100) emulate it in float32.
FALLBACKS: dict[str, tuple[str, ...]] = {
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float32",),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("float8_e4m3fn", "bfloat16", "float16", "float32"),
    "float32": ("tfloat32", "float64", "bfloat16", "float16"),
}

# Tiles in which kernels compute a matmul (rows, columns), and the share of the largest one's rate
# that each reaches (NVIDIA, Matrix Multiplication Background User's Guide, sections 2 and 3: tile
# and wave quantization).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (64, 64, 0.6))

# The next three are fitted on published runs (docs/published.md). The first two are for devices
# whose number of processors is known.

# Share of a matmul's memory traffic that its compute does not hide.
PRODUCT_BYTES = 0.5
# Width at which an attention head reaches half of the rate of wide ones.
HALF_WIDTH = 15
# Share of the time of pointwise ops that remains when they are compiled, on any device.
FUSED = 0.5

# Width of the attention heads whose rate is in the cluster file.
REFERENCE_WIDTH = 128


def rated_dtype(device: DeviceSpec, name: str) -> str:
    """Return the dtype whose FLOP/s `device` names, to take for operands of the dtype `name`.

    It is `name` itself, else the first of its `FALLBACKS` that the device names (float32 for a
    dtype without any), else the slowest one of the device.
    """
    peaks = dict(device.peak_flops)
    for candidate in (name, *FALLBACKS.get(name, ("float32",))):
        if candidate in peaks:
            return candidate
    return min(peaks, key=peaks.__getitem__)


def peak_flops(device: DeviceSpec, dtype: torch.dtype) -> float:
    """Return the FLOP/s of `device` for operands of `dtype`.

    A dtype that `device` does not name has those of `rated_dtype`, float64 half of float32's.
    """
    name = dtype_name(dtype)
    rated = rated_dtype(device, name)
    peak = dict(device.peak_flops)[rated]
    return peak / 2 if (name, rated) == ("float64", "float32") else peak


def reached_flops(device: DeviceSpec, call: OpCall, backward: bool = False) -> float:
    """Return the FLOP/s that `call` reaches when memory does not bind it.

    Its dtype's peak times the efficiency of its kind. Matmuls, convolutions and attention run at
    the dtype of their first operand; everything else computes in float32 or wider.
    """
    dtype = call.operands[0].dtype if call.operands else torch.float32
    kind = product_kind(call)
    if kind is None and dtype != torch.float64:
        dtype = torch.float32
    if backward and kind == "attention":
        kind = "attention_backward"
    efficiency = device.efficiency_of(kind or "matmul", dtype_name(dtype))
    return peak_flops(device, dtype) * efficiency


def tile_shares(device: DeviceSpec, call: OpCall) -> tuple[float, float]:
    """Return the shares of its rate that a matmul or attention reaches, (forward, backward).

    `device.compute_units` must be known. 1 for other ops.
    """
    if product_kind(call) == "attention":
        width = call.operands[0].shape[-1]
        reached = width / (width + HALF_WIDTH)
        # Relative to heads of the reference width.
        share = reached * (REFERENCE_WIDTH + HALF_WIDTH) / REFERENCE_WIDTH
        return share, share

    shape = product_shape(call)
    if shape is None:
        return 1.0, 1.0
    batches, rows, inner, columns = shape
    forward = tile_share(device, batches, rows, columns)
    # The gradients of both operands are matmuls of their own shapes, of as many FLOPs.
    left = tile_share(device, batches, rows, inner)
    right = tile_share(device, batches, inner, columns)
    return forward, 2 / (1 / left + 1 / right)


def tile_share(device: DeviceSpec, batches: int, rows: int, columns: int) -> float:
    """Return the share of its rate that a matmul with a result [batches, rows, columns] reaches.

    Kernels compute full tiles, and each wave of tiles takes as long as a full one. The best of
    `TILES` counts.
    """
    useful = batches * rows * columns
    if not useful:
        return 1.0
    best = 0.0
    for height, width, rate in TILES:
        num_tiles = batches * -(-rows // height) * -(-columns // width)
        waves = -(-num_tiles // device.compute_units)
        computed = waves * device.compute_units * height * width
        best = max(best, rate * useful / computed)
    return best


def roofline_seconds(work: Work, device: DeviceSpec, flops_per_second: float) -> float:
    """Return FLOPs / rate + bytes / bandwidth + one launch per kernel, in seconds; 0 for no
    work.
    """
    if work.kernels == 0:
        return 0.0
    seconds = work.flops / flops_per_second + work.num_bytes / device.memory_bandwidth
    return seconds + work.kernels * device.launch_seconds
