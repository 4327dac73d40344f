"""The stage DP: runs of layers on submeshes that cover the cluster, for the least time of a step
(Alpa, equation 4).

    minimise  warmup * sum_i t_i + max_i (steady * t_i + steps * g_i)

docs/formulas.md#inter-op explains the terms, and how messages count that overlap with their
sender's work (`sender_share`). Alpa enumerates t_max; here the bound is on the full second term,
and only thresholds that can still win are tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alpa_strategy.schedules import PipelineLatency

# Relative distance of the round trips' seconds that are tried.
GRID = 1e-3


@dataclass(frozen=True)
class StageTables:
    """The costs of all possible stages: L layers, m submeshes, c candidates (logical shapes,
    recomputation, prices of memory, ...).
    """

    # [m] devices of a submesh
    num_devices: np.ndarray
    # [L, L + 1, m, c] seconds of one micro-batch of layers [first, last); inf where there is no
    # such stage
    seconds: np.ndarray

    # Same shape, seconds once per step.
    once_seconds: np.ndarray
    # bytes_always, bytes_in_flight: same shape; a stage needs always + in_flight * (micro-batches
    # alive)
    bytes_always: np.ndarray
    bytes_in_flight: np.ndarray
    # [link, L + 1, m, m] seconds of a micro-batch's transfer, both ways, at the cut before a layer,
    # from a stage on the first submesh to one on the second; charged to the sender
    boundary: np.ndarray
    # [devices left, m] whether a stage may start with these devices left (its own included)
    fits: np.ndarray
    # [devices left] the index of the link between a stage that starts with these devices left and
    # the stage before it
    link_at: np.ndarray
    # [L, L + 1] the place at which layers [first, last) are pinned to start, -1 where they are not,
    # and [devices left] that at which a stage does; None: nothing is pinned
    starts: tuple[np.ndarray, np.ndarray] | None = None
    # [L, L + 1, m, c] bytes while the optimizer updates, with nothing in flight; stages for which
    # that is too much have no seconds
    bytes_at_update: np.ndarray = field(default_factory=lambda: np.zeros((1, 1, 1, 1)))
    # [L, L + 1, m, c] micro-batches alive with which a stage was solved and does not fit, whatever
    # its bytes here say; inf where none was; None: nowhere
    unfit_alive: np.ndarray | None = None

    def fits_memory(self, at: Any, alive: float, memory_limit: float) -> np.ndarray:
        """Whether stages fit.

        Args:
            at: an index of the arrays.
            alive: micro-batches in flight.
            memory_limit: bytes of a device.
        """
        need = self.bytes_always[at] + alive * self.bytes_in_flight[at]
        is_fitting = need <= memory_limit
        if self.unfit_alive is not None:
            is_fitting &= alive < self.unfit_alive[at]
        return np.asarray(is_fitting)

    def may_begin(self, first: int, last: int, submesh: int, left: int) -> bool:
        """Whether layers [first, last) may be a stage on a submesh with `left` devices
        left.
        """
        return bool(self.fits[left, submesh] and not self.misplaced((first, last), left))

    def misplaced(self, layers: Any, left: Any) -> np.ndarray:
        """Whether layers at (first, last) are pinned to start at another device than the one
        with `left` devices left.
        """
        if self.starts is None:
            return np.array(False)
        pinned = self.starts[0][layers]
        return (pinned >= 0) & (pinned != self.starts[1][left])

    def wire(self, cut: int, source: int, target: int, left: int) -> float:
        """Return the seconds of the transfer at a cut between stages on two submeshes.

        Args:
            left: devices from the second stage on.
        """
        return float(self.boundary[self.link_at[left], cut, source, target])


@dataclass(frozen=True)
class StageRange:
    """A chosen stage: layers [first, last) on submesh `submesh`, by candidate `candidate` of the
    tables.
    """

    first: int
    last: int
    submesh: int
    candidate: int


@dataclass(frozen=True)
class StageChoice:
    """The best stages, in pipeline order; `seconds` is the objective, `bottleneck` its second
    term.
    """

    stages: tuple[StageRange, ...]
    seconds: float
    bottleneck: float


def solve_stages(
    tables: StageTables,
    num_devices: int,
    latency: PipelineLatency,
    in_flight: Sequence[int],
    memory_limit: float = float("inf"),
    num_stages: Sequence[int] | None = None,
    steps: float = 1.0,
    tolerance: float = 0.0,
    known: float = float("inf"),
    sender_share: float = 1.0,
) -> StageChoice | None:
    """Return the best stages that use exactly `num_devices`; None if none is below `known` seconds.

    Args:
        latency: of the schedule.
        in_flight: at index s - 1: micro-batches in flight in a stage with s stages from it to the
            end. Its length is the most stages.
        memory_limit: bytes per device.
        num_stages: allowed numbers of stages; None: all.
        steps: weight of `once_seconds` (stages per mesh).
        tolerance: relative distance from the optimum at which the search ends.
        sender_share: see the module's docstring; below 1 the result is within `GRID` of the
            optimum.
    """
    search = _Search(
        tables, num_devices, latency, in_flight, memory_limit, num_stages, steps, sender_share
    )
    best: StageChoice | None = None
    limit = known
    # Of levels of the bottleneck, and a bound of the first term there.
    intervals = [(0, len(search.levels) - 1, 0.0)]
    while intervals:
        low, high, least = intervals.pop()
        if low > high or search.levels[low] + least >= limit * (1 - tolerance):
            continue
        choice = search.solve(search.levels[high])
        # Not even with the largest bottleneck of the interval.
        if choice is None:
            continue
        if choice.seconds < limit:
            best, limit = choice, choice.seconds
        below = int(np.searchsorted(search.levels, choice.bottleneck * (1 - 1e-12))) - 1
        high, least = min(high - 1, below), max(least, choice.seconds - choice.bottleneck)
        middle = (low + high) // 2
        intervals += [(middle + 1, high, least), (low, middle, least)]
    return best


@dataclass(frozen=True)
class StageOption:
    """The stages on one submesh that some next submeshes may follow, or none; arrays [c, first,
    last].
    """

    # [last] seconds of the messages to the next stage, both ways; 0 after the last stage
    column: np.ndarray

    # Submeshes of the next stage.
    following: np.ndarray

    # [devices left] whether the next stage may start there
    left: np.ndarray

    # Of the objective, inf where there is no such stage.
    first_term: np.ndarray

    # Of each stage
    second_term: np.ndarray


@dataclass(eq=False)
class _Search:
    """The tables in the DP's order of axes, and the DP for one threshold. Attributes: as the
    arguments of `solve_stages`.
    """

    tables: StageTables
    num_devices: int
    latency: PipelineLatency
    in_flight: Sequence[int]
    memory_limit: float
    num_stages: Sequence[int] | None
    steps: float
    sender_share: float

    def __post_init__(self) -> None:
        tables = self.tables
        self.num_layers, _, self.num_submeshes, _ = tables.seconds.shape
        most = min(len(self.in_flight), self.num_layers)
        allowed = range(1, most + 1) if self.num_stages is None else self.num_stages
        self.allowed = sorted({s for s in allowed if 1 <= s <= most})
        self.max_stages = max(self.allowed, default=0)
        self._wires = [
            (table, tables.link_at == link) for link, table in enumerate(tables.boundary)
        ]
        everywhere = np.ones(self.num_devices + 1, dtype=bool)
        self._fitting: dict[tuple[int, int], np.ndarray] = {}
        self.last = [
            self._way(a, None, np.zeros(0, dtype=int), everywhere)
            for a in range(self.num_submeshes)
        ]
        self.ways = [list(self._ways(a)) for a in range(self.num_submeshes)]
        options = [
            option
            for a, before_another in enumerate(self.ways)
            for option in (self.last[a], *before_another)
        ]
        values = [option.second_term[np.isfinite(option.first_term)] for option in options]
        self.levels = np.unique(np.concatenate(values))
        # A round trip may take any time between these, or longer.
        if self.sender_share < 1 and self.levels.size:
            low = max(float(self.levels[0]), 1e-9)
            high = float(self.levels[-1]) + self.latency.steady * float(
                tables.boundary.max(initial=0.0)
            )
            steps_up = np.arange(np.log(max(high / low, 1.0)) / np.log1p(GRID) + 2)
            self.levels = np.union1d(self.levels, low * (1 + GRID) ** steps_up)

    def _ways(self, a: int) -> Iterator[StageOption]:
        """Yield the stages on submesh `a` before another one. Next submeshes with equal messages
        are one option.
        """
        for table, left in self._wires:
            columns, inverse = np.unique(table[:, a, :], axis=1, return_inverse=True)
            for k in range(columns.shape[1]):
                yield self._way(a, columns[:, k], np.flatnonzero(inverse.ravel() == k), left)

    def _way(
        self, a: int, column: np.ndarray | None, following: np.ndarray, left: np.ndarray
    ) -> StageOption:
        """Return the costs of stages that send along boundary option `a`.

        Args:
            a: index of the boundary in the tables.
            column: [layer] seconds of a transfer to the next stage; None for the last stage.
            following: submeshes of the next stage.
            left: whether a number of devices may remain for it.
        """
        seconds = np.ascontiguousarray(self.tables.seconds[:, :, a].transpose(2, 0, 1))
        once = self.tables.once_seconds[:, :, a].transpose(2, 0, 1)
        finite = np.isfinite(seconds)
        finite[..., self.num_layers] &= column is None
        finite[..., : self.num_layers] &= column is not None
        wire = np.zeros(self.num_layers + 1) if column is None else column
        seconds = np.where(finite, seconds, 0.0)
        busy = np.where(finite, np.maximum(seconds + self.sender_share * wire, wire / 2), 0.0)
        # One way to add it up: to the last bit, a stage is not above its own level.
        second = self.latency.steady * busy + self.steps * np.where(finite, once, 0.0)
        return StageOption(
            wire,
            following,
            left,
            np.where(finite, self.latency.warmup * (seconds + wire), np.inf),
            second,
        )

    def _fits_memory(self, s: int, a: int) -> np.ndarray:
        """Return [c, first, last] whether stages on submesh `a` fit, `s` stages from them to the
        end.
        """
        alive = self.in_flight[s - 1]
        if (alive, a) not in self._fitting:
            is_fitting = self.tables.fits_memory(np.s_[:, :, a], alive, self.memory_limit)
            self._fitting[alive, a] = np.ascontiguousarray(is_fitting.transpose(2, 0, 1))
        return self._fitting[alive, a]

    def solve(self, threshold: float) -> StageChoice | None:
        """Return the stages with the least first term among those whose bottleneck is at most
        `threshold`; None if there are none.

        F[s][k, d, a] is the least first term of layers k to the end in s stages on d devices, the
        first of them on submesh a.
        """
        if not self.allowed:
            return None
        num_layers = self.num_layers
        num_submeshes = self.num_submeshes
        num_devices = self.num_devices
        # F[s - 1]
        after = np.full((num_layers + 1, num_devices + 1, num_submeshes), np.inf)
        # Of each s, [k, d, a]: next stage's first layer * num_submeshes + its submesh.
        origins: list[np.ndarray] = []
        # (first term, number of stages, first submesh)
        best = (np.inf, 0, 0)
        # Of each submesh and option, [c, first, last]: the first term of stages that stay below the
        # threshold.
        below: list[list[np.ndarray]] = []
        for options in self.ways:
            terms = []
            for option in options:
                is_below = option.second_term <= threshold
                terms.append(np.where(is_below, option.first_term, np.inf))
            below.append(terms)

        for s in range(1, self.max_stages + 1):
            # F[s]
            now = np.full((num_layers + 1, num_devices + 1, num_submeshes), np.inf)
            origin = np.zeros((num_layers, num_devices + 1, num_submeshes), dtype=np.int32)
            for a in range(num_submeshes):
                if self.tables.num_devices[a] > num_devices:
                    continue
                if s == 1:
                    self._add_last_stage(now, a, threshold)
                else:
                    self._add_stage_before(now, origin, after, s, a, below[a])
            if self.sender_share < 1:
                # The round trip of a micro-batch through all stages from here on.
                finite = np.where(np.isfinite(now), now, 0.0)
                trips = finite / (self.latency.warmup * self.in_flight[s - 1])
                now[self.latency.steady * trips > threshold] = np.inf
            origins.append(origin)
            after = now
            if s in self.allowed:
                of_all = now[0, num_devices]
                best = min(best, (float(of_all.min()), s, int(of_all.argmin())))
        if not np.isfinite(best[0]):
            return None
        _, num_stages, first_submesh = best
        return self._read(origins, num_stages, first_submesh, threshold)

    def _add_last_stage(self, now: np.ndarray, a: int, threshold: float) -> None:
        """Add to `now` (F[1]) the last stage on submesh `a`."""
        size = int(self.tables.num_devices[a])
        if not self.tables.fits[size, a]:
            return
        num_layers = self.num_layers
        # [c, first, last]
        terms = self._cheapest(1, a, self.last[a], threshold)
        now[:num_layers, size, a] = terms[:, :, num_layers].min(axis=0)
        misplaced = self.tables.misplaced((slice(num_layers), num_layers), size)
        now[:num_layers, size, a][misplaced] = np.inf

    def _add_stage_before(
        self,
        now: np.ndarray,
        origin: np.ndarray,
        after: np.ndarray,
        s: int,
        a: int,
        terms_of_options: Sequence[np.ndarray],
    ) -> None:
        """Add to `now` (F[s]) and `origin` the stages on submesh `a` that are followed by s - 1
        others, whose F is `after`.

        Args:
            terms_of_options: of each option of the submesh, first terms [c, first, last].
        """
        size = int(self.tables.num_devices[a])
        num_left = self.num_devices + 1 - size
        is_reached = np.isfinite(after[:, :num_left]).any(axis=(0, 2))
        starts = self.tables.fits[size:, a] & is_reached
        for option, terms in zip(self.ways[a], terms_of_options, strict=True):
            left = np.flatnonzero(starts & option.left[:num_left])
            # [first layer of the next stage, devices left, next submesh]
            rest = after[: self.num_layers, left[:, None], option.following]
            next_firsts = np.flatnonzero(np.isfinite(rest).any(axis=(1, 2)))
            if not next_firsts.size:
                continue
            # [first, last]
            cost = np.where(self._fits_memory(s, a), terms, np.inf).min(axis=0)
            firsts = np.flatnonzero(np.isfinite(cost[:, next_firsts]).any(axis=1))
            if not firsts.size:
                continue

            # [next first, devices left]: the best submesh of the next stage, and its F.
            which = rest.argmin(axis=2)
            rest = np.take_along_axis(rest, which[..., None], axis=2)[..., 0]
            # [first, next first, devices left]
            total = cost[np.ix_(firsts, next_firsts)][:, :, None] + rest[next_firsts][None]
            layers = firsts[:, None, None], next_firsts[:, None]
            total[self.tables.misplaced(layers, left + size)] = np.inf
            # [first, devices left]: the best cut, and its total.
            cut = total.argmin(axis=1)
            value = np.take_along_axis(total, cut[:, None, :], axis=1)[:, 0]

            target = np.ix_(firsts, left + size)
            known = now[..., a][target]
            is_better = value < known
            now[..., a][target] = np.where(is_better, value, known)
            next_first = next_firsts[cut]
            next_submesh = option.following[which[next_first, np.arange(len(left))[None, :]]]
            code = next_first * self.num_submeshes + next_submesh
            origin[..., a][target] = np.where(is_better, code, origin[..., a][target])

    def _cheapest(self, s: int, a: int, option: StageOption, threshold: float) -> np.ndarray:
        """Return [c, first, last] the first term of candidates on submesh `a` that fit and stay
        below the threshold; inf for others.
        """
        return np.where(
            self._fits_memory(s, a) & (option.second_term <= threshold), option.first_term, np.inf
        )

    def _read(
        self, came: list[np.ndarray], count: int, submesh: int, threshold: float
    ) -> StageChoice:
        """Return the stages of the cheapest pipeline that the program found, read from its first
        stage on.

        Args:
            came: for each number of remaining stages, the encoded (end, next submesh) of the first
                of them.
            count: number of stages.
            submesh: that of the first stage.
            threshold: largest seconds that a stage may add to the steady phase.
        """
        t, m = self.tables, self.num_submeshes
        first, devices = 0, self.num_devices
        stages: list[StageRange] = []
        bottleneck = 0.0
        # Per stage, seconds of a micro-batch in it and on the way to the next.
        after: list[float] = []
        for s in range(count, 0, -1):
            option = self.last[submesh]
            last = self.num_layers
            following = -1
            if s > 1:
                last, following = divmod(int(came[s - 1][first, devices, submesh]), m)
                left = devices - int(t.num_devices[submesh])
                option = next(
                    option
                    for option in self.ways[submesh]
                    if following in option.following and option.left[left]
                )
            candidate = int(self._cheapest(s, submesh, option, threshold)[:, first, last].argmin())
            after.append(float(t.seconds[first, last, submesh, candidate] + option.column[last]))
            bottleneck = max(bottleneck, float(option.second_term[candidate, first, last]))
            stages.append(StageRange(first, last, submesh, candidate))
            devices -= int(t.num_devices[submesh])
            first, submesh = last, following
        if self.sender_share < 1:
            trips = [sum(after[i:]) / self.in_flight[count - i - 1] for i in range(count)]
            bottleneck = max(bottleneck, self.latency.steady * max(trips))
        return StageChoice(tuple(stages), self.latency.warmup * sum(after) + bottleneck, bottleneck)
