"""State that does not fit on the devices is in host memory: the same training, within the
limit.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoint.runs import Keep, assert_bitwise, checkpoint_at, fit
from equality.harness import Rows, assert_same, record
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS
from quiet import QUIET
from rich.console import Console
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy, ClusterSpec, Plan, PlanOptions, make_plan
from alpa_strategy.display.full_plan import plan_table
from alpa_strategy.errors import DoesNotFitError, OptionError, PlanError

SIZES = {"vocab_size": 64, "d_model": 64, "d_hidden": 128, "num_layers": 2, "seq_len": 2}
HOST = {"link_bandwidth": 25e9, "memory_bytes": 1e12, "memory_bandwidth": 100e9}


def cluster_file(folder: Path, num_devices: int, **host: float) -> str:
    """Write the cluster file of a node with `num_devices` and a link to host memory."""
    spec = ClusterSpec.load(
        "pcie_8gpu", {"num_nodes": 1, "devices_per_node": num_devices}
    ).to_dict()
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({**spec, "host": {**HOST, **host}}))
    return str(path)


def state_bytes(num_layers: int = SIZES["num_layers"]) -> int:
    """Parameters, gradients and Adam's moments in float64, whole."""
    module = MODELS["llama"](**{**SIZES, "num_layers": num_layers})
    return sum(p.numel() for p in module.parameters()) * 8 * 4


LIMIT = state_bytes() / 4


def on_host(plan: Plan) -> set[str]:
    return {
        name for stage in plan.stages for name, how in stage.parameter_plans.items() if how.on_host
    }


def train(
    strategy: dict[str, Any] | None, world_size: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    return record("llama", SIZES, strategy, 3, world_size, **arguments)


def assert_trains_as_one_device(
    pool, folder: Path, world_size: int, options: dict[str, Any], arguments: dict[str, Any]
) -> list[Plan]:
    strategy = {"cluster": cluster_file(folder, world_size), "plan_dir": str(folder), **options}
    runs = pool.run(world_size, train, strategy, world_size, arguments)
    (reference,) = pool.run(1, train, None, world_size, arguments, init_group=False)
    for run in runs:
        assert_same(run, reference)
    return [Plan.from_dict(run["plan"]) for run in runs]


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(2, {"clip": 0.1}, id="clipped-2"),
        # The next test clips and accumulates.
        pytest.param(1, {}, id="plain-1", marks=pytest.mark.slow),
        pytest.param(2, {}, id="plain-2", marks=pytest.mark.slow),
        pytest.param(2, {"accumulate": 2}, id="accumulated-2", marks=pytest.mark.slow),
        pytest.param(1, {"clip": 0.1}, id="clipped-1", marks=pytest.mark.slow),
        pytest.param(1, {"accumulate": 2}, id="accumulated-1", marks=pytest.mark.slow),
    ],
)
def test_state_of_four_times_the_limit_trains(
    pool, tmp_path: Path, world_size: int, arguments: dict[str, Any]
) -> None:
    for plan in assert_trains_as_one_device(
        pool, tmp_path, world_size, {"memory_limit": LIMIT}, arguments
    ):
        assert on_host(plan)
        assert plan.predicted.peak_bytes <= LIMIT


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        # Recomputed below.
        pytest.param(1, {}, marks=pytest.mark.slow),
        (1, {"remat": True}),
        # Gradients are summed, and parameters sharded, under zero3.
        pytest.param(2, {"parallel": "data"}, marks=pytest.mark.slow),
        pytest.param(2, {"parallel": "zero2", "check_gradients": True}, marks=pytest.mark.slow),
        (2, {"parallel": "zero3", "check_gradients": True}),
        pytest.param(2, {"parallel": "tensor"}, marks=pytest.mark.slow),
        # With more stages below.
        pytest.param(2, {"num_stages": 2, "num_microbatches": 2}, marks=pytest.mark.slow),
        (2, {"num_stages": 4, "num_microbatches": 4, "schedule": "ZBVZeroBubble"}),
    ],
    ids=["one", "remat", "data", "zero2", "zero3", "tensor", "stages", "zero bubble"],
)
def test_every_parameter_in_host_memory(
    pool, tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    arguments = {"accumulate": 2, "clip": 0.1}
    for plan in assert_trains_as_one_device(
        pool, tmp_path, world_size, {"offload": True, **options}, arguments
    ):
        assert on_host(plan) == {name for stage in plan.stages for name in stage.parameter_plans}


def resume(
    folder: str, first: dict[str, Any], then: dict[str, Any]
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Two steps under `first`, saved, and two more under `then`; and the four under `then`:
    (resumed, undisturbed).
    """
    fit(folder, first, 1, 2, callbacks=[Keep(f"{folder}/kept", 2)])
    _, _, resumed = fit(folder, then, 1, 4, ckpt_path=checkpoint_at(folder, 2))
    _, _, undisturbed = fit(f"{folder}/whole", then, 1, 4)
    return resumed, {step: undisturbed[step] for step in resumed}


@pytest.mark.parametrize("offloads_first", [True, False])
def test_a_checkpoint_resumes_with_and_without(pool, tmp_path: Path, offloads_first: bool) -> None:
    ways = [
        {"checkpoint": "sharded", "offload": offloads}
        for offloads in (offloads_first, not offloads_first)
    ]
    ((resumed, undisturbed),) = pool.run(1, resume, str(tmp_path), *ways)
    assert_bitwise(resumed, undisturbed)


class Validated(MODELS["llama"]):
    """With evaluation steps, a callback's view of the parameters, and frozen ones."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.blocks[0].requires_grad_(False)
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch["input_ids"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(sum(p.square().sum() for p in self.parameters())))


def validate(strategy: dict[str, Any] | None, world_size: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Validated(**SIZES)
    data = Rows(model.example_batch(24, torch.Generator().manual_seed(2)))
    given = {} if strategy is None else {"strategy": AlpaStrategy(**strategy)}
    batch_size = 8 if strategy is None else 8 // world_size
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if strategy is None else world_size,
        max_epochs=1,
        precision="64-true",
        use_distributed_sampler=False,
        **QUIET,
        **given,
    )
    trainer.fit(
        model,
        DataLoader(data, batch_size, shuffle=False),
        DataLoader(data, batch_size, shuffle=False),
    )
    return {"seen": model.seen, "loss": float(trainer.callback_metrics["val_loss"])}


@pytest.mark.parametrize("limit", [None, LIMIT], ids=["room", "on use"])
def test_evaluation_and_hooks_see_whole_parameters(
    pool, tmp_path: Path, limit: float | None
) -> None:
    given = {
        "cluster": cluster_file(tmp_path, 1),
        "plan_dir": str(tmp_path),
        "offload": True,
        "memory_limit": limit,
    }
    (run,) = pool.run(1, validate, given, 1)
    (plain,) = pool.run(1, validate, None, 1, init_group=False)
    assert run["loss"] == pytest.approx(plain["loss"], rel=1e-9)
    assert run["seen"] == pytest.approx(plain["seen"], rel=1e-9)


# What is planned, without a Trainer


def planned(
    folder: Path,
    num_devices: int = 1,
    link_bandwidth: float = 25e9,
    num_layers: int = SIZES["num_layers"],
    **options: Any,
) -> Plan:
    torch.set_default_dtype(torch.float64)
    try:
        module = MODELS["llama"](**{**SIZES, "num_layers": num_layers})
        cluster = ClusterSpec.load(cluster_file(folder, num_devices, link_bandwidth=link_bandwidth))
        return make_plan(
            module,
            module.example_batch(8 // num_devices),
            cluster,
            PlanOptions.from_user(**options),
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_offloaded_where_everything_fits(tmp_path: Path) -> None:
    assert not on_host(planned(tmp_path))


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(share=st.floats(0.5, 1.2), rate=st.sampled_from([1e9, 25e9, 1e12]))
def test_to_be_allowed_to_offload_never_costs_time(
    tmp_path_factory, share: float, rate: float
) -> None:
    folder, limit = tmp_path_factory.mktemp("law"), share * state_bytes(4) / 2  # two of four layers
    common = {"memory_limit": limit, "link_bandwidth": rate, "num_stages": 1, "num_layers": 2}
    allowed = planned(folder, **common)
    assert allowed.predicted.peak_bytes <= limit
    with contextlib.suppress(DoesNotFitError):
        without = planned(folder, offload=False, **common)
        assert allowed.predicted.step_seconds <= without.predicted.step_seconds * (1 + 1e-9)


# By default test_stored_results.py bounds the host's memory. Three plans of four layers: 12 s.
@pytest.mark.slow
def test_less_of_the_host_is_used_where_it_has_less(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_layers": 4}
    options = {"num_stages": 1, "num_microbatches": 1, "memory_limit": 0.5 * state_bytes(4)}
    much = planned(tmp_path, num_layers=4, **options)
    spec = ClusterSpec.load(cluster_file(tmp_path, 1))

    def with_host(num_bytes: float) -> Plan:
        cluster = replace(spec, host=replace(spec.host, memory_bytes=num_bytes))
        module = MODELS["llama"](**sizes).double()
        return make_plan(module, module.example_batch(8), cluster, PlanOptions(**options))

    def used(plan: Plan) -> int:
        numbers = {name: p.numel() for name, p in MODELS["llama"](**sizes).named_parameters()}
        return sum(numbers[name] for name in on_host(plan)) * 8 * 4

    assert used(much) > 0
    tight = with_host(1.001 * used(much))
    assert used(tight) <= 1.001 * used(much)
    with pytest.raises(DoesNotFitError, match="host memory"):
        with_host(1000)


def test_pins_and_the_plan_file(tmp_path: Path) -> None:
    plan = planned(tmp_path, offload=["blocks.1.*", "embed.weight"])
    assert on_host(plan) == {
        n for n in plan.stages[0].parameter_plans if n.startswith(("blocks.1.", "embed"))
    }
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.to_dict()["stages"][0]["parameters"]["embed.weight"].endswith(" on host")
    assert "in host memory" in text_of(plan)
    assert on_host(planned(tmp_path, offload=True)) == set(plan.stages[0].parameter_plans)
    assert PlanOptions.from_user(offload="auto").offload is None
    with pytest.raises(OptionError, match="matches no parameter"):
        planned(tmp_path, offload="nothing.*")
    with pytest.raises(OptionError, match="neither true, false nor names"):
        PlanOptions.from_user(offload=3)
    with pytest.raises(DoesNotFitError):
        planned(tmp_path, offload=False, memory_limit=LIMIT)
    module = MODELS["llama"](**SIZES)
    bare = replace(ClusterSpec.load(cluster_file(tmp_path, 1)), host=None)
    with pytest.raises(PlanError, match="no way to host memory"):
        make_plan(module, module.example_batch(8), bare, PlanOptions(offload=True))


def test_host_memory_that_is_too_small_is_refused(tmp_path: Path) -> None:
    module = MODELS["llama"](**SIZES)
    cluster = ClusterSpec.load(cluster_file(tmp_path, 1))
    assert cluster.host is not None
    small = replace(cluster, host=replace(cluster.host, memory_bytes=2**20))
    with pytest.raises(DoesNotFitError, match=r"host memory needs .* share, 1.00 MiB"):
        make_plan(module, module.example_batch(8), small, PlanOptions(offload=True, num_stages=1))


def text_of(plan: Plan) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(plan_table(plan))
    return console.export_text()
