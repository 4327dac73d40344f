"""What planning must know of an optimizer: its state's bytes per element, those it moves, whether
it is element-wise.

All are found by experiment, on a copy of the optimizer's class with the user's own settings and a
tiny parameter: an optimizer is element-wise when training the shards of a parameter gives the
shards of training the whole.
"""

import copy
import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from alpa_strategy.cost.saved_tensors import LiveStorages, tensors_in
from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.optimizer_info import OptimizerInfo

_SHAPE = (4, 6)
_NUM_STEPS = 3
_MEMBERS = ("params", "param_names")  # of a group, no settings
Make = Callable[[list[torch.nn.Parameter]], Optimizer]  # a fresh optimizer of parameters


def inspect_optimizer(configured: Optimizer | Sequence[Optimizer]) -> OptimizerInfo:
    """Find `OptimizerInfo` of the (single) optimizer that `configure_optimizers` gave, of any
    class, by experiment: with every kind of group that it has, and parameters of as many dims.

    Raises AlpaError for none or several. An optimizer that cannot be rebuilt from its settings, or
    needs a closure, counts as not element-wise: parameters then stay whole, which is always right.
    """
    optimizers = [configured] if isinstance(configured, Optimizer) else list(configured)
    if len(optimizers) != 1:
        raise AlpaError(
            f"configure_optimizers returned {len(optimizers)} optimizers, one is supported",
            "return one optimizer with a parameter group for each setting",
        )
    (optimizer,) = optimizers
    name = type(optimizer).__name__
    try:
        # Rates and decays do not say how it works; flags may (`use_muon`), and so may convolutions'
        # dims.
        kinds: dict[tuple[str, int], dict[str, Any]] = {}
        for group in optimizer.param_groups:
            flags = repr(
                [v for key, v in group.items() if key not in _MEMBERS and not isinstance(v, float)]
            )
            kinds.update({(flags, max(2, parameter.dim())): group for parameter in group["params"]})
        works = [
            _works(partial(_rebuilt, optimizer, group), dims) for (_, dims), group in kinds.items()
        ]
        # Hooks have a schedule-free one's change weights, by state that must be there.
        if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
            works.append((False, False))
        element_wise, parameter_wise = map(all, zip(*works, strict=True))
        state_bytes, moved, scratch = _per_element(optimizer)
        step_seconds, parameter_seconds = _python_seconds(optimizer)
        return OptimizerInfo(
            state_bytes,
            element_wise,
            name,
            parameter_wise,
            moved_bytes=moved,
            scratch=scratch,
            step_seconds=step_seconds,
            parameter_seconds=parameter_seconds,
        )
    # Any class of any package is tried here, so any error may come: it means "cannot be known",
    # never a crash.
    except Exception:
        return OptimizerInfo(state_bytes=8.0, element_wise=False, name=name, parameter_wise=False)


def _works(make: Make, dims: int) -> tuple[bool, bool]:
    """Whether an optimizer works element by element, and parameter by parameter."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(
        1 + _NUM_STEPS, *_SHAPE, *[1] * (dims - 2), generator=generator, dtype=torch.float64
    )
    grads = [
        grad * 30.0**step for step, grad in enumerate(grads)
    ]  # large ones too, which it may clip
    (full,) = _trained(make, [start], [grads])

    def in_shards(dim: int, size: int) -> Tensor:
        shards = zip(start.split(size, dim), *(g.split(size, dim) for g in grads), strict=True)
        return torch.cat(
            [_trained(make, [shard], [own_grads])[0] for shard, *own_grads in shards], dim
        )

    cuts = ((0, 3), (0, 1), (1, 2), (1, 4))  # (dim, size of a shard)
    element_wise = all(
        torch.allclose(in_shards(*cut), full, rtol=1e-12, atol=1e-14) for cut in cuts
    )
    element_wise &= not torch.equal(full, start)  # what moves nothing shows nothing
    others = [g * 3.0 for g in grads]
    both = _trained(make, [start, -start], [grads, others])
    alone = (full, *_trained(make, [-start], [others]))
    return element_wise, all(map(torch.allclose, both, alone))


def optimizer_info_of(module: Any) -> OptimizerInfo:
    """Return the `OptimizerInfo` of `module.configure_optimizers()`, for planning without a
    Trainer.

    A module whose method needs a Trainer is planned as with Adam.
    """
    try:
        optimizers = _optimizers_in(module.configure_optimizers())
    # User code that expects a Trainer fails in any way it likes; planning goes on with the usual
    # case.
    except Exception:
        return OptimizerInfo()
    return inspect_optimizer(optimizers)


def _optimizers_in(configured: Any) -> list[Optimizer]:
    """Return the optimizers in a result of `configure_optimizers`: a single one, lists, with
    schedulers, or dictionaries.
    """
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return [configured["optimizer"]]
    if len(configured) == 2 and isinstance(
        configured[0], list | tuple
    ):  # ([optimizer, ...], [scheduler, ...])
        return list(configured[0])
    return [optimizer for entry in configured for optimizer in _optimizers_in(entry)]


def wants_sparse_gradients(optimizer: Optimizer) -> bool:
    """Whether the optimizer steps on sparse gradients alone (`SparseAdam`), which no captured step
    makes.
    """
    gradient, make = torch.eye(*_SHAPE), partial(_rebuilt, optimizer, optimizer.param_groups[0])

    def takes(grad: Tensor) -> bool:
        try:
            _trained(make, [gradient], [[grad]])
        except Exception:  # any class of any package is tried here
            return False
        return True

    return not takes(gradient) and takes(gradient.to_sparse(1))


def _per_element(optimizer: Optimizer) -> tuple[float, float, float]:
    """Return `OptimizerInfo`'s state_bytes, moved_bytes and scratch, measured by two steps of a
    copy of the optimizer.

    The copy steps a parameter of the dtype that the optimizer's parameters have; the result is the
    mean over all elements if they have several. Step counters do not count.
    """
    num_elements = Counter[torch.dtype]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Others never train.
            if parameter.is_floating_point() or parameter.is_complex():
                num_elements[parameter.dtype] += parameter.numel()

    totals = torch.zeros(3, dtype=torch.float64)
    for dtype, count in num_elements.items():
        totals += torch.tensor(_probe(optimizer, dtype), dtype=torch.float64) * count
    state_bytes, moved_bytes, scratch = (totals / max(1, num_elements.total())).tolist()
    return state_bytes, moved_bytes, scratch


def _probe(optimizer: Optimizer, dtype: torch.dtype) -> tuple[float, float, float]:
    parameter = torch.nn.Parameter(torch.zeros(_SHAPE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    group, traffic = optimizer.param_groups[0], _Traffic()
    copied = _rebuilt(optimizer, group, [parameter])
    copied.step()
    state_bytes = _num_bytes(list(copied.state[parameter].values())) / parameter.numel()
    if group.get("fused"):
        return state_bytes, OptimizerInfo(state_bytes).update_bytes(dtype.itemsize), 0.0
    all_at_once = group.get("foreach", False) is not False
    copied.param_groups[0] |= {"foreach": True} if all_at_once else {}
    with traffic:
        copied.step()
    scratch = traffic.peak_bytes(set()) / parameter.nbytes if all_at_once else 0.0
    return state_bytes, traffic.moved / parameter.numel(), scratch


# Parameters of two copies: the difference of their steps is what one parameter takes.
_FEW = 1
_MANY = 9
# Steps of each copy that are timed.
_TIMED_STEPS = 5


def _python_seconds(optimizer: Optimizer) -> tuple[float, float]:
    """Return the host's seconds of a step without parameters, and those of each parameter.

    They are measured on tiny parameters, whose kernels take next to no time.
    """
    few = _seconds_of_step(optimizer, _FEW)
    many = _seconds_of_step(optimizer, _MANY)
    per_parameter = max(0.0, (many - few) / (_MANY - _FEW))
    return max(0.0, few - _FEW * per_parameter), per_parameter


def _seconds_of_step(optimizer: Optimizer, num_parameters: int) -> float:
    """Return the median seconds on a core of a step of a copy with `num_parameters` tiny
    parameters.
    """
    parameters = [torch.nn.Parameter(torch.zeros(_SHAPE)) for _ in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    copied = _rebuilt(optimizer, optimizer.param_groups[0], parameters)
    copied.step()
    seconds = []
    for _ in range(_TIMED_STEPS):
        started = time.thread_time()
        copied.step()
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds)


class _Traffic(LiveStorages):
    """Counts what kernels read and write."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:
            is_in_place = any(argument.is_write for argument in func._schema.arguments)
            self.moved += _num_bytes((args, kwargs)) + _num_bytes(args[0] if is_in_place else out)
        return out


def _num_bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tree) if tensor.dim() > 0)


def _trained(
    make: Make, starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the parameters of a fresh optimizer after one step per gradient.

    Args:
        grads: by parameter, then by step.
    """
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    rebuilt = make(parameters)
    for of_step in zip(*grads, strict=True):
        for parameter, grad in zip(parameters, of_step, strict=True):
            parameter.grad = grad.clone()
        rebuilt.step()
    return [parameter.detach() for parameter in parameters]


def _rebuilt(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: list[torch.nn.Parameter]
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
