"""Seconds that a step's products take at a device's peak: what model FLOPs utilization is based on.

MFU is their share of the measured time (PaLM, arXiv:2204.02311, appendix B).
"""

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cost.flops import op_work, product_kind
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import OpCall
from alpa_strategy.ir.per_rank import PerRank


def seconds_at_peak(step: StepGraph, device: DeviceSpec, num_devices: int) -> float | None:
    """Return the seconds of devices at their peak for all products of a step, in both directions.

    Recomputation does not count.

    Args:
        num_devices: that share the step.

    Returns:
        None if a product's dtype has no known peak.
    """
    peaks = dict(device.peak_flops)
    seconds = 0.0
    for op in step.ops:
        if _product_kind(op.call) is None:
            continue
        forward, backward = op_work(op.call)
        peak = peaks.get(_dtype_of(op.call))
        if peak is None:
            return None
        seconds += (forward.flops + backward.flops) / peak
    return seconds / num_devices


def _product_kind(call: OpCall) -> str | None:
    inner = call.target.inner if isinstance(call.target, PerRank) else call
    return product_kind(inner)


def _dtype_of(call: OpCall) -> str:
    """Return the name of the dtype in which a product is computed: that of its first operand."""
    return str(call.operands[0].dtype).removeprefix("torch.")
