"""More rules in index notation: matrices in batches, images, losses over rows, recurrent networks, Fourier transforms.

What they have in common: most dims are the op's own business (`i!`), and those in front of them are independent.
"""

from __future__ import annotations

from collections.abc import Callable

from alpa_strategy.ir.op import OpCall, Slot
from alpa_strategy.sharding.binding import bind

_MATRIX, _VECTOR, _NUMBER = "[*b, i!, j!]", "[*b, i!]", "[*b]"
_OTHER_MATRIX, _THIRD_MATRIX = "[*b, k!, l!]", "[*b, m!, n!]"
_COLUMNS = "[*b, j!, c]"  # right-hand sides: every column is solved by itself


def _lines(names: str, line: str) -> dict[str, str]:
    return {f"aten.{name}": line for name in names.split()}


MATRICES: dict[str, str] = {
    **_lines("linalg_cholesky cholesky cholesky_inverse linalg_inv matrix_exp", f"{_MATRIX} -> {_MATRIX}"),
    **_lines("linalg_matrix_power", f"{_MATRIX} -> {_MATRIX}"),
    **_lines("pinverse", f"{_MATRIX} -> [*b, j!, i!]"),
    **_lines("linalg_pinv", f"{_MATRIX}, {_NUMBER}?, {_NUMBER}? -> [*b, j!, i!]"),
    **_lines("linalg_det logdet linalg_cond", f"{_MATRIX} -> {_NUMBER}"),
    **_lines("linalg_matrix_rank", f"{_MATRIX}, {_NUMBER}?, {_NUMBER}? -> {_NUMBER}"),
    **_lines("linalg_slogdet", f"{_MATRIX} -> {_NUMBER}, {_NUMBER}"),
    **_lines("linalg_eigvals linalg_eigvalsh linalg_svdvals", f"{_MATRIX} -> [*b, k!]"),
    **_lines("linalg_eig linalg_eigh", f"{_MATRIX} -> {_VECTOR}, {_MATRIX}"),
    **_lines("linalg_svd svd", f"{_MATRIX} -> {_OTHER_MATRIX}, [*b, r!], {_THIRD_MATRIX}"),
    **_lines("linalg_qr qr", f"{_MATRIX} -> {_OTHER_MATRIX}, {_THIRD_MATRIX}"),
    **_lines("linalg_lu", f"{_MATRIX} -> [*b, p!, q!], {_OTHER_MATRIX}, {_THIRD_MATRIX}"),
    **_lines("lu_unpack", f"{_MATRIX}, [*b, r!] -> [*b, p!, q!], {_OTHER_MATRIX}, {_THIRD_MATRIX}"),
    **_lines("linalg_lu_factor linalg_ldl_factor geqrf", f"{_MATRIX} -> {_MATRIX}, [*b, r!]"),
    **_lines("linalg_lu_factor_ex linalg_ldl_factor_ex _lu_with_info", f"{_MATRIX} -> {_MATRIX}, [*b, r!], {_NUMBER}"),
    **_lines("linalg_cholesky_ex linalg_inv_ex", f"{_MATRIX} -> {_MATRIX}, {_NUMBER}"),
    **_lines("cholesky_solve", f"{_COLUMNS}, {_MATRIX} -> {_COLUMNS}"),
    **_lines("lu_solve", f"{_COLUMNS}, {_MATRIX}, [*b, r!] -> {_COLUMNS}"),
    **_lines("linalg_ldl_solve", f"{_MATRIX}, [*b, r!], {_COLUMNS} -> {_COLUMNS}"),
    **_lines("linalg_householder_product", f"{_MATRIX}, [*b, r!] -> {_MATRIX}"),
    **_lines("ormqr", f"{_MATRIX}, [*b, r!], {_OTHER_MATRIX} -> {_OTHER_MATRIX}"),
    **_lines("triangular_solve", f"{_OTHER_MATRIX}, {_MATRIX} -> {_OTHER_MATRIX}, {_MATRIX}"),
    **_lines("cdist", "[*b, p, m!], [*b, q, m!] -> [*b, p, q]"),
    **_lines("bilinear", "[*b, i], [*b, j], [o, i, j], +[o]? -> [*b, o]"),
}


def solve(call: OpCall, axis_size: int) -> str:
    """linalg_solve: right-hand sides may be vectors, as told by the ranks; solve_ex also says how it went."""
    matrix, right = (call.operands[bind(call)[name].index].shape for name in ("A", "B"))
    told = f", {_NUMBER}" if len(call.results) > 1 else ""
    if len(right) == 1 or right == matrix[:-1]:
        return f"{_MATRIX}, {_VECTOR} -> {_VECTOR}{told}"
    columns = _COLUMNS if bind(call)["left"] else "[*b, c, j!]"
    return f"{_MATRIX}, {columns} -> {columns}{told}"


def solve_triangular(call: OpCall, axis_size: int) -> str:
    """linalg_solve_triangular: matrix, right-hand sides."""
    columns = _COLUMNS if bind(call)["left"] else "[*b, c, j!]"
    return f"{_MATRIX}, {columns} -> {columns}"


def lu_solve(call: OpCall, axis_size: int) -> str:
    """linalg_lu_solve: factors, pivots, right-hand sides."""
    columns = _COLUMNS if bind(call)["left"] else "[*b, c, j!]"
    return f"{_MATRIX}, [*b, r!], {columns} -> {columns}"


_PLACES = {1: "w!", 2: "h!, w!", 3: "d!, h!, w!"}


def _image(num_dims: int) -> str:
    return f"[*b, {_PLACES[num_dims]}]"


IMAGES: dict[str, str] = {
    **{
        f"aten.{name}": f"{_image(n)} -> {_image(n)}"
        for n, names in (
            (1, "upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d reflection_pad1d replication_pad1d"),
            (2, "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d"),
            (2, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d replication_pad2d"),
            (3, "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d reflection_pad3d replication_pad3d"),
        )
        for name in names.split()
    },
    **{
        f"aten.{kind}{n}d{suffix}": f"{_image(n)} -> {_image(n)}, {_image(n)}"
        for n in (1, 2, 3)
        for kind, suffix in (("max_pool", "_with_indices"), ("adaptive_max_pool", ""))
    },
    **{f"aten.max_unpool{n}d": f"{_image(n)}, {_image(n)} -> {_image(n)}" for n in (2, 3)},
    **{
        f"aten.max_pool{n}d_with_indices_backward": f"[*b, {_PLACES[n]}], [*b, x!, y!{', z!' * (n - 2)}], "
        f"[*b, {_PLACES[n]}] -> [*b, x!, y!{', z!' * (n - 2)}]"
        for n in (2, 3)
    },
    **{
        f"aten.fractional_max_pool{n}d": f"[n, c, *s!], [n, c, r!] -> [n, c, {_PLACES[n]}], [n, c, {_PLACES[n]}]"
        for n in (2, 3)
    },
    **_lines("grid_sampler grid_sampler_2d grid_sampler_3d", "[n, c, *s!], [n, *p, t!] -> [n, c, *p]"),
    **_lines("im2col", "[n, c!, h!, w!] -> [n, k!, l!]"),
    **_lines("col2im", "[n, k!, l!] -> [n, c!, h!, w!]"),
    **_lines("pixel_shuffle pixel_unshuffle channel_shuffle", "[*b, c!, h!, w!] -> [*b, c!, h!, w!]"),
}


def _over_rows(*operands: str) -> Callable[[OpCall, int], str]:
    """The line of a loss over rows, whose index is `n` in `operands`: a number for each, or their sum or mean."""

    def line(call: OpCall, axis_size: int) -> str:
        reduction = bind(call)["reduction"]
        row = "n@fraction" if reduction == 1 else "n"
        terms = [term.replace("n", row) for term in operands]
        return f"{', '.join(terms)} -> {'[n]' if reduction == 0 else '[]'}"

    return line


ROW_LOSSES = {
    "aten.cosine_embedding_loss": _over_rows("[n, c!]", "[n, c!]", "[n]"),
    "aten.triplet_margin_loss": _over_rows("[n, c!]", "[n, c!]", "[n, c!]"),
    "aten.multi_margin_loss": _over_rows("[n, c!]", "[n]", "[c!]?"),
    "aten.multilabel_margin_loss": _over_rows("[n, c!]", "[n, c!]"),
}


def recurrent(call: OpCall, axis_size: int) -> str:
    """lstm, gru, rnn: the samples of a batch are independent, given their initial states; weights are whole."""
    bound = bind(call)
    batched = len(call.operands[bound["input"].index].shape) == 3
    if "batch_sizes" in bound:  # packed sequences: rows of many samples, interleaved
        return "[never!] -> []"
    states = bound["hx"] if isinstance(bound["hx"], tuple) else (bound["hx"],)
    outer = "[t!, i!]" if not batched else "[b, t!, i!]" if bound["batch_first"] else "[t!, b, i!]"
    result = outer.replace("i!", "o!")
    hidden = [f"[l!, b, h{k}!]" if batched else f"[l!, h{k}!]" for k in range(len(states))]
    weights = [
        "[" + ", ".join(f"w{k}d{d}!" for d in range(len(call.operands[slot.index].shape))) + "]"
        for k, slot in enumerate(bound["params"])
    ]
    return f"{', '.join([outer, *hidden, *weights])} -> {', '.join([result, *hidden])}"


def cell(call: OpCall, axis_size: int) -> str:
    """lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell: samples are independent."""
    bound = bind(call)
    states = bound["hx"] if isinstance(bound["hx"], tuple) else (bound["hx"],)
    batch = "b, " if len(call.operands[bound["input"].index].shape) == 2 else ""
    hidden = [f"[{batch}h{k}!]" for k in range(len(states))]
    operands = [f"[{batch}i!]", *hidden, "[g!, i!]", "[g!, h0!]", "[g!]?", "[g!]?"]
    return f"{', '.join(operands)} -> {', '.join(hidden[: len(call.results)])}"


def searchsorted(call: OpCall, axis_size: int) -> str:
    """Every value is looked up by itself: in one sorted sequence, or in that of its own row."""
    sequence = bind(call)["sorted_sequence"]
    if len(call.operands[sequence.index].shape) == 1:
        return "[s!], [*b], [s!]? -> [*b]"
    return "[*b, s!], [*b, v], [*b, s!]? -> [*b, v]"


def embedding_bag(call: OpCall, axis_size: int) -> str:
    """Columns of the table are independent; `max` (mode 2) also says from which row each element came."""
    bound = bind(call)
    rows_of_maxima = "[m!, d]" if bound["mode"] == 2 and len(call.results[3].shape) == 2 else "[m!]"
    weights = ", [i!]" if isinstance(bound["per_sample_weights"], Slot) else ""
    return f"[v!, d], [i!], [o!]{weights} -> [o!, d], [x!], [y!], {rows_of_maxima}"


RECURRENT = {
    **{f"aten.{name}.input": recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"aten.{name}": cell for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")},
}

LOOKUPS = {
    "aten.searchsorted.Tensor": searchsorted,
    "aten.embedding_bag": embedding_bag,
    "aten.isin.Tensor_Tensor": "[*b], [*s!] -> [*b]",
    "aten.take": "[*s!], [*i] -> [*i]",
    "aten.multinomial": "[*b, c!] -> [*b, n!]",
    "aten.linalg_solve": solve,
    "aten.linalg_solve_ex": solve,
    "aten.linalg_solve_triangular": solve_triangular,
    "aten.linalg_lu_solve": lu_solve,
}

BATCHED: dict[str, str | Callable[[OpCall, int], str]] = {**MATRICES, **IMAGES, **ROW_LOSSES, **RECURRENT, **LOOKUPS}
