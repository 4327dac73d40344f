"""The optimizer's state between whole tensors (before and after training, in checkpoints) and local shards (in it).

The optimizer object, its groups and its parameters stay the same; only the tensors of `state` that have a parameter's
shape are cut or gathered. Step counters and the like are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.runtime.parameters import ParameterStore


@torch.no_grad()
def shard_state(optimizer: Optimizer, store: Any, values: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
    """Keep this rank's part of every state tensor (of a restored checkpoint), nothing of parameters that it does not
    hold.

    Args:
        store: ParameterStore or StagedParameters.
        values: gives the whole of a state tensor.
    """
    for parameter in parameters_of(optimizer):
        if store.name_of(parameter) is not None and not store.holds(parameter):
            optimizer.state.pop(parameter, None)
    _replace(optimizer, store, lambda name, tensor: store.shard_like(name, values(tensor)), dims=0)


def unshard_state(optimizer: Optimizer, store: ParameterStore) -> None:
    """Give every state tensor its whole shape again. Collective."""
    _replace(optimizer, store, store.gather_like)


def whole_state_dict(optimizer: Optimizer, store: ParameterStore) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors, as a plain Trainer would write it. Collective."""
    result = optimizer.state_dict()
    ids = [number for group in result["param_groups"] for number in group["params"]]
    state = dict(result["state"])
    for parameter, number in zip(parameters_of(optimizer), ids, strict=True):
        name = store.name_of(parameter)
        if name is not None and number in state:
            state[number] = {key: _moved(store.gather_like, name, value) for key, value in state[number].items()}
    return {**result, "state": state}


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the groups' order: the same on every rank, as collectives need it."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _replace(optimizer: Optimizer, store: Any, move: Callable[[str, Tensor], Tensor], dims: int = 1) -> None:
    for parameter in parameters_of(optimizer):
        name = store.name_of(parameter)
        if name is not None and parameter in optimizer.state:
            state = optimizer.state[parameter]
            state.update({key: _moved(move, name, value, dims) for key, value in state.items()})


def _moved(move: Callable[[str, Tensor], Tensor], name: str, value: Any, dims: int = 1) -> Any:
    return move(name, value) if isinstance(value, Tensor) and value.dim() >= dims else value
