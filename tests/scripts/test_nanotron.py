"""scripts/nanotron.py: a published configuration and the free choice are plans by the same costs,
and said in words.
"""

from __future__ import annotations

import pytest
from test_published import row, rows

nanotron = pytest.importorskip("nanotron")


def case():
    arch = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 512, "vocab": 512}
    return rows.express(
        row(
            source="nanotron",
            arch=arch,
            gpus=2,
            dp=1,
            tp=1,
            pp=2,
            micro_batch=1,
            grad_accum=4,
            local_batch=4,
            global_batch=4,
            zero=0,
            seq_len=128,
        )
    )


def test_a_published_configuration_is_pinned():
    plan = nanotron.published(case())
    assert [stage.logical_mesh for stage in plan.stages] == [(1,), (1,)]
    assert plan.num_microbatches == 4
    assert nanotron.in_words(plan).startswith("2 of 1, 4 micro-batches, ")


def test_the_free_choice_is_not_worse():
    line = dict(zip(nanotron.HEADER, nanotron.row(case()), strict=True))
    assert float(line["free / published"]) <= 1
    assert line["within 3 %"].startswith("yes")
