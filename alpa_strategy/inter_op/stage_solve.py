"""Solves a chosen stage exactly: the ILP of a single stage, weighted for micro-batches, with the
memory of those in flight.

A stage that recomputes gets the recompute segments that need the least memory.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.beside_compute import without_hidden
from alpa_strategy.inter_op.equal_layers import structure
from alpa_strategy.inter_op.mesh_options import options_of_part
from alpa_strategy.inter_op.recompute_segments import RecomputeSegments
from alpa_strategy.inter_op.stage_cost import StageCost, whole_bytes
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_fit import FittedStage, StageFit
from alpa_strategy.inter_op.stage_problem import (
    RematSpans,
    StageProblem,
    cost_of,
    stage_build,
    summed_costs,
    take_apart,
    weighted,
)
from alpa_strategy.inter_op.stored_costs import stage_fields, stage_record
from alpa_strategy.intra_op import memory_choices
from alpa_strategy.intra_op.build import IntraOp, build
from alpa_strategy.intra_op.decode import (
    busy_seconds,
    bytes_ahead,
    decode,
    parameter_bytes,
    working_bytes,
)
from alpa_strategy.intra_op.memory_choices import with_host_price, with_recompute
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.intra_op.problem import Problem, Solution
from alpa_strategy.intra_op.restrict import least_of_equals, restrict
from alpa_strategy.intra_op.solver.solve import PROVED, NoCheaperSolution, propagate
from alpa_strategy.intra_op.solver.stored import solve_stored
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Collective, ParameterPlan, Predicted, StagePlan
from alpa_strategy.ir.stage_graph import stage_on
from alpa_strategy.options import PROPAGATION, PlanOptions
from alpa_strategy.partial_results import Key
from alpa_strategy.units import format_bytes

# Devices up to which offloading is solved: with 64, planning took a sixth longer.
OFFLOADING_SIZE = 16
# Prices of host memory that are tried, each twice the one before.
HOST_PRICES = 8


@dataclass(frozen=True)
class StageRequest:
    """A stage that the DP chose: ops [first, last) on a submesh and logical shape."""

    first: int
    last: int
    submesh: tuple[int, int]
    shape: tuple[int, ...]
    remat: bool

    # (micro-batch, stage) pairs on the mesh at once
    alive: int

    # That share the mesh.
    stages_per_mesh: int = 1
    # how parameters are stored that another stage on the mesh uses too
    pinned: Mapping[str, ParameterPlan] = field(default_factory=dict)

    # Op positions inside the stage at which spans may begin that are recomputed one by one.
    cuts: tuple[int, ...] = ()

    @property
    def starts(self) -> tuple[int, ...]:
        """Where spans may begin, counted from the stage's first op."""
        cuts = self.cuts if self.remat else ()
        return (0, *(cut - self.first for cut in cuts if self.first < cut < self.last))


@dataclass(frozen=True)
class SolvedStage:
    """A stage's plan (with `first_device` 0), its costs and its proved gap."""

    plan: StagePlan
    cost: StageCost
    gap: float
    # what the solver minimised: seconds plus the penalties of named plans, which the rest excludes
    objective: float
    method: str

    # Memory does not bind.
    is_free: bool


@dataclass(frozen=True)
class PricedStage:
    """A stage's problem on its mesh, and `free`, its optimum without a memory limit: no plan of the
    stage is faster.
    """

    job: StageCostTask
    request: StageRequest

    # Not restricted, one transfer per value.
    unrestricted_intra: IntraOp

    # Restricted, split into recompute segments at all starts of the request.
    intra: IntraOp
    free: Solution
    recompute_per_microbatch: bool

    # The costs of `intra`, if they are computed already.
    known: StageProblem | None = None

    # Equal for stages with the same problem; None: the problem was changed.
    key: Hashable | None = None

    @cached_property
    def finest(self) -> StageProblem:
        """`intra` with its costs split by when they arise."""
        return self.known or take_apart(self.intra, self.request.starts)

    def problem(self, starts: tuple[int, ...]) -> StageProblem:
        """Return the stage's problem, split into recompute segments at `starts` and restricted by
        the options.
        """
        if starts == self.request.starts:
            return self.finest
        intra = RematSpans(self.unrestricted_intra, starts).split()
        pins = options_of_part(self.job.options, self.unrestricted_intra.step)
        return take_apart(restrict(intra, pins, self.job.optimizer, self.request.pinned), starts)

    def changed(self, change: Callable[[IntraOp], IntraOp]) -> "PricedStage":
        """Return this stage with `change` applied to its problem."""
        return replace(
            self,
            unrestricted_intra=change(self.unrestricted_intra),
            intra=change(self.intra),
            known=None,
            key=None,
        )

    def unrestricted(self, starts: tuple[int, ...]) -> StageProblem:
        """Return the problem without pins and penalties: the real costs of its assignments."""
        if starts == self.request.starts and self.intra.unrestricted is None:
            return self.finest
        return take_apart(RematSpans(self.unrestricted_intra, starts).split(), starts)


class StageSolver:
    """Solves stages of one job; stages that are equal by structure share one solution."""

    def __init__(self, job: StageCostTask) -> None:
        self.job = job
        self.solve_problem = partial(solve_stored, job.results)
        self._again = memory_choices.pinned_again(job.graph, job.options)
        self._on_host = memory_choices.pinned_offload(job.graph, job.options, job.cluster.host)
        self._tables: dict[tuple, OptionTables] = {}
        # Of a whole batch, by logical shape.
        self._whole: dict[tuple[int, ...], IntraOp] = {}
        # Optima without a memory limit.
        self._free: dict[tuple, Solution] = {}
        # Those that fit, by the stage's key and the micro-batches in flight.
        self._fitting: dict[Hashable, FittedStage] = {}
        self._segments = RecomputeSegments()

    def under(self, options: PlanOptions) -> "StageSolver":
        """Return a solver of the same job under other options. Results that do not depend on them
        are shared.
        """
        other = StageSolver(replace(self.job, options=options))
        other._tables, other._whole = self._tables, self._whole
        return other

    def solve(self, request: StageRequest, cutoff: float = math.inf) -> SolvedStage:
        """Return the cheapest layouts of the stage that fit, or, if there is no cutoff, those that
        an interrupted planning has stored.

        If memory binds, `StagePlan.recompute_per_microbatch` is tried as well.

        Raises:
            NoCheaperSolution: as of `solve_priced`.
            PlanError: no layouts fit.
        """
        if math.isfinite(cutoff):
            return self._cheapest(request, cutoff)
        pinned = sorted(request.pinned.items())
        return self.job.results.get(
            "stage",
            key=lambda: Key(self.job.content, replace(request, pinned={}), pinned),
            compute=lambda: self._cheapest(request, math.inf),
            encode=stage_record,
            decode=lambda record: SolvedStage(**stage_fields(record, request)),
        )

    def fastest(self, request: StageRequest) -> SolvedStage:
        """Return the stage in its fastest layouts without a memory limit, whether they fit or not.

        Raises:
            PlanError: a pin cannot be met.
        """
        priced = self.price(request)
        starts = request.starts
        if len(starts) > 1:
            starts = self._segments.least_memory(priced, request.alive / request.stages_per_mesh)
        temporary_bytes = self.temporary_bytes(priced.finest.intra, priced.free)
        return self._solved(priced, FittedStage(starts, priced.free, temporary_bytes))

    def _cheapest(self, request: StageRequest, cutoff: float) -> SolvedStage:
        """Return the cheapest that fits; propagated layouts may recompute. Raises: as `solve`."""
        solved: list[SolvedStage] = []
        failures: list[PlanError] = []
        for recompute_per_microbatch in (False, True) if request.remat else (False,):
            priced = self.price(request, recompute_per_microbatch)
            try:
                solved.append(self.solve_priced(priced, cutoff))
            except PlanError as error:
                failures.append(error)
                continue
            if solved[-1].is_free:
                break
        if not solved:
            if (
                self.job.options.solver == PROPAGATION
                and self.job.remat is None
                and not request.remat
            ):
                # Priced with layouts that were solved.
                return self.solve(replace(request, remat=True), cutoff)
            raise failures[-1]
        return min(solved, key=lambda stage: stage.plan.predicted.step_seconds)

    def price(self, request: StageRequest, recompute_per_microbatch: bool = False) -> PricedStage:
        """Return the stage's problem, and its optimum without a memory limit, which most stages of
        a good plan take.

        Raises:
            PlanError: a pin cannot be met.
        """
        job = self.job
        key_of_tables = request.submesh, request.shape
        if key_of_tables not in self._tables:
            self._tables[key_of_tables] = job.option_tables(request.submesh, request.shape)
        tables = self._tables[key_of_tables]
        # Nothing is done "per micro-batch": the step's own problem.
        if job.is_whole_batch:
            graph = job.graph
            if request.shape not in self._whole:
                self._whole[request.shape] = build(graph, tables)
            unrestricted = self._whole[request.shape]
        else:
            graph = stage_on(job.graph, request.first, request.last, tables.mesh.num_devices)
            unrestricted = stage_build(graph, tables, recompute_per_microbatch)
        intra = RematSpans(unrestricted, request.starts).split()
        intra = restrict(intra, options_of_part(job.options, graph), job.optimizer, request.pinned)
        # Its neighbours have other problems.
        if job.is_whole_batch and graph.received:
            intra = least_of_equals(intra)
        unrestricted, intra = self._pinned(unrestricted), self._pinned(intra)
        # Most are not looked at again.
        if job.is_whole_batch:
            free = self._free_layouts(intra.problem)
            return PricedStage(job, request, unrestricted, intra, free, recompute_per_microbatch)
        key = (
            structure(graph, job.options),
            request.submesh,
            request.shape,
            request.remat,
            request.starts,
            (*self._pins_of(graph, request), *intra.recomputes),
            recompute_per_microbatch,
        )
        finest = take_apart(intra, request.starts)
        if key not in self._free:
            problem = weighted(finest, job.num_microbatches, 1, request.remat)
            self._free[key] = self._free_layouts(problem)
        free = self._free[key]
        return PricedStage(
            job, request, unrestricted, intra, free, recompute_per_microbatch, finest, key
        )

    def _pins_of(self, graph: StepGraph, request: StageRequest) -> list[Hashable]:
        """Return the pinned modes of a stage's parameters, and which of them are in host memory."""
        pins: list[Hashable] = []
        for parameter in graph.parameters:
            if parameter.name in request.pinned:
                pins.append((parameter.name, request.pinned[parameter.name].modes))
        for index, parameter in enumerate(graph.parameters):
            if parameter.name in (self._on_host or ()):
                pins.append(("host", index))
        return pins

    def _free_layouts(self, problem: Problem) -> Solution:
        """Return the optimum without a memory limit. PlanError: there is none."""
        if self.job.options.solver == PROPAGATION:
            return propagate(problem)
        return self.solve_problem(problem, self.job.options.solver_seconds)

    def _pinned(self, intra: IntraOp) -> IntraOp:
        """Return the problem with the pinned recomputed results, and the pinned parameters in host
        memory.
        """
        intra = memory_choices.with_offload(intra, self._on_host) if self._on_host else intra
        return intra if self._again is None else with_recompute(intra, self._again)

    def solve_priced(self, priced: PricedStage, cutoff: float = math.inf) -> SolvedStage:
        """Return the cheapest layouts that fit, temporary memory included.

        Args:
            cutoff: seconds of a plan that will be taken unless this stage's objective is lower.

        Raises:
            NoCheaperSolution: than `cutoff`. PlanError: none fit.
        """
        request, stage = priced.request, priced.finest
        propagates = self.job.options.solver == PROPAGATION
        if (
            self.job.keeps_by_tensor
            and not propagates
            and not self._fits(stage, priced.free, request)
        ):
            # A choice for each activation: keep it, or make it again.
            priced = priced.changed(with_recompute)
        mesh, is_open = priced.intra.mesh, self._on_host is None and self.job.is_whole_batch
        may_offload = (
            is_open
            and not propagates
            and mesh.host is not None
            and mesh.num_devices <= OFFLOADING_SIZE
        )
        try:
            fitted = self._solve_once(priced, cutoff)
            if may_offload and fitted.solution is not priced.free:
                with suppress(DoesNotFitError, NoCheaperSolution):
                    fitted, priced = self._offloaded(priced, min(cutoff, fitted.solution.seconds))
        except (DoesNotFitError, NoCheaperSolution):
            if not may_offload:
                raise
            fitted, priced = self._offloaded(priced, cutoff)
        if fitted.solution.seconds >= cutoff:
            raise NoCheaperSolution
        if self._on_host:
            memory_choices.check_host(priced.intra, fitted.solution.assignment)
        return self._solved(priced, fitted)

    def pinned(self, priced: PricedStage, choice: int, strategies: Sequence[int]) -> PricedStage:
        """Return the stage with one of its choices pinned, and its `free` layouts solved again.

        Args:
            priced: the stage.
            choice: index of a parameter or op in `priced.intra.problem.choices`.
            strategies: the only ones that it may have.
        """

        def pin(intra: IntraOp) -> IntraOp:
            choices = list(intra.problem.choices)
            cost = np.full_like(choices[choice].cost, np.inf, dtype=float)
            cost[list(strategies)] = choices[choice].cost[list(strategies)]
            choices[choice] = replace(choices[choice], cost=cost)
            problem = replace(intra.problem, choices=tuple(choices))
            return replace(intra, problem=problem, unrestricted=intra.unrestricted or intra.problem)

        pinned = priced.changed(pin)
        problem = pinned.intra.problem
        if not self.job.is_whole_batch:
            count = self.job.num_microbatches
            problem = weighted(pinned.finest, count, 1, priced.request.remat)
        return replace(pinned, free=self._free_layouts(problem))

    def laid_out(self, priced: PricedStage, solution: Solution) -> SolvedStage:
        """Return the stage with an assignment of `priced.finest` that was computed elsewhere,
        whether it fits or not.
        """
        working = self.temporary_bytes(priced.finest.intra, solution)
        return self._solved(priced, FittedStage(priced.request.starts, solution, working))

    def _solved(self, priced: PricedStage, fitted: FittedStage) -> SolvedStage:
        """Return the plan and costs of a stage for one fitted solution, with its proven relative
        gap.
        """
        stage = priced.unrestricted(fitted.starts)
        assignment = fitted.solution.assignment
        cost = summed_costs(stage, assignment, fitted.temporary_bytes)
        prefetched_bytes = self._prefetched_bytes(stage.intra, fitted, cost, priced.request)
        is_alone = math.prod(priced.request.submesh) == self.job.cluster.num_devices
        prefetch = prefetched_bytes > 0 if is_alone else None
        cost = without_hidden(stage.intra, assignment, cost, prefetch)
        plan = replace(
            self._plan(stage.intra, fitted, cost, priced.request, prefetched_bytes),
            recompute_per_microbatch=priced.recompute_per_microbatch,
        )
        solution, gap = fitted.solution, min(1.0, fitted.solution.gap)
        gap = gap if gap > PROVED else 0.0
        return SolvedStage(
            plan, cost, gap, solution.seconds, solution.method, solution is priced.free
        )

    def _offloaded(self, priced: PricedStage, cutoff: float) -> tuple[FittedStage, PricedStage]:
        """Return the cheapest layouts if parameters may be in host memory, and their problem.

        Host memory gets a price, which is doubled until the parameters there fit.

        Raises:
            DoesNotFitError, NoCheaperSolution: nothing cheaper than `cutoff` fits into the device's
                or the host's memory.
        """
        host = priced.intra.mesh.host
        assert host is not None
        free = priced.changed(memory_choices.with_offload)
        if self.job.keeps_by_tensor:
            free = free.changed(partial(memory_choices.with_stored_results, host=host))
        offloading = free = replace(
            free, free=self.solve_problem(free.intra.problem, self.job.options.solver_seconds)
        )
        for attempt in range(HOST_PRICES):
            fitted = self._solve(offloading, cutoff)
            need = memory_choices.host_bytes(offloading.intra, fitted.solution.assignment)
            if need <= host.memory_bytes:
                return fitted, offloading
            offloading = replace(
                free, intra=with_host_price(free.intra, 2.0 ** (attempt - 4) / host.link_bandwidth)
            )
        needed, share = format_bytes(need), format_bytes(host.memory_bytes)
        raise DoesNotFitError(
            f"what lies in host memory needs {needed} of a device's share, {share}"
        )

    def temporary_bytes(self, intra: IntraOp, solution: Solution) -> float:
        """Return the peak of temporary bytes on a device under a solution."""
        return working_bytes(intra, solution.assignment, self.job.gradients_begin)

    def _fits(self, stage: StageProblem, solution: Solution, request: StageRequest) -> bool:
        """Return whether a stage's solution fits into a device's memory."""
        cost = cost_of(stage, solution.assignment, self.temporary_bytes(stage.intra, solution))
        return (
            cost.num_bytes(request.alive / request.stages_per_mesh)
            <= self.job.memory_limit / request.stages_per_mesh
        )

    def _solve_once(self, priced: PricedStage, cutoff: float) -> FittedStage:
        """Return the result of `_solve`, cached for stages with the same problem and as much in
        flight. Args and Raises: as of `_solve`.
        """
        if priced.key is None:
            return self._solve(priced, cutoff)
        request = priced.request
        key = priced.key, request.alive, request.stages_per_mesh
        if key not in self._fitting:
            self._fitting[key] = self._solve(priced, cutoff)
        return self._fitting[key]

    def _solve(self, priced: PricedStage, cutoff: float) -> FittedStage:
        """Return the optimum without a memory limit if it fits, split into the segments that need
        least memory; otherwise the cheapest solution that fits.

        Args:
            cutoff: seconds; as of `StageFit`.

        Raises:
            DoesNotFitError, NoCheaperSolution: as of `StageFit.solve`.
        """
        job = self.job
        request = priced.request
        solution = priced.free
        limit = job.memory_limit / request.stages_per_mesh
        alive = request.alive / request.stages_per_mesh

        starts = request.starts
        if len(starts) > 1:
            starts = self._segments.least_memory(priced, alive)
        stage = priced.problem(starts)
        temporary_bytes = self.temporary_bytes(priced.finest.intra, solution)
        cost = cost_of(stage, solution.assignment, temporary_bytes)
        num_bytes = cost.num_bytes(alive, request.remat)
        if num_bytes <= limit:
            return FittedStage(starts, solution, temporary_bytes)
        if job.options.solver == PROPAGATION:
            raise DoesNotFitError(
                f"layouts that are propagated need {format_bytes(num_bytes)} of"
                f" {format_bytes(limit)} on {math.prod(request.submesh)} devices",
                'pin more parameters to shards, or use solver="ilp", which looks for layouts that'
                " fit",
            )
        fit = StageFit(self, priced, starts, stage, cutoff)
        return fit.solve(solution, cost)

    def _prefetched_bytes(
        self, intra: IntraOp, fitted: FittedStage, cost: StageCost, request: StageRequest
    ) -> int:
        """Return `StagePlan.prefetched_bytes`: what is worth it, and for what there is memory."""
        headroom = self.job.memory_limit - cost.num_bytes(request.alive, request.remat)
        # Parameters and, in the backward, gradients.
        most = headroom / (2 * request.stages_per_mesh)
        return bytes_ahead(intra, fitted.solution.assignment, most)

    def _plan(
        self,
        intra: IntraOp,
        fitted: FittedStage,
        cost: StageCost,
        request: StageRequest,
        prefetched_bytes: int,
    ) -> StagePlan:
        """Return the stage's plan, with totals per step of the solution's cost per micro-batch."""
        count, assignment = self.job.num_microbatches, fitted.solution.assignment
        compute_once, optimizer = busy_seconds(intra, assignment)
        seconds = count * cost.seconds(request.remat) + cost.once
        made_once = sum(
            float(intra.ops[op].forward_seconds[assignment[len(intra.parameters) + op]])
            for op in intra.per_step.ops
        )
        compute = count * compute_once - (count - 1) * made_once
        # The forward's share of compute is that of all seconds.
        if request.remat:
            compute += count * compute_once * cost.forward / max(cost.seconds(), 1e-30)
        compute = min(compute, seconds - optimizer)
        peak = cost.num_bytes(request.alive / request.stages_per_mesh, request.remat)
        # Parameters and, in the backward, gradients.
        peak += 2 * prefetched_bytes
        memory = cost.memory_parts(
            parameter_bytes(intra, assignment),
            request.alive / request.stages_per_mesh,
            request.remat,
        )
        memory["temporary"] += 2 * prefetched_bytes
        communication = max(0.0, seconds - compute - optimizer)
        predicted = Predicted(
            seconds, int(peak), compute, communication, optimizer, memory=whole_bytes(memory, peak)
        )
        plan = decode(intra, assignment, request.submesh, predicted)
        return replace(
            plan,
            ops=(request.first, request.last),
            collectives=tuple(_per_step(c, count, request.remat) for c in plan.collectives),
            remat=request.remat,
            prefetched_bytes=prefetched_bytes,
            recompute_splits=tuple(request.first + start for start in fitted.starts[1:]),
            forward_seconds=cost.forward,
            backward_seconds=cost.backward + (cost.forward if request.remat else 0.0),
        )


def _per_step(collective: Collective, count: int, remat: bool) -> Collective:
    """Return a collective of a micro-batch as that of a step of `count` micro-batches."""
    times = 1
    if collective.phase != "step":
        is_repeated = remat and collective.phase == "forward"
        times = 2 * count if is_repeated else count
    return replace(
        collective,
        count=collective.count * times,
        num_bytes=collective.num_bytes * times,
        seconds=collective.seconds * times,
    )
