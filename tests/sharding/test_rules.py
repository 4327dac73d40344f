"""Laws of axis_strategies and op_strategies, and the notation that rules are written in."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import GPT, MLP, Bert, ConvNet, Llama
from proofs.prove import prove
from rule_cases import CASES
from rule_data import aten, c, call_of, f, i, m

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import ShardingError
from alpa_strategy.ir.op import AxisStrategy, OpCall, Slot, TensorMeta
from alpa_strategy.sharding.notation import parse
from alpa_strategy.sharding.rule_table import rule_of
from alpa_strategy.sharding.strategies import axis_strategies, op_strategies, rule_origin

sizes = st.integers(1, 7)
axis_sizes = st.integers(2, 4)


def _prove_all(call: OpCall, operands: tuple[torch.Tensor, ...], axis_size: int) -> None:
    for strategy in axis_strategies(call, axis_size):
        prove(call, (strategy,), axis_size, operands)


@settings(max_examples=25, deadline=None)
@given(b=sizes, t=sizes, k=sizes, n=sizes, axis_size=axis_sizes)
def test_linear_of_any_size_is_right_on_any_axis(
    b: int, t: int, k: int, n: int, axis_size: int
) -> None:
    _prove_all(*call_of(aten.linear.default, f(b, t, k), f(n, k), f(n)), axis_size)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(sizes, min_size=1, max_size=3),
    keep=st.lists(st.booleans(), min_size=3),
    axis_size=axis_sizes,
)
def test_broadcast_product_is_right_on_any_axis(
    shape: list[int], keep: list[bool], axis_size: int
) -> None:
    other = []
    for size, kept in zip(shape, keep, strict=False):
        if kept:
            other.append(size)
        else:
            other.append(1)
    _prove_all(*call_of(aten.mul.Tensor, f(*shape), f(*other)), axis_size)


@settings(max_examples=25, deadline=None)
@given(v=st.integers(4, 13), d=sizes, rows=sizes, axis_size=axis_sizes)
def test_embedding_and_its_loss_are_right_for_any_vocabulary(
    v: int, d: int, rows: int, axis_size: int
) -> None:
    _prove_all(*call_of(aten.embedding.default, f(v, d), i(v, rows)), axis_size)
    loss = next(case.call.target for case in CASES.values() if case.name == "cross_entropy")
    _prove_all(*call_of(loss, f(rows, v), i(v, rows), None, -100, 0.0), axis_size)


@settings(max_examples=20, deadline=None)
@given(kv=st.integers(1, 4), group=st.integers(1, 3), length=sizes, axis_size=axis_sizes)
def test_grouped_query_attention_keeps_queries_with_their_keys(
    kv: int, group: int, length: int, axis_size: int
) -> None:
    q = f(2, kv * group, length, 4)
    k = f(2, kv, length, 4)
    v = f(2, kv, length, 4)
    call, operands = call_of(
        aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, True, enable_gqa=True
    )
    _prove_all(call, operands, axis_size)
    head_split = any(s.inputs[0].shard_dim == 1 for s in axis_strategies(call, axis_size))
    shared_keys = kv == 1 and group % axis_size == 0
    assert head_split == (kv % axis_size == 0 or shared_keys)


@settings(max_examples=25, deadline=None)
@given(shape=st.lists(sizes, min_size=2, max_size=3), dim=st.integers(0, 1), axis_size=axis_sizes)
def test_means_over_uneven_shards_weigh_their_elements(
    shape: list[int], dim: int, axis_size: int
) -> None:
    _prove_all(*call_of(aten.mean.dim, f(*shape), (dim,)), axis_size)
    _prove_all(*call_of(aten.mean.default, f(*shape)), axis_size)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (2, 2, 2)])
def test_a_dim_cut_by_two_axes_has_an_element_for_every_device(mesh_shape: tuple[int, ...]) -> None:
    call, operands = call_of(aten.linear.default, f(5, 9), f(8, 9), f(8))
    for strategies in op_strategies(call, mesh_shape):
        assert len(strategies) == len(mesh_shape)
        cut = math.prod(
            n for n, s in zip(mesh_shape, strategies, strict=True) if s.inputs[0].shard_dim == 0
        )
        assert cut <= 5
        if cut == 4:
            prove(call, strategies, mesh_shape, operands)


def test_integers_and_constants_have_one_replicated_placement() -> None:
    for call, _ in (
        call_of(aten.embedding.default, f(11, 6), i(11, 4)),
        call_of(aten.where.self, m(4, 5), f(4, 5), c(4, 5)),
        call_of(aten.gt.Tensor, f(4, 5), f(4, 5)),
    ):
        for strategy in axis_strategies(call, 2):
            for meta, placement in zip(call.operands, strategy.inputs, strict=True):
                assert str(placement) != "R*" or (
                    meta.requires_grad and call.results[0].requires_grad
                )


def test_partial_sums_are_not_rounded() -> None:
    narrow, _ = call_of(aten._to_copy.default, f(4, 5), dtype=torch.bfloat16)
    assert "P->P" not in map(str, axis_strategies(narrow, 2))
    assert "R*->R*" in map(
        str, axis_strategies(narrow, 2)
    )  # the weight's gradient is widened, not rounded
    wide, _ = call_of(
        aten._to_copy.default,
        f(4, 5).to(torch.bfloat16).detach().requires_grad_(),
        dtype=torch.float32,
    )
    assert "P->P" in map(str, axis_strategies(wide, 2))
    assert "R*->R*" not in map(str, axis_strategies(wide, 2))
    integers, _ = call_of(aten._to_copy.default, f(4, 5), dtype=torch.int64)
    assert "P->P" not in map(str, axis_strategies(integers, 2))


def test_one_slot_used_twice_has_one_placement() -> None:
    meta = TensorMeta((4, 4), torch.float64, True)
    product = OpCall(aten.mul.Tensor, (Slot(0), Slot(0)), (), (meta,), (meta,))
    assert list(map(str, axis_strategies(product, 2))) == ["R->R", "S0->S0", "S1->S1", "R*->R*"]
    matrices = OpCall(aten.mm.default, (Slot(0), Slot(0)), (), (meta,), (meta,))
    assert list(map(str, axis_strategies(matrices, 2))) == ["R->R"]
    for call in (product, matrices):
        _prove_all(call, (f(4, 4),), 2)


def test_losses_of_broadcast_operands_are_not_split() -> None:
    """ATen's backward of such a mean counts the elements of one operand only, so shards would not
    add up.
    """
    call, _ = call_of(aten.mse_loss.default, f(4, 5), f(5), 1)
    assert list(map(str, axis_strategies(call, 2))) == ["R,R->R"]


def test_inner_collectives_shrink_with_the_axes_that_cut_their_rows() -> None:
    call = CASES["cross_entropy"].call
    byte_counts = {}
    for strategies in op_strategies(call, (2, 2)):
        byte_counts[tuple(map(str, strategies))] = [
            sum(c.num_bytes for c in s.collectives) for s in strategies
        ]
    vocab = "S1,R->R@vocab_cross_entropy"
    assert byte_counts[vocab, "R,R->R"][0] == 3 * 4 * 8
    assert byte_counts[vocab, "S0,S0->P"][0] == 3 * 4 * 8 // 2
    assert byte_counts["S0,S0->P", vocab][1] == 3 * 4 * 8 // 2


def test_strategies_read_back_from_their_text() -> None:
    for case in CASES.values():
        for strategy in axis_strategies(case.call, 2):
            again = AxisStrategy.parse(str(strategy))
            assert (again.inputs, again.outputs) == (strategy.inputs, strategy.outputs)
            assert again.implementation == strategy.implementation


@pytest.mark.parametrize("model", [MLP, GPT, Llama, Bert, ConvNet])
def test_every_op_of_the_test_models_has_a_rule(model: type) -> None:
    module = model()
    graph = capture_step(module, module.example_batch(8))
    for call in {op.call for op in graph.ops}:
        assert rule_of(call.target) is not None, call.target_name
        assert rule_origin(call) != "replicated"
        if any(size > 1 for meta in call.operands for size in meta.shape):
            assert len(axis_strategies(call, 2)) > 1, call


def test_enumeration_is_quick() -> None:
    call = OpCall(
        aten.linear.default,
        CASES["linear"].call.args,
        (),
        tuple(TensorMeta(s, torch.float32, True) for s in ((32, 1024, 777), (3072, 777), (3072,))),
        (TensorMeta((32, 1024, 3072), torch.float32, True),),
    )
    start = time.perf_counter()
    assert len(op_strategies(call, (4, 8))) == 25
    assert time.perf_counter() - start < 0.2  # about 3 ms on an idle machine


@pytest.mark.parametrize("rule", ["[a, b]", "[a -> [a]", "[a b] -> [a]", "[a!!] -> [a]"])
def test_a_rule_that_cannot_be_read_is_an_error(rule: str) -> None:
    with pytest.raises(ShardingError):
        parse(rule)


def test_a_wrong_rule_is_refuted() -> None:
    call, operands = call_of(aten.softmax.int, f(4, 6), -1)
    for text in ("S1->S1", "P->P", "S0->R"):
        with pytest.raises(ShardingError):
            prove(call, (AxisStrategy.parse(text),), 2, operands)
    call, operands = call_of(aten.linear.default, f(4, 6), f(8, 6), f(8))
    for text in ("S1,S1,R*->P", "S0,R,R->S0", "R*,S0,R*->S1"):
        with pytest.raises(ShardingError):
            prove(call, (AxisStrategy.parse(text),), 2, operands)
