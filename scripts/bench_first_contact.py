"""What a new user sees first: small programs under `ddp` and `alpa`, on one and two ranks.

    python scripts/bench_first_contact.py                        # all programs, one and two ranks
    python scripts/bench_first_contact.py --programs boring gan --ranks 1
    python scripts/bench_first_contact.py --json out.json        # adds to what is in the file
    python scripts/bench_first_contact.py --json out.json --report     # the table, nothing is run
    python scripts/bench_first_contact.py --json out.json --write      # and into docs/benchmarks.md

A program runs three times: under `ddp` (one rank: the plain Trainer), under `alpa` in an empty
folder (costs are measured, a plan is made), and under `alpa` again with what that has stored. These
runs give seconds from the start of the process to the end of the first step, the median step from
step 20 on, and the prediction that alpa reports against it. With `--rounds N` each is run N
times, and the median is kept.

Then `ddp` and `alpa` with its stored plan live at the same time and take turns of a few steps
(`bench_turns.py`). The ratio of their steps is the median over neighbouring turns, with quartiles:
on a machine whose speed changes between seconds, steps of two separate runs say little. Where
other work runs as well, quick steps need more of them: `--turns 40`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_jobs import compile_package, output_tail, user_threads
from bench_jobs import run_job as run_process
from bench_turns import PLACE_VARIABLE, TurnJob, TurnTaker, ratio, run_in_turns
from page_tables import write_marked

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
MARKS = (
    "<!-- first contact: scripts/bench_first_contact.py --json FILE --write -->",
    "<!-- end of first contact -->",
)
WARM_UP_STEPS = 20
# Lightning's plain Trainer on one rank, DDP on several.
STRATEGIES = ("ddp", "alpa first", "alpa stored")
# The row of two jobs that took turns. Together they make fewer steps than an epoch has batches.
TURNS = "turns"
NUM_TURNS, STEPS_PER_TURN = 14, 12
MOST_STEP_RATIO = 1.05
MOST_START_RATIOS = {"alpa first": (1.5, 2.0), "alpa stored": (1.1, 1.25)}
MOST_MISPREDICTED = 1.5
# From this many seconds a step on, predictions are held to less.
LONG_STEP_SECONDS, MOST_MISPREDICTED_LONG = 10e-3, 1.2


# The line that a user sees after some steps; where it is missing, the step was not captured.
_REPORT = re.compile(r"step measured \S+ \S+, predicted (\S+) (\w+)")
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def worker(args: argparse.Namespace) -> None:
    """One rank of one job: train, and let rank 0 write what it saw."""
    import lightning.pytorch as pl

    sys.path.insert(0, str(ROOT / "scripts"))
    from first_contact_programs import build

    import alpa_strategy

    class Clock(pl.Callback):
        """Remembers when steps end: by the wall for starts, by a steady clock for steps."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.cpu: list[float] = []
            self.first_end = 0.0

        def on_train_batch_end(self, *unused: object) -> None:
            if not self.ends:
                self.first_end = time.time()
            self.ends.append(time.perf_counter())
            self.cpu.append(time.process_time())

    module, data = build(args.program)
    is_alpa = args.strategy.startswith("alpa")
    # What `toggle_optimizer` leaves without gradients, as in a GAN, DDP must be told to look for.
    looks_for_unused = not module.automatic_optimization
    ddp = "ddp_find_unused_parameters_true" if looks_for_unused else "ddp"
    strategy: Any = "auto" if args.num_ranks == 1 else ddp
    if is_alpa:
        strategy = alpa_strategy.AlpaStrategy()
    is_timed_in_turns = PLACE_VARIABLE in os.environ
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.num_ranks,
        strategy=strategy,
        max_epochs=-1 if is_timed_in_turns else None,
        max_steps=-1 if is_timed_in_turns else args.steps,
        callbacks=[TurnTaker.from_environment() if is_timed_in_turns else clock],
        default_root_dir=args.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, data)
    if trainer.global_rank == 0 and not is_timed_in_turns:
        seen = {
            "first_step_end": clock.first_end,
            "steps": [end - begin for begin, end in pairwise(clock.ends)],
            "cpu": [end - begin for begin, end in pairwise(clock.cpu)],
        }
        if is_alpa:
            seen["planned"] = strategy.plan.predicted.step_seconds
            seen["is_captured"] = not strategy.plan.is_eager
        Path(args.out).write_text(json.dumps(seen))


def worker_command(
    program: str, ranks: int, strategy: str, folder: str, num_steps: int
) -> list[str]:
    """Return the command of one job."""
    command = [sys.executable, __file__, "--worker", "--program", program, "--strategy", strategy]
    command += ["--num-ranks", str(ranks), "--folder", folder, "--steps", str(num_steps)]
    return command


def step_ratio(program: str, ranks: int, folder: str, num_turns: int = NUM_TURNS) -> dict[str, Any]:
    """Time `ddp` and `alpa` with the plan stored in `folder` in turns; return the row of both."""
    jobs = []
    for strategy in ("ddp", "alpa stored"):
        num_steps = num_turns * STEPS_PER_TURN
        command = worker_command(program, ranks, strategy, folder, num_steps)
        jobs.append(TurnJob(strategy.split()[0], command, user_threads()))
    seconds = run_in_turns(
        jobs,
        ranks,
        num_turns,
        STEPS_PER_TURN,
        Path(folder) / TURNS,
        of_turn=statistics.median,
    )
    of_ddp = ratio(seconds["alpa"], seconds["ddp"])
    figures = {"ratio": of_ddp.median, "low": of_ddp.low, "high": of_ddp.high}
    return {"program": program, "ranks": ranks, "strategy": TURNS, **figures}


def run_job(args: argparse.Namespace, program: str, ranks: int, strategy: str, folder: str) -> Any:
    """Seconds of one job: to its first step, of its steps, and as predicted."""
    out = Path(folder) / "seen.json"
    out.unlink(missing_ok=True)
    command = worker_command(program, ranks, strategy, folder, args.steps)
    command += ["--out", str(out)]
    name = f"{program} on {ranks} under {strategy}"
    begun = time.time()
    done = run_process(command, name, folder)
    if not out.is_file():
        raise SystemExit(f"{name} wrote nothing:\n{output_tail(done)}")
    if args.show_output:
        print(f"--- {program}, {ranks} ranks, {strategy}\n{done.stdout}{done.stderr}", flush=True)
    seen = json.loads(out.read_text())
    seen["start"] = seen.pop("first_step_end") - begun
    seen["step"] = statistics.median(seen.pop("steps")[WARM_UP_STEPS:])
    seen["cpu"] = statistics.median(seen["cpu"][WARM_UP_STEPS:])
    if reported := _REPORT.search(" ".join((done.stdout + done.stderr).split())):
        seen["predicted"] = float(reported[1]) * _UNITS[reported[2]]
    return {"program": program, "ranks": ranks, "strategy": strategy, **seen}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All jobs requested, one after the other; each is added to the file of `--json` at once."""
    rows = _stored(args)
    compile_package(ROOT)
    for program in args.programs:
        for ranks in args.ranks:
            for _ in range(args.rounds):
                with tempfile.TemporaryDirectory() as folder:
                    for strategy in STRATEGIES:
                        _add(rows, run_job(args, program, ranks, strategy, folder), args)
                    _add(rows, step_ratio(program, ranks, folder, args.turns), args)
    return rows


def _add(rows: list[dict[str, Any]], row: dict[str, Any], args: argparse.Namespace) -> None:
    """Add a row, print it, and write all to the file of `--json`."""
    rows.append(row)
    print(json.dumps(row), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows))


def _stored(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.json and Path(args.json).is_file():
        return json.loads(Path(args.json).read_text())
    return []


def medians(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """(program, ranks) -> strategy -> the median of each figure over the rounds."""

    def lists_by_strategy() -> Any:
        return defaultdict(lambda: defaultdict(list))

    gathered: Any = defaultdict(lists_by_strategy)
    for row in rows:
        for name in row.keys() - {"program", "ranks", "strategy"}:
            if isinstance(row[name], float | int):
                gathered[row["program"], row["ranks"]][row["strategy"]][name].append(row[name])
    return {
        job: {
            strategy: {name: statistics.median(values) for name, values in figures.items()}
            for strategy, figures in by_strategy.items()
        }
        for job, by_strategy in gathered.items()
    }


def complete(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """`medians` of the programs that ran under all strategies."""
    needed = {*STRATEGIES, TURNS}
    return {job: figures for job, figures in medians(rows).items() if needed <= {*figures}}


def misprediction(measured: float, predicted: float) -> float:
    """How many times too long or too short the prediction is; at least 1."""
    if predicted <= 0:
        return float("inf")
    return max(measured / predicted, predicted / measured)


def faults(program: str, figures: dict[str, dict[str, float]], hugging_face: bool) -> list[str]:
    """The limits that a program's figures pass, in words."""
    ddp, problems = figures["ddp"], []
    if figures[TURNS]["ratio"] > MOST_STEP_RATIO:
        problems.append(f"step {figures[TURNS]['ratio']:.2f} x ddp")
    for strategy, limits in MOST_START_RATIOS.items():
        most = limits[1] if hugging_face else limits[0]
        start_ratio = figures[strategy]["start"] / ddp["start"]
        if start_ratio > most:
            problems.append(f"start {start_ratio:.2f} x ddp ({strategy.split()[1]})")
        if "predicted" in figures[strategy]:
            measured = figures[strategy]["step"]
            is_long = measured >= LONG_STEP_SECONDS
            allowed = MOST_MISPREDICTED_LONG if is_long else MOST_MISPREDICTED
            ratio = misprediction(measured, figures[strategy]["predicted"])
            if ratio > allowed:
                problems.append(f"predicted {ratio:.2f} x off ({strategy.split()[1]})")
    return problems


def ratio_text(turns: dict[str, float]) -> str:
    """Return the ratio of steps with its quartiles."""
    return f"{turns['ratio']:.2f} ({turns['low']:.2f}-{turns['high']:.2f})"


def report(rows: list[dict[str, Any]]) -> int:
    """Print the table; the number of limits that were passed."""
    from rich.console import Console
    from rich.table import Table

    sys.path.insert(0, str(ROOT / "scripts"))
    from first_contact_programs import HUGGING_FACE

    table = Table(title="first contact: ms a step; seconds to the end of the first step")
    for column in ("program", "ranks", "ddp", "alpa", "x ddp", "predicted", "measured / predicted"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for column in ("start ddp", "first", "x", "stored", "x", "beyond the limits"):
        table.add_column(column, justify="left" if column.startswith("beyond") else "right")
    num_faults = 0
    for (program, ranks), figures in complete(rows).items():
        ddp, first, stored = (figures[strategy] for strategy in STRATEGIES)
        problems = faults(program, figures, program in HUGGING_FACE)
        num_faults += len(problems)
        predicted, ratios = "eager steps", ""
        if "predicted" in first and "predicted" in stored:
            predicted = f"{1e3 * first['predicted']:.2f}"
            first_ratio = first["step"] / first["predicted"]
            stored_ratio = stored["step"] / stored["predicted"]
            ratios = f"{first_ratio:.2f}, stored {stored_ratio:.2f}"
        table.add_row(
            program,
            str(ranks),
            f"{1e3 * ddp['step']:.2f}",
            f"{1e3 * stored['step']:.2f}",
            ratio_text(figures[TURNS]),
            predicted,
            ratios,
            f"{ddp['start']:.1f}",
            f"{first['start']:.1f}",
            f"{first['start'] / ddp['start']:.2f}",
            f"{stored['start']:.1f}",
            f"{stored['start'] / ddp['start']:.2f}",
            "; ".join(problems),
        )
    Console(width=190).print(table)
    return num_faults


def page_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/benchmarks.md, with its marks."""
    lines = [
        MARKS[0],
        "",
        "| program | ranks | step, ms | x DDP | measured / predicted | first start x DDP | later |",
        "|---|---|---|---|---|---|---|",
    ]
    for (program, ranks), figures in complete(rows).items():
        ddp, first, stored = (figures[strategy] for strategy in STRATEGIES)
        measured_of_predicted = "eager"
        if "predicted" in stored:
            measured_of_predicted = f"{stored['step'] / stored['predicted']:.2f}"
        cells = [
            f"`{program}`",
            str(ranks),
            f"{1e3 * stored['step']:.2f}",
            ratio_text(figures[TURNS]),
            measured_of_predicted,
            f"{first['start'] / ddp['start']:.2f}",
            f"{stored['start'] / ddp['start']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", MARKS[1]])


def main() -> int:
    sys.path.insert(0, str(ROOT / "scripts"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="*", help="names from first_contact_programs.py")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--turns", type=int, default=NUM_TURNS, help="of each job; more on a busy machine"
    )
    parser.add_argument("--json", help="a file of figures that is added to")
    parser.add_argument("--report", action="store_true", help="print the table of --json only")
    parser.add_argument("--write", action="store_true", help="--report, and write it to the docs")
    parser.add_argument("--show-output", action="store_true", help="print what the jobs print")
    parser.add_argument("--require", action="store_true", help="exit 1 where a limit is passed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    parser.add_argument("--num-ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    if args.report or args.write:
        if not args.json:
            parser.error("--report and --write read the file of --json, which is not given")
        num_faults = report(_stored(args))
        if args.write:
            write_marked(PAGE, MARKS, page_table(_stored(args)))
    else:
        from first_contact_programs import PROGRAMS

        args.programs = args.programs or list(PROGRAMS)
        num_faults = report(measure(args))
    if args.require and num_faults:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
