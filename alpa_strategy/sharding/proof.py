"""An op's shards against the whole op, by experiment: what `prove_sharding` does with each strategy
on each data.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    """One run of the whole op, forward and backward."""

    call: OpCall
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]  # detached
    # result_grads, operand_grads: what the results received, and what the operands got; None where
    # there is none
    result_grads: Optionals
    operand_grads: Optionals

    def equals_shards(self, strategy: AxisStrategy, n: int) -> bool:
        """Whether `n` devices that follow the strategy give the same results and gradients
        together.

        True where the data is no evidence: summands of infinity, and complex products, are infinity
        minus infinity.
        """
        given = (*self.operands, *self.results, *(g for g in self.operand_grads if g is not None))
        with_summands = PARTIAL in strategy.inputs or REPLICATE in strategy.outputs
        if any((with_summands or t.is_complex()) and bool(t.isinf().any()) for t in given):
            return True
        generator = torch.Generator().manual_seed(n)
        parts = [
            _parts(t, dual, n, generator)
            for t, dual in zip(self.operands, strategy.inputs, strict=True)
        ]
        as_gradients = [_of_gradient(dual) for dual in strategy.outputs]
        cotangents = [
            [None] * n if grad is None else _parts(grad, dual, n, generator)
            for grad, dual in zip(self.result_grads, as_gradients, strict=True)
        ]
        added = added_operand(self.call) if strategy.implementation is not None else None
        if added is not None:  # part of the sum once
            parts[added][1:] = [torch.zeros_like(part) for part in parts[added][1:]]
        results, grads = [], []  # of each device
        for device in range(n):
            local = localize(self.call, (strategy,), (n,), (device,)).call
            try:
                leaves, local_results = _forward(local, [part[device] for part in parts])
                local_grads = list(
                    _backward(leaves, local_results, [each[device] for each in cotangents])
                )
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
        for i, (whole, dual) in enumerate(zip(self.operand_grads, strategy.inputs, strict=True)):
            of_devices = [each[i] for each in grads]
            if whole is None and all(grad is None for grad in of_devices):
                continue
            # Autograd gives None for a gradient of zeros.
            filled = tuple(
                torch.zeros_like(p) if g is None else g
                for g, p in zip(of_devices, parts[i], strict=True)
            )
            expected = torch.zeros_like(self.operands[i]) if whole is None else whole
            compared.append((expected, filled, _of_gradient(dual)))
        tolerance = max(
            (
                _TOLERANCES.get(t.dtype, 2e-2)
                for t in given
                if t.is_floating_point() or t.is_complex()
            ),
            default=0.0,
        )
        return all(_recombines(whole, found, dual, tolerance) for whole, found, dual in compared)


def whole_run(
    call: OpCall, operands: Sequence[Tensor], generator: torch.Generator
) -> WholeRun | None:
    """The op run on this data; None when it refuses it."""
    try:
        leaves, results = _forward(call, operands)
        result_grads = [
            _normal(generator, r.shape).to(r.dtype) if r.requires_grad else None for r in results
        ]
        grads = _backward(leaves, results, result_grads)
    except Exception:  # of the op, of any type
        return None
    return WholeRun(call, tuple(operands), _detached(results), tuple(result_grads), grads)


def runs_on_random_data(call: OpCall) -> Iterator[WholeRun]:
    """Runs on every kind of data that the op takes."""
    generator = torch.Generator().manual_seed(0)
    for number, kind in enumerate(_KINDS):
        data = tuple(_data(meta, kind, number, generator) for meta in call.operands)
        run = whole_run(call, data, generator)
        if run is not None:
            yield run


def _forward(call: OpCall, operands: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Leaves with the operands' data, and what `call` gives on them."""
    with torch.enable_grad():
        leaves = [
            t.detach().clone().requires_grad_(m.requires_grad)
            for t, m in zip(operands, call.operands, strict=True)
        ]
        results = call.call(*leaves)
    return leaves, (results,) if isinstance(results, Tensor) else tuple(results)


def _backward(
    leaves: list[Tensor], results: tuple[Tensor, ...], cotangents: Sequence[Tensor | None]
) -> Optionals:
    """The leaves' gradients."""
    pairs = [
        (r, g)
        for r, g in zip(results, cotangents, strict=True)
        if g is not None and r.requires_grad
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(leaves)
    outputs, given = zip(*pairs, strict=True)
    leaf_grads = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
    all_grads = []
    for leaf in leaves:
        all_grads.append(next(leaf_grads) if leaf.requires_grad else None)
    return tuple(all_grads)


def _detached(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(result.detach().clone() for result in results)


def _of_gradient(dual: DualPlacement) -> DualPlacement:
    """How the gradient of a tensor that lies so lies, as if it were a value."""
    return {REPLICATE: PARTIAL, PARTIAL: INVARIANT}.get(dual, dual)


def _parts(tensor: Tensor, dual: DualPlacement, n: int, generator: torch.Generator) -> list[Tensor]:
    """What each of `n` devices holds of a value: its chunk, a random summand, or all of it."""
    if dual.shard_dim is not None:
        return list(tensor.split(chunk_sizes(tensor.shape[dual.shard_dim], n), dual.shard_dim))
    if dual == PARTIAL:
        parts = [_normal(generator, tensor.shape).to(tensor.dtype) for _ in range(n - 1)]
        return [*parts, tensor - sum(parts)]
    return [tensor] * n


def _recombines(
    whole: Tensor, parts: Sequence[Tensor], dual: DualPlacement, tolerance: float
) -> bool:
    """Whether the devices' parts, lying so, make up the whole."""
    if dual == PARTIAL:
        same_shape = all(part.shape == whole.shape for part in parts)
        return same_shape and _close(
            sum(parts[1:], parts[0]), whole, tolerance, _scale([whole, *parts])
        )
    expected = _parts(whole, dual, len(parts), torch.Generator())
    return all(
        _close(a, b, tolerance, _scale([whole, *parts]))
        for a, b in zip(parts, expected, strict=True)
    )


def _close(a: Tensor, b: Tensor, tolerance: float, scale: float) -> bool:
    """Equal up to rounding of sums of terms as large as `scale`."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return torch.allclose(a, b, tolerance, tolerance * scale, equal_nan=True)
    return torch.equal(a, b)


def _scale(tensors: Sequence[Tensor]) -> float:
    """Largest finite absolute value."""
    largest = 0.0
    for tensor in tensors:
        has_scale = tensor.is_floating_point() or tensor.is_complex()
        if has_scale and tensor.numel() > 0:
            finite = torch.nan_to_num(tensor.abs(), 0.0, 0.0, 0.0)
            largest = max(largest, float(finite.max()))
    return largest


def _normal(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def _with_one(data: Tensor, value: float, generator: torch.Generator) -> Tensor:
    """`data` with `value` at a random place."""
    if data.numel():
        data.view(-1)[int(torch.randint(0, data.numel(), (), generator=generator))] = value
    return data


# kind -> (normal numbers, generator) -> float64 data: what a threshold, a sort or "any element"
# hides from random ones.
_KINDS: tuple[Callable[[Tensor, torch.Generator], Tensor], ...] = (
    lambda x, g: x,
    lambda x, g: 0.05 + 0.9 * torch.rand(x.shape, generator=g, dtype=torch.float64),
    lambda x, g: x.round(),  # ties
    lambda x, g: x.abs() + 0.1,
    lambda x, g: -x.abs() - 0.1,
    lambda x, g: x.sign() * 10 ** (4 * x.clamp(-2, 2)),  # magnitudes
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
    if meta.dtype == torch.bool:  # of every density
        return torch.rand(meta.shape, generator=generator) < (0.5, 0.1, 0.9, 1.0, 0.0)[number % 5]
    if meta.dtype.is_complex:
        real, imaginary = (kind(_normal(generator, meta.shape), generator) for _ in range(2))
        return torch.complex(real, imaginary).to(meta.dtype)
    if meta.dtype.is_floating_point:
        return kind(_normal(generator, meta.shape), generator).to(meta.dtype)
    high = (2, 3, 5, 3000)[number % 4]  # indices that fit most dims, then large ones
    return torch.randint(0, high, meta.shape, generator=generator).to(meta.dtype)
