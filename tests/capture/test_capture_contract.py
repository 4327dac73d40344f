"""What the StepGraph says besides the computation: logs, metrics, guards, shapes, digests. Capture
leaves no trace.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from models import GPT, MLP, MODELS, Bert, ConvNet, Llama
from quiet import QUIET
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics.classification import MulticlassAccuracy

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import LogRecord, MetricRef, StepGraph, ValueRef


class Step(LightningModule):
    def __init__(self, function: Callable[..., Any], child: nn.Module | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.child = child
        self.function = function

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.function(self, batch, batch_idx)


def capture(
    function: Callable[..., Any], child: nn.Module | None = None, **options: Any
) -> StepGraph:
    return capture_step(Step(function, child), torch.randn(6, 4), **options)


def test_log_arguments_as_given() -> None:
    def step(self: Step, x: Tensor, i: int) -> Tensor:
        loss = self.a(x).sum()
        self.log("loss", loss, True, on_epoch=True)
        self.log_dict({"three": 3, "norm": x.norm()}, sync_dist=True, reduce_fx="max")
        return loss

    graph = capture(step)
    assert graph.logs[0] == LogRecord(
        "loss", ValueRef(graph.loss), (("on_epoch", True), ("prog_bar", True))
    )
    assert graph.logs[1] == LogRecord("three", 3, (("reduce_fx", "max"), ("sync_dist", True)))
    assert graph.logs[2].name == "norm"
    assert isinstance(graph.logs[2].value, ValueRef)


def test_metrics_are_recorded_not_run() -> None:
    def step(self: Step, x: Tensor, i: int) -> Tensor:
        logits = self.a(x)
        self.log("batch_accuracy", self.child(logits, x.argmax(-1)))
        self.child.update(logits, target=x.argmax(-1))
        self.log("accuracy", self.child, on_epoch=True)
        return logits.sum()

    metric = MulticlassAccuracy(4)
    before = {k: v for k, v in vars(metric).items() if callable(v)}
    graph = capture(step, metric)
    assert {k: v for k, v in vars(metric).items() if callable(v)} == before
    assert metric._update_count == 0
    calls = []
    for record in graph.metrics:
        names = [name for name, _ in record.kwargs]
        calls.append((record.metric, record.method, len(record.args), names))
    assert calls == [
        ("child", "forward", 2, []),
        ("child", "update", 1, ["target"]),
    ]
    assert [r.value for r in graph.logs] == [
        MetricRef("child", "value"),
        MetricRef("child", "metric"),
    ]


def test_returned_dict_is_kept() -> None:
    graph = capture(lambda self, x, i: {"loss": self.a(x).sum(), "extra": [x.mean(), "text"]})
    assert graph.output["loss"] == ValueRef(graph.loss)
    assert graph.output["extra"][1] == "text"
    assert graph.output["extra"][0].index in graph.escaping


def test_guards_follow_comparisons() -> None:
    def step(self: Step, x: Tensor, batch_idx: int) -> Tensor:
        loss = self.a(x).sum()
        if batch_idx % 10 == 0:
            loss = loss * 2
        if self.global_step < 100 and not self.current_epoch:
            loss = loss + x.sum()
        return loss

    graph = capture(step)
    assert [str(g) for g in graph.guards] == [
        "(batch_idx % 10 == 0) is True",
        "(global_step < 100) is True",
        "(current_epoch != 0) is False",
    ]
    assert all(g.holds(batch_idx=20, global_step=99) for g in graph.guards)
    assert not all(g.holds(batch_idx=21) for g in graph.guards)
    assert not all(g.holds(global_step=100) for g in graph.guards)
    other = capture(step, batch_idx=3)
    assert other.graph_digest != graph.graph_digest
    assert capture(lambda self, x, i: self.a(x).sum() * len(x)).guards == ()


def test_the_epoch_may_be_an_int() -> None:
    """The graph is then good for one epoch."""
    graph = capture(
        lambda self, x, i: (
            self.a(x).sum() * (1.0, 0.5)[self.current_epoch] * int(self.current_epoch + 1)
        )
    )
    assert [str(guard) for guard in graph.guards] == ["(current_epoch == 0) is True"]


def test_the_ranks_batches_follow_one_another() -> None:
    batch = {
        "x": torch.randn(6, 4),
        "mask": torch.ones(4),
        "scale": torch.tensor(2.0),
        "text": "kept",
    }

    def step(self: Step, b: Any, i: int) -> Tensor:
        assert b["text"] == "kept"
        return (self.a(b["x"]) * b["mask"] * b["scale"]).mean()

    graph = capture_step(Step(step), batch, world_size=3)
    assert [(b.meta.shape, b.batch_dim) for b in graph.batch] == [
        ((18, 4), 0),
        ((12,), 0),
        ((3,), 0),
    ]
    assert [b.is_split for b in graph.batch] == [True, False, False]
    assert graph.batch_size == 18
    whole = capture_step(Step(step), batch, world_size=3, batch_scope="global")
    assert whole.batch[0].meta.shape == (6, 4)


def test_meta_parameters_and_fake_batch() -> None:
    batch = GPT().example_batch(4)
    real = capture_step(GPT(), batch, world_size=2)
    with torch.device("meta"):
        model = GPT()
    with FakeTensorMode() as mode:
        fake_batch = tuple(mode.from_tensor(t) for t in batch)
    for other in (
        capture_step(model, batch, world_size=2),
        capture_step(GPT(), fake_batch, world_size=2),
    ):
        assert other == real
        assert other.graph_digest == real.graph_digest


def test_tied_weights_are_one_parameter() -> None:
    graph = capture_step(GPT(), GPT().example_batch(4))
    assert ("wte.weight", "head.weight") in [p.names for p in graph.parameters]


def test_ops_know_module_and_line() -> None:
    graph = capture_step(Llama(), Llama().example_batch(4))
    by_name = {op.name: op for op in graph.ops}
    assert by_name["linear_0"].module == "blocks.0.wq"
    assert by_name["linear_0"].source.partition("models.py:")[2].isdigit()
    assert len(by_name) == len(graph.ops)


# Importing other files adds to MODELS.
OWN_MODELS = [name for name, model in MODELS.items() if model.__module__ == "models"]


@pytest.mark.parametrize("name", OWN_MODELS)
def test_graph_is_functional_and_numbered_in_order(name: str) -> None:
    model = MODELS[name]()
    graph = capture_step(model, model.example_batch(4), world_size=2)
    inputs = (*graph.parameters, *graph.buffers, *graph.batch, *graph.constants)
    assert sorted(i.value for i in inputs) == list(range(len(inputs)))
    known = set(range(len(inputs)))
    for op in graph.ops:
        assert known.issuperset(op.operands)
        assert op.results == tuple(range(len(known), len(known) + len(op.results)))
        known.update(op.results)
        assert op.call.operands == tuple(graph.values[i] for i in op.operands)
        assert op.call.results == tuple(graph.values[i] for i in op.results)
        schema = getattr(op.call.target, "_schema", None)
        assert schema is None or not schema.is_mutable
        hash(op.call)
    assert len(known) == len(graph.values)
    used = {i for op in graph.ops for i in op.operands} | set(graph.escaping)
    assert all(used.intersection(op.results) for op in graph.ops)


def fingerprint(module: LightningModule) -> Any:
    attributes = {}
    for n, m in module.named_modules():
        attributes[n] = {k: id(v) for k, v in vars(m).items()}
    return type(module), attributes, {k: v.clone() for k, v in module.state_dict().items()}


@pytest.mark.parametrize("fails", [False, True])
def test_capture_leaves_the_module_alone(fails: bool) -> None:
    class Model(ConvNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx) + torch.rand(())
            return loss.unknown if fails else loss

    module = Model()
    module.log = recorder = lambda *_, **__: None
    before, rng = fingerprint(module), torch.get_rng_state()
    if fails:
        with pytest.raises(AttributeError, match="unknown"):
            capture_step(module, module.example_batch(4, torch.Generator()))
    else:
        capture_step(module, module.example_batch(4, torch.Generator()))
    after = fingerprint(module)
    assert torch.equal(torch.get_rng_state(), rng)
    assert after[:2] == before[:2]
    assert module.log is recorder
    assert all(torch.equal(a, before[2][k]) for k, a in after[2].items())
    assert all(p.grad is None for p in module.parameters())
    assert "apply" in vars(torch.autograd.Function) or hasattr(torch.autograd.Function, "apply")
    torch.nn.functional.linear(
        torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    ).sum().backward()


def test_within_a_trainer() -> None:
    seen: list[StepGraph] = []

    class Probe(pl.Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, module: LightningModule, batch: Any, i: int
        ) -> None:
            seen.append(
                capture_step(
                    module, batch, batch_idx=i, context=trainer.precision_plugin.train_step_context
                )
            )

    class Model(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if self.trainer.global_step >= 1 else loss

    def losses(callbacks: list[pl.Callback]) -> Tensor:
        pl.seed_everything(0, verbose=False)
        model = Model()
        data = [model.example_batch(4) for _ in range(3)]
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            **QUIET,
            callbacks=callbacks,
        )
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(losses([Probe()]), losses([]))
    guards = []
    for step in seen:
        guards.append([str(guard) for guard in step.guards])
    assert guards == [
        ["(global_step >= 1) is False"],
        *[["(global_step >= 1) is True"]] * 2,
    ]
    assert seen[1].graph_digest == seen[2].graph_digest != seen[0].graph_digest


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda m: m.logger.log_metrics({"a": 1.0}), "a logger is used directly"),
        (lambda m: m.trainer.logger.log_metrics({"a": 1.0}), "a logger is used directly"),
        (
            lambda m: m.log("lr", m.trainer.optimizers[0].param_groups[0]["lr"]),
            "trainer.optimizers",
        ),
        (lambda m: m.log("lr", m.lr_schedulers().get_last_lr()[0]), "self.lr_schedulers"),
        (
            lambda m: m.log("last", m.trainer.callback_metrics.get("a", 0.0)),
            "trainer.callback_metrics",
        ),
    ],
)
def test_what_changes_outside_of_the_step_is_refused(
    read: Callable[[LightningModule], Any], message: str, tmp_path: Path
) -> None:
    class Model(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            read(self)
            return super().training_step(batch, batch_idx)

    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path), enable_checkpointing=False, max_epochs=1
    )
    model.trainer = trainer
    with pytest.raises(CaptureError, match=message) as caught:
        capture_step(model, model.example_batch(4))
    assert "test_capture_contract.py" in caught.value.problem
    assert "on_train_batch_end" in caught.value.fix


def test_a_step_that_prints_is_refused_and_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def step(self: Step, x: Tensor, i: int) -> Tensor:
        self.print("loss is near")
        return self.a(x).sum()

    with pytest.raises(CaptureError, match="print"):
        capture(step)
    assert capsys.readouterr().out == ""


def digests_of_bert() -> list[str]:
    graph = capture_step(Bert(), Bert().example_batch(4))
    return [graph.graph_digest, graph.parameter_digest, graph.batch_digest]


def test_same_digest_in_another_process(pool) -> None:
    """The pool's processes descend from another interpreter."""
    assert pool.run(1, digests_of_bert, init_group=False) == [digests_of_bert()]


def test_large_gpt_is_captured_quickly() -> None:
    with torch.device("meta"):
        model = GPT(vocab_size=50304, d_model=768, num_heads=12, num_layers=48, seq_len=1024)
    batch = tuple(torch.zeros(8, 1024, dtype=torch.long) for _ in range(2))
    start = time.process_time()
    graph = capture_step(model, batch, world_size=8)
    assert time.process_time() - start < 5
    assert len(graph.ops) > 48 * 20


def test_copies_of_a_module_give_equal_graphs() -> None:
    model = ConvNet()
    batch = model.example_batch(4)
    assert capture_step(model, batch) == capture_step(copy.deepcopy(model), batch)
