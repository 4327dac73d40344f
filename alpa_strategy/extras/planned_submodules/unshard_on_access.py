"""UnshardOnAccess: a sharded parameter is full where code of the step takes it.

Eager steps with planned submodules run the user's code between the programs on every rank, each on
its own batch. The code gets a full copy of a parameter, which is a leaf of autograd. Its gradient
is this rank's own; the mean over the ranks goes to the shards (`reduce_gradients`).
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from alpa_strategy.comm.collectives import all_reduce_max
from alpa_strategy.errors import SetupError
from alpa_strategy.extras.planned_submodules.call_order import CallOrder
from alpa_strategy.runtime.parameters import ParameterStore


class UnshardOnAccess(TorchFunctionMode):
    """Context of a step's code: a sharded parameter is full from the first function of torch on
    that takes it.

    Args:
        store: of the parameters.
        order: of the calls of all ranks of the store.

    Raises:
        SetupError: the code changes a full parameter, which is a local copy, or reads gradients,
            which are sharded.
    """

    def __init__(self, store: ParameterStore, order: CallOrder) -> None:
        super().__init__()
        self._store = store
        self._order = order
        self._sharded_ids = {id(parameter) for parameter in store.sharded_parameters}

        # id -> parameter, its full copy, and the copy's first version.
        self._full_copies: dict[int, tuple[nn.Parameter, Tensor, int]] = {}

        # Copies that the backwards of this optimizer step may reach, in the order of all ranks.
        self._leaves: list[tuple[nn.Parameter, Tensor]] = []

        # Whether the gradients of `_leaves` have been reduced.
        self._is_reduced = False

        # False while code runs that handles shards itself.
        self.sees = True

    def __enter__(self) -> "UnshardOnAccess":
        if self._is_reduced:
            self._leaves.clear()
        self._is_reduced = False
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.forget()

    def forget(self) -> None:
        """Drop all full copies, because shards get new values.

        Raises:
            SetupError: the user's code has changed one of the copies.
        """
        full_copies = self._full_copies
        self._full_copies = {}
        for parameter, full, version in full_copies.values():
            if full._version != version:
                raise self._error(parameter)

    def reduce_gradients(self) -> None:
        """Add the mean of the ranks' gradients of full copies to the gradients of the shards.

        Collective.
        """
        self._is_reduced = True
        if not self._leaves:
            return
        axis = self._store.mesh.all_devices
        is_used = all_reduce_max([leaf.grad is not None for _, leaf in self._leaves], axis.group)
        for (parameter, leaf), has_gradient in zip(self._leaves, is_used, strict=True):
            if not has_gradient:
                continue
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach()
            leaf.grad = None
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            mean = axis.all_reduce(gradient / axis.size)
            shard = self._store.shard_like(parameter, mean)
            parameter.grad = shard if parameter.grad is None else parameter.grad + shard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sharded = []
        if self.sees:
            sharded = [p for p in tree_leaves((args, kwargs)) if id(p) in self._sharded_ids]

        if func in _REFUSED and sharded:
            if sys._getframe(1).f_code.co_name != "zero_grad":
                raise self._error(sharded[0])
            self._clear_gradient(sharded[0])
        if func in _OF_SHARDS or func in _REFUSED or not sharded:
            return func(*args, **kwargs)

        args, kwargs = tree_map_only(nn.Parameter, self._unshard, (args, kwargs))
        if func == _TENSOR.data.__get__:
            return args[0].detach()
        return func(*args, **kwargs)

    def _unshard(self, parameter: nn.Parameter) -> Tensor:
        """Return the full copy of a sharded parameter; another parameter as it is.

        Collective, if there is no copy yet.
        """
        if id(parameter) not in self._sharded_ids:
            return parameter
        if id(parameter) not in self._full_copies:
            self._order.meet(f"the use of {self._store.name_of(parameter)} outside of a submodule")
            full = self._store.gather(parameter)
            full.requires_grad_(full.is_floating_point() or full.is_complex())
            self._full_copies[id(parameter)] = (parameter, full, full._version)
            self._leaves.append((parameter, full))
        _, full, _ = self._full_copies[id(parameter)]
        return full if parameter.requires_grad else full.detach()

    def _clear_gradient(self, parameter: nn.Parameter) -> None:
        """Clear the gradients of a parameter's full copies, as `zero_grad` clears the shard's."""
        for other, leaf in self._leaves:
            if other is parameter:
                leaf.grad = None

    def _error(self, parameter: nn.Parameter) -> SetupError:
        """Return the error for code that changes a sharded parameter or reads its gradient."""
        name = self._store.name_of(parameter)
        return SetupError(
            f"code of the step changes {name} or reads its gradient, of which each rank has a"
            " shard",
            f'keep it unsharded (placements={{"{name}": "R"}}), or do it in a hook',
        )


# The attributes of tensors are descriptors.
_TENSOR: Any = Tensor

# Functions that are right for a shard.
_OF_SHARDS = {
    _TENSOR.grad.__set__,
    _TENSOR.grad.__delete__,
    _TENSOR.is_leaf.__get__,
    _TENSOR.requires_grad.__get__,
    _TENSOR.requires_grad.__set__,
    Tensor.requires_grad_,
    Tensor.__hash__,
}

# Functions that a shard would make wrong, and a full copy without effect.
_REFUSED = {
    _TENSOR.grad.__get__,
    _TENSOR.data.__set__,
    Tensor.backward,
    torch.autograd.grad,
    torch.autograd.backward,
}
