"""A stage solved within its memory limit.

A stage has two limits of memory: with its activations, and while the optimizer updates
(`StageCost.num_bytes`). The integer program has one row for memory, a mean of both with weights: a
solution that is within both is within every mean of them. Which weights find one is a bisection.

Temporary memory, and the largest recomputed segment, depend on the solution: bytes are reserved for
them, and the program is solved with a larger reserve until its solution fits.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from alpa_strategy.errors import DoesNotFitError
from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_problem import (
    StageProblem,
    cost_of,
    update_bytes,
    weighted,
    with_update_row,
)
from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.problem import Problem, Solution, evaluate
from alpa_strategy.intra_op.solver.solve import PROVED
from alpa_strategy.units import format_bytes

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_solve import PricedStage, StageSolver

# Solves of one stage, with larger and larger reserves and other weights of its two limits.
ATTEMPTS = 8
# CPU seconds for one of them, for a stage of a pipeline: a solve that ends early gives the best
# solution that it has.
ATTEMPT_SECONDS = 5.0
# Equal layers make many equal choices of what to recompute: proving the last of the gap takes
# minutes.
BY_TENSOR_SECONDS = 2.0
BY_TENSOR_GAP = 1e-3
# Relative gap at which the layouts of a pipeline's stage are good enough: the stages themselves are
# chosen within 1e-3 of their optimum. It is good enough, too, for one stage on a large mesh, which
# seldom is the plan.
STAGE_GAP = 1e-3
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
        # Temporary bytes of every solution, at least.
        self._least_temporary = self._temporary_at_least()
        # Bytes reserved for temporary memory and for the largest segment.
        self._reserve = self._least_temporary
        # Of the memory row, the part that is of the optimizer's step; and between which parts the
        # next one is looked for.
        self._update_share = 0.0
        self._least_share = 0.0
        self._most_share = 1.0
        # What was solved: the same once more gives the same.
        self._tried: set[tuple[float, float, float, frozenset[int]]] = set()
        # Most temporary bytes that an op may need.
        self._largest_temporary = math.inf
        # Segments whose graphs were large in some solution.
        self._large_segments: set[int] = set()

    def solve(self, solution: Solution, cost: StageCost) -> FittedStage:
        """Return the first solution that is found to fit; a cheaper one may exist.

        Args:
            solution: one that does not fit, to start from.
            cost: its cost.

        Raises:
            DoesNotFitError: none was found that fits.
            NoCheaperSolution: all take longer than the cutoff.
        """
        least_update = update_bytes(self._stage)
        if least_update > self._limit:
            raise self._does_not_fit(least_update)

        least_bytes = math.inf
        while len(self._tried) < ATTEMPTS:
            shares = self._segment_shares(cost)
            if not self._is_new():
                break
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
            self._learn_from(cost, shares)
            # Ops of the next solution need no more, so that the reserve is enough for it.
            largest = _largest_temporary(intra, solution)
            self._largest_temporary = min(self._largest_temporary, largest)
        raise self._does_not_fit(least_bytes)

    def _does_not_fit(self, num_bytes: float) -> DoesNotFitError:
        """Return the error for a stage that needs `num_bytes`, as far as is known."""
        num_devices = math.prod(self._request.submesh)
        return does_not_fit(f"a stage on {num_devices} devices needs", num_bytes, self._limit)

    def _temporary_at_least(self) -> float:
        """Return the temporary bytes that the stage needs whatever its layouts; 0 if they may take
        the place of gradients.
        """
        if self._job.gradients_begin:
            # What is temporary may take the place of gradients.
            return 0.0
        of_ops = [float(op.temporary_bytes.min()) for op in self._stage.intra.ops]
        return max(of_ops, default=0.0)

    def _is_new(self) -> bool:
        """Return whether the next problem was not solved before, and remember it."""
        large = frozenset(self._large_segments)
        problem = self._reserve, self._update_share, self._largest_temporary, large
        is_new = problem not in self._tried
        self._tried.add(problem)
        return is_new

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

        Args:
            shares: of the segments in the memory row.

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
        problem = with_update_row(problem, self._stage, self._update_share, self._limit)
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
        if not self._job.is_whole_batch:
            return min(seconds, ATTEMPT_SECONDS), STAGE_GAP
        if intra.mesh.num_devices > LARGE_MESH:
            return seconds, STAGE_GAP
        return seconds, PROVED

    def _reserve_less(self, error: DoesNotFitError) -> None:
        """Reduce the reserve, which is what one solution needs; another may need less.

        Raises:
            DoesNotFitError: that cannot help: `error`, or an error with the bytes that are needed.
        """
        share = self._update_share
        if error.least_bytes is None:
            raise error
        # The row has the reserve with the weight of activations.
        row_limit = self._limit - (1 - share) * self._reserve
        missing = (error.least_bytes - row_limit) / (1 - share)
        headroom = self._reserve - missing
        if missing <= 0:
            raise error
        if headroom <= self._least_temporary:
            needed = self._limit + self._least_temporary - headroom
            raise self._does_not_fit(needed) from error
        spare = headroom - self._least_temporary
        self._reserve = self._least_temporary + HEADROOM_FOR_TEMPORARIES * spare
        self._largest_temporary = self._reserve

    def _learn_from(self, cost: StageCost, shares: list[float]) -> None:
        """Reserve the bytes that a solution that does not fit needs beyond the memory row, or give
        the limit that it exceeds more weight.

        Args:
            cost: of the solution.
            shares: of the recompute segments, with which it was solved.
        """
        remat = self._request.remat
        with_activations = replace(cost, update=0.0).num_bytes(self._alive, remat)
        if with_activations <= self._limit:
            # Only while the optimizer updates there are too many bytes.
            self._least_share = self._update_share
            self._update_share = (self._least_share + self._most_share) / 2
            return

        in_row = replace(cost, working=0.0, update=0.0).num_bytes(self._alive, remat)
        beyond_row = with_activations - in_row
        if remat:
            mean = sum(share * num for share, num in zip(shares, cost.again, strict=True))
            beyond_row += max(cost.again) - mean
        is_reserved = beyond_row <= self._reserve
        self._reserve = max(self._reserve, beyond_row)
        if is_reserved and self._update_share > 0.0:
            self._most_share = self._update_share
            self._update_share = (self._least_share + self._most_share) / 2


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


def does_not_fit(subject: str, num_bytes: float, limit: float) -> DoesNotFitError:
    """Return the error for a device that needs more bytes than it may use, as far as is known.

    Args:
        subject: what needs them, with a verb.
        num_bytes: that are needed on a device.
        limit: bytes that a plan may use.
    """
    error = DoesNotFitError(f"{subject} {format_bytes(num_bytes)} of {format_bytes(limit)}")
    error.least_bytes = num_bytes
    return error
