"""FLOPs of a step's matmuls by dtype, and the seconds that they take at the devices' peak.

Model FLOPs utilization is these seconds over those of a step (`TaskFigures.mfu`).
"""

from collections.abc import Mapping

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.flops import op_work, product_kind
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import dtype_name
from alpa_strategy.ir.task_figures import StepFlops

# Dtypes with less than this share of the FLOPs are neglected: a model's rotary embeddings may
# multiply in float32 whatever the rest does.
LEAST_SHARE = 0.01


def step_flops(step: StepGraph) -> StepFlops:
    """Return the FLOPs of a step's matmuls, convolutions and attention.

    Recomputation does not count, and neither do dtypes of less than `LEAST_SHARE`.
    """
    forward_of: dict[str, float] = {}
    backward_of: dict[str, float] = {}
    attention_of: dict[str, float] = {}
    for op in step.ops:
        kind = product_kind(op.call)
        if kind is None:
            continue
        forward, backward = op_work(op.call)
        # Computed in the dtype of the first operand.
        dtype = dtype_name(op.call.operands[0].dtype)
        forward_of[dtype] = forward_of.get(dtype, 0.0) + forward.flops
        backward_of[dtype] = backward_of.get(dtype, 0.0) + backward.flops
        if kind == "attention":
            both = forward.flops + backward.flops
            attention_of[dtype] = attention_of.get(dtype, 0.0) + both

    flops = {dtype: forward_of[dtype] + backward_of[dtype] for dtype in forward_of}
    least = LEAST_SHARE * sum(flops.values())
    by_size = sorted(flops.items(), key=lambda item: -item[1])
    by_dtype = {dtype: number for dtype, number in by_size if number > least}
    return StepFlops(
        forward=sum(forward_of[dtype] for dtype in by_dtype),
        backward=sum(backward_of[dtype] for dtype in by_dtype),
        attention=sum(attention_of.get(dtype, 0.0) for dtype in by_dtype),
        by_dtype=by_dtype,
    )


def seconds_at_peak(
    flops: Mapping[str, float], device: DeviceSpec, num_devices: int
) -> float | None:
    """Return the seconds of devices at their peak for FLOPs by dtype.

    Args:
        flops: `by_dtype` of `step_flops`.
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
