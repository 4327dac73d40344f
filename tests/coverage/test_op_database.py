"""Rules are proved over PyTorch's own operator database: every strategy, run in shards, gives the
whole op's result.
"""

from __future__ import annotations

import pytest
from proofs.judge import divides, judge, merged, refutation, summary
from proofs.samples import CapturedCall, captured_calls, database
from proofs.verdicts import NONE_EXISTS, load

from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.sharding.strategies import axis_strategies

pytest.importorskip("expecttest")

# Ops that are made of others, or have no case of their own in sharding/rule_cases.py.
REPRESENTATIVE = frozenset(
    [
        "einsum",
        "index_put",
        "linalg.cholesky",
        "linalg.solve",
        "sort",
        "scatter_reduce",
        "softmax",
        "std",
        "topk",
        "unfold",
        "cartesian_prod",
        "cross",
        "diag_embed",
        "kron",
        "linalg.multi_dot",
        "quantile",
        "rot90",
        "sum_to_size",
        "tensordot",
        "trapezoid",
        "var_mean",
        "fft.rfft",
        "nn.functional.conv_transpose2d",
        "nn.functional.embedding_bag",
        "nn.functional.grid_sample",
        "nn.functional.group_norm",
        "nn.functional.instance_norm",
        "nn.functional.interpolate",
        "nn.functional.max_pool2d",
        "nn.functional.triplet_margin_loss",
    ]
)


def calls_of(infos, samples: int) -> list[CapturedCall]:
    return [c for c in captured_calls(infos, samples) if isinstance(c, CapturedCall)]


def test_a_representative_part_has_proved_rules():
    verdicts = judge(
        calls_of([info for info in database() if info.name in REPRESENTATIVE], 2),
        axis_sizes=(2,),
        most=2,
    )
    assert [text for v in verdicts for text in v.wrong] == []
    missing = []
    for v in verdicts:
        if not v.sharded and not v.why.startswith(NONE_EXISTS):
            missing.append(v)
    assert missing == []
    assert sum(v.num_proved for v in verdicts) > 150


def test_a_wrong_strategy_is_found_out():
    (call, *_) = (
        c
        for c in calls_of([i for i in database() if i.name == "softmax"], 2)
        if "softmax" in str(c.call.target)
    )
    dim = dict(enumerate(call.call.args))[1] % len(call.call.operands[0].shape)
    assert (
        refutation(call.call, AxisStrategy.parse(f"S{dim}->S{dim}"), 2, call.operands) is not None
    )
    right = [s for s in axis_strategies(call.call, 2) if divides(s)]
    assert all(refutation(call.call, s, 2, call.operands) is None for s in right)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_the_whole_database_and_the_stored_findings(part):
    verdicts = judge(calls_of(database()[part::8], 6))
    assert [text for v in verdicts for text in v.wrong] == []
    stored = {v.op: v for v in load()}
    for verdict in verdicts:
        assert bool(stored[verdict.op].sharded) >= bool(verdict.sharded), verdict.op


def test_the_stored_findings_cover_what_can_be_covered():
    verdicts = load()
    assert not any(v.wrong for v in verdicts)
    missing = []
    for v in verdicts:
        if not v.sharded and not v.why.startswith(NONE_EXISTS):
            missing.append(v.op)
    assert len(missing) <= 0.05 * len(verdicts)
    assert merged([*verdicts, *verdicts])[0].num_calls == 2 * verdicts[0].num_calls
    assert "wrong: 0" in summary(verdicts)
