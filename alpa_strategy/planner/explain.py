"""Why a parameter or an op has its layout: what each other layout would cost.

Every other layout is pinned in turn, and its stage is solved once more by the planner's own code:
all other layouts follow it, and memory binds as it does in the plan.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from alpa_strategy.errors import PlanError, did_you_mean
from alpa_strategy.inter_op.stage_solve import PricedStage, SolvedStage, StageSolver
from alpa_strategy.intra_op.solver.solve import NoCheaperSolution
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import ParameterPlan, Plan, StagePlan, modes_text, stages_by_devices
from alpa_strategy.ir.plan_details import Explanation, LayoutChoice
from alpa_strategy.ir.value_names import collapse_indices
from alpa_strategy.planner.plan_stages import stage_job, stage_request, step_with
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.units import format_bytes, format_seconds

# Names of changed parameters and ops that a choice lists.
LISTED_CHANGES = 4

# Steps that differ by less than this share of them are the same.
SAME_SHARE = 1e-6

_SIMPLER = (
    "The plan is not the solver's own: a simpler one was taken that predictions do not tell apart"
    " from it, so other layouts may seem faster (see the plan's notes)."
)


def explain(task: PlanTask, plan: Plan, name: str, most: int | None = None) -> Explanation:
    """Solve a plan's stage with every other layout of a parameter or op, and return these with
    their costs, the cheapest first.

    Args:
        task: for which the plan was made.
        plan: of the task.
        name: of a parameter (any of its names) or an op, as the plan has it.
        most: layouts to solve to the end: those with which the stage takes least. Of the others
            only their number is returned. None: all. Where memory binds, one layout may take many
            seconds.

    Raises:
        PlanError: there is no such parameter or op, or the plan has no layouts of its own.
    """
    if plan.is_eager:
        raise PlanError(
            "steps of this plan run eagerly: it decides no layouts of ops",
            "ask about a plan of captured steps",
        )
    job = stage_job(task, plan)
    index, of = _place(job.graph, plan, name)
    solver = StageSolver(job)
    request = stage_request(job, task, plan, index)
    priced = solver.price(request, plan.stages[index].recompute_per_microbatch)
    return _Question(task, plan, solver, priced, index, of).answer(most)


@dataclass(frozen=True)
class _PinnedLayout:
    """A layout of what is explained, and the stage with it, solved without a memory limit."""

    layout: str
    priced: PricedStage

    @property
    def least_seconds(self) -> float:
        """A lower bound of what the solver minimises, with any limit."""
        return self.priced.free.bound


@dataclass(frozen=True)
class _Subject:
    """The parameter or op that is explained, by the name that plans have."""

    name: str
    is_parameter: bool


def _place(graph: StepGraph, plan: Plan, name: str) -> tuple[int, _Subject]:
    """Return the index of the stage of a parameter or op (the first, if several have it), and the
    parameter or op. A name with `*`, as `alpa show` has it for equal layers, stands for the first
    of them.

    Raises:
        PlanError: there is none.
    """
    names = {alias: of.name for of in graph.parameters for alias in of.names}
    known = [*names, *(op for stage in plan.stages for op in stage.strategies)]
    if "*" in name:
        name = next((other for other in known if fnmatchcase(other, name)), name)
    parameter = names.get(name, name)
    for index, stage in enumerate(plan.stages):
        if parameter in stage.parameter_plans:
            return index, _Subject(parameter, True)
        if name in stage.strategies:
            return index, _Subject(name, False)
    near = did_you_mean(name, known)
    raise PlanError(
        f"the plan has no parameter or op {name!r}",
        near or "give a name as `alpa show` and the page have them",
    )


class _Question:
    """One parameter or op of one stage, whose other layouts are solved."""

    def __init__(
        self,
        task: PlanTask,
        plan: Plan,
        solver: StageSolver,
        priced: PricedStage,
        index: int,
        of: _Subject,
    ) -> None:
        self._task = task
        self._plan = plan
        self._solver = solver
        self._priced = priced
        self._index = index
        self._of = of
        intra = priced.intra
        if of.is_parameter:
            names = [parameter.name for parameter in intra.step.parameters]
            self._choice = names.index(of.name)
        else:
            names = [op.name for op in intra.step.ops]
            self._choice = len(intra.parameters) + names.index(of.name)

    @property
    def _stage(self) -> StagePlan:
        return self._plan.stages[self._index]

    def answer(self, most: int | None) -> Explanation:
        """Solve the stage with each layout of the parameter or op, and return the layouts with
        their costs and the reasons for the chosen one.

        Args:
            most: layouts to solve to the end; None: all.
        """
        chosen_layout = self._layout_in(self._stage)
        chosen = self._of_plan(chosen_layout)
        layouts = list(self._layouts())
        pinned, others = self._pinned(layouts)
        allowed = self._without_penalties(pinned, chosen_layout)
        num_forbidden = len(layouts) - len(allowed) - len(others)

        reasons: list[str] = []
        candidates = []
        for candidate in allowed:
            if candidate.layout != chosen_layout:
                candidates.append(candidate)
            elif self._is_beaten(candidate, chosen):
                reasons.append(_SIMPLER)
        solved_choices, num_slower = self._best(candidates, most)
        others += solved_choices
        others.sort(key=_order)
        writer = _Reasons(self._plan, self._stage, chosen, others, num_forbidden)
        return Explanation(
            name=self._of.name,
            kind="parameter" if self._of.is_parameter else "op",
            stage=self._index,
            chosen=chosen,
            choices=tuple(others),
            reasons=(
                *reasons,
                *writer.lines(),
                *self._lines_of_equals(chosen_layout),
                *self._memory_lines(chosen_layout),
                *self._shared_memory_lines(),
            ),
            num_slower=num_slower,
        )

    def _pinned(
        self, layouts: Iterable[tuple[str, tuple[int, ...]]]
    ) -> tuple[list[_PinnedLayout], list[LayoutChoice]]:
        """Return the stage with each layout that has a finite cost, solved without a memory limit,
        and the layouts with which it has no solution.

        Args:
            layouts: as of `_layouts`.
        """
        pinned: list[_PinnedLayout] = []
        impossible: list[LayoutChoice] = []
        costs = self._priced.intra.problem.choices[self._choice].cost
        for layout, strategies in layouts:
            if not np.isfinite(costs[list(strategies)]).any():
                continue
            try:
                priced = self._solver.pinned(self._priced, self._choice, strategies)
            except PlanError as error:
                impossible.append(_impossible(layout, error))
            else:
                pinned.append(_PinnedLayout(layout, priced))
        return pinned, impossible

    def _without_penalties(
        self, pinned: Sequence[_PinnedLayout], chosen_layout: str
    ) -> list[_PinnedLayout]:
        """Return the layouts that the plan's options allow.

        A named plan forbids uses of parameters by penalties longer than any step. A layout may have
        those that the plan cannot avoid either.
        """
        if self._priced.intra.unrestricted is None:
            return list(pinned)
        penalties = {}
        for candidate in pinned:
            laid_out = self._solver.laid_out(candidate.priced, candidate.priced.free)
            seconds = laid_out.plan.predicted.step_seconds
            penalties[candidate.layout] = laid_out.objective - seconds
        of_plan = penalties.get(chosen_layout, 0.0)
        most_penalty = of_plan + self._stage.predicted.step_seconds
        return [candidate for candidate in pinned if penalties[candidate.layout] <= most_penalty]

    def _is_beaten(self, candidate: _PinnedLayout, chosen: LayoutChoice) -> bool:
        """Return whether the stage may be faster than in the plan, with the plan's own layout."""
        try:
            solved = self._solver.solve_priced(candidate.priced)
        except PlanError:
            return False
        return _is_faster(self._choice_of(candidate.layout, solved), chosen)

    def _best(
        self, candidates: Sequence[_PinnedLayout], most: int | None
    ) -> tuple[list[LayoutChoice], int]:
        """Solve the stage with the layouts that may be among the best, and return these with those
        that do not fit, and the number of the others.

        Args:
            candidates: layouts other than the plan's.
            most: of the best; None: all.
        """
        choices: list[LayoutChoice] = []
        # What the solver minimised, in ascending order.
        objectives: list[float] = []
        num_slower = 0
        for candidate in sorted(candidates, key=lambda candidate: candidate.least_seconds):
            cutoff = math.inf
            if most is not None and len(objectives) >= most:
                cutoff = objectives[most - 1]
            try:
                solved = self._solver.solve_priced(candidate.priced, cutoff)
            except NoCheaperSolution:
                num_slower += 1
            except PlanError as error:
                choices.append(_impossible(candidate.layout, error))
            else:
                insort(objectives, solved.objective)
                choices.append(self._choice_of(candidate.layout, solved))
        return choices, num_slower

    def _layouts(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield every layout as text, with the indices of the choice's strategies that have it."""
        intra = self._priced.intra
        if self._of.is_parameter:
            plans = intra.parameters[self._choice].plans
            texts = [_parameter_layout(plan) for plan in plans]
        else:
            options = intra.ops[self._choice - len(intra.parameters)]
            texts = [_op_layout(strategies) for strategies in options.strategies]
        strategies_of: dict[str, list[int]] = {}
        for strategy, text in enumerate(texts):
            strategies_of.setdefault(text, []).append(strategy)
        for text, strategies in strategies_of.items():
            yield text, tuple(strategies)

    def _layout_in(self, stage: StagePlan) -> str:
        """Return the layout in question under another solution of the stage, as text."""
        if self._of.is_parameter:
            return _parameter_layout(stage.parameter_plans[self._of.name])
        return _op_layout(stage.strategies[self._of.name])

    def _choice_of(self, layout: str, solved: SolvedStage) -> LayoutChoice:
        """Return the choice of `layout`, priced by the stage as solved with it."""
        of_stage = solved.plan.predicted
        changes = list(self._changes(solved.plan))
        return LayoutChoice(
            layout=layout,
            seconds=self._step_seconds(solved),
            stage_seconds=of_stage.step_seconds,
            num_bytes=of_stage.peak_bytes,
            compute_seconds=of_stage.compute_seconds,
            communication_seconds=of_stage.communication_seconds,
            num_changes=len(changes),
            changes=tuple(changes[:LISTED_CHANGES]),
        )

    def _step_seconds(self, solved: SolvedStage) -> float:
        """Return the seconds of a step with the stage as solved, and all others as they are."""
        seconds = step_with(self._solver.job, self._plan, self._index, solved)
        predicted = self._plan.predicted
        on_host = predicted.host_seconds + predicted.loop_seconds - predicted.hidden_seconds
        return seconds + on_host

    def _of_plan(self, layout: str) -> LayoutChoice:
        """Return the choice that the plan made, with the plan's own predictions.

        Args:
            layout: its text.
        """
        predicted = self._stage.predicted
        return LayoutChoice(
            layout=layout,
            seconds=self._plan.predicted.step_seconds,
            stage_seconds=predicted.step_seconds,
            num_bytes=predicted.peak_bytes,
            compute_seconds=predicted.compute_seconds,
            communication_seconds=predicted.communication_seconds,
        )

    def _changes(self, other: StagePlan) -> Iterator[str]:
        """Yield the other parameters and ops whose layouts differ from the plan's."""
        for name, plan in other.parameter_plans.items():
            if name != self._of.name and plan != self._stage.parameter_plans.get(name):
                yield name
        for name, strategies in other.strategies.items():
            if name != self._of.name and strategies != self._stage.strategies.get(name):
                yield name

    def _memory_lines(self, chosen: str) -> Iterator[str]:
        """Yield whether memory binds, and the layout that it would have without a limit."""
        free = self._solver.laid_out(self._priced, self._priced.free)
        seconds = self._stage.predicted.step_seconds
        saved = seconds - free.plan.predicted.step_seconds
        if saved <= SAME_SHARE * seconds:
            yield "Memory does not bind: without a limit the stage would be no faster."
            return
        layout = self._layout_in(free.plan)
        peak, limit = free.plan.predicted.peak_bytes, self._task.memory_limit
        needed = f"{format_bytes(peak)} of {format_bytes(limit)}"
        if peak > limit:
            needed = f"{format_bytes(peak - limit)} more than the {format_bytes(limit)} that it has"
        line = (
            f"Memory binds: without a limit the stage would need {needed}, and save"
            f" {self._saved_text(saved, free)}. Then "
        )
        more = ""
        if len(self._plan.stages) > 1:
            more = (
                " The other stages are as they are in that:"
                " `alpa whatif PLAN.json --set device.memory_bytes=2x` plans all of them."
            )
        if layout == chosen:
            yield f"{line}{self._of.name} would have the same layout.{more}"
        else:
            yield f"{line}{self._of.name} would have the layout {layout}.{more}"

    def _saved_text(self, seconds: float, solved: SolvedStage) -> str:
        """Return the seconds that a stage saves in a step as text, with those of the whole step if
        there are other stages.

        Args:
            seconds: that the stage saves.
            solved: the stage as it would be.
        """
        text = format_seconds(seconds)
        if len(self._plan.stages) == 1:
            return f"{text} a step"
        of_step = max(0.0, self._plan.predicted.step_seconds - self._step_seconds(solved))
        return f"{text} of its own time in a step, {format_seconds(of_step)} of the whole step"

    def _lines_of_equals(self, chosen: str) -> Iterator[str]:
        """Yield that parameters of equal layers are stored in another way than this one, if some
        are.

        Args:
            chosen: the layout of this one.
        """
        if not self._of.is_parameter:
            return
        pattern = collapse_indices(self._of.name)
        others: Counter[str] = Counter()
        for name, plan in self._stage.parameter_plans.items():
            if collapse_indices(name) == pattern:
                others[_parameter_layout(plan)] += 1
        others.pop(chosen, None)
        if others:
            stored = ", ".join(f"{count} as {layout}" for layout, count in others.items())
            yield (
                f"Of {pattern}, this stage stores others in another way ({stored}). Equal layers"
                " cost the same: which of them has which layout is arbitrary."
            )

    def _shared_memory_lines(self) -> Iterator[str]:
        """Yield which stages the devices have beside this one, and the memory of all of them;
        nothing if there are none.
        """
        indices = next(group for group in stages_by_devices(self._plan) if self._index in group)
        if len(indices) < 2:
            return
        together = sum(self._plan.stages[index].predicted.peak_bytes for index in indices)
        yield (
            f"The memory is that of stage {self._index} alone: its devices have the stages"
            f" {', '.join(map(str, indices))}, with {format_bytes(together)} together in the plan."
        )


@dataclass(frozen=True)
class _Reasons:
    """Sentences about a choice and the others."""

    plan: Plan
    stage: StagePlan
    chosen: LayoutChoice
    others: Sequence[LayoutChoice]

    # Layouts that options rule out.
    forbidden: int

    def lines(self) -> Iterator[str]:
        """Yield sentences on the other layouts: how many are ruled out, the cost of the next best
        one, the parts of the step that would take longer, and what would have to change. Only the
        first, and that none fits, if none does.
        """
        if self.forbidden:
            layouts = "layout is" if self.forbidden == 1 else "layouts are"
            yield f"{self.forbidden} other {layouts} ruled out by the options of the plan."
        fitting = [choice for choice in self.others if choice.seconds is not None]
        if not fitting:
            yield (
                "No other layout is possible on this mesh."
                if not self.others
                else ("No other layout fits into memory.")
            )
            return
        best = fitting[0]
        yield self._cost(best)
        costing = next(filter(self._is_slower, fitting), None)
        if costing is not None and costing is not best:
            yield f"The first that costs anything: {self._cost(costing)}"
        if best.num_changes:
            listed = ", ".join(best.changes)
            more = ", ..." if best.num_changes > len(best.changes) else ""
            yield (
                f"Neighbours: with {best.layout}, {best.num_changes} other parameters and ops"
                f" would change too ({listed}{more})."
            )
        yield from self._what_would_change(best)

    def _is_slower(self, choice: LayoutChoice) -> bool:
        """Return whether the step takes noticeably longer with a choice."""
        assert choice.seconds is not None
        assert self.chosen.seconds is not None
        return choice.seconds > self.chosen.seconds * (1 + SAME_SHARE)

    def _cost(self, best: LayoutChoice) -> str:
        """Return a sentence on what the best other layout would cost."""
        assert best.seconds is not None
        assert self.chosen.seconds is not None
        more = best.seconds - self.chosen.seconds
        stage_more = best.stage_seconds - self.chosen.stage_seconds
        if abs(more) <= SAME_SHARE * self.chosen.seconds:
            if len(self.plan.stages) > 1 and stage_more > SAME_SHARE * self.chosen.stage_seconds:
                return (
                    f"{best.layout} would take {format_seconds(stage_more)} more in this stage,"
                    " which another stage's time hides."
                )
            return (
                f"{best.layout} would take as long as the layout of the plan: which of them is"
                " taken is arbitrary."
            )
        share = more / self.chosen.seconds
        parts = ", ".join(f"{_signed(seconds)} {part}" for part, seconds in self._parts(best))
        of_parts = f": {parts}" if parts else ""
        of_step = f"{_signed(more)} a step ({share:+.1%})"
        if stage_more > 0 > more:
            # The step is simulated with all stages; each of them was solved by its own seconds.
            return (
                f"{best.layout} is the next best: this stage, which was solved by its own seconds,"
                f" would take {format_seconds(stage_more)} more{of_parts}. The step with all stages"
                f" changes by {of_step}."
            )
        if of_parts and len(self.plan.stages) > 1:
            of_parts = f"; this stage's own time{of_parts}, which other stages hide in part"
        return f"{best.layout} takes {of_step}{of_parts}."

    def _parts(self, best: LayoutChoice) -> Iterator[tuple[str, float]]:
        """Yield the parts of the stage's step that change: (name, seconds that `best` takes more
        than the plan's choice). Changes of at most `SAME_SHARE` of the step are left out.
        """
        compute = best.compute_seconds - self.chosen.compute_seconds
        communication = best.communication_seconds - self.chosen.communication_seconds
        optimizer = best.stage_seconds - self.chosen.stage_seconds - compute - communication
        least = SAME_SHARE * self.chosen.stage_seconds
        parts = ("compute", compute), ("communication", communication), ("optimizer", optimizer)
        for part, seconds in parts:
            if abs(seconds) > least:
                yield part, seconds

    def _what_would_change(self, best: LayoutChoice) -> Iterator[str]:
        """Yield sentences on when another layout would win, and on layouts that do not fit into
        memory.
        """
        compute = best.compute_seconds - self.chosen.compute_seconds
        communication = best.communication_seconds - self.chosen.communication_seconds
        if compute < 0 < communication and communication > -compute:
            links = f"{communication / -compute:.3g} times as fast"
            yield f"{best.layout} would win if all links of the mesh were {links}."
        elif compute > 0 > communication and compute > -communication:
            links = f"{compute / -communication:.3g} times slower"
            yield f"{best.layout} would win if all links of the mesh were {links}."
        refused = [choice for choice in self.others if choice.seconds is None]
        if refused:
            layouts = ", ".join(choice.layout for choice in refused[:3])
            yield f"Do not fit into memory: {layouts}: {refused[0].problem}."


def _impossible(layout: str, error: PlanError) -> LayoutChoice:
    """Return the choice of a layout with which the stage has no solution that fits."""
    return LayoutChoice(layout=layout, seconds=None, problem=error.problem)


def _order(choice: LayoutChoice) -> float:
    """Return the seconds of a choice to sort by; those that do not fit come last."""
    return math.inf if choice.seconds is None else choice.seconds


def _is_faster(choice: LayoutChoice, chosen: LayoutChoice) -> bool:
    """Return whether a choice is noticeably faster than the chosen one."""
    if choice.seconds is None or chosen.seconds is None:
        return False
    return choice.seconds < chosen.seconds * (1 - SAME_SHARE)


def _parameter_layout(plan: ParameterPlan) -> str:
    text = modes_text(plan.module_modes)
    return f"{text} on host" if plan.on_host else text


def _op_layout(strategies: Iterable[object]) -> str:
    return " | ".join(map(str, strategies))


def _signed(seconds: float) -> str:
    """Return a difference of seconds as text with its sign."""
    sign = "+" if seconds >= 0 else "-"
    return f"{sign}{format_seconds(abs(seconds))}"
