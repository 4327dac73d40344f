"""Gatherings that ranks make on demand, though they need different parameters.

All gatherings are collective exchanges: each rank reports which unit of parameters it needs next,
every unit that any rank needs is gathered by all, and a rank that is done serves the others. So
nothing hangs if branches, shapes or numbers of batches differ between ranks. If all ranks are about
to repeat their previous step, one exchange reaches consensus on all of it, and units are
prefetched.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice, takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from alpa_strategy.comm.collectives import world_size

# What a rank reports instead of the number of a unit.
_DONE = -1  # it needs no more in this phase
_GONE = -2  # it needs no more until the end of the job
_PAUSE = -3  # shards may get new values: nothing is prefetched across this point

# Waits for a gathering in flight, and returns the full parameters of its unit.
Wait = Callable[[], list[Tensor]]


class OnDemandGather:
    """Gathers units of parameters on demand, on ranks that need different ones.

    Methods are collective if they do not state otherwise; ranks may call them in different orders.

    Args:
        start: starts to gather the unit with this number, and returns a function that waits for its
            parameters; collective.
        may_start: whether a unit may be prefetched in addition to those given in the list.
        group: of all ranks, with a CPU backend, used for nothing else.
    """

    def __init__(
        self,
        start: Callable[[int], Wait],
        may_start: Callable[[int, list[int]], bool],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._start = start
        self._may_start = may_start
        self._group = group

        # Units that this rank has required in this step, and in the step before.
        self._order: list[int] = []
        self._previous_order: list[int] = []

        # Whether this step has required the same units as the step before, so far.
        self._repeats = False

        # Units that all ranks gather next, in this order, whatever else happens.
        self._agreed: deque[int] = deque()

        # Gatherings in flight, of the first of `_agreed`.
        self._in_flight: deque[Wait] = deque()

    def begin(self) -> None:
        """Start a step, which may repeat the previous one. No communication."""
        self._previous_order = self._order
        self._order = []
        self._repeats = True

    def fetch(self, unit: int) -> list[Tensor]:
        """Return the full parameters of `unit`. Collective; other ranks may fetch others in the
        same exchange.
        """
        self._note(unit)
        is_agreed = bool(self._agreed) and self._agreed[0] == unit
        if not is_agreed:
            self._serve()
            expected = self._expected()
            reports = self._exchange(unit, hash(tuple(expected)) if expected else 0)
            keys = {key for _, key in reports}
            if len(keys) > 1 or not expected:
                gathered = {required: self._start(required)() for required in _units(reports)}
                return gathered[unit]
            self._agreed.extend(expected)

        self._prefetch()
        self._agreed.popleft()
        return self._in_flight.popleft()()

    def pause(self) -> None:
        """Let no unit that is gathered now be used later.

        Communicates only if other ranks still rely on this rank's prefetches.
        """
        self._note(_PAUSE)
        self._serve()

    def forget(self) -> None:
        """Drop all consensus: the step has failed. No communication."""
        self._agreed.clear()
        self._in_flight.clear()

    def finish(self, for_good: bool = False) -> None:
        """Serve the other ranks until none needs a unit any more.

        Args:
            for_good: until the end of the job: no rank comes back, this one included.
        """
        report = _GONE if for_good else _DONE
        self._note(report)
        self._serve()
        while True:
            reports = self._exchange(report, 0)
            largest, _ = max(reports)
            if largest <= report:
                return
            for unit in _units(reports):
                self._start(unit)()

    def _note(self, report: int) -> None:
        """Append a unit, `_DONE` or `_GONE` to this step's order, and compare it with the previous
        step's.
        """
        index = len(self._order)
        is_known = index < len(self._previous_order)
        self._repeats = self._repeats and is_known and self._previous_order[index] == report
        self._order.append(report)

    def _expected(self) -> list[int]:
        """Return the units, from the last fetch on, that this rank fetches until its next pause or
        end if the step repeats the previous one; empty if it does not.
        """
        if not self._repeats:
            return []
        from_last_fetch = self._previous_order[len(self._order) - 1 :]
        return list(takewhile(lambda report: report >= 0, from_last_fetch))

    def _prefetch(self) -> None:
        """Start the unit that is waited for next, and those that may be in flight with it."""
        while len(self._in_flight) < len(self._agreed):
            count = len(self._in_flight)
            unit = self._agreed[count]
            if count:
                # The user's code may change the first unit before it is gathered once more.
                is_first = unit == self._agreed[0]
                if is_first or not self._may_start(unit, list(islice(self._agreed, 1, count))):
                    return
            self._in_flight.append(self._start(unit))

    def _serve(self) -> None:
        """Gather all units of the consensus, though this rank has departed from it."""
        while self._agreed:
            unit = self._agreed.popleft()
            wait = self._in_flight.popleft() if self._in_flight else self._start(unit)
            wait()

    def _exchange(self, report: int, key: int) -> list[tuple[int, int]]:
        """Return the reports of all ranks, by rank: (unit, or `_DONE` or `_GONE`; key of the units
        that the rank expects to fetch, 0 for none). Collective.
        """
        if world_size() == 1:
            return [(report, key)]
        reports = torch.empty(2 * world_size(), dtype=torch.int64)
        dist.all_gather_into_tensor(reports, torch.tensor([report, key]), self._group)
        return [(unit, rank_key) for unit, rank_key in reports.view(-1, 2).tolist()]


def _units(reports: list[tuple[int, int]]) -> list[int]:
    """Return the numbers of all required units, each once, in ascending order."""
    return sorted({unit for unit, _ in reports if unit >= 0})
