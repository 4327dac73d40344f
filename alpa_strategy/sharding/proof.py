"""Compare an op's shards with the full op, by running both (`prove_sharding`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.op import AxisStrategy, OpCall, TensorMeta
from alpa_strategy.ir.placement import INVARIANT, PARTIAL, REPLICATE, DualPlacement, chunk_sizes
from alpa_strategy.sharding.rule_table import added_operand
from alpa_strategy.sharding.strategies import localize

Optionals = tuple[Tensor | None, ...]

_TOLERANCES = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
}


@dataclass(frozen=True)
class WholeRun:
    """One run of the full op, forward and backward."""

    call: OpCall
    operands: tuple[Tensor, ...]
    # detached
    results: tuple[Tensor, ...]
    # gradients that the results received, None for those without
    result_grads: Optionals
    # gradients that the operands got, None for those without
    operand_grads: Optionals

    def equals_shards(self, strategy: AxisStrategy, n: int) -> bool:
        """Whether `n` devices that follow the strategy give the same results and gradients.

        False if the op refuses a shard. True if the data proves nothing: partial values of
        infinity, and complex products of it, are infinity minus infinity.
        """
        if not self._is_evidence(strategy):
            return True
        generator = torch.Generator().manual_seed(n)
        operand_shards = _shards_of_all(self.operands, strategy.inputs, n, generator)
        grad_placements = [_of_gradient(dual) for dual in strategy.outputs]
        cotangents = _shards_of_all(self.result_grads, grad_placements, n, generator)
        added = added_operand(self.call) if strategy.implementation is not None else None
        if added is not None:
            # Of results that are summed, only the first device adds the bias.
            first, *others = operand_shards[added]
            operand_shards[added] = [first, *map(torch.zeros_like, others)]

        results: list[tuple[Tensor, ...]] = []
        grads: list[list[Tensor | None]] = []
        for device in range(n):
            local = localize(self.call, (strategy,), (n,), (device,)).call
            try:
                leaves, local_results = _forward(local, [s[device] for s in operand_shards])
                local_cotangents = [shards[device] for shards in cotangents]
                local_grads = list(_backward(leaves, local_results, local_cotangents))
            # Of the op, of any type: it refuses a shard though it took the full tensors.
            except Exception:
                return False
            results.append(_detached(local_results))
            if added is not None and device > 0:
                local_grads[added] = None
            grads.append(local_grads)

        compared = list(
            zip(self.results, zip(*results, strict=True), strategy.outputs, strict=True)
        )
        compared += self._gradients_to_compare(strategy, operand_shards, grads)
        tolerance = self._tolerance()
        return all(_recombines(full, shards, dual, tolerance) for full, shards, dual in compared)

    def _tensors(self) -> list[Tensor]:
        """Return all tensors of the run but the results' gradients."""
        grads = [grad for grad in self.operand_grads if grad is not None]
        return [*self.operands, *self.results, *grads]

    def _is_evidence(self, strategy: AxisStrategy) -> bool:
        """Return whether equal results prove the strategy: not with any inf if values are partial
        or complex, whose differences it hides.
        """
        has_partial_values = PARTIAL in strategy.inputs or REPLICATE in strategy.outputs
        for tensor in self._tensors():
            needs_finite = has_partial_values or tensor.is_complex()
            if needs_finite and bool(tensor.isinf().any()):
                return False
        return True

    def _gradients_to_compare(
        self,
        strategy: AxisStrategy,
        operand_shards: Sequence[Sequence[Tensor]],
        grads: Sequence[Sequence[Tensor | None]],
    ) -> Iterator[tuple[Tensor, tuple[Tensor, ...], DualPlacement]]:
        """Yield (full gradient, the devices' gradients, their placement) of each operand that has
        one.

        Autograd gives None for a gradient of zeros.

        Args:
            strategy: of the op on the devices.
            operand_shards: [operands, devices].
            grads: [devices, operands].
        """
        for i, (full, dual) in enumerate(zip(self.operand_grads, strategy.inputs, strict=True)):
            device_grads = [local_grads[i] for local_grads in grads]
            if full is None and all(grad is None for grad in device_grads):
                continue
            filled = []
            for grad, shard in zip(device_grads, operand_shards[i], strict=True):
                filled.append(torch.zeros_like(shard) if grad is None else grad)
            expected = torch.zeros_like(self.operands[i]) if full is None else full
            yield expected, tuple(filled), _of_gradient(dual)

    def _tolerance(self) -> float:
        """Return the relative tolerance of the least precise dtype; 0 if all tensors are integers
        or booleans.
        """
        tolerance = 0.0
        for tensor in self._tensors():
            if tensor.is_floating_point() or tensor.is_complex():
                tolerance = max(tolerance, _TOLERANCES.get(tensor.dtype, 2e-2))
        return tolerance


def whole_run(
    call: OpCall, operands: Sequence[Tensor], generator: torch.Generator
) -> WholeRun | None:
    """Run the full op on `operands`, with random gradients of its results.

    None if the op refuses the data.
    """
    try:
        leaves, results = _forward(call, operands)
        result_grads: list[Tensor | None] = []
        for result in results:
            grad = None
            if result.requires_grad:
                grad = _normal(generator, result.shape).to(result.dtype)
            result_grads.append(grad)
        grads = _backward(leaves, results, result_grads)
    # Of the op, of any type.
    except Exception:
        return None
    return WholeRun(call, tuple(operands), _detached(results), tuple(result_grads), grads)


def runs_on_random_data(call: OpCall) -> Iterator[WholeRun]:
    """Run the full op on every kind of random data; those that it refuses are left out."""
    generator = torch.Generator().manual_seed(0)
    for number, kind in enumerate(_KINDS):
        data = tuple(_data(meta, kind, number, generator) for meta in call.operands)
        run = whole_run(call, data, generator)
        if run is not None:
            yield run


def _forward(call: OpCall, operands: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Run `call` on leaves with the operands' data: (leaves, results)."""
    with torch.enable_grad():
        leaves = []
        for operand, meta in zip(operands, call.operands, strict=True):
            leaves.append(operand.detach().clone().requires_grad_(meta.requires_grad))
        results = call.call(*leaves)
    return leaves, (results,) if isinstance(results, Tensor) else tuple(results)


def _backward(
    leaves: list[Tensor], results: tuple[Tensor, ...], cotangents: Sequence[Tensor | None]
) -> Optionals:
    """Return the gradients of the leaves, None for those that get none.

    Args:
        results: computed from the leaves.
        cotangents: gradient of each result; None: it has none.
    """
    outputs = []
    output_grads = []
    for result, grad in zip(results, cotangents, strict=True):
        if grad is not None and result.requires_grad:
            outputs.append(result)
            output_grads.append(grad)
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    if not outputs or not inputs:
        return (None,) * len(leaves)
    leaf_grads = iter(torch.autograd.grad(outputs, inputs, output_grads, allow_unused=True))
    all_grads = []
    for leaf in leaves:
        all_grads.append(next(leaf_grads) if leaf.requires_grad else None)
    return tuple(all_grads)


def _detached(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return copies of the results without their graph."""
    return tuple(result.detach().clone() for result in results)


def _of_gradient(dual: DualPlacement) -> DualPlacement:
    """Return the placement of a tensor's gradient, as if that were a value."""
    return {REPLICATE: PARTIAL, PARTIAL: INVARIANT}.get(dual, dual)


def _shards_of_all(
    tensors: Sequence[Tensor | None],
    duals: Sequence[DualPlacement],
    n: int,
    generator: torch.Generator,
) -> list[list[Any]]:
    """Return `_shards` of each tensor, [tensors, devices]; None on every device for None."""
    shards: list[list[Any]] = []
    for tensor, dual in zip(tensors, duals, strict=True):
        shards.append([None] * n if tensor is None else _shards(tensor, dual, n, generator))
    return shards


def _shards(
    tensor: Tensor, dual: DualPlacement, n: int, generator: torch.Generator
) -> list[Tensor]:
    """Return the value on each of `n` devices: its chunk, a random partial value, or all of it.

    Args:
        tensor: the full value.
        dual: its placement.
        generator: of the partial values, whose sum is `tensor`.
    """
    if dual.shard_dim is not None:
        return list(tensor.split(chunk_sizes(tensor.shape[dual.shard_dim], n), dual.shard_dim))
    if dual == PARTIAL:
        partial_values = [_normal(generator, tensor.shape).to(tensor.dtype) for _ in range(n - 1)]
        return [*partial_values, tensor - sum(partial_values)]
    return [tensor] * n


def _recombines(
    full: Tensor, shards: Sequence[Tensor], dual: DualPlacement, tolerance: float
) -> bool:
    """Whether the devices' tensors `shards`, in the placement `dual`, make up the full one, up to
    the relative error `tolerance`.
    """
    scale = _scale([full, *shards])
    if dual == PARTIAL:
        if any(shard.shape != full.shape for shard in shards):
            return False
        return _close(sum(shards[1:], shards[0]), full, tolerance, scale)
    expected = _shards(full, dual, len(shards), torch.Generator())
    pairs = zip(shards, expected, strict=True)
    return all(_close(shard, other, tolerance, scale) for shard, other in pairs)


def _close(a: Tensor, b: Tensor, tolerance: float, scale: float) -> bool:
    """Whether two tensors are equal up to rounding of sums of terms as large as `scale`."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return torch.allclose(a, b, tolerance, tolerance * scale, equal_nan=True)
    return torch.equal(a, b)


def _scale(tensors: Sequence[Tensor]) -> float:
    """Return the largest finite absolute value of floating and complex tensors, 0.0 if none."""
    largest = 0.0
    for tensor in tensors:
        has_scale = tensor.is_floating_point() or tensor.is_complex()
        if has_scale and tensor.numel() > 0:
            finite = torch.nan_to_num(tensor.abs(), 0.0, 0.0, 0.0)
            largest = max(largest, float(finite.max()))
    return largest


def _normal(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """Return normal random numbers in float64."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def _with_one(data: Tensor, value: float, generator: torch.Generator) -> Tensor:
    """Write `value` at a random position of `data`, unless it is empty, and return `data`."""
    if data.numel():
        position = int(torch.randint(0, data.numel(), (), generator=generator))
        data.view(-1)[position] = value
    return data


# Functions of (normal numbers, generator) that return float64 data. Together they show differences
# that a threshold, a sort or "any element" hides on normal numbers.
_KINDS: tuple[Callable[[Tensor, torch.Generator], Tensor], ...] = (
    lambda x, g: x,
    lambda x, g: 0.05 + 0.9 * torch.rand(x.shape, generator=g, dtype=torch.float64),
    # ties
    lambda x, g: x.round(),
    lambda x, g: x.abs() + 0.1,
    lambda x, g: -x.abs() - 0.1,
    # magnitudes
    lambda x, g: x.sign() * 10 ** (4 * x.clamp(-2, 2)),
    lambda x, g: x + 3e3,
    lambda x, g: _with_one(torch.zeros_like(x), 1.0, g),
    lambda x, g: _with_one(x, 1e3, g),
    lambda x, g: _with_one(x, -1e9, g),
    lambda x, g: _with_one(x.abs() + 0.1, -9.0, g),
    lambda x, g: _with_one(x, float("nan"), g),
    lambda x, g: _with_one(x, float("inf"), g),
)


def _data(
    meta: TensorMeta,
    kind: Callable[[Tensor, torch.Generator], Tensor],
    number: int,
    generator: torch.Generator,
) -> Tensor:
    """Return random data of the dtype and shape of `meta`.

    Args:
        kind: makes the floating-point data from normally distributed numbers.
        number: of the kind; it chooses the density of booleans and the range of integers.
    """
    if meta.dtype == torch.bool:
        density = (0.5, 0.1, 0.9, 1.0, 0.0)[number % 5]
        return torch.rand(meta.shape, generator=generator) < density
    if meta.dtype.is_complex:
        real = kind(_normal(generator, meta.shape), generator)
        imaginary = kind(_normal(generator, meta.shape), generator)
        return torch.complex(real, imaginary).to(meta.dtype)
    if meta.dtype.is_floating_point:
        return kind(_normal(generator, meta.shape), generator).to(meta.dtype)
    # Indices that fit most dims, then large ones.
    high = (2, 3, 5, 3000)[number % 4]
    return torch.randint(0, high, meta.shape, generator=generator).to(meta.dtype)
