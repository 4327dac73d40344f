"""`profile_steps=`: the trace of all ranks has the user's names, the plan's page has its sums."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from models import MODELS
from profiling.chrome_check import check_trace, read_trace
from quiet import QUIET
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy
from alpa_strategy.ir.measured_steps import measured_of_file
from alpa_strategy.ir.plan import Plan
from alpa_strategy.page.page import models_of

STEPS = (2, 4)
PIPELINE = {"num_stages": 2, "num_microbatches": 4, "schedule": "1F1B"}


def train(
    root: str, num_ranks: int, options: dict[str, Any] | None = None, num_steps: int = 6
) -> str | None:
    """Train with profiled steps, and return the plan as text."""
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    rows = model.example_batch(8 * num_ranks * num_steps, torch.Generator().manual_seed(0))
    rows = rows if isinstance(rows, tuple) else (rows,)
    samples = list(zip(*rows, strict=True))
    if len(rows) == 1:
        samples = [sample for (sample,) in samples]
    strategy = AlpaStrategy(
        cluster="pcie_8gpu", plan_dir=root, verbose=False, profile_steps=STEPS, **(options or {})
    )
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        default_root_dir=root,
        **QUIET,
    )
    trainer.fit(model, DataLoader(samples, batch_size=8))
    plan = strategy.plan
    return None if plan is None else json.dumps(plan.to_dict())


def names_of(trace: dict[str, Any], category: str) -> set[str]:
    return {event["name"] for event in trace["traceEvents"] if event.get("cat") == category}


def trace_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("alpa_trace_*.json.gz")
    assert path.name == "alpa_trace_2_3.json.gz"
    trace = read_trace(path)
    check_trace(trace)
    return trace


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"parallel": "data"}, "all_reduce gradients of ", marks=pytest.mark.slow),
        pytest.param({"parallel": "tensor"}, "all_reduce ", marks=pytest.mark.slow),
        ({"parallel": "zero3"}, "all_gather "),
        # The next one has the same messages and actions.
        pytest.param(PIPELINE, "", marks=pytest.mark.slow),
        ({**PIPELINE, "num_stages": 4, "schedule": "ZBVZeroBubble"}, ""),
    ],
    ids=["data", "tensor", "zero3", "pipeline", "zero_bubble"],
)
def test_the_trace_names_modules_and_collectives(pool, tmp_path: Path, options, expected) -> None:
    (text, *_) = pool.run(2, train, str(tmp_path), 2, options)
    trace = trace_in(tmp_path)
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    modules = names_of(trace, "module")
    assert "GPT.training_step" in modules
    assert any(name.startswith("blocks.0.") for name in modules)
    assert names_of(trace, "step") == {"step 2", "step 3"}
    collectives = names_of(trace, "collective")
    assert any(name.startswith(expected) for name in collectives)
    if "num_stages" in options:
        messages = names_of(trace, "message")
        assert "send values of micro-batch 3, stage 0 to 1" in messages
        assert "receive gradients of micro-batch 3, stage 1 to 0" in messages
        assert "forward of stage 1, micro-batch 2" in names_of(trace, "action")
        assert any(event["ph"] == "f" for event in trace["traceEvents"])

    plan = Plan.from_dict(json.loads(text))
    (path,) = tmp_path.glob("*.json")
    measured = measured_of_file(path, plan)
    assert measured is not None
    profiled = measured.profiled
    assert profiled is not None
    assert (profiled.first, profiled.first + profiled.count) == STEPS
    for rank in profiled.ranks:
        assert sum(rank.parts.values()) == pytest.approx(profiled.step_seconds, rel=0.3)
        assert rank.parts["forward"] > 0
        assert rank.parts["backward"] > 0
    (model,) = models_of(path.with_suffix(".html").read_text())
    assert model["measured"]["timeline"]["actions"]
    assert len(model["measured"]["timeline"]["meshes"]) == (2 if plan.is_pipelined else 1)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"capture": "never"}, marks=pytest.mark.slow),
        {"capture": "never", "parallel": "zero3"},
    ],
)
def test_eager_steps_have_the_names_of_their_modules(pool, tmp_path: Path, options) -> None:
    pool.run(2, train, str(tmp_path), 2, options)
    trace = trace_in(tmp_path)
    modules = names_of(trace, "module")
    assert {"blocks.0", "blocks.0.attn", "GPT.training_step"} & modules
    backward = [e for e in trace["traceEvents"] if e.get("args", {}).get("backward") is True]
    assert any(event["name"].startswith("blocks.1") for event in backward)


def test_one_device_and_a_training_that_ends_before(tmp_path: Path) -> None:
    train(str(tmp_path), 1, num_steps=3)
    (path,) = tmp_path.glob("alpa_trace_*.json.gz")
    assert path.name == "alpa_trace_2_2.json.gz"
    check_trace(read_trace(path))


def test_a_training_that_is_too_short_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ended after 1 steps, nothing was profiled"):
        train(str(tmp_path), 1, num_steps=1)
    assert not list(tmp_path.glob("alpa_trace_*"))


def failing(root: str) -> bool:
    """Train with an error in a profiled step; whether the runtime is as before."""
    from alpa_strategy.comm.mesh import AxisComm, Pending
    from alpa_strategy.lower.lowered_step import LoweredStep

    functions = [Pending.wait, AxisComm.all_reduce, LoweredStep.__call__, torch.nn.Module.__call__]
    calls = []

    class Fails(pl.Callback):
        def on_train_batch_end(self, *unused: Any) -> None:
            calls.append(Pending.wait)
            if len(calls) == STEPS[0] + 1:
                raise RuntimeError("in a profiled step")

    model = MODELS["mlp"]()
    rows = model.example_batch(48, torch.Generator().manual_seed(0))
    samples = list(zip(*rows, strict=True))
    strategy = AlpaStrategy(cluster="pcie_8gpu", plan_dir=root, verbose=False, profile_steps=STEPS)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[Fails()],
        default_root_dir=root,
        **QUIET,
    )
    with pytest.raises(RuntimeError, match="in a profiled step"):
        trainer.fit(model, DataLoader(samples, batch_size=8))
    assert calls[0] is functions[0]
    assert calls[-1] is not functions[0]
    after = [Pending.wait, AxisComm.all_reduce, LoweredStep.__call__, torch.nn.Module.__call__]
    return after == functions


def test_functions_are_wrapped_in_profiled_steps_alone(tmp_path: Path) -> None:
    assert failing(str(tmp_path))


@pytest.mark.slow
def test_compiled_steps_have_the_names_of_their_modules(pool, tmp_path: Path) -> None:
    pool.run(2, train, str(tmp_path), 2, {"compile": True}, timeout=400)
    modules = names_of(trace_in(tmp_path), "module")
    assert any(name.startswith("blocks.") for name in modules)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["data", "tensor", "two stages", "compiled"])
def test_most_time_of_a_captured_step_has_the_users_names(case: str) -> None:
    """95 % of the tiny GPT recipe's step, on two ranks: the script prints the shares."""
    script = Path(__file__).parents[2] / "scripts" / "profile_names.py"
    subprocess.run([sys.executable, str(script), "--only", case], check=True, timeout=400)
