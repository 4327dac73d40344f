"""The stage DP: runs of layers on submeshes that cover the cluster, for the least time of a step (Alpa, equation 4).

    minimise  fill * sum_i t_i + max_i (run * t_i + steps * g_i)

over stages i with t_i the seconds of a micro-batch (the transfer to the next stage included), g_i the seconds once per
step, and the schedule's `fill` and `run` (see schedules.Terms; 1F1B: fill = 1, run = B - 1). Alpa enumerates
t_max; here the
bound is on the whole second term, and only thresholds that can still win are tried. Exact, on plain numpy tables.

That takes messages for work of their sender. They run beside it, but a stage can do without them only as far as it has
other micro-batches: under 1F1B any n stages in a row and the n - 1 boundaries between them take n micro-batches' time
for one micro-batch. With `sender_share` c below 1, w_i the seconds of a boundary both ways and k_i the micro-batches
alive in stage i,

    max_i max(t_i + c w_i, w_i / 2, sum_{j >= i} (t_j + w_j) / k_i)

takes the place of max_i t_i: c = 1/2 is the case of two equal stages, the sums are those of the DP. Which c describes a
pipeline best depends on where its slow links are; the clock decides (candidates.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.schedules import Terms

GRID = 1e-3  # relative distance of the round trips' seconds that are tried


@dataclass(frozen=True)
class StageTables:
    """What every stage would cost. L layers, m submeshes, c candidates (logical shapes, remat, memory thrift, ...).

    Attributes:
        num_devices: [m] devices of a submesh.
        seconds: [L, L + 1, m, c] seconds of one micro-batch of layers [first, last); inf where there is no such stage.
        once_seconds: same shape, seconds once per step.
        bytes_always, bytes_in_flight: same shape; a stage needs always + in_flight * (micro-batches alive).
        boundary: [L + 1, m, m] seconds of a micro-batch's transfer, both ways, at the cut before a layer, from a stage
            on the first submesh to one on the second; charged to the sender.
        fits: [devices left, m] whether a stage may start where so many devices are left (its own included).
        nearby: like `boundary`, where both stages end and begin inside one node; None: the same.
        crosses: [devices left] whether a stage that starts where so many devices are left starts on another node than
            the one before it ended on.
    """

    num_devices: np.ndarray
    seconds: np.ndarray
    once_seconds: np.ndarray
    bytes_always: np.ndarray
    bytes_in_flight: np.ndarray
    boundary: np.ndarray | None = None
    fits: np.ndarray | None = None
    nearby: np.ndarray | None = None
    crosses: np.ndarray | None = None

    def wire(self, cut: int, source: int, target: int, left: int) -> float:
        """Seconds of the transfer at a cut between stages on two submeshes, the second with `left` devices left."""
        table = self.boundary
        if self.nearby is not None and self.crosses is not None and not self.crosses[left]:
            table = self.nearby
        return 0.0 if table is None else float(table[cut, source, target])


@dataclass(frozen=True)
class StageRange:
    """One chosen stage: layers [first, last) on submesh `submesh` by candidate `candidate` of the tables."""

    first: int
    last: int
    submesh: int
    candidate: int


@dataclass(frozen=True)
class StageChoice:
    """The best stages, in pipeline order; `seconds` is the objective, `bottleneck` its second term."""

    stages: tuple[StageRange, ...]
    seconds: float
    bottleneck: float


def solve_stages(
    tables: StageTables,
    num_devices: int,
    terms: Terms,
    in_flight: Sequence[int],
    memory_limit: float = float("inf"),
    num_stages: Sequence[int] | None = None,
    steps: float = 1.0,
    tolerance: float = 0.0,
    known: float = float("inf"),
    sender_share: float = 1.0,
) -> StageChoice | None:
    """The best stages that use exactly `num_devices`, or None where none is below `known` seconds.

    Args:
        in_flight: micro-batches alive in a stage with s stages from it to the end, at index s - 1; its length bounds
            the number of stages.
        num_stages: allowed numbers of stages (default: any up to that bound).
        steps: weight of `once_seconds` (stages per mesh).
        tolerance: relative distance from the optimum at which searching on is not worth the time.
        sender_share: see above; below 1 the optimum is found up to `GRID` more.
    """
    search = _Search(tables, num_devices, terms, in_flight, memory_limit, num_stages, steps, sender_share)
    best: StageChoice | None = None
    limit = known
    intervals = [(0, len(search.levels) - 1)]
    while intervals:
        low, high = intervals.pop()
        if low > high or search.levels[low] + search.least_sum(low, high) >= limit * (1 - tolerance):
            continue
        found = search.solve(search.levels[high])
        if found is None:
            continue
        if found.seconds < limit:
            best, limit = found, found.seconds
        below = int(np.searchsorted(search.levels, found.bottleneck * (1 - 1e-12))) - 1
        high = min(high - 1, below)
        search.note(low, high, found.seconds - found.bottleneck)
        if low > high or search.levels[low] + found.seconds - found.bottleneck >= limit * (1 - tolerance):
            continue
        middle = (low + high) // 2
        intervals += [(middle + 1, high), (low, middle)]
    return best


class _Search:
    """The tables brought into the DP's order, and the DP for one threshold."""

    def __init__(
        self,
        tables: StageTables,
        num_devices: int,
        terms: Terms,
        in_flight: Sequence[int],
        memory_limit: float,
        num_stages: Sequence[int] | None,
        steps: float,
        sender_share: float,
    ) -> None:
        self.tables, self.num_devices, self.terms = tables, num_devices, terms
        self.num_layers, _, self.num_submeshes, _ = tables.seconds.shape
        self.max_stages = min(len(in_flight), self.num_layers)
        allowed = range(1, self.max_stages + 1) if num_stages is None else num_stages
        self.allowed = sorted({s for s in allowed if 1 <= s <= self.max_stages})
        self.max_stages = max(self.allowed, default=0)
        L, m = self.num_layers, self.num_submeshes
        boundary = np.zeros((L + 1, m, m)) if tables.boundary is None else tables.boundary
        everywhere = np.ones(num_devices + 1, dtype=bool)
        wires = [(boundary, everywhere)]
        if tables.nearby is not None and tables.crosses is not None:
            wires = [(boundary, tables.crosses), (tables.nearby, ~tables.crosses)]
        # Per submesh: next submeshes with equal boundary columns act as one, where so many devices are left.
        self.classes: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in range(m)]
        for a in range(m):
            for table, where in wires:
                columns, inverse = np.unique(table[:, a, :], axis=1, return_inverse=True)
                for k in range(columns.shape[1]):
                    self.classes[a].append((columns[:, k], np.flatnonzero(inverse.ravel() == k), where))
        self.fits = np.ones((num_devices + 1, m), dtype=bool) if tables.fits is None else tables.fits
        self.in_flight = list(in_flight)
        self.memory_limit, self.steps, self.sender_share = memory_limit, steps, sender_share
        finite = np.isfinite(tables.seconds)
        values = [self._second_term(tables.seconds, tables.once_seconds)[:, L][finite[:, L]]]
        for a in range(m):
            for column, _, _ in self.classes[a]:
                busy = self._busy(tables.seconds[:, :, a], column)
                values.append(self._second_term(busy, tables.once_seconds[:, :, a])[:, :L][finite[:, :L, a]])
        self.levels = np.unique(np.concatenate(values))
        if sender_share < 1 and self.levels.size:  # a round trip may take any time between these, or longer
            low = max(float(self.levels[0]), 1e-9)
            high = float(self.levels[-1]) + terms.run * float(boundary.max(initial=0.0))
            steps_up = np.arange(np.log(max(high / low, 1.0)) / np.log1p(GRID) + 2)
            self.levels = np.union1d(self.levels, low * (1 + GRID) ** steps_up)
        self._bounds: list[tuple[int, int, float]] = []

    def _second_term(self, seconds: np.ndarray, once: np.ndarray) -> np.ndarray:
        """Of each stage. One way to add it up: to the last bit, a stage is not above its own level."""
        finite = np.isfinite(seconds)
        return self.terms.run * np.where(finite, seconds, 0.0) + self.steps * np.where(finite, once, 0.0)

    def note(self, low: int, high: int, least: float) -> None:
        """Remember that solutions with a bottleneck among levels [low, high] have at least this first term."""
        self._bounds.append((low, high, least))
        self._bounds = self._bounds[-64:]

    def least_sum(self, low: int, high: int) -> float:
        return max((least for a, b, least in self._bounds if a <= low and high <= b), default=0.0)

    def solve(self, threshold: float) -> StageChoice | None:
        """The least first term among choices whose bottleneck is at most `threshold`.

        F[s][k, d, a]: layers k.. in s stages on d devices, the first of them on submesh a.
        """
        if not self.allowed:
            return None
        L, m, D = self.num_layers, self.num_submeshes, self.num_devices
        after = np.full((L + 1, D + 1, m), np.inf)
        came: list[np.ndarray] = []  # per s: [k, d, a] -> l * m + next submesh
        best = (np.inf, 0, 0)  # (first term, stages, first submesh)
        for s in range(1, self.max_stages + 1):
            now = np.full((L + 1, D + 1, m), np.inf)
            origin = np.zeros((L, D + 1, m), dtype=np.int32)
            for a in range(m):
                size = int(self.tables.num_devices[a])
                if size > D:
                    continue
                if s == 1:
                    if self.fits[size, a]:
                        now[:L, size, a] = self._cheapest(s, a, None, threshold)[0][:, L]
                    continue
                for column, following, where in self.classes[a]:
                    rest = after[:L, : D + 1 - size, following]  # [l, d left, next]
                    rest = np.where(where[None, : D + 1 - size, None], rest, np.inf)
                    if not np.isfinite(rest).any():
                        continue
                    cost, _ = self._cheapest(s, a, column, threshold)
                    which = rest.argmin(axis=2)
                    rest = np.take_along_axis(rest, which[..., None], axis=2)[..., 0]
                    rows, columns = np.isfinite(cost).any(axis=1), np.isfinite(rest).any(axis=1)
                    if not rows.any() or not columns.any():
                        continue
                    live_rows, live = np.flatnonzero(rows), np.flatnonzero(columns)
                    joined = cost[np.ix_(live_rows, live)][:, :, None] + rest[live][None]  # [k, l, d]
                    cut = joined.argmin(axis=1)
                    value = np.take_along_axis(joined, cut[:, None, :], axis=1)[:, 0]
                    value = np.where(self.fits[size:, a][None, :], value, np.inf)
                    target = now[live_rows, size:, a]
                    better = value < target
                    now[live_rows, size:, a] = np.where(better, value, target)
                    devices = np.arange(D + 1 - size)[None, :]
                    code = live[cut] * m + following[which[live[cut], devices]]
                    origin[live_rows, size:, a] = np.where(better, code, origin[live_rows, size:, a])
            if self.sender_share < 1:
                trips = np.where(np.isfinite(now), now, 0.0) / (self.terms.fill * self.in_flight[s - 1])
                now[self.terms.run * trips > threshold] = np.inf
            came.append(origin)
            after = now
            if s in self.allowed:
                best = min(best, (float(now[0, D].min()), s, int(now[0, D].argmin())))
        if not np.isfinite(best[0]):
            return None
        return self._read(came, best[1], best[2], threshold)

    def _cheapest(self, s: int, a: int, column: np.ndarray | None, threshold: float) -> tuple[np.ndarray, np.ndarray]:
        """[first, last]: fill * seconds of the cheapest fitting candidate on submesh a, and which it is."""
        t = self.tables
        need = t.bytes_always[:, :, a] + self.in_flight[s - 1] * t.bytes_in_flight[:, :, a]
        seconds = t.seconds[:, :, a]
        finite = np.isfinite(seconds) & (need <= self.memory_limit)
        busy = seconds if column is None else self._busy(seconds, column)
        good = finite & (self._second_term(busy, t.once_seconds[:, :, a]) <= threshold)
        if column is not None:
            seconds = seconds + column[None, :, None]
        cost = np.where(good, self.terms.fill * np.where(finite, seconds, 0.0), np.inf)
        if column is not None:
            cost[:, self.num_layers] = np.inf
        which = cost.argmin(axis=2)
        cost = np.take_along_axis(cost, which[..., None], axis=2)[..., 0]
        return (cost if column is None else cost[:, : self.num_layers]), which

    def _busy(self, seconds: np.ndarray, column: np.ndarray) -> np.ndarray:
        """[first, last, candidate]: seconds of a micro-batch in a stage, or of its messages after it."""
        wire = column[None, :, None]
        return np.maximum(seconds + self.sender_share * wire, wire / 2)

    def _read(self, came: list[np.ndarray], count: int, submesh: int, threshold: float) -> StageChoice:
        t, m = self.tables, self.num_submeshes
        first, devices = 0, self.num_devices
        stages: list[StageRange] = []
        bottleneck = 0.0
        after: list[float] = []  # per stage, seconds of a micro-batch in it and on the way to the next
        for s in range(count, 0, -1):
            column, last, following = None, self.num_layers, -1
            if s > 1:
                last, following = divmod(int(came[s - 1][first, devices, submesh]), m)
                left = devices - int(t.num_devices[submesh])
                column = next(c for c, members, where in self.classes[submesh] if following in members and where[left])
            _, which = self._cheapest(s, submesh, column, threshold)
            candidate = int(which[first, last])
            seconds = float(t.seconds[first, last, submesh, candidate])
            wire = 0.0 if column is None else float(column[last])
            after.append(seconds + wire)
            busy = max(seconds + self.sender_share * wire, wire / 2)
            once = float(t.once_seconds[first, last, submesh, candidate])
            bottleneck = max(bottleneck, self.terms.run * busy + self.steps * once)
            stages.append(StageRange(first, last, submesh, candidate))
            devices -= int(t.num_devices[submesh])
            first, submesh = last, following
        if self.sender_share < 1:
            trips = [sum(after[i:]) / self.in_flight[count - i - 1] for i in range(count)]
            bottleneck = max(bottleneck, self.terms.run * max(trips))
        return StageChoice(tuple(stages), self.terms.fill * sum(after) + bottleneck, bottleneck)


def check_choice(choice: StageChoice | None, what: str) -> StageChoice:
    """PlanError where there is no choice."""
    if choice is None:
        raise PlanError(f"no stages fit {what}", "use more devices, other num_stages, or raise memory_limit")
    return choice
