"""Many plans, each in a real training on several ranks, in processes that stay: ran right, refused,
or bad.

A run is `equality.harness.record` under a Trainer with the strategy's options or a plan file; the
reference is one process's training on the same rows. A refusal is an AlpaError on every rank;
anything else is bad: other numbers, another exception, a process that dies, a rank that waits for
another until the collective's timeout.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pipeline_models
import pipeline_models_crossing
from equality.harness import assert_trains_as_plain, record
from worker_pool import WorkerError, WorkerPool

assert pipeline_models.MODELS  # both add to the models that `record` knows
assert pipeline_models_crossing.CROSSING
BATCH_NORM = ("convnet", "resnet")
COLLECTIVE_SECONDS = 45.0  # a hang is an error then, on a machine that does other things beside
CHUNK = 20  # runs that a set of processes makes before the results are looked at
TOLERANCE = 1e-9
SAMPLES = 24  # of a step on all ranks: 12, 8 or 6 on each of 2, 3 or 4


@dataclass(frozen=True)
class Case:
    """One training: a model, the strategy's options (or a plan, as its file's data), and how many
    ranks.
    """

    name: str
    model: str
    world: int
    options: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    plan: Any = None
    steps: int = 2
    clip: float | None = None
    accumulate: int = 1


@dataclass(frozen=True)
class Outcome:
    kind: str  # equal, refused, or bad
    text: str = ""
    plan: Any = None
    pipeline: tuple[int, int, str] | None = None


def run_cases(cases: Sequence[tuple[int, Case]], folder: str) -> None:
    """On every rank: one training after the other; each leaves a file, `<number>-<rank>`."""
    import os

    import lightning.pytorch  # noqa: F401

    from alpa_strategy import AlpaError

    rank = os.environ["RANK"]
    for number, case in cases:
        options: dict[str, Any] = {
            "cluster": "pcie_8gpu",
            "verbose": False,
            "collective_timeout_seconds": COLLECTIVE_SECONDS,
            "plan_dir": folder + "/plans",
            **case.options,
        }
        if case.plan is not None:
            options["plan"] = f"{folder}/{number}.json"
        result: Any
        try:
            arguments = (
                case.steps,
                case.world,
                case.clip,
                case.accumulate,
                folder,
                "64-true",
                1,
                SAMPLES,
            )
            result = "ran", record(case.model, case.kwargs, options, *arguments)
        except AlpaError as error:
            result = "refused", str(error)
        except Exception as error:
            import traceback

            result = "raised", "".join(traceback.format_exception(error)[-6:])
        Path(folder, f"{number}-{rank}.new").write_bytes(pickle.dumps(result))
        Path(folder, f"{number}-{rank}.new").rename(Path(folder, f"{number}-{rank}"))
        if (
            result[0] == "raised"
        ):  # other ranks may still be in it: these processes are not used again
            raise RuntimeError(f"case {number}: {result[1]}")


class PlanRuns:
    """Runs cases in one pool of processes, and compares what they did with one process.

    Args:
        folder: for plans and results.
    """

    def __init__(self, folder: Path, pool: WorkerPool) -> None:
        self._folder, self._pool = folder, pool
        self._references: dict[Any, dict[str, Any]] = {}
        self._count = 0

    def outcomes(
        self, cases: Sequence[Case], said: Callable[[Case, Outcome], None] = lambda *_: None
    ) -> list[Outcome]:
        """One outcome a case, in order; `said` is called with each as it comes."""
        results: list[Outcome] = []
        while len(results) < len(cases):
            rest = cases[len(results) :]
            chunk = [case for case in rest[:CHUNK] if case.world == rest[0].world]
            chunk = chunk[
                : next(
                    (i for i, case in enumerate(rest[: len(chunk)]) if case.world != rest[0].world),
                    CHUNK,
                )
            ]
            for case, outcome in zip(chunk, self._chunk(chunk), strict=False):
                results.append(outcome)
                said(case, outcome)
        return results

    def _chunk(self, cases: Sequence[Case]) -> list[Outcome]:
        """Outcomes of the first of `cases`, up to one that ends the processes."""
        numbered = list(enumerate(cases, start=self._count))
        self._count += len(cases)
        for number, case in numbered:
            if case.plan is not None:
                (self._folder / f"{number}.json").write_text(json.dumps(case.plan))
        failure, started = "", time.monotonic()
        limit = 2 * COLLECTIVE_SECONDS + 30 * len(cases)
        try:
            arguments = (numbered, str(self._folder))
            self._pool.run(cases[0].world, run_cases, *arguments, init_group=False, timeout=limit)
        except WorkerError as error:
            failure = f"after {time.monotonic() - started:.0f} s: {error}"
        outcomes = []
        for number, case in numbered:
            files = [self._folder / f"{number}-{rank}" for rank in range(case.world)]
            results = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
            for file in files:
                file.unlink(missing_ok=True)
            if len(results) < case.world or any(kind == "raised" for kind, _ in results):
                text = "\n".join(result for kind, result in results if kind == "raised")
                outcomes.append(
                    Outcome("bad", text or f"ranks {len(results)} of {case.world} ended; {failure}")
                )
                break
            outcomes.append(self._judged(case, results))
        return outcomes

    def _judged(self, case: Case, results: list[tuple[str, Any]]) -> Outcome:
        if len({kind for kind, _ in results}) > 1:
            return Outcome("bad", f"some ranks ran, some refused: {[kind for kind, _ in results]}")
        if results[0][0] == "refused":
            lengthy = results[0][1].count("\n") > 40
            return Outcome("bad" if lengthy else "refused", results[0][1])
        runs = [result for _, result in results]
        pipeline = runs[0]["pipeline"]
        scope = case.options.get("batch_scope", "global")
        has_batch_norm = case.model in BATCH_NORM
        reference = partial(self.reference, case)
        try:
            for run in runs:
                assert_trains_as_plain(
                    run, scope, case.world, has_batch_norm, reference, TOLERANCE, SAMPLES
                )
        except AssertionError as error:
            return Outcome("bad", f"OTHER NUMBERS: {error}", runs[0]["plan"], pipeline)
        return Outcome("equal", "", runs[0]["plan"], pipeline)

    def reference(self, case: Case, ranks: int, parts: int) -> dict[str, Any]:
        """One process's training on the rows of all ranks, which accumulates over `parts`."""
        key = (case.model, str(case.kwargs), ranks, case.steps, case.clip, case.accumulate, parts)
        if key not in self._references:
            arguments = (
                case.steps,
                ranks,
                case.clip,
                case.accumulate,
                str(self._folder),
                "64-true",
                parts,
                SAMPLES,
            )
            self._references[key] = self._pool.run(
                1, record, case.model, case.kwargs, None, *arguments, init_group=False, timeout=300
            )[0]
        return self._references[key]
