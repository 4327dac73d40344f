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
    # A larger bottleneck alone is above the limit.
    highest = int(np.searchsorted(search.levels, limit)) - 1
    # Of levels of the bottleneck, and a bound of the first term there.
    intervals = [(0, highest, 0.0)]
    while intervals:
        low, high, least = intervals.pop()
        if low > high or search.levels[low] + least >= limit * (1 - tolerance):
            continue
        choice = search.solve(search.levels[high], most=limit - search.levels[low])
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
    """The stages on one submesh that some next submeshes may follow, or none."""

    # [last] seconds of the messages to the next stage, both ways; 0 after the last stage
    column: np.ndarray

    # Submeshes of the next stage.
    following: np.ndarray

    # [devices left] whether the next stage may start there
    left: np.ndarray

    # [run] the layers [first, last) of the stages, in the order of their first ones
    first: np.ndarray
    last: np.ndarray

    # [candidate, run] of the objective, inf where there is no such stage
    first_term: np.ndarray

    # [candidate, run] of each stage
    second_term: np.ndarray


@dataclass(frozen=True)
class _StagesBelow:
    """The stages of an option that stay below a threshold."""

    option: StageOption

    # Indices of their runs in the option.
    runs: np.ndarray

    # [candidate, run of these] of the objective, inf above the threshold
    first_term: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """[run] the first layer."""
        return self.option.first[self.runs]

    @property
    def last(self) -> np.ndarray:
        """[run] the layer after the last one."""
        return self.option.last[self.runs]


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
        self._fitting: dict[tuple[int, int, bool], np.ndarray] = {}
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
        """Return the costs of stages on submesh `a` that send their outputs along one boundary.

        Args:
            a: index of the submesh.
            column: [layer] seconds of a transfer to the next stage; None for the last stage.
            following: submeshes of the next stage.
            left: whether a number of devices may remain for it.
        """
        first, last = self._runs(a, is_last=column is None)
        # [candidate, run]
        seconds = self.tables.seconds[first, last, a].T
        once = self.tables.once_seconds[first, last, a].T
        finite = np.isfinite(seconds)
        column = np.zeros(self.num_layers + 1) if column is None else column
        wire = column[last]
        seconds = np.where(finite, seconds, 0.0)
        busy = np.where(finite, np.maximum(seconds + self.sender_share * wire, wire / 2), 0.0)
        # One way to add it up: to the last bit, a stage is not above its own level.
        second = self.latency.steady * busy + self.steps * np.where(finite, once, 0.0)
        return StageOption(
            column=column,
            following=following,
            left=left,
            first=first,
            last=last,
            first_term=np.where(finite, self.latency.warmup * (seconds + wire), np.inf),
            second_term=second,
        )

    def _runs(self, a: int, is_last: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the stages that are possible on submesh `a`: their first layers [run], and the
        layers after their last ones [run].

        Args:
            is_last: of the last stages of pipelines, otherwise of all others.
        """
        is_possible = np.isfinite(self.tables.seconds[:, :, a]).any(axis=2)
        is_possible[:, self.num_layers] &= is_last
        is_possible[:, : self.num_layers] &= not is_last
        first, last = np.nonzero(is_possible)
        return first, last

    def _fits_memory(self, s: int, a: int) -> np.ndarray:
        """Return [candidate, run] whether stages on submesh `a` fit, `s` stages from them to the
        end.
        """
        return self._fits_with(self.in_flight[s - 1], a, is_last=s == 1)

    def _fits_with(self, alive: int, a: int, is_last: bool) -> np.ndarray:
        """Return [candidate, run as of `_runs`] whether stages on submesh `a` fit with `alive`
        micro-batches in flight.
        """
        key = alive, a, is_last
        if key not in self._fitting:
            first, last = self._runs(a, is_last)
            is_fitting = self.tables.fits_memory((first, last, a), alive, self.memory_limit)
            self._fitting[key] = np.ascontiguousarray(is_fitting.T)
        return self._fitting[key]

    def solve(self, threshold: float, most: float = np.inf) -> StageChoice | None:
        """Return the stages with the least first term among those whose bottleneck is at most
        `threshold`; None if there are none.

        F[s][a, d, k] is the least first term of layers k to the end in s stages on d devices, the
        first of them on submesh a. It is inf where no stages before them can complete a pipeline.

        Args:
            most: pipelines whose first term is at least that are of no interest.
        """
        if not self.allowed:
            return None
        below: list[list[_StagesBelow]] = []
        for options in self.ways:
            below.append([_stages_below(option, threshold) for option in options])
        fewest_devices, least_term = self._before(below)
        # [devices left, next layer] whether the devices before it suffice.
        devices_before = self.num_devices - np.arange(self.num_devices + 1)
        can_complete = fewest_devices <= devices_before[:, None]

        # F[s - 1] at index s - 1.
        shorter: list[np.ndarray] = []
        # (first term, number of stages, first submesh)
        best = (np.inf, 0, 0)
        for s in range(1, self.max_stages + 1):
            now = np.full((self.num_submeshes, self.num_devices + 1, self.num_layers), np.inf)
            for a in range(self.num_submeshes):
                if self.tables.num_devices[a] > self.num_devices:
                    continue
                if s == 1:
                    self._add_last_stage(now, a, threshold)
                else:
                    self._add_stage_before(now, shorter[-1], s, a, below[a])
            if self.sender_share < 1:
                # The round trip of a micro-batch through all stages from here on.
                finite = np.where(np.isfinite(now), now, 0.0)
                trips = finite / (self.latency.warmup * self.in_flight[s - 1])
                now[self.latency.steady * trips > threshold] = np.inf
            now[:, ~can_complete] = np.inf
            now[now + least_term >= most] = np.inf
            if not np.isfinite(now).any():
                break
            shorter.append(now)
            if s in self.allowed:
                of_all = now[:, self.num_devices, 0]
                best = min(best, (float(of_all.min()), s, int(of_all.argmin())))
        if not np.isfinite(best[0]):
            return None
        _, num_stages, first_submesh = best
        return self._read(shorter, num_stages, first_submesh, threshold)

    def _before(self, below: Sequence[Sequence[_StagesBelow]]) -> tuple[np.ndarray, np.ndarray]:
        """Return [layer] the fewest devices, and the least first term, of stages before a layer;
        inf if no stages can be before it.

        Whatever is in flight, and whatever follows: no pipeline needs less.

        Args:
            below: of each submesh, its stages.
        """
        num_layers = self.num_layers
        # In all stages but the last one.
        alive = min(self.in_flight[1 : self.max_stages], default=self.in_flight[0])
        # [first, last]
        devices_of_stage = np.full((num_layers, num_layers), np.inf)
        term_of_stage = np.full((num_layers, num_layers), np.inf)
        for a, of_options in enumerate(below):
            size = float(self.tables.num_devices[a])
            for stages in of_options:
                is_fitting = self._fits_with(alive, a, is_last=False)[:, stages.runs]
                term = np.where(is_fitting, stages.first_term, np.inf).min(axis=0)
                devices = np.where(np.isfinite(term), size, np.inf)
                at = stages.first, stages.last
                term_of_stage[at] = np.minimum(term_of_stage[at], term)
                devices_of_stage[at] = np.minimum(devices_of_stage[at], devices)

        fewest_devices = np.zeros(num_layers)
        least_term = np.zeros(num_layers)
        for layer in range(1, num_layers):
            fewest_devices[layer] = (fewest_devices[:layer] + devices_of_stage[:layer, layer]).min()
            least_term[layer] = (least_term[:layer] + term_of_stage[:layer, layer]).min()
        return fewest_devices, least_term

    def _add_last_stage(self, now: np.ndarray, a: int, threshold: float) -> None:
        """Add to `now` (F[1]) the last stage on submesh `a`, in place.

        Args:
            now: gets seconds at [submesh, devices left, first layer].
            a: index of the submesh.
            threshold: as of `_read`; stages above it are left out.
        """
        size = int(self.tables.num_devices[a])
        option = self.last[a]
        if not self.tables.fits[size, a] or not option.first.size:
            return
        # [run]
        terms = self._cheapest(1, a, option, threshold).min(axis=0)
        terms[self.tables.misplaced((option.first, option.last), size)] = np.inf
        now[a, size, option.first] = terms

    def _add_stage_before(
        self,
        now: np.ndarray,
        after: np.ndarray,
        s: int,
        a: int,
        of_options: Sequence[_StagesBelow],
    ) -> None:
        """Add to `now` (F[s]) the stages on submesh `a` that are followed by s - 1 others, whose F
        is `after`.

        Args:
            of_options: of each option of the submesh, its stages below the threshold.
        """
        size = int(self.tables.num_devices[a])
        num_left = self.num_devices + 1 - size
        may_start = self.tables.fits[size:, a]
        for stages in of_options:
            option = stages.option
            # [devices left, first layer of the next stage]: its F on the best submesh.
            rest = after[option.following, :num_left].min(axis=0)
            rest[~(may_start & option.left[:num_left])] = np.inf
            is_reached = np.isfinite(rest)
            left = np.flatnonzero(is_reached.any(axis=1))
            first, last = stages.first, stages.last
            reached = np.flatnonzero(is_reached.any(axis=0)[last])
            if not reached.size:
                continue

            first, last = first[reached], last[reached]
            fits = self._fits_memory(s, a)[:, stages.runs[reached]]
            # [run]
            cost = np.where(fits, stages.first_term[:, reached], np.inf).min(axis=0)
            # [devices left, run]
            total = rest[left][:, last] + cost
            total[self.tables.misplaced((first, last), left[:, None] + size)] = np.inf
            # [devices left, first layer]: the best cut.
            begins = np.flatnonzero(np.diff(first, prepend=-1))
            value = np.minimum.reduceat(total, begins, axis=1)

            target = np.ix_(left + size, first[begins])
            now[a][target] = np.minimum(now[a][target], value)

    def _cheapest(self, s: int, a: int, option: StageOption, threshold: float) -> np.ndarray:
        """Return [candidate, run] the first term of candidates on submesh `a` that fit and stay
        below the threshold; inf for others.
        """
        return np.where(
            self._fits_memory(s, a) & (option.second_term <= threshold), option.first_term, np.inf
        )

    def _read(
        self, shorter: Sequence[np.ndarray], count: int, submesh: int, threshold: float
    ) -> StageChoice:
        """Return the stages of the cheapest pipeline that the program found, read from its first
        stage on.

        Args:
            shorter: F[s] at index s - 1.
            count: number of stages.
            submesh: that of the first stage.
            threshold: largest seconds that a stage may add to the steady phase.
        """
        t = self.tables
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
                option, last, following = self._next(
                    shorter[s - 2], s, submesh, first, devices, threshold
                )
            (run,) = np.flatnonzero((option.first == first) & (option.last == last))
            candidate = int(self._cheapest(s, submesh, option, threshold)[:, run].argmin())
            after.append(float(t.seconds[first, last, submesh, candidate] + option.column[last]))
            bottleneck = max(bottleneck, float(option.second_term[candidate, run]))
            stages.append(StageRange(first, last, submesh, candidate))
            devices -= int(t.num_devices[submesh])
            first, submesh = last, following
        if self.sender_share < 1:
            trips = [sum(after[i:]) / self.in_flight[count - i - 1] for i in range(count)]
            bottleneck = max(bottleneck, self.latency.steady * max(trips))
        return StageChoice(tuple(stages), self.latency.warmup * sum(after) + bottleneck, bottleneck)

    def _next(
        self, after: np.ndarray, s: int, a: int, first: int, devices: int, threshold: float
    ) -> tuple[StageOption, int, int]:
        """Return how a stage on submesh `a` goes on: its option, its end, and the next submesh.

        Args:
            after: F[s - 1].
            s: number of stages, this one included.
            first: first layer of the stage.
            devices: from the stage to the end.
            threshold: as of `_read`.
        """
        left = devices - int(self.tables.num_devices[a])
        best = (np.inf, self.last[a], -1, -1)
        for option in self.ways[a]:
            runs = np.flatnonzero(option.first == first)
            if not option.left[left] or not runs.size:
                continue
            last = option.last[runs]
            # [next submesh, first layer of the next stage]
            rest = after[option.following, left]
            cost = self._cheapest(s, a, option, threshold)[:, runs].min(axis=0)
            total = rest.min(axis=0)[last] + cost
            total[self.tables.misplaced((option.first[runs], last), devices)] = np.inf
            cut = int(total.argmin())
            if total[cut] < best[0]:
                end = int(last[cut])
                following = int(option.following[rest[:, end].argmin()])
                best = (float(total[cut]), option, end, following)
        _, option, end, following = best
        return option, end, following


def _stages_below(option: StageOption, threshold: float) -> _StagesBelow:
    """Return the stages of an option whose second term is at most the threshold."""
    terms = np.where(option.second_term <= threshold, option.first_term, np.inf)
    runs = np.flatnonzero(np.isfinite(terms).any(axis=0))
    return _StagesBelow(option, runs, terms[:, runs])
