"""Steps of several trainings on one machine, timed in turns.

    jobs = [TurnJob("ddp", command, {}), TurnJob("alpa", other_command, {})]
    seconds = run_in_turns(jobs, num_ranks=2, steps_per_turn=5, folder=folder)
    ratio(seconds["alpa"], seconds["ddp"])      # Ratio(median=0.97, low=0.95, high=0.98)

All jobs live at the same time. While one of them makes a few steps, the others sleep, so a turn and
the next one see the machine in the same state. On a machine whose speed differs by a third between
minutes the quickest steps of two runs differ by as much; the ratio of neighbouring turns is known
to one or two percent.

Every job adds `TurnTaker.from_environment()` to the callbacks of its Trainer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
from bench_jobs import STDERR_TAIL

# The file that holds the number of the turn which is on. Job j of n has the turns j, j + n, ...
CURRENT_TURN = "turn"
POLL_SECONDS = 0.004
# A job whose turn does not come within this time has lost the others.
MOST_WAITING_SECONDS = 1800.0
# The variable that tells a job its place: `Place` as JSON.
PLACE_VARIABLE = "BENCH_TURNS_PLACE"


class Place(NamedTuple):
    """The place of a job among those that take turns."""

    folder: str
    name: str
    index: int
    num_jobs: int
    num_turns: int
    steps_per_turn: int


class TurnTaker(pl.Callback):
    """Makes `steps_per_turn` steps when it is the job's turn, and sleeps otherwise. Ends the
    training after its last turn.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.folder = Path(place.folder)
        # Of each turn, when its steps ended.
        self.ends: list[list[float]] = []
        self._steps_left = 0

    @classmethod
    def from_environment(cls) -> TurnTaker:
        """Return the callback of the job that `run_in_turns` started."""
        return cls(Place(*json.loads(os.environ[PLACE_VARIABLE])))

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: object) -> None:
        # Here and not at the end of a step: fetching the next batch is part of the turn.
        if self._steps_left == 0:
            if self.ends:
                self._finish_turn(trainer)
            self._wait_for_turn()
            self.ends.append([])
            self._steps_left = self.place.steps_per_turn

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: object) -> None:
        self.ends[-1].append(time.perf_counter())
        self._steps_left -= 1
        if self._steps_left == 0 and len(self.ends) == self.place.num_turns:
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, *unused: object) -> None:
        if trainer.global_rank == 0:
            out = self.folder / f"{self.place.name}.json"
            out.write_text(json.dumps(self.ends), encoding="utf-8")
        self._finish_turn(trainer)
        # Ending a process takes CPU time as well.
        self._wait_for_turn()

    def _finish_turn(self, trainer: pl.Trainer) -> None:
        turn = self.place.index + (len(self.ends) - 1) * self.place.num_jobs
        _finished(self.folder, turn, trainer.global_rank).touch()

    def _wait_for_turn(self) -> None:
        next_turn = self.place.index + len(self.ends) * self.place.num_jobs
        until = time.monotonic() + MOST_WAITING_SECONDS
        while _current_turn(self.folder) < next_turn:
            if time.monotonic() > until:
                raise RuntimeError(f"turn {next_turn} of {self.place.name} does not come")
            time.sleep(POLL_SECONDS)


def _finished(folder: Path, turn: int, rank: int) -> Path:
    """Return the file that says that a rank has made the steps of a turn."""
    return folder / f"finished_{turn}_{rank}"


def _current_turn(folder: Path) -> int:
    return int((folder / CURRENT_TURN).read_text(encoding="utf-8"))


def _set_turn(folder: Path, turn: int) -> None:
    """Write the number of the turn that is on, so that no reader sees half of it."""
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write(str(turn))
    Path(file.name).replace(folder / CURRENT_TURN)


@dataclass(frozen=True)
class TurnJob:
    """A training that takes turns with others."""

    name: str
    command: Sequence[str]
    # Environment variables in addition.
    variables: Mapping[str, str]


def run_in_turns(
    jobs: Sequence[TurnJob],
    num_ranks: int,
    num_turns: int,
    steps_per_turn: int,
    folder: Path,
    of_turn: Callable[[Sequence[float]], float] = min,
) -> dict[str, list[float]]:
    """Run all jobs at once, in turns, and return the seconds of a step of each, by turn.

    A job makes `num_turns * steps_per_turn` steps. The first step of a turn is not counted: it
    finds empty caches.

    Args:
        num_ranks: of each job, on this machine.
        num_turns: of each job.
        folder: an empty folder for what the jobs tell one another.
        of_turn: makes one figure of the seconds of a turn's steps. The quickest counts by default,
            since other guests of the machine only add to a step. The median suits turns of many
            short steps.

    Raises:
        SystemExit: a job failed; the message has the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _set_turn(folder, 0)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for index, job in enumerate(jobs):
            place = Place(str(folder), job.name, index, len(jobs), num_turns, steps_per_turn)
            processes[job.name] = _start(job, place)
        last = num_turns * len(jobs)
        for turn in range(last):
            _set_turn(folder, turn)
            _wait_for_ranks(folder, turn, num_ranks, processes)
        # Past every turn: the jobs may end.
        _set_turn(folder, last + len(jobs))
        for name, process in processes.items():
            if process.wait():
                raise SystemExit(_failure(folder, name))
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()

    seconds = {}
    for job in jobs:
        turns = json.loads((folder / f"{job.name}.json").read_text(encoding="utf-8"))
        seconds[job.name] = [of_turn(_step_seconds(ends)) for ends in turns]
    return seconds


def _start(job: TurnJob, place: Place) -> subprocess.Popen[bytes]:
    """Start a job; its output goes into a file of the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **job.variables}
    environment[PLACE_VARIABLE] = json.dumps(place)
    with _output(Path(place.folder), job.name).open("wb") as output:
        return subprocess.Popen(
            job.command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def _wait_for_ranks(
    folder: Path, turn: int, num_ranks: int, processes: Mapping[str, subprocess.Popen[bytes]]
) -> None:
    """Wait until all ranks have made the steps of a turn; SystemExit if a job ends before."""
    files = [_finished(folder, turn, rank) for rank in range(num_ranks)]
    while not all(file.exists() for file in files):
        for name, process in processes.items():
            if process.poll() is not None:
                raise SystemExit(_failure(folder, name))
        time.sleep(POLL_SECONDS)


def _output(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _failure(folder: Path, name: str) -> str:
    """Return that a job ended too early, with the end of its output."""
    output = _output(folder, name).read_text(encoding="utf-8", errors="replace")
    return f"{name} failed:\n{output[-STDERR_TAIL:]}"


def _step_seconds(ends: Sequence[float]) -> list[float]:
    """Return the seconds of a turn's steps after the first."""
    return [end - begin for begin, end in pairwise(ends)]


class Ratio(NamedTuple):
    """A ratio of two jobs' steps: the median over turns and its quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(seconds: Sequence[float], of_seconds: Sequence[float], warmup: int = 2) -> Ratio:
    """Return the ratio of two jobs' seconds, turn by turn, without the first `warmup` turns."""
    pairs = list(zip(seconds, of_seconds, strict=True))[warmup:]
    ratios = [mine / theirs for mine, theirs in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(median, low, high)
