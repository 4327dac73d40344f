"""One call or more of every op that the sharding rules must know, with the data to prove them
on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rule_cases_batched import batched_cases
from torch import Tensor

from alpa_strategy.capture import ops
from alpa_strategy.ir.op import OpCall, call_on

aten = torch.ops.aten


def call_of(target: Any, *args: Any, **kwargs: Any) -> tuple[OpCall, tuple[Tensor, ...]]:
    """The OpCall of `target(*args, **kwargs)` and its tensor operands (a tensor given twice is two
    operands).
    """
    return call_on(target, args, kwargs)


@dataclass(frozen=True)
class Case:
    """A call with its data. `sharded`: some of the strategies (on 2 devices) that the call must
    have.
    """

    name: str
    call: OpCall
    operands: tuple[Tensor, ...]
    sharded: tuple[str, ...]


_GENERATOR = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    """Floating data in (-1, 1) that requires a gradient."""
    return (torch.rand(shape, generator=_GENERATOR, dtype=torch.float64) * 2 - 1).requires_grad_()


def u(*shape: int) -> Tensor:
    """Floating data in (0.05, 0.95) that requires a gradient."""
    return (
        torch.rand(shape, generator=_GENERATOR, dtype=torch.float64) * 0.9 + 0.05
    ).requires_grad_()


def i(high: int, *shape: int) -> Tensor:
    """Integers below `high`."""
    return torch.randint(0, high, shape, generator=_GENERATOR)


def m(*shape: int) -> Tensor:
    """A mask with some True in every row."""
    mask = torch.rand(shape, generator=_GENERATOR) < 0.6
    mask[..., 0] = True
    return mask


def c(*shape: int) -> Tensor:
    """Floating data without gradient."""
    return f(*shape).detach()


def _cases() -> list[Case]:
    cases: list[Case] = []

    def add(
        name: str, target: Any, *args: Any, expect: str | tuple[str, ...], **kwargs: Any
    ) -> None:
        call, operands = call_of(target, *args, **kwargs)
        cases.append(Case(name, call, operands, (expect,) if isinstance(expect, str) else expect))

    _matrix_cases(add)
    _attention_and_norm_cases(add)
    _pointwise_cases(add)
    _reduction_cases(add)
    _view_cases(add)
    _index_cases(add)
    _image_cases(add)
    _loss_cases(add)
    batched_cases(add, f, i, c)
    return cases


def _matrix_cases(add: Any) -> None:
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


def _attention_and_norm_cases(add: Any) -> None:
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


def _pointwise_cases(add: Any) -> None:
    two = ("S0,S0->S0", "S1,S1->S1")
    add("add", aten.add.Tensor, f(4, 5), f(4, 5), expect=(*two, "P,P->P", "R*,R*->R*"))
    add("add_alpha", aten.add.Tensor, f(4, 5), f(4, 5), alpha=2.0, expect=(*two, "P,P->P"))
    add(
        "add_broadcast",
        aten.add.Tensor,
        f(4, 1, 5),
        f(6, 5),
        expect=("S0,R*->S0", "R*,S0->S1", "S2,S1->S2", "P,P->P"),
    )
    add("add_scalar", aten.add.Tensor, f(4, 5), 2.0, expect=("S0->S0", "R*->R*"))
    add("sub", aten.sub.Tensor, f(4, 5), f(5), expect=("S0,R*->S0", "P,P->P"))
    add("mul", aten.mul.Tensor, f(4, 5), f(4, 5), expect=(*two, "R*,R*->R*"))
    add("mul_scalar", aten.mul.Tensor, f(4, 5), 3.0, expect=("S0->S0", "P->P"))
    add("mul_constant", aten.mul.Tensor, f(4, 5), c(5), expect=("S1,S0->S1", "P,R->P"))
    add("div", aten.div.Tensor, f(4, 5), u(4, 1), expect=("S0,S0->S0", "S1,R*->S1", "P,R*->P"))
    add("div_whole", aten.div.Tensor, f(), u(), expect="P,R*->P")
    add("div_scalar", aten.div.Tensor, f(4, 5), 3.0, expect=("S0->S0", "P->P"))
    for op in (aten.neg.default, aten.clone.default, aten.contiguous.default, aten.alias.default):
        add(str(op), op, f(4, 5), expect=("S0->S0", "P->P", "R*->R*"))
    add("detach", aten.detach.default, f(4, 5), expect=("S0->S0", "P->P"))
    unary = (
        aten.relu,
        aten.gelu,
        aten.silu,
        aten.tanh,
        aten.sigmoid,
        aten.exp,
        aten.sin,
        aten.cos,
        aten.abs,
        aten.erf,
    )
    for packet in (
        *unary,
        aten.hardtanh,
        aten.leaky_relu,
        aten.elu,
        aten.softplus,
        aten.square,
        aten.hardswish,
    ):
        add(str(packet), packet.default, f(4, 5), expect=("S0->S0", "S1->S1", "R*->R*"))
    for packet in (aten.rsqrt, aten.sqrt, aten.log, aten.reciprocal):
        add(str(packet), packet.default, u(4, 5), expect="S0->S0")
    add("pow", aten.pow.Tensor_Scalar, f(4, 5), 2, expect="S0->S0")
    add("pow_tensor", aten.pow.Tensor_Tensor, u(4, 5), f(5), expect="S0,R*->S0")
    add("clamp", aten.clamp.default, f(4, 5), -0.5, 0.5, expect="S0->S0")
    add(
        "where",
        aten.where.self,
        m(4, 5),
        f(4, 5),
        f(5),
        expect=("S0,S0,R*->S0", "S1,S1,S0->S1", "R,P,P->P"),
    )
    add(
        "masked_fill",
        aten.masked_fill.Scalar,
        f(4, 4, 5),
        m(4, 5),
        -1e9,
        expect=("S0,R->S0", "S1,S0->S1"),
    )
    add(
        "masked_fill_zero",
        aten.masked_fill.Scalar,
        f(4, 5),
        m(4, 5),
        0,
        expect=("S0,S0->S0", "P,R->P"),
    )
    add(
        "masked_fill_tensor",
        aten.masked_fill.Tensor,
        f(4, 5),
        m(4, 5),
        torch.tensor(0.0),
        expect="S0,S0,R->S0",
    )
    for op in (aten.gt.Tensor, aten.eq.Tensor, aten.maximum.default):
        add(str(op), op, f(4, 5), f(4, 5), expect=("S0,S0->S0",))
    add("eq_scalar", aten.eq.Scalar, i(3, 4, 5), 1, expect="S0->S0")
    add("logical_and", aten.logical_and.default, m(4, 5), m(5), expect="S0,R->S0")
    add("addcmul", aten.addcmul.default, f(4, 5), f(4, 5), f(5), expect="S0,S0,R*->S0")
    add("lerp", aten.lerp.Tensor, f(4, 5), f(4, 5), f(5), expect="S0,S0,R*->S0")
    add("to_dtype", aten.to.dtype, f(4, 5), torch.float64, expect=("S0->S0", "P->P"))
    add(
        "to_copy", aten._to_copy.default, i(5, 4, 5), dtype=torch.float64, expect=("S0->S0", "P->P")
    )
    add("zeros_like", aten.zeros_like.default, f(4, 5), expect="S0->S0")
    add("full_like", aten.full_like.default, f(4, 5), 2.0, expect="S1->S1")
    add("tril", aten.tril.default, f(4, 5, 5), expect=("S0->S0", "P->P"))
    add("triu", aten.triu.default, f(4, 5, 5), 1, expect="S0->S0")
    for op in (aten.max.other, aten.min.other):
        add(str(op), op, f(4, 5), f(5), expect=("S0,R*->S0", "S1,S0->S1"))
    add(
        "view_as_complex",
        aten.view_as_complex.default,
        f(4, 5, 2),
        expect=("S0->S0", "S1->S1", "P->P"),
    )
    phases = torch.polar(c(5), c(5))
    rotated = torch.view_as_complex(c(4, 5, 2)).requires_grad_()
    add("complex_rotation", aten.mul.Tensor, rotated, phases, expect=("S0,R->S0", "S1,S0->S1"))
    add("conjugate", aten.conj_physical.default, rotated, expect=("S0->S0", "S1->S1", "P->P"))
    add("view_as_real", aten.view_as_real.default, rotated, expect=("S0->S0", "S1->S1"))
    add("view_dtype", aten.view.dtype, c(4, 5), torch.int64, expect="S0->S0")
    square = f(4, 5)
    add("same_operand_twice", aten.mul.Tensor, square, square, expect=("S0,S0->S0", "R*,R*->R*"))
    add(
        "prelu",
        aten.prelu.default,
        f(4, 6, 5),
        f(6),
        expect=("S0,R*->S0", "S1,S0->S1", "S2,R*->S2"),
    )
    add("prelu_one", aten.prelu.default, f(4, 6, 5), f(1), expect=("S0,R*->S0", "S1,R*->S1"))
    add("glu", aten.glu.default, f(4, 6), expect="S0->S0")


def _reduction_cases(add: Any) -> None:
    add("sum", aten.sum.default, f(4, 5), expect=("S0->P", "S1->P", "P->P"))
    add(
        "sum_dim",
        aten.sum.dim_IntList,
        f(4, 5, 6),
        (1,),
        expect=("S0->S0", "S1->P", "S2->S1", "P->P"),
    )
    add("sum_keep", aten.sum.dim_IntList, f(4, 5, 6), (-1,), True, expect=("S0->S0", "S2->P"))
    add("sum_int", aten.sum.default, i(9, 4, 5), expect="S0->P")
    add("sum_mask", aten.sum.default, m(4, 5), expect="S0->P")
    add("mean", aten.mean.default, f(4, 5), expect=("S0->P@fraction", "S1->P@fraction", "P->P"))
    add(
        "mean_dim",
        aten.mean.dim,
        f(4, 5, 6),
        (-1,),
        True,
        expect=("S0->S0", "S1->S1", "S2->P@fraction"),
    )
    add(
        "mean_two",
        aten.mean.dim,
        f(4, 6, 5, 5),
        (2, 3),
        expect=("S0->S0", "S1->S1", "S2->P@fraction"),
    )
    for op in (aten.amax.default, aten.amin.default):
        add(str(op), op, f(4, 5, 6), (1,), expect=("S0->S0", "S2->S1"))
    add("var", aten.var.correction, f(4, 5, 6), (2,), correction=1, keepdim=True, expect="S0->S0")
    add("std", aten.std.correction, f(4, 5, 6), (2,), correction=1, expect=("S0->S0", "S1->S1"))
    add("var_mean", aten.var_mean.correction, f(4, 5), (1,), correction=0, expect="S0->S0,S0")
    add("any", aten.any.dim, m(4, 5), 1, expect="S0->S0")
    add("all", aten.all.dim, m(4, 5), 0, expect="S1->S0")
    add(
        "is_all_true", aten._is_all_true.default, m(4, 5), expect="R->R"
    )  # asked by torch.distributions
    add("max_dim", aten.max.dim, f(4, 5), 1, expect="S0->S0,S0")
    add("argmax", aten.argmax.default, f(4, 5), -1, expect="S0->S0")
    add("norm", aten.norm.ScalarOpt_dim, f(4, 5), 2, (1,), True, expect="S0->S0")
    add("vector_norm", aten.linalg_vector_norm.default, f(4, 5), 2, (1,), expect="S0->S0")
    add("logsumexp", aten.logsumexp.default, f(4, 5), (1,), expect="S0->S0")
    add("prod", aten.prod.dim_int, f(4, 5), 1, expect="S0->S0")
    add("cumsum", aten.cumsum.default, f(4, 5), 1, expect="S0->S0")
    add("topk", aten.topk.default, f(4, 5), 2, expect="S0->S0,S0")
    add("sort", aten.sort.default, f(4, 5), expect="S0->S0,S0")
    add("cosine_similarity", aten.cosine_similarity.default, f(4, 5), f(4, 5), expect="S0,S0->S0")


def _view_cases(add: Any) -> None:
    both = ("R*->R*", "P->P")
    for op in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        add(str(op), op, f(4, 5, 12), (4, 5, 4, 3), expect=("S0->S0", "S1->S1", "S2->S2", *both))
    add(
        "view_merge", aten.view.default, f(4, 5, 4, 3), (20, 12), expect=("S0->S0", "S2->S1", *both)
    )
    add("view_infer", aten.view.default, f(4, 5, 12), (-1, 12), expect=("S0->S0", "S2->S1"))
    add("flatten", aten.flatten.using_ints, f(4, 6, 5), 1, expect=("S0->S0", "S1->S1"))
    add("unflatten", aten.unflatten.int, f(4, 12), 1, (4, -1), expect=("S0->S0", "S1->S1"))
    add("squeeze", aten.squeeze.default, f(4, 1, 3), expect=("S0->S0", "S2->S1"))
    add("squeeze_dim", aten.squeeze.dim, f(4, 1, 3), 1, expect=("S0->S0", "S2->S1"))
    add("squeeze_nothing", aten.squeeze.dim, f(4, 3, 3), 1, expect=("S0->S0", "S1->S1"))
    add(
        "expand_as",
        aten.expand_as.default,
        f(4, 1),
        c(4, 5),
        expect=("S0,S0->S0", "R*,S1->S1", "P,R->P"),
    )
    add("view_as", aten.view_as.default, f(4, 6), f(4, 2, 3), expect=("S0,S0->S0", "S1,S1->S1"))
    add("unsqueeze", aten.unsqueeze.default, f(4, 5), 1, expect=("S0->S0", "S1->S2"))
    add(
        "transpose",
        aten.transpose.int,
        f(4, 5, 6),
        1,
        -1,
        expect=("S0->S0", "S1->S2", "S2->S1", *both),
    )
    add(
        "permute",
        aten.permute.default,
        f(4, 5, 6),
        (2, 0, 1),
        expect=("S0->S1", "S1->S2", "S2->S0"),
    )
    add("t", aten.t.default, f(4, 5), expect=("S0->S1", "S1->S0"))
    add("movedim", aten.movedim.intlist, f(4, 5, 6), (0,), (2,), expect=("S0->S2",))
    add("mT", aten.mT.default, f(4, 5, 6), expect=("S1->S2",))
    add(
        "expand",
        aten.expand.default,
        f(4, 1, 5),
        (4, 6, -1),
        expect=("S0->S0", "R*->S1", "S2->S2", *both),
    )
    add(
        "expand_new", aten.expand.default, f(4, 1), (6, 4, 3), expect=("R*->S0", "S0->S1", "R*->S2")
    )
    add("repeat", aten.repeat.default, f(4, 5), (2, 1, 3), expect=("S0->S1", *both))
    add(
        "repeat_interleave",
        aten.repeat_interleave.self_int,
        f(4, 4, 5),
        2,
        1,
        expect=("S0->S0", "S1->S1", "S2->S2"),
    )
    add(
        "repeat_interleave_size",
        aten.repeat_interleave.self_int,
        f(4, 5),
        2,
        0,
        output_size=8,
        expect=("S0->S0", "S1->S1"),
    )
    add(
        "split",
        aten.split.Tensor,
        f(4, 6),
        2,
        -1,
        expect=("S0->S0,S0,S0", "P->P,P,P", "R*->R*,R*,R*"),
    )
    add("split_sizes", aten.split_with_sizes.default, f(4, 6), (1, 5), 1, expect="S0->S0,S0")
    add("chunk", aten.chunk.default, f(4, 5, 6), 3, -1, expect=("S0->S0,S0,S0", "S1->S1,S1,S1"))
    add("unbind", aten.unbind.int, f(3, 4, 5), expect=("S1->S0,S0,S0", "S2->S1,S1,S1"))
    add("select", aten.select.int, f(4, 5, 6), 1, 0, expect=("S0->S0", "S2->S1", "P->P"))
    add("slice", aten.slice.Tensor, f(4, 5, 6), 1, 1, 4, expect=("S0->S0", "S2->S2"))
    add("slice_all", aten.slice.Tensor, f(4, 5), 0, 0, 2**63 - 1, expect=("S0->S0", "S1->S1"))
    add(
        "slice_last_off",
        aten.slice.Tensor,
        f(3, 24, 2),
        1,
        0,
        -1,
        expect=("S0->S0", "S1->S1", "S2->S2"),
    )
    add("narrow_last_off", aten.narrow.default, f(12, 3), -2, 0, 11, expect=("S0->S0", "S1->S1"))
    add("narrow", aten.narrow.default, f(4, 5), 0, 0, 4, expect=("S0->S0", "S1->S1"))
    add("cat", aten.cat.default, (f(4, 5), f(4, 2)), 1, expect=("S0,S0->S0", "P,P->P", "R*,R*->R*"))
    add(
        "stack",
        aten.stack.default,
        (f(4, 5), f(4, 5)),
        1,
        expect=("S0,S0->S0", "S1,S1->S2", "P,P->P"),
    )
    add("pad", aten.pad.default, f(4, 5, 6), (1, 2), expect=("S0->S0", "S1->S1"))
    add(
        "constant_pad",
        aten.constant_pad_nd.default,
        f(4, 5, 6),
        (1, 2, 0, 0),
        1.0,
        expect=("S0->S0", "S1->S1"),
    )
    add("roll", aten.roll.default, f(4, 5), (1,), (1,), expect="S0->S0")
    add("flip", aten.flip.default, f(4, 5), (1,), expect="S0->S0")


def _index_cases(add: Any) -> None:
    add(
        "index_select",
        aten.index_select.default,
        f(4, 5, 6),
        1,
        i(5, 8),
        expect=("S0,R->S0", "S2,R->S2", "R*,S0->S1"),
    )
    add(
        "gather",
        aten.gather.default,
        f(4, 5, 7),
        2,
        i(7, 4, 5, 6),
        expect=("S0,S0->S0", "S1,S1->S1", "R*,S2->S2"),
    )
    add(
        "index",
        aten.index.Tensor,
        f(4, 5, 6),
        (None, i(5, 8)),
        expect=("S0,R->S0", "S2,R->S2", "R*,S0->S1"),
    )
    add(
        "index_two",
        aten.index.Tensor,
        f(4, 5, 6),
        (i(4, 8, 1), i(5, 6)),
        expect=("R*,S0,R->S0", "R*,R,S0->S1", "S2,R,R->S2"),
    )
    add(
        "index_apart",
        aten.index.Tensor,
        f(4, 5, 6),
        (i(4, 8), None, i(6, 8)),
        expect=("R*,S0,S0->S0", "S1,R,R->S1"),
    )
    add("scatter", aten.scatter.src, f(4, 5), 1, i(5, 4, 1), f(4, 1), expect="S0,S0,S0->S0")
    add("scatter_value", aten.scatter.value, f(4, 5), 1, i(5, 4, 2), 1.0, expect="S0,S0->S0")
    add(
        "scatter_add",
        aten.scatter_add.default,
        f(4, 5),
        1,
        i(5, 4, 3),
        f(4, 3),
        expect="S0,S0,S0->S0",
    )
    add("one_hot", aten.one_hot.default, i(5, 4, 3), 5, expect=("S0->S0", "S1->S1"))
    add("full", aten.full.default, (4, 5), 1.0, expect=("->S0", "->S1"))
    add("zeros", aten.zeros.default, (4, 5), expect="->S0")
    add(
        "upsample",
        aten.upsample_bilinear2d.vec,
        f(4, 6, 3, 3),
        None,
        False,
        (2.0, 2.0),
        expect=("S0->S0", "S1->S1"),
    )
    add("ones", aten.ones.default, (4, 5), expect="->S0")
    add("new_zeros", aten.new_zeros.default, f(4, 5), (4, 3), expect=("S0->S0", "S0->R", "R->S0"))


def _image_cases(add: Any) -> None:
    conv = ("S0,R*,R*->S0", "R*,S0,S0->S1", "S1,S1,R*->P@bias_on_first")
    add("conv1d", aten.conv1d.default, f(4, 6, 5), f(8, 6, 3), f(8), expect=conv)
    add(
        "conv2d",
        aten.conv2d.default,
        f(4, 6, 5, 5),
        f(8, 6, 3, 3),
        f(8),
        (1, 1),
        (1, 1),
        expect=conv,
    )
    add(
        "conv2d_same",
        aten.conv2d.padding,
        f(4, 6, 5, 5),
        f(8, 6, 3, 3),
        f(8),
        (1, 1),
        "same",
        expect=conv,
    )
    add(
        "conv2d_single",
        aten.conv2d.default,
        f(6, 5, 5),
        f(8, 6, 3, 3),
        expect=("S0,S1->P", "R*,S0->S0"),
    )
    add("conv3d", aten.conv3d.default, f(4, 6, 3, 3, 3), f(8, 6, 2, 2, 2), f(8), expect=conv)
    add(
        "convolution",
        aten.convolution.default,
        f(4, 6, 5),
        f(8, 6, 3),
        f(8),
        (1,),
        (0,),
        (1,),
        False,
        (0,),
        1,
        expect=conv,
    )
    depthwise = ("S0,R*,R*->S0", "S1,S0,S0->S1")
    add(
        "conv2d_depthwise",
        aten.conv2d.default,
        f(4, 12, 4, 4),
        f(24, 1, 3, 3),
        f(24),
        groups=12,
        expect=depthwise,
    )
    add(
        "conv2d_groups",
        aten.conv2d.default,
        f(4, 12, 4, 4),
        f(24, 3, 3, 3),
        f(24),
        groups=4,
        expect=depthwise,
    )
    transposed = ("S0,R*,R*->S0", "R*,S1,S0->S1", "S1,S0,R*->P@bias_on_first")
    add(
        "conv_transpose1d",
        aten.conv_transpose1d.default,
        f(4, 6, 5),
        f(6, 8, 3),
        f(8),
        expect=transposed,
    )
    add(
        "conv_transpose2d",
        aten.conv_transpose2d.input,
        f(4, 6, 3, 3),
        f(6, 8, 2, 2),
        f(8),
        expect=transposed,
    )
    for op, args in (
        (aten.max_pool2d.default, ((2, 2),)),
        (aten.avg_pool2d.default, ((2, 2),)),
        (aten.adaptive_avg_pool2d.default, ((1, 1),)),
        (aten.upsample_nearest2d.vec, (None, (2.0, 2.0))),
    ):
        add(str(op), op, f(4, 6, 6, 6), *args, expect=("S0->S0", "S1->S1"))
    add(
        "max_pool_indices",
        aten.max_pool2d_with_indices.default,
        f(4, 6, 6, 6),
        (2, 2),
        expect="S0->S0,S0",
    )
    add("pixel_shuffle", aten.pixel_shuffle.default, f(4, 8, 3, 3), 2, expect="S0->S0")
    stats = (c(6), u(6).detach())
    args = (False, 0.1, 1e-5, False)
    add(
        "batch_norm_eval",
        aten.batch_norm.default,
        f(4, 6, 5, 5),
        f(6),
        f(6),
        *stats,
        *args,
        expect=("S0,R*,R*,R,R->S0", "S1,S0,S0,S0,S0->S1"),
    )
    add(
        "batch_norm_train",
        ops.batch_norm_train,
        *(f(8, 6, 3, 3), f(6), f(6), c(6), u(6).detach(), 0.1, 1e-5),
        expect=("S1,S0,S0,S0,S0->S1,S0,S0", "S0,R*,R*,R,R->S0,R,R@batch_norm_sync"),
    )
    add(
        "batch_norm_plain",
        ops.batch_norm_train,
        f(8, 6),
        None,
        None,
        None,
        None,
        0.1,
        1e-5,
        expect=("S1->S1", "S0->S0@batch_norm_sync"),
    )


def _loss_cases(add: Any) -> None:
    ce = ops.cross_entropy_sum
    add(
        "cross_entropy",
        ce,
        f(8, 11),
        i(11, 8),
        None,
        -100,
        0.0,
        expect=("S0,S0->P", "S1,R->R@vocab_cross_entropy"),
    )
    target = i(11, 8)
    target[3] = -100
    add(
        "cross_entropy_ignore",
        ce,
        f(8, 11),
        target,
        u(11).detach(),
        -100,
        0.1,
        expect=("S0,S0,R->P", "S1,R,R->R@vocab_cross_entropy"),
    )
    add(
        "cross_entropy_nd",
        ce,
        f(4, 11, 5),
        i(11, 4, 5),
        None,
        -100,
        0.0,
        expect=("S0,S0->P", "S2,S1->P", "S1,R->R@vocab_cross_entropy"),
    )
    add("cross_entropy_soft", ce, f(8, 11), u(8, 11).detach(), None, -100, 0.0, expect="S0,S0->P")
    add(
        "cross_entropy_rows",
        aten.cross_entropy_loss.default,
        f(4, 11, 5),
        i(11, 4, 5),
        None,
        0,
        expect="S2,S1->S1",
    )
    add(
        "nll_rows",
        aten.nll_loss_nd.default,
        f(8, 11),
        i(11, 8),
        u(11).detach(),
        0,
        expect="S0,S0,R->S0",
    )
    add("nll_sum", ops.nll_sum, f(8, 11), i(11, 8), None, -100, expect="S0,S0->P")
    add(
        "target_weight_sum",
        ops.target_weight_sum,
        target,
        u(11).detach(),
        -100,
        torch.float64,
        expect="S0,R->P",
    )
    add(
        "target_count",
        ops.target_weight_sum,
        i(11, 4, 5),
        None,
        3,
        torch.float64,
        expect=("S0->P", "S1->P"),
    )
    losses = (
        aten.mse_loss,
        aten.l1_loss,
        aten.smooth_l1_loss,
        aten.huber_loss,
        aten.binary_cross_entropy,
        aten.kl_div,
    )
    for packet in losses:
        weight = (None,) if packet is aten.binary_cross_entropy else ()
        kinds = ((0, "S0,S0->S0"), (1, "S0,S0->P@fraction"), (2, "S1,S1->P"))
        for kind, expect in kinds:
            add(
                f"{packet}_{kind}",
                packet.default,
                u(4, 5),
                u(4, 5).detach(),
                *weight,
                kind,
                expect=expect,
            )
    bce = aten.binary_cross_entropy_with_logits.default
    add(
        "bce_logits_mean", bce, f(4, 5), u(4, 5).detach(), None, None, 1, expect="S0,S0->P@fraction"
    )
    add(
        "bce_logits_weight",
        bce,
        f(4, 5),
        u(4, 5).detach(),
        u(4, 1).detach(),
        u(5).detach(),
        2,
        expect=("S0,S0,S0,R->P", "S1,S1,R,S0->P"),
    )


CASES = {case.name: case for case in _cases()}
