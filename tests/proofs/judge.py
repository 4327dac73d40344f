"""What the rules say about captured calls, and whether it is true: every strategy is run in shards
on the call's data.

An op's verdict is the best of its calls: some samples are scalars that nothing can cut.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from proofs.prove import distribute, prove
from proofs.samples import CapturedCall
from proofs.verdicts import NONE_EXISTS, OpVerdict, figures, without_strategies
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate

from alpa_strategy.display.op_table import STORED
from alpa_strategy.errors import ShardingError
from alpa_strategy.ir.op import AxisStrategy, OpCall, TensorMeta
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, REPLICATE, DualPlacement
from alpa_strategy.sharding.rule_table import rule_of
from alpa_strategy.sharding.strategies import axis_strategies, is_random, localize, rule_origin

AXIS_SIZES = (2, 3)


@dataclass
class _Tally:
    """An op's verdict while its calls are tried."""

    origin: str = "replicated"
    sharded: dict[str, None] = field(default_factory=dict)
    num_calls: int = 0
    num_proved: int = 0
    wrong: list[str] = field(default_factory=list)
    why: dict[str, None] = field(default_factory=dict)


def judge(
    calls: Iterable[CapturedCall], axis_sizes: Sequence[int] = AXIS_SIZES, most: int = 8
) -> list[OpVerdict]:
    """Verdicts by op name. Of each op up to `most` different calls are tried, each on axes of all
    `axis_sizes`.
    """
    tallies: dict[str, _Tally] = {}
    seen: set[OpCall] = set()
    for captured in calls:
        call = captured.call
        tally = tallies.setdefault(call.target_name, _Tally())
        if call in seen or tally.num_calls >= most:
            continue
        seen.add(call)
        tally.num_calls += 1
        _judge_call(tally, captured, axis_sizes)
    return [_verdict(name, tallies[name]) for name in sorted(tallies)]


def _verdict(name: str, tally: _Tally) -> OpVerdict:
    reasons = [reason for reason in tally.why if not reason.startswith(NONE_EXISTS)] or list(
        tally.why
    )
    why = "" if tally.sharded else "; ".join(reasons)
    return OpVerdict(
        name,
        tally.origin,
        tuple(tally.sharded),
        tally.num_calls,
        tally.num_proved,
        tuple(tally.wrong),
        why,
    )


def _judge_call(tally: _Tally, captured: CapturedCall, axis_sizes: Sequence[int]) -> None:
    call = captured.call
    found = False
    for axis_size in axis_sizes:
        try:
            strategies = axis_strategies(call, axis_size)
        except Exception as error:
            # of any type: a rule that cannot read a call is as wrong as one that misreads it
            tally.wrong.append(f"{captured.name}, {axis_size} devices: the rule raises {error!r}")
            return
        for strategy in strategies:
            if not divides(strategy):
                continue
            found = True
            tally.sharded.setdefault(str(strategy))
            problem = refutation(call, strategy, axis_size, captured.operands)
            if problem is None:
                tally.num_proved += 1
            else:
                tally.wrong.append(f"{captured.name}, {axis_size} devices: {problem}")
    if tally.origin == "replicated" and (found or rule_of(call.target) is not None):
        tally.origin = rule_origin(call)
    if not found:
        tally.why.setdefault(why_replicated(call))


def divides(strategy: AxisStrategy) -> bool:
    """Whether the devices of the axis hold different data or do different work (not all `R`, not
    all `R*`).
    """
    return any(not isinstance(p.value, Replicate) for p in (*strategy.inputs, *strategy.outputs))


def refutation(
    call: OpCall, strategy: AxisStrategy, axis_size: int, operands: Sequence[Tensor]
) -> str | None:
    """Why the strategy is wrong on this data and on the same data full of ties; None when it is
    right.

    Shards of a random op draw other numbers than the whole (`runtime.random`): only shapes are
    compared.
    """
    # values of fresh memory are no result
    if is_random(call) or "empty" in call.target_name:
        return _shape_refutation(call, strategy, axis_size, operands)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for data in (tuple(operands), tuple(map(_with_ties, operands))):
            proved = next((c for c in (call, _without_gradients(call)) if _runs(c, data)), None)
            if proved is None:
                continue
            text = strategy if proved is call else _values_only(strategy)
            if PARTIAL in text.inputs and _makes_infinity(call, data):
                # no evidence: partial values of either sign by zero are infinity minus infinity
                continue
            try:
                prove(proved, (text,), axis_size, data, rtol=_tolerance(data))
            except ShardingError as error:
                return error.problem
    return None


def _without_gradients(call: OpCall) -> OpCall:
    """For ops that are not differentiable here (eigenvectors with any gradient, infinities on the
    way).
    """

    def plain(metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
        return tuple(replace(m, requires_grad=False) for m in metas)

    return replace(call, operands=plain(call.operands), results=plain(call.results))


def _values_only(strategy: AxisStrategy) -> AxisStrategy:
    """`R*` is `R` where no gradient flows."""

    def plain(duals: tuple[DualPlacement, ...]) -> tuple[DualPlacement, ...]:
        plain_duals = []
        for dual in duals:
            plain_duals.append(INVARIANT if dual == REPLICATE else dual)
        return tuple(plain_duals)

    return replace(strategy, inputs=plain(strategy.inputs), outputs=plain(strategy.outputs))


def _shape_refutation(
    call: OpCall, strategy: AxisStrategy, axis_size: int, operands: Sequence[Tensor]
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    placements = [[placement.value] for placement in strategy.inputs]
    parts = [
        distribute(o, p, (axis_size,), generator) for o, p in zip(operands, placements, strict=True)
    ]
    for device in range(axis_size):
        local = localize(call, (strategy,), (axis_size,), (device,))
        with torch.random.fork_rng(devices=[]):
            results = local.call.call(*(part[(device,)] for part in parts))
        if isinstance(results, Tensor):
            results = (results,)
        shapes = [tuple(result.shape) for result in results]
        if shapes != [meta.shape for meta in local.call.results]:
            return f"{call.target_name} as {strategy}: device {device} makes shapes {shapes}"
    return None


def _tolerance(data: Sequence[Tensor]) -> float:
    complex_dtypes = {d.dtype for d in data if d.is_complex()}
    return 1e-4 if complex_dtypes - {torch.complex128} else 1e-6


def _with_ties(tensor: Tensor) -> Tensor:
    return tensor.round() if tensor.is_floating_point() else tensor


def _makes_infinity(call: OpCall, data: Sequence[Tensor]) -> bool:
    """Whether a result of the unsharded op is infinite though the data is not."""
    results = call.call(*data)
    results = (results,) if isinstance(results, Tensor) else results
    return any(bool(r.isinf().any()) for r in results) and not any(
        bool(d.isinf().any()) for d in data
    )


def _runs(call: OpCall, data: Sequence[Tensor]) -> bool:
    """Whether the unsharded op takes this data, forward and backward."""
    leaves = []
    for d, m in zip(data, call.operands, strict=True):
        leaves.append(
            (d.detach().double() if d.is_floating_point() else d.detach())
            .clone()
            .requires_grad_(m.requires_grad)
        )
    try:
        results = call.call(*leaves)
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        pairs = [(r, torch.ones_like(r)) for r in results if r.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if pairs and wanted:
            torch.autograd.grad(
                [r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
    except Exception:  # of any type: the op refuses the data
        return False
    return True


def why_replicated(call: OpCall) -> str:
    """Why a call has no strategy that divides its work, in a few words."""
    if not call.operands:
        return f"{NONE_EXISTS}: a constant, made whole on every device"
    if all(size < 2 for meta in call.operands for size in meta.shape):
        return f"{NONE_EXISTS}: its operands have one element"
    if all(meta.num_elements < 2 for meta in call.results):
        return f"{NONE_EXISTS}: one number from all elements, which is no sum"
    if is_random(call):
        return "draws random numbers in an order that shards would change"
    if rule_of(call.target) is not None:
        return "by its rule, no dim of this call is independent of the others"
    return "no way of cutting it gave the whole result"


def summary(verdicts: Sequence[OpVerdict]) -> str:
    """The figures in a few lines of text, then what was wrong, then the ops without a sharded
    strategy and why.
    """
    missing, impossible = without_strategies(verdicts)
    lines = [
        *figures(verdicts),
        *(f"  WRONG {v.op}: {text}" for v in verdicts for text in v.wrong),
        *(f"  {v.op}: {v.why}" for v in (*missing, *impossible)),
    ]
    return "\n".join(lines)


def save(verdicts: Iterable[OpVerdict], path: Path = STORED) -> None:
    """Write the verdicts, one line an op (temporary file in the same folder, then rename)."""
    verdicts = sorted(verdicts, key=lambda v: v.op)
    rows = [json.dumps(asdict(v)) for v in verdicts]
    version = torch.__version__.partition("+")[0]
    content = (
        f'{{"torch": "{version}", "figures": {json.dumps(figures(verdicts))}, "ops": [\n'
        + ",\n".join(rows)
        + "\n]}\n"
    )
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def merged(verdicts: Iterable[OpVerdict]) -> list[OpVerdict]:
    """One verdict an op, from those of several runs over different parts of the database."""
    results: dict[str, OpVerdict] = {}
    for new in verdicts:
        old = results.get(new.op)
        if old is None:
            results[new.op] = new
            continue
        sharded = tuple(dict.fromkeys((*old.sharded, *new.sharded)))
        results[new.op] = replace(
            old,
            origin=new.origin if old.origin == "replicated" else old.origin,
            sharded=sharded,
            num_calls=old.num_calls + new.num_calls,
            num_proved=old.num_proved + new.num_proved,
            wrong=(*old.wrong, *new.wrong),
            why="" if sharded else "; ".join(dict.fromkeys(filter(None, (old.why, new.why)))),
        )
    return [results[op] for op in sorted(results)]
