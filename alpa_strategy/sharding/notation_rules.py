"""Rules in index notation, as data: op -> a line, or a function that picks the line from the call.

First come matrices in batches, images, losses over rows and recurrent networks: most of their dims
are the op's own business (`i!`), and those in front of them are independent. `NOTATION` at the end
holds all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from alpa_strategy.ir.op import InnerCollective, OpCall, Slot, bind, dims_of, slots
from alpa_strategy.sharding.notation import RuleMatch, Split, line_of, read, split_from_dims
from alpa_strategy.sharding.rule_families import EACH, FIRST, linear_sets

_MATRIX, _VECTOR, _NUMBER = "[*b, i!, j!]", "[*b, i!]", "[*b]"
_COLUMNS = "[*b, j!, c]"  # right-hand sides: every column is solved by itself
Rule = TypeVar("Rule")
Lines = str | tuple[str, ...] | Callable[[OpCall, int], str]  # see `Notation`


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


def _in_front(names: str, inner: int) -> dict[str, Callable[[OpCall, int], str]]:
    """Ops that work on the last `inner` dims of their first operand; what lies in front of them,
    all tensors have.
    """

    def line(call: OpCall, axis_size: int) -> str:
        num_front = len(call.operands[slots(call)[0].index].shape) - inner

        def term(name: str, shape: tuple[int, ...]) -> str:
            return f"[*b, {', '.join(f'{name}d{d}!' for d in range(len(shape) - num_front))}]"

        operands = [
            term(f"x{i}", call.operands[slot.index].shape) for i, slot in enumerate(slots(call))
        ]
        return (
            f"{', '.join(operands)} ->"
            f" {', '.join(term(f'y{i}', m.shape) for i, m in enumerate(call.results))}"
        )

    return _each(names, line)


def _solve(call: OpCall, axis_size: int, made_of: str = _MATRIX, or_vectors: bool = False) -> str:
    """Right-hand sides after what the matrix is made of, perhaps vectors (linalg_solve); solve_ex:
    how it went, too.
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
    """The line of a loss over rows, whose index is `n` in `operands`: a number for each, or their
    sum or mean.
    """

    def line(call: OpCall, axis_size: int) -> str:
        reduction = bind(call)["reduction"]
        row = "n@fraction" if reduction == 1 else "n"
        terms = [term.replace("n", row) for term in operands]
        return f"{', '.join(terms)} -> {'[n]' if reduction == 0 else '[]'}"

    return line


def recurrent(call: OpCall, axis_size: int) -> str:
    """lstm, gru, rnn: the samples of a batch are independent, given their initial states; weights
    are whole.
    """
    bound = bind(call)
    batched = len(call.operands[bound["input"].index].shape) == 3
    if "batch_sizes" in bound:  # packed sequences: rows of many samples, interleaved
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
    """Columns of the table are independent; `max` (mode 2) also says from which row each element
    came.
    """
    bound = bind(call)
    has_rows_of_maxima = bound["mode"] == 2 and len(call.results[3].shape) == 2
    rows_of_maxima = "[m!, d]" if has_rows_of_maxima else "[m!]"
    weights = ", [i!]" if isinstance(bound["per_sample_weights"], Slot) else ""
    return f"[v!, d], [i!], [o!]{weights} -> [o!, d], [x!], [y!], {rows_of_maxima}"


_CELL_WEIGHTS = "[g!, i!], [g!, h!], [g!]?, [g!]?"

BATCHED: dict[str, Lines] = {
    # Matrices.
    **_in_front(
        "linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse linalg_inv linalg_inv_ex"
        " matrix_exp",
        2,
    ),
    **_in_front(
        "linalg_matrix_power linalg_det logdet linalg_slogdet linalg_cond linalg_svd svd linalg_qr"
        " qr",
        2,
    ),
    **_in_front(
        "linalg_eigvals linalg_eigvalsh linalg_svdvals linalg_eig linalg_eigh linalg_lu lu_unpack",
        2,
    ),
    **_in_front(
        "linalg_lu_factor linalg_ldl_factor geqrf linalg_lu_factor_ex linalg_ldl_factor_ex"
        " _lu_with_info",
        2,
    ),
    **_in_front("linalg_householder_product ormqr triangular_solve pinverse", 2),
    **_each("linalg_pinv", f"{_MATRIX}, {_NUMBER}?, {_NUMBER}? -> [*b, j!, i!]"),
    **_each("linalg_matrix_rank", f"{_MATRIX}, {_NUMBER}?, {_NUMBER}? -> {_NUMBER}"),
    **_each("cholesky_solve", f"{_COLUMNS}, {_MATRIX} -> {_COLUMNS}"),
    **_each("lu_solve", f"{_COLUMNS}, {_MATRIX}, [*b, r!] -> {_COLUMNS}"),
    **_each("linalg_ldl_solve", f"{_MATRIX}, [*b, r!], {_COLUMNS} -> {_COLUMNS}"),
    **_each("cdist", "[*b, p, m!], [*b, q, m!] -> [*b, p, q]"),
    **_each("bilinear", "[*b, i], [*b, j], [o, i, j], +[o]? -> [*b, o]"),
    **dict.fromkeys(
        ("aten.linalg_solve", "aten.linalg_solve_ex"), partial(_solve, or_vectors=True)
    ),
    "aten.linalg_solve_triangular": _solve,
    "aten.linalg_lu_solve": partial(_solve, made_of=f"{_MATRIX}, [*b, r!]"),
    # Images.
    **{name: line for n in (1, 2, 3) for name, line in _in_front(_POOLS.format(n=n), n).items()},
    **_in_front("upsample_linear1d", 1),
    **_in_front(
        "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
        " col2im",
        2,
    ),
    **_in_front("upsample_trilinear3d im2col pixel_shuffle pixel_unshuffle channel_shuffle", 3),
    **{
        f"aten.fractional_max_pool{n}d": f"[n, c, *s!], [n, c, r!] -> [n, c, {places}], [n, c, {places}]"
        for n, places in ((2, "h!, w!"), (3, "d!, h!, w!"))
    },
    **_each(
        "grid_sampler grid_sampler_2d grid_sampler_3d", "[n, c, *s!], [n, *p, t!] -> [n, c, *p]"
    ),
    # Losses over rows, recurrent networks, and others.
    "aten.cosine_embedding_loss": _over_rows("[n, c!]", "[n, c!]", "[n]"),
    "aten.triplet_margin_loss": _over_rows("[n, c!]", "[n, c!]", "[n, c!]"),
    "aten.multi_margin_loss": _over_rows("[n, c!]", "[n]", "[c!]?"),
    "aten.multilabel_margin_loss": _over_rows("[n, c!]", "[n, c!]"),
    **{f"aten.{name}.input": recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    # One step of them: samples are independent, if there are several.
    **_each(
        "gru_cell rnn_tanh_cell rnn_relu_cell", f"[*b, i!], [*b, h!], {_CELL_WEIGHTS} -> [*b, h!]"
    ),
    **_each("lstm_cell", f"[*b, i!], [*b, h!], [*b, c!], {_CELL_WEIGHTS} -> [*b, h!], [*b, c!]"),
    # Every value is looked up by itself: in one sorted sequence, or in that of its own row.
    "aten.searchsorted.Tensor": (
        "[s!], [*b], [s!]? -> [*b]",
        "[*b, s!], [*b, v], [*b, s!]? -> [*b, v]",
    ),
    "aten.embedding_bag": embedding_bag,
    "aten.isin.Tensor_Tensor": "[*b], [*s!] -> [*b]",
    "aten.take": "[*s!], [*i] -> [*i]",
    **_in_front("multinomial", 1),
}


@dataclass(frozen=True)
class Notation:
    """A rule in index notation. Of several lines the first holds that fits the call's ranks, lower
    ranks first; a
    function picks the line from the call and axis size where ranks are not enough."""

    line: Lines
    # sets of tensor argument positions in which the op is jointly linear (they may be `P`)
    linear: tuple[tuple[int, ...], ...] = ()
    carries: bool = False  # offer `R*` -> `R*` (see `RuleMatch`)
    more: Callable[[OpCall, int], tuple[Split | None, ...]] | None = (
        None  # splits that no line says
    )

    def line_for(self, call: OpCall, axis_size: int) -> str:
        """The line for this call."""
        if callable(self.line):
            return self.line(call, axis_size)
        *lines, last = (self.line,) if isinstance(self.line, str) else self.line
        return next((line for line in lines if read(line, call) is not None), last)

    def __call__(self, call: OpCall, axis_size: int) -> RuleMatch | None:
        splits = read(self.line_for(call, axis_size), call)
        if splits is None:
            return None
        more = self.more(call, axis_size) if self.more else ()
        return RuleMatch((*splits, *more), linear_sets(call, self.linear), self.carries)


def _einsum(call: OpCall, axis_size: int) -> str:
    equation = bind(call)["equation"].replace(" ", "").replace("...", "*")
    left, arrow, right = equation.partition("->")
    if not arrow:
        letters = left.replace(",", "")
        right = ("*" if "*" in left else "") + "".join(
            sorted(c for c in set(letters) - {"*"} if letters.count(c) == 1)
        )

    def term(text: str) -> str:
        repeated = {c for operand in left.split(",") for c in operand if operand.count(c) > 1}
        return (
            "["
            + ", ".join(
                "*dots" if c == "*" else f"i{c}" + ("!" if c in repeated else "") for c in text
            )
            + "]"
        )

    return ", ".join(term(t) for t in left.split(",")) + " -> " + term(right)


def _attention(call: OpCall, axis_size: int) -> str:
    arguments = bind(call)
    rows = (
        "l!" if arguments["is_causal"] else "l"
    )  # the mask of a shard of rows would start at its first row
    heads = (
        "h=, " if arguments["enable_gqa"] else ""
    )  # query heads stay with the key head that they share
    query, key = f"[*b, {heads}{rows}, e!]", f"[*b, {heads}s!, e!]"
    return (
        f"{query}, {key}, [*b, {heads}s!, v!], [*b, {heads}{rows}, s!]? -> [*b, {heads}{rows}, v!]"
    )


def _ring(call: OpCall, axis_size: int) -> tuple[Split | None, ...]:
    """Attention with the sequence cut in queries, keys and values alike: the keys and values go
    around.

    Under a causal mask chunks are folded first, so that all devices have as much work: halves of
    them must be equal.
    """
    bound = bind(call)
    query, key, value = (bound[name].index for name in ("query", "key", "value"))
    shapes = [call.operands[i].shape for i in (query, key, value)]
    (rows, width), (columns, _) = shapes[0][-2:], shapes[1][-2:]
    causal, heads = bound["is_causal"], 1 if bound["enable_gqa"] else 2
    same = all(
        s[:heads] == shapes[0][:heads] and s[-1] == width and s[-2] == columns for s in shapes[1:]
    )
    if (
        len(shapes[0]) != 4
        or not same
        or shapes[1][1] != shapes[2][1]
        or bound["attn_mask"] is not None
    ):
        return ()
    if bound["dropout_p"] or (causal and (rows != columns or rows % (2 * axis_size))):
        return ()
    q, pair = (
        call.operands[query].num_bytes,
        call.operands[key].num_bytes + call.operands[value].num_bytes,
    )
    folded = (
        [(q + pair, "forward"), (q, "forward"), (q, "backward"), (q + pair, "backward")]
        if causal
        else []
    )
    collectives = [InnerCollective("all_to_all", num_bytes, phase) for num_bytes, phase in folded]
    # A ring sends as much as an all-gather does; gradients of keys and values as much as their
    # reduce-scatter.
    around = (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"))
    collectives += [InnerCollective(kind, pair, phase) for kind, phase in around]
    if not call.results[0].requires_grad:
        collectives = [c for c in collectives if c.phase == "forward"]
    how = {"implementation": "ring_attention", "collectives": tuple(collectives)}
    return (split_from_dims(call, [(i, 2) for i in (query, key, value)], [2], even=True, **how),)


def _convolution(call: OpCall, axis_size: int, transposed: bool | None = None) -> str:
    arguments = bind(call)
    if transposed is None:
        transposed = arguments["transposed"]
    groups = arguments["groups"]
    # input [*n, c, *s], weight [o, c / groups, *s] (transposed: [c, o / groups, *s]), bias [o]
    if groups == 1:
        weight = "[c, o, *s!]" if transposed else "[o, c, *s!]"
        return f"[*n, c, *s!], {weight}, +[o]? -> [*n, o, *s!]"
    channel = "c=" if groups % axis_size == 0 else "c!"
    return f"[*n, {channel}, *s!], [{channel}, i!, *s!], [{channel}]? -> [*n, {channel}, *s!]"


def _group_norm(call: OpCall, axis_size: int) -> str:
    channel = "c=" if bind(call)["num_groups"] % axis_size == 0 else "c!"
    return f"[n, {channel}, *s!], [{channel}]?, [{channel}]? -> [n, {channel}, *s!]"


def _channel_norm(call: OpCall, axis_size: int) -> str:
    """batch_norm, instance_norm: samples are independent unless they share statistics; places where
    those are given.
    """
    bound = bind(call)
    row = "n!" if bound.get("training", bound["running_mean"] is not None) else "n"
    places = "*s" if bound.get("training") is False else "*s!"
    return f"[{row}, c, {places}], [c]?, [c]?, [c]?, [c]? -> [{row}, c, {places}]"


def _embedding(call: OpCall, axis_size: int) -> str:
    if bind(call)[
        "scale_grad_by_freq"
    ]:  # the gradient of a row depends on how often all ids name it
        return "[v!, d], [*i!] -> [*i!, d]"
    return "[v@vocab_embedding, d], [*i] -> [*i, d]"


def _bag_lookup(call: OpCall, axis_size: int) -> str:
    table = "v!" if bind(call)["mode"] == 2 else "v@vocab_bags"  # a maximum over rows is no sum
    return f"[{table}, d], [n, k!], [n, k!]? -> [n, d]"


def _row_loss(call: OpCall, axis_size: int) -> str:
    """Losses per row (capture turns the summed ones into `cross_entropy_sum`)."""
    if bind(call)["reduction"] != 0:
        return "[n!, c!, *d!], [n!, *t!], [c!]? -> []"
    target = call.operands[bind(call)["target"].index]
    return (
        f"[n, c!, *d], {'[n, c!, *d]' if target.dtype.is_floating_point else '[n, *d]'}, [c!]? ->"
        " [n, *d]"
    )


def _tensordot(call: OpCall, axis_size: int) -> str:
    bound = bind(call)
    terms: list[list[str]] = []
    for name, contracted in (("self", bound["dims_self"]), ("other", bound["dims_other"])):
        rank = len(call.operands[bound[name].index].shape)
        summed = {d % rank: f"k{i}" for i, d in enumerate(contracted)}
        terms.append([summed.get(d, f"{name}{d}") for d in range(rank)])
    return line_of(terms, [i for term in terms for i in term if i[0] != "k"])


def _multi_dot(call: OpCall, axis_size: int) -> str:
    """A chain of matrices, of which the first and the last may be vectors."""
    matrices = [call.operands[slot.index] for slot in slots(call)]
    ranks = [len(meta.shape) for meta in matrices]
    terms = [[f"i{j}", f"i{j + 1}"] for j in range(len(ranks))]
    if ranks[0] == 1:
        terms[0] = terms[0][1:]
    if ranks[-1] == 1:
        terms[-1] = terms[-1][:1]
    return line_of(terms, [*terms[0][: ranks[0] - 1], *terms[-1][1:]])


def _kron(call: OpCall, axis_size: int) -> str:
    """A dim is the first operand's times the second's: equal chunks of the first are those of the
    result.
    """
    first, second = (len(call.operands[bind(call)[name].index].shape) for name in ("self", "other"))
    return "[*a=], [*c!] -> [*a=]" if first >= second else "[*a!], [*c!] -> [*c!]"


def _meshgrid(call: OpCall, axis_size: int) -> str:
    names = [f"i{j}" for j in range(len(slots(call)))]
    result = names[1::-1] + names[2:] if bind(call).get("indexing") == "xy" else names
    return line_of([[name] for name in names], result, len(names))


def _cartesian_product(call: OpCall, axis_size: int) -> str:
    """All tuples, the last element running fastest: equal chunks of the first operand that is
    longer than one.
    """
    sizes = [call.operands[slot.index].shape for slot in slots(call)]
    if len(sizes) == 1:
        return "[a] -> [a]"
    first = next((j for j, shape in enumerate(sizes) if shape != (1,)), 0)
    operands = [[f"c{j}!"] for j in range(len(sizes))]
    operands[first] = ["a="]
    return line_of(operands, ["a=", "m!"])


def _quantile(call: OpCall, axis_size: int) -> str:
    """Dims that are not reduced; and every quantile by itself, whose dim comes first."""
    bound = bind(call)
    rank = len(call.operands[bound["self"].index].shape)
    reduced = dims_of(bound["dim"], rank)
    operand = []
    result = []
    for d in range(rank):
        if d not in reduced:
            operand.append(f"x{d}")
            result.append(f"x{d}")
            continue
        operand.append(f"x{d}!")
        if bound["keepdim"]:
            result.append(f"k{d}!")
    if not isinstance(bound["q"], Slot):
        return line_of([operand], result)
    quantiles = ["q"] * len(call.operands[bound["q"].index].shape)
    return line_of([operand, quantiles], [*quantiles, *result])


def _index_select(call: OpCall, axis_size: int) -> str:
    """Other dims of the source are parallel; or the index is cut and the source is whole."""
    dim = bind(call)["dim"]
    indices = [f"x{d}" for d in range(len(call.results[0].shape))]
    if not indices:
        # A number and an index of one element: nothing can be cut.
        return "[], [i!] -> []"
    return line_of([_at(indices, dim, "s!"), ["i"]], _at(indices, dim, "i"))


def _gather(call: OpCall, axis_size: int) -> str:
    """gather, take_along_dim: dims of one size are parallel; or the index is cut and the source is
    whole.
    """
    source, index = (call.operands[slot.index].shape for slot in slots(call)[:2])
    dim = bind(call)["dim"]
    if dim is None or len(source) != len(index):
        return "[*s!], [*i!] -> [*i!]"
    indices = []
    for d, size in enumerate(index):
        mark = "" if source[d] == size else "!"
        indices.append(f"x{d}{mark}")
    read_there = _at(indices, dim, "i")
    return line_of([_at(indices, dim, "s!"), read_there], read_there)


def _written_there(call: OpCall, axis_size: int, adds: bool = False) -> str:
    """scatter, index_copy and relatives: dims other than the indexed one where all tensors are
    equally long; or what is added (scatter_add, index_add) is cut along that one, and every device
    adds its own part.

    Of an index along one dim every device needs all; a scatter's has all dims.
    """
    bound = bind(call)
    result = call.results[0]
    rank = len(result.shape)
    shapes = [call.operands[slot.index].shape for slot in slots(call)]
    full_rank = [shape for shape in shapes if len(shape) == rank]

    indices = []
    for d in range(rank):
        sizes = {shape[d] for shape in full_rank}
        indices.append(f"x{d}" if len(sizes) == 1 else f"x{d}!")
    is_partial_sum = adds and result.dtype.is_floating_point
    index = "i" if is_partial_sum else "i!"
    written = _at(indices, bound["dim"], index)
    into = _at(indices, bound["dim"], "s!")

    # The operand with an index along one dim alone; a scatter's has all dims.
    one_dim = -1
    if "scatter" not in call.target_name:
        one_dim = slots(call).index(bound["index"])
    terms = [into]
    for i, shape in enumerate(shapes[1:], start=1):
        terms.append([index] if i == one_dim else written[rank - len(shape) :])
    return "+" * adds + line_of(terms, into)


def _at(indices: list[str], dim: int, index: str) -> list[str]:
    """`indices` with another one at `dim`."""
    replaced = list(indices)
    replaced[dim % len(indices)] = index
    return replaced


def _indexed(call: OpCall, axis_size: int, index: str) -> str:
    """x[i, :, j], read or (index_put) written; `index`: the indices of the (broadcast) index
    tensors.

    Masks (how much they pick depends on data) leave every dim whole.
    """
    bound = bind(call)
    places = [d for d, given in enumerate(bound["indices"]) if isinstance(given, Slot)]
    own, there = ["*s!"], ["*p!"]
    if places and all(call.operands[bound["indices"][d].index].dtype.itemsize > 1 for d in places):
        own = [
            f"s{d}!" if d in places else f"x{d}"
            for d in range(len(call.operands[bound["self"].index].shape))
        ]
        free = [name for d, name in enumerate(own) if d not in places]
        start = (
            places[0] if places[-1] - places[0] < len(places) else 0
        )  # with a slice between them they go in front
        there = [*free[:start], index, *free[start:]]
    indices = f", [{index}]?" * len(bound["indices"])
    values, result = (f", [{', '.join(there)}]", own) if "values" in bound else ("", there)
    return f"[{', '.join(own)}]{indices}{values} -> [{', '.join(result)}]"


def _sum_to_size(call: OpCall, axis_size: int) -> str:
    """The dims that stay are parallel, the others are contracted."""
    source, target = call.operands[0].shape, call.results[0].shape
    offset = len(source) - len(target)
    result = [
        f"d{d + offset}" if source[d + offset] == size else f"one{d}!"
        for d, size in enumerate(target)
    ]
    return line_of([[f"d{d}" for d in range(len(source))]], result)


def _write_into(
    call: OpCall, axis_size: int, lacking: tuple[str, ...] = (), whole: tuple[str, ...] = ()
) -> str:
    """A tensor with a part of it replaced: the dims that the part has as well.

    lacking: arguments that name dims which the part lacks; whole: that name dims which must not be
    cut.
    """
    bound = bind(call)
    rank = len(call.results[0].shape)
    lacking_dims = {bound[name] % rank for name in lacking}
    whole_dims = {bound[name] % rank for name in whole}

    indices = []
    for d in range(rank):
        mark = "!" if d in lacking_dims or d in whole_dims else ""
        indices.append(f"x{d}{mark}")
    written = [index for d, index in enumerate(indices) if d not in lacking_dims]
    # A diagonal has one dim more, the last: its length.
    num_lengths = len(call.operands[bound["src"].index].shape) - len(written)
    return line_of([indices, written + ["m!"] * num_lengths], indices)


_NORM = "[*b, *normalized_shape!], [*normalized_shape!]?"
_TOGETHER = ((0, 1),)  # a tensor and what is written into it
_WITH_FIRST = ((0, 1), (0, 2))  # of addmm and its relatives: what is added, and one factor

NOTATION: dict[str, Notation] = {
    **{name: Notation(line) for name, line in BATCHED.items()},
    "aten.linear": Notation("[*b, k], [n, k], +[n]? -> [*b, n]"),
    "aten.matmul": Notation(
        (
            "[k], [k] -> []",
            "[k], [*b, k, n] -> [*b, n]",
            "[*b, m, k], [k] -> [*b, m]",
            "[*b, m, k], [*b, k, n] -> [*b, m, n]",
        )
    ),
    "aten.mm": Notation("[m, k], [k, n] -> [m, n]"),
    "aten.bmm": Notation("[b, m, k], [b, k, n] -> [b, m, n]"),
    "aten.mv": Notation("[m, k], [k] -> [m]"),
    "aten.dot": Notation("[k], [k] -> []"),
    "aten.outer": Notation("[m], [n] -> [m, n]"),
    "aten.addmm": Notation("+[m, n], [m, k], [k, n] -> [m, n]"),
    "aten.baddbmm": Notation("+[b, m, n], [b, m, k], [b, k, n] -> [b, m, n]"),
    "aten.embedding": Notation(_embedding, carries=True),
    "aten.layer_norm": Notation(f"{_NORM}, [*normalized_shape!]? -> [*b, *normalized_shape!]"),
    "aten.native_layer_norm": Notation(
        f"{_NORM}, [*normalized_shape!]? -> " + ", ".join(["[*b, *normalized_shape!]"] * 3)
    ),
    "aten.rms_norm": Notation(f"{_NORM} -> [*b, *normalized_shape!]"),
    "aten._fused_rms_norm": Notation(
        f"{_NORM} -> [*b, *normalized_shape!], [*b, *normalized_shape!]"
    ),
    "aten.group_norm": Notation(_group_norm),
    "aten.native_group_norm": Notation(
        "[n, c!, *s!], [c!]?, [c!]? -> [n, c!, *s!], [n, g!], [n, g!]"
    ),
    **{f"aten.{kind}_norm": Notation(_channel_norm) for kind in ("batch", "instance")},
    "aten.scaled_dot_product_attention": Notation(_attention, more=_ring),
    **{f"aten.conv{n}d": Notation(partial(_convolution, transposed=False)) for n in (1, 2, 3)},
    **{
        f"aten.conv_transpose{n}d": Notation(partial(_convolution, transposed=True))
        for n in (1, 2, 3)
    },
    "aten.convolution": Notation(_convolution),
    "aten.einsum": Notation(_einsum),
    "aten.one_hot": Notation(
        lambda call, _: f"{'[*b]' if bind(call)['num_classes'] > 0 else '[*b!]'} -> [*b, c!]"
    ),
    **dict.fromkeys(
        ("aten.tril", "aten.triu"), Notation(f"{_MATRIX} -> {_MATRIX}", linear=FIRST, carries=True)
    ),
    "aten.affine_grid_generator": Notation(
        ("[n, i!, j!] -> [n, h!, w!, k!]", "[n, i!, j!] -> [n, d!, h!, w!, k!]")
    ),
    "aten.prelu": Notation("[n, c, *s], [c] -> [n, c, *s]"),
    **dict.fromkeys(
        ("aten.feature_dropout", "aten.feature_alpha_dropout"),
        Notation(
            lambda call, _: "[n, c, *s!] -> [n, c, *s!]" if bind(call)["train"] else "[*b] -> [*b]"
        ),
    ),
    "aten.cross_entropy_loss": Notation(_row_loss),
    "aten.nll_loss_nd": Notation(_row_loss),
    "aten.bucketize.Tensor": Notation("[*b], [s] -> [*b]"),
    "aten.view_as_complex": Notation("[*b, c!] -> [*b]", linear=FIRST, carries=True),
    **{f"aten.{name}.dtype": Notation("[*b, c!] -> [*b, c!]") for name in ("view", "view_copy")},
    "aten.view_as_real": Notation("[*b] -> [*b, c!]", linear=FIRST, carries=True),
    "aten.inner": Notation("[*a, k], [*b, k] -> [*a, *b]", linear=EACH),
    "aten.vdot": Notation("[k], [k] -> []", linear=EACH),
    "aten.addmv": Notation("+[m], [m, k], [k] -> [m]", linear=_WITH_FIRST),
    "aten.addr": Notation("[m, n], [m], [n] -> [m, n]", linear=_WITH_FIRST),
    "aten.addbmm": Notation("+[m, n], [b, m, k], [b, k, n] -> [m, n]", linear=_WITH_FIRST),
    "aten.kron": Notation(_kron, linear=EACH),
    "aten.tensordot": Notation(_tensordot, linear=EACH),
    "aten.linalg_multi_dot": Notation(_multi_dot, linear=tuple((i,) for i in range(16))),
    "aten.linalg_vander": Notation("[*b] -> [*b, n!]"),
    "aten.meshgrid": Notation(_meshgrid, linear=((-1,),)),
    "aten.cartesian_prod": Notation(_cartesian_product, linear=((-1,),)),
    "aten.pdist": Notation(
        lambda call, _: f"[n!, {'d' if bind(call)['p'] == 1 else 'd!'}] -> [k!]"
    ),
    "aten.histc": Notation(
        lambda call, _: f"{'[*b!]' if bind(call)['min'] == bind(call)['max'] else '[*b]'} -> [h!]"
    ),
    **{f"aten.{name}": Notation(_quantile) for name in ("quantile", "nanquantile")},
    "aten.index.Tensor": Notation(partial(_indexed, index="*i"), linear=FIRST, carries=True),
    "aten.index_put": Notation(partial(_indexed, index="*i!")),
    "aten.sum_to_size": Notation(_sum_to_size, linear=FIRST, carries=True),
    "aten.select_scatter": Notation(
        partial(_write_into, lacking=("dim",)), linear=_TOGETHER, carries=True
    ),
    "aten.diagonal_scatter": Notation(
        partial(_write_into, lacking=("dim1", "dim2")), linear=_TOGETHER, carries=True
    ),
    "aten.slice_scatter": Notation(
        partial(_write_into, whole=("dim",)), linear=_TOGETHER, carries=True
    ),
    "aten.index_select": Notation(_index_select, linear=FIRST, carries=True),
    **{f"aten.{name}": Notation(_gather, carries=True) for name in ("gather", "take_along_dim")},
    **_each("scatter scatter_reduce index_copy index_fill index_reduce", Notation(_written_there)),
    **{
        f"aten.{name}": Notation(partial(_written_there, adds=True))
        for name in ("scatter_add", "index_add")
    },
    # Complex numbers, or real and imaginary parts.
    "aten.stft": Notation(
        ("[*b, t!], [w!]? -> [*b, f!, k!]", "[*b, t!], [w!]? -> [*b, f!, k!, c!]"), linear=EACH
    ),
    # Targets follow one another, or are padded to one length.
    "alpa.ctc_rows": Notation(
        ("[t!, b!, c!], [s!], [b!], [b!] -> [b!]", "[t!, b, c!], [b, s!], [b], [b] -> [b]")
    ),
    "alpa.grouped_mm": Notation("[s@groups_of_rows, k], [e@groups_of_rows, k, n], [g!] -> [s, n]"),
    "ops.segmented_linear": Notation("[*b, k], [s!, n, k], +[s!, n]? -> [*b, s!, n]"),
    "ops.bag_lookup": Notation(_bag_lookup),
    "ops.nll_sum": Notation("[n, c!, *d], [n, *d], [c!]? -> []"),
    "ops.target_weight_sum": Notation("[*n], [c!]? -> []"),
}
