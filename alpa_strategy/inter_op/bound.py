"""A bound of whole plans: seconds below which no stages of a job's layers can be, whatever cut, meshes and schedule.

In a step of T seconds a mesh holds layers of at most T seconds of work, so a layer that takes w seconds a step on n
devices has at least n w / T of them for itself. More where layers do not fill a mesh: with a dual feasible function f
(Fekete and Schepers 2001), the f(w / T) of what one mesh holds add up to at most 1. What all layers need at least must
not be more than there is. Messages, waiting and memory are left out, and each layer takes its best logical shape and
layouts: what is left is below every plan that the stage costs can price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alpa_strategy.inter_op.stage_costs import CostJob, RunCosts

PRECISION = 1e-5


def step_bound(job: CostJob, meshes: Sequence[tuple[int, int]], runs: Sequence[RunCosts], overhead: float) -> float:
    """Seconds of a step.

    Args:
        runs: per submesh of `meshes`, which are all that there are.
        overhead: seconds of a micro-batch in each stage beside its ops.
    """
    sizes = np.array([math.prod(mesh) for mesh in meshes], dtype=float)
    least = np.stack([r.least for r in runs], axis=1)  # [layer, submesh]
    beside = job.num_microbatches * overhead

    def is_possible(seconds: float) -> bool:
        share = least / (seconds - beside)  # of what a mesh can hold
        shares = np.stack([share, *(_rounded(share, k) for k in range(1, len(least) + 1))])  # [function, layer, mesh]
        most = shares.sum(axis=1).argmax(axis=0)  # each submesh by the function that says most about its layers
        devices = np.where(share <= 1, sizes * shares[most, :, np.arange(len(sizes))].T, np.inf)
        return float(devices.min(axis=1).sum()) <= job.cluster.num_devices

    work = float((least * sizes).min(axis=1).sum())
    if not math.isfinite(work):
        return math.inf
    low = work / job.cluster.num_devices + beside
    high = 2 * low
    while not is_possible(high):
        low, high = high, 2 * high
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def _rounded(share: np.ndarray, k: int) -> np.ndarray:
    """The dual feasible function u(k): of shares that add up to at most 1, the results do so, too."""
    parts = (k + 1) * share
    return np.where(np.abs(parts - np.round(parts)) < 1e-6, share, np.floor(parts) / k)
