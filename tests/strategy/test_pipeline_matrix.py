"""Every schedule x equal and unequal stages x every kind of parallelism inside, on many models: one
device's training.

A representative selection by default, all of it in the slow suite.
"""

from __future__ import annotations

from dataclasses import replace

import pipeline_models
import pipeline_models_crossing
import pytest
from equality.harness import assert_trains_as_plain, record
from strategy.staged_plans import staged_plan

from alpa_strategy.schedules import SCHEDULES

STEPS = 3
assert pipeline_models.MODELS  # adds to the models that `record` knows
MODELS = {
    "gpt": {"ignore_fraction": 0.4, "num_layers": 3, "vocab_size": 33},
    "llama": {"num_layers": 2},
    "bert": {"num_layers": 2},
    "unet": {},
    "convnet": {},
    "resnet": {},
    "translator": {},
    "twice": {},
}
EXTRA = {"frozen": {}, **{name: {} for name in pipeline_models_crossing.CROSSING}}
BATCH_NORM = ("convnet", "resnet")
INSIDE = ("tensor", "data", "zero2", "zero3")
FLAT = {"2+2": ((0, 1), (2, 3)), "1+3": ((0,), (1, 2, 3)), "2+1+1": ((0, 1), (2,), (3,))}


def places_of(schedule, split):
    """Ranks per stage as the schedule lays them."""
    meshes = FLAT[split]
    if len(SCHEDULES[schedule].stages_per_mesh) > 1:
        return (*meshes, *meshes)
    return (*meshes, *reversed(meshes)) if SCHEDULES[schedule].is_folded else meshes


def run(model, kwargs, options, *arguments):
    return record(model, kwargs, options, *arguments)


@pytest.fixture(scope="session")
def plain(pool):
    """Runs of a plain single-process Trainer, computed once."""
    results = {}

    def get(model, kwargs, num_ranks, clip, accumulate, num_microbatches):
        key = (model, str(kwargs), num_ranks, clip, accumulate, num_microbatches)
        if key not in results:
            arguments = (STEPS, num_ranks, clip, accumulate, ".", "64-true", num_microbatches)
            results[key] = pool.run(1, run, model, kwargs, None, *arguments, init_group=False)[0]
        return results[key]

    return get


def check(
    pool,
    plain,
    tmp_path,
    model,
    schedule,
    split,
    inside,
    optimizer="adamw",
    clip=0.1,
    accumulate=1,
    remat=False,
):
    places = places_of(schedule, split)
    world = 4
    num_microbatches = {2: 2, 4: 4}.get(len(places), 8)
    kwargs = {**(MODELS | EXTRA)[model], "optimizer": optimizer}
    scope = "rank" if num_microbatches == 2 else "global"  # 8 rows on 4 ranks
    plan = staged_plan(
        model, kwargs, places, schedule, num_microbatches, inside, remat is True, scope
    )
    if remat == "first":
        plan = replace(plan, stages=(replace(plan.stages[0], remat=True), *plan.stages[1:]))
    elif remat:
        assert any(stage.recompute_splits for stage in plan.stages)
    plan.save(tmp_path / "plan.json")
    options = {
        "cluster": "pcie_8gpu",
        "plan_dir": str(tmp_path),
        "plan": str(tmp_path / "plan.json"),
        "verbose": False,
        "batch_scope": scope,
    }
    runs = pool.run(world, run, model, kwargs, options, STEPS, world, clip, accumulate)
    for one in runs:
        assert one["pipeline"] == (len(places), num_microbatches, schedule)
    compare(plain, runs, model, kwargs, scope, clip, accumulate)


def compare(plain, runs, model, kwargs, scope, clip, accumulate):
    def plain_run(num_ranks, num_parts):
        return plain(model, kwargs, num_ranks, clip, accumulate, num_parts)

    for one in runs:
        assert_trains_as_plain(one, scope, len(runs), model in BATCH_NORM, plain_run)


@pytest.mark.parametrize(
    ("model", "schedule", "split", "inside", "optimizer", "accumulate", "remat"),
    [
        # Both models are below as well.
        pytest.param("unet", "1F1B", "1+3", "zero3", "sgd", 2, True, marks=pytest.mark.slow),
        ("translator", "GPipe", "2+1+1", "tensor", "adamw", 1, True),
        pytest.param("resnet", "1F1B", "2+2", "data", "adamw", 1, True, marks=pytest.mark.slow),
        # A parameter of two stages, in a schedule that test_pipelines.py has.
        pytest.param(
            "twice", "Interleaved1F1B", "1+3", "zero2", "sgd", 2, True, marks=pytest.mark.slow
        ),
        ("gpt", "ZBVZeroBubble", "1+3", "tensor", "adamw", 1, True),
        ("llama", "InterleavedZeroBubble", "2+2", "zero3", "adamw", 2, False),
        # pipeline/test_staged_step.py has it.
        pytest.param("bert", "LoopedBFS", "2+2", "tensor", "sgd", 1, False, marks=pytest.mark.slow),
        ("gpt", "1F1B", "2+1+1", "tensor", "adamw", 1, "first"),
        ("frozen", "1F1B", "2+2", "data", "adamw", 1, False),
    ],
)
def test_pipelines_train_as_one_device(
    pool, plain, tmp_path, model, schedule, split, inside, optimizer, accumulate, remat
):
    check(pool, plain, tmp_path, model, schedule, split, inside, optimizer, 0.1, accumulate, remat)


@pytest.mark.parametrize(
    ("model", "world", "options"),
    [
        ("unet", 3, {"num_stages": 3, "num_microbatches": 4, "batch_scope": "global"}),
        # Under a plan by hand above.
        pytest.param(
            "translator",
            2,
            {"num_stages": 2, "num_microbatches": 2, "schedule": "GPipe"},
            marks=pytest.mark.slow,
        ),
        ("resnet", 2, {"num_stages": 2, "num_microbatches": 2, "remat": True}),
        pytest.param("twice", 4, {"num_stages": 2}, marks=pytest.mark.slow),
        pytest.param(
            "gpt",
            2,
            {"num_stages": 1, "num_microbatches": 4, "remat": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_solvers_plans_train_as_one_device(pool, plain, tmp_path, model, world, options):
    kwargs = {**MODELS[model], "optimizer": "sgd"}
    settings = {"cluster": "pcie_8gpu", "plan_dir": str(tmp_path), "verbose": False, **options}
    runs = pool.run(world, run, model, kwargs, settings, STEPS, world, 0.1, 1)
    assert runs[0]["pipeline"][0] == options["num_stages"]
    compare(plain, runs, model, kwargs, options.get("batch_scope", "global"), 0.1, 1)


def cases():
    """(optimizer, clip, accumulate, remat) go round with the case's number."""
    rounds = [
        ("adamw", 0.1, 1, False),
        ("sgd", None, 2, False),
        ("adamw", None, 1, True),
        ("sgd", 0.1, 2, True),
    ]
    number = 0
    for model in MODELS:
        for schedule in SCHEDULES:
            for split in FLAT:
                for inside in INSIDE:
                    if split == "2+1+1" and not SCHEDULES[schedule].has_one_stage_per_mesh:
                        # six stages: more than the small models' micro-batches and layers allow
                        continue
                    yield (
                        model,
                        schedule,
                        split,
                        inside,
                        *rounds[(number + number // len(rounds)) % len(rounds)],
                    )
                    number += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "schedule", "split", "inside", "optimizer", "clip", "accumulate", "remat"),
    list(cases()),
)
def test_the_whole_matrix(
    pool, plain, tmp_path, model, schedule, split, inside, optimizer, clip, accumulate, remat
):
    check(pool, plain, tmp_path, model, schedule, split, inside, optimizer, clip, accumulate, remat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "split", "inside", "remat"),
    [
        ("1F1B", "2+1+1", "zero3", False),
        ("GPipe", "1+3", "zero2", True),
        ("Interleaved1F1B", "2+2", "tensor", False),
        ("ZBVZeroBubble", "1+3", "data", False),
        ("InterleavedZeroBubble", "2+2", "zero3", True),
    ],
)
@pytest.mark.parametrize("model", pipeline_models_crossing.CROSSING)
def test_what_crosses_many_stages(pool, plain, tmp_path, model, schedule, split, inside, remat):
    check(pool, plain, tmp_path, model, schedule, split, inside, "adamw", 0.1, 1, remat)
