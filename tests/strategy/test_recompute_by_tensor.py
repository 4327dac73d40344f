"""Activation checkpointing by the tensor: under a limit that binds, some activations are recomputed
in the backward; results are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from equality.harness import assert_same, record
from models import MODELS

from alpa_strategy import ClusterSpec, Plan, PlanOptions, make_plan
from alpa_strategy.comm.saved_tensor_hooks import SavedTensorHooks
from alpa_strategy.errors import OptionError
from alpa_strategy.planner import planner

SIZES = {"vocab_size": 32, "d_model": 32, "num_layers": 2, "seq_len": 64}


PLANS: dict[str, Plan] = {}


def plan(model: str, layers: int = 2, devices: int = 1, **options: Any) -> Plan:
    """For the harness's batch in float64; made once for all tests."""
    key = repr((model, layers, devices, sorted(options.items())))
    if key not in PLANS:
        PLANS[key] = new_plan(model, layers, devices, options)
    return PLANS[key]


def new_plan(model: str, layers: int, devices: int, options: dict[str, Any]) -> Plan:
    torch.set_default_dtype(torch.float64)
    try:
        module = MODELS[model](**{**SIZES, "num_layers": layers})
        cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": devices})
        given = PlanOptions.from_user(batch_scope="global", num_stages=1, **options)
        return make_plan(module, module.example_batch(8), cluster, given)
    finally:
        torch.set_default_dtype(torch.float32)


def train(model: str, strategy: dict[str, Any] | None, world_size: int) -> dict[str, Any]:
    """Two steps."""
    return record(model, SIZES, strategy, 2, world_size)


@pytest.mark.parametrize("model", slow_but(("gpt", "llama"), ("gpt",)))
def test_less_memory_costs_less_than_recomputing_everything(model: str) -> None:
    kept, everything = plan(model, remat=False), plan(model, remat=True)
    limit = kept.predicted.peak_bytes * 0.8
    chosen = plan(model, memory_limit=limit)
    assert chosen.stages[0].recomputed
    assert not chosen.stages[0].remat
    assert chosen.predicted.peak_bytes <= limit
    assert (
        kept.predicted.step_seconds
        <= chosen.predicted.step_seconds
        < everything.predicted.step_seconds
    )
    assert Plan.from_dict(chosen.to_dict()) == chosen


def test_products_are_made_again_on_several_devices_too() -> None:
    """Between what norms and pointwise ops spare, and recomputing everything."""
    alone = {"devices": 2, "num_microbatches": 1, "offload": False}
    selective, everything = (plan("llama", remat=remat, **alone) for remat in ("selective", True))
    limit = (selective.predicted.peak_bytes + everything.predicted.peak_bytes) / 2
    chosen = plan("llama", memory_limit=limit, **alone)
    assert any(name.startswith("linear") for name in chosen.stages[0].recomputed)
    assert not chosen.stages[0].remat
    assert chosen.predicted.peak_bytes <= limit
    assert chosen.predicted.step_seconds < everything.predicted.step_seconds


def test_what_a_second_run_gathers_is_priced() -> None:
    """Under ZeRO-3 a matrix is gathered for the forward, for the second run and for the
    backward.
    """

    def gathered(remat: Any) -> tuple[float, float]:
        """(bytes, seconds of all communication)"""
        found = plan("llama", devices=2, parallel="zero3", num_microbatches=1, remat=remat)
        moved = [
            c.num_bytes
            for c in found.collectives()
            if (c.kind, c.phase) == ("all_gather", "backward")
        ]
        return sum(moved), found.predicted.communication_seconds

    name = "blocks.0"
    weights = {
        n: p.numel() * 8
        for n, p in MODELS["llama"](**SIZES).named_parameters()
        if n.startswith(name)
    }
    kept, again = gathered(False), gathered([name])
    assert again[0] - kept[0] >= max(weights.values())
    assert again[1] > kept[1]


def test_pipelines_on_many_devices_recompute_stages(monkeypatch) -> None:
    """To decide tensor by tensor takes minutes there; the plan is stored under the options as they
    were given.
    """
    module, cluster = (
        MODELS["gpt"](**SIZES),
        ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2}),
    )
    batch = module.example_batch(16)
    limit = (
        make_plan(
            module, batch, cluster, PlanOptions(remat=False, num_stages=1)
        ).predicted.peak_bytes
        * 0.85
    )
    options = PlanOptions(memory_limit=limit)
    small = make_plan(module, batch, cluster, options)
    monkeypatch.setattr(planner, "EVERY_SIZE", 1)
    large = make_plan(module, batch, cluster, options)
    assert any(stage.recomputed for stage in small.stages)
    assert not any(stage.recomputed for stage in large.stages)
    assert large.fingerprint == small.fingerprint
    assert large.predicted.peak_bytes <= limit


@pytest.mark.parametrize(
    ("model", "parallel", "world_size"),
    [
        ("gpt", "auto", 1),
        # Sharded weights are in the next test.
        pytest.param("llama", "zero3", 2, marks=pytest.mark.slow),
        pytest.param("gpt", "auto", 2, marks=pytest.mark.slow),
        pytest.param("llama", "auto", 1, marks=pytest.mark.slow),
        pytest.param("llama", "auto", 2, marks=pytest.mark.slow),
        pytest.param("llama", "zero3", 1, marks=pytest.mark.slow),
    ],
)
def test_what_is_made_again_is_the_same(
    pool, tmp_path: Path, model: str, parallel: str, world_size: int
) -> None:
    """Gathered norms' weights included."""
    limit = plan(model, remat=False).predicted.peak_bytes * (0.8 if world_size == 1 else 0.45)
    check(
        pool,
        tmp_path,
        model,
        world_size,
        {"memory_limit": limit, "parallel": parallel, "num_stages": 1},
    )


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        # One device recomputes above, by a limit.
        pytest.param(1, {"num_stages": 1}, marks=pytest.mark.slow),
        (2, {"parallel": "zero3", "num_stages": 1}),
        pytest.param(
            2,
            {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"},
            marks=pytest.mark.slow,
        ),
        (2, {"num_stages": 4, "num_microbatches": 4, "schedule": "ZBVZeroBubble"}),
    ],
    ids=["one", "zero3", "1F1B", "zero bubble"],
)
def test_a_pin_changes_no_result(
    pool, tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    check(pool, tmp_path, "llama", world_size, {**options, "remat": "selective"})


def test_what_is_read_through_views_is_made_again(pool, tmp_path: Path) -> None:
    """All products of a block, its fused projection too, of which views alone are read: within what
    that spares.
    """
    kept, again = (plan("gpt", remat=remat) for remat in (False, ["blocks.*.qkv"]))
    (name,) = {name.rpartition("_")[0] for name in again.stages[0].recomputed}
    assert name == "linear"
    spared = 2 * 8 * SIZES["seq_len"] * 3 * SIZES["d_model"] * 8  # layers, rows, bytes
    assert kept.predicted.peak_bytes - again.predicted.peak_bytes > 0.9 * spared
    check(pool, tmp_path, "gpt", 2, {"parallel": "zero3", "num_stages": 1, "remat": ["blocks.*"]})


def noted(strategy: dict[str, Any]) -> int:
    """Return the number of results that were left to be recomputed in two steps."""
    noted, note = [], SavedTensorHooks.note_made

    def seen(regather: SavedTensorHooks, *arguments: Any) -> None:
        noted.append(arguments)
        note(regather, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensorHooks, "note_made", seen)
        train("llama", strategy, 1)
    return len(noted)


def test_micro_batches_do_not_keep_what_is_pinned(pool, tmp_path: Path) -> None:
    strategy = {
        "cluster": "pcie_8gpu",
        "plan_dir": str(tmp_path),
        "remat": "selective",
        "parallel": "data",
    }
    (once,) = pool.run(1, noted, {**strategy, "num_stages": 1})
    (twice,) = pool.run(1, noted, {**strategy, "num_microbatches": 2})
    assert twice == 2 * once > 0


def test_what_is_pinned_is_made_again_and_nothing_else() -> None:
    kept, everything, selective = (plan("gpt", remat=remat) for remat in (False, True, "selective"))
    assert {name.rpartition("_")[0] for name in selective.stages[0].recomputed} == {
        "layer_norm",
        "gelu",
    }
    assert (
        everything.predicted.peak_bytes < selective.predicted.peak_bytes < kept.predicted.peak_bytes
    )
    assert (
        kept.predicted.step_seconds
        < selective.predicted.step_seconds
        < everything.predicted.step_seconds
    )
    assert plan("gpt", remat=["gelu_1", "ln_f"]).stages[0].recomputed == ("gelu_1", "layer_norm_4")


def test_spans_are_made_again_where_single_results_do_not_fit() -> None:
    limit = plan("llama", remat=True, num_microbatches=1, layers=6).predicted.peak_bytes * 1.01
    chosen_plan = plan("llama", memory_limit=limit, layers=6, offload=False)
    assert chosen_plan.stages[0].remat
    assert chosen_plan.num_microbatches == 1
    assert chosen_plan.predicted.peak_bytes <= limit
    # The cluster has a way to host memory: where results may wait there, that is faster.
    stored = plan("llama", memory_limit=limit, layers=6)
    assert stored.stages[0].stored
    assert not stored.stages[0].remat
    assert stored.predicted.peak_bytes <= limit
    assert stored.predicted.step_seconds < chosen_plan.predicted.step_seconds


def test_names_that_can_mean_nothing() -> None:
    with pytest.raises(OptionError, match="names no op of the step"):
        plan("gpt", remat=["nothing.*"])
    with pytest.raises(
        OptionError, match="names only views, random ops and ops of several results"
    ):
        plan("gpt", remat="view_*")
    with pytest.raises(OptionError, match="decide by themselves"):
        PlanOptions.from_user(remat="selective", compile=True)
    with pytest.raises(OptionError, match="is neither true, false nor names"):
        PlanOptions.from_user(remat=3)


def check(pool, tmp_path: Path, model: str, world_size: int, options: dict[str, Any]) -> None:
    """Two steps are those of the plain Trainer, and some results were recomputed."""
    strategy = {"cluster": "pcie_8gpu", "plan_dir": str(tmp_path), **options}
    runs = pool.run(world_size, train, model, strategy, world_size)
    (reference,) = pool.run(1, train, model, None, world_size, init_group=False)
    for run in runs:
        assert_same(run, reference)
        assert run["recomputed"]


@pytest.mark.parametrize("parallel", slow_but(("data", "zero3", "tensor"), ("tensor",)))
def test_recomputation_keeps_a_named_plan_on_all_devices(parallel: str) -> None:
    """On devices that mostly wait, stages that take turns would be faster: they are not what the
    name means.
    """
    module, cluster = (
        MODELS["gpt"](),
        ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2}),
    )
    options = PlanOptions.from_user(parallel=parallel, remat=True)
    chosen_plan = make_plan(module, module.example_batch(8), cluster, options)
    assert [stage.logical_mesh for stage in chosen_plan.stages] == [(2,)]
    assert chosen_plan.stages[0].remat
