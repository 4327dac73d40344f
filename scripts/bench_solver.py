"""The programs of real plans, solved by OR-tools and, where it is installed, by highspy as before.

    python scripts/bench_solver.py                            # the cells below
    python scripts/bench_solver.py gpt_39b:p3_16xlarge_x8:8   # recipe:cluster:nodes
    python scripts/bench_solver.py --instances /tmp/programs  # kept there for the next run

Each cell is planned once, in a process of its own, and the programs that its planning solves are
written down with their incumbents. Of every kind (recipe, mixed-integer or relaxation alone, with
and without a memory limit, infeasible) some are taken from the smallest to the largest. An instance
is timed as planning solves it: its arrays, its relaxation, then the integer program from the
incumbent with the time limit of planning. OR-tools and highspy cannot be loaded together, so both
sides run in processes of their own, in turns. Instances of milliseconds are solved several times by
each process. The median of the CPU seconds of all rounds counts. What ran before is in
`highspy_before.py`, its formulation included.

Fails if an instance takes more than 1.1 times what highspy takes, or a bound is another. Those
that neither side solves in time are listed with their bounds and not compared by seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from alpa_strategy.intra_op.problem import Problem, evaluate, presolve
from alpa_strategy.intra_op.solver import solve as solving

ROOT = Path(__file__).resolve().parents[1]
CELLS = ("gpt_6_7b:p3_16xlarge_x8:2", "gpt_39b:p3_16xlarge_x8:8", "moe_10b:p3_16xlarge_x8:2")
SYNTHETIC_LAYERS = (4, 14)
PER_KIND = 8
MOST = 1.1
SAME_BOUND = 1e-5
# An instance of less is solved again, so often at most.
LEAST_SECONDS, MOST_TIMES = 0.2, 9


@dataclass(frozen=True)
class Instance:
    """One program as planning solves it.

    Attributes:
        kind: what it stands for; instances are chosen from each.
        integer: whether the integer program follows the relaxation.
        incumbent: the assignment that the integer search starts from.
    """

    name: str
    kind: str
    problem: Problem
    integer: bool
    incumbent: list[int] | None = None


@dataclass(frozen=True)
class Timing:
    """What one side needed for an instance: CPU seconds, bound and objective in seconds of a step
    (infinite: proved to have no solution, nan: none found), and whether time ran out.
    """

    seconds: float
    bound: float
    objective: float
    timed_out: bool


# --- Instances


def collect(cell: str, folder: Path) -> None:
    """Plan a cell in this process and write down a choice of the programs that it solves."""
    recipe, cluster, nodes = cell.split(":")
    recorded: list[Instance] = []
    limited, by_program = solving._solve_limited, solving._by_program

    def record_limited(problem, priced, free, least, *rest):  # type: ignore[no-untyped-def]
        recorded.extend(_whole_problems(recipe, problem, least.num_bytes))
        return limited(problem, priced, free, least, *rest)

    def record_program(
        problem: Any, deadline: Any, incumbent: Any = None, tolerance: float = solving.PROVED
    ) -> Any:
        kind = f"{recipe} chosen strategies"
        recorded.append(Instance("", kind, problem, True, incumbent))
        return by_program(problem, deadline, incumbent, tolerance)

    solving._solve_limited, solving._by_program = record_limited, record_program
    from alpa_strategy.cli import main as alpa

    options = ["--cluster", cluster, f"cluster.num_nodes={nodes}", "-o", str(folder / "plan.json")]
    sys.argv = ["alpa", "plan", recipe, *options]
    try:
        alpa()
    except SystemExit as end:
        if end.code:
            raise
    _write(recorded, folder)


def _whole_problems(recipe: str, problem: Problem, least_bytes: float) -> list[Instance]:
    """The relaxation of a whole problem: with its limit, without one, and with one that nothing
    meets.
    """
    limits = {
        "with memory": problem.memory_limit,
        "without limit": float("inf"),
        "infeasible": 0.98 * least_bytes,
    }
    instances = []
    for name, limit in limits.items():
        reduced = presolve(replace(problem, memory_limit=limit)).problem
        if solving.num_columns(reduced) <= solving.MAX_COLUMNS:
            instances.append(Instance("", f"{recipe} whole, {name}", reduced, False))
    return instances


def synthetic(folder: Path) -> None:
    """GPT-shaped problems with layers that all differ: the largest programs that planning
    solves.
    """
    from proofs.synthetic import gpt_like

    instances = []
    for num_layers in SYNTHETIC_LAYERS:
        problem = presolve(gpt_like(num_layers, noise=0.1)).problem
        instances.append(Instance("", f"synthetic {num_layers} layers", problem, False))
    _write(instances, folder)


def _write(recorded: list[Instance], folder: Path) -> None:
    """Keep `PER_KIND` instances of each kind, evenly from the smallest to the largest."""
    kinds: dict[str, dict[tuple[int, float], Instance]] = {}
    for instance in recorded:
        least = sum(float(choice.cost.min()) for choice in instance.problem.choices)
        size = (solving.num_columns(instance.problem), least)
        kinds.setdefault(instance.kind, {})[size] = instance
    for kind, sizes in kinds.items():
        ordered = [sizes[size] for size in sorted(sizes)]
        places = np.linspace(0, len(ordered) - 1, min(PER_KIND, len(ordered)))
        for number, place in enumerate(places.round().astype(int)):
            named = replace(ordered[place], name=f"{kind} {number}")
            path = folder / f"{named.name.replace(' ', '_')}.pickle"
            path.write_bytes(pickle.dumps(named))


# --- Both sides


@dataclass(frozen=True)
class Side:
    """How one side makes a program of a problem, and solves it.

    Attributes:
        solve: given (program, integer, time limit, hint, tolerance), the bound in seconds and the
            masses of the strategies.
    """

    formulate: Callable[[Problem], Any]
    solve: Callable[..., tuple[float, object]]


def side_named(name: str) -> Side:
    """`ortools`: what plans are made with; `highspy`: what was before."""
    if name == "highspy":
        import highspy_before

        return Side(highspy_before.formulate, highspy_before.solve_program)

    from alpa_strategy.intra_op.solver.mathopt import solve_program
    from alpa_strategy.intra_op.solver.milp import formulate

    return Side(formulate, solve_program)


def time_all(name: str, folder: Path, out: Path) -> None:
    """Solve every instance of a folder by one side, in this process; the timings as JSON."""
    paths = sorted(folder.glob("*.pickle"))
    instances = [pickle.loads(path.read_bytes()) for path in paths]
    # What is loaded at the first call is told apart from solving.
    before, started = _peak_bytes(), time.process_time()
    side = side_named(name)
    smallest = min(instances, key=lambda instance: solving.num_columns(instance.problem))
    solve_instance(smallest, side)
    loading = {"seconds": time.process_time() - started, "bytes": _peak_bytes() - before}
    timings = {}
    for instance in instances:
        timings[instance.name] = [asdict(timing) for timing in timed(instance, side)]
    out.write_text(json.dumps({"loading": loading, "timings": timings}))


def timed(instance: Instance, side: Side) -> list[Timing]:
    """The instance solved once, or for about `LEAST_SECONDS` where that takes several times."""
    timings = [solve_instance(instance, side)]
    while len(timings) < MOST_TIMES and sum(x.seconds for x in timings) < LEAST_SECONDS:
        timings.append(solve_instance(instance, side))
    return timings


def solve_instance(instance: Instance, side: Side) -> Timing:
    """Solve one instance as planning does (`solve._by_program`), without its rounding."""
    limit = solving.PATIENCE if instance.integer else 60.0
    started = time.process_time()
    program = side.formulate(instance.problem)
    bound, mass = side.solve(program, integer=False, time_limit=limit)
    if instance.integer and np.isfinite(bound):
        relaxed = bound
        exact, mass = side.solve(program, integer=True, time_limit=limit, hint=instance.incumbent)
        bound = max(relaxed, exact)
    seconds = time.process_time() - started
    objective = _objective(instance, mass, bound)
    timed_out = np.isneginf(bound)
    if instance.integer and np.isfinite(bound):
        timed_out |= objective - bound > 2e-6 * abs(objective)
    return Timing(seconds, bound, objective, bool(timed_out))


def _objective(instance: Instance, mass: object, bound: float) -> float:
    """Seconds of the assignment that was found; of a relaxation, its bound."""
    if mass is None:
        return float("nan")
    if not instance.integer:
        return bound
    assignment = [int(part.argmax()) for part in mass]  # type: ignore[attr-defined]
    return float(evaluate(instance.problem, assignment)[0])


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- The comparison


def run_self(*arguments: str) -> None:
    """This script in a process of its own, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    subprocess.run(command, env=environment, check=True)


def medians_of(rounds: list[dict]) -> dict[str, Timing]:
    """Of each instance the timing with the median of the seconds."""
    every: dict[str, list[Timing]] = {}
    for result in rounds:
        for name, timings in result["timings"].items():
            every.setdefault(name, []).extend(Timing(**values) for values in timings)
    medians = {}
    for name, timings in every.items():
        timings.sort(key=lambda timing: timing.seconds)
        medians[name] = timings[len(timings) // 2]
    return medians


def compare(sides: dict[str, list[dict]], folder: Path) -> int:
    """Print a line an instance and what both sides take in all; 1 if a limit is passed."""
    new = medians_of(sides["ortools"])
    old = medians_of(sides.get("highspy", []))
    failed = []
    for path in sorted(folder.glob("*.pickle")):
        instance: Instance = pickle.loads(path.read_bytes())
        name, after = instance.name, new[instance.name]
        size = solving.num_columns(instance.problem)
        line = f"{name:<44} {size:7d} columns  ortools {_shown(after)}"
        if before := old.get(name):
            verdict, is_good = judge(before, after)
            line += f"  highspy {_shown(before)}  {verdict}"
            if not is_good:
                failed.append(name)
        print(line, flush=True)
    for side, results in sides.items():
        timings = new if side == "ortools" else old
        total = sum(timing.seconds for timing in timings.values())
        loading = results[0]["loading"]
        megabytes = loading["bytes"] / 2**20
        print(
            f"{side}: {total:.2f} CPU-s in all; loaded and first used in"
            f" {loading['seconds']:.2f} CPU-s, {megabytes:.0f} MiB"
        )
    print(f"slower than {MOST} x or another bound: {failed or 'none'}")
    return 1 if failed else 0


def judge(before: Timing, after: Timing) -> tuple[str, bool]:
    """The ratio of seconds, and whether an instance is as good as before."""
    if before.timed_out and after.timed_out:
        return "both out of time", True
    ratio = after.seconds / before.seconds
    same = after.bound == before.bound or abs(after.bound / before.bound - 1) <= SAME_BOUND
    is_better_proved = before.timed_out and not after.timed_out
    text = f"{ratio:5.2f}x"
    if not same and not is_better_proved:
        return f"{text} ANOTHER BOUND", False
    return text, ratio <= MOST


def _shown(timing: Timing) -> str:
    open_ = " (out of time)" if timing.timed_out else ""
    return (
        f"{timing.seconds:7.3f} s, objective {timing.objective:.6g}, bound"
        f" {timing.bound:.6g}{open_}"
    )


def main() -> int:
    """Collect what is missing, time both sides in turns, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", help="recipe:cluster:nodes")
    parser.add_argument("--instances", type=Path, help="folder of instances, filled where empty")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--collect", help=argparse.SUPPRESS)
    parser.add_argument("--time", nargs=2, metavar=("SIDE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect:
        collect(options.collect, options.instances)
        return 0
    if options.time:
        time_all(options.time[0], options.instances, Path(options.time[1]))
        return 0

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.instances or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.glob("*.pickle")):
            for cell in options.cells or CELLS:
                run_self("--collect", cell, "--instances", str(folder))
            synthetic(folder)
        sides: dict[str, list[dict]] = {"ortools": []}
        if importlib.util.find_spec("highspy"):
            sides["highspy"] = []
        else:
            print("highspy is not installed: only OR-tools is timed")
        for _ in range(options.repeat):
            for side, results in sides.items():
                out = Path(temporary) / "timings.json"
                run_self("--time", side, str(out), "--instances", str(folder))
                results.append(json.loads(out.read_text()))
        return compare(sides, folder)


if __name__ == "__main__":
    sys.exit(main())
