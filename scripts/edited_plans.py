#!/usr/bin/env python
"""Plans edited as a person with an editor might, in real trainings on two ranks: each is refused,
or trains right.

The plans of a GPT, a convnet and others are made by the planner (one stage in several layouts,
pipelines of several schedules). One to three edits each: strategies swapped, a `*` dropped,
placements, modes, dims, meshes, stage cuts, devices, schedules, micro-batches, what is sent and
received. Losses, gradients and weights of what runs equal one process's to 1e-9; the rest is
refused with one clear error on every rank.

    python scripts/edited_plans.py --cases 1000 --seed 7
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzz_damage import changed
from plan_runs import Case, PlanRuns
from random_plans import run_and_tell
from worker_pool import WorkerPool

from alpa_strategy.schedules import SCHEDULES

SMALL = {"optimizer": "sgd"}
# A model, its arguments and the strategy's options.
Base = tuple[str, dict[str, Any], dict[str, Any]]
BASES: list[Base] = [
    ("gpt", {"vocab_size": 33}, {"parallel": "zero3"}),
    ("gpt", {}, {"parallel": "tensor"}),
    ("gpt", {"tied": False}, {"parallel": "zero2", "logical_mesh": [2, 1]}),
    ("gpt", {}, {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}),
    (
        "gpt",
        {"num_layers": 3},
        {"num_stages": 4, "num_microbatches": 4, "schedule": "Interleaved1F1B"},
    ),
    ("gpt", {}, {"num_stages": 4, "num_microbatches": 4, "schedule": "ZBVZeroBubble"}),
    ("llama", {}, {"num_stages": 2, "num_microbatches": 3, "schedule": "GPipe", "remat": True}),
    ("convnet", {}, {"parallel": "data"}),
    ("convnet", {}, {"num_stages": 2, "num_microbatches": 2}),
    ("unet", {}, {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}),
    ("mlp", {"num_layers": 4}, {"parallel": "auto"}),
    ("twice", {}, {"num_stages": 2, "num_microbatches": 4}),
    ("mlp", {"num_layers": 4}, {"num_stages": 1, "num_microbatches": 2, "remat": True}),
]
PLACEMENTS = ("R", "R*", "P", "S0", "S1", "S2")
MODES = ("R", "R*", "S0", "S1", "G0", "G1")
Edit = Callable[[dict[str, Any], random.Random], None]
DOES_NOT_APPLY = (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError)


# Edits: each changes the plan's data in place; one that does not apply changes nothing


def drop_star(plan: dict[str, Any], rng: random.Random) -> None:
    strategies, name = an_op(plan, rng, lambda text: "*" in text)
    stars = [match.start() for match in re.finditer(r"\*", strategies[name])]
    at = rng.choice(stars)
    strategies[name] = strategies[name][:at] + strategies[name][at + 1 :]


def a_placement(plan: dict[str, Any], rng: random.Random) -> None:
    strategies, name = an_op(plan, rng)
    places = list(re.finditer(r"R\*|R|P|S\d", strategies[name]))
    if places:
        place = rng.choice(places)
        text = strategies[name]
        strategies[name] = text[: place.start()] + rng.choice(PLACEMENTS) + text[place.end() :]


def all_placements(plan: dict[str, Any], rng: random.Random) -> None:
    """Of one op: every S0 becomes S1, every R* R, ..."""
    strategies, name = an_op(plan, rng)
    strategies[name] = strategies[name].replace(rng.choice(PLACEMENTS), rng.choice(PLACEMENTS))


def like_another_op(plan: dict[str, Any], rng: random.Random) -> None:
    """The strategy of an op with as many operands; often one that is offered."""
    strategies, name = an_op(plan, rng)
    shape = re.sub(r"R\*|R|P|S\d", "x", strategies[name])
    others = [
        text
        for stage in plan["stages"]
        for text in stage["strategies"].values()
        if re.sub(r"R\*|R|P|S\d", "x", text) == shape
    ]
    strategies[name] = rng.choice(others)


def swap_ops(plan: dict[str, Any], rng: random.Random) -> None:
    (first, a), (second, b) = an_op(plan, rng), an_op(plan, rng)
    first[a], second[b] = second[b], first[a]


def one_kind(plan: dict[str, Any], rng: random.Random) -> None:
    """All ops of one kind in a stage get one strategy, as by search and replace."""
    strategies, name = an_op(plan, rng)
    kind, text = name.rstrip("0123456789_"), strategies[name]
    for other in strategies:
        if other.startswith(kind):
            strategies[other] = text


def rename_op(plan: dict[str, Any], rng: random.Random) -> None:
    strategies, name = an_op(plan, rng)
    strategies[rng.choice([name + "_1", "linear", ""])] = strategies.pop(name)


def a_mode(plan: dict[str, Any], rng: random.Random) -> None:
    parameters = a_stage(plan, rng)["parameters"]
    if parameters:
        name = rng.choice(sorted(parameters))
        parts = parameters[name].split(" in ")
        modes = parts[0].split()
        modes[rng.randrange(len(modes))] = rng.choice(MODES)
        parameters[name] = " in ".join([" ".join(modes), *parts[1:]])


def a_mode_everywhere(plan: dict[str, Any], rng: random.Random) -> None:
    """One parameter's modes in every stage that has it: consistent."""
    name = rng.choice(sorted({name for stage in plan["stages"] for name in stage["parameters"]}))
    mode = rng.choice(MODES)
    for stage in plan["stages"]:
        if name in stage["parameters"]:
            stage["parameters"][name] = re.sub(r"^(R\*|R|[SG]\d)", mode, stage["parameters"][name])


def all_modes(plan: dict[str, Any], rng: random.Random) -> None:
    old, new = rng.choice(MODES), rng.choice(MODES)
    for stage in plan["stages"]:
        for name, text in stage["parameters"].items():
            if rng.random() < 0.9:
                stage["parameters"][name] = text.replace(old, new)


def segments(plan: dict[str, Any], rng: random.Random) -> None:
    parameters = a_stage(plan, rng)["parameters"]
    if parameters:
        name = rng.choice(sorted(parameters))
        bare = parameters[name].partition(" in ")[0]
        parameters[name] = rng.choice([bare, f"{bare} in 2 segments", f"{bare} in 3 segments"])


def forget_or_add(plan: dict[str, Any], rng: random.Random) -> None:
    field = a_stage(plan, rng)[
        rng.choice(["parameters", "strategies", "received", "sent", "shapes"])
    ]
    if field and rng.random() < 0.7:
        del field[rng.choice(sorted(field))]
    else:
        field[rng.choice(["1", "5", "wte.weight", "linear_1"])] = rng.choice(["R", "S0", "R->R"])


def a_boundary(plan: dict[str, Any], rng: random.Random) -> None:
    fields = [s[side] for s in plan["stages"] for side in ("sent", "received") if s[side]]
    if fields:
        field = rng.choice(fields)
        value = rng.choice(sorted(field))
        field[value] = " ".join(rng.choice(["R", "S0", "S1", "S2"]) for _ in field[value].split())


def a_boundary_on_both_sides(plan: dict[str, Any], rng: random.Random) -> None:
    values = sorted({v for s in plan["stages"] for v in s["sent"]})
    if values:
        value, text = rng.choice(values), rng.choice(["R", "S0", "S1"])
        for stage in plan["stages"]:
            for side in ("sent", "received"):
                if value in stage[side]:
                    stage[side][value] = text


def another_value(plan: dict[str, Any], rng: random.Random) -> None:
    fields = [s[side] for s in plan["stages"] for side in ("sent", "received") if s[side]]
    if fields:
        field = rng.choice(fields)
        value = rng.choice(sorted(field))
        field[str(int(value) + rng.choice([-1, 1, 5]))] = field.pop(value)


def a_mesh(plan: dict[str, Any], rng: random.Random) -> None:
    stage = a_stage(plan, rng)
    which = rng.choice(["logical_mesh", "submesh"])
    stage[which] = rng.choice([[1], [2], [1, 2], [2, 1], [1, 1], [4], [2, 2], stage[which][::-1]])


def devices(plan: dict[str, Any], rng: random.Random) -> None:
    stage = a_stage(plan, rng)
    match rng.randrange(5):
        case 0:
            stage["first_device"] = rng.choice([0, 1, 2])
        case 3:
            stage["devices"] = rng.choice([[1, 0], [0, 1], [1], [0], [0, 0], [2, 1]])
        case 4:
            for stage in plan["stages"]:  # ranks the other way round, as where links differ
                size = math.prod(stage["logical_mesh"])
                stage["devices"] = (
                    [1, 0][:size] if size > 1 else [1 - min(1, stage["first_device"])]
                )
        case 1:
            for stage in plan["stages"]:  # all stages the other way round
                stage["first_device"] = 1 - min(1, stage["first_device"])
        case 2:
            a, b = a_stage(plan, rng), a_stage(plan, rng)
            a["first_device"], b["first_device"] = b["first_device"], a["first_device"]


def a_cut(plan: dict[str, Any], rng: random.Random) -> None:
    """Two stages meet somewhere else; often with the strategies and parameters that the ops take
    with them.
    """
    if len(plan["stages"]) < 2:
        plan["stages"][0]["ops"][rng.randrange(2)] += rng.choice([-1, 1])
        return
    index = rng.randrange(len(plan["stages"]) - 1)
    left, right = plan["stages"][index : index + 2]
    shift = rng.choice([-3, -2, -1, 1, 2, 3])
    left["ops"][1] += shift
    right["ops"][0] += shift
    if rng.random() < 0.7:
        for source, target in ((left, right), (right, left)):
            target["strategies"] = {**source["strategies"], **target["strategies"]}
            target["parameters"] = {**source["parameters"], **target["parameters"]}


def stages_reordered(plan: dict[str, Any], rng: random.Random) -> None:
    stages = plan["stages"]
    match rng.randrange(4):
        case 0:
            rng.shuffle(stages)
        case 1:
            stages.append(copy.deepcopy(rng.choice(stages)))
        case 2 if len(stages) > 1:
            del stages[rng.randrange(len(stages))]
        case _:
            a, b = rng.randrange(len(stages)), rng.randrange(len(stages))
            field = rng.choice(
                ["strategies", "parameters", "sent", "received", "ops", "first_device"]
            )
            stages[a][field], stages[b][field] = stages[b][field], stages[a][field]


def a_schedule(plan: dict[str, Any], rng: random.Random) -> None:
    plan["schedule"] = rng.choice([*SCHEDULES, "none", ""])


def microbatches(plan: dict[str, Any], rng: random.Random) -> None:
    plan["num_microbatches"] = rng.choice([1, 2, 3, 4, 6, 12, 5, 24])


def recomputation(plan: dict[str, Any], rng: random.Random) -> None:
    stage = a_stage(plan, rng)
    match rng.randrange(3):
        case 0:
            stage["remat"] = not stage["remat"]
        case 1:
            first, last = stage["ops"]
            stage["remat"], stage["remat_cuts"] = (
                True,
                sorted({rng.randint(first, last) for _ in range(3)}),
            )
        case 2:
            stage["derives_again"] = not stage["derives_again"]


def what_is_only_said(plan: dict[str, Any], rng: random.Random) -> None:
    """Fields that describe: no number of theirs may change what is computed."""
    stage = a_stage(plan, rng)
    match rng.randrange(5):
        case 0 if stage["shapes"]:
            stage["shapes"][rng.choice(sorted(stage["shapes"]))] = [7, 7]
        case 1:
            stage["collectives"] = []
        case 2:
            stage["predicted"]["peak_bytes"] = plan["predicted"]["peak_bytes"] = 1
        case 3:
            stage["layers"], plan["notes"] = "nothing", ["nothing"]
        case _:
            stage["forward_seconds"] = plan["gap"] = 1e6


def an_odd_value(plan: dict[str, Any], rng: random.Random) -> None:
    """Somewhere a number, text or nesting that no plan has, as in `fuzz.py`, but in a training."""
    new = changed(plan, rng)
    if isinstance(new, dict):
        plan.clear()
        plan.update(new)


def a_fingerprint(plan: dict[str, Any], rng: random.Random) -> None:
    plan["fingerprint"][rng.choice(sorted(plan["fingerprint"]))] = "0" * 16


def a_stage(plan: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return rng.choice(plan["stages"])


def an_op(
    plan: dict[str, Any], rng: random.Random, where: Callable[[str], bool] = lambda text: True
) -> tuple[dict[str, str], str]:
    """(a stage's strategies, the name of an op in it); any op where none is as wanted."""
    results = [
        (s["strategies"], name)
        for s in plan["stages"]
        for name, text in s["strategies"].items()
        if where(text)
    ]
    return rng.choice(results) if results else an_op(plan, rng)


EDITS: dict[Edit, int] = {  # how often each is drawn
    drop_star: 3,
    a_placement: 5,
    all_placements: 3,
    like_another_op: 6,
    swap_ops: 2,
    one_kind: 4,
    rename_op: 1,
    a_mode: 5,
    a_mode_everywhere: 5,
    all_modes: 5,
    segments: 2,
    forget_or_add: 2,
    a_boundary: 4,
    a_boundary_on_both_sides: 4,
    another_value: 1,
    a_mesh: 2,
    devices: 3,
    a_cut: 3,
    stages_reordered: 3,
    a_schedule: 3,
    microbatches: 4,
    recomputation: 5,
    what_is_only_said: 2,
    a_fingerprint: 1,
    an_odd_value: 4,
}


def edited(
    base: dict[str, Any], rng: random.Random, names: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """A plan that differs from `base`, and the names of what was done to it.

    Args:
        names: of the edits to draw from, all without.
    """
    edits = EDITS
    if names:
        edits = {edit: weight for edit, weight in EDITS.items() if edit.__name__ in names}
    plan, done = copy.deepcopy(base), []
    while plan == base:
        plan, done = copy.deepcopy(base), []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            edit = rng.choices(list(edits), list(edits.values()))[0]
            with contextlib.suppress(*DOES_NOT_APPLY):  # after another edit
                edit(plan, rng)
                done.append(edit.__name__)
    return plan, ", ".join(done)


def base_plans(pool: WorkerPool, bases: Sequence[Base] = BASES) -> list[Case]:
    """The planner's plans, each run once: they train right before anything is edited."""
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            Case(str(i), model, 2, options, {**SMALL, **kwargs})
            for i, (model, kwargs, options) in enumerate(bases)
        ]
        outcomes = PlanRuns(Path(folder), pool).outcomes(cases)
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.kind == "equal", (case, outcome)
    return [
        Case(c.name, c.model, 2, {}, c.kwargs, outcome.plan)
        for c, outcome in zip(cases, outcomes, strict=True)
    ]


def edited_cases(
    bases: Sequence[Case], count: int, seed: int, edits: Sequence[str] = ()
) -> list[Case]:
    cases = []
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        base = bases[number % len(bases)]
        plan, names = edited(base.plan, rng, edits)
        cases.append(Case(f"{number} ({names})", base.model, 2, {}, base.kwargs, plan))
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run")
    parser.add_argument(
        "--edits", nargs="*", default=[], help="names of the edits to draw from; all without"
    )
    chosen = parser.parse_args(arguments)
    print(f"seed {chosen.seed}", flush=True)
    pool = WorkerPool()
    try:
        cases = edited_cases(base_plans(pool), chosen.cases, chosen.seed, chosen.edits)
        return run_and_tell(
            [c for i, c in enumerate(cases) if not chosen.only or i in chosen.only],
            chosen.seed,
            pool,
        )
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
