"""What an optimizer looks at when it updates a parameter: single elements, slices along some dims,
or the full tensor.

It is found by experiment, on a copy of the optimizer with the user's own settings: tiny parameters
are trained in full and in shards. Along a dim in which both give the same result, a device may step
its shard alone. If the optimizer treats large tensors otherwise (blocks of 8-bit state), parameters
of the size that it will step show that. No class of any package is known by name.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from alpa_strategy.capture.uncompiled import uncompiled
from alpa_strategy.ir.held_optimizers import groups_in, optimizers_in, parameters_in
from alpa_strategy.ir.optimizer_info import Reads
from alpa_strategy.planner.optimizer_copies import (
    MEMBERS,
    LeftAlone,
    group_of,
    periods_of,
    rebuilt,
)

_NUM_STEPS = 3
# An optimizer may do something every few steps (Lookahead, new projections): most steps that tiny
# parameters are trained.
_MAX_STEPS = 12
# Sizes of the dims of parameters that are tried; further dims have the last.
_SIZES = (4, 6, 5, 3)
# A vector's only dim.
_VECTOR = 24
# Elements of the largest parameter that is tried in its own size; larger ones are halved.
_MAX_ELEMENTS = 2**15
# Results in shards and in full are equal up to rounding.
_RTOL = 1e-12
_ATOL = 1e-14
# Likewise for larger parameters, of which more is summed.
_RTOL_LARGE = 1e-9
# Attributes of every optimizer that are no settings.
_NO_SETTINGS = ("defaults", "param_groups", "state", "step")
# What was found in this process, by class, then by settings and shape: a module that is planned
# again, as after layers were unfrozen, has mostly the same.
_results_by_class: WeakKeyDictionary[type, dict[Any, Any]] = WeakKeyDictionary()
# Returns a fresh optimizer of parameters.
Make = Callable[[list[nn.Parameter]], Optimizer]


@uncompiled()
def reads_of(optimizer: Optimizer) -> dict[nn.Parameter, Reads]:
    """Return for each of the optimizer's parameters what its update looks at.

    Every kind of group is tried, with parameters of as many dims. Raises whatever the optimizer
    does if it cannot be copied, or needs a closure. One with `train` and `eval` methods
    (schedule-free) counts as reading all.
    """
    # Hooks have a schedule-free one's change weights, by state that must be there.
    has_other_weights = any(
        hasattr(one, "train") and hasattr(one, "eval") for one in optimizers_in(optimizer)
    )
    num_steps = _num_steps(optimizer)
    kinds = kinds_of(optimizer)
    # Results of trials, by the kind of parameter and what is tried.
    known: dict[Any, Any] = {}
    result: dict[nn.Parameter, Reads] = {}
    with LeftAlone(optimizer):
        for parameter in parameters_in(optimizer):
            num_dims = max(1, parameter.dim())
            if has_other_weights:
                result[parameter] = Reads(frozenset(), num_dims, False)
                continue

            def tried(
                trial: Any, find: Callable[[], Any], parameter: nn.Parameter = parameter
            ) -> Any:
                key = kinds[parameter], trial
                if key not in known:
                    known[key] = _remembered(optimizer, parameter, trial, find)
                return known[key]

            make = partial(rebuilt, optimizer, parameter)
            shape = shape_like(parameter)
            tiny = _tiny_shape(num_dims)
            reads = tried(tiny, partial(_tried_if_possible, make, tiny, num_steps))
            if reads is None:
                # It steps some shapes only, such as rows that its number of heads divides.
                reads = tried((shape, "all dims"), partial(_tried, make, shape, num_steps))
            elif reads.free_dims and math.prod(shape) > math.prod(tiny):
                find = partial(_free_dims, make, shape, reads.free_dims)
                reads = replace(reads, free_dims=tried((shape, "free dims"), find))
            result[parameter] = reads
    return result


def _remembered(
    optimizer: Optimizer, parameter: nn.Parameter, trial: Any, find: Callable[[], Any]
) -> Any:
    """Return the result of `find`, cached for optimizers of the same class and settings; not cached
    if `_settings_text` is None.

    Args:
        trial: hashable; decides the result together with the settings.
    """
    settings = _settings_text(optimizer, parameter)
    if settings is None:
        return find()

    results = _results_by_class.setdefault(type(optimizer), {})
    key = settings, trial
    if key not in results:
        results[key] = find()
    return results[key]


def _settings_text(optimizer: Optimizer, parameter: nn.Parameter) -> str | None:
    """Return all that copies of an optimizer are made from, but for its class, as a text.

    None if it is more than plain values: a function, another optimizer, a tensor.
    """
    members = vars(optimizer)
    if "defaults" not in members or "param_groups" not in members:
        return None
    group = group_of(optimizer, parameter)
    if group is None:
        return None

    of_group = {name: value for name, value in group.items() if name not in MEMBERS}
    attributes: dict[str, Any] = {}
    for name, value in members.items():
        if name not in _NO_SETTINGS and not name.startswith("_optimizer_"):
            attributes[name] = value
    settings = (of_group, optimizer.defaults, attributes)
    values = [value for part in settings for value in part.values()]
    return repr(settings) if all(map(_is_plain, values)) else None


def _is_plain(value: Any) -> bool:
    """Return whether a value is None, a bool, number or text, or a tuple of such values."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def reads_of_all(optimizers: Iterable[Optimizer]) -> dict[nn.Parameter, Reads]:
    """Return parameter -> the elements that its update reads, for the parameters of all optimizers.

    Parameters of an optimizer that cannot be tried are left out: they stay unsharded.
    """
    result: dict[nn.Parameter, Reads] = {}
    for optimizer in optimizers:
        # Any class of any package is tried here, so any error may come.
        with suppress(Exception):
            result.update(reads_of(optimizer))
    return result


def kinds_of(optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Return parameter -> a text, equal for parameters that are stepped in the same way: the
    optimizers that step it, and the flags of their groups.

    Rates and decays do not say how an optimizer works; flags may (`use_muon`).
    """
    parts: dict[nn.Parameter, list[str]] = {}
    for index, one in enumerate(optimizers_in(optimizer)):
        for group in one.param_groups:
            flags = []
            for name, value in group.items():
                if name not in MEMBERS and not isinstance(value, float):
                    flags.append(value)
            text = f"{index} {flags}"
            for parameter in group["params"]:
                parts.setdefault(parameter, []).append(text)
    return {parameter: "; ".join(texts) for parameter, texts in parts.items()}


def _num_steps(optimizer: Optimizer) -> int:
    """Return the number of steps in which everything happens that the optimizer does regularly."""
    periods = [period for period in periods_of(optimizer) if period < _MAX_STEPS]
    return max(_NUM_STEPS, 1 + max(periods, default=0))


def _tiny_shape(num_dims: int) -> tuple[int, ...]:
    """Return the shape of the tiny parameters that are tried."""
    sizes = _SIZES + _SIZES[-1:] * (num_dims - len(_SIZES))
    return sizes[:num_dims] if num_dims > 1 else (_VECTOR,)


def shape_like(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's shape, its largest dims halved until it is small enough to be tried.

    Halves of a size that is a multiple of a power of two are, too, as blocks of it need. A scalar's
    is (1,).
    """
    shape = list(parameter.shape or (1,))
    while math.prod(shape) > _MAX_ELEMENTS:
        largest = shape.index(max(shape))
        shape[largest] //= 2
    return tuple(shape)


def _random(shape: Sequence[int], num_steps: int) -> tuple[Tensor, list[Tensor]]:
    """Return (values, gradient of each of `num_steps` steps) of a parameter of shape `shape`: the
    same random fp64 numbers at every call.
    """
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(
        1 + num_steps, *shape, generator=generator, dtype=torch.float64
    ).unbind(0)
    # Large gradients too, which it may clip.
    return start, [grad * 30.0 ** (step % _NUM_STEPS) for step, grad in enumerate(grads)]


def _tried_if_possible(make: Make, shape: tuple[int, ...], num_steps: int) -> Reads | None:
    """Return the result of `_tried`; None if the optimizer cannot step this shape."""
    # Any class of any package is tried here, so any error may come.
    with suppress(Exception):
        return _tried(make, shape, num_steps)
    return None


def _tried(make: Make, shape: tuple[int, ...], num_steps: int) -> Reads:
    """Return the elements that a fresh optimizer reads to update one element of a parameter of a
    small shape, as far as some steps show it.

    Args:
        make: parameters -> a fresh optimizer of them.
    """
    start, grads = _random(shape, num_steps)
    first, (full,) = _stepped(make, [start], [grads])

    free_dims: set[int] = set()
    # A parameter that does not move shows nothing.
    if not torch.equal(full, start):
        for dim, size in enumerate(shape):
            sizes = max(1, size - 1), math.ceil(size / 3)
            if all(_is_free(make, start, grads, full, dim, size) for size in sizes):
                free_dims.add(dim)

    others = [grad * 3.0 for grad in grads]
    together = trained(make, [start, -start], [grads, others])
    second, (other,) = _stepped(make, [-start], [others])
    if repr(_numbers_in(first)) != repr(_numbers_in(second)):
        # Something that came from gradients is kept for all parameters: sums over them. A tiny step
        # may not show it (Prodigy's estimate of a rate begins at 1e-6).
        return Reads(frozenset(), len(shape), False)
    pairs = zip(together, (full, other), strict=True)
    is_parameter_wise = all(_is_close(both, alone, _RTOL_LARGE) for both, alone in pairs)
    return Reads(frozenset(free_dims), len(shape), is_parameter_wise)


def _is_free(
    make: Make, start: Tensor, grads: Sequence[Tensor], full: Tensor, dim: int, size: int
) -> bool:
    """Return whether shards of `size` along `dim` are trained to the shards of `full`."""
    rtol = _RTOL if start.numel() <= math.prod(_SIZES) else _RTOL_LARGE
    # What cannot step a shard needs more than that.
    with suppress(Exception):
        return _is_close(_trained_in_shards(make, start, grads, dim, size), full, rtol)
    return False


def _is_close(result: Tensor, full: Tensor, rtol: float) -> bool:
    return torch.allclose(result, full, rtol=rtol, atol=_ATOL)


def _numbers_in(optimizer: Optimizer) -> list[float]:
    """Return all numbers in groups and attributes of an optimizer and of those that it holds."""
    values: list[Any] = []
    for group in groups_in(optimizer):
        values += [value for name, value in group.items() if name not in MEMBERS]
    for one in optimizers_in(optimizer):
        for name, value in vars(one).items():
            is_number = isinstance(value, int | float | Tensor)
            if is_number and name not in _NO_SETTINGS and not name.startswith("_optimizer_"):
                values.append(value)

    numbers: list[float] = []
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            numbers += leaf.flatten().tolist()
        elif isinstance(leaf, int | float):
            numbers.append(leaf)
    return numbers


def _free_dims(make: Make, shape: tuple[int, ...], dims: Iterable[int]) -> frozenset[int]:
    """Return the dims, of those that are free in a tiny parameter, that are in one of this shape.

    The last slice along a dim is stepped alone, as small as a shard can be.
    """
    start, grads = _random(shape, _NUM_STEPS)
    (full,) = trained(make, [start], [grads])
    free_dims: set[int] = set()
    for dim in dims:
        if shape[dim] == 1:
            free_dims.add(dim)
            continue
        if _is_free(make, start, grads, full, dim, shape[dim] - 1):
            free_dims.add(dim)
    return frozenset(free_dims)


def _trained_in_shards(
    make: Make, start: Tensor, grads: Sequence[Tensor], dim: int, size: int
) -> Tensor:
    """Return the values of a parameter after shards of `size` along `dim` were trained one by one.

    Args:
        make: parameters -> a fresh optimizer of them.
        start: first values.
        grads: of each step.
    """
    shards: list[Tensor] = []
    pieces = zip(start.split(size, dim), *(grad.split(size, dim) for grad in grads), strict=True)
    for start_of_shard, *grads_of_shard in pieces:
        shards += trained(make, [start_of_shard], [grads_of_shard])
    return torch.cat(shards, dim)


def trained(
    make: Make, starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the parameters of a fresh optimizer after one step per gradient.

    Args:
        grads: by parameter, then by step.
    """
    _, parameters = _stepped(make, starts, grads)
    return parameters


def _stepped(
    make: Make, starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> tuple[Optimizer, list[Tensor]]:
    """Return a fresh optimizer after one step per gradient, and its parameters' values. Raises
    whatever the optimizer does.

    Args:
        make: parameters -> a fresh optimizer of them.
        starts: first values of the parameters.
        grads: of each parameter, a gradient per step.
    """
    parameters = [nn.Parameter(start.clone()) for start in starts]
    fresh = make(parameters)
    for of_step in zip(*grads, strict=True):
        for parameter, grad in zip(parameters, of_step, strict=True):
            parameter.grad = grad.clone()
        fresh.step()
    return fresh, [parameter.detach() for parameter in parameters]
