"""A bound of whole plans: seconds below which no stages of a job's layers can be, whatever cut, meshes and schedule.

Two bounds, of which the larger counts. **Room**: in a step of T seconds a mesh holds layers of at most T seconds of
work, so a layer that takes w seconds a step on n devices has at least n w / T of them for itself. More where layers do
not fill a mesh: with a dual feasible function f (Fekete and Schepers 2001), the f(w / T) of what one mesh holds add up
to at most 1. What all layers need at least must not be more than there is.

**Waiting**: stages wait for the first micro-batch and after the last. Under 1F1B, stage m of p (of which s_m from it to
the end) is not done before

    T >= (B - s_m) t_m + sum_j t_j + sum_{j > m} t_j

as it may only run so far ahead. A mean of these over the stages, with weights that follow from their devices n_j, is

    T >= sum_j t_j (1 + (B - 1) n_j / D) / excess

with excess = 1 unless small stages come after large ones (`_excess`). So every layer takes the n with the least
t (1 + (B - 1) n / D), of those on which a step is long enough for it. With several stages a mesh all meshes are equal,
and their work alone counts: of what unequal stages wait there nothing is proved.

Messages and memory are left out, and each layer takes its best logical shape and layouts: what is left is below every
plan that the stage costs can price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from alpa_strategy.inter_op.stage_costs import CostJob, RunCosts
from alpa_strategy.schedules import SCHEDULES, why_not

PRECISION = 1e-5


def step_bound(job: CostJob, meshes: Sequence[tuple[int, int]], runs: Sequence[RunCosts], overhead: float) -> float:
    """Seconds of a step.

    Args:
        runs: per submesh of `meshes`, which are all that there are.
        overhead: seconds of a micro-batch in each stage beside its ops.
    """
    sizes = np.array([math.prod(mesh) for mesh in meshes], dtype=float)
    least = np.stack([r.least for r in runs], axis=1)  # [layer, submesh]
    each = np.stack([r.least_each for r in runs], axis=1)
    return max(_room(job, sizes, least, overhead), _waiting(job, sizes, least, each, overhead))


def _room(job: CostJob, sizes: np.ndarray, least: np.ndarray, overhead: float) -> float:
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
    return _least_possible(is_possible, work / job.cluster.num_devices + beside)


def _least_possible(is_possible: Callable[[float], bool], low: float) -> float:
    """The seconds from which on it is possible, or `low`."""
    high = 2 * low
    while math.isfinite(high) and not is_possible(high):
        low, high = high, 2 * high
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def _rounded(share: np.ndarray, k: int) -> np.ndarray:
    """The dual feasible function u(k): of shares that add up to at most 1, the results do so, too."""
    parts = (k + 1) * share
    with np.errstate(invalid="ignore"):  # where a layer cannot be, its share is infinite and stays so
        return np.where(np.abs(parts - np.round(parts)) < 1e-6, share, np.floor(parts) / k)


def _waiting(job: CostJob, sizes: np.ndarray, least: np.ndarray, each: np.ndarray, overhead: float) -> float:
    B, D, pinned = job.num_microbatches, job.cluster.num_devices, job.options.schedule
    names = [pinned] if pinned else [name for name, schedule in SCHEDULES.items() if schedule.is_searched]
    if any(SCHEDULES[name].bubble is None for name in names):  # one of the user's
        return 0.0
    found = [float(least[:, sizes == D].sum(axis=0).min(initial=np.inf)) if pinned is None else math.inf]
    if any(SCHEDULES[name].has_one_stage_per_mesh for name in names):
        share = sizes / D
        finite = np.isfinite(least)
        seconds = np.where(finite, share * least + (1 - share) * np.where(finite, each, 0.0), np.inf)

        def is_possible(step: float) -> bool:
            fits = least <= step  # a layer lies on meshes that can do its work in a step
            total = float(np.where(fits, seconds, np.inf).min(axis=1).sum())
            small = sizes[fits.any(axis=0)].min(initial=D)
            most = int(min(job.num_layers, D // small))
            return most >= B or total / _excess(most, B, small / D) <= step

        found.append(_least_possible(is_possible, float(seconds.min(axis=1).sum()) / 2))
    found += _regular(job, sizes, least, names)
    return min(found) + B * overhead if math.isfinite(min(found)) else 0.0


def _excess(most: int, num_microbatches: int, smallest: float) -> float:
    """The most, over numbers of stages up to `most` and their shares of the devices from `smallest` on, that the
    weights add up to: those of stage j are max(0, x_j (B - 1) - L_j) / (B - p + j), L_j the sum of those before it.
    A large first stage and small ones after it are the worst."""
    worst = 1.0
    for stages in range(2, most + 1):
        total = (1 - (stages - 1) * smallest) * (num_microbatches - 1)  # (B - p + j - 1) L_j
        for j in range(1, stages):
            total += max(smallest * (num_microbatches - 1), total / (num_microbatches - stages + j - 1))
        worst = max(worst, total / (num_microbatches - 1))
    return worst


def _regular(job: CostJob, sizes: np.ndarray, least: np.ndarray, names: Sequence[str]) -> Iterator[float]:
    """Several stages on each of equal meshes."""
    B, D = job.num_microbatches, job.cluster.num_devices
    for index, size in enumerate(sizes):
        ranks, rest = divmod(D, int(size))
        if rest or ranks < 2:
            continue
        for name in names:
            for v in SCHEDULES[name].stages_per_mesh:
                if v > 1 and ranks * v <= job.num_layers and why_not(name, ranks, B) is None:
                    yield float(least[:, index].sum() / ranks)
