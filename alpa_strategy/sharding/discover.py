"""Rule discovery: which splits of an op's operands recombine to the whole result, by experiment.

See docs/formulas.md#sharding-rules.

For ops without a rule. A split is kept only if every trial agrees, forward and backward, on one way of recombining:
concatenate (S), sum (P) or equal (R). What cannot be decided is not kept; the op can always be repeated on all devices.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from alpa_strategy.ir.op import AxisStrategy, OpCall
from alpa_strategy.ir.placement import INVARIANT
from alpa_strategy.sharding.code_numbers import numbers_in_code
from alpa_strategy.sharding.discover_experiment import MIN_TRIALS, SUMMAND, WHOLE, Experiment, Split
from alpa_strategy.sharding.discover_trials import (
    ALL_KINDS,
    FEW_KINDS,
    SOME_KINDS,
    Trial,
    number_kinds,
    trials,
    variants,
    variants_past,
    with_fitting_shapes,
    with_target,
)
from alpa_strategy.sharding.discovery_store import DiscoveryStore
from alpa_strategy.sharding.isolation import tried
from alpa_strategy.sharding.localize import is_random
from alpa_strategy.sharding.splits import rounds_sums

MAX_HYPOTHESES = 1500


def discover(call: OpCall, axis_size: int, store: DiscoveryStore | None = None) -> tuple[AxisStrategy, ...]:
    """Strategies for `call` on a mesh axis of `axis_size` devices whose local call is the same call on local shards.

    The first is always "repeat on every device". Random and mutating ops get no other. With a `store`, splits found
    earlier for the same op, ranks and dtypes are the only ones tried: they are proved again at this call's shapes, so
    that a stale store can cost speed, never correctness. Runs the op on the CPU, at small shapes, some hundred times,
    in a child process where one is possible: an op that crashes there is not split in the way that made it crash.
    """
    repeated = AxisStrategy((INVARIANT,) * len(call.operands), (INVARIANT,) * len(call.results))
    if axis_size == 1 or not call.operands:
        return (repeated,)
    known = store.get(call) if store is not None else None
    if known is None:
        found = _discover(call, axis_size)
        if store is not None:
            store.put(call, [str(strategy) for strategy in found])
    else:
        found = _prove_again(call, axis_size, tuple(known))
    return (repeated, *(s for s in found if _fits(s, call, axis_size) and not rounds_sums(call, s)))


def _fits(strategy: AxisStrategy, call: OpCall, axis_size: int) -> bool:
    """Every sharded dim has an element for each device."""
    pairs = zip((*strategy.inputs, *strategy.outputs), (*call.operands, *call.results), strict=True)
    return all(dual.shard_dim is None or meta.shape[dual.shard_dim] >= axis_size for dual, meta in pairs)


@lru_cache(maxsize=4096)
def _discover(call: OpCall, axis_size: int) -> tuple[AxisStrategy, ...]:
    return _proved(call, axis_size, _hypotheses(call))


@lru_cache(maxsize=4096)
def _prove_again(call: OpCall, axis_size: int, texts: tuple[str, ...]) -> tuple[AxisStrategy, ...]:
    ranks = [len(meta.shape) for meta in call.operands]
    splits = []
    for text in texts:
        split = tuple(dual.value for dual in AxisStrategy.parse(text).inputs)
        if len(split) == len(ranks) and all(
            not isinstance(p, Shard) or p.dim < rank for p, rank in zip(split, ranks, strict=True)
        ):
            splits.append(split)
    return _proved(call, axis_size, list(dict.fromkeys(splits)))


def _hypotheses(call: OpCall) -> list[Split]:
    """Splits worth trying: operands along dims of one size, floating-point operands as summands, none at all."""
    metas = call.operands
    floating = [i for i, meta in enumerate(metas) if meta.dtype.is_floating_point or meta.dtype.is_complex]
    found: list[Split] = [(WHOLE,) * len(metas)]
    for size in sorted({size for meta in metas for size in meta.shape if size > 1}):
        options = [[WHOLE, *(Shard(d) for d, s in enumerate(meta.shape) if s == size)] for meta in metas]
        if math.prod(map(len, options)) <= MAX_HYPOTHESES:
            found += itertools.product(*options)
        else:  # many operands: one of them, or all that have this size at the same dim
            dims = {p.dim for option in options for p in option if isinstance(p, Shard)}
            found += [tuple(Shard(d) if Shard(d) in option else WHOLE for option in options) for d in sorted(dims)]
            found += _single(options)
    if len(floating) <= 6:
        options = [[WHOLE, SUMMAND] if i in floating else [WHOLE] for i in range(len(metas))]
        found += itertools.product(*options)
    else:
        options = [[WHOLE, SUMMAND] if i in floating else [WHOLE] for i in range(len(metas))]
        found += [*_single(options), tuple(option[-1] for option in options)]
    return list(dict.fromkeys(found))[:MAX_HYPOTHESES]


def _single(options: list[list[Placement]]) -> list[Split]:
    """One operand split, the others whole."""
    return [
        tuple(choice if j == i else WHOLE for j in range(len(options)))
        for i, option in enumerate(options)
        for choice in option[1:]
    ]


def _proved(call: OpCall, axis_size: int, splits: list[Split]) -> tuple[AxisStrategy, ...]:
    """The strategies behind those splits that survive every trial."""
    is_whole = getattr(call.target, "is_whole", False)  # a module with shapes inside that depend on data
    if is_whole or is_random(call) or _is_mutating(call) or _trusts_its_data(call):
        return ()
    numbers = numbers_in_code(call.target)
    candidates = _fitting(call, tuple(variants(call)))
    if not candidates:
        return ()
    small = _small_trials(candidates[:-1] or candidates, tuple(splits), numbers)
    if small is None:
        return ()
    large = (candidates[-1], *_fitting(call, tuple(variants_past(call, numbers))))
    found = tried(call, lambda target: _decided([with_target(v, target) for v in large], axis_size, small, numbers))
    return tuple(map(AxisStrategy.parse, found or ()))


@lru_cache(maxsize=4096)
def _fitting(call: OpCall, candidates: tuple[OpCall, ...]) -> tuple[OpCall, ...]:
    """Those variants whose shapes the op takes."""

    def fitting(target: Any) -> list[int]:
        return with_fitting_shapes(with_target(call, target), [with_target(v, target) for v in candidates])

    return tuple(candidates[i] for i in tried(call, fitting) or ()) if candidates else ()


def _decided(large: Sequence[OpCall], axis_size: int, small: _SmallTrials, numbers: tuple[float, ...]) -> list[str]:
    """What the small trials left and trials at the call's own size do not refute, as text."""
    kinds = FEW_KINDS if small.num_trials else (*ALL_KINDS, *number_kinds(numbers))
    responsive = list(small.responsive)
    with _plain_torch():
        evidence: list[Trial] = []
        for variant in large:
            found = list(trials(variant, kinds))
            responsive = [a or b for a, b in zip(responsive, _responsive(found, len(responsive)), strict=True)]
            evidence += found
        if small.num_trials + len(evidence) < MIN_TRIALS or any(map(_not_repeatable, evidence)):
            return []
        experiments = [experiment.copy() for experiment in small.experiments]
        chunk_counts = [axis_size] if small.num_trials else sorted({axis_size, 2, 3, 4, 5})
        for trial in evidence:
            experiments = [e for e in experiments if all(e.survives(trial, n) for n in chunk_counts)]
    return [str(strategy) for e in experiments if (strategy := e.verdict(responsive)) is not None]


@dataclass(frozen=True)
class _SmallTrials:
    """What the small variants said: the hypotheses left, and which results depended on the data."""

    num_trials: int
    experiments: tuple[Experiment, ...]
    responsive: tuple[bool, ...]


@lru_cache(maxsize=1024)
def _small_trials(
    candidates: tuple[OpCall, ...], splits: tuple[Split, ...], numbers: tuple[float, ...]
) -> _SmallTrials | None:
    """Experiments on the first variants that run: every kind of data on one, some on two more. None: not a function.

    Remembered: calls that differ only in their sizes share it.
    """
    kinds = (*ALL_KINDS, *number_kinds(numbers))
    return tried(
        candidates[0], lambda target: _tried_small([with_target(c, target) for c in candidates], splits, kinds)
    )


def _tried_small(
    candidates: Sequence[OpCall], splits: Sequence[Split], all_kinds: tuple[str, ...]
) -> _SmallTrials | None:
    experiments = [Experiment(candidates[0], split) for split in splits]
    num_results = len(candidates[0].results)
    responsive = [False] * num_results
    num_trials = num_variants = 0
    with _plain_torch():
        for variant in candidates:
            evidence = list(trials(variant, SOME_KINDS if num_variants else all_kinds))
            if any(map(_not_repeatable, evidence)):
                return None
            responsive = [a or b for a, b in zip(responsive, _responsive(evidence, num_results), strict=True)]
            for trial in evidence:  # the first ends most hypotheses
                chunk_counts = [2, 3, 4, 5] if num_trials < 2 else [2 + num_trials % 2]
                experiments = [e for e in experiments if all(e.survives(trial, n) for n in chunk_counts)]
                num_trials += 1
            num_variants += bool(evidence)
            if num_variants == 3:
                break
    return _SmallTrials(num_trials, tuple(experiments), tuple(responsive))


@contextmanager
def _plain_torch() -> Iterator[None]:
    """The op runs as it would in a bare script on the CPU, and leaves no trace in the random state."""
    with (
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _trusts_its_data(call: OpCall) -> bool:
    """ATen kernels that take positions for granted (of a forward, of their caller): other ones corrupt memory."""
    if not isinstance(call.target, torch._ops.OpOverload) or call.target.namespace != "aten":
        return False
    integers = any(not (m.dtype.is_floating_point or m.dtype.is_complex) for m in call.operands)
    name = call.target._schema.name
    return integers and (name.endswith("_backward") or "_unsafe_" in name or name == "aten::segment_reduce")


def _is_mutating(call: OpCall) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and call.target._schema.is_mutable


def _not_repeatable(trial: Trial) -> bool:
    """The op draws random numbers, keeps state or changes its operands."""
    operands = tuple(operand.clone() for operand in trial.operands)
    random_state = torch.get_rng_state()
    try:
        with torch.no_grad():
            results = trial.call.call(*operands)
    except Exception:  # of any type: it ran before
        return True
    if not torch.equal(torch.get_rng_state(), random_state):
        return True
    results = (results,) if isinstance(results, Tensor) else tuple(results)
    return not all(map(_same, (*results, *operands), (*trial.results, *trial.operands)))


def _responsive(evidence: list[Trial], num_results: int) -> list[bool]:
    """Per result, whether its value ever depended on the data: a result that never did proves nothing."""
    return [any(not _same(evidence[0].results[j], t.results[j]) for t in evidence[1:]) for j in range(num_results)]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.all((a == b) | ((a != a) & (b != b))))
