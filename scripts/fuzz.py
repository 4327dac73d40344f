#!/usr/bin/env python
"""Throw damaged files at everything that reads one: plans, clusters, recipes, stores of measured
times, checkpoints.

Each case is a good file with a few things changed, as text (bytes flipped, cut, repeated) or as
data (fields removed, replaced by odd values, nested), given to the public reader and, where it
passes, shown as `alpa show` does. A case is good when the reader returns or raises an `AlpaError`,
in time, and no code of the file's has run.

    python scripts/fuzz.py --cases 20000 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_checkpoints import Checkpoints
from fuzz_damage import CANARY, damaged
from rich.console import Console
from rich.progress import track
from rich.table import Table

from alpa_strategy import AlpaError, ClusterSpec, Plan, partial_results
from alpa_strategy.cli import main as alpa
from alpa_strategy.comm.measure import load_stored
from alpa_strategy.cost.measured import OpTable
from alpa_strategy.display.full_plan import plan_svg, plan_table
from alpa_strategy.intra_op.problem import Choice, Problem
from alpa_strategy.intra_op.solver.stored import solve_stored
from alpa_strategy.page.page import plan_page
from alpa_strategy.partial_results import PartialResults
from alpa_strategy.recipe import load_recipe

# CPU seconds that the reader of one damaged file may take.
SECONDS = 2.0
ROOT = Path(__file__).resolve().parent.parent


class Hang(Exception):
    """A case took longer than `SECONDS`."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="*", choices=sorted(FORMATS), default=sorted(FORMATS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.setrecursionlimit(1000)
    random_numbers = random.Random(arguments.seed)
    counts = Counter[tuple[str, str]]()
    bad = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        formats = {format: FORMATS[format](folder) for format in arguments.formats}
        for case in track(range(arguments.cases), "damaged files", console=Console(stderr=True)):
            kind = arguments.formats[case % len(arguments.formats)]
            write, read = formats[kind]
            path = write(random_numbers)
            outcome = outcome_of(read, path)
            if (folder / CANARY).exists() or Path(CANARY).exists():
                outcome = "RAN CODE"
            counts[kind, outcome.splitlines()[0]] += 1
            if outcome.isupper() or "\n" in outcome:
                bad.append(
                    (
                        kind,
                        case,
                        outcome,
                        path.read_bytes()[:400] if path.is_file() else b"a folder",
                    )
                )
    table = Table(
        "format",
        "outcome",
        "cases",
        title=f"{arguments.cases} damaged files, seed {arguments.seed}",
    )
    for (kind, outcome), count in sorted(counts.items()):
        table.add_row(kind, outcome, str(count))
    Console().print(table)
    for kind, case, outcome, content in bad[:10]:
        print(f"\n--- {kind}, case {case}\n{content!r}\n{outcome}")
    print(f"{arguments.cases - len(bad)} passed, {len(bad)} failed")
    return 1 if bad else 0


def outcome_of(read: Callable[[Path], None], path: Path) -> str:
    """A word, or (bad) several lines or capitals."""
    started = time.process_time()
    try:
        with limited(SECONDS):
            read(path)
    except AlpaError as error:
        text = str(error)
        return "REFUSED IN MORE THAN 40 LINES" if text.count("\n") > 40 else "refused"
    except Hang:
        return "HANGS"
    except BaseException:
        return "traceback\n" + traceback.format_exc(limit=-6)
    finally:
        elapsed = time.process_time() - started
    return "read" if elapsed < SECONDS else "SLOW"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(
        signal.ITIMER_PROF, seconds
    )  # of this process's own: the machine may do other things beside
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


# What is damaged, and who reads it. Each: folder -> (what writes a damaged file, its reader).

Format = tuple[Callable[[random.Random], Path], Callable[[Path], None]]


def texts(folder: Path, good: list[str], suffix: str, read: Callable[[Path], None]) -> Format:
    """The format of files that are text."""

    def write(random_numbers: random.Random) -> Path:
        path = folder / f"case{suffix}"
        path.write_bytes(damaged(random_numbers.choice(good), suffix, random_numbers))
        return path

    return write, read


def plans(folder: Path) -> Format:
    """`Plan.load`, then every picture of it."""
    console = Console(file=io.StringIO(), width=100)

    def read(path: Path) -> None:
        plan = Plan.load(path)
        console.print(plan_table(plan))
        plan_svg(plan), plan_page(plan)

    good = []
    for extra in ([], ["plan.num_stages=2", "plan.num_microbatches=4"]):
        command = [
            "plan",
            str(ROOT / "recipes" / "gpt_tiny.yaml"),
            "--cluster",
            "pcie_8gpu",
            *extra,
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            alpa([*command, "-o", str(folder / "good.json")])
        good.append((folder / "good.json").read_text())
    return texts(folder, good, ".json", read)


def clusters(folder: Path) -> Format:
    def read(path: Path) -> None:
        cluster = ClusterSpec.load(path)
        if cluster.num_devices <= 64:
            cluster.logical_shapes()

    good = [path.read_text() for path in sorted((ROOT / "configs" / "clusters").glob("*.yaml"))]
    return texts(folder, good, ".yaml", read)


def recipes(folder: Path) -> Format:
    for path in (ROOT / "recipes").glob("*.py"):  # beside the recipe, as its `_target_` wants
        (folder / path.name).write_text(path.read_text())

    def read(path: Path) -> None:
        load_recipe(path)

    good = [path.read_text() for path in sorted((ROOT / "recipes").glob("*tiny.yaml"))]
    return texts(folder, good, ".yaml", read)


def op_times(folder: Path) -> Format:
    work = {"flops": 1e9, "num_bytes": 1e6, "kernels": 1.0}
    entry = {"forward": 1e-3, "backward": 2e-3, "forward_work": work, "backward_work": work}
    good = {
        "version": 2,
        "devices": {"cpu": {"linear": {"linear(2, 2)": entry, "linear(4, 4)": entry}}},
    }

    def read(path: Path) -> None:
        OpTable.load(path)

    return texts(folder, [json.dumps(good)], ".json", read)


def measured_clusters(folder: Path) -> Format:
    good = ClusterSpec.load("dgx_h100", {"num_nodes": 1})

    def read(path: Path) -> None:
        load_stored(path)

    return texts(folder, [json.dumps(good.to_dict())], ".json", read)


def unfinished_plannings(folder: Path) -> Format:
    """A stored solution: whatever its file holds, the problem's own is what comes back."""
    costs, limit = np.array([1.0, 2.0, np.inf]), np.inf
    problem = Problem((Choice("op", costs, costs), Choice("other", costs, costs)), (), limit)
    partial_results.LEAST_SECONDS = 0.0
    stored = folder / "planning"
    right = solve_stored(PartialResults(stored), problem)
    (place,) = stored.iterdir()

    def read(path: Path) -> None:
        content = path.read_bytes()
        with contextlib.suppress(Exception):
            # Every other file has the checksum of what it holds: it does not stop at that.
            data = json.loads(content)
            data["checksum"] = partial_results._checksum(data["data"])
            content = json.dumps(data).encode() if len(content) % 2 else content
        place.write_bytes(content)
        if solve_stored(PartialResults(stored), problem).assignment != right.assignment:
            raise AssertionError("another solution")

    return texts(folder, [place.read_text()], ".json", read)


def checkpoints(folder: Path) -> Format:
    """Checkpoint folders and files, read by every loader of `fuzz_checkpoints.LOADERS`."""
    checkpoints_format = Checkpoints(folder, CANARY)
    return checkpoints_format.write, checkpoints_format.read


FORMATS: dict[str, Callable[[Path], Format]] = {
    "plan": plans,
    "cluster": clusters,
    "recipe": recipes,
    "op times": op_times,
    "measured cluster": measured_clusters,
    "unfinished planning": unfinished_plannings,
    "checkpoint": checkpoints,
}


if __name__ == "__main__":
    sys.exit(main())
