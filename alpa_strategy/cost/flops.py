"""What one op call has to do: FLOPs and bytes moved, forward and backward, from its shapes alone.

Formulas for products, convolutions and attention; every other op is taken to be bound by the memory
that it touches. Fusions are not modelled. Views move nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from alpa_strategy.ir.op import OpCall, TensorMeta, bind


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes read and written, and kernels started."""

    flops: float = 0.0
    num_bytes: float = 0.0
    kernels: int = 0


NOTHING = Work()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Metadata only. Of these, the backward of the second set fills or sums a tensor of the operand's
# shape.
PLAIN_VIEWS = _names(
    "view reshape _unsafe_view transpose permute t squeeze unsqueeze flatten unflatten movedim"
    " moveaxis swapaxes "
    "swapdims view_as reshape_as alias detach detach_ lift_fresh lift_fresh_copy ravel mT mH T"
    " adjoint numpy_T "
    "matrix_H view_as_real view_as_complex real imag getitem sym_size _reshape_alias result_type"
    " positive"
)
PART_VIEWS = _names(
    "slice select split split_with_sizes chunk narrow unbind tensor_split diagonal unfold"
    " as_strided expand expand_as "
    "broadcast_to hsplit vsplit dsplit"
)
MAY_COPY = _names(
    "reshape _unsafe_view flatten ravel reshape_as lift_fresh_copy"
)  # of both, where strides ask for it
CASTS = _names("to _to_copy type_as float half bfloat16 double")
DROPOUTS = _names("dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout")
GATHERS = _names("embedding bag_lookup index_select gather index take_along_dim take")
# Their gradient needs neither operands nor results, and is a view (first) or one pass over the
# operand (second).
FREE_BACKWARD = _names("add sub cat concat concatenate stack sum hstack vstack")
LINEAR = _names(
    "neg mean clone contiguous mul_scalar div_scalar where masked_fill constant_pad_nd pad flip"
    " roll"
)
# Whole extra passes over the largest operand, (forward, backward), of ops made of several kernels.
EXTRA_PASSES = {
    "cross_entropy_sum": (1, 2),
    "cross_entropy_loss": (1, 2),
    "batch_norm_train": (1, 1),
    "batch_norm": (1, 1),
}


def op_base_name(call: OpCall) -> str:
    """The op's name without namespace and overload: `linear`, `cross_entropy_sum`."""
    target = call.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return target.__name__


def is_view(call: OpCall) -> bool:
    """True when the forward touches no elements: views, casts to the same dtype, dropout that drops
    nothing.
    """
    name = op_base_name(call)
    if name in PLAIN_VIEWS or name in PART_VIEWS:
        return True
    if not call.operands or not call.results:
        return False
    if name in CASTS:
        return call.operands[0].dtype == call.results[0].dtype
    if name in DROPOUTS:
        return bind(call).get("p") == 0.0 or bind(call).get("train") is False
    return False


def is_plain_view(call: OpCall) -> bool:
    """True when neither the forward nor the backward touches elements: the gradient is a view as
    well.
    """
    return op_base_name(call) in PLAIN_VIEWS


def op_flops(call: OpCall) -> float:
    """FLOPs of the forward: 2 per multiply-add for products, one per result element otherwise, 0
    for views.
    """
    if is_view(call):
        return 0.0
    formula = PRODUCTS.get(op_base_name(call))
    if formula is not None:
        return formula(call)
    return float(sum(meta.num_elements for meta in call.results))


def product_kind(call: OpCall) -> str | None:
    """`matmul`, `convolution` or `attention`: ops bound by multiply-adds when they are large; None
    for others.
    """
    name = op_base_name(call)
    if name in ATTENTION:
        return "attention"
    if name in CONVOLUTIONS:
        return "convolution"
    if name in PRODUCTS:
        return "matmul"
    return None


def product_shape(call: OpCall) -> tuple[int, int, int, int] | None:
    """(batches, rows, inner, columns) of a product of matrices; None for other ops, and where they
    cannot be told.
    """
    name = op_base_name(call)
    if name not in LINEARS and name not in MATRIX_PRODUCTS:
        return None
    result, inner = call.results[0].shape, call.operands[0].shape[-1]
    if len(result) < 2:
        return None
    if name in LINEARS:
        return 1, math.prod(result[:-1]), inner, result[-1]
    return math.prod(result[:-2]), result[-2], inner, result[-1]


def op_work(call: OpCall) -> tuple[Work, Work]:
    """(forward, backward) work of `call` at its own shapes; no backward where nothing requires
    grad.
    """
    name = op_base_name(call)
    grads = [meta for meta in call.operands if meta.requires_grad]
    results = sum(meta.num_bytes for meta in call.results)
    operands = sum(meta.num_bytes for meta in call.operands)
    differentiable = bool(grads) and any(meta.requires_grad for meta in call.results)
    grad_bytes = sum(meta.num_bytes for meta in grads)
    if is_view(call):
        backward = (
            Work(0.0, results + grad_bytes, 1) if differentiable and name in PART_VIEWS else NOTHING
        )
        return NOTHING, backward
    flops = op_flops(call)
    if name in PRODUCTS:
        return _product_work(call, name, flops, grads if differentiable else [])
    extra_forward, extra_backward = EXTRA_PASSES.get(name, (0, 0))
    largest = max((meta.num_bytes for meta in call.operands), default=0)
    if name in GATHERS:
        indices = sum(meta.num_bytes for meta in call.operands[1:])
        forward = Work(flops, 2 * results + indices, 1)
        backward = Work(flops, grad_bytes + 3 * results + indices, 2)
        return forward, backward if differentiable else NOTHING
    forward = Work(flops, operands + results + extra_forward * largest, 1 + extra_forward)
    if not differentiable:
        return forward, NOTHING
    if name in FREE_BACKWARD:  # passed on as it is; summed where it was broadcast
        shape = call.results[0].shape
        # A broadcast operand's gradient is summed over the dims that it lacks.
        summed = []
        if name in ("add", "sub"):
            summed = [meta for meta in grads if meta.num_elements < math.prod(shape)]
        if not summed:
            return forward, NOTHING
        return forward, Work(0.0, results + sum(meta.num_bytes for meta in summed), 1)
    reads_no_operand = name in LINEAR or name in CASTS or name in DROPOUTS
    kept = 0 if reads_no_operand else operands
    return forward, Work(
        flops, results + grad_bytes + kept + extra_backward * largest, 1 + extra_backward
    )


def _product_work(
    call: OpCall, name: str, flops: float, grads: list[TensorMeta]
) -> tuple[Work, Work]:
    operands = sum(meta.num_bytes for meta in call.operands)
    results = sum(meta.num_bytes for meta in call.results)
    forward = Work(flops, operands + results, 1)
    if not grads:
        return forward, NOTHING
    if name in ATTENTION:
        # It recomputes the scores: five matmuls against two (FlashAttention, section 3.1).
        return forward, Work(2.5 * flops, 2 * (operands + results), 2)
    takes_vectors = name in ("dot", "mv", "vdot", "matmul", "einsum")
    main: list[TensorMeta] = []
    biases: list[TensorMeta] = []
    for meta in grads:
        is_factor = takes_vectors or len(meta.shape) > 1
        (main if is_factor else biases).append(meta)
    # One product per operand that requires grad, of the result's gradient and the others; a bias'
    # is a sum over it.
    num_bytes = len(grads) * results + len(main) * operands + sum(meta.num_bytes for meta in biases)
    return forward, Work(len(main) * flops, num_bytes, len(grads))


def _contraction(call: OpCall, factor: int = 0) -> float:
    """Of the last dim of the operand `factor`."""
    shape = call.operands[factor].shape
    return 2.0 * call.results[0].num_elements * (shape[-1] if shape else 1)


def _convolution(call: OpCall) -> float:
    weight = call.operands[1]
    transposed = op_base_name(call).startswith("conv_transpose") or (
        op_base_name(call) in ("convolution", "_convolution") and bind(call)["transposed"]
    )
    moved = call.operands[0] if transposed else call.results[0]
    return 2.0 * moved.num_elements * math.prod(weight.shape[1:])


def _attention(call: OpCall) -> float:
    query, key, value = call.operands[:3]
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    causal = bind(call)["is_causal"]
    return 2.0 * scores * (query.shape[-1] + value.shape[-1]) * (0.5 if causal is True else 1.0)


def _einsum(call: OpCall) -> float:
    """Every index of the equation once: right for two operands, an upper bound of the best order
    for more.
    """
    left = str(call.args[0]).replace(" ", "").partition("->")[0]
    every = "..." * ("..." in left) + "".join(sorted(set(left) - set(".,")))
    operands = [
        torch.empty(call.operands[slot.index].shape, device="meta") for slot in call.args[1]
    ]
    return (
        2.0 * torch.einsum(f"{left}->{every}", *operands).numel()
    )  # a result that has all indices


def _grouped(call: OpCall) -> float:
    """Rows times matrices; a device that holds some of the groups is taken to hold as many of the
    rows.
    """
    (rows, width), (groups, _, columns), (all_groups,) = (meta.shape for meta in call.operands[:3])
    return 2.0 * rows * width * columns * groups / max(all_groups, 1)


ATTENTION = _names(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention"
    " _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention"
)
CONVOLUTIONS = _names(
    "convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d"
    " conv_transpose3d"
)
LINEARS, MATRIX_PRODUCTS = ("linear", "segmented_linear"), ("mm", "bmm", "matmul")
PRODUCTS: dict[str, Callable[[OpCall], float]] = {
    **dict.fromkeys((*LINEARS, *MATRIX_PRODUCTS, "mv", "dot", "vdot", "_grouped_mm"), _contraction),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "addbmm"), partial(_contraction, factor=1)),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(ATTENTION, _attention),
    "einsum": _einsum,
    "grouped_mm": _grouped,
}
