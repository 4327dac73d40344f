"""What planning must know of an optimizer: its state's bytes per element, those it moves, whether
it is element-wise.

All are found by experiment, on a copy of the optimizer's class with the user's own settings and a
tiny parameter (`planner/optimizer_reads.py`).
"""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.capture.uncompiled import uncompiled
from alpa_strategy.cost.saved_tensors import LiveStorages, tensors_in
from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.held_optimizers import groups_in, parameters_in
from alpa_strategy.ir.optimizer_info import FullUpdate, OptimizerInfo
from alpa_strategy.planner.optimizer_copies import group_of, rebuilt, state_of
from alpa_strategy.planner.optimizer_reads import kinds_of, reads_of, shape_like, trained
from alpa_strategy.planner.optimizer_work import full_updates_of

_SHAPE = (4, 6)


@uncompiled()
def inspect_optimizer(
    configured: Optimizer | Sequence[Optimizer], module: nn.Module | None = None
) -> OptimizerInfo:
    """Find `OptimizerInfo` of the (single) optimizer that `configure_optimizers` gave, of any
    class, by experiment: with every kind of group that it has, and parameters of as many dims.

    With a module, updates of its parameters that need full tensors are priced.

    Raises AlpaError for none or several. An optimizer that cannot be copied, or needs a closure,
    counts as not element-wise: parameters then stay whole, which is always right.
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
        reads = reads_of(optimizer)
        element_wise = all(parameter_reads.is_element_wise for parameter_reads in reads.values())
        parameter_wise = all(
            parameter_reads.is_parameter_wise for parameter_reads in reads.values()
        )
        full_updates: tuple[tuple[str, FullUpdate], ...] = ()
        if module is not None and parameter_wise and not element_wise:
            names = {parameter: name for name, parameter in module.named_parameters()}
            full_updates = full_updates_of(optimizer, reads, names)
        state_bytes, moved, scratch = _per_element(optimizer)
        step_seconds, parameter_seconds = _python_seconds(optimizer)
        return OptimizerInfo(
            state_bytes,
            element_wise,
            name,
            parameter_wise,
            moved_bytes=moved,
            scratch=scratch,
            full_updates=full_updates,
            step_seconds=step_seconds,
            parameter_seconds=parameter_seconds,
        )
    # Any class of any package is tried here, so any error may come: it means "cannot be known",
    # never a crash.
    except Exception as error:
        first_line, _, _ = str(error).partition("\n")
        problem = f"{type(error).__name__}: {first_line}"
        return OptimizerInfo(
            8.0, element_wise=False, name=name, parameter_wise=False, problem=problem
        )


def joint_info(infos: Sequence[OptimizerInfo]) -> OptimizerInfo:
    """Return the properties of several optimizers together, for plans that know of one.

    The state is that of the largest; what one of them needs, all of them get.
    """
    largest = max(infos, key=lambda info: info.state_bytes, default=OptimizerInfo(state_bytes=0.0))
    return replace(
        largest,
        full_updates=tuple(update for info in infos for update in info.full_updates),
        element_wise=all(info.element_wise for info in infos),
        problem="; ".join(info.problem for info in infos if info.problem),
        parameter_wise=all(info.parameter_wise for info in infos),
    )


def optimizer_info_of(module: Any) -> OptimizerInfo:
    """Return the `OptimizerInfo` of `module.configure_optimizers()`, for planning without a
    Trainer.

    A module whose method fails, as it needs a Trainer, is planned as with Adam. Raises AlpaError as
    `inspect_optimizer`.
    """
    try:
        optimizers = _optimizers_in(module.configure_optimizers())
    # User code that expects a Trainer fails in any way it likes; planning goes on with the usual
    # case.
    except Exception:
        return OptimizerInfo(name="Adam (assumed)")
    return inspect_optimizer(optimizers, module)


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


@uncompiled()
def wants_sparse_gradients(optimizer: Optimizer) -> bool:
    """Whether the optimizer steps on sparse gradients alone (`SparseAdam`), which no captured step
    makes.
    """
    gradient, make = torch.eye(*_SHAPE), partial(rebuilt, optimizer, parameters_in(optimizer)[0])

    def takes(grad: Tensor) -> bool:
        try:
            trained(make, [gradient], [[grad]])
        except Exception:  # any class of any package is tried here
            return False
        return True

    return not takes(gradient) and takes(gradient.to_sparse(1))


def _per_element(optimizer: Optimizer) -> tuple[float, float, float]:
    """Return `OptimizerInfo`'s state_bytes, moved_bytes and scratch, measured by two steps of
    copies of the optimizer.

    A copy steps a parameter like the largest of each kind, of its dtype and about its proportions;
    the result is the mean over all elements. Step counters do not count.
    """
    num_elements = Counter[tuple[str, torch.dtype]]()
    examples: dict[tuple[str, torch.dtype], nn.Parameter] = {}
    kinds = kinds_of(optimizer)
    for parameter in parameters_in(optimizer):
        # Others never train.
        if parameter.is_floating_point() or parameter.is_complex():
            kind = kinds[parameter], parameter.dtype
            num_elements[kind] += parameter.numel()
            largest = examples.get(kind)
            if largest is None or parameter.numel() > largest.numel():
                examples[kind] = parameter

    totals = torch.zeros(3, dtype=torch.float64)
    for kind, count in num_elements.items():
        totals += torch.tensor(_probe(optimizer, examples[kind]), dtype=torch.float64) * count
    state_bytes, moved_bytes, scratch = (totals / max(1, num_elements.total())).tolist()
    return state_bytes, moved_bytes, scratch


def _probe(optimizer: Optimizer, like: nn.Parameter) -> tuple[float, float, float]:
    """Step a copy of the optimizer on a small parameter, as it would step `like`. Raises whatever
    the optimizer does.

    Returns:
        (bytes of state per element, bytes moved per element, peak of temporary bytes per byte of
        the parameters). The last is 0 if it steps one parameter at a time, or in a fused kernel.
    """
    parameter = nn.Parameter(torch.zeros(shape_like(like), dtype=like.dtype))
    parameter.grad = torch.ones_like(parameter)
    group, traffic = group_of(optimizer, like) or {}, _Traffic()
    copied = rebuilt(optimizer, like, [parameter])
    copied.step()
    state_bytes = _num_bytes(state_of(copied, parameter)) / parameter.numel()
    if group.get("fused"):
        return state_bytes, OptimizerInfo(state_bytes).update_bytes(like.dtype.itemsize), 0.0
    all_at_once = group.get("foreach", False) is not False
    if all_at_once:
        for copied_group in groups_in(copied):
            copied_group["foreach"] = True
    parameter.grad = torch.ones_like(parameter)
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

    They are measured on tiny parameters, whose kernels take next to no time; on small ones like the
    first if it refuses these.
    """
    like = parameters_in(optimizer)[0]
    shape: tuple[int, ...] = _SHAPE
    try:
        few = _seconds_of_step(optimizer, _FEW, shape)
    # It steps some shapes only. Any class of any package is tried here, so any error may come.
    except Exception:
        shape = shape_like(like)
        few = _seconds_of_step(optimizer, _FEW, shape)
    many = _seconds_of_step(optimizer, _MANY, shape)
    per_parameter = max(0.0, (many - few) / (_MANY - _FEW))
    return max(0.0, few - _FEW * per_parameter), per_parameter


def _seconds_of_step(optimizer: Optimizer, num_parameters: int, shape: tuple[int, ...]) -> float:
    """Return the median seconds on a core of a step of a copy with `num_parameters` parameters of
    `shape`. Raises whatever the optimizer does.
    """
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    copied = rebuilt(optimizer, parameters_in(optimizer)[0], parameters)
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
    """Return the bytes of all tensors of a pytree that have dims."""
    return sum(tensor.nbytes for tensor in tensors_in(tree) if tensor.dim() > 0)
