"""A chosen stage solved exactly: the ILP of a single stage, weighted for micro-batches, with memory by those in
flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from alpa_strategy.display.numbers import format_bytes
from alpa_strategy.errors import PlanError
from alpa_strategy.inter_op.slice import stage_on
from alpa_strategy.inter_op.stage_costs import CostJob, own_pins, structure
from alpa_strategy.inter_op.stage_problem import StageCost, StageProblem, cost_of, take_apart, weighted
from alpa_strategy.intra_op.build import IntraOp, OptionTables, build
from alpa_strategy.intra_op.decode import decode, working_bytes
from alpa_strategy.intra_op.presets import restrict
from alpa_strategy.intra_op.problem import Solution
from alpa_strategy.intra_op.solve import solve
from alpa_strategy.plan.plan import Collective, ParameterPlan, Predicted, StagePlan


@dataclass(frozen=True)
class StageWish:
    """What the DP chose: ops [first, last) on a submesh and logical shape.

    `alive`: (micro-batch, stage) pairs alive on the mesh at once; `per_rank`: stages that share the mesh; `pinned`: how
    parameters are stored that another stage on the mesh uses too.
    """

    first: int
    last: int
    submesh: tuple[int, int]
    shape: tuple[int, ...]
    remat: bool
    alive: int
    per_rank: int = 1
    pinned: Mapping[str, ParameterPlan] = field(default_factory=dict)


@dataclass(frozen=True)
class SolvedStage:
    """The stage's plan (`first_device` 0) with its parts of cost and proved gap."""

    plan: StagePlan
    cost: StageCost
    gap: float


class StageSolver:
    """Solves stages of one job; stages that are the same by structure share one solution."""

    def __init__(self, job: CostJob) -> None:
        self.job = job
        self._tables: dict[tuple, OptionTables] = {}
        self._solutions: dict[tuple, tuple[Solution, float]] = {}

    def solve(self, wish: StageWish) -> SolvedStage:
        """The cheapest layouts of the stage that fit.

        Raises:
            PlanError: none do.
        """
        job = self.job
        mesh = job.cluster.logical_mesh(wish.shape, wish.submesh)
        tables = self._tables.setdefault(
            (wish.submesh, wish.shape),
            OptionTables(mesh, job.costs, job.optimizer, job.options.accumulate_grad_batches),
        )
        graph = stage_on(job.graph, wish.first, wish.last, mesh.num_devices)
        intra = build(graph, tables)
        restricted = restrict(intra, own_pins(job.options, graph), job.optimizer, wish.pinned)
        pins = tuple((p.name, wish.pinned[p.name].modes) for p in graph.parameters if p.name in wish.pinned)
        key = (structure(graph, job.options), wish.submesh, wish.shape, wish.remat, pins)
        solution, working = self._solve(take_apart(restricted, tables), wish, key)
        cost = cost_of(take_apart(intra, tables), solution.assignment, working)
        return SolvedStage(self._plan(intra, solution, cost, wish), cost, _gap(solution))

    def _solve(self, stage: StageProblem, wish: StageWish, key: tuple) -> tuple[Solution, float]:
        """Without the memory limit first: most stages of a good plan do not need it, and share that solution."""
        job = self.job
        limit = job.memory_limit / wish.per_rank
        alive = wish.alive / wish.per_rank
        if key not in self._solutions:
            free = solve(weighted(stage, job.num_microbatches, 1, wish.remat), job.options.solver_seconds)
            self._solutions[key] = free, working_bytes(stage.intra, free.assignment)
        solution, working = self._solutions[key]
        if cost_of(stage, solution.assignment, working).num_bytes(alive, wish.remat) <= limit:
            return solution, working
        reserve = 0.0
        for _ in range(4):
            problem = weighted(stage, job.num_microbatches, alive, wish.remat, limit - reserve)
            solution = solve(problem, job.options.solver_seconds)
            working = working_bytes(stage.intra, solution.assignment)
            if solution.num_bytes + working <= limit:
                return solution, working
            reserve = max(reserve, working)
        needed = format_bytes(solution.num_bytes + working)
        raise PlanError(f"a stage on {math.prod(wish.submesh)} devices needs {needed} of {format_bytes(limit)}")

    def _plan(self, intra: IntraOp, solution: Solution, cost: StageCost, wish: StageWish) -> StagePlan:
        """Per-step totals of a stage: what is per micro-batch times their number."""
        count = self.job.num_microbatches
        plan = decode(intra, solution.assignment, self.job.costs, self.job.optimizer, wish.submesh)
        seconds = count * cost.seconds(wish.remat) + cost.once
        optimizer = plan.predicted.optimizer_seconds
        compute = count * plan.predicted.compute_seconds
        if wish.remat:
            compute += count * _forward_compute(cost, plan.predicted)
        compute = min(compute, seconds - optimizer)
        return replace(
            plan,
            ops=(wish.first, wish.last),
            collectives=tuple(_per_step(c, count, wish.remat) for c in plan.collectives),
            predicted=Predicted(
                seconds,
                int(cost.num_bytes(wish.alive / wish.per_rank, wish.remat)),
                compute,
                max(0.0, seconds - compute - optimizer),
                optimizer,
            ),
            remat=wish.remat,
            forward_seconds=cost.forward,
            backward_seconds=cost.backward + (cost.forward if wish.remat else 0.0),
        )


def _forward_compute(cost: StageCost, predicted: Predicted) -> float:
    """The forward's share of compute, as that of all seconds."""
    return predicted.compute_seconds * cost.forward / max(cost.forward + cost.backward, 1e-30)


def _per_step(collective: Collective, count: int, remat: bool) -> Collective:
    if collective.phase == "step":
        return collective
    times = count * (2 if remat and collective.phase == "forward" else 1)
    return replace(
        collective,
        count=collective.count * times,
        num_bytes=collective.num_bytes * times,
        seconds=collective.seconds * times,
    )


def _gap(solution: Solution) -> float:
    absolute = max(0.0, solution.seconds - solution.bound)
    return 0.0 if absolute <= 1e-6 * solution.seconds else min(1.0, absolute / solution.seconds)
