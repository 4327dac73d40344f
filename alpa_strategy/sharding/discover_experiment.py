"""One hypothesis of rule discovery under trial: a split of an op's operands, and how its results may recombine."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from alpa_strategy.ir.op import AxisStrategy, OpCall, TensorMeta
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, REPLICATE, DualPlacement, chunk_range, shard
from alpa_strategy.sharding.discover_trials import SHARED_KINDS, Trial, accepts_shapes, run_call

MIN_TRIALS = 3  # that a verdict needs
WHOLE, SUMMAND = Replicate(), Partial("sum")

Split = tuple[Placement, ...]  # value placement of every operand
Run = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]  # of `run_call`: results, gradients of the operands


class _Mismatch(Exception):
    """A local result has a shape that is part of no way of recombining."""


class Experiment:
    """One split, and the dual placements of results and whole operands that all trials so far allow.

    With every operand whole the question is the backward's: do the devices' gradients for summands of the results'
    gradients add up (`R*,...->R*`)?

    Attributes:
        divided: whether the split gives the devices different parts.
        with_summands: whether something is handed out in random summands.
        num_tests: trials that were evidence.
        operands, results: the placements that are left, by operand and by result.
        has_grad, result_has_grad: whether a gradient was seen.
    """

    def __init__(self, call: OpCall, split: Split) -> None:
        self.split = split
        self.divided = any(placement != WHOLE for placement in split)
        self.with_summands = not self.divided or SUMMAND in split
        self.num_tests = 0
        self.operands = [_operand_duals(placement) for placement in split]
        self.results = [_result_duals(meta) for meta in call.results]
        self.has_grad = [False] * len(split)
        self.result_has_grad = [False] * len(call.results)

    def copy(self) -> Experiment:
        """An independent copy, to go on with other trials."""
        other = copy.copy(self)
        other.operands, other.results = list(map(set, self.operands)), list(map(set, self.results))
        other.has_grad, other.result_has_grad = list(self.has_grad), list(self.result_has_grad)
        return other

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
        for i, whole in enumerate(trial.operand_grads):
            self._narrow_operand(i, whole, [grads[i] for _, grads in runs], trial)
        return all(self.results) and all(self.operands)

    def _says_nothing(self, trial: Trial, n: int) -> bool:
        """Whether the trial is no evidence for or against: too small for `n` devices, or summands that make it nan."""
        dims = zip(trial.operands, self.split, strict=True)
        if any(isinstance(placement, Shard) and operand.shape[placement.dim] < n for operand, placement in dims):
            return True
        return self.with_summands and (trial.kind in ("infinity", "masked") or trial.overflows)

    def _runs(self, trial: Trial, n: int) -> list[Run] | None:
        """What the op gives on each of `n` devices; None when it refuses a part, which the whole did not deserve."""
        generator = torch.Generator().manual_seed(n)
        alike = trial.kind in SHARED_KINDS
        summed_grads = None
        if not self.divided:
            summed_grads = [None if g is None else _summands(g, n, generator, alike) for g in trial.result_grads]
        parts = [
            _summands(operand, n, generator, alike) if placement == SUMMAND else _parts(operand, placement, n)
            for operand, placement in zip(trial.operands, self.split, strict=True)
        ]
        runs: list[Run] = []
        for device in range(n):
            if not accepts_shapes(trial.call, tuple(tuple(part[device].shape) for part in parts)):
                return None

            def grads_for(results: tuple[Tensor, ...], device: int = device) -> list[Tensor | None]:
                if summed_grads is not None:
                    return [None if g is None else g[device] for g in summed_grads]
                return [self._grad_part(j, result, trial, n, device) for j, result in enumerate(results)]

            try:
                runs.append(run_call(trial.call, tuple(part[device] for part in parts), grads_for))
            except Exception:  # of any type
                return None
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
        raise _Mismatch

    def _narrow_operand(self, i: int, whole: Tensor | None, grads: list[Tensor | None], trial: Trial) -> None:
        if whole is None and all(grad is None for grad in grads):
            return
        self.has_grad[i] = True
        parts = _parts(trial.operands[i], self.split[i], len(grads))
        grads = [torch.zeros_like(part) if grad is None else grad for grad, part in zip(grads, parts, strict=True)]
        whole = torch.zeros_like(trial.operands[i]) if whole is None else whole
        allowed = set()
        for dual in self.operands[i]:
            as_value = {REPLICATE: PARTIAL, PARTIAL: INVARIANT}.get(dual, dual)  # how the gradients recombine
            if _recombining(whole, grads, {as_value}, trial):
                allowed.add(dual)
        self.operands[i] = allowed

    def verdict(self, responsive: list[bool]) -> AxisStrategy | None:
        """The one strategy left, or None when the trials decide nothing."""
        if self.num_tests < MIN_TRIALS:
            return None
        if not self.divided:
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
    equal = (a == b) | ((a != a) & (b != b))
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
