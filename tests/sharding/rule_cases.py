"""One call or more of every op that the sharding rules must know, with data to prove them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rule_cases_batched
import rule_cases_images
import rule_cases_pointwise
import rule_cases_views
from rule_data import Add, Case, aten, c, call_of, f, i, m
from torch import Tensor

from alpa_strategy.capture import ops


def linear_cases(add: Add) -> None:
    add(
        "linear",
        aten.linear.default,
        f(4, 5, 6),
        f(8, 6),
        f(8),
        expect=("S0,R*,R*->S0", "S1,R*,R*->S1", "R*,S0,S0->S2", "S2,S1,R*->P@bias_on_first"),
    )
    add("linear_no_bias", aten.linear.default, f(4, 6), f(8, 6), expect=("S1,S1->P", "R*,S0->S1"))
    add(
        "linear_vector",
        aten.linear.default,
        f(6),
        f(8, 6),
        f(8),
        expect=("S0,S1,R*->P@bias_on_first", "R*,S0,S0->S0"),
    )


def matmul_cases(add: Add) -> None:
    add(
        "matmul_batched",
        aten.matmul.default,
        f(4, 5, 6),
        f(4, 6, 7),
        expect=("S0,S0->S0", "S2,S1->P", "R*,S2->S2"),
    )
    add(
        "matmul_broadcast",
        aten.matmul.default,
        f(2, 4, 5, 6),
        f(6, 7),
        expect=("S0,R*->S0", "S2,R*->S2", "S3,S0->P"),
    )
    add("matmul_vector", aten.matmul.default, f(4, 5, 6), f(6), expect=("S0,R*->S0", "S2,S0->P"))
    add("matmul_one", aten.matmul.default, f(1, 5, 6), f(4, 6, 7), expect=("R*,S0->S0",))
    add("mm", aten.mm.default, f(4, 6), f(6, 8), expect=("S0,R*->S0", "S1,S0->P", "R*,S1->S1"))
    add("bmm", aten.bmm.default, f(4, 5, 6), f(4, 6, 7), expect=("S0,S0->S0", "S2,S1->P"))
    add(
        "addmm",
        aten.addmm.default,
        f(8),
        f(4, 6),
        f(6, 8),
        expect=("R*,S0,R*->S0", "S0,R*,S1->S1", "R*,S1,S0->P@bias_on_first"),
    )
    add(
        "addmm_scaled",
        aten.addmm.default,
        f(4, 8),
        f(4, 6),
        f(6, 8),
        beta=0.5,
        alpha=2.0,
        expect="S0,S0,R*->S0",
    )
    add(
        "baddbmm",
        aten.baddbmm.default,
        f(4, 5, 7),
        f(4, 5, 6),
        f(4, 6, 7),
        expect=("S0,S0,S0->S0",),
    )


def einsum_cases(add: Add) -> None:
    add(
        "einsum",
        aten.einsum.default,
        "bqhd,bkhd->bhqk",
        (f(4, 5, 4, 6), f(4, 7, 4, 6)),
        expect=("S2,S2->S1", "S3,S3->P"),
    )
    add(
        "einsum_dots",
        aten.einsum.default,
        "...k,kn->...n",
        (f(4, 5, 6), f(6, 8)),
        expect=("S0,R*->S0", "S2,S0->P"),
    )
    add(
        "einsum_implicit",
        aten.einsum.default,
        "bi,ij",
        (f(4, 6), f(6, 8)),
        expect=("S0,R*->S0", "S1,S0->P"),
    )
    add("einsum_trace", aten.einsum.default, "bii->b", (f(4, 5, 5),), expect="S0->S0")
    add("mv", aten.mv.default, f(4, 6), f(6), expect=("S0,R*->S0", "S1,S0->P"))
    add("dot", aten.dot.default, f(6), f(6), expect="S0,S0->P")
    add("outer", aten.outer.default, f(4), f(6), expect="S0,R*->S0")


def embedding_cases(add: Add) -> None:
    add(
        "embedding",
        aten.embedding.default,
        f(11, 6),
        i(11, 4, 5),
        expect=("S0,R->P@vocab_embedding", "S1,R->S2", "R*,S0->S0", "R*,S1->S1"),
    )
    add(
        "segmented_linear",
        ops.segmented_linear,
        *(f(4, 5, 6), f(3, 8, 6), f(3, 8)),
        expect=("S0,R*,R*->S0", "R*,S1,S1->S3", "S2,S2,R*->P@bias_on_first"),
    )
    bags = ("S0,R->P@vocab_bags", "S1,R->S1", "R*,S0->S0")
    add("bags_sum", ops.bag_lookup, f(11, 6), i(11, 4, 5), None, 0, -1, expect=bags)
    add("bags_mean", ops.bag_lookup, f(11, 6), i(11, 4, 5), None, 1, 3, expect=bags)
    add(
        "bags_weighted",
        ops.bag_lookup,
        f(11, 6),
        i(11, 4, 5),
        f(4, 5),
        0,
        2,
        expect=("S0,R,R*->P@vocab_bags",),
    )
    add(
        "bags_max",
        ops.bag_lookup,
        f(11, 6),
        i(11, 4, 5),
        None,
        2,
        -1,
        expect=("S1,R->S1", "R*,S0->S0"),
    )
    add(
        "embedding_padding",
        aten.embedding.default,
        f(11, 6),
        i(11, 4, 5),
        0,
        expect="S0,R->P@vocab_embedding",
    )


def attention_cases(add: Add) -> None:
    def qkv(heads: int = 4, kv_heads: int = 4, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
        return f(4, heads, length, 6), f(4, kv_heads, 7, 6), f(4, kv_heads, 7, 6)

    sdpa = aten.scaled_dot_product_attention.default
    add("sdpa", sdpa, *qkv(), expect=("S0,S0,S0->S0", "S1,S1,S1->S1", "S2,R*,R*->S2"))
    q = f(4, 4, 5, 6)
    k = f(4, 4, 5, 6)
    v = f(4, 4, 5, 6)
    add("sdpa_causal", sdpa, q, k, v, None, 0.0, True, expect=("S0,S0,S0->S0", "S1,S1,S1->S1"))
    ring = "S2,S2,S2->S2@ring_attention"
    add("sdpa_ring", sdpa, f(2, 2, 12, 4), f(2, 2, 24, 4), f(2, 2, 24, 4), scale=0.3, expect=ring)
    q = f(2, 4, 24, 4)
    k = f(2, 2, 24, 4)
    v = f(2, 2, 24, 4)
    add("sdpa_ring_causal", sdpa, k, c(2, 2, 24, 4), v, None, 0.0, True, expect=ring)
    add("sdpa_ring_gqa", sdpa, q, k, v, None, 0.0, True, enable_gqa=True, expect=ring)
    add("sdpa_gqa", sdpa, *qkv(8, 4), enable_gqa=True, expect=("S0,S0,S0->S0", "S1,S1,S1->S1"))
    add("sdpa_mqa", sdpa, *qkv(8, 1), enable_gqa=True, expect=("S1,R*,R*->S1",))
    add(
        "sdpa_mask",
        sdpa,
        *qkv(),
        m(4, 1, 5, 7),
        expect=("S0,S0,S0,S0->S0", "S1,S1,S1,R->S1", "S2,R*,R*,S2->S2"),
    )
    add("sdpa_mask_row", sdpa, *qkv(), m(4, 1, 1, 7), expect=("S0,S0,S0,S0->S0", "S2,R*,R*,R->S2"))
    add("sdpa_mask_2d", sdpa, *qkv(), c(5, 7), expect=("S0,S0,S0,R->S0", "S2,R*,R*,S0->S2"))
    add("sdpa_bias_grad", sdpa, *qkv(), f(4, 5, 7), expect=("S0,S0,S0,R*->S0", "S1,S1,S1,S0->S1"))
    add("sdpa_3d", sdpa, f(4, 5, 6), f(4, 7, 6), f(4, 7, 6), expect=("S0,S0,S0->S0",))


def norm_cases(add: Add) -> None:
    add(
        "layer_norm",
        aten.layer_norm.default,
        f(4, 5, 6),
        (6,),
        f(6),
        f(6),
        expect=("S0,R*,R*->S0", "S1,R*,R*->S1"),
    )
    add("layer_norm_plain", aten.layer_norm.default, f(4, 5, 6), (5, 6), expect="S0->S0")
    add(
        "native_layer_norm",
        aten.native_layer_norm.default,
        f(4, 5, 6),
        (6,),
        f(6),
        f(6),
        1e-5,
        expect="S0,R*,R*->S0,S0,S0",
    )
    weight_norm = aten._weight_norm.default
    add("weight_norm", weight_norm, f(4, 6), f(4, 1), expect=("S0,S0->S0", "R*,P->P"))
    add("weight_norm_columns", weight_norm, f(6, 3, 4), f(1, 1, 4), 2, expect="S2,S2->S2")
    add("weight_norm_of_all", weight_norm, f(4, 6), f(), -1, expect="R*,P->P")
    add(
        "rms_norm", aten.rms_norm.default, f(4, 5, 6), (6,), f(6), expect=("S0,R*->S0", "S1,R*->S1")
    )
    args = (None, None, True, 0.1, 1e-5, False)
    add(
        "instance_norm",
        aten.instance_norm.default,
        f(4, 6, 5),
        f(6),
        f(6),
        *args,
        expect=("S0,R*,R*->S0", "S1,S0,S0->S1"),
    )
    add(
        "group_norm",
        aten.group_norm.default,
        f(4, 12, 3),
        6,
        f(12),
        f(12),
        expect=("S0,R*,R*->S0", "S1,S0,S0->S1"),
    )
    for op in (aten.softmax.int, aten.log_softmax.int):
        add(str(op), op, f(4, 5, 6), -1, expect=("S0->S0", "S1->S1"))
    for op in (aten._softmax.default, aten._log_softmax.default):
        add(str(op), op, f(4, 5, 6), 1, False, expect=("S0->S0", "S2->S2"))
    add("dropout_eval", aten.dropout.default, f(4, 6), 0.5, False, expect="S0->S0")
    add("native_dropout", aten.native_dropout.default, f(4, 6), 0.0, True, expect="S0->S0,S0")


GROUPS: tuple[Callable[[Add], None], ...] = (
    linear_cases,
    matmul_cases,
    einsum_cases,
    embedding_cases,
    attention_cases,
    norm_cases,
    rule_cases_pointwise.arithmetic_cases,
    rule_cases_pointwise.unary_cases,
    rule_cases_pointwise.mask_cases,
    rule_cases_pointwise.other_pointwise_cases,
    rule_cases_pointwise.reduction_cases,
    rule_cases_views.reshape_cases,
    rule_cases_views.transpose_and_expand_cases,
    rule_cases_views.split_and_join_cases,
    rule_cases_views.index_cases,
    rule_cases_views.scatter_and_factory_cases,
    rule_cases_images.convolution_cases,
    rule_cases_images.grouped_and_transposed_convolution_cases,
    rule_cases_images.pooling_and_batch_norm_cases,
    rule_cases_pointwise.cross_entropy_cases,
    rule_cases_pointwise.nll_cases,
    rule_cases_pointwise.elementwise_loss_cases,
    rule_cases_batched.recurrent_cases,
    rule_cases_batched.grouped_and_indexed_cases,
    rule_cases_batched.embedding_bag_cases,
    rule_cases_batched.margin_loss_cases,
    rule_cases_batched.sampling_and_alignment_cases,
    rule_cases_batched.linalg_cases,
)


def _cases() -> list[Case]:
    cases: list[Case] = []

    def add(
        name: str, target: Any, *args: Any, expect: str | tuple[str, ...], **kwargs: Any
    ) -> None:
        call, operands = call_of(target, *args, **kwargs)
        sharded = (expect,) if isinstance(expect, str) else expect
        cases.append(Case(name, call, operands, sharded))

    for add_group in GROUPS:
        add_group(add)
    return cases


CASES = {case.name: case for case in _cases()}
