"""Why a parameter or an op has its layout: what each other layout would cost.

Every other layout is pinned in turn, and its stage is solved once more by the planner's own code:
all other layouts follow it, and memory binds as it does in the plan.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from alpa_strategy.errors import PlanError, did_you_mean
from alpa_strategy.inter_op.stage_solve import PricedStage, SolvedStage, StageSolver
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


def explain(task: PlanTask, plan: Plan, name: str) -> Explanation:
    """Solve a plan's stage with every other layout of a parameter or op, and return these with
    their costs, the cheapest first.

    Args:
        task: for which the plan was made.
        plan: of the task.
        name: of a parameter (any of its names) or an op, as the plan has it.

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
    return _Question(task, plan, solver, priced, index, of).answer()


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

    def answer(self) -> Explanation:
        """Solve the stage with each layout of the parameter or op, and return the layouts with
        their costs and the reasons for the chosen one.
        """
        chosen_layout = self._layout_in(self._stage)
        chosen = self._of_plan(chosen_layout)
        others: list[LayoutChoice] = []
        reasons: list[str] = []
        forbidden = 0
        solved: list[tuple[str, LayoutChoice, float]] = []
        for layout, strategies in self._layouts():
            cost = self._priced.intra.problem.choices[self._choice].cost[list(strategies)]
            if np.isfinite(cost).any():
                solved.append((layout, *self._solved(layout, strategies)))
            else:
                forbidden += 1

        # A named plan forbids uses of parameters by penalties longer than any step. A choice may
        # have those that the plan cannot avoid either.
        of_plan = sum(penalty for layout, _, penalty in solved if layout == chosen_layout)
        most_penalty = of_plan + self._stage.predicted.step_seconds
        for layout, choice, penalty in solved:
            if penalty > most_penalty:
                forbidden += 1
            elif layout != chosen_layout:
                others.append(choice)
            elif _is_faster(choice, chosen):
                reasons.append(_SIMPLER)
        others.sort(key=_order)
        writer = _Reasons(self._plan, self._stage, chosen, others, forbidden)
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
        )

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

    def _solved(self, layout: str, strategies: Sequence[int]) -> tuple[LayoutChoice, float]:
        """Return the stage's best solution with one layout, and the penalties that it has; a choice
        with the problem in place of seconds, and 0.0, if there is none.

        Args:
            strategies: of the choice, those that have the layout.
        """
        try:
            pinned = self._solver.pinned(self._priced, self._choice, strategies)
            solved = self._solver.solve_priced(pinned)
        except PlanError as error:
            return LayoutChoice(layout=layout, seconds=None, problem=error.problem), 0.0
        penalty = solved.objective - solved.plan.predicted.step_seconds
        return self._choice_of(layout, solved), penalty

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
        if layout == chosen:
            yield line + f"{self._of.name} would have the same layout."
        else:
            yield line + f"{self._of.name} would have the layout {layout}."

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
        if best.num_changes:
            listed = ", ".join(best.changes)
            more = ", ..." if best.num_changes > len(best.changes) else ""
            yield (
                f"Neighbours: with {best.layout}, {best.num_changes} other parameters and ops"
                f" would change too ({listed}{more})."
            )
        yield from self._what_would_change(best)

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
            return f"{best.layout} would take as long as the layout of the plan."
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
        return f"{best.layout} is the next best, {of_step}{of_parts}."

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
