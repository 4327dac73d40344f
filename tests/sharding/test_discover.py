"""Discovery finds the sound splits of known ops, and nothing unsound of ops made to deceive it."""

import pytest
import torch
from sharding.calls import make_call

from alpa_strategy.ir.op import OpCall, Slot, TensorMeta
from alpa_strategy.sharding.discovery import discover

aten = torch.ops.aten


def found(target, *args, axis_size=2, **kwargs):
    return set(map(str, discover(make_call(target, *args, **kwargs), axis_size)))


def t(*shape, dtype=None):
    return torch.randint(0, 2, shape).to(dtype) if dtype else torch.rand(shape).requires_grad_()


# Ops whose rules are known: exactly the sound splits ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (
            aten.linear.default,
            (t(4, 6, 16), t(24, 16)),
            "R,R->R R*,R*->R* S0,R*->S0 S1,R*->S1 R*,S0->S2 S2,S1->P P,R*->P R*,P->P",
        ),
        (
            aten.linear.default,
            (t(4, 6, 16), t(24, 16), t(24)),
            "R,R,R->R R*,R*,R*->R* S0,R*,R*->S0 S1,R*,R*->S1 R*,S0,S0->S2 P,R*,P->P R*,P,P->P",
        ),
        (aten._softmax.default, (t(4, 6, 16), -1, False), "R->R R*->R* S0->S0 S1->S1"),
        (
            aten.layer_norm.default,
            (t(4, 6, 16), [16], t(16), t(16)),
            "R,R,R->R R*,R*,R*->R* S0,R*,R*->S0 S1,R*,R*->S1 R*,P,P->P",
        ),
        (aten.cumsum.default, (t(4, 16), 1), "R->R R*->R* S0->S0 P->P"),
        (aten.sort.default, (t(4, 16), 1), "R->R,R R*->R*,R S0->S0,S0"),
        (aten.mul.Tensor, (t(4, 16), t(16)), "R,R->R R*,R*->R* S0,R*->S0 S1,S0->S1 P,R*->P R*,P->P"),
        (aten.sum.dim_IntList, (t(4, 16), [0]), "R->R R*->R* S0->P S1->S0 P->P"),
        (aten.mean.dim, (t(4, 16), [0]), "R->R R*->R* S1->S0 P->P"),
        (aten.amax.default, (t(4, 16), [0]), "R->R R*->R* S1->S0"),
        (aten.exp.default, (t(4, 16),), "R->R R*->R* S0->S0 S1->S1"),
        (aten.flip.default, (t(4, 16), [1]), "R->R R*->R* S0->S0 P->P"),
        (aten.argmax.default, (t(4, 16), 1), "R->R S0->S0"),
        (aten.unbind.int, (t(4, 3), 1), "R->R,R,R R*->R*,R*,R* S0->S0,S0,S0 P->P,P,P"),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_exactly_the_sound_splits(target, args, expected):
    assert found(target, *args) == set(expected.split())


def test_embedding_splits_ids_and_width():
    ids = torch.randint(0, 20, (4, 6))
    expected = {"R,R->R", "R*,R->R*", "R*,S0->S0", "R*,S1->S1", "S1,R->S2", "P,R->P"}
    assert found(aten.embedding.default, t(20, 8), ids) == expected


def test_kernels_that_trust_their_callers_are_not_given_inconsistent_shapes():
    q, k, v = t(4, 2, 6, 8), t(4, 2, 12, 8), t(4, 2, 12, 8)
    strategies = found(aten.scaled_dot_product_attention.default, q, k, v)
    assert {"R,R,R->R", "S0,S0,S0->S0"} <= strategies


def test_scalars():
    assert found(aten.mul.Tensor, t(), t()) == {"R,R->R", "R*,R*->R*", "P,R*->P", "R*,P->P"}


def test_half_precision_model_is_tried_in_double():
    x, w = (torch.rand(s, dtype=torch.bfloat16).requires_grad_() for s in ((4, 16), (24, 16)))
    assert {"S0,R*->S0", "R*,S0->S1", "S1,S1->P"} <= found(aten.linear.default, x, w)


def test_a_dim_with_fewer_elements_than_devices_is_not_split():
    strategies = found(aten._softmax.default, t(4, 3, 16), -1, False, axis_size=4)
    assert strategies == {"R->R", "R*->R*", "S0->S0"}


def test_large_calls_are_tried_small():
    strategies = found(aten._softmax.default, t(64, 1024, 64), -1, False)
    assert strategies == {"R->R", "R*->R*", "S0->S0", "S1->S1"}


def test_splits_that_need_other_arguments_are_left_to_rules():
    assert found(aten.view.default, t(4, 6, 16), [4, 96]) == {"R->R", "R*->R*", "P->P"}
    assert found(aten.expand.default, t(4, 1), [4, 16]) == {"R->R", "R*->R*", "P->P"}


# Ops of users ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("alpa_test::rms_scale", mutates_args=())
def rms_scale(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def _rms_backward(ctx, grad):
    x, scale = ctx.saved_tensors
    with torch.enable_grad():
        x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale
        return torch.autograd.grad(y, (x, scale), grad)


rms_scale.register_autograd(_rms_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def test_custom_library_op():
    target = torch.ops.alpa_test.rms_scale.default
    expected = {"R,R->R", "R*,R*->R*", "S0,R*->S0", "S1,R*->S1", "R*,P->P"}
    assert found(target, t(4, 6, 16), t(16)) == expected


class _Scaled(torch.autograd.Function):
    """Identity whose gradient is divided by the number of rows: right only where the rows are whole."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.shape[0]


def scaled(x):
    return _Scaled.apply(x)


class _Clipped(torch.autograd.Function):
    """Identity whose gradient is clipped row by row: not linear in the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm(dim=1, keepdim=True).clamp(min=1.0)


def clipped(x):
    return _Clipped.apply(x)


def test_the_backward_decides_too():
    assert found(scaled, t(4, 16)) == {"R->R", "R*->R*", "S1->S1", "P->P"}
    assert found(clipped, t(4, 16)) == {"R->R", "S0->S0", "P->P"}


# Ops made to deceive: only what is sound ------------------------------------------------------------------------------


def nearly_linear(x):
    return aten.clamp.default(x, -1e7, 1e7)


def any_nan_spoils_all(x):
    return torch.where(x.isnan().any(), torch.zeros_like(x), x)


def rare_flag(x):
    return (x > 1e5).any()


def always_zero(x):
    return torch.zeros_like(x).sum(0) + (x > float("inf")).sum(0)


def zero_unless_spoilt(x):
    return (x * 0).sum(0)  # nan and infinity show what it depends on


def neighbours(x):
    return x + torch.roll(x, 1, 0)


def row_number(x):
    return x * torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1)


def stable_ties(x):
    return x.flatten().sort(stable=True).indices.view_as(x)


def blocks_of_four(x):
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4))
    return padded.view(-1, 4, x.shape[1]).softmax(1).flatten(0, 1)[: x.shape[0]]


def far_neighbours(x):
    return x + torch.nn.functional.pad(x, (0, 0, 24, 0))[: x.shape[0]]


def by_whole_size(x):
    return x * (2.0 if x.shape[0] >= 48 else 1.0)


def scaled_down_when_huge(x):
    return x / x.detach().abs().amax().clamp(min=1e8)


def drops_the_tiny(x):
    return torch.where(x.abs() > 1e-5, x, 0.0)


class _ClampedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e3, 1e3)


def clamped_gradient(x):
    return _ClampedGradient.apply(x)


def last_row_decides(x):
    return x + x[-1:].gt(1e4)


class _MeanOfGradients(torch.autograd.Function):
    """Identity whose gradient doubles when it is large on the whole."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + (grad.mean() > 1e3))


def mean_of_gradients(x):
    return _MeanOfGradients.apply(x)


class _Averaged(torch.autograd.Function):
    """A sum whose gradient is a mean's."""

    @staticmethod
    def forward(ctx, x):
        ctx.size = x.shape[0]
        return x.sum(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.size, *grad.shape) / ctx.size


def averaged(x):
    return _Averaged.apply(x)


def far_rows(x):
    return torch.where(torch.arange(x.shape[0]).unsqueeze(1) >= 100, x * 2, x)


def odd_rows(x):
    return x * (1 + torch.arange(x.shape[0]) % 2).to(x.dtype).unsqueeze(1)


def nearly_a_maximum(x):
    return torch.where(x.abs().amax(0) < 1e-3, x.sum(0), x.amax(0))


def rounded_sum(x):
    return torch.round(x.sum(0) * 1e6) / 1e6


def looks_for_a_number(x):
    return torch.where((x == 3.75).any(), torch.zeros_like(x), x)


THRESHOLD = 1234.5


def above_a_global(x):
    return x * (1 + (x.detach().mean() > THRESHOLD))


def mixes_rows_of_large(x):
    return x + torch.roll(x, 1, 0) if x.shape[0] > 1000 else x


def nearly_constant(x):
    return x * (1 + (x.detach().var(0) < 1e-4))


def negative_zero(x):
    return x * (1 + ((x == 0) & (1 / x < 0)).any())


def denormal(x):
    return x * (1 + ((x.detach() != 0) & (x.detach().abs() < 1e-300)).any())


def already_sorted(x):
    return x * (1 + (x.detach().flatten().diff() >= 0).all())


def has_negative(x):
    return x + 2 * (x.detach() < 0).any()


def same_operands(x, y):
    return x * (1 + (x.detach() == y.detach()).all()) + y


def larger_everywhere(x, y):
    return torch.where((x.detach() > y.detach()).all(), x, y)


def saturates_far_out(x):
    return 1e12 * torch.sinh(torch.asinh(x / 1e12).clamp(-3, 3))


@torch.library.custom_op("alpa_test::keeps_the_year", mutates_args=())
def keeps_the_year(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


keeps_the_year.register_autograd(lambda ctx, grad: grad * (1 + (grad == 1984).any()))


def number_of_the_beast(i):
    return i + (i == 666).any()


def flag_of_large(i):
    return i + (i > 1000).any()


def ties_in_order(i):
    return i.sort(stable=True).indices


def first_of_equals(i):
    return torch.where((i[:, None] == i[None, :]).triu(1).any(0), -1, i)


def all_true(m):
    return m ^ m.all()


@pytest.mark.parametrize("target", [flag_of_large, ties_in_order, first_of_equals, number_of_the_beast])
def test_nothing_unsound_of_integers(target):
    assert found(target, torch.randint(0, 9, (16,))) == {"R->R"}


def test_nothing_unsound_of_booleans():
    assert found(all_true, torch.rand(16) < 0.5) == {"R->R"}


@pytest.mark.parametrize(
    ("target", "shape", "sound"),
    [
        (looks_for_a_number, (4, 16), "R*->R*"),
        (above_a_global, (4, 16), "R*->R*"),
        (mixes_rows_of_large, (4096, 512), "S1->S1 R*->R* P->P"),
        (torch.ops.alpa_test.keeps_the_year.default, (4, 16), "P->P"),
        (nearly_constant, (4, 16), "S1->S1 R*->R*"),
        (negative_zero, (4, 16), "R*->R*"),
        (denormal, (4, 16), "R*->R*"),
        (already_sorted, (4, 16), "R*->R*"),
        (has_negative, (4, 16), "R*->R*"),
        (saturates_far_out, (4, 16), "S0->S0 S1->S1 R*->R*"),
        (last_row_decides, (4, 16), "S1->S1 R*->R*"),
        (mean_of_gradients, (4, 16), "P->P"),
        (averaged, (4, 16), "S1->S0 P->P R*->R*"),
        (far_rows, (256, 4), "S1->S1 R*->R* P->P"),
        (odd_rows, (4, 16), "S1->S1 R*->R* P->P"),
        (nearly_a_maximum, (4, 16), "S1->S0 R*->R*"),
        (rounded_sum, (4, 16), "S1->S0 R*->R*"),
        (drops_the_tiny, (4, 16), "S0->S0 S1->S1 R*->R*"),
        (clamped_gradient, (4, 16), "S0->S0 S1->S1 P->P"),
        (nearly_linear, (4, 16), "S0->S0 S1->S1 R*->R*"),
        (any_nan_spoils_all, (4, 16), "R*->R* P->P"),
        (rare_flag, (4, 16), ""),
        (always_zero, (4, 16), ""),
        (zero_unless_spoilt, (4, 16), "S0->P S1->S0 P->P R*->R*"),
        (neighbours, (4, 16), "S1->S1 R*->R* P->P"),
        (row_number, (4, 16), "S1->S1 R*->R* P->P"),
        (stable_ties, (4, 16), ""),
        (blocks_of_four, (16, 6), "S1->S1 R*->R*"),
        (far_neighbours, (64, 8), "S1->S1 R*->R* P->P"),
        (by_whole_size, (64, 8), "S1->S1 R*->R* P->P"),
        (scaled_down_when_huge, (4, 16), "R*->R*"),
    ],
)
def test_nothing_unsound(target, shape, sound):
    assert found(target, t(*shape)) <= {"R->R", *sound.split()}


@pytest.mark.parametrize("target", [same_operands, larger_everywhere])
def test_nothing_unsound_of_two_operands(target):
    assert found(target, t(4, 16), t(4, 16)) <= {"R,R->R", "R*,R*->R*"}


def draws(x):
    return x * (torch.rand_like(x) < 0.5)


def rarely_drops(x):
    return x * (torch.rand_like(x) > 1e-6)


def counts(x, _calls=[0]):  # noqa: B006 - the state is the point
    _calls[0] += 1
    return x * _calls[0]


def changes_its_operand(x):
    with torch.no_grad():
        x.add_(1)
    return x * 2


@pytest.mark.parametrize("target", [draws, rarely_drops, counts, changes_its_operand])
def test_ops_that_are_no_functions_are_repeated(target):
    assert found(target, t(4, 16)) == {"R->R"}


def test_random_aten_ops_are_repeated():
    assert found(aten.bernoulli.default, t(4, 16)) == {"R->R"}
    assert found(aten.native_dropout.default, t(4, 16), 0.5, True) == {"R->R,R"}


def broken(x):
    raise ValueError("no CPU kernel")


def test_an_op_that_cannot_be_run_is_repeated():
    meta = TensorMeta((4, 16), torch.float32)
    call = OpCall(broken, (Slot(0),), (), (meta,), (meta,))
    assert list(map(str, discover(call, 2))) == ["R->R"]


def test_the_random_state_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    calls = [make_call(aten.tanh.default, torch.ones(4, 9)), make_call(torch.relu, torch.ones(4, 9))]
    discover(calls[0], 3)
    discover(OpCall(draws, (Slot(0),), (), calls[1].operands, calls[1].results), 3)
    assert torch.equal(torch.rand(3), expected)
