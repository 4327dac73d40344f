"""Rules in index notation, as data: op -> a line, or a function that picks the line for the call.

`NOTATION` at the end contains all of them, those of `batched_rules.py` as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from alpa_strategy.ir.op import InnerCollective, OpCall, Slot, bind, dims_of, slots
from alpa_strategy.sharding.batched_rules import BATCHED, MATRIX, Lines, rule_for_each
from alpa_strategy.sharding.notation import (
    RuleMatch,
    Split,
    line_of,
    read,
    reduced_indices,
    split_from_dims,
)
from alpa_strategy.sharding.rule_families import EACH, FIRST, linear_sets


@dataclass(frozen=True)
class Notation:
    """A rule in index notation."""

    # Of several lines the first one that fits the call's ranks is used: lower ranks come first. A
    # function picks the line from the call and the axis size, if ranks are not enough.
    line: Lines
    # sets of tensor argument positions in which the op is jointly linear (they may be `P`)
    linear: tuple[tuple[int, ...], ...] = ()
    # as `RuleMatch.carries`
    carries: bool = False
    # splits that cannot be written as a line
    more: Callable[[OpCall, int], tuple[Split | None, ...]] | None = None

    def line_for(self, call: OpCall, axis_size: int) -> str:
        """Return the rule in index notation for this call; the last of several lines if none can be
        read.
        """
        if callable(self.line):
            return self.line(call, axis_size)
        if isinstance(self.line, str):
            return self.line
        *lines, last = self.line
        return next((line for line in lines if read(line, call) is not None), last)

    def __call__(self, call: OpCall, axis_size: int) -> RuleMatch | None:
        """Return the rule's result for a call; None when the call does not fit."""
        splits = read(self.line_for(call, axis_size), call)
        if splits is None:
            return None
        more = self.more(call, axis_size) if self.more else ()
        return RuleMatch((*splits, *more), linear_sets(call, self.linear), self.carries)


def _einsum(call: OpCall, axis_size: int) -> str:
    """Return the rule of an einsum; an index that occurs twice in an operand stays unsharded."""
    equation = bind(call)["equation"].replace(" ", "").replace("...", "*")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if not arrow:
        # Without a result: the dots, then the letters that occur once, in alphabetical order.
        letters = left.replace(",", "")
        single = [c for c in set(letters) - {"*"} if letters.count(c) == 1]
        right = ("*" if "*" in left else "") + "".join(sorted(single))
    diagonal: set[str] = set()
    for operand in operands:
        diagonal.update(c for c in operand if operand.count(c) > 1)

    def index(letter: str) -> str:
        if letter == "*":
            return "*dots"
        mark = "!" if letter in diagonal else ""
        return f"i{letter}{mark}"

    terms = [map(index, operand) for operand in operands]
    return line_of(terms, map(index, right))


def _attention(call: OpCall, axis_size: int) -> str:
    """Return the rule of scaled dot product attention: batch, heads, and queries if not causal."""
    arguments = bind(call)
    # The causal mask of a shard of queries would start at its first one.
    query_index = "l!" if arguments["is_causal"] else "l"
    # Query heads stay with the key head that they share.
    heads = "h=, " if arguments["enable_gqa"] else ""
    query = f"[*b, {heads}{query_index}, e!]"
    key = f"[*b, {heads}s!, e!]"
    value = f"[*b, {heads}s!, v!]"
    mask = f"[*b, {heads}{query_index}, s!]?"
    return f"{query}, {key}, {value}, {mask} -> [*b, {heads}{query_index}, v!]"


def _ring(call: OpCall, axis_size: int) -> tuple[Split | None, ...]:
    """Return the splits of ring attention: queries, keys and values are sharded along the sequence.

    Keys and values go around. Under a causal mask chunks are folded first, so that all devices have
    as much work: the halves of each chunk must be of the same size.

    Returns:
        One split, None if an operand would have to be sharded in two ways; empty with a mask, with
        dropout, and for shapes that do not fit.
    """
    bound = bind(call)
    operands = [bound[name].index for name in ("query", "key", "value")]
    metas = [call.operands[operand] for operand in operands]
    is_causal = bound["is_causal"]
    if bound["attn_mask"] is not None or bound["dropout_p"]:
        return ()
    if not _fits_ring([meta.shape for meta in metas], is_causal, bound["enable_gqa"], axis_size):
        return ()

    query_bytes, key_bytes, value_bytes = (meta.num_bytes for meta in metas)
    pair_bytes = key_bytes + value_bytes
    collectives = []
    if is_causal:
        # Chunks are exchanged before and after, in both directions.
        collectives = [
            InnerCollective("all_to_all", query_bytes + pair_bytes, "forward"),
            InnerCollective("all_to_all", query_bytes, "forward"),
            InnerCollective("all_to_all", query_bytes, "backward"),
            InnerCollective("all_to_all", query_bytes + pair_bytes, "backward"),
        ]
    # A ring sends as much as an all-gather does, and the gradients of keys and values as much as
    # their reduce-scatter.
    collectives += [
        InnerCollective("all_gather", pair_bytes, "forward"),
        InnerCollective("all_gather", pair_bytes, "backward"),
        InnerCollective("reduce_scatter", pair_bytes, "backward"),
    ]
    if not call.results[0].requires_grad:
        collectives = [c for c in collectives if c.phase == "forward"]
    split = split_from_dims(
        call,
        [(operand, 2) for operand in operands],
        [2],
        even=True,
        implementation="ring_attention",
        collectives=tuple(collectives),
    )
    return (split,)


def _fits_ring(
    shapes: list[tuple[int, ...]], is_causal: bool, enable_gqa: bool, axis_size: int
) -> bool:
    """Whether ring attention can divide query, key and value of these shapes, of 4 dims. Batch,
    width and heads must be the same (with `enable_gqa` not the query's heads); if it is causal the
    rows, too, a multiple of 2 `axis_size`. Rows of key and value must be the same in any case.
    """
    query, key, value = shapes
    if len(query) != 4:
        return False
    num_same = 1 if enable_gqa else 2
    for shape in (key, value):
        has_same_batch = shape[:num_same] == query[:num_same]
        if not has_same_batch or shape[-1] != query[-1] or shape[-2] != key[-2]:
            return False
    if key[1] != value[1]:
        return False
    num_queries = query[-2]
    if not is_causal:
        return True
    return num_queries == key[-2] and num_queries % (2 * axis_size) == 0


def _convolution(call: OpCall, axis_size: int, transposed: bool | None = None) -> str:
    """Return the rule of a convolution: batch, input and output channels; groups stay together."""
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
    """Return the rule of group norm: batch, and channels if shards have full groups."""
    channel = "c=" if bind(call)["num_groups"] % axis_size == 0 else "c!"
    return f"[n, {channel}, *s!], [{channel}]?, [{channel}]? -> [n, {channel}, *s!]"


def _weight_norm(call: OpCall, axis_size: int) -> str:
    """Return the rule of weight norm: the dim whose slices have a norm each."""
    bound = bind(call)
    rank = len(call.operands[bound["v"].index].shape)
    if bound["dim"] == -1:
        # One norm of the whole weight, which is not the norm per slice of the last dim.
        return "[*i!], [*one!] -> [*i!]"
    weight = _at([f"i{d}!" for d in range(rank)], bound["dim"], "o")
    length = _at([f"one{d}!" for d in range(rank)], bound["dim"], "o")
    return line_of([weight, length], weight)


def _channel_norm(call: OpCall, axis_size: int) -> str:
    """Return the rule of batch_norm and instance_norm: samples are independent unless they share
    statistics.

    Positions in the image are independent if the statistics are given.
    """
    bound = bind(call)
    sample = "n!" if bound.get("training", bound["running_mean"] is not None) else "n"
    positions = "*s" if bound.get("training") is False else "*s!"
    image = f"[{sample}, c, {positions}]"
    return f"{image}, [c]?, [c]?, [c]?, [c]? -> {image}"


def _embedding(call: OpCall, axis_size: int) -> str:
    """Return the rule of an embedding: vocabulary, features and ids."""
    if bind(call)["scale_grad_by_freq"]:
        # The gradient of a row depends on how often it is in the ids of all samples.
        return "[v!, d], [*i!] -> [*i!, d]"
    return "[v@vocab_embedding, d], [*i] -> [*i, d]"


def _bag_lookup(call: OpCall, axis_size: int) -> str:
    """Return the rule of an embedding bag: vocabulary, features and bags."""
    # Mode 2: a maximum over rows is no sum.
    table = "v!" if bind(call)["mode"] == 2 else "v@vocab_bags"
    return f"[{table}, d], [n, k!], [n, k!]? -> [n, d]"


def _row_loss(call: OpCall, axis_size: int) -> str:
    """Return the rule of losses per row: rows are independent. Capture turns the summed losses into
    `cross_entropy_sum`.
    """
    if bind(call)["reduction"] != 0:
        return "[n!, c!, *d!], [n!, *t!], [c!]? -> []"
    target = call.operands[bind(call)["target"].index]
    has_probabilities = target.dtype.is_floating_point
    target_term = "[n, c!, *d]" if has_probabilities else "[n, *d]"
    return f"[n, c!, *d], {target_term}, [c!]? -> [n, *d]"


def _tensordot(call: OpCall, axis_size: int) -> str:
    """Return the rule of a tensordot: all dims, the contracted ones as partial values."""
    bound = bind(call)
    terms: list[list[str]] = []
    for name, contracted in (("self", bound["dims_self"]), ("other", bound["dims_other"])):
        rank = len(call.operands[bound[name].index].shape)
        summed = {d % rank: f"k{i}" for i, d in enumerate(contracted)}
        terms.append([summed.get(d, f"{name}{d}") for d in range(rank)])
    first, second = terms
    return line_of(terms, [index for index in first + second if index[0] != "k"])


def _multi_dot(call: OpCall, axis_size: int) -> str:
    """Return the rule of a product of a chain of matrices, of which the first and the last may be
    vectors.
    """
    matrices = [call.operands[slot.index] for slot in slots(call)]
    ranks = [len(meta.shape) for meta in matrices]
    terms = [[f"i{j}", f"i{j + 1}"] for j in range(len(ranks))]
    if ranks[0] == 1:
        terms[0] = terms[0][1:]
    if ranks[-1] == 1:
        terms[-1] = terms[-1][:1]
    return line_of(terms, [*terms[0][: ranks[0] - 1], *terms[-1][1:]])


def _kron(call: OpCall, axis_size: int) -> str:
    """Return the rule of kron: each dim of the result is the first operand's times the second's.

    So equal chunks of the first operand are equal chunks of the result.
    """
    bound = bind(call)
    first_rank = len(call.operands[bound["self"].index].shape)
    second_rank = len(call.operands[bound["other"].index].shape)
    if first_rank >= second_rank:
        return "[*a=], [*c!] -> [*a=]"
    return "[*a!], [*c!] -> [*c!]"


def _meshgrid(call: OpCall, axis_size: int) -> str:
    """Return the rule of `meshgrid`: one index for each operand."""
    names = [f"i{j}" for j in range(len(slots(call)))]
    result = names[1::-1] + names[2:] if bind(call).get("indexing") == "xy" else names
    return line_of([[name] for name in names], result, len(names))


def _cartesian_product(call: OpCall, axis_size: int) -> str:
    """Return the rule of cartesian_prod: all tuples, the last element running fastest.

    Equal chunks of the first operand that has more than one element are chunks of the result.
    """
    sizes = [call.operands[slot.index].shape for slot in slots(call)]
    if len(sizes) == 1:
        return "[a] -> [a]"
    first = next((j for j, shape in enumerate(sizes) if shape != (1,)), 0)
    operands = [[f"c{j}!"] for j in range(len(sizes))]
    operands[first] = ["a="]
    return line_of(operands, ["a=", "m!"])


def _quantile(call: OpCall, axis_size: int) -> str:
    """Return the rule of quantile: dims that are not reduced are parallel, and so are the
    quantiles, whose dim comes first.
    """
    bound = bind(call)
    rank = len(call.operands[bound["self"].index].shape)
    operand, result = reduced_indices(rank, dims_of(bound["dim"], rank), "!", bound["keepdim"])
    if not isinstance(bound["q"], Slot):
        return line_of([operand], result)
    quantiles = ["q"] * len(call.operands[bound["q"].index].shape)
    return line_of([operand, quantiles], [*quantiles, *result])


def _index_select(call: OpCall, axis_size: int) -> str:
    """Return the rule of index_select: other dims of the source are parallel, or the index is
    sharded and the source is not.
    """
    dim = bind(call)["dim"]
    indices = [f"x{d}" for d in range(len(call.results[0].shape))]
    if not indices:
        # A number and an index of one element: nothing can be sharded.
        return "[], [i!] -> []"
    return line_of([_at(indices, dim, "s!"), ["i"]], _at(indices, dim, "i"))


def _gather(call: OpCall, axis_size: int) -> str:
    """Return the rule of gather and take_along_dim: dims of the same size are parallel, or the
    index alone is sharded.
    """
    source, index = (call.operands[slot.index].shape for slot in slots(call)[:2])
    dim = bind(call)["dim"]
    if dim is None or len(source) != len(index):
        return "[*s!], [*i!] -> [*i!]"
    indices = []
    for d, size in enumerate(index):
        mark = "" if source[d] == size else "!"
        indices.append(f"x{d}{mark}")
    index_term = _at(indices, dim, "i")
    return line_of([_at(indices, dim, "s!"), index_term], index_term)


def _scatter(call: OpCall, axis_size: int, adds: bool = False) -> str:
    """Return the rule of scatter, index_copy and relatives: dims in which all tensors have the same
    size are parallel.

    The indexed dim is not. With `adds` (scatter_add, index_add) the values that are added may be
    sharded along it, and every device adds its shard. An index along one dim alone is needed by
    every device; a scatter's has all dims.
    """
    bound = bind(call)
    result = call.results[0]
    rank = len(result.shape)
    shapes = [call.operands[slot.index].shape for slot in slots(call)]
    full_rank = [shape for shape in shapes if len(shape) == rank]

    indices = []
    for d in range(rank):
        sizes = {shape[d] for shape in full_rank}
        mark = "" if len(sizes) == 1 else "!"
        indices.append(f"x{d}{mark}")
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
    """Return `indices` with `index` at `dim`."""
    replaced = list(indices)
    replaced[dim % len(indices)] = index
    return replaced


def _indexed(call: OpCall, axis_size: int, index: str) -> str:
    """Return the rule of x[i, :, j], read, or written (index_put).

    Masks, whose number of elements depends on data, leave every dim unsharded.

    Args:
        index: the indices of the (broadcast) index tensors.
    """
    bound = bind(call)
    indexed_dims = []
    are_all_numbers = True
    for dim, argument in enumerate(bound["indices"]):
        if isinstance(argument, Slot):
            indexed_dims.append(dim)
            # A byte: booleans, or uint8 masks.
            are_all_numbers &= call.operands[argument.index].dtype.itemsize > 1

    source = ["*s!"]
    picked = ["*p!"]
    if indexed_dims and are_all_numbers:
        rank = len(call.operands[bound["self"].index].shape)
        source = []
        free = []
        for dim in range(rank):
            if dim in indexed_dims:
                source.append(f"s{dim}!")
            else:
                source.append(f"x{dim}")
                free.append(f"x{dim}")
        # The index tensors' dims replace the indexed ones; with a slice between these they come
        # first.
        is_contiguous = indexed_dims[-1] - indexed_dims[0] < len(indexed_dims)
        start = indexed_dims[0] if is_contiguous else 0
        picked = [*free[:start], index, *free[start:]]

    index_terms = f", [{index}]?" * len(bound["indices"])
    source_term = f"[{', '.join(source)}]"
    picked_term = f"[{', '.join(picked)}]"
    if "values" in bound:
        return f"{source_term}{index_terms}, {picked_term} -> {source_term}"
    return f"{source_term}{index_terms} -> {picked_term}"


def _sum_to_size(call: OpCall, axis_size: int) -> str:
    """Return the rule of sum_to_size: dims that keep their size are parallel, others contracted."""
    source = call.operands[0].shape
    target = call.results[0].shape
    offset = len(source) - len(target)
    result = []
    for dim, size in enumerate(target):
        is_kept = source[dim + offset] == size
        result.append(f"d{dim + offset}" if is_kept else f"one{dim}!")
    return line_of([[f"d{dim}" for dim in range(len(source))]], result)


def _write_into(
    call: OpCall, axis_size: int, lacking: tuple[str, ...] = (), unsharded: tuple[str, ...] = ()
) -> str:
    """Return the rule of a tensor of which a slice is replaced: the dims that the slice has as well
    are parallel.

    Args:
        lacking: arguments that name dims which the slice lacks.
        unsharded: arguments that name dims which must not be sharded.
    """
    bound = bind(call)
    rank = len(call.results[0].shape)
    lacking_dims = {bound[name] % rank for name in lacking}
    unsharded_dims = lacking_dims | {bound[name] % rank for name in unsharded}

    indices = []
    for d in range(rank):
        mark = "!" if d in unsharded_dims else ""
        indices.append(f"x{d}{mark}")
    written = [index for d, index in enumerate(indices) if d not in lacking_dims]
    # A diagonal has one dim more, the last: its length.
    num_lengths = len(call.operands[bound["src"].index].shape) - len(written)
    return line_of([indices, written + ["m!"] * num_lengths], indices)


def _one_hot(call: OpCall, axis_size: int) -> str:
    """Return the rule of `one_hot`: all dims, if the number of classes is given."""
    # Without a number of classes, that depends on all of the tensor.
    has_num_classes = bind(call)["num_classes"] > 0
    return "[*b] -> [*b, c!]" if has_num_classes else "[*b!] -> [*b, c!]"


def _feature_dropout(call: OpCall, axis_size: int) -> str:
    """Return the rule of dropout of full channels."""
    return "[n, c, *s!] -> [n, c, *s!]" if bind(call)["train"] else "[*b] -> [*b]"


def _pdist(call: OpCall, axis_size: int) -> str:
    """Return the rule of `pdist`: the vectors' dim, for norm 1 alone."""
    # The distance of norm 1 is a sum over dims.
    return "[n!, d] -> [k!]" if bind(call)["p"] == 1 else "[n!, d!] -> [k!]"


def _histc(call: OpCall, axis_size: int) -> str:
    """Return the rule of `histc`: all dims, if the range is given."""
    # With min == max the bins depend on all of the tensor.
    bound = bind(call)
    return "[*b!] -> [h!]" if bound["min"] == bound["max"] else "[*b] -> [h!]"


_NORM = "[*b, *normalized_shape!], [*normalized_shape!]?"
# Linear in a tensor and the slice that is written into it.
_TOGETHER = ((0, 1),)
# addmm and its relatives: linear in the tensor that is added with either factor.
_WITH_FIRST = ((0, 1), (0, 2))

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
    "aten._weight_norm": Notation(_weight_norm, carries=True),
    "aten.scaled_dot_product_attention": Notation(_attention, more=_ring),
    **{f"aten.conv{n}d": Notation(partial(_convolution, transposed=False)) for n in (1, 2, 3)},
    **{
        f"aten.conv_transpose{n}d": Notation(partial(_convolution, transposed=True))
        for n in (1, 2, 3)
    },
    "aten.convolution": Notation(_convolution),
    "aten.einsum": Notation(_einsum),
    "aten.one_hot": Notation(_one_hot),
    **dict.fromkeys(
        ("aten.tril", "aten.triu"), Notation(f"{MATRIX} -> {MATRIX}", linear=FIRST, carries=True)
    ),
    "aten.affine_grid_generator": Notation(
        ("[n, i!, j!] -> [n, h!, w!, k!]", "[n, i!, j!] -> [n, d!, h!, w!, k!]")
    ),
    "aten.prelu": Notation("[n, c, *s], [c] -> [n, c, *s]"),
    **dict.fromkeys(
        ("aten.feature_dropout", "aten.feature_alpha_dropout"),
        Notation(_feature_dropout),
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
    "aten.pdist": Notation(_pdist),
    "aten.histc": Notation(_histc),
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
        partial(_write_into, unsharded=("dim",)), linear=_TOGETHER, carries=True
    ),
    "aten.index_select": Notation(_index_select, linear=FIRST, carries=True),
    **{f"aten.{name}": Notation(_gather, carries=True) for name in ("gather", "take_along_dim")},
    **rule_for_each(
        "scatter scatter_reduce index_copy index_fill index_reduce", Notation(_scatter)
    ),
    **{
        f"aten.{name}": Notation(partial(_scatter, adds=True))
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
