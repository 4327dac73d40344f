"""Plans with micro-batches and stages, one stage included.

For each number of micro-batches that `microbatch_search.py` looks at, runs of layers are priced on
submeshes (`inter_op/stage_costs.py`), the stage DP finds the best candidates, and these are solved
exactly (`assembly.py`). Everything that the options leave open is searched: number of
micro-batches, schedule, stages, submeshes, logical shapes, recomputation and layouts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.inter_op.bound import step_bound, with_extra_floors
from alpa_strategy.inter_op.candidates import EVERY_SIZE, check_places, solve_schedules
from alpa_strategy.inter_op.pins import check_pins, layers_of, submeshes
from alpa_strategy.inter_op.stage_costs import (
    LayerRangeCosts,
    StageCostTask,
    out_of_memory,
    stage_costs,
)
from alpa_strategy.inter_op.stage_space import Candidate, StageSpace
from alpa_strategy.inter_op.stored_costs import (
    candidates_key,
    has_own_schedules,
)
from alpa_strategy.inter_op.subgraph import MAX_LAYERS
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Plan
from alpa_strategy.microbatch.transform import microbatch, notes_of_split
from alpa_strategy.options import PROPAGATION
from alpa_strategy.partial_results import NOT_STORED, PartialResults
from alpa_strategy.planner.assembly import best_solved, solved_plan
from alpa_strategy.planner.cost_task import stage_cost_task
from alpa_strategy.planner.failures import Failures, no_plan_error, timed
from alpa_strategy.planner.microbatch_search import (
    SearchResult,
    Submeshes,
    microbatch_counts,
    search_microbatches,
)
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.sharding.strategies import replicated_notes
from alpa_strategy.units import format_bytes

# Candidates up to this many times slower than a known plan are listed: they show which submeshes
# better ones use.
CEILING_FACTOR = 1.5

# On large clusters, submeshes that are up to this many times smaller or larger than the root of the
# number of devices are priced exactly from the start.
MEDIUM_FACTOR = 4

# Finds stages for one number of micro-batches: (priced stages, most seconds) -> best candidates.
SolveSchedules = Callable[[StageSpace, float], list[Candidate]]


def plan_pipeline(
    task: PlanTask,
    known: float = math.inf,
    several: bool = False,
    solve: SolveSchedules = solve_schedules,
) -> Plan:
    """Return the best plan with micro-batches and stages; its ops are those of the micro-batched
    graph.

    Args:
        known: seconds of a step that is planned already: only faster candidates are searched.
        several: require at least two stages and two micro-batches.
        solve: finds the stages of one number of micro-batches, as `solve_schedules` does.

    Raises:
        PlanError: nothing fits, or a pin cannot be met.
        OptionError: as of `check_pins`.
    """
    check_pins(task.step, task.cluster, task.options)
    search = PipelineSearch(task, several, solve)
    search.run(known)
    return replace(search.solve_best(), solver_seconds=dict(search.spent))


class PipelineSearch:
    """The candidates of all numbers of micro-batches that are searched, and the best of them."""

    def __init__(self, task: PlanTask, several: bool, solve: SolveSchedules) -> None:
        self.task = task
        self.several = several
        self.meshes = submeshes(task.cluster)
        if task.options.num_stages == 1:
            # The stage has all devices.
            self.meshes = self.meshes[-1:]
        # Candidates over all submeshes, the fastest first.
        self.best: list[Candidate] = []
        # Why there are no others.
        self.failures: Failures = []
        # The last job of which nothing fits into memory.
        self.last_job: StageCostTask | None = None
        # Seconds by phase of planning.
        self.spent: dict[str, float] = defaultdict(float)

        self._solve = solve
        # Costs of runs of layers by what they depend on, shared between numbers of micro-batches.
        self._runs: dict[Hashable, LayerRangeCosts] = {}
        # By number of micro-batches; None: the step cannot be split so.
        self._jobs: dict[int, StageCostTask | None] = {}
        # By number of micro-batches: what was priced on all submeshes, without the stages that were
        # solved and do not fit.
        self._spaces: dict[int, StageSpace] = {}
        # Numbers of micro-batches that may be tried, in descending order, and those whose costs on
        # all submeshes are more than a bound.
        self._counts: list[int] = []
        self._fully_priced: set[int] = set()
        # Seconds of a step that is planned already.
        self._known = math.inf
        # As in `_spaces`, with all stages: a bound is of these.
        self._priced: dict[int, StageSpace] = {}
        # Submeshes that are unlikely to be used: a bound of their costs is enough.
        self._unlikely: frozenset[tuple[int, int]] = frozenset()

    @property
    def _is_small(self) -> bool:
        """Whether submeshes of all sizes can be priced for every number of micro-batches."""
        return self.task.cluster.num_devices <= EVERY_SIZE

    def run(self, known: float) -> None:
        """Fill `best` with candidates that are predicted to take less than `known` seconds.

        Raises:
            PlanError: there is only one number of micro-batches, and it is not possible.
        """
        options = self.task.options
        counts = microbatch_counts(self.task.step, self.task.cluster, options)
        if self.several:
            counts = [count for count in counts if count > 1]
        self._counts = counts
        self._known = known
        if len(counts) == 1:
            # An error of the only number of micro-batches is raised, not collected.
            self._jobs[counts[0]] = self._make_job(counts[0])

        def price(count: int, used: Submeshes | None) -> SearchResult:
            return self._price(count, None if self._is_small else used, known)

        max_stages = options.num_stages or min(self.task.cluster.num_devices, MAX_LAYERS)
        search_microbatches(counts, max_stages, self._compute_bound, price, known)

        is_pinned = options.schedule or options.num_stages or options.device_map
        if self.best and self._is_small and not (self.several or is_pinned):
            self._price_one_stage(counts, known)

        faster = [candidate for candidate in self.best if candidate.seconds < known]
        self.best = sorted(faster, key=lambda candidate: candidate.seconds)
        if not self.best and not self.failures:
            problem = f"no number of micro-batches can take less than {known:.3g} s"
            self.failures.append(("", PlanError(problem)))

    def solve_best(self) -> Plan:
        """Return the fastest plan of the best candidates, solved by the ILP, with notes and its gap
        to the lower bound.

        Raises:
            PlanError: no candidate fits.
        """

        plan = self._best_plan()
        if plan is None:
            plan = self._plan_of_untried_counts()
        if plan is None:
            raise self._no_pipeline_error()

        job = self._jobs[plan.num_microbatches]
        assert job is not None
        notes = (
            *job.graph.notes,
            *self._notes_on_micro_batches(plan),
            *replicated_notes(self.task.step, self.task.op_costs),
            *plan.notes,
        )
        gap = max(0.0, 1 - self._bound(plan.num_microbatches) / plan.predicted.step_seconds)
        return replace(plan, notes=notes, gap=gap)

    def _bound(self, count: int) -> float:
        """Return the seconds of a step that no plan with `count` micro-batches can be below.

        0 if there is none: layouts that are propagated are never called optimal.
        """
        space = self._priced.get(count)
        if space is None or self.task.options.solver == PROPAGATION:
            return 0.0
        with self.task.progress("bound"), timed(self.spent, "bound"):
            return self._results.get(
                "bound",
                key=lambda: candidates_key(space, math.inf),
                compute=lambda: step_bound(with_extra_floors(space)),
                encode=lambda seconds: {"seconds": seconds},
                decode=lambda record: float(record["seconds"]),
            )

    @property
    def _results(self) -> PartialResults:
        """The results of an interrupted planning; none if a user's schedule decides with them."""
        return NOT_STORED if has_own_schedules() else self.task.results

    def _best_plan(self) -> Plan | None:
        """Return the fastest plan of the best candidates, None if none of them fits."""

        def solve(candidate: Candidate) -> Plan:
            with self.task.progress("solve the chosen stages"), timed(self.spent, "chosen stages"):
                return solved_plan(candidate, self.meshes, self.task.fingerprint)

        plan, failures = best_solved(self.best, solve, self._search_again)
        self.failures += failures
        return plan

    def _search_again(
        self, remaining: list[Candidate], failed: Candidate, error: PlanError, seconds: float
    ) -> list[Candidate]:
        """Return the candidates that are left, and the best without the stage that has no plan.

        Args:
            remaining: candidates that are not solved yet.
            failed: the candidate that has no plan.
            error: why.
            seconds: of the best plan so far.
        """
        count = failed.job.num_microbatches
        if error.stage is None or count not in self._spaces:
            return remaining

        space = self._spaces[count].without(failed, error.stage)
        self._spaces[count] = space
        left: list[Candidate] = []
        for candidate in remaining:
            if candidate.job.num_microbatches != count or space.may_fit(candidate):
                left.append(candidate)
        known = {(candidate.schedule, candidate.stages) for candidate in left}
        with (
            self.task.progress(f"{count} micro-batches, other stages"),
            timed(self.spent, "stage DP"),
        ):
            for candidate in self._solve(space, min(seconds, self._known)):
                if (candidate.schedule, candidate.stages) not in known:
                    left.append(candidate)
        return left

    def _plan_of_untried_counts(self) -> Plan | None:
        """Price other numbers of micro-batches in turn, until stages fit.

        Returns:
            The plan of the first one of which they do; None if there is none.
        """
        for count in self._untried_counts():
            self._price_again(count)
            plan = self._best_plan()
            if plan is not None:
                return plan
        return None

    def _untried_counts(self) -> list[int]:
        """Return the numbers of micro-batches for which not all stages were priced. Those above the
        largest priced one come first, the largest first: activations need less memory. Those below
        it follow, the smallest first. [] if there is a plan already.
        """
        if self._known < math.inf:
            return []
        most_tried = max(self._fully_priced, default=0)
        untried = [count for count in self._counts if count not in self._fully_priced]
        more = [count for count in reversed(untried) if count > most_tried]
        fewer = [count for count in untried if count < most_tried]
        return [count for count in (*more, *fewer) if self._job(count) is not None]

    def _price_again(self, count: int) -> None:
        """Let `best` be the candidates of one number of micro-batches, on all submeshes."""
        self.best = self._priced_candidates(count, self.meshes, frozenset(), math.inf)
        self.best.sort(key=lambda candidate: candidate.seconds)
        if not self.best:
            self._report_no_stages(count, math.inf)

    def _no_pipeline_error(self) -> PlanError:
        """Return the error for the case that no candidate fits. Reasons of memory are added to
        `self.failures` for it.
        """
        if self.last_job is not None:
            largest = out_of_memory(self.last_job, self.meshes)
            if largest is not None:
                self.failures.append(("", DoesNotFitError(largest)))
        for count, space in sorted(self._spaces.items()):
            if space.unfit:
                limit = format_bytes(space.job.memory_limit)
                problem = (
                    f"{len(space.unfit)} chosen stages were solved and do not fit into {limit} a"
                    " device, and no others are left"
                )
                self.failures.insert(0, (f"{count} micro-batches", DoesNotFitError(problem)))
        fix = (
            "use more devices, a smaller batch, other num_microbatches, num_stages or schedule,"
            " or raise memory_limit"
        )
        return no_plan_error("no pipeline fits", self.failures, fix)

    def _notes_on_micro_batches(self, plan: Plan) -> tuple[str, ...]:
        """Return why stages take turns on one micro-batch, if they do and no option asks for it."""
        is_asked_for = self.task.options.num_microbatches == 1
        if len(plan.stages) == 1 or plan.num_microbatches > 1 or is_asked_for:
            return ()
        reason = "no rows for more"
        if any(count > 1 for count in self._jobs):
            reason = "more would take longer"
        if self.failures:
            label, error = self.failures[0]
            reason = f"{label}: {error.problem}"
        return (f"one micro-batch, so the stages work one after the other: {reason}",)

    def _job(self, count: int) -> StageCostTask | None:
        """Return the job of `count` micro-batches, None if the step cannot be split so; the reason
        is added to `failures` once.
        """
        if count not in self._jobs:
            try:
                self._jobs[count] = self._make_job(count)
            except PlanError as error:
                self.failures.append((f"{count} micro-batches", error))
                self._jobs[count] = None
        return self._jobs[count]

    def _make_job(self, count: int) -> StageCostTask:
        """Split the step into `count` micro-batches and group its ops into layers.

        Raises:
            PlanError: the step cannot be split so, or pinned layers have no submesh.
        """
        task = self.task
        with timed(self.spent, "micro-batches and layers"):
            graph = microbatch(task.step, count, task.cluster.num_devices).graph
            self._check_exact(graph)
            cuts, places = layers_of(graph, task.cluster, task.options)
            remat = task.options.remat
            if isinstance(remat, tuple):
                # Names of ops: single results are recomputed, no segments of layers.
                remat = False
            job = stage_cost_task(task, graph, cuts, count, remat=remat, places=places)
            if any(places):
                check_places(job, self.meshes)
            return job

    def _check_exact(self, graph: StepGraph) -> None:
        """Raise PlanError if micro-batches are not exactly the full batch.

        Only the user can choose those.
        """
        notes = notes_of_split(self.task.step, graph)
        if notes and self.task.options.num_microbatches is None:
            raise PlanError(notes[0], "set num_microbatches to have it so")

    def _compute_bound(self, count: int) -> float:
        """Return the seconds of a step if all devices were always busy; inf if the step cannot be
        split into `count` micro-batches.

        An op on several devices takes at least as much of their time as on one.
        """
        job = self._job(count)
        if job is None:
            return math.inf
        op_costs = self.task.op_costs
        seconds = sum(sum(op_costs.op_seconds(op.call)) for op in job.graph.ops)
        return count * seconds / self.task.cluster.num_devices

    def _price(self, count: int, used: Submeshes | None, known: float) -> SearchResult:
        """Price `count` micro-batches on the submeshes `used`, or on all of them (None).

        On all submeshes the best candidates are remembered; on those in use only the seconds of
        the best one are of interest.
        """
        if used is None and count in self._priced:
            # It was priced on all of them before.
            return SearchResult()

        ceiling = min([CEILING_FACTOR * known, *(candidate.seconds for candidate in self.best)])
        if used is not None:
            meshes = tuple(self.meshes[i] for i in sorted(used))
            candidates = self._priced_candidates(count, meshes, self._unlikely, ceiling)
            return SearchResult(candidates[0].seconds, used) if candidates else SearchResult()

        if self._is_small or self._unlikely:
            candidates = self._priced_candidates(count, self.meshes, self._unlikely, ceiling)
        else:
            candidates = self._candidates_by_likely_sizes(count, ceiling)
        if not candidates:
            self._report_no_stages(count, ceiling)
            return SearchResult()

        self.best += candidates
        fastest = candidates[0]
        if not self._is_small:
            self._unlikely = self._far_from_sizes_of(fastest)
        return SearchResult(fastest.seconds, frozenset(fastest.submesh_of))

    def _candidates_by_likely_sizes(self, count: int, ceiling: float) -> list[Candidate]:
        """Return candidates, fastest first, where pricing all submeshes takes minutes.

        Submeshes of medium size are priced exactly. For the others a bound is enough, until the
        best stages have such sizes.

        Args:
            count: number of micro-batches.
            ceiling: seconds of a step; slower candidates are of no interest.
        """
        unlikely = self._extreme_sizes()
        while unlikely:
            candidates = self._priced_candidates(count, self.meshes, unlikely, ceiling)
            if not candidates:
                # The fastest layouts, which alone are priced, may need more memory than others.
                break
            still_unlikely = unlikely & self._far_from_sizes_of(candidates[0])
            if still_unlikely == unlikely:
                return candidates
            unlikely = still_unlikely
        return self._priced_candidates(count, self.meshes, frozenset(), ceiling)

    def _extreme_sizes(self) -> frozenset[tuple[int, int]]:
        """Return the submeshes that are far smaller or larger than the root of the cluster's size:
        as many stages as each has devices.
        """
        medium = math.sqrt(self.task.cluster.num_devices)

        def is_medium(mesh: tuple[int, int]) -> bool:
            return medium / MEDIUM_FACTOR <= math.prod(mesh) <= medium * MEDIUM_FACTOR

        return frozenset(mesh for mesh in self.meshes if not is_medium(mesh))

    def _priced_candidates(
        self,
        count: int,
        meshes: tuple[tuple[int, int], ...],
        unlikely: frozenset[tuple[int, int]],
        ceiling: float,
    ) -> list[Candidate]:
        """Return candidates below `ceiling` seconds, the fastest first.

        If all submeshes are priced, their space is remembered.

        Args:
            meshes: submeshes that are priced.
            unlikely: of them, those for which a bound of the costs is enough.

        Raises:
            OptionError, PlanError: a pin cannot be met.
        """
        job = self._job(count)
        assert job is not None
        with self.task.progress(f"{count} micro-batches"):
            with timed(self.spent, "stage costs"):
                runs = stage_costs(job, meshes, self._runs, unlikely=unlikely)

            # [first layer, last layer + 1, submesh]
            allowed = np.ones((job.num_layers, job.num_layers + 1, len(meshes)), dtype=bool)
            allowed[0, job.num_layers] = not self.several
            space = StageSpace(job, meshes, runs, allowed)
            if meshes == self.meshes:
                self._spaces[count] = self._priced[count] = space
                if not unlikely:
                    self._fully_priced.add(count)

            with timed(self.spent, "stage DP"):
                return self._solve(space, ceiling)

    def _report_no_stages(self, count: int, ceiling: float) -> None:
        """Add to `failures` that `count` micro-batches have no candidate below `ceiling` seconds.

        Without a ceiling it is memory that lacks; `last_job` is then the job, for the error's
        advice.
        """
        job = self._job(count)
        assert job is not None
        problem = f"no stages fit into {format_bytes(job.memory_limit)} a device"
        label = f"{count} micro-batches"
        if ceiling < math.inf:
            error = PlanError(f"{problem} in less than {ceiling:.3g} s")
            self.failures.append((label, error))
            self.last_job = None
        else:
            self.failures.append((label, DoesNotFitError(problem)))
            self.last_job = job

    def _far_from_sizes_of(self, candidate: Candidate) -> frozenset[tuple[int, int]]:
        """Return the submeshes that are less than half, or more than twice, as large as all that
        the candidate uses: on large clusters pricing them exactly takes minutes.
        """
        sizes = {math.prod(self.meshes[i]) for i in candidate.submesh_of}

        def is_near(mesh: tuple[int, int]) -> bool:
            return any(size <= 2 * math.prod(mesh) <= 4 * size for size in sizes)

        return frozenset(mesh for mesh in self.meshes if not is_near(mesh))

    def _price_one_stage(self, counts: Sequence[int], known: float) -> None:
        """Price one stage over all devices, from few micro-batches to many.

        Pipelines need many micro-batches, one stage as few as fit: the search over pipelines may
        not come to them. Candidates are added to `self.best`. It stops once a bound rules out more,
        or two numbers were no better.

        Args:
            counts: numbers of micro-batches, in descending order.
            known: seconds of a step that is planned already.
        """
        num_devices = self.task.cluster.num_devices
        all_devices = next(mesh for mesh in self.meshes if math.prod(mesh) == num_devices)
        self._unlikely = frozenset(self.meshes) - {all_devices}

        misses = 0
        for count in reversed(counts):
            job = self._job(count)
            if job is None or count in self._priced:
                continue
            best_seconds = min([known, *(candidate.seconds for candidate in self.best)])
            with timed(self.spent, "stage costs"):
                fastest = stage_costs(job, [all_devices], self._runs, unlikely=[all_devices])
                bound = fastest[0].least.sum()
                if bound >= best_seconds or misses > 1:
                    # With more micro-batches one stage takes longer.
                    return
                seconds = stage_costs(job, [all_devices], self._runs)[0].seconds[0, -1]
                fits = bool(np.isfinite(seconds).any())
            if fits and self._price(count, None, known).seconds >= best_seconds:
                misses += 1
