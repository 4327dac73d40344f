"""A resumed run uses the checkpoint's plans, wherever it stores its own and whatever it measures:
it goes on bit by bit. What the user requests on resumption goes first.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoint.runs import Keep, Recorder, checkpoint_at, make_model
from equality.harness import Rows
from quiet import QUIET
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy, ClusterSpec
from alpa_strategy.cluster.logical_mesh import CommTable
from alpa_strategy.lightning import run_plans

SIZES = (1 << 10, 1 << 30)


def measured(slow: str) -> ClusterSpec:
    """Two CPU ranks as if measured while collectives of the kinds in `slow` were slow."""
    tables = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        seconds = 1e-1 if slow in kind else 1e-7
        tables.append(CommTable(kind, 2, 1, tuple((size, seconds) for size in SIZES)))
    spec = ClusterSpec.load("pcie_8gpu")
    return replace(
        spec, devices_per_node=2, tables=tuple(tables), measured=True, levels=(), host=None
    )


FAST_GATHERS, FAST_REDUCES = measured("reduce"), measured("gather")


def fit(
    root: str,
    options: dict[str, Any],
    max_steps: int,
    ckpt_path: str | None = None,
    cluster: ClusterSpec = FAST_GATHERS,
) -> tuple[pl.Trainer, dict[int, Any]]:
    """Train epochs of three batches and a shorter last one; what `Recorder` saw."""
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        precision="64-true",
        strategy=AlpaStrategy(cluster=cluster, verbose=False, **options),
        max_steps=max_steps,
        callbacks=[recorder, Keep(f"{root}/kept", 1)],
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": root},
    )
    model = make_model()
    torch.manual_seed(11)
    data = Rows(model.example_batch(28, torch.Generator().manual_seed(3)))
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=ckpt_path)
    return trainer, recorder.steps


def modes(trainer: pl.Trainer) -> set[str]:
    """How the plan that ran stores parameters."""
    plans = trainer.strategy.plan.stages[0].parameter_plans.values()
    return {str(plan.module_modes) for plan in plans}


# Where the run goes on, and with which options: all of it with costs that favour another plan.
PLACES: dict[str, dict[str, Any]] = {
    "same root": {"root": "before"},
    "other root": {},
    "other plan_dir": {"plan_dir": "elsewhere"},
    "planned for before": {"plans_before": True},
    "deleted .alpa": {"deletes": True},
    "middle of an epoch": {"step": 3},
    "end of an epoch": {"step": 4},
    "a short batch next": {"step": 7},
    "twice": {"twice": True},
}


def resume(root: str, places: dict[str, Any]) -> dict[str, bool]:
    """For each place, whether the run that goes on there is the uninterrupted one, bit by bit."""
    before = f"{root}/before"
    trainer, expected = fit(before, {}, 9)
    other, _ = fit(f"{root}/other", {}, 1, cluster=FAST_REDUCES)
    assert modes(trainer) != modes(other), "these costs were to lead to different plans"
    same: dict[str, bool] = {}
    for name, place in places.items():
        here = f"{root}/{place.get('root', name)}"
        options = {}
        if "plan_dir" in place:
            options["plan_dir"] = f"{root}/{place['plan_dir']}"
        if place.get("plans_before"):
            fit(here, options, 1, cluster=FAST_REDUCES)
        if place.get("deletes") and trainer.is_global_zero:
            shutil.rmtree(f"{before}/.alpa")
        step = place.get("step", 2)
        path = checkpoint_at(before, step)
        if place.get("twice"):
            fit(f"{here}/first", options, step + 2, path, cluster=FAST_REDUCES)
            step, path = step + 2, checkpoint_at(f"{here}/first", step + 2)
        resumed, steps = fit(here, options, 9, path, cluster=FAST_REDUCES)
        assert sorted(steps) == list(range(step + 1, 10)), (name, sorted(steps))
        is_same = all(
            torch.equal(weight, expected[step]["weights"][key])
            for step, seen in steps.items()
            for key, weight in seen["weights"].items()
        )
        same[name] = is_same and modes(resumed) == modes(trainer)
    return same


# Moments of epochs are in test_resume.py.
QUICK_PLACES = ("other root", "a short batch next")


@pytest.mark.parametrize(
    "names",
    [QUICK_PLACES, pytest.param(tuple(PLACES), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_run_resumed_elsewhere_goes_on_bit_by_bit(pool, tmp_path, names) -> None:
    places = {name: PLACES[name] for name in names}
    per_rank = pool.run(2, resume, str(tmp_path), places, timeout=400)
    assert per_rank == [dict.fromkeys(names, True)] * 2


# What the user requests on resumption, and the part of the fingerprint that the note names.
WISHES: dict[str, tuple[dict[str, Any], str]] = {
    "parallel": ({"parallel": "data"}, "options"),
    "placements": ({"placements": {"head.weight": "R*"}}, "options"),
    "memory_limit": ({"memory_limit": "2 GiB"}, "options"),
    "cluster": ({"cluster": "pcie_8gpu"}, "cluster"),
    "single stage": ({"num_stages": 1}, "options"),
    "logical_mesh": ({"logical_mesh": (1, 2)}, "options"),
}


def resume_with(root: str, wishes: dict[str, Any]) -> dict[str, tuple[set[str], list[str]]]:
    """How parameters are stored when the run is resumed with other options, and what is noted."""
    fit(f"{root}/before", {}, 2)
    results = {}
    for name, (options, _) in wishes.items():
        notes: list[str] = []
        own, run_plans.rank_zero_info = run_plans.rank_zero_info, notes.append
        arguments = dict(options)
        cluster = arguments.pop("cluster", FAST_GATHERS)
        path = checkpoint_at(f"{root}/before", 2)
        try:
            trainer, _ = fit(f"{root}/{name}", arguments, 4, path, cluster=cluster)
        finally:
            run_plans.rank_zero_info = own
        results[name] = modes(trainer), [note for note in notes if "resumed under" in note]
    return results


QUICK_WISHES = ("parallel", "cluster")


@pytest.mark.parametrize(
    "names",
    [QUICK_WISHES, pytest.param(tuple(WISHES), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_what_the_user_asks_for_goes_first(pool, tmp_path, names) -> None:
    wishes = {name: WISHES[name] for name in names}
    result = pool.run(2, resume_with, str(tmp_path), wishes, timeout=400)[0]
    for name, (_, part) in wishes.items():
        notes = [note for note in result[name][1] if "last bits" in note]
        assert any(part in note for note in notes), (name, result)
    assert result["parallel"][0] <= {"(R*,)", "(R,)"}, result
