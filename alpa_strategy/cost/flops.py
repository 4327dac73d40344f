"""FLOPs and bytes moved of one op call, forward and backward, from its shapes alone.

There are formulas for matmuls, convolutions and attention. Every other op is assumed to be bound by
the memory that it reads and writes. Fusions are not modelled. Views move nothing.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from alpa_strategy.ir.op import DerivedTarget, OpCall, TensorMeta, bind
from alpa_strategy.ir.per_rank import PerRank


@dataclass(frozen=True)
class Work:
    """The work of one direction of an op."""

    flops: float = 0.0
    # bytes read and written
    num_bytes: float = 0.0
    # number of kernels launched
    kernels: int = 0


NOTHING = Work()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Views whose backward is a view as well.
PLAIN_VIEWS = _names(
    "view reshape _unsafe_view transpose permute t squeeze unsqueeze flatten unflatten movedim"
    " moveaxis swapaxes swapdims view_as reshape_as alias detach detach_ lift_fresh lift_fresh_copy"
    " ravel mT mH T adjoint numpy_T matrix_H view_as_real view_as_complex real imag getitem"
    " sym_size _reshape_alias result_type positive"
)
# Views whose backward fills or sums a tensor of the operand's shape.
PART_VIEWS = _names(
    "slice select split split_with_sizes chunk narrow unbind tensor_split diagonal unfold"
    " as_strided expand expand_as broadcast_to hsplit vsplit dsplit"
)
# Views of either kind that copy if the strides require it.
MAY_COPY = _names("reshape _unsafe_view flatten ravel reshape_as lift_fresh_copy")
CASTS = _names("to _to_copy type_as float half bfloat16 double")
DROPOUTS = _names("dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout")
GATHERS = _names("embedding bag_lookup index_select gather index take_along_dim take")
# Ops whose gradient needs neither operands nor results, and is a view,
FREE_BACKWARD = _names("add sub cat concat concatenate stack sum hstack vstack")
# or one pass over the operand.
LINEAR = _names(
    "neg mean clone contiguous mul_scalar div_scalar where masked_fill constant_pad_nd pad flip"
    " roll"
)
# Extra passes over the largest operand, (forward, backward), of ops that run several kernels.
EXTRA_PASSES = {
    "cross_entropy_sum": (1, 2),
    "cross_entropy_loss": (1, 2),
    "batch_norm_train": (1, 1),
    "batch_norm": (1, 1),
}


def op_base_name(call: OpCall) -> str:
    """Return the op's name without namespace and overload: `linear`, `cross_entropy_sum`."""
    target = call.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    if isinstance(target, DerivedTarget):
        return target.name
    return target.__name__


def is_view(call: OpCall) -> bool:
    """Whether the forward reads no elements: views, casts to the same dtype, inactive dropout."""
    if isinstance(call.target, PerRank):
        # The slices of a single rank are views, those of several are copied into one tensor.
        return call.target.num_ranks == 1 and is_view(call.target.inner)
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
    """Whether forward and backward read no elements: the gradient is a view as well."""
    return op_base_name(call) in PLAIN_VIEWS


def op_flops(call: OpCall) -> float:
    """Return the FLOPs of the forward.

    2 per multiply-add of matmuls, convolutions and attention; 0 for views; else 1 per result
    element.
    """
    if isinstance(call.target, PerRank):
        return call.target.num_ranks * op_flops(call.target.inner)
    if is_view(call):
        return 0.0
    formula = PRODUCTS.get(op_base_name(call))
    if formula is not None:
        return formula(call)
    return float(sum(meta.num_elements for meta in call.results))


def of_one_rank(call: OpCall) -> OpCall:
    """Return the call that an op of each rank runs on the samples of one; other calls as they
    are.
    """
    return call.target.inner if isinstance(call.target, PerRank) else call


def product_kind(call: OpCall) -> str | None:
    """Return `matmul`, `convolution` or `attention`; None for ops that do not multiply and add."""
    name = op_base_name(of_one_rank(call))
    if name in ATTENTION:
        return "attention"
    if name in CONVOLUTIONS:
        return "convolution"
    if name in PRODUCTS:
        return "matmul"
    return None


def product_shape(call: OpCall) -> tuple[int, int, int, int] | None:
    """Return (batches, rows, inner, columns) of a matmul; None for other ops, and for vectors.

    Of the matmuls that run one after the other for each rank: those of one rank.
    """
    call = of_one_rank(call)
    name = op_base_name(call)
    if name not in LINEARS and name not in MATRIX_PRODUCTS:
        return None
    result = call.results[0].shape
    inner = call.operands[0].shape[-1]
    if len(result) < 2:
        return None
    if name in LINEARS:
        return 1, math.prod(result[:-1]), inner, result[-1]
    return math.prod(result[:-2]), result[-2], inner, result[-1]


def op_work(call: OpCall) -> tuple[Work, Work]:
    """Return the (forward, backward) work of `call` at its local shapes.

    No backward if nothing requires grad.
    """
    if isinstance(call.target, PerRank):
        forward, backward = op_work(call.target.inner)
        return _repeated(forward, call.target.num_ranks), _repeated(backward, call.target.num_ranks)

    name = op_base_name(call)
    grads = [meta for meta in call.operands if meta.requires_grad]
    if not any(meta.requires_grad for meta in call.results):
        grads = []
    if is_view(call):
        return NOTHING, _view_backward(call, name, grads)
    flops = op_flops(call)
    if name in PRODUCTS:
        return _product_work(call, name, flops, grads)
    if name in GATHERS:
        return _gather_work(call, flops, grads)

    extra_forward, extra_backward = EXTRA_PASSES.get(name, (0, 0))
    operand_bytes = _bytes_of(call.operands)
    result_bytes = _bytes_of(call.results)
    largest = max((meta.num_bytes for meta in call.operands), default=0)
    moved = operand_bytes + result_bytes + extra_forward * largest
    forward = Work(flops, moved, 1 + extra_forward)
    if not grads:
        return forward, NOTHING
    if name in FREE_BACKWARD:
        return forward, _free_backward(call, name, grads)
    reads_no_operand = name in LINEAR or name in CASTS or name in DROPOUTS
    saved_bytes = 0 if reads_no_operand else operand_bytes
    moved = result_bytes + _bytes_of(grads) + saved_bytes + extra_backward * largest
    return forward, Work(flops, moved, 1 + extra_backward)


def _repeated(work: Work, times: int) -> Work:
    return Work(times * work.flops, times * work.num_bytes, times * work.kernels)


def _bytes_of(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas)


def _view_backward(call: OpCall, name: str, grads: list[TensorMeta]) -> Work:
    """Return the work of a view's backward: none, but the gradient of a slice is written to a
    tensor of the operand's shape.

    Args:
        name: of the op.
        grads: the gradients that the backward computes; none: no work.
    """
    if not grads or name not in PART_VIEWS:
        return NOTHING
    return Work(0.0, _bytes_of(call.results) + _bytes_of(grads), 1)


def _gather_work(call: OpCall, flops: float, grads: list[TensorMeta]) -> tuple[Work, Work]:
    """Return the work of forward and backward of an op that reads rows by index: in the backward
    they are added to a gradient of zeros.

    Args:
        flops: of the forward.
        grads: the gradients that the backward computes; none: no backward.
    """
    result_bytes = _bytes_of(call.results)
    index_bytes = _bytes_of(call.operands[1:])
    forward = Work(flops, 2 * result_bytes + index_bytes, 1)
    if not grads:
        return forward, NOTHING
    return forward, Work(flops, _bytes_of(grads) + 3 * result_bytes + index_bytes, 2)


def _free_backward(call: OpCall, name: str, grads: list[TensorMeta]) -> Work:
    """Return the work of a backward that passes the gradient on: that of a broadcast operand is
    summed over the dims that it lacks.

    Args:
        name: of the op.
        grads: the gradients that the backward computes.
    """
    summed = []
    if name in ("add", "sub"):
        num_elements = math.prod(call.results[0].shape)
        summed = [meta for meta in grads if meta.num_elements < num_elements]
    if not summed:
        return NOTHING
    return Work(0.0, _bytes_of(call.results) + _bytes_of(summed), 1)


def _product_work(
    call: OpCall, name: str, flops: float, grads: list[TensorMeta]
) -> tuple[Work, Work]:
    """(forward, backward) work of matmuls, convolutions and attention.

    Args:
        flops: of the forward.
        grads: operands that get a gradient.
    """
    operand_bytes = _bytes_of(call.operands)
    result_bytes = _bytes_of(call.results)
    forward = Work(flops, operand_bytes + result_bytes, 1)
    if not grads:
        return forward, NOTHING
    if name in ATTENTION:
        # It recomputes the scores: five matmuls against two (FlashAttention, section 3.1).
        return forward, Work(2.5 * flops, 2 * (operand_bytes + result_bytes), 2)
    takes_vectors = name in ("dot", "mv", "vdot", "matmul", "einsum")
    factors: list[TensorMeta] = []
    biases: list[TensorMeta] = []
    for position, meta in enumerate(call.operands):
        if not meta.requires_grad:
            continue
        # The bias of a fused projection has two dims: a row for each segment.
        is_bias = name in LINEARS and position == 2
        is_matrix = len(meta.shape) > 1 and not is_bias
        if takes_vectors or is_matrix:
            factors.append(meta)
        else:
            biases.append(meta)
    # A matmul per factor that requires grad, of the result's gradient and the other factor. The
    # gradient of a bias is a sum over the result's.
    moved = len(grads) * result_bytes + len(factors) * operand_bytes + _bytes_of(biases)
    return forward, Work(len(factors) * flops, moved, len(grads))


def _contraction(call: OpCall, factor: int = 0) -> float:
    """FLOPs of a contraction of the last dim of the operand `factor`."""
    shape = call.operands[factor].shape
    return 2.0 * call.results[0].num_elements * (shape[-1] if shape else 1)


def _convolution(call: OpCall) -> float:
    """Return the FLOPs of a convolution, two for each multiply-add."""
    weight = call.operands[1]
    transposed = op_base_name(call).startswith("conv_transpose") or (
        op_base_name(call) in ("convolution", "_convolution") and bind(call)["transposed"]
    )
    moved = call.operands[0] if transposed else call.results[0]
    return 2.0 * moved.num_elements * math.prod(weight.shape[1:])


def _attention(call: OpCall) -> float:
    """Return the FLOPs of scaled dot product attention, half if causal."""
    query, key, value = call.operands[:3]
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    causal = bind(call)["is_causal"]
    return 2.0 * scores * (query.shape[-1] + value.shape[-1]) * (0.5 if causal is True else 1.0)


def _einsum(call: OpCall) -> float:
    """Return the FLOPs of an einsum as one loop over all indices: 2 for each combination.

    Exact for two operands, an upper bound of the best order for more.
    """
    left, _, _ = str(call.args[0]).replace(" ", "").partition("->")
    letters = "".join(sorted(set(left) - set(".,")))
    all_indices = f"...{letters}" if "..." in left else letters
    operands = []
    for slot in call.args[1]:
        operands.append(torch.empty(call.operands[slot.index].shape, device="meta"))
    return 2.0 * torch.einsum(f"{left}->{all_indices}", *operands).numel()


def _grouped(call: OpCall) -> float:
    """Return the FLOPs of matmuls of groups of rows, each with a matrix of its own.

    A device that stores some of the groups is assumed to compute the same share of the rows.
    """
    rows, matrices, group_sizes = call.operands[:3]
    num_rows, width = rows.shape
    num_local_groups, _, num_columns = matrices.shape
    (num_groups,) = group_sizes.shape
    return 2.0 * num_rows * width * num_columns * num_local_groups / max(num_groups, 1)


ATTENTION = _names(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention"
    " _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention"
)
CONVOLUTIONS = _names(
    "convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d"
    " conv_transpose3d"
)
LINEARS = ("linear", "segmented_linear")
MATRIX_PRODUCTS = ("mm", "bmm", "matmul")
# op -> FLOPs of its forward
PRODUCTS: dict[str, Callable[[OpCall], float]] = {
    **dict.fromkeys((*LINEARS, *MATRIX_PRODUCTS, "mv", "dot", "vdot", "_grouped_mm"), _contraction),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "addbmm"), partial(_contraction, factor=1)),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(ATTENTION, _attention),
    "einsum": _einsum,
    "grouped_mm": _grouped,
}
