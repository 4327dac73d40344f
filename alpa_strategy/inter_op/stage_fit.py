"""A stage solved within its memory limit.

The integer program has one row for memory, with what choices store. Temporary memory, and the
largest recomputed segment, depend on the solution: bytes are reserved for them, and the program is
solved with a larger reserve until its solution fits.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from alpa_strategy.errors import DoesNotFitError
from alpa_strategy.inter_op.stage_problem import StageCost, StageProblem, cost_of, weighted
from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.problem import Problem, Solution, evaluate
from alpa_strategy.intra_op.solver.solve import PROVED
from alpa_strategy.units import format_bytes

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_solve import PricedStage, StageSolver

# Solves of one stage, with larger and larger reserves.
ATTEMPTS = 6
# Equal layers make many equal choices of what to recompute: proving the last of the gap takes
# minutes.
BY_TENSOR_SECONDS = 2.0
BY_TENSOR_GAP = 1e-3
# Relative gap at which the layouts of a pipeline's stage are good enough: the stages themselves are
# chosen within 1e-3 of their optimum. It is good enough, too, for one stage on a large mesh, which
# seldom is the plan.
STAGE_GAP = 3e-4
LARGE_MESH = 128
# Segments with at least this share of the largest one's graph count for the memory limit.
LARGE_SEGMENT_SHARE = 0.9
# If the usual temporary memory does not fit, it gets this share of the bytes that a stage does not
# need for what it stores. The rest leaves the solver a choice.
HEADROOM_FOR_TEMPORARIES = 0.75


@dataclass(frozen=True)
class FittedStage:
    """A solution of a stage that fits into memory."""

    # First ops of the segments that are recomputed one by one, counted from the stage's first op.
    starts: tuple[int, ...]
    solution: Solution
    temporary_bytes: float


class StageFit:
    """One stage while it is solved within its memory limit.

    Args:
        solver: solves the problems.
        priced: the stage without a limit.
        starts: of its segments.
        stage: its problem, split at `starts`.
        cutoff: seconds above which a solution is of no interest.
    """

    def __init__(
        self,
        solver: "StageSolver",
        priced: "PricedStage",
        starts: tuple[int, ...],
        stage: StageProblem,
        cutoff: float,
    ) -> None:
        job = solver.job
        request = priced.request
        self._solver = solver
        self._job = job
        self._request = request
        self._starts = starts
        self._stage = stage
        self._cutoff = cutoff
        # Of the stages that share the mesh, this one has its share of memory.
        self._limit = job.memory_limit / request.stages_per_mesh
        self._alive = request.alive / request.stages_per_mesh
        # The optimum without a limit, if memory has the same weights here as when it was priced.
        self._free: Solution | None = priced.free if job.is_whole_batch else None
        # Bytes reserved for temporary memory and for the largest segment.
        self._reserve = 0.0
        # Most temporary bytes that an op may need.
        self._largest_temporary = math.inf
        # Segments whose graphs were large in some solution.
        self._large_segments: set[int] = set()

    def solve(self, solution: Solution, cost: StageCost) -> FittedStage:
        """Return the cheapest solution that fits.

        Args:
            solution: one that does not fit, to start from.
            cost: its cost.

        Raises:
            DoesNotFitError: none was found that fits.
            NoCheaperSolution: all take longer than the cutoff.
        """
        least_bytes = math.inf
        for _ in range(ATTEMPTS):
            shares = self._segment_shares(cost)
            try:
                solution = self._solve_once(shares)
            except DoesNotFitError as error:
                self._reserve_less(error)
                continue
            intra = self._stage.intra
            temporary_bytes = self._solver.temporary_bytes(intra, solution)
            cost = cost_of(self._stage, solution.assignment, temporary_bytes)
            num_bytes = cost.num_bytes(self._alive, self._request.remat)
            if num_bytes <= self._limit:
                return FittedStage(self._starts, solution, temporary_bytes)

            least_bytes = min(least_bytes, num_bytes)
            self._reserve_more(cost, num_bytes, shares)
            # Ops of the next solution need no more, so that the reserve is enough for it.
            largest = _largest_temporary(intra, solution)
            self._largest_temporary = min(self._largest_temporary, largest)
        raise DoesNotFitError(
            f"a stage on {math.prod(self._request.submesh)} devices needs"
            f" {format_bytes(least_bytes)} of {format_bytes(self._limit)}"
        )

    def _segment_shares(self, cost: StageCost) -> list[float]:
        """Return the weight of each segment's graph in the memory row: the mean of those that were
        large in some solution.
        """
        largest = max(cost.again)
        for segment, num_bytes in enumerate(cost.again):
            if num_bytes >= LARGE_SEGMENT_SHARE * largest:
                self._large_segments.add(segment)
        weights = [0.0] * self._stage.num_spans
        for segment in self._large_segments:
            weights[segment] = 1 / len(self._large_segments)
        return weights

    def _solve_once(self, shares: list[float]) -> Solution:
        """Return the cheapest solution whose stored bytes leave the reserve free.

        Raises:
            DoesNotFitError: there is none.
            NoCheaperSolution: it takes longer than the cutoff.
        """
        options = self._job.options
        problem = weighted(
            self._stage,
            self._job.num_microbatches,
            self._alive,
            self._request.remat,
            self._limit - self._reserve,
            shares,
        )
        problem = _without_the_largest(
            problem, self._stage.intra, self._limit, self._largest_temporary
        )
        if self._free is not None:
            is_allowed = math.isfinite(evaluate(problem, self._free.assignment)[0])
            if not is_allowed:
                self._free = None
        if self._free is None:
            unlimited = replace(problem, memory_limit=math.inf)
            self._free = self._solver.solve_problem(unlimited, options.solver_seconds)
        seconds, tolerance = self._effort()
        return self._solver.solve_problem(
            problem,
            seconds,
            cutoff=self._cutoff,
            unlimited=self._free,
            tolerance=tolerance,
        )

    def _effort(self) -> tuple[float, float]:
        """Return the time limit in seconds and the relative gap of the integer program."""
        intra = self._stage.intra
        seconds = self._job.options.solver_seconds
        if intra.recomputes or intra.stores:
            return min(seconds, BY_TENSOR_SECONDS), BY_TENSOR_GAP
        if not self._job.is_whole_batch or intra.mesh.num_devices > LARGE_MESH:
            return seconds, STAGE_GAP
        return seconds, PROVED

    def _reserve_less(self, error: DoesNotFitError) -> None:
        """Reduce the reserve, which is what one solution needs; another may need less.

        Raises:
            DoesNotFitError: `error`, if that cannot help.
        """
        headroom = self._limit - (error.least_bytes or self._limit)
        if headroom <= 0 or self._reserve <= headroom:
            raise error
        self._reserve = HEADROOM_FOR_TEMPORARIES * headroom
        self._largest_temporary = self._reserve

    def _reserve_more(self, cost: StageCost, num_bytes: float, shares: list[float]) -> None:
        """Reserve what a solution needs beyond the memory row: its temporary memory, and what the
        mean of segments leaves out of the largest one.
        """
        remat = self._request.remat
        in_row = replace(cost, working=0.0, update=0.0).num_bytes(self._alive, remat)
        beyond_row = num_bytes - in_row
        if remat:
            mean = sum(share * num for share, num in zip(shares, cost.again, strict=True))
            beyond_row += max(cost.again) - mean
        self._reserve = max(self._reserve, beyond_row)


def _largest_temporary(intra: IntraOp, solution: Solution) -> float:
    """Return the temporary bytes of the op that needs most, with its gradients."""
    strategies = solution.assignment[len(intra.parameters) :]
    of_ops = [float(op.temporary_bytes[k]) for op, k in zip(intra.ops, strategies, strict=False)]
    return max(of_ops, default=0.0)


def _without_the_largest(
    problem: Problem, intra: IntraOp, limit: float, largest_temporary: float = math.inf
) -> Problem:
    """Return the problem without strategies whose op, with its gradients, cannot fit in addition to
    the least that all choices store, or needs more than `largest_temporary` bytes.

    Raises:
        DoesNotFitError: these are all strategies of an op.
    """
    least_stored = 0.0
    for choice in problem.choices:
        least_stored += float(choice.memory[np.isfinite(choice.cost)].min())
    headroom = limit - least_stored

    choices = list(problem.choices)
    for index, op in enumerate(intra.ops, start=len(intra.parameters)):
        least_temporary = float(op.temporary_bytes.min())
        most_bytes = min(headroom, max(largest_temporary, least_temporary))
        cost = np.where(op.temporary_bytes > most_bytes, np.inf, choices[index].cost)
        if not np.isfinite(cost).any():
            needed = format_bytes(least_stored + least_temporary)
            raise DoesNotFitError(
                f"{choices[index].name} needs {needed} of {format_bytes(limit)} with all that is"
                " kept"
            )
        choices[index] = replace(choices[index], cost=cost)
    return replace(problem, choices=tuple(choices))
