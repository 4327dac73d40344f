"""Our rules beside DTensor's: on one mesh axis both say which operands may be sharded and what the results then are.

torch's are functions per op and axis (`op_single_dim_strategy_funcs`, about a thousand ops), which its own
`torch/distributed/tensor/_ops/strategy_validation.py` proves as `proofs/prove.py` proves ours: shards in, recombined,
equal to the whole op. They know no gradients, so only values are compared: sharded operands, sums as results. All of it
is private there and may move: nothing but this test reads it.
"""

from __future__ import annotations

from typing import Any

import pytest
from rule_cases import CASES, Case
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.ir.op import OpCall, Slot
from alpa_strategy.sharding import axis_strategies

FUNCTIONS = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs

# What only we offer, and why torch does not.
OURS_ONLY = {
    "addmm": ("R,S1,S0->P", "the bias is added on the first device: a local implementation"),
    "addmm_scaled": ("R,S1,S0->P", "as addmm"),
    "baddbmm": ("R,S2,S1->P", "as addmm"),
    "embedding": ("S0,R->P", "rows of the table: each device looks up its own; torch has a mask buffer for that"),
    "embedding_padding": ("S0,R->P", "as embedding"),
    "convolution": ("R,S0,S0->S1 S1,S1,R->P", "channels; torch shards images along their batch only"),
}
COMPARED = [name for name, case in CASES.items() if case.call.target in FUNCTIONS]


def _text(placement: Any) -> str:
    """`S0`, `P`, `R`, or what else torch says; its `_ShardingPlaceholder(dim)` stands for every kind of sharding."""
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R" if isinstance(placement, Replicate) else f"S{placement.dim}"


def _shards(call: OpCall, inputs: list[Any], outputs: list[Any]) -> str | None:
    """The strategy as text; None if it takes partial sums, shards nothing, or a dim with fewer than two elements."""
    if any(isinstance(p, Partial) for p in inputs):
        return None
    text = f"{','.join(map(_text, inputs))}->{','.join(map(_text, outputs))}"
    pairs = zip([*inputs, *outputs], (*call.operands, *call.results), strict=True)
    sizes = [meta.shape[p.dim] for p, meta in pairs if not isinstance(p, Replicate | Partial)]
    return text if sizes and min(sizes) > 1 else None


def _torchs(case: Case) -> set[str]:
    metas = [TensorMeta(t.shape, t.stride(), t.dtype) for t in case.operands]

    def given(value: Any) -> Any:
        if isinstance(value, Slot):
            return metas[value.index]
        return [given(v) for v in value] if isinstance(value, tuple) else value

    call = case.call
    rules = FUNCTIONS[call.target].func(call.target, tuple(map(given, call.args)), dict(call.kwargs))
    placed = [[p for p in rule if p is not None] for rule in rules]
    n = len(call.results)
    return {text for rule in placed if (text := _shards(call, rule[n:], rule[:n])) is not None}


def _ours(case: Case) -> set[str]:
    def values(duals: Any) -> list[Placement]:
        return [dual.value for dual in duals]

    found = axis_strategies(case.call, 2)
    texts = {_shards(case.call, values(s.inputs), values(s.outputs)) for s in found}
    return {text for text in texts if text is not None}


def test_a_good_part_is_compared() -> None:
    assert len(COMPARED) > 60
    assert set(OURS_ONLY) <= set(COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_the_same_shards_as_torchs_rules(name: str) -> None:
    ours, torchs = _ours(CASES[name]), _torchs(CASES[name])
    assert torchs <= ours
    assert ours - torchs == set(OURS_ONLY.get(name, ("", ""))[0].split())


def test_placeholders_are_shards() -> None:
    """What `_text` relies on."""
    assert _text(_ShardingPlaceholder(1)) == _text(Shard(1)) == "S1"
