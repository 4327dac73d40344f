"""Other ways to search, on the same stage costs and in the same space as the stage DP: what they
find, and how soon.

    alpa plan gpt_1_3b --cluster p3_16xlarge_x8 cluster.num_nodes=1 --search mcmc

They are for comparison: nothing that trains needs them. One of your own is a function `(task,
seconds) -> Plan` in a file or module, requested as `--search my_search.annealing`.

A state is a schedule and stages, each a number of layers on a submesh. Its price is the simulated
step of `inter_op/candidates.py`, every stage by its cheapest layouts that fit into memory. Searches
are
functions from a
`Space` and a number of seconds to a `Trace`; they read the clock, so unlike the planner they may
find something else every time. `megatron` tries equal stages of one shape, `exhaustive` every state
in turn, `greedy` takes the best change while there is one, `mcmc` changes at random and takes what
is better, or slightly worse. `flexflow-like` has no stages: it changes how one op is divided at a
time, from data parallelism on, and takes changes likewise (FlexFlow, arXiv
1807.05358, section 6); a parameter lies as is best for its ops. What it finds is planned as it
found it.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, combinations, pairwise, product

import numpy as np

from alpa_strategy.inter_op.equal_meshes import EqualMeshes
from alpa_strategy.inter_op.mesh_options import allowed_shapes
from alpa_strategy.inter_op.simulation import simulated_seconds
from alpa_strategy.inter_op.stage_dp import StageRange
from alpa_strategy.inter_op.stage_problem import weighted
from alpa_strategy.inter_op.stage_solve import StageRequest, StageSolver
from alpa_strategy.inter_op.stage_space import Candidate, StageSpace
from alpa_strategy.intra_op.problem import Solution, evaluate
from alpa_strategy.intra_op.solver.lagrangian import Neighbourhood
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.pipeline_search import plan_pipeline
from alpa_strategy.planner.task import PlanTask
from alpa_strategy.schedules import SCHEDULES, in_flight, refusal

HEAT = 0.02  # by what share a change may be worse to be taken once in e times
LOOKS = 20  # at what a chain of layouts has come to
# seconds, times bytes / limit, of layouts that do not fit: fewer bytes are better first of all
TOO_LARGE = 1e12


@dataclass(frozen=True)
class State:
    """Stages in pipeline order: (layers, submesh) each; with several a mesh, all submeshes are the
    same.
    """

    schedule: str
    stages_per_mesh: int
    stages: tuple[tuple[int, int], ...]


@dataclass
class Trace:
    """The best that was found: `history` has (seconds since the start, seconds of a step) at every
    improvement.
    """

    best: Candidate | None = None
    history: list[tuple[float, float]] = field(default_factory=list)
    tried: int = 0


@dataclass(frozen=True, eq=False)
class Space(StageSpace):
    """The states of one job, and their prices."""

    _priced: dict[State, Candidate | None] = field(default_factory=dict)
    _equal_meshes: dict[tuple[str, int, int], EqualMeshes] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> list[tuple[str, int]]:
        """(schedule, stages per mesh) that may be."""
        pinned = self.job.options.schedule
        names = (
            [pinned]
            if pinned
            else [name for name, schedule in SCHEDULES.items() if schedule.is_searched]
        )
        return [(name, v) for name in names for v in SCHEDULES[name].stages_per_mesh]

    def price(self, state: State) -> Candidate | None:
        """Every stage by its cheapest candidate; None if it cannot be: devices left over, a
        schedule that does not
        go, no memory."""
        if state not in self._priced:
            self._priced[state] = self._price(state)
        return self._priced[state]

    def _price(self, state: State) -> Candidate | None:
        job = self.job
        v = state.stages_per_mesh
        schedule = state.schedule
        counts, meshes = zip(*state.stages, strict=True)
        ranks, rest = divmod(len(meshes), v)
        sizes = [self.sizes[mesh] for mesh in meshes]
        is_pinned = job.options.num_stages in (None, len(sizes))
        if (
            rest
            or not is_pinned
            or sum(sizes) != v * job.cluster.num_devices
            or (v > 1 and len(set(sizes)) > 1)
        ):
            return None
        if refusal(schedule, ranks, job.num_microbatches) or sum(counts) != job.num_layers:
            return None
        cuts = list(accumulate(counts, initial=0))
        if v > 1:
            key = schedule, v, meshes[0]
            equal = self._equal_meshes.setdefault(key, EqualMeshes(self, *key))
            choice, seconds = equal.cheapest(cuts)
            return equal.candidates([choice])[0] if math.isfinite(sum(seconds)) else None
        left = [sum(sizes[i:]) for i in range(len(sizes))]
        alive = in_flight(schedule, ranks, job.num_microbatches)
        stages = [
            (first, last, mesh) for (first, last), mesh in zip(pairwise(cuts), meshes, strict=True)
        ]
        choice, seconds = self.cheapest(self.tables_for(schedule, ranks, 1), stages, left, alive)
        if not math.isfinite(sum(seconds)):
            return None
        return self.candidates(self.tables, left, schedule, 1, [choice], alive)[0]

    def equal(self, mesh: int, schedule: str, v: int) -> State | None:
        """Stages of about equally many layers on equal meshes; None if there are more stages
        than layers.
        """
        ranks, rest = divmod(self.job.cluster.num_devices, self.sizes[mesh])
        count = ranks * v
        if (
            rest
            or self.job.options.num_stages not in (None, count)
            or count > self.job.num_layers
            or (ranks == 1 and v > 1)
        ):
            return None
        cuts = self.pinned
        if not cuts:
            cuts = [round(i * self.job.num_layers / count) for i in range(count + 1)]
        return State(schedule, v, tuple((b - a, mesh) for a, b in pairwise(cuts)))

    def changes(self, state: State) -> Iterator[State]:
        """Neighbours: a layer to the next stage, a stage split into two on half the devices each,
        two made one.
        """
        stages = state.stages
        for i, ((n, mesh), (m, other)) in enumerate(pairwise(stages)):
            for moved in (-1, 1):
                if n + moved > 0 and m - moved > 0:
                    yield replace(
                        state,
                        stages=(
                            *stages[:i],
                            (n + moved, mesh),
                            (m - moved, other),
                            *stages[i + 2 :],
                        ),
                    )
            whole = self.sizes[mesh] + self.sizes[other]
            if state.stages_per_mesh == 1 and whole in self.sizes:
                one = (n + m, self.sizes.index(whole))
                yield replace(state, stages=(*stages[:i], one, *stages[i + 2 :]))
        if state.stages_per_mesh == 1:
            for i, (n, mesh) in enumerate(stages):
                half = self.sizes[mesh] / 2
                if n > 1 and half in self.sizes:
                    small = self.sizes.index(int(half))
                    yield replace(
                        state,
                        stages=(
                            *stages[:i],
                            (n - n // 2, small),
                            (n // 2, small),
                            *stages[i + 1 :],
                        ),
                    )
        for mesh, (schedule, v) in product(range(len(self.sizes)), self.kinds):
            jump = self.equal(mesh, schedule, v)
            if jump is not None and (schedule, v) != (state.schedule, state.stages_per_mesh):
                yield jump


class _Watch:
    """Prices states until the time is over, and keeps the best."""

    def __init__(self, space: Space, seconds: float) -> None:
        self.space = space
        self.trace = Trace()
        self.started = time.perf_counter()
        self.end = self.started + seconds

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.end

    def price(self, state: State) -> float:
        self.trace.tried += 1
        return self.note(self.space.price(state))

    def note(self, found: Candidate | None) -> float:
        """Its seconds; kept where it is the best."""
        if found is None:
            return math.inf
        if self.trace.best is None or found.seconds < self.trace.best.seconds:
            self.trace.best = found
            self.trace.history.append((time.perf_counter() - self.started, found.seconds))
        return found.seconds


def megatron(space: Space, seconds: float, seed: int = 0) -> Trace:
    """Equal stages on equal meshes, every size and schedule."""
    watch = _Watch(space, seconds)
    for mesh, (schedule, v) in product(range(len(space.sizes)), space.kinds):
        state = space.equal(mesh, schedule, v)
        if state is not None and not watch.is_over:
            watch.price(state)
    return watch.trace


def greedy(space: Space, seconds: float, seed: int = 0) -> Trace:
    """From the best equal stages, the best change while there is one."""
    watch = _Watch(space, seconds)
    state, now = _start(space, watch)
    while state is not None and not watch.is_over:
        priced = []
        for change in space.changes(state):
            if watch.is_over:
                break
            priced.append((watch.price(change), change))
        best = min(priced, key=lambda entry: entry[0], default=None)
        if best is None or best[0] >= now:
            break
        now, state = best
    return watch.trace


def mcmc(space: Space, seconds: float, seed: int = 0) -> Trace:
    """Random changes from any equal stages, better ones and now and then a worse one taken."""
    watch, rng = _Watch(space, seconds), random.Random(seed)
    state, now = _start(space, watch, rng)
    while state is not None and not watch.is_over:
        change = rng.choice(list(space.changes(state)) or [state])
        price = watch.price(change)
        if _is_taken(price, now, HEAT, rng):
            state, now = change, price
    return watch.trace


def _is_taken(price: float, now: float, heat: float, rng: random.Random) -> bool:
    """Metropolis: what is better, and now and then what is worse."""
    return price < now or (
        math.isfinite(price) and rng.random() < math.exp(-(price / now - 1) / heat)
    )


def flexflow_like(space: Space, seconds: float, seed: int = 0) -> Trace:
    """One stage on all devices: random changes of how an op is divided, from data parallelism on
    every logical mesh.

    The tables in which changes are priced are made outside of `seconds`, as those of the other
    searches are.
    """
    job = space.job
    watch = _Watch(space, seconds)
    rng = random.Random(seed)
    whole = len(space.meshes) - 1
    if not space.may_be[0, -1, whole]:
        return watch.trace
    ways = [again for again in (False, True) if job.remat in (None, again)]
    starts = list(product(ways, allowed_shapes(job.cluster, job.options, space.meshes[whole])))
    for left, (again, shape) in zip(range(len(starts), 0, -1), starts, strict=True):
        began = time.perf_counter()
        request = StageRequest(
            0,
            len(job.graph.ops),
            space.meshes[whole],
            shape,
            again,
            alive=1,
            cuts=tuple(job.cuts[1:-1]),
        )
        chain = _Chain(space, request, rng)
        spent = time.perf_counter() - began
        watch.started, watch.end = watch.started + spent, watch.end + spent
        share = (watch.end - time.perf_counter()) / left
        for _ in range(LOOKS):
            end = time.perf_counter() + share / LOOKS
            while time.perf_counter() < end:
                chain.change()
                watch.trace.tried += 1
            watch.note(chain.found(whole))
    return watch.trace


class _Chain:
    """Layouts of one stage on one logical mesh, an op changed at a time."""

    def __init__(self, space: Space, request: StageRequest, rng: random.Random) -> None:
        job = self.job = space.job
        self.space = space
        self.rng = rng
        self.solver = StageSolver(job)
        self.priced = self.solver.price(request)
        self.problem = weighted(self.priced.finest, job.num_microbatches, 1, request.remat)
        self.near, self.limit = Neighbourhood(self.problem), job.memory_limit
        plain = (
            replace(job.options, parallel="data") if job.options.parallel == "auto" else job.options
        )
        self.at = list(self.solver.under(plain).price(request).free.assignment)
        self.seconds, self.num_bytes = evaluate(self.problem, self.at)
        self.best: tuple[float, list[int]] = (math.inf, self.at)
        intra = self.priced.intra
        self.ops = range(len(intra.parameters), len(intra.parameters) + len(intra.ops))
        self.read: dict[int, set[int]] = defaultdict(set)  # parameters of ops
        for transfer in self.problem.transfers:
            for use in transfer.uses if transfer.producer < len(intra.parameters) else ():
                self.read[use.choice].add(transfer.producer)

    def _weighed(self, seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        return np.where(num_bytes <= self.limit, seconds, TOO_LARGE * num_bytes / self.limit)

    def change(self) -> None:
        """Another strategy for an op, and the modes that are best for it for its parameters; or
        none of it.
        """
        op, at = self.rng.choice(self.ops), list(self.at)
        new = self.rng.randrange(len(self.problem.choices[op].cost))
        seconds, num_bytes = self.seconds, self.num_bytes
        for choice in (op, *sorted(self.read[op])):
            after, filled = self.near.totals(at, choice)
            after, filled = (
                seconds + (after - after[at[choice]]),
                num_bytes + (filled - filled[at[choice]]),
            )
            at[choice] = new if choice == op else int(self._weighed(after, filled).argmin())
            seconds, num_bytes = float(after[at[choice]]), float(filled[at[choice]])
            if not math.isfinite(seconds):
                return
        pair = np.array([seconds, self.seconds]), np.array([num_bytes, self.num_bytes])
        price, now = map(float, self._weighed(*pair))
        if _is_taken(price, now, HEAT / len(self.ops), self.rng):
            self.at = at
            self.seconds = seconds
            self.num_bytes = num_bytes
            if num_bytes <= self.limit and price < self.best[0]:
                self.best = price, at

    def found(self, submesh: int) -> Candidate | None:
        """Return the best candidate that fits; None if there is none.

        Temporary memory that does not fit is reserved from then on.
        """
        job = self.job
        request = self.priced.request
        _, at = self.best
        if math.isinf(self.best[0]):
            return None
        seconds, num_bytes = evaluate(self.problem, at)
        bound = self.priced.free.bound
        stage = self.solver.laid_out(
            self.priced, Solution(tuple(at), seconds, num_bytes, bound, "mcmc")
        )
        excess = stage.plan.predicted.peak_bytes - job.memory_limit
        if excess > 0:
            self.limit, self.best = self.limit - excess, (math.inf, at)
            return None
        overhead = self.space.overhead
        each = stage.plan.forward_seconds, stage.plan.backward_seconds, stage.cost.once, 0.0
        (step,) = simulated_seconds("1F1B", 1, job.num_microbatches, [[each]], overhead)
        all_layers = (StageRange(0, job.num_layers, submesh, 0),)
        of_stage = (submesh,), (request.shape,), (request.remat,), (1,), (0.0,), (stage,)
        return Candidate(step, job, "1F1B", 1, all_layers, *of_stage)


def exhaustive(space: Space, seconds: float, seed: int = 0) -> Trace:
    """Every state, few stages first, as far as the time goes."""
    watch, L = _Watch(space, seconds), space.job.num_layers
    for count in range(1, L + 1):
        for meshes in product(range(len(space.sizes)), repeat=count):
            devices = sum(space.sizes[mesh] for mesh in meshes)
            kinds = [(s, v) for s, v in space.kinds if devices == v * space.job.cluster.num_devices]
            for schedule, v in kinds:
                for cuts in combinations(range(1, L), count - 1):
                    if watch.is_over:
                        return watch.trace
                    runs = pairwise((0, *cuts, L))
                    stages = tuple((b - a, mesh) for (a, b), mesh in zip(runs, meshes, strict=True))
                    watch.price(State(schedule, v, stages))
            if watch.is_over:
                return watch.trace
    return watch.trace


def _start(
    space: Space, watch: _Watch, rng: random.Random | None = None
) -> tuple[State | None, float]:
    """An equal division that fits: a random one, or the best under the first schedule."""
    kinds = space.kinds if rng else space.kinds[:1]
    states = [space.equal(mesh, *kind) for mesh, kind in product(range(len(space.sizes)), kinds)]
    if rng:
        rng.shuffle(states)
    priced = []
    for state in filter(None, states):
        priced.append((watch.price(state), state))
        if rng and math.isfinite(priced[-1][0]):
            break
    now, best = min(priced, key=lambda entry: entry[0], default=(math.inf, None))
    return (best, now) if math.isfinite(now) else (None, now)


SEARCHES: dict[str, Callable[[Space, float, int], Trace]] = {
    "mcmc": mcmc,
    "greedy": greedy,
    "exhaustive": exhaustive,
    "megatron": megatron,
    "flexflow-like": flexflow_like,
}


def plan_by(task: PlanTask, name: str, seconds: float = 10.0) -> Plan:
    """The best plan that a search finds, with `seconds` for each number of micro-batches that is
    looked at.

    Raises:
        PlanError: it finds none that fits.
    """

    def solve(stages: StageSpace, known: float) -> list[Candidate]:
        found = SEARCHES[name](Space(stages.job, stages.meshes, stages.runs), seconds, 0).best
        if found is not None and found.seconds < known:
            return [found]
        return []

    return plan_pipeline(task, solve=solve)


# What `alpa plan --search mcmc` calls.
plan_mcmc, plan_greedy, plan_exhaustive, plan_megatron, plan_flexflow_like = (
    partial(plan_by, name=name) for name in SEARCHES
)
