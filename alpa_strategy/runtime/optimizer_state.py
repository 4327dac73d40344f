"""The optimizer's state between whole tensors (before and after training, in checkpoints) and local shards (in it).

The optimizer object, its groups and its parameters stay the same; only the tensors of `state` that have a parameter's
shape are cut or gathered. Step counters and the like are left alone. Every rank keeps the state of its own stages'
parameters; a checkpoint holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.runtime.parameters import ParameterStore

Place = Callable[[nn.Parameter, Tensor], Any]  # (parameter, this rank's part of a tensor that lies like it)


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
        if parameter not in optimizer.state:
            continue
        if not store.holds(parameter):
            del optimizer.state[parameter]
            continue
        state = optimizer.state[parameter]
        whole = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        state.update({key: store.shard_like(parameter, values(value)) for key, value in whole.items()})


def unshard_state(optimizer: Optimizer, store: ParameterStore) -> None:
    """Give every rank the whole state of every parameter. Collective."""

    def whole(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return store.gather_like(parameter, tensor).to(parameter.device)  # where the optimizer has it

    for parameter, state in _states(optimizer, store, whole):
        optimizer.state[parameter].update(state)


def state_dict_with(optimizer: Optimizer, store: ParameterStore, place: Place) -> dict[str, Any]:
    """`optimizer.state_dict()` of all stages' parameters, on every rank. Collective.

    Args:
        place: gives what stands for a tensor that lies as its parameter does; outside of the stage that owns the
            parameter it gets an empty one. It is called in the same order on all ranks.
    """
    result = optimizer.state_dict()
    numbers = numbers_of(optimizer, result)
    state = {numbers[parameter]: state for parameter, state in _states(optimizer, store, place)}
    return {**result, "state": {number: state[number] for number in numbers.values() if number in state}}


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the groups' order: the same on every rank, as collectives need it."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def numbers_of(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[nn.Parameter, int]:
    """Parameter -> its number in the optimizer's state dict."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return dict(zip(parameters_of(optimizer), numbers, strict=True))


@torch.no_grad()
def _states(optimizer: Optimizer, store: ParameterStore, place: Place) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """(parameter, its state with `place`d tensors) of all that have one, one after the other on all ranks together."""
    states = {p: optimizer.state[p] for p in parameters_of(optimizer) if p in optimizer.state}
    said = store.said_by_owners({p: {k: _described(v, p) for k, v in state.items()} for p, state in states.items()})
    for parameter in (each for each in parameters_of(optimizer) if each in said):
        own = optimizer.state.get(parameter, {})
        state: dict[str, Any] = {}
        for key, (what, lies_like_it, is_on_device) in said[parameter].items():
            if not isinstance(what, Tensor) or not what.is_meta:
                state[key] = own.get(key, what.to(parameter.device) if is_on_device else what)
                continue
            part = own.get(key, torch.empty(0, dtype=what.dtype))
            if lies_like_it:
                state[key] = place(parameter, part)
            else:  # rows and columns of a factored moment: whole in the owning stage
                state[key] = store.gather_like(parameter, part, what.shape)
        yield parameter, state


def _described(value: Any, parameter: nn.Parameter) -> tuple[Any, bool, bool]:
    """For other ranks: a tensor of state with dims, without values; or anything else, which is the same on all ranks
    (step counters travel on the host). Whether it is cut as the parameter is, and whether it is on the device."""
    if not isinstance(value, Tensor):
        return value, False, False
    lies = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return lies if value.dim() > 0 else value.detach().cpu(), value.shape == parameter.shape, value.device.type != "cpu"
