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
import copy
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
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from alpa_strategy import AlpaError, ClusterSpec, Plan, partial_results
from alpa_strategy.cli import main as alpa
from alpa_strategy.comm.measure import load_stored
from alpa_strategy.cost.measured import OpTable
from alpa_strategy.display.table import plan_html, plan_svg, plan_table
from alpa_strategy.intra_op.problem import Choice, Problem
from alpa_strategy.intra_op.solver.stored import solve_stored
from alpa_strategy.partial_results import PartialResults
from alpa_strategy.recipe import load_recipe

SECONDS = 2.0  # of one case: processor time
ROOT = Path(__file__).resolve().parent.parent
CANARY = "alpa_fuzz_canary"  # a file that only code run from a damaged file would write
NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**63,
    10**30,
    10**400,
    0.5,
    -0.5,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
)
TEXTS = (
    *(
        "",
        " ",
        "a",
        "R",
        "S0",
        "R*",
        "S99999999999",
        "G0 S0",
        "->",
        "S0->S0@x",
        "1e400",
        "x" * 5000,
        "é" * 50,
    ),
    *(
        "\x1b[2J",
        "[red]x[/red]",
        "[/]",
        "\ud800",
        "\u202e",
        "a\nb",
        "<script>alert(1)</script>",
        "../../etc/passwd",
    ),
    *(
        "${oc.env:HOME}",
        "${a.b}",
        "${",
        "!!python/object/apply:os.system",
        f"__import__('os').mknod('{CANARY}')",
    ),
)
NESTED = (
    [],
    {},
    [[]],
    [[[[[]]]]],
    {"": ""},
    [1, "a", None],
    {"a": {"a": {"a": {}}}},
    [10**9],
    [0],
    [-1, 2],
    [1] * 300,
)
ODD: tuple[Any, ...] = (None, True, False, *NUMBERS, *TEXTS, *NESTED)


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
        formats = {each: FORMATS[each](folder) for each in arguments.formats}
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
        plan_svg(plan), plan_html(plan)

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
    """Folders and files, by every loader; see fuzz_checkpoints.py."""
    from fuzz_checkpoints import Checkpoints

    made = Checkpoints(folder, CANARY)
    return made.write, made.read


FORMATS: dict[str, Callable[[Path], Format]] = {
    "plan": plans,
    "cluster": clusters,
    "recipe": recipes,
    "op times": op_times,
    "measured cluster": measured_clusters,
    "unfinished planning": unfinished_plannings,
    "checkpoint": checkpoints,
}


# Damage


def damaged(text: str, suffix: str, random_numbers: random.Random) -> bytes:
    """One to four changes, to the data (two times in three) or to the bytes."""
    if random_numbers.random() < 0.67:
        try:
            return damaged_data(text, suffix, random_numbers).encode("utf-8", "surrogatepass")
        except (ValueError, yaml.YAMLError):
            pass  # odd values that the format cannot write: damage its bytes
    content = bytearray(text.encode())
    for _ in range(random_numbers.randint(1, 4)):
        place = random_numbers.randrange(len(content) + 1)
        end = min(len(content), place + random_numbers.choice([1, 2, 10, 1000]))
        match random_numbers.randrange(5):
            case 0:
                content[place:end] = b""
            case 1:
                content[place:place] = random_numbers.randbytes(random_numbers.choice([1, 3, 20]))
            case 2:
                content[place:place] = content[place:end] * random_numbers.choice([2, 50])
            case 3:
                content[place:] = b""
            case 4:
                odd = [
                    b"[" * 3000,
                    b"{" * 500,
                    b"9" * 5000,
                    b"1e999",
                    b"NaN",
                    b"\x00",
                    b"&a [*a]",
                    b"<<: *a",
                    b"${a}",
                ]
                content[place:end] = random_numbers.choice(odd)
        if not content:
            break
    return bytes(content)


def damaged_data(text: str, suffix: str, random_numbers: random.Random) -> str:
    data: Any = yaml.safe_load(text) if suffix == ".yaml" else json.loads(text)
    for _ in range(random_numbers.randint(1, 4)):
        data = changed(data, random_numbers)
    if suffix == ".yaml":
        return yaml.safe_dump(data, allow_unicode=True)
    return json.dumps(data)


def changed(data: Any, random_numbers: random.Random) -> Any:
    """The data with one thing changed somewhere in it."""
    if isinstance(data, dict | list) and data and random_numbers.random() < 0.9:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        key, result = random_numbers.choice(keys), copy.copy(data)
        match random_numbers.randrange(8):
            case 0:
                del result[key]
            case 1 if isinstance(result, dict):
                result[str(random_numbers.choice(ODD))[:200]] = result[key]
            case 2:
                result[key] = data[random_numbers.choice(keys)]
            case _:
                result[key] = changed(data[key], random_numbers)
        return result
    if (
        isinstance(data, int | float)
        and not isinstance(data, bool)
        and random_numbers.random() < 0.5
    ):
        return random_numbers.choice([-data, data * 2, data + 1, data * 10**9, str(data)])
    if isinstance(data, str) and random_numbers.random() < 0.5:
        return random_numbers.choice(
            [
                data[::-1],
                data + " ",
                data * 3,
                data.replace("S", "R"),
                data.replace("*", ""),
                data[1:],
            ]
        )
    return random_numbers.choice(ODD)


if __name__ == "__main__":
    sys.exit(main())
