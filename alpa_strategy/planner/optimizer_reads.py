"""What an optimizer looks at when it updates a parameter: single elements, slices along some dims,
or the full tensor.

It is found by experiment, on a copy of the optimizer's class with the user's own settings: tiny
parameters are trained in full and in shards. Along a dim in which both give the same result, a
device may step its shard alone. No class of any package is known by name.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.ir.optimizer_info import Reads

_NUM_STEPS = 3
# Members of a parameter group that are no settings.
_MEMBERS = ("params", "param_names")
# Sizes of the dims of parameters that are tried; further dims have the last.
_SIZES = (4, 6, 5, 3)
# A vector's only dim.
_VECTOR = 24
# Results in shards and in full are equal up to rounding.
_RTOL = 1e-12
_ATOL = 1e-14
# Returns a fresh optimizer of parameters.
Make = Callable[[list[nn.Parameter]], Optimizer]


def reads_of(optimizer: Optimizer) -> dict[nn.Parameter, Reads]:
    """Return for each of the optimizer's parameters what its update looks at.

    Every kind of group is tried, with parameters of as many dims. Raises whatever the optimizer
    does if it cannot be rebuilt from its settings, or needs a closure.
    """
    # Hooks have a schedule-free one's change weights, by state that must be there.
    has_other_weights = hasattr(optimizer, "train") and hasattr(optimizer, "eval")
    by_kind: dict[tuple[str, int], Reads] = {}
    result: dict[nn.Parameter, Reads] = {}
    for group in optimizer.param_groups:
        # Rates and decays do not say how it works; flags may (`use_muon`).
        flags = []
        for name, value in group.items():
            if name not in _MEMBERS and not isinstance(value, float):
                flags.append(value)
        for parameter in group["params"]:
            num_dims = max(1, parameter.dim())
            kind = repr(flags), num_dims
            if kind not in by_kind and has_other_weights:
                by_kind[kind] = Reads(frozenset(), num_dims, False)
            elif kind not in by_kind:
                by_kind[kind] = _tried(partial(rebuilt, optimizer, group), num_dims)
            result[parameter] = by_kind[kind]
    return result


def reads_of_all(optimizers: Iterable[Optimizer]) -> dict[nn.Parameter, Reads]:
    """Return what the updates of all optimizers' parameters look at.

    Parameters of an optimizer that cannot be tried are left out: they stay unsharded.
    """
    result: dict[nn.Parameter, Reads] = {}
    for optimizer in optimizers:
        # Any class of any package is tried here, so any error may come.
        with suppress(Exception):
            result.update(reads_of(optimizer))
    return result


def _tried(make: Make, num_dims: int) -> Reads:
    """Return what a fresh optimizer looks at in a parameter of `num_dims` dims."""
    sizes = _SIZES + _SIZES[-1:] * (num_dims - len(_SIZES))
    shape = sizes[:num_dims] if num_dims > 1 else (_VECTOR,)
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(
        1 + _NUM_STEPS, *shape, generator=generator, dtype=torch.float64
    ).unbind(0)
    # Large gradients too, which it may clip.
    grads = [grad * 30.0**step for step, grad in enumerate(grads)]
    (full,) = trained(make, [start], [grads])

    def is_same_in_shards(dim: int, size: int) -> bool:
        shards = []
        pieces = zip(start.split(size, dim), *(g.split(size, dim) for g in grads), strict=True)
        for start_of_shard, *grads_of_shard in pieces:
            shards += trained(make, [start_of_shard], [grads_of_shard])
        return torch.allclose(torch.cat(shards, dim), full, rtol=_RTOL, atol=_ATOL)

    free_dims: set[int] = set()
    # A parameter that does not move shows nothing.
    if not torch.equal(full, start):
        for dim, size in enumerate(shape):
            if is_same_in_shards(dim, size - 1) and is_same_in_shards(dim, math.ceil(size / 3)):
                free_dims.add(dim)

    others = [grad * 3.0 for grad in grads]
    together = trained(make, [start, -start], [grads, others])
    alone = (full, *trained(make, [-start], [others]))
    is_parameter_wise = all(starmap(torch.allclose, zip(together, alone, strict=True)))
    return Reads(frozenset(free_dims), num_dims, is_parameter_wise)


def trained(
    make: Make, starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the parameters of a fresh optimizer after one step per gradient.

    Args:
        grads: by parameter, then by step.
    """
    parameters = [nn.Parameter(start.clone()) for start in starts]
    rebuilt = make(parameters)
    for of_step in zip(*grads, strict=True):
        for parameter, grad in zip(parameters, of_step, strict=True):
            parameter.grad = grad.clone()
        rebuilt.step()
    return [parameter.detach() for parameter in parameters]


def rebuilt(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> Optimizer:
    """Return a fresh optimizer of the same class for other parameters, with a group's settings as
    schedulers left them.
    """
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    settings = {
        k: copy.copy(group.get(k, v))
        for k, v in optimizer.defaults.items()
        if takes_any or k in accepted
    }
    settings |= (
        {"lr": max(settings["lr"], 1e-3)} if settings.get("lr") is not None else {}
    )  # a warmup begins at none
    # Kernels for devices; what they compute is the same, and the probe runs on the CPU.
    settings |= {key: False for key in ("fused", "capturable") if settings.get(key)}
    group_options = {
        k: copy.copy(v) for k, v in group.items() if k not in (*optimizer.defaults, *_MEMBERS)
    }  # GaLore's `rank`
    return type(optimizer)(
        [group_options | {"params": parameters}] if group_options else parameters, **settings
    )
