#!/usr/bin/env python
"""Random plans in real trainings: models x meshes x pins x schedules x micro-batches x device
orders on 2 to 4 ranks.

Each case draws what a user may request and trains two steps in fp64. Losses, gradients, metrics and
weights equal one process's to 1e-9, or the options are refused with one clear error. The seed is
printed; without one it is the date.

    python scripts/random_plans.py --cases 200 --seed 20261122
"""

from __future__ import annotations

import argparse
import datetime
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from plan_runs import BATCH_NORM, SAMPLES, Case, Outcome, PlanRuns
from worker_pool import WorkerPool

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.schedules import SCHEDULES

MODELS: dict[str, list[dict[str, Any]]] = {
    "mlp": [{}, {"num_layers": 5, "d_hidden": 12}],
    "gpt": [{}, {"num_layers": 3, "vocab_size": 33}, {"ignore_fraction": 0.4}, {"tied": False}],
    "llama": [{}, {"num_kv_heads": 4}],
    "bert": [{}],
    "convnet": [{}],
    "unet": [{}],
    "resnet": [{}],
    "translator": [{}],
    "twice": [{}],
    "frozen": [{}],
    "everywhere": [{}],
    "three_times": [{}],
    "fourier": [{}],
    "routed": [{}],
    "derived": [{}],
}
PARALLEL = ("auto", "data", "zero1", "zero2", "zero3", "tensor")
PATTERNS = ("*", "*e*", "*a*", "*.weight", "*.bias", "*0*")
MODES = ("R", "R*", "S0", "S0", "G0", "G0", "S1", "G1")
MESHES = {2: [[2], [1, 2], [2, 1]], 3: [[3], [1, 3]], 4: [[4], [2, 2], [1, 4], [4, 1]]}


def random_case(rng: random.Random, name: str) -> Case:
    model = rng.choice(sorted(MODELS))
    world = rng.choice([2, 2, 3, 4])
    options: dict[str, Any] = {"batch_scope": rng.choice(["rank", "global"])}
    rows = SAMPLES if options["batch_scope"] == "global" else SAMPLES // world
    counts = []
    for count in (2, 3, 4, 6, 8):
        if rows % count == 0 or rng.random() < 0.05:
            counts.append(count)
    pipelined = rng.random() < 0.6
    if pipelined or rng.random() < 0.4:
        mesh = None
    else:
        mesh = rng.choice(MESHES[world])
    if mesh is not None:
        options["logical_mesh"] = mesh
        options["parallel"] = rng.choice(
            [rng.choice(PARALLEL), [rng.choice(PARALLEL) for _ in mesh]]
        )
    elif rng.random() < 0.7:
        options["parallel"] = rng.choice(PARALLEL)
    if rng.random() < 0.35:
        axes = 1 if mesh is None else len(mesh)
        pins = [rng.choice(PATTERNS) for _ in range(rng.randint(1, 2))]
        options["placements"] = {
            pattern: " ".join(rng.choice(MODES) for _ in range(axes)) for pattern in pins
        }
    if pipelined:
        options["schedule"] = rng.choice([None, *SCHEDULES])
        several = (
            options["schedule"] is not None
            and not SCHEDULES[options["schedule"]].has_one_stage_per_mesh
        )
        stages = [2 * world, 4] if several else [2, world, min(world, 3)]
        options["num_stages"] = rng.choice(stages) if rng.random() < 0.95 else rng.randint(2, 8)
        options["num_microbatches"] = rng.choice([None, *counts])
        options["remat"] = rng.choice([None, None, True, False])
    elif rng.random() < 0.3:
        options["num_stages"], options["num_microbatches"] = 1, rng.choice(counts)
        options["remat"] = rng.choice([None, True])
    if rng.random() < 0.3:  # devices in an order of their own
        order = tuple(rng.sample(range(world), world))
        options["cluster"] = replace(
            ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": world}), order=order
        )
    kwargs = {**rng.choice(MODELS[model]), "optimizer": rng.choice(["sgd", "sgd", "adamw"])}
    options = {key: value for key, value in options.items() if value is not None}
    accumulate = (
        1 if model in BATCH_NORM else rng.choice([1, 1, 2])
    )  # one process's parts are micro-batches there
    return Case(
        name, model, world, options, kwargs, clip=rng.choice([None, 0.1]), accumulate=accumulate
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")))
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run")
    chosen = parser.parse_args(arguments)
    print(f"seed {chosen.seed}", flush=True)
    cases = [
        case
        for case in random_cases(chosen.cases, chosen.seed)
        if not chosen.only or int(case.name) in chosen.only
    ]
    pool = WorkerPool()
    try:
        return run_and_tell(cases, chosen.seed, pool)
    finally:
        pool.close()


def random_cases(count: int, seed: int) -> list[Case]:
    """By number of ranks: the same processes run those of one number."""
    cases = [
        random_case(random.Random(seed * 100_003 + number), str(number)) for number in range(count)
    ]
    return sorted(cases, key=lambda case: case.world)


def run_and_tell(cases: Sequence[Case], seed: int, pool: WorkerPool) -> int:
    """Run them, a line for each that is not equal, and a summary; 1 if one was bad."""
    counts = Counter[str]()
    refusals = Counter[str]()
    started = time.monotonic()

    def said(case: Case, outcome: Outcome) -> None:
        counts[outcome.kind] += 1
        cluster = case.options.get("cluster")
        shown = (
            {**case.options, "cluster": f"order {list(cluster.order)}"} if cluster else case.options
        )
        what = f"{case.name}: {case.model} on {case.world} ranks, {shown}"
        if outcome.kind == "bad":
            print(
                f"BAD {what} {case.kwargs} clip {case.clip} accumulate"
                f" {case.accumulate}\n{outcome.text}",
                flush=True,
            )
        elif outcome.kind == "refused":
            refusals[outcome.text.splitlines()[0][:60]] += 1
            print(f"refused {what}\n    {outcome.text.splitlines()[0][:200]}", flush=True)
        if sum(counts.values()) % 20 == 0:
            print(f"{sum(counts.values())} of {len(cases)}: {dict(counts)}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        PlanRuns(Path(folder), pool).outcomes(cases, said)
    for text, count in refusals.most_common(12):
        print(f"{count:5} x {text}")
    seconds = time.monotonic() - started
    print(
        f"seed {seed}: {counts['equal']} equal to one process, {counts['refused']} refused,"
        f" {counts['bad']} bad, "
        f"{seconds:.0f} s"
    )
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
