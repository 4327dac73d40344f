"""Compiled segments give the single-device result under every plan: fp64, losses, gradients,
weights to 1e-9.

`aot_eager` takes the same way as Inductor, Dynamo's graphs and AOTAutograd's backward included, but
writes no C++.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from covering import slow_but
from equality.harness import assert_same, record
from models import MLP
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.capture.capture import capture_step
from alpa_strategy.lightning.job import compiled_as_written, compiled_by_user
from alpa_strategy.lower.local_ops import batch_norm_sync
from alpa_strategy.lower.segments import Segment, is_compilable, segment_options

STEPS = 3
PIPELINE = {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}
PLANS = {
    "data": {"parallel": "data"},
    "zero2": {"parallel": "zero2"},
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": "tensor"},
    "pipelined": PIPELINE,
    "recomputed": {**PIPELINE, "remat": True},
}
MODELS = {"gpt": {"num_layers": 3, "ignore_fraction": 0.4}, "convnet": {}, "mlp": {}}


def fails(graph: Any, inputs: Any) -> Any:
    """A backend that compiles nothing."""
    raise NotImplementedError("no such luck")


CUTS: list[Any] = []


def cuts(graph: Any, inputs: Any) -> Any:
    """A backend that counts what it is given."""
    CUTS.append(len(inputs))
    return graph


def record_cuts(*args: Any) -> int:
    """How many graphs a run's backend was given."""
    if "cuts" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(cuts)
    torch._dynamo.reset()
    CUTS.clear()
    record(*args)
    return len(CUTS)


def record_compiled(*args: Any) -> tuple[dict[str, Any], list[str], int]:
    """`record`, what it warned of compiling, and how many graphs were compiled."""
    if "fails" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(fails)
    counters = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    before = counters["unique_graphs"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = record(*args)
    said = [
        str(warning.message)
        for warning in caught
        if str(warning.message).startswith("alpa: compile")
    ]
    return run, said, counters["unique_graphs"] - before


def compiled_runs(pool, tmp_path, model, ranks, plan, backend, precision="64-true", tolerance=1e-9):
    arguments = STEPS, ranks, None, 1, str(tmp_path), precision
    reference = pool.run(1, record, model, MODELS[model], None, *arguments, init_group=False)[0]
    strategy = {
        **plan,
        "cluster": "pcie_8gpu",
        "plan_dir": str(tmp_path / "plans"),
        "compile": {"backend": backend},
    }
    runs = pool.run(ranks, record_compiled, model, MODELS[model], strategy, *arguments)
    for run, _, _ in runs:
        assert_same(run, reference, tolerance)
    return [(said, graphs) for _, said, graphs in runs]


# A pipeline that recomputes; sharded parameters are in the next test.
@pytest.mark.parametrize("plan", slow_but(PLANS, ("recomputed",)))
def test_blocks_are_compiled_once_and_change_nothing(pool, tmp_path, plan):
    for said, graphs in compiled_runs(pool, tmp_path, "gpt", 2, PLANS[plan], "aot_eager"):
        assert said == []
        # Three equal blocks; recomputation compiles each graph with and without gradients.
        assert 1 <= graphs <= {"recomputed": 12, "tensor": 10}.get(plan, 6)


@pytest.mark.parametrize("plan", [pytest.param("data", marks=pytest.mark.slow), "zero3"])
def test_statistics_of_batches(pool, tmp_path, plan):
    for said, graphs in compiled_runs(pool, tmp_path, "convnet", 2, PLANS[plan], "aot_eager"):
        assert said == []
        assert graphs


def test_a_ranks_own_statistics_are_compiled_with_their_neighbours(pool, tmp_path):
    """BatchNorms normalize a rank's samples, as under DDP: one graph has the whole net."""
    plan = {**PLANS["data"], "batch_scope": "rank", "compile": {"backend": "cuts"}}
    arguments = STEPS, 2, None, 1, str(tmp_path), "64-true"
    assert pool.run(2, record_cuts, "convnet", {}, plan, *arguments) == [1, 1]


@pytest.mark.parametrize(
    ("parallel", "backend", "compiles"),
    [
        ("data", "aot_eager", True),
        ("zero3", "aot_eager", False),
        # By default a captured step fails to compile, below.
        pytest.param("data", "fails", False, marks=pytest.mark.slow),
    ],
)
def test_eager_steps_are_compiled_as_under_ddp(pool, tmp_path, parallel, backend, compiles):
    """But for sharded parameters, which are gathered and freed while a module runs; a module whose
    compilation fails runs uncompiled.
    """
    plan = {"capture": "never", "parallel": parallel, "cluster": "pcie_8gpu"}
    arguments = STEPS, 2, None, 1, str(tmp_path), "64-true"
    references = pool.run(2, record, "gpt", MODELS["gpt"], plan, *arguments)
    runs = pool.run(
        2,
        record_compiled,
        "gpt",
        MODELS["gpt"],
        {**plan, "compile": {"backend": backend}},
        *arguments,
    )
    for (run, _, graphs), reference in zip(runs, references, strict=True):
        assert_same(run, reference, 1e-9)
        assert bool(graphs) is compiles


def test_graphs_of_steps_as_written_end_where_buckets_end(pool, tmp_path):
    """As under DDP: gradients of the last blocks are summed while the backward of the first ones
    runs.
    """
    plan = {
        "capture": "never",
        "parallel": "data",
        "compile": {"backend": "cuts"},
        "cluster": "pcie_8gpu",
    }
    wide = {"num_layers": 3, "d_model": 128}  # layers of 1.5 MB
    arguments = STEPS, 2, None, 1, str(tmp_path), "64-true"
    least = pool.run(2, record_cuts, "gpt", wide, {**plan, "bucket_bytes": 2**12}, *arguments)
    usual = pool.run(2, record_cuts, "gpt", wide, plan, *arguments)
    assert least[0] == least[1] >= usual[0] + 2
    assert usual[0] == usual[1] >= 2


def test_a_split_backward_runs_uncompiled_and_says_so(pool, tmp_path):
    plan = {"num_stages": 4, "num_microbatches": 4, "schedule": "InterleavedZeroBubble"}
    for said, graphs in compiled_runs(pool, tmp_path, "gpt", 2, plan, "aot_eager"):
        assert graphs == 0
        assert len(said) == 1
        assert "InterleavedZeroBubble splits the backward" in said[0]


def test_a_failed_compilation_runs_uncompiled_and_is_reported(pool, tmp_path):
    for said, _ in compiled_runs(pool, tmp_path, "gpt", 2, PLANS["data"], "fails"):
        assert said
        assert all("run uncompiled" in line for line in said)
        assert all("no such luck" in line for line in said)


def test_inductor(pool, tmp_path):
    for said, graphs in compiled_runs(pool, tmp_path, "mlp", 1, PLANS["data"], "inductor"):
        assert said == []
        assert graphs


# Inductor writes and compiles C++ for it: 5 s.
@pytest.mark.slow
def test_inductor_saves_no_masks_in_segments():
    def segment(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, weight).relu()

    compiled = torch.compile(segment, **segment_options({"mode": "default"}))
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    result = compiled(x, torch.randn(8, 4, 1, 1, requires_grad=True))
    assert all(kept.dtype != torch.bool for kept in result.grad_fn.saved_tensors)
    (grad,) = torch.autograd.grad(result.sum(), [x])
    assert grad.is_contiguous()


# Inductor writes and compiles C++ for it, twice: 15 s.
@pytest.mark.slow
def test_later_starts_have_the_backward_of_statistics_from_the_cache():
    """It is an `autograd.Function`'s, which AOTAutograd does not keep unless told that it may."""
    source = (
        "def segment(x, weight, bias):\n"
        "    return normalized([], x, weight, bias, None, None, 0.1, 1e-5)\n"
    )
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in [(6, 4, 3), (4,), (4,)])
    found, counters = [], torch._dynamo.utils.counters["aot_autograd"]
    with torch._inductor.utils.fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            (y,) = Segment(
                source, {"normalized": batch_norm_sync}, segment_options({}), "the step"
            )(x, weight, bias)
            y.square().sum().backward()
            found.append(
                {name: counters[f"autograd_cache_{name}"] for name in ("miss", "hit", "bypass")}
            )
    assert found == [{"miss": 1, "hit": 0, "bypass": 0}, {"miss": 0, "hit": 1, "bypass": 0}]
    torch.testing.assert_close(y, torch.nn.functional.batch_norm(x, None, None, weight, bias, True))


def fit_what_the_user_compiled(how: str, folder: str) -> int:
    """Graphs that a backend of the user's gets."""
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model: Any = MLP()
    if how == "part":
        model.net = torch.compile(model.net, backend=backend)
    strategy = AlpaStrategy(
        cluster="pcie_8gpu", plan_dir=folder, compile=False if how == "refused" else None
    )
    trainer = pl.Trainer(devices=2, accelerator="cpu", strategy=strategy, max_steps=2, **QUIET)
    data = DataLoader(TensorDataset(*MLP().example_batch(16)), batch_size=4)
    trainer.fit(model if how == "part" else torch.compile(model, backend=backend), data)
    return len(seen)


@pytest.mark.parametrize(("how", "graphs"), [("whole", 1), ("part", 1), ("refused", 0)])
def test_a_module_that_the_user_compiled_is_compiled_with_its_backend(pool, tmp_path, how, graphs):
    for seen in pool.run(2, fit_what_the_user_compiled, how, str(tmp_path)):
        assert seen == graphs


class TwoGroups(MLP):
    """Of its optimizer's groups one says how it is stepped."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        said = {"params": list(self.net[2].parameters()), "foreach": False}
        return torch.optim.AdamW([{"params": list(self.net[0].parameters())}, said], lr=1e-2)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.fused = [group["fused"] for group in optimizer.param_groups]


def fit_two_groups(compiled: bool, folder: str) -> tuple[list[Any], list[Any], list[torch.Tensor]]:
    """Which groups are fused in the training, and afterwards; the weights after a run, and another
    that goes on.
    """
    torch.manual_seed(0)
    model = TwoGroups()
    for steps in (2, 4):
        strategy = AlpaStrategy(
            cluster="pcie_8gpu",
            plan_dir=folder,
            compile={"backend": "aot_eager"} if compiled else False,
        )
        trainer = pl.Trainer(
            devices=2, accelerator="cpu", strategy=strategy, max_steps=steps, **QUIET
        )
        data = DataLoader(
            TensorDataset(*MLP().example_batch(32, torch.Generator().manual_seed(0))), batch_size=4
        )
        trainer.fit(model, data, ckpt_path=f"{folder}/2.ckpt" if steps == 4 else None)
        trainer.save_checkpoint(f"{folder}/{steps}.ckpt")
    after = [group["fused"] for group in trainer.optimizers[0].param_groups]
    return model.fused, after, [p.detach().clone() for p in model.parameters()]


def test_a_compiled_step_fuses_the_optimizer_by_default(pool, tmp_path):
    (fused, after, weights), _ = pool.run(2, fit_two_groups, True, str(tmp_path / "compiled"))
    assert fused == [True, None]
    assert after == [None, None]
    (fused, _, plain), _ = pool.run(2, fit_two_groups, False, str(tmp_path / "plain"))
    assert fused == [None, None]
    torch.testing.assert_close(weights, plain, rtol=1e-4, atol=1e-6)


class OneLayer(MLP):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch)[0].sum()


@pytest.mark.parametrize(
    ("kind", "op", "compiles"),
    [
        ("LSTM", "lstm.", False),
        ("GRU", "gru.", False),
        ("RNN", "rnn_tanh.", False),
        ("LSTMCell", "lstm_cell.", True),
    ],
)
def test_recurrent_nets_stay_whole(kind: str, op: str, compiles: bool) -> None:
    """As Dynamo has it: a compiler would unroll them over time, which takes minutes, and do without
    cuDNN.
    """
    module = OneLayer(getattr(torch.nn, kind)(4, 4))
    step = capture_step(module, torch.ones((3, 4) if compiles else (3, 2, 4)), batch_scope="global")
    (call,) = (each.call for each in step.ops if each.call.target_name.startswith(f"aten.{op}"))
    assert is_compilable(call) is compiles


class CalledInParts(MLP):
    """Its step calls no forward of its own, but items of a list and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([MLP(8, 16, 8).net for _ in range(2)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return (self.net(x) - y).square().mean()


def test_parts_that_a_step_as_written_calls_are_compiled():
    model, seen = CalledInParts(), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with compiled_as_written(model, {"backend": backend}, 2**25):
        model.training_step(model.example_batch(4), 0).backward()
    assert len(seen) == 3
    model.training_step(model.example_batch(5), 0)
    assert len(seen) == 3


def test_the_backend_of_a_part_that_was_compiled_in_place():
    model = CalledInParts()
    model.blocks[1].compile(backend=cuts)
    CUTS.clear()
    torch.compile(lambda x: x.sin(), **compiled_by_user(model))(torch.ones(2))
    assert len(CUTS) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "plan"),
    [*(("gpt", plan) for plan in PLANS), ("convnet", "data"), ("convnet", "zero3")],
)
def test_inductor_on_two_ranks(pool, tmp_path, model, plan):
    for said, graphs in compiled_runs(pool, tmp_path, model, 2, PLANS[plan], "inductor"):
        assert said == []
        assert graphs
