"""The captured step computes what training_step computes: loss, gradients, buffer updates, dtype
for dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from models import GPT, MODELS, ConvNet
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.capture import autocast
from alpa_strategy.capture.capture import capture_step
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.run_step import run_step


class Step(LightningModule):
    """Two linear layers, a buffer and a constant; the step is given as a function of (module, x,
    y).
    """

    def __init__(self, function: Callable[..., Any], child: nn.Module | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.child = child
        self.register_buffer("buffer", torch.ones(4))
        self.constant = torch.arange(4.0)
        self.function = function

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.function(self, *batch)


def assert_same_step(
    module: LightningModule, batch: Any, atol: float = 0.0, context: Any = None
) -> StepGraph:
    """Capture, run the graph, compare with the module's own step. Metadata of every value must hold
    too.
    """
    step = capture_step(module, batch, context=context)
    reference = copy.deepcopy(module)
    reference.log = reference.log_dict = lambda *_, **__: None
    torch.manual_seed(1)
    with context() if context is not None else nullcontext():
        output = reference.training_step(pytree.tree_map_only(Tensor, Tensor.clone, batch), 0)
    loss = output["loss"] if isinstance(output, dict) else output
    expected = torch.autograd.grad(
        loss, [p for p in reference.parameters() if p.requires_grad], allow_unused=True
    )

    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    torch.manual_seed(1)
    values = run_step(
        step, parameters, buffers, [pytree.tree_leaves(batch)[b.leaf] for b in step.batch]
    )
    for index, meta in enumerate(step.values):
        value = values[index]
        assert (tuple(value.shape), value.dtype, value.requires_grad) == (
            meta.shape,
            meta.dtype,
            meta.requires_grad,
        )
    got = torch.autograd.grad(
        values[step.loss], [p for p in module.parameters() if p.requires_grad], allow_unused=True
    )
    assert values[step.loss].dtype == loss.dtype
    torch.testing.assert_close(values[step.loss], loss, rtol=0, atol=atol)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=atol)
    updated = {b.name: values[b.update] for b in step.buffers if b.update is not None}
    for name, after in reference.named_buffers():
        torch.testing.assert_close(updated.get(name, buffers[name]), after, rtol=0, atol=atol)
    return step


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randint(0, 4, (6,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["mlp", "gpt", "llama", "bert", "convnet"]
)  # other files add to MODELS
def test_models(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype)
    assert_same_step(model, model.example_batch(4, torch.Generator().manual_seed(0)))


def test_dropout_draws_the_same_numbers() -> None:
    model = GPT(dropout=0.3)
    assert_same_step(model, model.example_batch(4))


def test_ignore_index_is_sum_over_count() -> None:
    model = GPT(ignore_fraction=0.5).double()
    step = assert_same_step(model, model.example_batch(4, torch.Generator().manual_seed(0)))
    names = [op.call.target_name for op in step.ops]
    assert "ops.cross_entropy_sum" in names
    assert "ops.target_weight_sum" in names
    assert "aten.cross_entropy_loss.default" not in names


@pytest.mark.parametrize("kind", ["table", "bags", "bags of all lengths", "gather"])
def test_sparse_tables_get_dense_gradients(kind: str) -> None:
    looked_up = {
        "table": lambda self, y: self.child(y),
        "bags": lambda self, y: self.child(y[:, None]),
        "bags of all lengths": lambda self, y: self.child(y, torch.arange(len(y))),
        "gather": lambda self, y: torch.gather(
            self.child.weight, 0, y[:, None].expand(-1, 3), sparse_grad=True
        ),
    }[kind]
    child = (
        nn.EmbeddingBag(4, 3, mode="sum", sparse=True)
        if "bags" in kind
        else nn.Embedding(4, 3, sparse=True)
    )
    module = Step(lambda self, x, y: looked_up(self, y).sum() + self.a(x).sum(), child)
    step, (x, y) = capture_step(module, example()), example()
    values = run_step(step, dict(module.named_parameters()), {"buffer": module.buffer}, [x, y])
    (grad,) = torch.autograd.grad(values[step.loss], list(module.child.parameters()))
    torch.testing.assert_close(grad, F.one_hot(y, 4).sum(0).float().unsqueeze(1).expand(4, 3))


def test_batch_norm_statistics_are_updates() -> None:
    step = capture_step(ConvNet(), ConvNet().example_batch(4))
    updated = {b.name for b in step.buffers if b.update is not None}
    assert updated == {
        f"bn_{i}.{n}"
        for i in (1, 2)
        for n in ("running_mean", "running_var", "num_batches_tracked")
    }


def in_place(self: Step, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(x).relu_() * 1.5
    h[:, 0] = 1.0
    flat = h.view(-1)
    flat.mul_(2)
    h += 1
    h = h * 2
    h[x > 0] = 3.0
    columns = h.t()[1:3]
    columns.add_(self.buffer.sum())
    h.narrow(1, 2, 2).mul_(3.0)
    h[1:3, 2].zero_()
    h.masked_fill_(x < -1, 0.5)
    h.permute(1, 0).select(0, 1).copy_(x[:, 0])
    return self.b(h).pow(2).sum() + flat.sum() + columns.mean()


def complex_in_place(self: Step, x: Tensor, y: Tensor) -> Tensor:
    """Modes of a spectrum written one by one (Fourier neural operators), some of them
    conjugated.
    """
    spectrum = torch.fft.rfft(self.a(x))
    modes = torch.zeros(len(x), 2, 3, dtype=spectrum.dtype)
    modes[:, 0, :2] = spectrum[:, :2] * torch.view_as_complex(self.b.weight[:2, :2].contiguous())
    modes[:, -1] = spectrum.conj()
    modes.narrow(-1, 1, 2).mul_(2.0)
    return torch.fft.irfft(modes, n=4).pow(3).sum()


def conjugates(self: Step, x: Tensor, y: Tensor) -> Tensor:
    """Which PyTorch writes down as a bit, and computes where the numbers are read."""
    z = torch.fft.rfft(self.a(x))
    gram = z.mH @ z.conj() + z.adjoint() @ (z * z.conj() * 1j)
    turned = (
        torch.view_as_real(z.conj()[:, 1:].resolve_conj()).pow(3).sum()
        + torch.vdot(z[0], z[1] * 1j).imag
    )
    return gram.imag.square().sum() + turned + (z.conj().imag * self.b.weight[0, :3]).sum()


def no_grad_inside(self: Step, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        z = (h * 2 + self.a.weight.sum()).exp()
        self.buffer.mul_(0.9).add_(h.mean(0), alpha=0.1)
        self.buffer.data.add_(0.1)
    return (self.b(h) + z + h.detach() + h.data).sum() + self.buffer.sum()


def detached_in_place(self: Step, x: Tensor, y: Tensor) -> Tensor:
    """What was read of it before keeps its gradient."""
    z = self.b(x)
    first = z[0]
    z.detach_()
    with torch.inference_mode():
        weight = self.a(x).softmax(-1)
    return (self.a(x) * z * weight.clone()).sum() + first.sum()


def powers_in_place(self: Step, x: Tensor, y: Tensor) -> Tensor:
    """Overloads that have another name where they return a new tensor."""
    square = self.a(x).T @ self.b(x)
    torch.diagonal(square).add_(-1).pow_(2)
    square.pow_(torch.full_like(square, 2.0))
    return square.sum() + (self.a(x) * x.clone().floor_divide_(0.5)).sum()


def dropout_in_place(self: Step, x: Tensor, y: Tensor) -> Tensor:
    """`nn.Dropout(inplace=True)`, as MobileNet has it."""
    h = F.dropout(self.a(x), 0.5, inplace=True)
    F.feature_alpha_dropout(h, 0.5, training=True, inplace=True)
    return self.b(F.alpha_dropout(h * 1.5, 0.5, training=True, inplace=True)).pow(2).sum()


def factories(self: Step, x: Tensor, y: Tensor) -> Tensor:
    made = (
        torch.arange(4, device=x.device)
        + torch.tensor([1.0, 2, 3, 4])
        + torch.ones(4).to(x)
        + self.constant
    )
    return (
        (self.a(x) + made + torch.zeros_like(x) + x.new_zeros(4)).sum()
        + torch.tensor(3.0)
        + torch.full((), 2.0)
    )


def assigned_buffer(self: Step, x: Tensor, y: Tensor) -> Tensor:
    self.buffer = self.buffer * 2 + self.a(x).mean(0).detach()
    return (self.a(x) * self.buffer).sum()


def random_numbers(self: Step, x: Tensor, y: Tensor) -> Tensor:
    noise = torch.randn_like(x) + torch.rand(4) + torch.empty(4).uniform_(-1, 1)
    return (self.a(x) * noise).sum() + (self.a(x) * torch.empty_like(x).bernoulli_(0.5)).sum()


def caught_error(self: Step, x: Tensor, y: Tensor) -> Tensor:
    try:
        made = self.a(x[:, :3])
    except RuntimeError:
        made = self.b(x)
    return made.sum()


def losses(self: Step, x: Tensor, y: Tensor) -> Tensor:
    logits = self.b(self.a(x))
    return (
        F.cross_entropy(logits, y, label_smoothing=0.1)
        + F.cross_entropy(logits, y, weight=self.constant + 1, ignore_index=2)
        + F.cross_entropy(logits, y, reduction="sum")
        + F.cross_entropy(logits, y, reduction="none").mean()
        + F.cross_entropy(logits, F.one_hot(y, 4).to(x.dtype), label_smoothing=0.1)
        + F.cross_entropy(logits[0], y[0])
        + F.nll_loss(logits.log_softmax(-1), y)
        + F.cross_entropy(logits.view(2, 4, 3), y.view(2, 3))
        + F.mse_loss(logits, x)
        + F.smooth_l1_loss(logits, x)
        + F.binary_cross_entropy_with_logits(logits, x.sigmoid())
    )


@pytest.mark.parametrize(
    "function",
    [
        in_place,
        no_grad_inside,
        detached_in_place,
        powers_in_place,
        dropout_in_place,
        factories,
        assigned_buffer,
        random_numbers,
        caught_error,
    ],
)
def test_steps(function: Callable[..., Any]) -> None:
    assert_same_step(Step(function), example())


@pytest.mark.parametrize("function", [complex_in_place, conjugates])
def test_complex_numbers(function: Callable[..., Any]) -> None:
    module = Step(function).double()
    assert_same_step(module, (example()[0].double(), example()[1]), atol=1e-12)


def test_losses() -> None:
    module = Step(losses).double()
    module.constant = module.constant.double()
    assert_same_step(module, (example()[0].double(), example()[1]), atol=1e-12)


def call_child(self: Step, x: Tensor, y: Tensor) -> Tensor:
    out = self.child(self.a(x)[None])
    return (out[0] if isinstance(out, tuple) else out).pow(2).sum()


@pytest.mark.parametrize(
    "child",
    [
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.LSTM(4, 4, batch_first=True),
        nn.Sequential(
            nn.GroupNorm(1, 1), nn.Conv1d(1, 2, 3), nn.InstanceNorm1d(2), nn.Hardtanh(inplace=True)
        )[1:],
    ],
    ids=["encoder", "lstm", "conv1d"],
)
def test_library_modules(child: nn.Module) -> None:
    if isinstance(child, nn.Sequential):
        assert_same_step(
            Step(lambda self, x, y: self.child(self.a(x)[:, None]).pow(3).sum(), child), example()
        )
    else:
        assert_same_step(Step(call_child, child), example())


def autocast_inside(self: Step, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        h = F.gelu(self.b(h))
        k = F.layer_norm(h.softmax(-1) @ self.a.weight, (4,))
        with torch.autocast("cpu", enabled=False):
            h = self.a(h.float())
        e = torch.einsum("bi,bj->ij", h, k)
        # Operands of two dtypes, of which views are taken before autocast brings them together.
        m = torch.einsum("gkse,gksc->gsec", k.reshape(2, 2, -1, 2), h.reshape(2, 2, -1, 2))
    return F.cross_entropy(h + k, y) + e.float().sum() + m.float().sum()


def autocast_around(self: Step, x: Tensor, y: Tensor) -> Tensor:
    h = F.gelu(self.b(self.a(x)))
    k = h.softmax(-1) @ self.a.weight
    k = F.scaled_dot_product_attention(k[None, None], k[None, None], k[None, None])[0, 0]
    k = (
        k + F.scaled_dot_product_attention(k[None], x[None], x[None])[0]
    )  # of three dims: adds up in fp32 by itself
    k = k + F.scaled_dot_product_attention(k[None], k[None], k[None])[0]
    return F.cross_entropy(torch.cat([h.float(), k], -1), y) + F.mse_loss(k, x) + self.a(x).sum()


_ops = torch.library.Library("alpa_test_autocast", "DEF")
_ops.define("total(Tensor x, *, ScalarType? dtype=None) -> Tensor")
_ops.define("largest(Tensor x) -> Tensor")
_ops.impl("total", lambda x, *, dtype=None: x.sum(dtype=dtype), "CompositeImplicitAutograd")
_ops.impl("largest", lambda x: x.abs().amax(), "CompositeImplicitAutograd")


def _without_autocast(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    ):
        return run()


def _total(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _without_autocast(
        lambda: torch.ops.alpa_test_autocast.total(x, dtype=dtype or torch.float32)
    )


def _largest(x: torch.Tensor) -> torch.Tensor:
    return _without_autocast(lambda: x.abs().amax().float())


_ops.define("score(Tensor x) -> Tensor")
_ops.impl("score", torch.ops.alpa_test_autocast.total, "CompositeImplicitAutograd")
_ops.impl("total", _total, "AutocastCPU")
_ops.impl("largest", _largest, "AutocastCPU")


def totals(self: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = self.a(x)
        ops = torch.ops.alpa_test_autocast
        return ops.total(hidden) + ops.largest(hidden) + ops.score(hidden)


def test_autocast_may_set_a_dtype_and_cast_nothing() -> None:
    """As on GPUs, where sum and its like get `dtype=float32`. Ops that have no such argument get
    cast operands, and so
    do ops made of such ops (cross entropy of float16): they stay whole."""
    step = assert_same_step(Step(totals), example())
    calls = [
        [op.call for op in step.ops if name in op.name] for name in ("total", "largest", "score")
    ]
    (total,), (largest,), (score,) = calls
    assert dict(total.kwargs) == {"dtype": torch.float32}
    assert total.operands[0].dtype == torch.bfloat16
    assert largest.operands[0].dtype == torch.float32
    assert score.operands[0].dtype == torch.float32


_ops.define("mixed(Tensor x, Tensor weight) -> Tensor")
_ops.impl(
    "mixed",
    lambda x, weight: x.abs() * weight if x.dtype != weight.dtype else -x,
    "CompositeImplicitAutograd",
)


def test_a_composite_of_two_dtypes_may_want_them_as_they_are() -> None:
    """As rms_norm on GPUs, which is another kernel when all operands have one dtype."""

    def scaled(self: Step, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.ops.alpa_test_autocast.mixed(self.a(x), self.a.weight[0]).sum()

    step = assert_same_step(Step(scaled), example())
    (mixed,) = (op.call for op in step.ops if "mixed" in op.name)
    assert [m.dtype for m in mixed.operands] == [torch.bfloat16, torch.float32]


def test_cross_entropy_under_an_autocast_that_knows_its_parts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs' leaves log_softmax the dtype of the logits, and sums in float32. CPUs' casts the
    logits.
    """
    known = autocast.has_policy
    aten = torch.ops.aten
    monkeypatch.setattr(
        autocast,
        "has_policy",
        lambda op, on: op != aten.cross_entropy_loss.default and known(op, on),
    )

    def losses(self: Step, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.b(self.a(x))
            weights = torch.linspace(0.5, 1.0, logits.shape[1])
            kinds = (
                F.cross_entropy(logits, y, weights, reduction="sum"),
                F.cross_entropy(logits, y, label_smoothing=0.1),
            )
            return sum(kinds, F.cross_entropy(logits, y, reduction="none").mean())

    step = assert_same_step(Step(losses), example(), atol=2e-2)
    summed = [op.call for op in step.ops if "cross_entropy_sum" in op.name]
    assert [(c.operands[0].dtype, c.results[0].dtype) for c in summed] == [
        (torch.bfloat16, torch.float32)
    ] * 2


def test_autocast_casts_are_ops() -> None:
    assert_same_step(Step(autocast_inside), example())
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    assert_same_step(Step(autocast_around), example(), context=context)
    model = GPT()
    step = assert_same_step(model, model.example_batch(4), context=context)
    linear = next(op for op in step.ops if op.name == "linear_0")
    assert {m.dtype for m in linear.call.operands} == {torch.bfloat16}


@pytest.mark.parametrize(
    "child", [nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4), nn.GroupNorm(2, 6)], ids=repr
)
def test_composite_ops_stay_whole_under_autocast(child: nn.Module) -> None:
    """They would be ops of this number of rows otherwise, which neither split nor are split into
    micro-batches.
    """

    def function(self: Step, x: Tensor, y: Tensor) -> Tensor:
        out = self.child(
            self.a(x.expand(2, *x.shape).transpose(0, 1))
            if isinstance(child, nn.RNNBase)
            else self.c(x)
        )
        return F.cross_entropy((out[0] if isinstance(out, tuple) else out).flatten(1).float(), y)

    module = Step(function, child)
    module.c = nn.Linear(4, 6)
    step = assert_same_step(
        module, example(), context=lambda: torch.autocast("cpu", torch.bfloat16)
    )
    name = {nn.LSTM: "lstm", nn.GRU: "gru", nn.GroupNorm: "group_norm"}[type(child)]
    assert [op for op in step.ops if str(op.call.target).startswith(f"aten.{name}.")]


def test_half_precision_loss_keeps_its_dtype() -> None:
    module = Step(lambda self, x, y: F.cross_entropy(self.b(self.a(x)), y)).to(torch.bfloat16)
    x, y = example()
    assert_same_step(module, (x.to(torch.bfloat16), y), atol=1e-2)


def test_frozen_parameters() -> None:
    module = Step(lambda self, x, y: self.b(self.a(x)).sum())
    module.b.requires_grad_(False)
    step = assert_same_step(module, example())
    assert {p.name: p.meta.requires_grad for p in step.parameters} == {
        "a.weight": True,
        "a.bias": True,
        "b.weight": False,
        "b.bias": False,
    }


def test_logged_value_is_the_one_of_its_time() -> None:
    def function(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x).sum(0)
        self.log("before", h.sum())
        total = h.sum()
        self.log("total", total)
        total.mul_(2)
        return total

    module = Step(function)
    step = assert_same_step(module, example())
    values = run_step(step, dict(module.named_parameters()), {}, [example()[0], example()[1]])
    logged = {r.name: values[r.value.index] for r in step.logs}
    torch.testing.assert_close(logged["total"] * 2, values[step.loss])
    torch.testing.assert_close(logged["before"], logged["total"])
