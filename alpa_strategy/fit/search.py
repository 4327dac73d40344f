"""A search of seconds: equal stages on equal meshes, as people set them up by hand, with layouts
that the integer program solves.

A configuration is a number of stages and of micro-batches, the logical mesh of a stage, and whether
it recomputes. One layer in the middle of the model stands for all others: its layouts are solved
within its share of a device's memory, and its costs times the number of layers order the
configurations. The best are then solved exactly, stage by stage. `planner.choose_plan` searches
more (stages and meshes of any size, other schedules, host memory) and takes minutes.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.fit.candidates import Candidates
from alpa_strategy.fit.configurations import (
    Candidate,
    Configuration,
    Estimate,
    equal_stages,
    wire_seconds,
)
from alpa_strategy.fit.estimates import Estimates
from alpa_strategy.fit.failures import (
    Failure,
    needed_bytes,
    no_faster_plan,
    nothing_fits,
    with_need,
)
from alpa_strategy.fit.microbatched import MicrobatchedGraphs
from alpa_strategy.fit.stage_solvers import SCHEDULE, ConfigurationSolvers
from alpa_strategy.inter_op.stage_fit import does_not_fit
from alpa_strategy.inter_op.stage_solve import SolvedStage, StageRequest, StageSolver
from alpa_strategy.intra_op.solver.solve import NoCheaperSolution
from alpa_strategy.ir.plan import NO_BOUND, Plan
from alpa_strategy.planner.assembly import plan_of
from alpa_strategy.planner.figures import with_figures
from alpa_strategy.planner.task import PlanTask

# Configurations that may fit by their least memory and are estimated; and that are solved exactly.
_MAX_ESTIMATED = 8
_MAX_SOLVED = 2

# Solves a stage.
SolveStage = Callable[[StageSolver, StageRequest], SolvedStage]

# An estimate may be above the solved step by this factor.
_SLACK = 1.03


def search_regular(
    task: PlanTask, graphs: MicrobatchedGraphs | None = None, faster_than: float = math.inf
) -> Plan:
    """Return the best plan of equal stages on equal meshes.

    Args:
        graphs: of the step in micro-batches, which searches of the same step share.
        faster_than: seconds of a step; slower plans are of no interest.

    Raises:
        PlanError: nothing fits, a pin cannot be met, or no plan seems to take less than
            `faster_than`.
    """
    search = RegularSearch(task, graphs or MicrobatchedGraphs(task.step), faster_than)
    best = search.best_of(search.candidates.usual())
    if best is None:
        best = search.best_of(search.candidates.small())
    if best is None:
        best = search.best_within_limit()
    if best is None:
        failures = search.failures
        raise nothing_fits(failures, task.memory_limit) if failures else no_faster_plan(faster_than)
    # Unequal stages and other schedules were not looked at.
    return with_figures(replace(best, gap=NO_BOUND), task)


@dataclass(frozen=True)
class _Best:
    """The best plan so far, and the seconds of its step; without a plan, those that it must be
    below.
    """

    plan: Plan | None
    seconds: float

    def or_faster(self, plan: Plan) -> "_Best":
        """Return the faster one of this and `plan`, which is taken if there is no plan yet."""
        seconds = plan.predicted.step_seconds
        if self.plan is None or seconds < self.seconds:
            return _Best(plan, seconds)
        return self


class RegularSearch:
    """The configurations of one task; what is priced once serves all of them.

    Args:
        task: the task.
        graphs: of its step in micro-batches.
        faster_than: seconds of a step; slower plans are of no interest.
    """

    def __init__(self, task: PlanTask, graphs: MicrobatchedGraphs, faster_than: float) -> None:
        self.task = task
        self.faster_than = faster_than
        self.failures: list[Failure] = []
        self.solvers = ConfigurationSolvers(task, graphs, self.failures)
        self.candidates = Candidates(self.solvers)
        self.estimates = Estimates(self.solvers)
        # Of configurations whose fastest layouts, and named plans, do not fit.
        self._too_large: list[Estimate] = []

    def best_of(self, candidates: Iterable[Candidate]) -> Plan | None:
        """Return the best plan of candidates that come the fastest first.

        More of them are estimated until one fits when it is solved. Why others have no plan is
        added to `failures`.

        Returns:
            None: all candidates have a bound of `faster_than` or more, or no layouts that were
            tried fit; `best_within_limit` tries others.

        Raises:
            PlanError: what is estimated to fit does not seem to take less than `faster_than`.
        """
        remaining = deque(candidate for candidate in candidates if candidate[0] < self.faster_than)
        best: Plan | None = None
        with_gathers: list[Candidate] = []
        while best is None and (remaining or with_gathers):
            with self.task.progress("estimate"):
                estimates = self._next_estimates(remaining, with_gathers)
            best = self._best_of_estimates(estimates)
        return best

    def _best_of_estimates(self, estimates: Sequence[Estimate]) -> Plan | None:
        """Return the best plan of `estimates`, which are solved in their order; None: none fits.

        All are solved in the layouts that were estimated, then those that do not fit in layouts
        that need less memory, if that may be the best plan.

        Raises:
            PlanError: none that fits seems to take less than `faster_than`.
        """
        best = _Best(None, self.faster_than)
        num_solved = 0
        is_slower = False
        too_large: list[tuple[Estimate, PlanError]] = []
        for estimate in estimates:
            is_slower = estimate.seconds >= self._most_seconds(best)
            if num_solved >= _MAX_SOLVED or is_slower:
                break
            try:
                with self.task.progress("solve the stages"):
                    plan = self._plan(estimate.configuration, self._fastest_that_fits)
            except DoesNotFitError as error:
                too_large.append((estimate, error))
                continue
            except PlanError as error:
                self.failures.append((estimate.configuration.label, error))
                continue
            num_solved += 1
            best = best.or_faster(plan)

        for estimate, reason in too_large:
            if estimate.seconds < best.seconds * _SLACK:
                with self.task.progress("solve the stages in less memory"):
                    best = self._best_in_less_memory(estimate, reason, best)
        if best.plan is None and is_slower:
            raise no_faster_plan(self.faster_than)
        return best.plan

    def _most_seconds(self, best: "_Best") -> float:
        """Return the seconds that an estimate must be below to be solved.

        A step seldom takes less than its estimate: once a plan that was solved is not fast enough,
        an estimate that is not either is left.
        """
        is_too_slow = best.plan is not None and best.seconds >= self.faster_than
        return self.faster_than if is_too_slow else best.seconds * _SLACK

    def _best_in_less_memory(self, estimate: Estimate, reason: PlanError, best: "_Best") -> "_Best":
        """Return `best`, or a plan of an estimated configuration that is faster.

        Named plans that need less memory are tried. If one of them fits, layouts are also solved
        within the limit.

        Args:
            estimate: of the configuration.
            reason: why its fastest layouts do not fit.
            best: the best plan so far.
        """
        configuration = estimate.configuration
        failures = [reason]
        may_fit = False
        for names in self.estimates.names(configuration.logical_mesh):
            named = replace(configuration, names=names)
            is_too_large = self.estimates.least_bytes_of_named(named) > self.task.memory_limit
            if is_too_large or names == configuration.names:
                continue
            if self.estimates.is_slower(named, best.seconds * _SLACK):
                may_fit = True
                continue
            try:
                plan = self._plan(named, self._fastest_that_fits)
            except PlanError as failure:
                failures.append(failure)
                continue
            may_fit = True
            note = f"the fastest layouts do not fit: the plan is parallel={list(names)}"
            best = best.or_faster(replace(plan, notes=(*plan.notes, note)))
        if not may_fit:
            limit = self.task.memory_limit
            least = min(failures, key=lambda failure: needed_bytes(failure, limit))
            self.failures.append((configuration.label, least))
            self._too_large.append(estimate)
            return best
        with suppress(PlanError):
            best = best.or_faster(self._within_limit(configuration, best.seconds))
        return best

    def _next_estimates(
        self, candidates: deque[Candidate], with_gathers: list[Candidate]
    ) -> list[Estimate]:
        """Take candidates, those with the lowest bounds first, and return those that seem to fit,
        the fastest first.

        Args:
            candidates: of the search, the lowest bound first.
            with_gathers: candidates that do not fit unless parameters are gathered for each
                micro-batch (ZeRO-3), the lowest bound first. More are added here; each is estimated
                only if it may be the fastest.
        """
        estimates: list[Estimate] = []
        best_seconds = math.inf
        num_estimated = 0
        while True:
            bound = math.inf
            if candidates and num_estimated < _MAX_ESTIMATED:
                bound, _ = candidates[0]
            gathers = bool(with_gathers) and with_gathers[0][0] < bound
            if gathers:
                bound, _ = with_gathers[0]
            if bound >= best_seconds or math.isinf(bound):
                break
            _, configuration = with_gathers.pop(0) if gathers else candidates.popleft()
            may_fit = self.estimates.least_bytes_of_stage(configuration) <= self.task.memory_limit
            num_estimated += may_fit and not gathers
            try:
                estimate = self.estimates.estimate(configuration, gathers)
            except PlanError as error:
                self.failures.append((configuration.label, error))
                if may_fit and not gathers:
                    self._add_with_gathers(configuration, with_gathers)
                continue
            best_seconds = min(best_seconds, estimate.seconds)
            estimates.append(estimate)
        return sorted(estimates, key=lambda estimate: estimate.seconds)

    def _add_with_gathers(
        self, configuration: Configuration, with_gathers: list[Candidate]
    ) -> None:
        """Add a configuration that does not fit without gathers to `with_gathers`, in the order of
        the bounds, unless it takes too long or no such plan has a name.
        """
        bound = self.estimates.least_seconds_with_gathers(configuration)
        has_names = bool(self.estimates.names(configuration.logical_mesh))
        if has_names and bound < self.faster_than * _SLACK:
            insort(with_gathers, (bound, configuration), key=lambda candidate: candidate[0])

    def best_within_limit(self) -> Plan | None:
        """Return the first plan, the fastest estimate first, of the configurations that
        `best_of` has left out, in layouts that are solved within the limit; None: nothing fits.

        Such a solve takes a minute, where the fastest layouts take seconds.
        """
        for estimate in sorted(self._too_large, key=lambda estimate: estimate.seconds):
            with self.task.progress("solve the stages within the limit"):
                try:
                    return self._within_limit(estimate.configuration)
                except PlanError as error:
                    self.failures.append((estimate.configuration.label, error))
        return None

    def _within_limit(self, configuration: Configuration, faster_than: float = math.inf) -> Plan:
        """Return the plan whose layouts are solved within the limit.

        Raises:
            PlanError: it does not fit, or a stage alone takes longer than `faster_than` seconds.
        """
        cutoff = faster_than * _SLACK
        if configuration.num_stages == 1:
            # Of the program's seconds, communication may be hidden behind as long a computation.
            cutoff /= 1 - self.task.cluster.overlap / 2

        def solve(solver: StageSolver, request: StageRequest) -> SolvedStage:
            return solver.solve(request, cutoff)

        try:
            return self._plan(replace(configuration, names=()), solve)
        except NoCheaperSolution as error:
            raise no_faster_plan(faster_than) from error
        except PlanError as error:
            raise with_need(error, self.task.memory_limit) from error

    def _fastest_that_fits(self, solver: StageSolver, request: StageRequest) -> SolvedStage:
        """Return the stage in its fastest layouts. Raises: DoesNotFitError: they do not fit."""
        stage = solver.fastest(request)
        num_bytes = stage.plan.predicted.peak_bytes
        if num_bytes > self.task.memory_limit:
            raise does_not_fit("a stage needs", num_bytes, self.task.memory_limit)
        return stage

    def _plan(self, configuration: Configuration, solve: SolveStage) -> Plan:
        """Return the plan of a configuration whose stages are solved by `solve`; its PlanErrors
        pass.
        """
        solver = self.solvers.of(configuration)
        job = solver.job
        submesh = self.solvers.submesh(configuration.num_stages)
        num_devices = math.prod(submesh)
        alive = self.solvers.alive(configuration)
        solved: list[SolvedStage] = []
        wires: list[float] = []
        first_devices: list[int] = []
        bounds = equal_stages(self.solvers.layer_seconds, configuration.num_stages)
        for index, (first, last) in enumerate(pairwise(bounds)):
            request = self.solvers.request(job, first, last, configuration, alive[index])
            solved.append(solve(solver, request))
            first_devices.append(index * num_devices)
            is_last = index == configuration.num_stages - 1
            wires.append(0.0 if is_last else wire_seconds(job, last, submesh, index))
        plan = plan_of(job, self.task.fingerprint, solved, first_devices, SCHEDULE, wires)
        notes = (*job.graph.notes, *plan.notes)
        return replace(plan, notes=notes)
