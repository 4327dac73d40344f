"""FLOPs of a step's matmuls by dtype, and the seconds that they take at the devices' peak.

Model FLOPs utilization is these seconds over those of a step (`TaskFigures.mfu`).
"""

from collections.abc import Mapping

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.flops import op_work, product_kind
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import dtype_name

# Dtypes with less than this share of the FLOPs are neglected: a model's rotary embeddings may
# multiply in float32 whatever the rest does.
LEAST_SHARE = 0.01


def matmul_flops(step: StepGraph) -> dict[str, float]:
    """Return the FLOPs of a step's matmuls, convolutions and attention by dtype, forward and
    backward. The dtype with the most comes first.

    Recomputation does not count, and neither do dtypes of less than `LEAST_SHARE`.
    """
    flops: dict[str, float] = {}
    for op in step.ops:
        if product_kind(op.call) is None:
            continue
        forward, backward = op_work(op.call)
        # Computed in the dtype of the first operand.
        dtype = dtype_name(op.call.operands[0].dtype)
        flops[dtype] = flops.get(dtype, 0.0) + forward.flops + backward.flops

    least = LEAST_SHARE * sum(flops.values())
    by_size = sorted(flops.items(), key=lambda item: -item[1])
    return {dtype: number for dtype, number in by_size if number > least}


def seconds_at_peak(
    flops: Mapping[str, float], device: DeviceSpec, num_devices: int
) -> float | None:
    """Return the seconds of devices at their peak for FLOPs by dtype.

    Args:
        flops: of `matmul_flops`.
        num_devices: that share them.

    Returns:
        None if there are no FLOPs, or a dtype has no known peak.
    """
    peaks = dict(device.peak_flops)
    seconds = 0.0
    for dtype, number in flops.items():
        if dtype not in peaks:
            return None
        seconds += number / peaks[dtype]
    return seconds / num_devices or None
