"""Rule cases of pointwise ops, reductions and losses."""

from __future__ import annotations

import torch
from rule_data import Add, aten, c, f, i, m, u

from alpa_strategy.capture import ops


def arithmetic_cases(add: Add) -> None:
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


def unary_cases(add: Add) -> None:
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


def mask_cases(add: Add) -> None:
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


def other_pointwise_cases(add: Add) -> None:
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


def reduction_cases(add: Add) -> None:
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


def cross_entropy_cases(add: Add) -> None:
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


def nll_cases(add: Add) -> None:
    target = i(11, 8)
    target[3] = -100
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


def elementwise_loss_cases(add: Add) -> None:
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
