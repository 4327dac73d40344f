"""Rule cases of views, of ops that move elements, and of ops that make tensors."""

from __future__ import annotations

from rule_data import Add, aten, c, f, i

# Replicated and partial operands keep their placement.
BOTH = ("R*->R*", "P->P")


def reshape_cases(add: Add) -> None:
    for op in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        add(str(op), op, f(4, 5, 12), (4, 5, 4, 3), expect=("S0->S0", "S1->S1", "S2->S2", *BOTH))
    add(
        "view_merge", aten.view.default, f(4, 5, 4, 3), (20, 12), expect=("S0->S0", "S2->S1", *BOTH)
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


def transpose_and_expand_cases(add: Add) -> None:
    add(
        "transpose",
        aten.transpose.int,
        f(4, 5, 6),
        1,
        -1,
        expect=("S0->S0", "S1->S2", "S2->S1", *BOTH),
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
        expect=("S0->S0", "R*->S1", "S2->S2", *BOTH),
    )
    add(
        "expand_new", aten.expand.default, f(4, 1), (6, 4, 3), expect=("R*->S0", "S0->S1", "R*->S2")
    )
    add("repeat", aten.repeat.default, f(4, 5), (2, 1, 3), expect=("S0->S1", *BOTH))
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


def split_and_join_cases(add: Add) -> None:
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


def index_cases(add: Add) -> None:
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


def scatter_and_factory_cases(add: Add) -> None:
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
