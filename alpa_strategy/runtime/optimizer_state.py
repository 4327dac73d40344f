"""The optimizer's state between whole tensors (before and after training, in checkpoints) and local shards (in it).

The optimizer object, its groups and its parameters stay the same; only the tensors of `state` that have a parameter's
shape are cut or gathered. Step counters and the like are left alone. Every rank keeps the state of its own stages'
parameters; a checkpoint holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.runtime.parameters import ParameterStore


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a parameter's state, as a whole."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class StateValue:
    """What is no tensor with dims: the same on every rank. Tensors (step counters) travel on the host."""

    value: Any
    is_on_device: bool = False

    def beside(self, parameter: nn.Parameter) -> Any:
        """The value where the optimizer of this rank would have it."""
        return self.value.to(parameter.device) if self.is_on_device else self.value


Described = dict[str, StateTensor | StateValue]


@torch.no_grad()
def shard_state(
    optimizer: Optimizer, store: ParameterStore, values: Callable[[Tensor], Tensor] = Tensor.detach
) -> None:
    """Keep this rank's part of every state tensor (of a restored checkpoint), nothing of parameters that it does not
    hold.

    Args:
        values: gives the whole of a state tensor.
    """
    for parameter in parameters_of(optimizer):
        name = store.name_of(parameter)
        if name is None or parameter not in optimizer.state:
            continue
        if not store.holds(parameter):
            del optimizer.state[parameter]
            continue
        state = optimizer.state[parameter]
        whole = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        state.update({key: store.shard_like(name, values(value)) for key, value in whole.items()})


def unshard_state(optimizer: Optimizer, store: ParameterStore) -> None:
    """Give every rank the whole state of every parameter. Collective."""
    for parameter, state in _whole_states(optimizer, store):
        optimizer.state[parameter].update(state)


def whole_state_dict(optimizer: Optimizer, store: ParameterStore) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors, as a plain Trainer would write it, on every rank. Collective."""
    result = optimizer.state_dict()
    numbers = numbers_of(optimizer, result)
    state = dict(result["state"])
    state.update((numbers[parameter], whole) for parameter, whole in _whole_states(optimizer, store))
    return {**result, "state": {number: state[number] for number in numbers.values() if number in state}}


def described_states(optimizer: Optimizer, store: ParameterStore) -> list[tuple[nn.Parameter, Described]]:
    """(parameter, what its owning stage has of its state) of all that have one, the same on every rank. Collective."""
    parameters = {name: p for p in parameters_of(optimizer) if (name := store.name_of(p)) is not None}
    own = {
        name: _described(optimizer.state[parameter], parameter, store.whole_shape(name))
        for name, parameter in parameters.items()
        if store.owns(parameter) and parameter in optimizer.state
    }
    said = store.said_by_owners(own)
    return [(parameter, said[name]) for name, parameter in parameters.items() if name in said]


def gather_state(
    optimizer: Optimizer, store: ParameterStore, parameter: nn.Parameter, key: str, described: StateTensor
) -> Tensor:
    """The whole of a tensor of the state, on every rank. Collective."""
    name = store.name_of(parameter)
    assert name is not None
    own = optimizer.state[parameter][key] if store.owns(parameter) else torch.empty(0, dtype=described.dtype)
    return store.gather_like(name, own, described.shape)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the groups' order: the same on every rank, as collectives need it."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def numbers_of(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[nn.Parameter, int]:
    """Parameter -> its number in the optimizer's state dict."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return dict(zip(parameters_of(optimizer), numbers, strict=True))


@torch.no_grad()
def _whole_states(optimizer: Optimizer, store: ParameterStore) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """(parameter, its whole state) of all that have one, one after the other on all ranks together."""
    for parameter, described in described_states(optimizer, store):
        own = optimizer.state[parameter] if store.owns(parameter) else {}
        whole = {
            key: gather_state(optimizer, store, parameter, key, what)
            if isinstance(what, StateTensor)
            else own.get(key, what.beside(parameter))
            for key, what in described.items()
        }
        yield parameter, whole


def _described(state: dict[str, Any], parameter: nn.Parameter, shape: torch.Size) -> Described:
    described: Described = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            described[key] = StateTensor(shape if value.shape == parameter.shape else value.shape, value.dtype)
        elif isinstance(value, Tensor):
            described[key] = StateValue(value.detach().cpu(), value.device.type != "cpu")
        else:
            described[key] = StateValue(value)
    return described
