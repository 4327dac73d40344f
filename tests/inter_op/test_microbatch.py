"""A step on micro-batches is the step: loss, gradients, logs, outputs and buffers, for any number
that divides it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from inter_op.reference_microbatches import run_microbatches
from models import MODELS
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.run_step import run_step
from alpa_strategy.microbatch.rules import cut, joined, rows
from alpa_strategy.microbatch.transform import MicroStep, microbatch

ROWS = 8


class Step(pl.LightningModule):
    """Layers that the step functions below choose from; x [B, 6], y [B] class indices, w [B]
    weights.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)
        self.scale, self.token = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(1, 1, 6))
        self.lstm, self.conv = nn.LSTM(6, 6), nn.Conv1d(1, 2, 3, padding=1)
        self.attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.norm, self.groups = nn.InstanceNorm1d(2, affine=True), nn.GroupNorm(1, 2)
        self.register_buffer("average", torch.randn(6))
        self.register_buffer("memory", torch.randn(ROWS, 6))
        self.row_weights = torch.rand(ROWS, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.function = function
        self.double()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        return self.function(self, *batch)


def example(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (rows,), generator=generator)
    return x, y, torch.rand(rows, generator=generator, dtype=torch.float64)


def capture(module: pl.LightningModule, batch: Any) -> StepGraph:
    return capture_step(module.double(), batch)


def run(
    module: pl.LightningModule,
    step: StepGraph,
    batch: Any,
    micro: MicroStep | None,
    num_ranks: int = 1,
) -> Any:
    """(escaping values, gradients): of the full step, or of its micro-batches."""
    module = copy.deepcopy(module)
    parameters = {p.name: module.get_parameter(p.name) for p in step.parameters}
    buffers = {b.name: module.get_buffer(b.name) for b in step.buffers}
    all_leaves = pytree.tree_leaves(batch)
    leaves = [all_leaves[b.leaf] for b in step.batch]
    torch.manual_seed(3)
    if micro is None:
        values = run_step(step, parameters, buffers, leaves)
        values[step.loss].backward()
    else:
        values = run_microbatches(micro, parameters, buffers, leaves)
    gradients = {}
    for n, p in parameters.items():
        if p.grad is None:
            gradients[n] = torch.zeros_like(p)
        else:
            gradients[n] = p.grad
    loss = step.loss if micro is None else micro.graph.loss
    return {v: values[v].detach() for v in step.escaping} | {
        step.loss: values[loss].detach()
    }, gradients


def assert_same(
    module: pl.LightningModule,
    batch: Any,
    num_microbatches: int,
    step: StepGraph | None = None,
    num_ranks: int = 1,
) -> MicroStep:
    step = step or capture(module, batch)
    micro = microbatch(step, num_microbatches, num_ranks)
    values, gradients = run(module, step, batch, None)
    found, found_gradients = run(module, step, batch, micro, num_ranks)
    for value, expected in values.items():
        assert found[value].dtype == expected.dtype
        torch.testing.assert_close(found[value], expected, rtol=1e-12, atol=1e-12)
    for name, expected in gradients.items():
        torch.testing.assert_close(found_gradients[name], expected, rtol=1e-12, atol=1e-12)
    check_graph(step, micro)
    return micro


def check_graph(step: StepGraph, micro: MicroStep) -> None:
    """The micro graph is an ordinary graph: every value read is defined, and has the metadata that
    it says.
    """
    for graph in (micro.prologue, micro.graph, micro.epilogue):
        if graph is None:
            continue
        inputs = (*graph.parameters, *graph.buffers, *graph.batch, *graph.constants)
        defined = {entry.value: entry.meta for entry in inputs}
        defined |= {value: graph.values[value] for value in graph.received}
        for op in graph.ops:
            assert op.call.operands == tuple(defined[value] for value in op.operands), op.name
            defined.update(zip(op.results, op.call.results, strict=True))
        assert set(graph.escaping) <= defined.keys()
        assert all(graph.values[value] == meta for value, meta in defined.items())
        names = [op.name for op in graph.ops]
        assert len(set(names)) == len(names)
    assert set(micro.from_prologue) == set(micro.graph.received)
    assert set(micro.states) == {*micro.graph.received, *micro.graph.escaping}


# Models

MODEL_OPTIONS = {
    "mlp": {},
    "gpt": {"ignore_fraction": 0.4, "num_layers": 1},
    "llama": {"num_layers": 1},
    "bert": {},
}


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_models(name: str, num_microbatches: int) -> None:
    torch.manual_seed(1)
    module = MODELS[name](**MODEL_OPTIONS[name]).double()
    assert_same(
        module, module.example_batch(ROWS, torch.Generator().manual_seed(2)), num_microbatches
    )


class UNet(pl.LightningModule):
    """Two levels down and up with skips."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        image, target = batch
        skip = F.relu(self.down(image))
        middle = F.relu(self.middle(F.max_pool2d(skip, 2)))
        middle = middle + F.interpolate(F.avg_pool2d(middle, 2), scale_factor=2)
        output = self.out(torch.cat([skip, self.up(middle)], dim=1))
        self.log("l1", F.l1_loss(output, target))
        return F.mse_loss(output, target)


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_skips(num_microbatches: int) -> None:
    images = torch.randn(
        2, ROWS, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    assert_same(UNet(), (images[0], images[1]), num_microbatches)


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_batch_norm_is_plain_accumulation(num_microbatches: int) -> None:
    torch.manual_seed(1)
    module = MODELS["convnet"]().double()
    batch = module.example_batch(ROWS, torch.Generator().manual_seed(2))
    step = capture(module, batch)
    micro = microbatch(step, num_microbatches)
    assert any("BatchNorm" in note for note in micro.graph.notes)
    values, gradients = run(module, step, batch, micro)
    plain, logged = copy.deepcopy(module), []
    plain.log = lambda name, value, **_: logged.append(value.detach())
    for m in range(num_microbatches):
        loss = plain.training_step(
            pytree.tree_map(lambda t, m=m: cut(t, rows(0), num_microbatches, m), batch), 0
        )
        (loss / num_microbatches).backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
    for buffer in step.buffers:
        torch.testing.assert_close(
            values[buffer.update], plain.get_buffer(buffer.name), rtol=1e-12, atol=1e-12
        )
    losses, accuracies = logged[0::2], logged[1::2]
    for record, expected in zip(step.logs, (losses, accuracies), strict=True):
        torch.testing.assert_close(
            values[record.value.index], sum(expected) / num_microbatches, check_dtype=False
        )


# Kinds of losses


def sums(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    logits = self.b(self.a(x).relu())
    return F.cross_entropy(logits, y, reduction="sum") + logits.pow(2).sum()


def mean_of_rows(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    rows = F.cross_entropy(self.b(x), y, reduction="none")
    return (rows * w).mean() + (rows * (w / w.sum())).sum()


def many_terms(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    logits = self.b(self.a(x))
    decay = sum(p.pow(2).sum() for p in (self.a.weight, self.b.weight))
    fit = F.mse_loss(self.a(x), x) + F.smooth_l1_loss(self.a(x), x)
    kl = F.kl_div(logits.log_softmax(-1), F.one_hot(y, 5).to(x.dtype), reduction="batchmean")
    return 1.0 + F.cross_entropy(logits, y, label_smoothing=0.1) + 0.1 * decay + fit / 2 - kl


def learned_weight(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(self.b(x), y, ignore_index=2) * torch.exp(-self.scale) + self.scale


def masked_mean(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    mask = (y > 1).to(x.dtype)
    per_class = (F.one_hot(y, 5).to(x.dtype) * self.b(x)).sum(0) * torch.arange(
        1.0, 6.0, dtype=x.dtype
    )
    return (self.b(x).logsumexp(-1) * mask).sum() / mask.sum().clamp(min=1) + (
        per_class / (mask.sum() + 1)
    ).sum()


def batch_statistics_of_inputs(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    x = (x - x.mean(0)) / (x.std(0) + 1e-3)
    order = w.argsort()
    rank = w.cumsum(0)
    return (self.a(x) * rank[:, None]).mean() + (self.b(x)[:, 0] * order).sum() / w.max()


def made_rows(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    tokens = torch.cat(
        [self.token.expand(len(x), -1, -1), self.token.repeat(len(x), 2, 1), x[:, None]], dim=1
    )
    tokens = tokens + torch.zeros(len(x), 1, 6, dtype=x.dtype) + x.new_ones(len(x), 4, 1)
    state = torch.zeros(1, len(x), 6, dtype=x.dtype)
    out, _ = self.lstm(self.attention(tokens).transpose(0, 1), (state, state))
    return (
        out[-1].pow(2).mean() + self.a(out[0] * torch.full((len(x), 6), 2.0, dtype=x.dtype)).sum()
    )


def convolutions(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = self.groups(self.conv(x[:, None]))
    return self.norm(h).flatten(1).pow(3).mean() + h.amax(dim=(1, 2)).mean()


def contracted_rows(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    gram = torch.addmm(self.a.weight, self.a(x).t(), self.a(x)) / len(x)
    column = F.linear(self.b(x).t(), x.t(), self.a.bias)
    by_class = torch.index_add(self.b.weight, 0, y, self.a(x))
    return ((gram + by_class.mean(0)) * self.average).sum() + (column * 2).sum()


def mixing_only_in_logs(self: Step, x: Tensor, y: Tensor, w: Tensor) -> dict[str, Any]:
    logits = self.b(self.a(x))
    loss = F.cross_entropy(logits, y)
    self.log("perplexity", loss.exp())
    self.log("accuracy", (logits.argmax(-1) == y).to(x.dtype).mean())
    self.log("spread", logits.std(0).max() + loss.detach())
    self.log("top", logits.softmax(0).topk(min(3, len(logits)), dim=0).values.sum() * w.sum())
    self.log("scale", self.scale)
    self.log("norm", self.a.weight.norm() * loss.sqrt())
    self.log("classes", (y == 1).sum())
    self.log("rmse", F.mse_loss(self.a(x), x).sqrt())
    return {"loss": loss, "logits": logits, "columns": logits.t(), "x": x, "w": w.sum()}


def buffers(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        self.count += 1
    return (h - self.average).mean() if False else h.pow(2).mean()


def normalised_buffer(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        self.average.copy_(F.normalize(h.sum(0), dim=0))
    return h.pow(2).mean()


def random_mask(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    mask = (torch.rand_like(x) < 0.5).to(x.dtype)
    return ((self.a(x * mask) - x).pow(2) * mask).sum() / mask.sum()


def no_parameter_meets_a_row(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    self.log("scale", self.scale * 2)
    return self.a.weight.pow(2).sum() * self.scale


def picked_by_number(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    log_probs = self.b(self.a(x)).log_softmax(-1)
    pairs = log_probs[torch.arange(len(x))[:, None], torch.stack([y, (y + 1) % 5], dim=1)]
    return -(log_probs[torch.arange(len(x)), y] * w).mean() + pairs.pow(2).sum()


def two_views(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    left, right, third = self.b(self.a(torch.cat([x, x * 2, x.flip(1)])).tanh()).chunk(3)
    both = torch.cat([left, right])
    self.log("last", both[len(x) :].sum())
    return (
        (left * right).sum(-1).mean()
        + both[: len(x)].mul(w[:, None]).sum()
        + both.mean()
        + third.exp().mean()
    )


def sequence_first(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = x[:, None].repeat(1, 3, 1) * torch.arange(1.0, 4.0, dtype=x.dtype)[:, None]
    mask, padding = (
        torch.triu(torch.ones(3, 3, dtype=torch.bool), 1),
        y[:, None] < torch.arange(3) - 1,
    )
    h = self.attention(h, src_mask=mask, src_key_padding_mask=padding)
    flat = h.transpose(0, 1).reshape(-1, 6)
    return (
        self.a(flat).view(3, len(x), 6).select(0, 1).pow(2).sum()
        + self.a(flat).view(-1, 2).softmax(-1).pow(2).sum()
    )


def mixup(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    order, share = torch.randperm(len(x)), torch.rand((), dtype=x.dtype)
    logits = self.b(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def gated_by_the_batch(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.where(w.sum() > 1, self.a(x).mean(), self.b(x).sum()) + torch.einsum(
        "bi,bj,ij->", x, x, self.a.weight
    )


def state_of_rows(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = self.a(x + self.memory)
    with torch.no_grad():
        self.memory.copy_(h)
    return (h.pow(2).mean(1) * self.row_weights).sum()


def rounded_loss(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    self.log(
        "half",
        F.cross_entropy(self.b(x), torch.zeros_like(y)).detach().to(torch.float32).double() * 0,
    )
    return F.cross_entropy(self.b(x), y).to(torch.float32).double() * 0 + F.cross_entropy(
        self.b(x), y
    )


EXACT = [
    picked_by_number,
    two_views,
    sequence_first,
    mixup,
    gated_by_the_batch,
    state_of_rows,
    rounded_loss,
    sums,
    mean_of_rows,
    many_terms,
    learned_weight,
    masked_mean,
    batch_statistics_of_inputs,
    made_rows,
    convolutions,
    contracted_rows,
    mixing_only_in_logs,
    buffers,
    normalised_buffer,
    random_mask,
    no_parameter_meets_a_row,
]


@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_steps(function: Callable[..., Any]) -> None:
    for num_microbatches in (1, 2, 4, 8):
        assert_same(Step(function), example(), num_microbatches)


@pytest.mark.parametrize(
    "function",
    [two_views, sequence_first, mixing_only_in_logs, mean_of_rows, random_mask, state_of_rows],
)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (2, 4), (4, 2)])
def test_rows_of_ranks(function: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Each micro-batch takes a part of every rank's samples; outputs come back in the ranks'
    order.
    """
    assert_same(Step(function), example(), num_microbatches, num_ranks=num_ranks)


@settings(max_examples=12, deadline=None)
@given(
    data=st.data(),
    parts=st.integers(1, 6),
    rows_each=st.integers(1, 3),
    num_ranks=st.integers(1, 3),
    function=st.sampled_from([many_terms, masked_mean, made_rows, two_views, mixing_only_in_logs]),
)
def test_any_divisor(
    data: Any, parts: int, rows_each: int, num_ranks: int, function: Callable[..., Any]
) -> None:
    batch = example(parts * rows_each * num_ranks)
    if len(batch[0]) == 1:
        return
    divisors = [d for d in range(1, parts * rows_each + 1) if parts * rows_each % d == 0]
    assert_same(Step(function), batch, data.draw(st.sampled_from(divisors)), num_ranks=num_ranks)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_joined_is_the_inverse_of_cut(segments: int, parts: int, rows_each: int, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = segments * parts * rows_each
    whole, how = torch.arange(torch.Size(shape).numel()).view(shape), rows(dim, segments)
    pieces = [cut(whole, how, parts, m) for m in range(parts)]
    assert all(piece.shape[dim] == shape[dim] // parts for piece in pieces)
    assert torch.equal(joined(pieces, how), whole)


# Where numbers come from and what is refused


def test_only_the_whole_batch_makes_the_prologue() -> None:
    def ops_of(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
        micro = microbatch(capture(Step(function), example()), 4)
        return names_of(micro.prologue), names_of(micro.epilogue)

    def names_of(graph: StepGraph | None) -> list[str]:
        if graph is None:
            return []
        return [op.call.target_name for op in graph.ops]

    assert ops_of(sums) == ([], [])
    assert ops_of(made_rows) == ([], [])
    assert ops_of(learned_weight) == (["ops.target_weight_sum"], [])
    prologue, epilogue = ops_of(mixing_only_in_logs)
    assert prologue == ["ops.target_weight_sum"]
    assert "aten.exp.default" in epilogue
    assert "aten.linear.default" not in epilogue


def test_noise_is_drawn_per_micro_batch_unless_all_need_it() -> None:
    def noisy(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        level = torch.randint(0, 6, (len(x),))
        return F.mse_loss(
            F.dropout(self.a(x * self.average[level][:, None] + torch.randn_like(x))), x
        ) * torch.rand(())

    micro = microbatch(capture(Step(noisy), example()), 4)
    assert [op.call.target_name for op in micro.prologue.ops] == ["aten.rand.default"]
    shapes = {op.call.target_name: op.call.results[0].shape for op in micro.graph.ops}
    assert shapes["aten.randint.low"] == (2,)
    assert shapes["aten.randn_like.default"] == (2, 6)
    run(Step(noisy).double(), capture(Step(noisy), example()), example(), micro)


def contrastive(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = self.b(x)
    return F.cross_entropy(h @ h.t(), torch.arange(len(x)))


def root(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.mse_loss(self.a(x), x).sqrt()


def first_rows(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(self.b(x)[:3], y[:3])


def rows_by_position(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (self.a(x).roll(1, 0) * x).mean()


def balanced(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    gates = self.b(self.a(x)).softmax(-1)
    share = F.one_hot(gates.argmax(-1), 5).to(x.dtype).mean(0)
    balance = (share * gates.mean(0)).sum()
    self.log("balance", balance)
    return gates.pow(2).mean() + 0.1 * balance


@pytest.mark.parametrize("function", [contrastive, root, first_rows, rows_by_position, balanced])
def test_what_is_no_sum_over_rows_is_refused(function: Callable[..., Any]) -> None:
    step = capture(Step(function), example())
    with pytest.raises(PlanError, match=r"test_microbatch.py:\d+(.|\n)*num_microbatches=1"):
        microbatch(step, 2)
    assert_same(Step(function), example(), 1, step)


@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("function", [contrastive, root, first_rows, rows_by_position, balanced])
def test_micro_batches_of_whole_ranks_are_exact(
    function: Callable[..., Any], num_microbatches: int
) -> None:
    """Each of four ranks has two samples, which its ops may combine."""
    module = Step(function).double()
    step = capture_step(module, example(2 * ROWS // 4), world_size=4)
    micro = assert_same(module, example(2 * ROWS), num_microbatches, step, num_ranks=4)
    assert micro.num_runs == 1


def test_the_same_rows_for_all_is_refused() -> None:
    def inputs_cut(self: Step, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(self.b(x[:3]), y[:3])

    with pytest.raises(PlanError, match="no sum over rows"):
        microbatch(capture(Step(inputs_cut), example()), 2)


def test_rows_that_do_not_divide() -> None:
    step = capture(Step(sums), example())
    with pytest.raises(
        PlanError, match=r"num_microbatches=3 does not divide the 8 rows(.|\n)*1, 2, 4, 8"
    ):
        microbatch(step, 3)
    with pytest.raises(PlanError, match=r"the 2 rows that each rank brings(.|\n)*1, 2,"):
        microbatch(step, 8, num_ranks=4)
