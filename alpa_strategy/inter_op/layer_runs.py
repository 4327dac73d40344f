"""Runs of consecutive layers from the matrices of single layers (layer_matrix.py), and the stages
that they can be.

A run's cost follows from its layers' by min-plus products. Its candidates are the ways to store or
recompute its activations; of these the cheapest that fit stay, for growing numbers of micro-batches
in flight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alpa_strategy.inter_op.layer_matrix import LayerMatrix, Part
from alpa_strategy.ir.graph import StepGraph

# Numbers of micro-batches in flight for which the cheapest candidate stays.
IN_FLIGHT_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)

# Costs that differ by less are equal.
EQUAL = 1e-9


class RunCandidates(NamedTuple):
    """Ways to execute each run of layers as a stage; arrays [first layer, last + 1, candidate]."""

    # Per micro-batch; inf: impossible.
    seconds: np.ndarray

    # Seconds once per step.
    once: np.ndarray

    # Bytes per device, whatever is in flight.
    always: np.ndarray

    # Bytes per device and micro-batch in flight.
    in_flight: np.ndarray

    # Index of the logical shape.
    shape: np.ndarray

    # Whether the stage recomputes its activations.
    remat: np.ndarray

    # Bytes per device while the optimizer updates: nothing is in flight then.
    at_update: np.ndarray


def newly_received_shares(layers: Sequence[StepGraph]) -> list[np.ndarray]:
    """Return, per layer, [first] the share of its received bytes that no earlier layer of a run
    from `first` on receives as well.
    """
    # value -> the last layer that received it
    last_reader: dict[int, int] = {}
    shares = []
    for number, layer in enumerate(layers):
        sizes = {value: layer.values[value].num_bytes for value in layer.received}
        known = np.zeros(number)
        for value, size in sizes.items():
            known[: last_reader.get(value, -1) + 1] += size
            last_reader[value] = number
        total = max(sum(sizes.values()), 1)
        shares.append(1 - known / total)
    return shares


def compose_runs(layers: Sequence[LayerMatrix], new_shares: Sequence[np.ndarray]) -> np.ndarray:
    """Return [price, first, last + 1, part] of all runs; forward is inf if a run is impossible.

    Args:
        layers: the matrices of all layers in order.
        new_shares: of `newly_received_shares`.
    """
    num_layers = len(layers)
    num_prices = layers[0].objective.shape[0]
    runs = np.zeros((num_prices, num_layers, num_layers + 1, len(Part)))
    runs[..., Part.FORWARD] = np.inf
    for price in range(num_prices):
        # [first layer, layout at the end], and the parts of these runs.
        objective = np.zeros((0, layers[0].objective.shape[1]))
        parts = np.zeros((0, objective.shape[1], len(Part)))
        for last, layer in enumerate(layers):
            # [p, q] and [p, q, part]
            cost = layer.objective[price]
            layer_parts = layer.parts[price]

            # [first, p, q]: runs that end with the layer before, and this layer.
            extended = objective[:, :, None] + cost[None]
            # [first, q]
            best = extended.argmin(axis=1)
            columns = np.arange(cost.shape[1])
            before = parts[np.arange(last)[:, None], best]
            after = layer_parts[best, columns[None, :]]
            total = _added(before, after, new_shares[last])

            # A run that begins here may enter in any layout.
            start = cost.argmin(axis=0)
            least = np.take_along_axis(extended, best[:, None, :], axis=1)[:, 0]
            objective = np.concatenate([least, cost[start, columns][None]])
            parts = np.concatenate([total, layer_parts[start, columns][None]])

            end = objective.argmin(axis=1)
            firsts = np.arange(last + 1)
            runs[price, : last + 1, last + 1] = parts[firsts, end]
            is_impossible = ~np.isfinite(objective[firsts, end])
            runs[price, : last + 1, last + 1, Part.FORWARD][is_impossible] = np.inf
    return runs


def _added(before: np.ndarray, after: np.ndarray, new_shares: np.ndarray) -> np.ndarray:
    """Return [first, q, part] of runs with one more layer.

    Args:
        before: of the runs up to the layer. after: of the layer; its WORKING is changed in place.
        new_shares: [first] of the layer.
    """
    total = before + after
    total[..., Part.ENTERING] = before[..., Part.ENTERING]
    total[..., Part.LEAVING] = after[..., Part.LEAVING]

    # Temporary memory may take the place of gradients that are not there yet.
    after[..., Part.WORKING] -= before[..., Part.MADE]
    # Layers run one at a time: these do not add up.
    for largest in (Part.WORKING, Part.AGAIN):
        total[..., largest] = np.maximum(before[..., largest], after[..., largest])

    passed = new_shares[:, None] * after[..., Part.ENTERING]
    total[..., Part.PASSING] = before[..., Part.PASSING] + passed
    return total


def mixed_runs(cheap: np.ndarray, small: np.ndarray, share: float) -> np.ndarray:
    """Return [price, first, last + 1, part] of runs whose layers choose at two prices of memory.

    Sums are divided between the two by `share`, of layers that take the layouts of `small`. A
    maximum over layers is the larger of the two, whatever the share.
    """
    mixed = (1 - share) * cheap + share * small
    for largest in (Part.WORKING, Part.AGAIN):
        mixed[..., largest] = np.maximum(cheap[..., largest], small[..., largest])
    return mixed


def run_candidates(parts: np.ndarray, shape: int, remat: bool | None) -> list[RunCandidates]:
    """Return the ways to store or recompute the activations of each run.

    They are stored, recomputed for the whole stage, layer by layer, or layer by layer together with
    the values made of parameters alone.

    Args:
        parts: of the runs, [price, first, last + 1, part].
        shape: index of the logical shape.
        remat: whether stages recompute; None: both are possible.
    """
    # [part][first, last + 1, price]
    by_part = np.moveaxis(parts[..., : Part.MADE], (0, -1), (-1, 0))
    saved = by_part[Part.SAVED]
    working = by_part[Part.WORKING]
    entering = by_part[Part.ENTERING]
    leaving = by_part[Part.LEAVING]
    again = by_part[Part.AGAIN]
    passing = by_part[Part.PASSING]
    deriving = by_part[Part.DERIVING]
    once = by_part[Part.ONCE]
    always = by_part[Part.ALWAYS]

    num_firsts, num_lasts = once.shape[:2]
    num_layers = np.arange(num_lasts) - np.arange(num_firsts)[:, None]
    num_layers = np.maximum(1, num_layers)[..., None]
    derived = by_part[Part.DERIVED]
    # All layers but one are rid of their derived values.
    derived_of_others = derived * (1 - 1 / num_layers)

    recomputed = always + working + leaving
    # (recomputes, seconds per micro-batch to derive values of parameters, bytes always, bytes per
    # micro-batch in flight)
    options = [
        (False, 0.0, always + working, saved + leaving),
        (True, 0.0, recomputed + saved, entering),
        (True, 0.0, recomputed + again, entering + passing),
        (True, deriving, recomputed - derived_of_others + again, entering + passing),
    ]

    candidates = []
    for recomputes, derives, always_bytes, in_flight_bytes in options:
        if remat not in (None, recomputes):
            continue
        forward = by_part[Part.FORWARD] + derives
        candidate = RunCandidates(
            seconds=(1 + recomputes) * forward + by_part[Part.BACKWARD],
            once=once - derives,
            always=always_bytes,
            in_flight=in_flight_bytes,
            shape=np.full(once.shape, shape),
            remat=np.full(once.shape, recomputes),
            # What is made of parameters alone is gone when the optimizer updates them.
            at_update=always - derived + by_part[Part.UPDATE],
        )
        candidates.append(candidate)
    return candidates


def no_candidates(num_layers: int) -> RunCandidates:
    """Return one impossible candidate per run."""
    zero = np.zeros((num_layers, num_layers + 1, 1))
    return RunCandidates(
        seconds=zero + np.inf,
        once=zero,
        always=zero,
        in_flight=zero,
        shape=zero.astype(int),
        remat=zero.astype(bool),
        at_update=zero,
    )


def cheapest_candidates(
    candidates: RunCandidates, num_microbatches: int, memory_limit: float
) -> RunCandidates:
    """Return each run's cheapest candidates that fit, for growing numbers of micro-batches in
    flight.

    Args:
        memory_limit: bytes per device.
    """
    counts = {min(num_microbatches, count) for count in IN_FLIGHT_COUNTS}
    counts.add(num_microbatches)

    # [first, last + 1, candidate] seconds per step
    total = num_microbatches * candidates.seconds + candidates.once
    picks = []
    fits = []
    for count in sorted(counts):
        need = candidates.always + count * candidates.in_flight
        is_fitting = (need <= memory_limit) & (candidates.at_update <= memory_limit)
        fitting = np.where(is_fitting, total, np.inf)
        lowest = fitting.min(axis=2, keepdims=True)
        # Of equally cheap ones, the smallest.
        need_of_cheapest = np.where(fitting <= lowest * (1 + EQUAL), need, np.inf)
        picks.append(need_of_cheapest.argmin(axis=2))
        fits.append(lowest[..., 0] < np.inf)

    # [first, last + 1, count]
    index = np.stack(picks, axis=2)
    is_kept = np.stack(fits, axis=2)
    # The same candidate is listed once.
    is_kept[..., 1:] &= index[..., 1:] != index[..., :-1]
    chosen = [np.take_along_axis(array, index, axis=2) for array in candidates]
    chosen[0] = np.where(is_kept, chosen[0], np.inf)

    # Candidates that some run keeps; one stays if there are none.
    is_used = np.asarray(is_kept.any(axis=(0, 1)))
    is_used[0] |= not is_used.any()
    return RunCandidates(*[array[..., is_used] for array in chosen])
