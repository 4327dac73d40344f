"""Rule discovery: which splits of an op's operands recombine to the whole result, by experiment.

For ops without a rule (docs/formulas.md#sharding-rules). A split is kept only if every trial agrees, forward and
backward, on one way of recombining: concatenate (S), sum (P) or equal (R). What cannot be decided is not kept; the op
can always be repeated on all devices. The one entry is `discover`.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.ir.op import AxisStrategy, OpCall, TensorMeta
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, REPLICATE, DualPlacement, chunk_range, shard
from alpa_strategy.sharding.discovery_trials import (
    ALL_KINDS,
    FEW_KINDS,
    SHARED_KINDS,
    SOME_KINDS,
    Trial,
    accepts_shapes,
    number_kinds,
    numbers_in_code,
    run_call,
    trials,
    variants,
    variants_past,
)
from alpa_strategy.sharding.isolation import tried
from alpa_strategy.sharding.localize import is_random
from alpa_strategy.sharding.rule_table import added_operand
from alpa_strategy.sharding.splits import has_elements, repeated, rounds_sums

MAX_HYPOTHESES = 1500
MIN_TRIALS = 3  # that a verdict needs
WHOLE, SUMMAND = Replicate(), Partial("sum")

Division = tuple[Placement, ...]  # value placement of every operand
Run = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]  # of `run_call`: results, gradients of the operands


def discover(call: OpCall, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Strategies for `call` on a mesh axis of `axis_size` devices whose local call is the same call on local shards.

    The first is always "repeat on every device". Random and mutating ops get no other. Runs the op on the CPU, at small
    shapes, some hundred times, in a child process where one is possible: an op that crashes there is not split.
    """
    found: tuple[AxisStrategy, ...] = ()
    if axis_size > 1 and call.operands and not _must_stay_whole(call):
        found = _discover(call, axis_size)
    return (repeated(call), *(s for s in found if has_elements(call, s, axis_size) and not rounds_sums(call, s)))


def _must_stay_whole(call: OpCall) -> bool:
    """Ops that no trial can judge, or that a trial could harm."""
    if is_random(call):
        return True
    if not isinstance(call.target, torch._ops.OpOverload):
        return False
    name = call.target._schema.name
    integers = any(not (m.dtype.is_floating_point or m.dtype.is_complex) for m in call.operands)
    # ATen kernels that take positions for granted (of a forward, of their caller): other ones corrupt memory.
    trusts_its_data = name.endswith("_backward") or "_unsafe_" in name or name == "aten::segment_reduce"
    return call.target._schema.is_mutable or (call.target.namespace == "aten" and integers and trusts_its_data)


@lru_cache(maxsize=4096)
def _discover(call: OpCall, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Two rounds: many kinds of data at small shapes, shared by calls of one pattern; then a few at the call's own."""
    numbers = numbers_in_code(call.target)
    candidates = tuple(variants(call))
    if not candidates:
        return ()
    small = _small_trials(candidates[:-1] or candidates, _divisions(call), numbers)
    if small is None:
        return ()
    large = (*candidates[-2:], *variants_past(call, numbers))  # as large as the call, with its arguments resized or not
    return tuple(tried(call, lambda: small.continued(large, axis_size, numbers)) or ())


@lru_cache(maxsize=1024)
def _small_trials(
    candidates: tuple[OpCall, ...], divisions: tuple[Division, ...], numbers: tuple[float, ...]
) -> _Evidence | None:
    """Experiments on the first variants that run: every kind of data on one, some on two more. None: not a function.

    Remembered: calls that differ only in their sizes share it.
    """

    def counts(trial: int) -> tuple[int, ...]:
        return (2, 3, 4, 5) if trial < 2 else (2 + trial % 2,)  # the first trials end most hypotheses

    def experiment() -> _Evidence | None:
        first = candidates[0]
        evidence = _Evidence([Experiment(first, division) for division in divisions], [False] * len(first.results))
        num_variants = 0
        for candidate in candidates:
            before = evidence.num_trials
            kinds = SOME_KINDS if num_variants else (*ALL_KINDS, *number_kinds(numbers))
            if not evidence.add(candidate, kinds, counts):
                return None
            num_variants += evidence.num_trials > before
            if num_variants == 3:
                break
        return evidence

    return tried(candidates[0], experiment)


@dataclass
class _Evidence:
    """The hypotheses that trials have left, and which results ever depended on the data: others prove nothing."""

    experiments: list[Experiment]
    responsive: list[bool]
    num_trials: int = 0

    def add(self, variant: OpCall, kinds: tuple[str, ...], counts: Callable[[int], Iterable[int]]) -> bool:
        """Try all hypotheses on a variant, trial number i on each of `counts(i)` devices; False: it is no function."""
        with _plain_torch():
            found = list(trials(variant, kinds))
            if any(map(_not_repeatable, found)):
                return False
            for j in range(len(self.responsive)):
                self.responsive[j] |= any(not _same(found[0].results[j], trial.results[j]) for trial in found[1:])
            for trial in found:
                chunks = counts(self.num_trials)
                self.experiments = [e for e in self.experiments if all(e.survives(trial, n) for n in chunks)]
                self.num_trials += 1
        return True

    def continued(self, large: Sequence[OpCall], axis_size: int, numbers: tuple[float, ...]) -> list[AxisStrategy]:
        """What trials on these variants do not refute either."""
        evidence = copy.deepcopy(self)  # it is shared by all calls of the pattern
        kinds = FEW_KINDS if self.num_trials else (*ALL_KINDS, *number_kinds(numbers))
        counts = (axis_size,) if self.num_trials else tuple(sorted({axis_size, 2, 3, 4, 5}))
        if not all(evidence.add(variant, kinds, lambda i: counts) for variant in large):
            return []
        if evidence.num_trials < MIN_TRIALS:
            return []
        return [s for e in evidence.experiments if (s := e.verdict(evidence.responsive)) is not None]


def _divisions(call: OpCall) -> tuple[Division, ...]:
    """Hypotheses: operands along dims of one size, floating-point operands as summands, none at all."""
    metas = call.operands
    found: list[Division] = [(WHOLE,) * len(metas)]
    for size in sorted({size for meta in metas for size in meta.shape if size > 1}):
        options = [[WHOLE, *(Shard(d) for d, s in enumerate(meta.shape) if s == size)] for meta in metas]
        if math.prod(map(len, options)) <= MAX_HYPOTHESES:
            found += itertools.product(*options)
        else:  # many operands: all that have this size at the same dim
            dims = {p.dim for option in options for p in option if isinstance(p, Shard)}
            found += [tuple(Shard(d) if Shard(d) in option else WHOLE for option in options) for d in sorted(dims)]
    options = [[WHOLE, SUMMAND] if m.dtype.is_floating_point or m.dtype.is_complex else [WHOLE] for m in metas]
    if sum(map(len, options)) <= len(options) + 6:
        found += itertools.product(*options)
    else:
        found.append(tuple(option[-1] for option in options))
    return tuple(dict.fromkeys(found))[:MAX_HYPOTHESES]


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


def _same(a: Tensor, b: Tensor) -> bool:
    # `!=` of itself: nan, which is as good as another nan.
    return a.shape == b.shape and bool(torch.all((a == b) | ((a != a) & (b != b))))


class Experiment:
    """One division of the operands, and the dual placements of results and whole operands that all trials so far allow.

    With every operand whole the question is the backward's: do the devices' gradients for summands of the results'
    gradients add up (`R*,...->R*`)?

    Attributes:
        divided: whether it gives the devices different parts.
        with_summands: whether something is handed out in random summands.
        num_tests: trials that were evidence.
        added: an operand that is part of a sum once: the other devices have zeros in its place.
        operands, results: the placements that are left, by operand and by result.
        has_grad, result_has_grad: whether a gradient was seen.
    """

    def __init__(self, call: OpCall, division: Division) -> None:
        self.division = division
        self.divided = any(placement != WHOLE for placement in division)
        self.with_summands = not self.divided or SUMMAND in division
        self.num_tests = 0
        self.operands = [_operand_duals(placement) for placement in division]
        self.results = [_result_duals(meta) for meta in call.results]
        self.added: int | None = None
        self.has_grad = [False] * len(division)
        self.result_has_grad = [False] * len(call.results)

    @classmethod
    def of(cls, call: OpCall, strategy: AxisStrategy) -> Experiment:
        """Whether this strategy is right: it alone is allowed from the start."""
        experiment = cls(call, tuple(dual.value for dual in strategy.inputs))
        experiment.operands = [{dual} for dual in strategy.inputs]
        experiment.results = [{dual} for dual in strategy.outputs]
        if strategy.implementation is not None:
            experiment.added = added_operand(call)
        return experiment

    def survives(self, trial: Trial, n: int) -> bool:
        """Run the trial on `n` devices; False when no way of recombining is left."""
        if self._says_nothing(trial, n):
            return True
        runs = self._runs(trial, n)
        if runs is None or any(len(results) != len(trial.results) for results, _ in runs):
            return False
        self.num_tests += 1
        for j, whole in enumerate(trial.results):
            self.results[j] &= _recombining(whole, [results[j] for results, _ in runs], self.results[j], trial)
            self.result_has_grad[j] |= trial.result_grads[j] is not None
        for i, grad in enumerate(trial.operand_grads):
            self._narrow_operand(i, grad, [grads[i] for _, grads in runs], trial)
        return all(self.results) and all(self.operands)

    def _says_nothing(self, trial: Trial, n: int) -> bool:
        """Whether the trial is no evidence for or against: too small for `n` devices, or summands that make it nan."""
        dims = zip(trial.operands, self.division, strict=True)
        if any(isinstance(placement, Shard) and operand.shape[placement.dim] < n for operand, placement in dims):
            return True
        return self.with_summands and (trial.kind in ("infinity", "masked") or trial.overflows)

    def _runs(self, trial: Trial, n: int) -> list[Run] | None:
        """What the op gives on each of `n` devices; None when it refuses a part, which the whole did not deserve."""
        # The same summands in every process, so that the verdict is.
        generator = torch.Generator().manual_seed(n)
        alike = trial.kind in SHARED_KINDS
        summed_grads = None
        if not self.divided:
            summed_grads = [None if g is None else _summands(g, n, generator, alike) for g in trial.result_grads]
        parts = [
            _summands(operand, n, generator, alike) if placement == SUMMAND else _parts(operand, placement, n)
            for operand, placement in zip(trial.operands, self.division, strict=True)
        ]
        if self.added is not None:
            parts[self.added][1:] = [torch.zeros_like(part) for part in parts[self.added][1:]]
        runs: list[Run] = []
        for device in range(n):
            if not accepts_shapes(trial.call, tuple(tuple(part[device].shape) for part in parts)):
                return None

            def grads_for(results: tuple[Tensor, ...], device: int = device) -> list[Tensor | None]:
                if summed_grads is not None:
                    return [None if g is None else g[device] for g in summed_grads]
                return [self._grad_part(j, result, trial, n, device) for j, result in enumerate(results)]

            try:
                results, grads = run_call(trial.call, tuple(part[device] for part in parts), grads_for)
            except Exception:  # of any type
                return None
            runs.append((results, tuple(None if i == self.added and device else g for i, g in enumerate(grads))))
        return runs

    def _grad_part(self, j: int, result: Tensor, trial: Trial, n: int, device: int) -> Tensor | None:
        """What the device's result receives: the whole gradient if the result is R or P, else its shard."""
        whole, grad = trial.results[j], trial.result_grads[j]
        if grad is None or result.shape == whole.shape:
            return grad
        for dual in self.results[j]:
            if dual.shard_dim is not None and whole.shape[dual.shard_dim] >= n:
                chunk = _chunk(grad, dual.shard_dim, n, device)
                if chunk.shape == result.shape:
                    return chunk
        raise ValueError("a result whose shape is part of no way of recombining")

    def _narrow_operand(self, i: int, whole: Tensor | None, grads: list[Tensor | None], trial: Trial) -> None:
        if whole is None and all(grad is None for grad in grads):
            return
        self.has_grad[i] = True
        parts = _parts(trial.operands[i], self.division[i], len(grads))
        # Autograd gives None for a gradient of zeros.
        found = [torch.zeros_like(part) if grad is None else grad for grad, part in zip(grads, parts, strict=True)]
        expected = torch.zeros_like(trial.operands[i]) if whole is None else whole
        allowed = set()
        for dual in self.operands[i]:
            as_value = {REPLICATE: PARTIAL, PARTIAL: INVARIANT}.get(dual, dual)  # how the gradients recombine
            if _recombining(expected, found, {as_value}, trial):
                allowed.add(dual)
        self.operands[i] = allowed

    def verdict(self, responsive: list[bool]) -> AxisStrategy | None:
        """The one strategy left, or None when the trials decide nothing."""
        if self.num_tests < MIN_TRIALS:
            return None
        if not self.divided:  # R*,...->R*: the same work everywhere, on summands of the gradient
            if not any(self.has_grad) or any(
                has_grad and REPLICATE not in allowed
                for has_grad, allowed in zip(self.has_grad, self.operands, strict=True)
            ):
                return None
            return AxisStrategy(
                tuple(REPLICATE if has_grad else INVARIANT for has_grad in self.has_grad),
                tuple(REPLICATE if has_grad else INVARIANT for has_grad in self.result_has_grad),
            )
        if not all(responsive) or any(len(allowed) != 1 for allowed in self.results):
            return None
        inputs = []
        for allowed, has_grad in zip(self.operands, self.has_grad, strict=True):
            if len(allowed) == 1:
                inputs.append(next(iter(allowed)))
            elif not has_grad:
                inputs.append(INVARIANT)
            else:
                return None
        return AxisStrategy(tuple(inputs), tuple(next(iter(allowed)) for allowed in self.results))


def _operand_duals(placement: Placement) -> set[DualPlacement]:
    """How an operand that is split so may be meant; of a whole one its gradient decides."""
    if isinstance(placement, Shard):
        return {shard(placement.dim)}
    return {PARTIAL} if placement == SUMMAND else {INVARIANT, REPLICATE}


def _result_duals(meta: TensorMeta) -> set[DualPlacement]:
    """Every way in which results of the devices could recombine."""
    return {*map(shard, range(len(meta.shape))), INVARIANT, *([PARTIAL] if _adds(meta.dtype) else [])}


def _adds(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be summed: booleans and the wide unsigned types have no addition."""
    return dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64)


def _chunk(tensor: Tensor, dim: int, n: int, device: int) -> Tensor:
    start, stop = chunk_range(tensor.shape[dim], n, device)
    return tensor.narrow(dim, start, stop - start)


def _parts(tensor: Tensor, placement: Placement, n: int) -> list[Tensor]:
    """What the `n` devices hold of an operand (of a Partial: something of the right shape)."""
    if isinstance(placement, Shard):
        return [_chunk(tensor, placement.dim, n, device) for device in range(n)]
    return [tensor] * n


def _summands(tensor: Tensor, n: int, generator: torch.Generator, alike: bool) -> list[Tensor]:
    """`n` random summands of a tensor; `alike`: shares of it, as large as itself, else normal numbers and the rest."""

    def draw() -> Tensor:
        data = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        return tensor * data if alike else data

    parts = [draw() for _ in range(n - 1)]
    return [*parts, tensor - sum(parts)]


def _recombining(
    whole: Tensor, parts: list[Tensor], candidates: set[DualPlacement], trial: Trial
) -> set[DualPlacement]:
    """The candidates under which the devices' `parts` make up the whole."""
    n = len(parts)
    scale = _scale([whole, *parts])
    found = set()
    for dual in candidates:
        dim = dual.shard_dim
        if dim is not None:
            right = whole.shape[dim] >= n and all(
                _close(part, _chunk(whole, dim, n, device), trial.tolerance, scale) for device, part in enumerate(parts)
            )
        elif dual == INVARIANT:
            right = all(_close(part, whole, trial.tolerance, scale) for part in parts)
        else:
            right = all(part.shape == whole.shape for part in parts) and _close(
                sum(parts[1:], parts[0]), whole, trial.tolerance, scale
            )
        if right:
            found.add(dual)
    return found


def _close(a: Tensor, b: Tensor, tolerance: float, scale: float) -> bool:
    """Equal up to rounding of sums of terms as large as `scale`."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    equal = (a == b) | ((a != a) & (b != b))  # nan equals nan
    if a.dtype.is_floating_point or a.dtype.is_complex:
        equal |= (a - b).abs() <= tolerance * (b.abs() + scale)
    return bool(equal.all())


def _scale(tensors: Iterable[Tensor]) -> float:
    """Largest finite absolute value."""
    largest = 0.0
    for tensor in tensors:
        if tensor.numel() and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            largest = max(largest, float(torch.nan_to_num(tensor.abs(), 0.0, 0.0, 0.0).max()))
    return largest
