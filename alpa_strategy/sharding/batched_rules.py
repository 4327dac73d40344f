"""Rules in index notation of ops on batches: matrices, images, losses over samples and recurrent
networks.

Their inner dims cannot be sharded (`i!`); the dims before these are independent.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from alpa_strategy.ir.op import OpCall, Slot, TensorMeta, bind, slots

MATRIX = "[*b, i!, j!]"
_VECTOR = "[*b, i!]"
_NUMBER = "[*b]"
# Right-hand sides: every column is solved by itself.
_COLUMNS = "[*b, j!, c]"

Rule = TypeVar("Rule")
# A line, lines for several ranks, or a function of a call and the size of a mesh axis that returns
# the line; see `Notation`.
Lines = str | tuple[str, ...] | Callable[[OpCall, int], str]


def rule_for_each(names: str, rule: Rule) -> dict[str, Rule]:
    """Return `rule` for each of the ATen ops in `names`, separated by spaces."""
    return {f"aten.{name}": rule for name in names.split()}


def _batched_ops(names: str, inner: int) -> dict[str, Callable[[OpCall, int], str]]:
    """Rules of ops that work on the last `inner` dims of their first operand.

    The dims before them are batch dims, which all of the op's tensors have.
    """

    def line(call: OpCall, axis_size: int) -> str:
        first_rank = len(call.operands[slots(call)[0].index].shape)
        num_batch_dims = first_rank - inner

        def term(name: str, meta: TensorMeta) -> str:
            inner_dims = range(len(meta.shape) - num_batch_dims)
            inner_indices = [f"{name}d{dim}!" for dim in inner_dims]
            return f"[*b, {', '.join(inner_indices)}]"

        operands = []
        for i, slot in enumerate(slots(call)):
            operands.append(term(f"x{i}", call.operands[slot.index]))
        results = [term(f"y{i}", meta) for i, meta in enumerate(call.results)]
        return f"{', '.join(operands)} -> {', '.join(results)}"

    return rule_for_each(names, line)


def _solve(call: OpCall, axis_size: int, made_of: str = MATRIX, or_vectors: bool = False) -> str:
    """Rule of solvers: the matrix, then the right-hand sides.

    linalg_solve_ex has a second result, the status of each matrix.

    Args:
        made_of: terms of the matrix, or of its factors.
        or_vectors: whether the right-hand sides may be vectors (linalg_solve).
    """
    sides = _COLUMNS if bind(call)["left"] else "[*b, c, j!]"
    if or_vectors:
        bound = bind(call)
        matrix_shape = call.operands[bound["A"].index].shape
        right_shape = call.operands[bound["B"].index].shape
        if len(right_shape) == 1 or right_shape == matrix_shape[:-1]:
            sides = _VECTOR
    return f"{made_of}, {sides} -> {sides}" + f", {_NUMBER}" * (len(call.results) - 1)


_POOLS = (
    "max_pool{n}d max_pool{n}d_with_indices avg_pool{n}d adaptive_avg_pool{n}d"
    " _adaptive_avg_pool{n}d "
    "adaptive_max_pool{n}d max_unpool{n}d max_pool{n}d_with_indices_backward upsample_nearest{n}d "
    "_upsample_nearest_exact{n}d reflection_pad{n}d replication_pad{n}d"
)


def _over_rows(*operands: str) -> Callable[[OpCall, int], str]:
    """Rule of a loss over samples: a number for each, or their sum or mean.

    Args:
        operands: terms in which `n` is the index of the samples.
    """

    def line(call: OpCall, axis_size: int) -> str:
        reduction = bind(call)["reduction"]
        row = "n@fraction" if reduction == 1 else "n"
        terms = [term.replace("n", row) for term in operands]
        result = "[n]" if reduction == 0 else "[]"
        return f"{', '.join(terms)} -> {result}"

    return line


def recurrent(call: OpCall, axis_size: int) -> str:
    """Rule of lstm, gru, rnn: the samples of a batch are independent; weights are not sharded.

    Packed sequences, and a sequence without a batch, are not sharded at all.
    """
    bound = bind(call)
    batched = len(call.operands[bound["input"].index].shape) == 3
    if "batch_sizes" in bound:
        # Packed sequences: steps of many samples, interleaved.
        return "[never!] -> []"
    states = bound["hx"] if isinstance(bound["hx"], tuple) else (bound["hx"],)
    # input [t, b, i] or, batch first, [b, t, i]; states [l, b, h]
    if not batched:
        outer = "[t!, i!]"
    elif bound["batch_first"]:
        outer = "[b, t!, i!]"
    else:
        outer = "[t!, b, i!]"
    result = outer.replace("i!", "o!")
    batch_index = "b, " if batched else ""
    hidden = [f"[l!, {batch_index}h{k}!]" for k in range(len(states))]
    weights = []
    for k, slot in enumerate(bound["params"]):
        rank = len(call.operands[slot.index].shape)
        indices = [f"w{k}d{d}!" for d in range(rank)]
        weights.append(f"[{', '.join(indices)}]")
    return f"{', '.join([outer, *hidden, *weights])} -> {', '.join([result, *hidden])}"


def embedding_bag(call: OpCall, axis_size: int) -> str:
    """Rule of embedding_bag: columns of the table are independent.

    `max` (mode 2) also returns from which row each element came.
    """
    bound = bind(call)
    has_rows_of_maxima = bound["mode"] == 2 and len(call.results[3].shape) == 2
    rows_of_maxima = "[m!, d]" if has_rows_of_maxima else "[m!]"
    weights = ", [i!]" if isinstance(bound["per_sample_weights"], Slot) else ""
    return f"[v!, d], [i!], [o!]{weights} -> [o!, d], [x!], [y!], {rows_of_maxima}"


_CELL_WEIGHTS = "[g!, i!], [g!, h!], [g!]?, [g!]?"

BATCHED: dict[str, Lines] = {
    # Matrices.
    **_batched_ops(
        "linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse linalg_inv linalg_inv_ex"
        " inverse matrix_exp",
        2,
    ),
    **_batched_ops(
        "linalg_matrix_power linalg_det det logdet linalg_slogdet slogdet linalg_cond linalg_svd"
        " svd linalg_qr qr",
        2,
    ),
    **_batched_ops(
        "linalg_eigvals linalg_eigvalsh linalg_svdvals linalg_eig linalg_eigh linalg_lu lu_unpack",
        2,
    ),
    **_batched_ops(
        "linalg_lu_factor linalg_ldl_factor geqrf linalg_lu_factor_ex linalg_ldl_factor_ex"
        " _lu_with_info",
        2,
    ),
    **_batched_ops("linalg_householder_product ormqr triangular_solve pinverse", 2),
    **rule_for_each("linalg_pinv", f"{MATRIX}, {_NUMBER}?, {_NUMBER}? -> [*b, j!, i!]"),
    **rule_for_each("linalg_matrix_rank", f"{MATRIX}, {_NUMBER}?, {_NUMBER}? -> {_NUMBER}"),
    **rule_for_each("cholesky_solve", f"{_COLUMNS}, {MATRIX} -> {_COLUMNS}"),
    **rule_for_each("lu_solve", f"{_COLUMNS}, {MATRIX}, [*b, r!] -> {_COLUMNS}"),
    **rule_for_each("linalg_ldl_solve", f"{MATRIX}, [*b, r!], {_COLUMNS} -> {_COLUMNS}"),
    **rule_for_each("cdist", "[*b, p, m!], [*b, q, m!] -> [*b, p, q]"),
    **rule_for_each("bilinear", "[*b, i], [*b, j], [o, i, j], +[o]? -> [*b, o]"),
    **dict.fromkeys(
        ("aten.linalg_solve", "aten.linalg_solve_ex"), partial(_solve, or_vectors=True)
    ),
    "aten.linalg_solve_triangular": _solve,
    "aten.linalg_lu_solve": partial(_solve, made_of=f"{MATRIX}, [*b, r!]"),
    # Images.
    **_batched_ops(_POOLS.format(n=1), 1),
    **_batched_ops(_POOLS.format(n=2), 2),
    **_batched_ops(_POOLS.format(n=3), 3),
    **_batched_ops("upsample_linear1d", 1),
    **_batched_ops(
        "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
        " col2im",
        2,
    ),
    **_batched_ops("upsample_trilinear3d im2col pixel_shuffle pixel_unshuffle channel_shuffle", 3),
    "aten.fractional_max_pool2d": "[n, c, *s!], [n, c, r!] -> [n, c, h!, w!], [n, c, h!, w!]",
    "aten.fractional_max_pool3d": (
        "[n, c, *s!], [n, c, r!] -> [n, c, d!, h!, w!], [n, c, d!, h!, w!]"
    ),
    **rule_for_each(
        "grid_sampler grid_sampler_2d grid_sampler_3d", "[n, c, *s!], [n, *p, t!] -> [n, c, *p]"
    ),
    # Losses over samples, recurrent networks, and others.
    "aten.cosine_embedding_loss": _over_rows("[n, c!]", "[n, c!]", "[n]"),
    "aten.triplet_margin_loss": _over_rows("[n, c!]", "[n, c!]", "[n, c!]"),
    "aten.multi_margin_loss": _over_rows("[n, c!]", "[n]", "[c!]?"),
    "aten.multilabel_margin_loss": _over_rows("[n, c!]", "[n, c!]"),
    **{f"aten.{name}.input": recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    # One step of a recurrent network: samples are independent, if there are several.
    **rule_for_each(
        "gru_cell rnn_tanh_cell rnn_relu_cell", f"[*b, i!], [*b, h!], {_CELL_WEIGHTS} -> [*b, h!]"
    ),
    **rule_for_each(
        "lstm_cell", f"[*b, i!], [*b, h!], [*b, c!], {_CELL_WEIGHTS} -> [*b, h!], [*b, c!]"
    ),
    # Every value is looked up by itself: in one sorted sequence, or in that of its row.
    "aten.searchsorted.Tensor": (
        "[s!], [*b], [s!]? -> [*b]",
        "[*b, s!], [*b, v], [*b, s!]? -> [*b, v]",
    ),
    "aten.embedding_bag": embedding_bag,
    "aten.isin.Tensor_Tensor": "[*b], [*s!] -> [*b]",
    "aten.take": "[*s!], [*i] -> [*i]",
    **_batched_ops("multinomial", 1),
}
