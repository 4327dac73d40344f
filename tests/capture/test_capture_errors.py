"""What cannot be captured ends in one error that names the user's line and a way out."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import AlpaError, CaptureError, OptionError


class Step(LightningModule):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.metric = MeanMetric()
        self.function = function
        self.hidden, self.counts = [nn.Parameter(torch.ones(4))], SimpleNamespace(steps=0)
        self.table, self.norms = torch.zeros(4), [nn.BatchNorm1d(4, affine=False)]
        self.by_name = {"accuracy": MulticlassAccuracy(4, average="micro", validate_args=False)}
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("last_loss", None)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.function(self, batch, batch_idx)


class Meter:
    def __init__(self) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def branch(self: Step, x: Tensor, i: int) -> Tensor:
    loss = self.a(x).sum()
    return loss if loss > 0 else -loss


def item(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() * x.sum().item()


def as_list(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() * x[0].tolist()[0]


def as_numpy(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() * x.numpy().sum()


def rows_by_mask(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x)[x > 0].sum()


def keeps_attribute(self: Step, x: Tensor, i: int) -> Tensor:
    self.last = self.a.weight.t()  # it would change with the weight
    return (x @ self.last).sum()


def counts_in_an_object(self: Step, x: Tensor, i: int) -> Tensor:
    self.counts.steps += 1
    return self.a(x).sum()


def replaces_a_parameter(self: Step, x: Tensor, i: int) -> Tensor:
    loss = self.a(x).sum()
    self.a.bias = nn.Parameter(self.a.bias * 0.9)
    return loss


def averages_in_a_counter(self: Step, x: Tensor, i: int) -> Tensor:
    loss = self.a(x).sum()
    self.count = 0.9 * self.count + 0.1 * loss.detach()
    return loss


def keeps_rows_in_a_counter(self: Step, x: Tensor, i: int) -> Tensor:
    self.count = x.argmax(1)
    return self.a(x).sum()


def fills_a_buffer(self: Step, x: Tensor, i: int) -> Tensor:
    loss = self.a(x).sum()
    self.last_loss = loss.detach()
    return loss


def makes_a_layer(self: Step, x: Tensor, i: int) -> Tensor:
    self.late = nn.Linear(4, 4)
    return self.late(self.a(x)).sum()


def normalizes_by_a_hidden_layer(self: Step, x: Tensor, i: int) -> Tensor:
    return self.norms[0](self.a(x)).square().sum()


def updates_a_hidden_metric(self: Step, x: Tensor, i: int) -> Tensor:
    self.by_name["accuracy"].update(x, x.argmax(1))
    return self.a(x).sum()


def in_place_function(self: Step, x: Tensor, i: int) -> Tensor:
    return Doubled.apply(self.a(x) * 1.0).sum()


def tensor_hook(self: Step, x: Tensor, i: int) -> Tensor:
    h = self.a(x)
    h.register_hook(lambda g: g * 2)
    return h.sum()


def transposes_in_place(self: Step, x: Tensor, i: int) -> Tensor:
    square = self.a(x)[:4]
    first = square[0]  # it stays the first row
    square.t_()
    return square.sum() + first.sum()


def hook_of_a_module(self: Step, x: Tensor, i: int) -> Tensor:
    layer = nn.Linear(4, 4)
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    return layer(self.a(x)).sum()


def gradient_inside(self: Step, x: Tensor, i: int) -> Tensor:
    return torch.autograd.grad(self.a(x).sum(), [self.a.weight], create_graph=True)[0].sum()


def backward_inside(self: Step, x: Tensor, i: int) -> Tensor:
    loss = self.a(x).sum()
    loss.backward()
    return loss


def assigns_data(self: Step, x: Tensor, i: int) -> Tensor:
    x.data = x * 0.9
    return self.a(x).sum()


def changes_through_data(self: Step, x: Tensor, i: int) -> Tensor:
    h = self.a(x)
    h.data.clamp_(min=0)  # autograd goes on as if nothing had happened
    return h.square().sum()


def maps_a_function(self: Step, x: Tensor, i: int) -> Tensor:
    return torch.func.vmap(lambda row, w: (row * w).sum(), (0, None))(self.a(x), self.a.bias).sum()


def changes_parameter(self: Step, x: Tensor, i: int) -> Tensor:
    with torch.no_grad():
        self.a.weight.mul_(0.9)
    return self.a(x).sum()


def other_device(self: Step, x: Tensor, i: int) -> Tensor:
    return (self.a(x) + torch.ones(4, device="cuda")).sum()


def metric_value(self: Step, x: Tensor, i: int) -> Tensor:
    return self.a(x).sum() * self.metric(x)


def choice(self: Step, x: Tensor, i: int) -> Tensor:
    def double(h: Tensor) -> Tensor:
        return h * 2

    def triple(h: Tensor) -> Tensor:
        return h * 3

    return torch.cond(x.sum() > 0, double, triple, (self.a(x),)).sum()


def loop(self: Step, x: Tensor, i: int) -> Tensor:
    return while_loop(
        lambda n, h: n < 3, lambda n, h: (n + 1, h * 2), (torch.tensor(0), self.a(x))
    )[1].sum()


def running_sum(self: Step, x: Tensor, i: int) -> Tensor:
    return scan(lambda s, h: (s + h, s + h), torch.zeros(4), self.a(x))[0].sum()


def logs_text(self: Step, x: Tensor, i: int) -> Tensor:
    self.log("name", "text")
    return self.a(x).sum()


@pytest.mark.parametrize(
    "function",
    [
        branch,
        item,
        as_list,
        as_numpy,
        rows_by_mask,
        in_place_function,
        tensor_hook,
        gradient_inside,
        backward_inside,
        assigns_data,
        transposes_in_place,
        hook_of_a_module,
        changes_through_data,
        changes_parameter,
        other_device,
        metric_value,
        logs_text,
        choice,
        loop,
        running_sum,
        maps_a_function,
    ],
)
def test_names_the_line_and_a_way_out(function: Callable[..., Any]) -> None:
    module = Step(function)
    weight = module.a.weight.detach().clone()
    with pytest.raises(CaptureError) as caught:
        capture_step(module, torch.randn(6, 4))
    first = function.__code__.co_firstlineno
    last = max(line for *_, line in function.__code__.co_lines() if line is not None)
    lines = [
        int(part.split(":")[0].split(")")[0])
        for part in caught.value.problem.split("test_capture_errors.py:")[1:]
    ]
    assert lines
    assert all(first < line <= last for line in lines)
    assert caught.value.fix
    assert torch.equal(module.a.weight, weight)
    assert type(module) is Step


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, x, i: None, "returned None"),
        (lambda self, x, i: {"losses": self.a(x).sum()}, "without a loss"),
        (lambda self, x, i: self.a(x), r"shape \[6, 4\]"),
        (lambda self, x, i: x.sum(), "depends on no parameter"),
        (lambda self, x, i: (self.a(x) * self.hidden[0]).sum(), "not a parameter of the module"),
        (keeps_attribute, "attributes of the module .last"),
        (counts_in_an_object, "attributes of the module .counts"),
        (replaces_a_parameter, "in the place of a.bias"),
        (averages_in_a_counter, "in the place of count"),
        (keeps_rows_in_a_counter, "in the place of count"),
        (fills_a_buffer, "attributes of the module ._buffers"),
        (makes_a_layer, "attributes of the module ._modules"),
        (updates_a_hidden_metric, r"attributes of the module .by_name.'accuracy'."),
        (normalizes_by_a_hidden_layer, "a tensor that is no buffer in place"),
    ],
)
def test_says_what_is_wrong(function: Callable[..., Any], message: str) -> None:
    module = Step(function)
    members = {**module._modules, **module._buffers, **module.a._parameters}
    with pytest.raises(CaptureError, match=message) as caught:
        capture_step(module, torch.randn(6, 4))
    assert caught.value.fix
    after = {**module._modules, **module._buffers, **module.a._parameters}
    assert after.keys() == members.keys()
    assert all(after[name] is member for name, member in members.items())


def test_what_the_step_makes_it_may_change() -> None:
    def function(self: Step, x: Tensor, i: int) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
        weights[1] = 5.0
        return (self.a(x) * weights.clamp_(max=4.0)).sum()

    module = Step(function)
    step = capture_step(module, torch.randn(6, 4))
    assert not module.table.any()
    assert step.loss >= 0


def test_a_buffer_that_changes_and_has_views_made_before() -> None:
    def fills(self: Step, x: Tensor, i: int) -> Tensor:
        self.count.add_(1)
        return self.a(x).sum() * self.seen

    module = Step(fills)
    module.seen = module.count.view(1)
    with pytest.raises(
        CaptureError, match="changes buffer count, of which another tensor is a view"
    ):
        capture_step(module, torch.ones(2, 4))


def test_nothing_to_train() -> None:
    module = Step(lambda self, x, i: self.a(x).sum())
    module.a.requires_grad_(False)
    with pytest.raises(CaptureError, match="nothing to train"):
        capture_step(module, torch.randn(6, 4))


def test_manual_optimization() -> None:
    module = Step(lambda self, x, i: self.a(x).sum())
    module.automatic_optimization = False
    with pytest.raises(CaptureError, match="manual optimization"):
        capture_step(module, torch.randn(6, 4))


def test_batch_without_tensors_and_unknown_scope() -> None:
    module = Step(lambda self, x, i: self.a(x).sum())
    with pytest.raises(CaptureError, match="no tensor"):
        capture_step(module, {"x": 3})
    with pytest.raises(OptionError, match="batch_scope"):
        capture_step(module, torch.randn(6, 4), batch_scope="node")


def test_a_sparse_batch() -> None:
    with pytest.raises(CaptureError, match=r"layout torch.sparse_coo"):
        capture_step(
            Step(lambda self, x, i: torch.sparse.mm(x, self.a.weight).sum()),
            torch.eye(4).to_sparse(),
        )


def test_errors_of_the_user_pass_unchanged() -> None:
    def wrong(self: Step, x: Tensor, i: int) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture_step(Step(wrong), torch.randn(6, 4))
    with pytest.raises(RuntimeError, match="reduction dim") as caught:
        capture_step(
            Step(lambda self, x, i: (self.a(x) @ torch.zeros(3, 3)).sum()), torch.randn(6, 4)
        )
    assert not isinstance(caught.value, AlpaError)


@pytest.mark.parametrize(
    ("held", "given"),
    [
        (lambda meter: {"train": meter}, lambda held: held["train"]),
        (lambda meter: SimpleNamespace(train=meter, by_name={}), lambda held: held.train),
    ],
    ids=["in a dict", "in an object"],
)
def test_changes_of_objects_in_others_are_refused(
    held: Callable[..., Any], given: Callable[..., Any]
) -> None:
    def function(module: Step, batch: Tensor, batch_idx: int) -> Tensor:
        given(module.meters).update()
        return module.a(batch).sum()

    module = Step(function)
    module.meters = held(Meter())
    with pytest.raises(CaptureError, match=r"meters.*train"):
        capture_step(module, torch.ones(6, 4))
    assert given(module.meters).count == 0


def test_values_of_wrapped_metrics_in_a_collection_are_refused() -> None:
    """Their names are those of classes, and not known before they are computed."""
    accuracy = MulticlassAccuracy(4, average=None)
    module = Step(
        lambda self, x, i: (
            self.log_dict(self.both(self.a(x), torch.zeros(6).long())),
            self.a(x).sum(),
        )[1]
    )
    module.both = MetricCollection(
        {"all": MulticlassAccuracy(4), "each": ClasswiseWrapper(accuracy)}
    )
    with pytest.raises(CaptureError, match="'each'"):
        capture_step(module, torch.ones(6, 4))


class Asks(Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.shown = shown(batch)


def shown(batch: Any) -> Any:
    return batch["logits"].argmax(-1)


def puts_logits(self: Step, batch: Any, i: int) -> Tensor:
    batch["logits"] = self.a(batch["x"])
    return batch["logits"].sum()


def test_values_put_into_the_batch_for_a_hook_are_refused() -> None:
    """Hooks get the batch as it was loaded."""
    batch = {"x": torch.randn(3, 4)}
    module = Step(puts_logits)
    module.trainer = Trainer(
        accelerator="cpu", callbacks=[Asks()], logger=False, enable_checkpointing=False
    )
    with pytest.raises(CaptureError, match="into its batch, for Asks"):
        capture_step(module, batch)
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    capture_step(module, batch)
    assert batch.keys() == {"x"}


def writes_a_line(self: Step, x: Tensor, i: int) -> Tensor:
    self.counts.file.write("a step\n")
    return self.a(x).sum()


def writes_a_row(self: Step, x: Tensor, i: int) -> Tensor:
    self.counts.rows.writerow(["a step"])
    return self.a(x).sum()


@pytest.mark.parametrize("function", [writes_a_line, writes_a_row])
def test_open_files_are_refused_and_left_as_they_are(
    function: Callable[..., Any], tmp_path: Path
) -> None:
    class Files:
        def __init__(self) -> None:
            self.file = (tmp_path / "lines").open("w")
            self.rows = csv.writer(self.file)

    module = Step(function)
    module.counts = Files()
    with pytest.raises(CaptureError, match=r"uses an open file .*test_capture_errors\.py"):
        capture_step(module, torch.randn(3, 4))
    module.counts.file.close()
    assert (tmp_path / "lines").read_text() == ""


def test_log_messages_of_packages_are_reported_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "telling.py").write_text(
        "import logging\n\n\ndef tell():\n    logging.getLogger('theirs').warning('a step')\n"
    )
    monkeypatch.syspath_prepend(str(site))
    telling = importlib.import_module("telling")

    def tells(self: Step, x: Tensor, i: int) -> Tensor:
        telling.tell()
        return self.a(x).sum()

    graph = capture_step(Step(tells), torch.randn(3, 4))
    assert any("messages to logging" in note for note in graph.notes)
