"""Rule cases for which the op database has no good samples: recurrent networks, experts, indexed
writes, alignments, linear algebra.
"""

from __future__ import annotations

import torch
from rule_data import Add, aten, c, f, i

from alpa_strategy.capture.ops import ctc_rows, grouped_mm

GROUPED_MM = grouped_mm._opoverload


def recurrent_cases(add: Add) -> None:
    params = [f(12, 5), f(12, 3), f(12), f(12), f(12, 3), f(12, 3), f(12), f(12)]
    states = [f(2, 4, 3), f(2, 4, 3)]
    rows = "R*," * 8
    add(
        *("lstm", aten.lstm.input, f(4, 6, 5), states, params, True, 2, 0.0, True, False, True),
        expect=f"S0,S1,S1,{rows[:-1]}->S0,S1,S1",
    )
    gru = [f(9, 5), f(9, 3), f(9), f(9), f(9, 5), f(9, 3), f(9), f(9)]
    add(
        *("gru", aten.gru.input, f(6, 4, 5), f(2, 4, 3), gru, True, 1, 0.0, True, True, False),
        expect=f"S1,S1,{rows[:-1]}->S1,S1",
    )
    add(
        *(
            "rnn_unbatched",
            aten.rnn_tanh.input,
            f(6, 5),
            f(1, 3),
            [f(3, 5), f(3, 3)],
            False,
            1,
            0.0,
            True,
            False,
            False,
        ),
        expect=(),
    )
    cell = (f(12, 5), f(12, 3), f(12), f(12))
    add(
        "lstm_cell",
        aten.lstm_cell.default,
        f(4, 5),
        [f(4, 3), f(4, 3)],
        *cell,
        expect="S0,S0,S0,R*,R*,R*,R*->S0,S0",
    )
    add(
        "gru_cell",
        aten.gru_cell.default,
        f(4, 5),
        f(4, 3),
        f(9, 5),
        f(9, 3),
        expect="S0,S0,R*,R*->S0",
    )


def grouped_and_indexed_cases(add: Add) -> None:
    offsets = torch.tensor([3, 3, 7, 11], dtype=torch.int32)
    add(
        *("grouped_mm", GROUPED_MM, f(12, 4), f(4, 4, 6), offsets),
        expect=(
            "S0,R*,R->S0@groups_of_rows",
            "R*,S0,R->P@groups_of_rows",
            "S1,S1,R->P",
            "R*,S2,R->S1",
        ),
    )
    add(
        *("index_add", aten.index_add.default, f(5, 6), 0, i(5, 8), f(8, 6)),
        expect=("S1,R,S1->S1", "R*,S0,S0->P@bias_on_first"),
    )
    add(
        *("scatter_add_collisions", aten.scatter_add.default, f(4, 6), 1, i(6, 4, 9), f(4, 9)),
        expect=("S0,S0,S0->S0", "R*,S1,S1->P@bias_on_first"),
    )
    add("index_put", aten.index_put.default, f(5, 6), [i(5, 3)], f(3, 6), expect="S1,R,S1->S1")
    add(
        "index_put_broadcast",
        aten.index_put.default,
        f(5, 6),
        [i(5, 3)],
        f(1, 1),
        expect="S1,R,R*->S1",
    )
    add(
        "index_copy",
        aten.index_copy.default,
        f(5, 6),
        0,
        torch.tensor([0, 3]),
        f(2, 6),
        expect="S1,R,S1->S1",
    )
    counts = (torch.tensor([1, 0, 3, 2]), 0)
    add(
        "repeat_interleave_counts",
        aten.repeat_interleave.self_Tensor,
        f(4, 6),
        *counts,
        output_size=6,
        expect="S1,R->S1",
    )


def embedding_bag_cases(add: Add) -> None:
    embedding = (f(9, 6), i(9, 8), torch.tensor([0, 3, 3, 6]))
    for mode, name in enumerate(("sum", "mean", "max")):
        bag = (*embedding, False, mode, False, None, False, None)
        add(
            f"embedding_bag_{name}",
            aten.embedding_bag.padding_idx,
            *bag,
            expect="S1,R,R->S1,R,R," + ("S1" if mode == 2 else "R"),
        )


def margin_loss_cases(add: Add) -> None:
    for reduction in (0, 1, 2):
        result = ("S0", "P@fraction", "P")[reduction]
        add(
            *(
                f"triplet_{reduction}",
                aten.triplet_margin_loss.default,
                f(4, 5),
                f(4, 5),
                f(4, 5),
                1.0,
                2.0,
                1e-6,
            ),
            *(False, reduction),
            expect=f"S0,S0,S0->{result}",
        )
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        add(
            *(
                f"cosine_embedding_{reduction}",
                aten.cosine_embedding_loss.default,
                f(4, 5),
                f(4, 5),
                signs,
                0.1,
            ),
            reduction,
            expect=f"S0,S0,S0->{result}",
        )


def sampling_and_alignment_cases(add: Add) -> None:
    add(
        "grid_sampler",
        aten.grid_sampler.default,
        f(4, 3, 5, 6),
        f(4, 7, 8, 2),
        0,
        0,
        False,
        expect="S0,S0->S0",
    )
    add(
        "affine_grid",
        aten.affine_grid_generator.default,
        f(4, 2, 3),
        [4, 3, 5, 6],
        True,
        expect="S0->S0",
    )
    lengths = torch.tensor([9, 9, 8, 7]), torch.tensor([3, 2, 3, 1])
    scores = f(9, 4, 6).detach().log_softmax(-1).requires_grad_()
    add(
        "ctc_padded", ctc_rows, scores, 1 + i(5, 4, 3), *lengths, 0, False, expect="S1,S0,S0,S0->S0"
    )
    add("ctc_in_a_row", ctc_rows, scores, 1 + i(5, 9), *lengths, 0, True, expect=())
    add("searchsorted", aten.searchsorted.Tensor, c(9).sort().values, c(4, 5), expect="R,S0->S0")
    add("glu_other_dim", aten.glu.default, f(4, 6, 3), 1, expect="S0->S0")


def linalg_cases(add: Add) -> None:
    square = f(4, 3, 3).detach()
    positive = (square @ square.mT + torch.eye(3, dtype=torch.float64)).requires_grad_()
    add("linalg_cholesky", aten.linalg_cholesky.default, positive, expect="S0->S0")
    add("det", aten.det.default, positive, expect="S0->S0")
    add("slogdet", aten.slogdet.default, positive, expect="S0->S0,S0")
    add("inverse", aten.inverse.default, positive, expect="S0->S0")
    add(
        "linalg_solve",
        aten.linalg_solve.default,
        positive,
        f(4, 3, 2),
        expect=("S0,S0->S0", "R*,S2->S2"),
    )
    add("linalg_solve_vector", aten.linalg_solve.default, positive, f(4, 3), expect="S0,S0->S0")
