"""scripts/published.py: rows are read as what was run, and the planner prices them; what cannot be
says why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
published = pytest.importorskip("published")
price = pytest.importorskip("published_price")
rows = pytest.importorskip("published_rows")


def row(**changed: Any) -> dict[str, Any]:
    """A small LLaMA on 8 devices, as a row of the published results."""
    return {
        "id": 1,
        "source": "github pytorch/torchtitan",
        "notes": "",
        "model": "Llama tiny",
        "arch": {
            "layers": 8,
            "hidden": 1024,
            "heads": 8,
            "kv_heads": 8,
            "ffn": 4096,
            "vocab": 32000,
        },
        "hardware": {
            "gpu": "H100 80GB",
            "gpus_per_node": 8,
            "intra": None,
            "inter": "400 Gb/s per GPU",
        },
        "gpus": 8,
        "precision": "bf16",
        "seq_len": 2048,
        "micro_batch": 2,
        "local_batch": 4,
        "global_batch": 32,
        "grad_accum": 2,
        "dp": 8,
        "zero": 3,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": None,
        "vp": None,
        "activation_checkpointing": "none",
        "compile": True,
        "tokens_per_s_per_gpu": 50000,
        "tflops_per_gpu": None,
        "mfu_percent": None,
        "step_seconds": None,
        "memory_gib": None,
    } | changed


def test_a_row_is_read_as_it_was_run():
    case = rows.express(row())
    assert (case.rows, case.num_microbatches, case.shard, case.cluster.inter_node.bandwidth) == (
        2,
        2,
        8,
        280e9,
    )
    assert case.seconds == pytest.approx(4 * 2048 / 50000)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"precision": "bf16 + float8", "source": "lightning-thunder"}, "float8"),
        (
            {"precision": "bf16 + float8 rowwise", "notes": "low rowwise baseline (#1207)"},
            "too low",
        ),
        ({"cp": 4}, "context"),
        ({"dp": 4}, "not 8"),
        ({"source": "a"}, "says"),
    ],
)
def test_what_cannot_be_expressed_says_why(changed: dict[str, Any], why: str):
    assert why in rows.express(row(**changed))


def test_more_work_takes_longer_and_more_memory():
    base, deep = (
        price.predict(rows.express(row(arch=row()["arch"] | {"layers": n}))) for n in (8, 16)
    )
    assert 1.3 * base.seconds < deep.seconds < 2 * base.seconds
    assert base.num_bytes < deep.num_bytes
    full = price.predict(rows.express(row(activation_checkpointing="full")))
    assert full.seconds > base.seconds
    assert full.num_bytes < base.num_bytes


@pytest.mark.slow
def test_float8_products_and_tensor_parallelism_in_chunks_are_faster():
    """A source that does not say how it shards has the program's own way."""
    wide = {
        "arch": row()["arch"] | {"hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 16384},
        "zero": None,
    }
    cases = [
        rows.express(row(**wide, precision=name)) for name in ("bf16", "bf16 + float8 linears")
    ]
    divided = {**wide, "dp": 1, "tp": 8, "local_batch": 16, "global_batch": 16, "micro_batch": 8}
    cases += [rows.express(row(**divided, async_tp=chunks)) for chunks in (False, True)]
    assert all(case.zero == 3 for case in cases)
    plain, float8, whole, chunked = (price.predict(case).seconds for case in cases)
    assert float8 < 0.95 * plain
    assert 0.5 * whole < chunked < whole


def test_ranks():
    assert published.rank_correlation([(1, 10), (2, 30), (3, 20)]) == pytest.approx(0.5)
    assert published.percentile([1, 2, 3, 4], 0.5) == 2


def test_ties_report_the_largest_possible_rank():
    """Three rows, two of them priced alike: Spearman's is at most 0.866. Two that are alike in all
    give nothing.
    """
    cases = [rows.express(row(tokens_per_s_per_gpu=speed)) for speed in (40000, 50000)]
    other = rows.express(row(tokens_per_s_per_gpu=60000, micro_batch=4, grad_accum=1))
    one, two, three = (price.Prediction(seconds, 0.0, True, {}) for seconds in (1.0, 1.0, 0.5))
    (line,) = published.ties([(cases[0], one), (cases[1], two), (other, three)])
    assert "40000 and 50000 tokens/s" in line
    assert line.endswith("no more than 0.866")
    assert not published.ties([(cases[0], one), (other, three)])
