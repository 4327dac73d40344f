"""Runs of consecutive layers from the matrices of single layers (layer_matrix.py), and the stages
that they can be.

A run's cost follows from its layers' by min-plus products; runs of equal layers are composed once.
Its candidates are the ways to store or
recompute its activations; of these the cheapest that fit stay, for growing numbers of micro-batches
in flight.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alpa_strategy.inter_op.layer_matrix import LayerMatrix, Part
from alpa_strategy.ir.graph import StepGraph

# Numbers of micro-batches in flight for which the cheapest candidate stays.
IN_FLIGHT_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)

# Costs that differ by less are equal.
EQUAL = 1e-9


class RunCandidates(NamedTuple):
    """Ways to execute each run of layers as a stage; arrays [run, candidate]."""

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

    # Seconds per micro-batch that a schedule adds under which sums do not overlap with matmuls.
    overlapped: np.ndarray


def newly_received_shares(layers: Sequence[StepGraph]) -> list[np.ndarray]:
    """Return, per layer, [first] the share of its received bytes that no earlier layer of a run
    from `first` on receives as well.

    `first` goes from 0 to the layer before; the share is 1 for a layer that receives nothing.
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


@dataclass(frozen=True)
class Runs:
    """All runs of consecutive layers, equal ones once: a model of equal layers has few that
    differ.
    """

    # [first, last + 1] the number of each run; -1 where there are no layers
    number: np.ndarray

    # [run]
    num_layers: np.ndarray

    # [price, run, part]; forward is inf if a run is impossible
    parts: np.ndarray

    def by_layers(self) -> np.ndarray:
        """Return [price, first, last + 1, part] of all runs; forward is inf if impossible."""
        num_prices, _, num_parts = self.parts.shape
        runs = np.zeros((num_prices, *self.number.shape, num_parts))
        runs[..., Part.FORWARD] = np.inf
        exists = self.number >= 0
        runs[:, exists] = self.parts[:, self.number[exists]]
        return runs

    def renumbered(self, number: np.ndarray, num_layers: np.ndarray) -> "Runs":
        """Return the same runs under other numbers, which tell at least as many apart.

        Args:
            number: as the field, with the new numbers; -1: no run.
            num_layers: [new number] layers of the runs that have it.
        """
        # [run] one of the runs of layers with this number.
        examples = np.zeros(len(num_layers), dtype=int)
        exists = number >= 0
        examples[number[exists]] = self.number[exists]
        return Runs(number, num_layers, self.parts[:, examples])


def with_equal_numbers(of_shapes: Sequence[Runs]) -> list[Runs]:
    """Return the runs on several logical shapes under new numbers, the same on all shapes: two runs
    have one number if they had one on every shape.
    """
    exists = of_shapes[0].number >= 0
    numbers = np.stack([runs.number[exists] for runs in of_shapes], axis=1)
    _, examples, number_of = np.unique(numbers, axis=0, return_index=True, return_inverse=True)
    number = np.full(exists.shape, -1)
    number[exists] = number_of.ravel()
    first, last = np.nonzero(exists)
    num_layers = (last - first)[examples]
    return [runs.renumbered(number, num_layers) for runs in of_shapes]


def compose_runs(
    matrices: Sequence[LayerMatrix], kinds: Sequence[int], new_shares: Sequence[np.ndarray]
) -> Runs:
    """Return all runs of layers: longer and longer ones, each of the one without its last layer.

    Args:
        matrices: of each kind of layer.
        kinds: of all layers in order.
        new_shares: of `newly_received_shares`.
    """
    num_layers = len(kinds)
    number = np.full((num_layers, num_layers + 1), -1)
    lengths: list[int] = []
    parts: list[np.ndarray] = []
    # Of the runs of the present length and of those that are one layer shorter, by their numbers.
    ends: dict[int, _RunEnds] = {}
    for length in range(1, num_layers + 1):
        shorter = ends
        ends = {}
        # (number of the run without its last layer, kind and share of this layer) -> number
        number_of: dict[tuple[int, int, float], int] = {}
        # Of each kind of last layer: (number, that without the layer, share).
        of_kinds: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        for first in range(num_layers - length + 1):
            last = first + length - 1
            before = int(number[first, last]) if length > 1 else -1
            share = float(new_shares[last][first]) if length > 1 else 1.0
            key = before, kinds[last], share
            if key not in number_of:
                number_of[key] = len(lengths)
                of_kinds[kinds[last]].append((len(lengths), before, share))
                lengths.append(length)
            number[first, last + 1] = number_of[key]

        for kind, extensions in of_kinds.items():
            matrix = matrices[kind]
            numbers = [number for number, _, _ in extensions]
            if length == 1:
                longer = [_first_layer(matrix)]
            else:
                runs = [shorter[before] for _, before, _ in extensions]
                shares = np.array([share for _, _, share in extensions])
                longer = _extended(runs, matrix, shares)
            ends.update(zip(numbers, longer, strict=True))
        parts += [ends[number].cheapest() for number in sorted(ends)]
    return Runs(number, np.array(lengths), np.stack(parts, axis=1))


class _RunEnds(NamedTuple):
    """A run of layers that ends in each layout.

    Attributes:
        objective: [price, layout at the end] what was minimised.
        parts: [price, layout at the end, part].
    """

    objective: np.ndarray
    parts: np.ndarray

    def cheapest(self) -> np.ndarray:
        """Return [price, part] of the run in its best layout; forward is inf if impossible."""
        prices = np.arange(len(self.objective))
        best = self.objective.argmin(axis=1)
        parts = self.parts[prices, best]
        is_impossible = ~np.isfinite(self.objective[prices, best])
        parts[is_impossible, Part.FORWARD] = np.inf
        return parts


def _first_layer(layer: LayerMatrix) -> _RunEnds:
    """Return the run of one layer, which it may enter in any layout."""
    start = layer.objective.argmin(axis=1)[:, None]
    objective = np.take_along_axis(layer.objective, start, axis=1)[:, 0]
    parts = np.take_along_axis(layer.parts, start[..., None], axis=1)[:, 0]
    return _RunEnds(objective, parts)


def _extended(
    runs: Sequence[_RunEnds], layer: LayerMatrix, new_shares: np.ndarray
) -> list[_RunEnds]:
    """Return runs with one more layer, the same for all.

    Args:
        new_shares: [run] of the layer.
    """
    # [price, run, p] and [price, run, p, part]
    objective = np.stack([run.objective for run in runs], axis=1)
    parts = np.stack([run.parts for run in runs], axis=1)
    # [price, run, p, q]
    extended = objective[..., None] + layer.objective[:, None]
    # [price, run, q]
    best = extended.argmin(axis=2)
    least = np.take_along_axis(extended, best[:, :, None], axis=2)[:, :, 0]

    prices = np.arange(len(extended))[:, None, None]
    numbers = np.arange(len(runs))[:, None]
    before = parts[prices, numbers, best]
    after = layer.parts[prices, best, np.arange(layer.objective.shape[2])]
    total = _added(before, after, new_shares)
    return [_RunEnds(least[:, i], total[:, i]) for i in range(len(runs))]


def _added(before: np.ndarray, after: np.ndarray, new_shares: np.ndarray) -> np.ndarray:
    """Return [price, run, q, part] of runs with one more layer.

    Args:
        before: of the runs up to the layer. after: of the layer; its WORKING is changed in place.
        new_shares: [run] of the layer.
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
    """Return [price, run, part] of runs whose layers choose at two prices of memory.

    Sums are divided between the two by `share`, of layers that take the layouts of `small`. A
    maximum over layers is the larger of the two, whatever the share.
    """
    mixed = (1 - share) * cheap + share * small
    for largest in (Part.WORKING, Part.AGAIN):
        mixed[..., largest] = np.maximum(cheap[..., largest], small[..., largest])
    return mixed


def run_candidates(
    parts: np.ndarray, num_layers: np.ndarray, shape: int, remat: bool | None
) -> list[RunCandidates]:
    """Return the ways to store or recompute the activations of each run.

    They are stored, recomputed for the whole stage, layer by layer, or layer by layer together with
    the values made of parameters alone.

    Args:
        parts: of the runs, [price, run, part].
        num_layers: of the runs.
        shape: index of the logical shape.
        remat: whether stages recompute; None: both are possible.
    """
    # [part][run, price]
    by_part = np.moveaxis(parts, (0, -1), (-1, 0))
    saved = by_part[Part.SAVED]
    working = by_part[Part.WORKING]
    entering = by_part[Part.ENTERING]
    leaving = by_part[Part.LEAVING]
    again = by_part[Part.AGAIN]
    passing = by_part[Part.PASSING]
    deriving = by_part[Part.DERIVING]
    once = by_part[Part.ONCE]
    always = by_part[Part.ALWAYS]

    derived = by_part[Part.DERIVED]
    # All layers but one are rid of their derived values.
    derived_of_others = derived * (1 - 1 / num_layers[:, None])

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
            overlapped=by_part[Part.OVERLAPPED],
        )
        candidates.append(candidate)
    return candidates


def no_candidates(num_runs: int) -> RunCandidates:
    """Return one impossible candidate, of infinite seconds, for each of `num_runs` runs."""
    zero = np.zeros((num_runs, 1))
    return RunCandidates(
        seconds=zero + np.inf,
        once=zero,
        always=zero,
        in_flight=zero,
        shape=zero.astype(int),
        remat=zero.astype(bool),
        at_update=zero,
        overlapped=zero,
    )


def cheapest_candidates(
    candidates: RunCandidates, num_microbatches: int, memory_limit: float
) -> RunCandidates:
    """Return each run's cheapest candidates that fit, for growing numbers of micro-batches in
    flight.

    Where a run has fewer candidates than others, or none, its seconds are inf.

    Args:
        memory_limit: bytes per device.
    """
    counts = {min(num_microbatches, count) for count in IN_FLIGHT_COUNTS}
    counts.add(num_microbatches)

    # [run, candidate] seconds per step
    total = num_microbatches * candidates.seconds + candidates.once
    picks = []
    fits = []
    for count in sorted(counts):
        need = candidates.always + count * candidates.in_flight
        is_fitting = (need <= memory_limit) & (candidates.at_update <= memory_limit)
        fitting = np.where(is_fitting, total, np.inf)
        lowest = fitting.min(axis=1, keepdims=True)
        # Of equally cheap ones, the smallest.
        need_of_cheapest = np.where(fitting <= lowest * (1 + EQUAL), need, np.inf)
        picks.append(need_of_cheapest.argmin(axis=1))
        fits.append(lowest[:, 0] < np.inf)

    # [run, count]
    index = np.stack(picks, axis=1)
    is_kept = np.stack(fits, axis=1)
    # The same candidate is listed once.
    is_kept[:, 1:] &= index[:, 1:] != index[:, :-1]
    chosen = [np.take_along_axis(array, index, axis=1) for array in candidates]
    chosen[0] = np.where(is_kept, chosen[0], np.inf)

    # Candidates that some run keeps; one stays if there are none.
    is_used = np.asarray(is_kept.any(axis=0))
    is_used[0] |= not is_used.any()
    return RunCandidates(*[array[:, is_used] for array in chosen])


def by_layers(candidates: RunCandidates, number: np.ndarray) -> RunCandidates:
    """Return the candidates of all runs, [first layer, last + 1, candidate].

    Args:
        number: [first, last + 1] of the run; -1 where there are no layers, and no candidates.
    """
    exists = number >= 0
    arrays = []
    for array in candidates:
        of_layers = np.zeros((*number.shape, array.shape[1]), dtype=array.dtype)
        of_layers[exists] = array[number[exists]]
        arrays.append(of_layers)
    arrays[0][~exists] = np.inf
    return RunCandidates(*arrays)
