"""Steps with manual optimization, which read and set gradients themselves: these are sharded."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from alpa_strategy.capture.python_state import patched
from alpa_strategy.ir.user_code import is_user_file
from alpa_strategy.lightning.full_parameters import gradient_norm
from alpa_strategy.runtime.owner_step import OwnerStep
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.sharded_parameter import set_data


class ShardedGradients:
    """Steps of a module with manual optimization and sharded gradients.

    Args:
        module: of the training.
        store: of its parameters.
        owner_steps: the steps of optimizers that need full gradients.
        meet: called before a collective that the user's step makes, so that all ranks are there.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ParameterStore,
        owner_steps: Sequence[OwnerStep],
        meet: Callable[[], None],
    ) -> None:
        self._module = module
        self._store = store
        self._meet = meet
        self._reads = _ShardedGradientReads(store, owner_steps)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of a step, in which gradients may be clipped, read and set.

        - `torch.nn.utils.get_total_norm` and `clip_grad_norm_` use the norm of the full gradients.
          They are then collective.
        - Full gradients that the step sets are sharded.
        - The first read of a sharded gradient is a warning.
        """
        clipping = torch.nn.utils.clip_grad
        torch_norm = clipping._get_total_norm

        def total_norm(tensors: Any, norm_type: float = 2.0, *rest: Any, **named: Any) -> Tensor:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            ids = {id(tensor) for tensor in tensors}
            parameters = [p for p in self._module.parameters() if id(p.grad) in ids]
            if self._store.sharded_parameters.keys().isdisjoint(parameters):
                return torch_norm(tensors, norm_type, *rest, **named)
            self._meet()
            return gradient_norm(self._store, parameters, float(norm_type))

        names = [(clipping, "_get_total_norm"), (torch.nn.utils, "get_total_norm")]
        with patched((owner, name, total_norm) for owner, name in names), self._reads:
            yield


class _ShardedGradientReads(TorchFunctionMode):
    """Mode of a step with sharded gradients: warns once if the user's code reads one.

    A full gradient that the user's code sets is sharded.
    """

    def __init__(self, store: ParameterStore, owner_steps: Sequence[OwnerStep]) -> None:
        super().__init__()
        self._store = store
        self._owner_steps = owner_steps
        self._has_warned = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sharded = self._store.sharded_parameters
        is_unknown = func == _READS_GRAD and not self._has_warned and args[0] in sharded
        if is_unknown and _is_of_step(sys._getframe(1)):
            self._has_warned = True
            rank_zero_warn(
                f"alpa: the step reads the gradient of {self._store.name_of(args[0])}, of which"
                " each rank has a shard: elementwise changes are right, and norms by"
                " torch.nn.utils; for sums and products of your own keep gradients full"
                ' (parallel="data")'
            )
        sets_gradient = func == _SETS_GRAD and args[1] is not None and args[0] in sharded
        # At its owner a parameter and its gradient are full while the optimizer steps.
        if sets_gradient and not any(step.is_stepping(args[0]) for step in self._owner_steps):
            parameter = args[0]
            data = parameter.data
            shard = self._store.shard_like(*args)
            # torch checks that a gradient has the shape of the parameter's data.
            set_data([(parameter, shard)])
            func(parameter, shard)
            set_data([(parameter, data)])
            return None
        return func(*args, **(kwargs or {}))


def _is_of_step(frame: FrameType) -> bool:
    """Whether a frame is of the user's step, and not within an optimizer of the user's."""
    # Nearly always false, as torch's optimizers read the gradient of every parameter.
    if not is_user_file(frame.f_code.co_filename):
        return False

    callers = [caller.f_locals.get("self") for caller, _ in walk_stack(frame)]
    return not any(isinstance(caller, Optimizer) for caller in callers)


_READS_GRAD = cast("Any", Tensor).grad.__get__
_SETS_GRAD = cast("Any", Tensor).grad.__set__
