"""Our rules beside DTensor's: on one mesh axis both say which operands may be sharded and what the
results then are.

torch's are functions per op and axis (`op_single_dim_strategy_funcs`, about a thousand ops), which
its own
`torch/distributed/tensor/_ops/strategy_validation.py` proves as `proofs/prove.py` proves ours:
shards in, recombined,
equal to the unsharded op. They know no gradients, so only values are compared: sharded operands,
sums as results. All of it
is private there and may move: nothing but this test reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from proofs.samples import captured_calls, database
from rule_cases import CASES
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.ir.op import OpCall, Slot
from alpa_strategy.sharding.strategies import axis_strategies

FUNCTIONS = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs

in_number = pytest.mark.skipif(
    len(FUNCTIONS) < 100, reason=f"this PyTorch has {len(FUNCTIONS)} such functions only"
)

# What only we offer, and why torch does not.
OURS_ONLY = {
    "addmm": ("R,S1,S0->P", "the bias is added on the first device: a local implementation"),
    "addmm_scaled": ("R,S1,S0->P", "as addmm"),
    "baddbmm": ("R,S2,S1->P", "as addmm"),
    "embedding": (
        "S0,R->P",
        "rows of the table, each device looks up its own; torch has a mask buffer for that",
    ),
    "embedding_padding": ("S0,R->P", "as embedding"),
    "convolution": (
        "R,S0,S0->S1 S1,S1,R->P",
        "channels; torch shards images along their batch only",
    ),
}
# The same over the operator database.
OURS_MORE = {
    **dict.fromkeys(
        ("aten.addmm.default", "aten.baddbmm.default", "aten.embedding.default"), "as above"
    ),
    "aten.grid_sampler_2d.default": "channels, and places of the grid",
    "aten.grid_sampler_3d.default": "channels, and places of the grid",
    "aten.cholesky_solve.default": "every right-hand side is solved by itself",
    "aten.linalg_ldl_solve.default": "every right-hand side is solved by itself",
    "aten.linalg_lu_solve.default": "every right-hand side is solved by itself",
    "aten.linalg_solve_triangular.default": "every right-hand side is solved by itself",
}
TORCHS_MORE = {
    "aten.index_put.default": "a mask as index, which ours leave whole",
    "aten.linalg_solve_triangular.default": (
        "wrong there: unsharded matrices, right-hand sides sharded along their batch"
    ),
}
COMPARED = [name for name, case in CASES.items() if case.call.target in FUNCTIONS]


def _text(placement: Any) -> str:
    """`S0`, `P`, `R`, or what else torch says; its `_ShardingPlaceholder(dim)` stands for every
    kind of sharding.
    """
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R" if isinstance(placement, Replicate) else f"S{placement.dim}"


def _shards(call: OpCall, inputs: list[Any], outputs: list[Any]) -> str | None:
    """The strategy as text; None if it takes partial sums, shards nothing, or a dim with fewer than
    two elements.
    """
    if any(isinstance(p, Partial) for p in inputs):
        return None
    text = f"{','.join(map(_text, inputs))}->{','.join(map(_text, outputs))}"
    pairs = zip([*inputs, *outputs], (*call.operands, *call.results), strict=True)
    sizes = [meta.shape[p.dim] for p, meta in pairs if not isinstance(p, Replicate | Partial)]
    if sizes and min(sizes) > 1:
        return text
    return None


def _torchs(call: OpCall, operands: Sequence[Tensor]) -> set[str]:
    metas = [TensorMeta(t.shape, t.stride(), t.dtype) for t in operands]

    def given(value: Any) -> Any:
        if isinstance(value, Slot):
            return metas[value.index]
        if isinstance(value, tuple):
            return [given(v) for v in value]
        return value

    kwargs = {name: given(value) for name, value in call.kwargs}
    rules = FUNCTIONS[call.target].func(call.target, tuple(map(given, call.args)), kwargs)
    placed = []
    for rule in rules:
        placed.append([p for p in rule if p is not None])
    n = len(call.results)
    texts = {_shards(call, rule[n:], rule[:n]) for rule in placed}
    return texts - {None}


def _ours(call: OpCall) -> set[str]:
    def values(duals: Any) -> list[Placement]:
        return [dual.value for dual in duals]

    texts = {_shards(call, values(s.inputs), values(s.outputs)) for s in axis_strategies(call, 2)}
    return {text for text in texts if text is not None}


@in_number
def test_a_good_part_is_compared() -> None:
    assert len(COMPARED) > 60
    assert set(OURS_ONLY) <= set(COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_the_same_shards_as_torchs_rules(name: str) -> None:
    call, operands = CASES[name].call, CASES[name].operands
    ours, torchs = _ours(call), _torchs(call, operands)
    assert torchs <= ours
    assert ours - torchs == set(OURS_ONLY.get(name, ("", ""))[0].split())


@in_number
@pytest.mark.slow
def test_the_same_shards_over_the_operator_database() -> None:
    """About 220 ops of torch's database have a rule in both; what differs is listed with the
    reason.
    """
    pytest.importorskip("expecttest")
    seen: Counter[Any] = Counter()
    ours_more, torchs_more = set(), set()
    for found in captured_calls(database(), 2):
        call = getattr(found, "call", None)
        if call is None or call.target not in FUNCTIONS or seen[call.target] == 3:
            continue
        try:
            ours, torchs = _ours(call), _torchs(call, found.operands)
        except (AssertionError, NotImplementedError, IndexError, TypeError, ValueError):
            continue  # torch's rule does not take these arguments
        seen[call.target] += 1
        if ours - torchs:
            ours_more.add(call.target_name)
        if torchs - ours:
            torchs_more.add(call.target_name)
    assert len(seen) > 200
    assert ours_more <= OURS_MORE.keys()
    assert torchs_more <= TORCHS_MORE.keys()


def test_placeholders_are_shards() -> None:
    """What `_text` relies on."""
    assert _text(_ShardingPlaceholder(1)) == _text(Shard(1)) == "S1"
