"""Trials for rule discovery: small variants of an op call, run whole on many kinds of data, forward and backward.

A trial is evidence only if the whole op runs on it. The kinds of data are there to be hard to fool: ties, zeros, single
outliers, nan and infinity show what a threshold, a sort or a "does any element" hides from random numbers.

Numbers in the Python code behind an op (thresholds, magic values) are tried as data and as sizes. They are only hints
where to look: an op in C++, or one that computes its threshold, gives none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from alpa_strategy.ir.op import CUSTOM_OPS, OpCall, TensorMeta
from alpa_strategy.ir.user_code import closure_values, code_names, reached_functions
from alpa_strategy.sharding.isolation import tried

MAX_ELEMENTS = 300_000  # of all operands and results together, in the largest trials
SMALLEST_SIZE = 5  # of a shrunk dim: up to 5 chunks, none of them empty


@dataclass(frozen=True)
class Trial:
    """One run of the whole op.

    Attributes:
        call: the call at the trial's shapes and dtypes.
        kind: the kind of data.
        operands: its data.
        results: what the op gave, detached.
        result_grads: gradient that each result received, None where it is not differentiable.
        operand_grads: what the operands got; None where there is no gradient.
        tolerance: relative to the largest element of the compared tensor.
    """

    call: OpCall
    kind: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    result_grads: tuple[Tensor | None, ...]
    operand_grads: tuple[Tensor | None, ...]
    tolerance: float

    @cached_property
    def overflows(self) -> bool:
        """Infinity among the results or gradients."""
        tensors = [*self.results, *(grad for grad in self.operand_grads if grad is not None)]
        return any(bool(tensor.isinf().any()) for tensor in tensors)


def run_call(
    call: OpCall, operands: tuple[Tensor, ...], grads_for: Callable[[tuple[Tensor, ...]], list[Tensor | None]]
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """(detached results, operand gradients) of `call`; `grads_for(results)` gives the results' gradients."""
    with torch.enable_grad():
        leaves = [
            operand.detach().clone().requires_grad_(meta.requires_grad)
            for operand, meta in zip(operands, call.operands, strict=True)
        ]
        results = call.call(*leaves)
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads_for(results), strict=True)
            if grad is not None and result.requires_grad
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found: Iterator[Tensor | None] = itertools.repeat(None)
        if pairs and wanted:
            outputs, cotangents = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
        operand_grads = tuple(next(found) if leaf.requires_grad else None for leaf in leaves)
    return tuple(result.detach().clone() for result in results), operand_grads


@lru_cache(maxsize=8192)
def accepts_shapes(call: OpCall, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether the op's shape function takes operands of these shapes. Ask it before a kernel sees inconsistent ones.

    Some kernels (ATen's own attention on CPUs) trust their callers and write past the end. True for ops that have no
    shape function.
    """

    return _runs_on_meta(call, shapes) or not _runs_on_meta(call, _shapes(call))


def _shapes(call: OpCall) -> tuple[tuple[int, ...], ...]:
    return tuple(meta.shape for meta in call.operands)


@lru_cache(maxsize=8192)
def _runs_on_meta(call: OpCall, shapes: tuple[tuple[int, ...], ...]) -> bool:
    tensors = (
        torch.empty(shape, dtype=meta.dtype, device="meta") for shape, meta in zip(shapes, call.operands, strict=True)
    )
    try:
        call.call(*tensors)
    except Exception:  # of any type: refused, or not possible without data
        return False
    return True


def variants(call: OpCall) -> list[OpCall]:
    """The call at other shapes: equal sizes stay equal. Small ones first, the call's own (or nearest to it) last.

    The op may refuse them.

    Of the results only the ranks are kept, so that calls of one pattern have equal small variants.
    """
    metas = (*call.operands, *call.results)
    if any(meta.dtype.is_floating_point and meta.dtype.itemsize < 2 for meta in metas):
        return []  # eight-bit floats: PyTorch cannot even compare them
    if any(size == 0 for meta in call.operands for size in meta.shape):
        return []
    sizes = _sizes(call)
    small: list[dict[int, int]] = []
    # `keep`: small sizes are often counts (heads, channels of an image) that the op insists on.
    for start, step, keep in ((5, 1, 0), (6, 2, 0), (5, 1, 4), (9, 2, 8)):
        shrunk = itertools.count(max(start, keep + 1), step)
        small.append({size: size if size <= keep else next(shrunk) for size in sizes})
    # Operands much smaller than the result (an outer product) must shrink all the more.
    num_elements = _num_elements(call, {})
    limit = MAX_ELEMENTS * num_elements // max(num_elements + sum(meta.num_elements for meta in call.results), 1)
    nearest = {size: size for size in sizes}
    while sizes and _num_elements(call, nearest) > limit and max(nearest.values()) > 2 * SMALLEST_SIZE:
        largest = max(nearest.values())
        nearest = {size: new // 2 if new == largest else new for size, new in nearest.items()}
    found = [_resized(call, sizes, follow) for follow in (True, False) for sizes in small]
    return _small_enough([*found, _resized(call, nearest, True), _resized(call, nearest, False)])


def variants_past(call: OpCall, numbers: Sequence[float]) -> list[OpCall]:
    """Variants in which a size is larger than a number of the op's code that only the call's own size exceeds."""
    sizes = _sizes(call)
    small = {size: min(size, SMALLEST_SIZE + i) for i, size in enumerate(sizes)}
    maps = [{**small, size: min(size, 2 * int(n))} for n in numbers for size in sizes if SMALLEST_SIZE < n < size]
    return _small_enough([_resized(call, m, follow) for m in maps for follow in (True, False)])


def _sizes(call: OpCall) -> list[int]:
    return sorted({size for meta in call.operands for size in meta.shape if size > 1})


def _small_enough(found: list[OpCall]) -> list[OpCall]:
    """Those that are quick to run, each once."""
    return [v for v in dict.fromkeys(found) if _num_elements(v, {}) <= MAX_ELEMENTS]


def _num_elements(call: OpCall, sizes: dict[int, int]) -> int:
    return sum(math.prod(sizes.get(size, size) for size in meta.shape) for meta in call.operands)


def _resized(call: OpCall, sizes: dict[int, int], arguments_too: bool) -> OpCall:
    def convert(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(convert, arg))
        # Small integers are rather dims, counts and strides than sizes.
        if isinstance(arg, int) and not isinstance(arg, bool) and arg >= 8 and arguments_too:
            return sizes.get(arg, arg)
        return arg

    return dataclasses.replace(
        call,
        args=tuple(map(convert, call.args)),
        kwargs=tuple((name, convert(value)) for name, value in call.kwargs),
        operands=tuple(meta.with_shape(tuple(sizes.get(s, s) for s in meta.shape)) for meta in call.operands),
        results=tuple(meta.with_shape((0,) * len(meta.shape)) for meta in call.results),
    )


@lru_cache(maxsize=4096)
def draws_random_numbers(call: OpCall) -> bool:
    """Whether an op that nobody described draws from PyTorch's generators: it is run once, at small shapes.

    True for ops that cannot be run there: at worst devices keep the same random state for nothing.
    """
    answer = tried(call, lambda: _draws_random_numbers(call))
    return True if answer is None else answer


def _draws_random_numbers(call: OpCall) -> bool:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for candidate in variants(call):
            state = torch.get_rng_state()
            generator = torch.Generator().manual_seed(0)
            if _run_trial(_in_dtype(candidate, torch.float64), "normal", 0, generator) is not None:
                return not torch.equal(torch.get_rng_state(), state)
    return True


# kind -> (generator, shape) -> float64 data
_FLOAT_KINDS: dict[str, Callable[[torch.Generator, tuple[int, ...]], Tensor]] = {
    "normal": lambda g, s: _normal(g, s),
    "unit": lambda g, s: 0.05 + 0.9 * torch.rand(s, generator=g, dtype=torch.float64),
    "ties": lambda g, s: torch.randint(-2, 3, s, generator=g).double(),
    "large": lambda g, s: _normal(g, s) * 50,
    "positive": lambda g, s: _normal(g, s).abs() + 0.1,
    "unit ties": lambda g, s: torch.randint(0, 5, s, generator=g).double() / 4,
    "negative": lambda g, s: -_normal(g, s).abs() - 0.1,
    "small": lambda g, s: _normal(g, s).sign() * 10 ** (-7 * torch.rand(s, generator=g, dtype=torch.float64)),
    "magnitudes": lambda g, s: _normal(g, s).sign() * 10 ** (4 * _normal(g, s).clamp(-2, 2)),
    "outlier": lambda g, s: _spoilt(g, _normal(g, s), 1e3),
    "one hot": lambda g, s: _spoilt(g, torch.zeros(s, dtype=torch.float64), 1.0),
    "huge outlier": lambda g, s: _spoilt(g, _normal(g, s), -1e9),
    "enormous outlier": lambda g, s: _spoilt(g, _normal(g, s), 1e30),
    "unit again": lambda g, s: torch.rand(s, generator=g, dtype=torch.float64) ** 3,
    "last huge": lambda g, s: _spoilt(g, _normal(g, s), 1e7, -1),
    "first huge": lambda g, s: _spoilt(g, _normal(g, s), 1e7, 0),
    "shifted": lambda g, s: _normal(g, s) + 3e3,
    "shifted down": lambda g, s: _normal(g, s) - 3e3,
    "constant": lambda g, s: torch.full(s, 0.5, dtype=torch.float64),
    "nan": lambda g, s: _spoilt(g, _normal(g, s), float("nan")),
    "infinity": lambda g, s: _spoilt(g, _normal(g, s), float("inf")),
    "enormous": lambda g, s: _normal(g, s) * 1e30,
    "one different": lambda g, s: _spoilt(g, torch.full(s, 0.5, dtype=torch.float64), _any_number(g), 0),
    "nearly sorted": lambda g, s: _spoilt(g, _normal(g, s).flatten().sort().values.view(s), 9 + _any_number(g), 0),
    "nearly positive": lambda g, s: _spoilt(g, _normal(g, s).abs() + 0.1, -9.0, 0),
    "nearly negative": lambda g, s: _spoilt(g, -_normal(g, s).abs() - 0.1, 9.0, 0),
    "above": lambda g, s: _normal(g, s) + 20,
    "below": lambda g, s: _normal(g, s) - 20,
    "tiny": lambda g, s: _spoilt(g, _spoilt(g, _normal(g, s), 1e-310, 0), -0.0, -1),
    "masked": lambda g, s: _normal(g, s).where(torch.rand(s, generator=g) < 0.4, -math.inf),
}

ALL_KINDS = tuple(_FLOAT_KINDS)
# The others get normal gradients.
_GRAD_KINDS = (
    *("ties", "small", "magnitudes", "one hot", "huge outlier", "nan"),
    *("last huge", "first huge", "shifted", "shifted down", "one different"),
)
# Data that is cut into summands as large as itself; of the others all but one summand are normal numbers.
SHARED_KINDS = ("small", "positive", "magnitudes", "last huge", "first huge", "shifted", "shifted down", "enormous")
# Every second operand gets the opposite, so that one is above the other everywhere, or everywhere but at one place.
_PAIRS = [("nearly positive", "nearly negative"), ("above", "below")]
_OPPOSED = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}}
SOME_KINDS = ("normal", "unit", "ties", "positive", "huge outlier", "unit again", "infinity", "last huge", "shifted")
FEW_KINDS = ("normal", "unit", "huge outlier")


def number_kinds(numbers: Sequence[float]) -> tuple[str, ...]:
    """Kinds of data around numbers that an op's code names: one element that is it, and all of them close to it."""
    return tuple(f"{how} {number!r}" for number in numbers for how in ("one", "around"))


def _number_of(kind: str) -> tuple[str, float] | None:
    """(how, number) of a kind of `number_kinds`."""
    how, _, number = kind.partition(" ")
    return None if kind in _FLOAT_KINDS else (how, float(number))


def _floats(generator: torch.Generator, shape: tuple[int, ...], kind: str) -> Tensor:
    asked = _number_of(kind)
    if asked is None:
        return _FLOAT_KINDS[kind](generator, shape)
    how, number = asked
    data = _normal(generator, shape)
    return _spoilt(generator, data, number) if how == "one" else number + data * max(0.01 * abs(number), 0.1)


def _integers_near(generator: torch.Generator, meta: TensorMeta, how: str, number: float) -> Tensor:
    limits = torch.iinfo(meta.dtype)
    whole = min(max(round(number), limits.min + 1), limits.max - 1)
    low, high = (0, 2) if how == "one" else (whole - 1, whole + 2)
    return _spoilt(generator, torch.randint(low, high, meta.shape, generator=generator, dtype=torch.int64), whole).to(
        meta.dtype
    )


def _normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _spoilt(generator: torch.Generator, data: Tensor, value: float, place: int | None = None) -> Tensor:
    """`data` with `value` at one place, a random one if none is given."""
    if data.numel():
        place = int(torch.randint(0, data.numel(), (), generator=generator)) if place is None else place
        data.view(-1)[place] = value
    return data


def _any_number(generator: torch.Generator) -> float:
    """Between 1 and 2: where it stands in several operands they differ."""
    return 1 + float(torch.rand((), generator=generator))


def _integers(generator: torch.Generator, meta: TensorMeta, sizes: list[int], trial: int) -> Tensor:
    """Indices that fit every dim, then every second dim at least, then negative ones too; large ones; all the same."""
    if trial % 5 == 4 and meta.dtype.itemsize > 1:
        return torch.randint(-3000 if meta.dtype.is_signed else 0, 3000, meta.shape, generator=generator).to(meta.dtype)
    if trial % 7 == 5:
        return torch.ones(meta.shape, dtype=meta.dtype)
    high = max(2, (min(sizes, default=2), max(sizes, default=2), 2)[trial % 3])
    low = -2 if trial % 4 == 3 and meta.dtype.is_signed else 0
    return torch.randint(low, high, meta.shape, generator=generator).to(meta.dtype)


def _booleans(generator: torch.Generator, meta: TensorMeta, trial: int) -> Tensor:
    """Of every density, with a single exception among all true or all false, and without any."""
    data = torch.rand(meta.shape, generator=generator) < (0.5, 0.1, 0.9, 1.0, 0.5, 0.0, 1.0, 0.0)[trial % 8]
    return data if trial % 8 > 5 else _spoilt(generator, data, trial % 2 == 0)


def _data(call: OpCall, kind: str, trial: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    sizes = [size for meta in call.operands for size in meta.shape if size > 1]
    asked = _number_of(kind)
    operands = []
    for i, meta in enumerate(call.operands):
        own_kind = _OPPOSED.get(kind, kind) if i % 2 else kind
        if meta.dtype == torch.bool:
            data = _booleans(generator, meta, trial)
        elif meta.dtype.is_complex:
            parts = (_floats(generator, meta.shape, own_kind) for _ in range(2))
            data = torch.complex(*parts).to(meta.dtype)
        elif meta.dtype.is_floating_point:
            data = _floats(generator, meta.shape, own_kind).to(meta.dtype)
        elif asked is not None:
            data = _integers_near(generator, meta, *asked)
        else:
            data = _integers(generator, meta, sizes, trial)
        operands.append(data)
    return tuple(operands)


_TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-5, torch.complex64: 2e-5}


def _in_dtype(call: OpCall, dtype: torch.dtype | None) -> OpCall:
    """The call with its floating-point operands in `dtype` (None: their own)."""

    def convert(meta: TensorMeta) -> TensorMeta:
        if dtype is None or not (meta.dtype.is_floating_point or meta.dtype.is_complex):
            return meta
        return dataclasses.replace(meta, dtype=dtype.to_complex() if meta.dtype.is_complex else dtype)

    return dataclasses.replace(call, operands=tuple(map(convert, call.operands)))


def trials(call: OpCall, kinds: tuple[str, ...]) -> Iterator[Trial]:
    """Trials of one variant, in double precision when the op takes it. None when the whole op does not run."""
    # By the op's name: the same data in every process.
    generator = torch.Generator().manual_seed(random.Random(call.target_name).randrange(2**31))
    for dtype in (torch.float64, torch.float32, None):  # many kernels of users are compiled for one type only
        found = False
        for number, kind in enumerate(kinds):
            trial = _run_trial(_in_dtype(call, dtype), kind, number, generator)
            if trial is not None:
                found = True
                yield trial
        if found:
            return


def _run_trial(call: OpCall, kind: str, number: int, generator: torch.Generator) -> Trial | None:
    return trial_on(call, _data(call, kind, number, generator), kind, generator)


def trial_on(call: OpCall, operands: tuple[Tensor, ...], kind: str, generator: torch.Generator) -> Trial | None:
    """A trial on this data; None when the op refuses it. `kind` decides about the results' gradients."""
    grads: list[Tensor | None] = []

    def make_grads(results: tuple[Tensor, ...]) -> list[Tensor | None]:
        for result in results:
            if not result.requires_grad:
                grads.append(None)
                continue
            grad_kind = kind if kind in _GRAD_KINDS or _number_of(kind) else "normal"
            grads.append(_floats(generator, tuple(result.shape), grad_kind).to(result.dtype))
        return grads

    try:
        results, operand_grads = run_call(call, operands, make_grads)
    except Exception:  # the op refuses this data or these shapes, with an error of any type: no evidence
        return None
    if len(results) != len(call.results) or any(
        result.dim() != len(meta.shape) for result, meta in zip(results, call.results, strict=True)
    ):
        return None
    dtypes = [t.dtype for t in (*operands, *results) if t.is_floating_point() or t.is_complex()]
    tolerance = max((_TOLERANCES.get(dtype, 2e-2) for dtype in dtypes), default=0.0)
    return Trial(call, kind, operands, results, tuple(grads), operand_grads, tolerance)


MOST = 12


def numbers_in_code(target: Any) -> tuple[float, ...]:
    """Up to `MOST` numbers that the op's code names, forward and backward: literals, globals and variables around it.

    Without 0 and +-1, which trials hold anyway. In the order of the code, so equal for equal code.
    """
    numbers = (n for function in reached_functions(_python_code(target)) for n in _numbers(_mentioned(function)))
    found = dict.fromkeys(float(n) for n in numbers if abs(n) < 1e300 and abs(n) not in (0.0, 1.0))
    return tuple(found)[:MOST]


def _python_code(target: Any) -> list[Callable[..., Any]]:
    """The Python functions that an op is made of; none for ops of other languages."""
    if not isinstance(target, torch._ops.OpOverload):
        return [target]
    functions = list(CUSTOM_OPS[target].python_code) if target in CUSTOM_OPS else []
    definition = OPDEFS.get(target._schema.name)
    if definition is not None:
        functions += [definition._init_fn, definition._backward_fn, *definition._backend_fns.values()]
    return [function for function in functions if function is not None]


def _mentioned(function: types.FunctionType) -> Iterator[Any]:
    """Constants, globals and variables of enclosing functions that the code names, and defaults of arguments."""
    yield function.__code__.co_consts
    for name in dict.fromkeys(code_names(function.__code__)):
        yield function.__globals__.get(name)
    for cell in closure_values(function).values():
        yield cell.cell_contents
    yield function.__defaults__
    yield tuple((function.__kwdefaults__ or {}).values())


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    """The numbers among `values`, in collections, and in the constants of functions written inside."""
    for value in values:
        if isinstance(value, types.CodeType):
            yield from _numbers(value.co_consts)
        elif isinstance(value, tuple | list | frozenset):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield value
