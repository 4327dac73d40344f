"""The optimizer's state under a pipeline: every rank keeps that of its own stages; checkpoints hold all of it.

As in `optimizer_state`, tensors of a parameter's shape are cut and gathered, everything else is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.lightning.optimizer_state import parameters_of
from alpa_strategy.runtime.staged_parameters import StagedParameters


def gather_staged_state(optimizer: Optimizer, store: StagedParameters) -> None:
    """Give every rank the whole state of every parameter. Collective."""
    for parameter, state in _whole_states(optimizer, store):
        optimizer.state[parameter] = state


def staged_state_dict(optimizer: Optimizer, store: StagedParameters) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors, as a plain Trainer would write it, on every rank. Collective."""
    result = optimizer.state_dict()
    ids = [number for group in result["param_groups"] for number in group["params"]]
    number_of = dict(zip(parameters_of(optimizer), ids, strict=True))
    state = dict(result["state"])
    state.update((number_of[parameter], whole) for parameter, whole in _whole_states(optimizer, store))
    return {**result, "state": {number: state[number] for number in ids if number in state}}


def _whole_states(optimizer: Optimizer, store: StagedParameters) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """(parameter, its whole state) of all that have one, one after the other on all ranks together."""
    for parameter, described in described_states(optimizer, store):
        yield parameter, _whole_state(optimizer, store, parameter, described)


def described_states(optimizer: Optimizer, store: StagedParameters) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """(parameter, what its owning stage holds of its state) of all that have one, the same on every rank. Collective.

    Per key of the state: ("tensor", whole shape, dtype), or ("value", the value, its kind of device).
    """
    parameters = [p for p in parameters_of(optimizer) if store.name_of(p) is not None]
    rank = dist.get_rank()
    own = {
        i: _described(optimizer.state[p], p, store)
        for i, p in enumerate(parameters)
        if store.source(p) == rank and p in optimizer.state
    }
    everyone: list[dict[int, dict[str, Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found = ((p, everyone[store.source(p)].get(i)) for i, p in enumerate(parameters))
    return [(parameter, described) for parameter, described in found if described is not None]


def _described(state: dict[str, Any], parameter: nn.Parameter, store: StagedParameters) -> dict[str, Any]:
    name = store.name_of(parameter)
    assert name is not None
    described: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            shape = store.whole_shape(name) if value.shape == parameter.shape else value.shape
            described[key] = ("tensor", shape, value.dtype)
        elif isinstance(value, Tensor):
            described[key] = ("value", value.detach().cpu(), value.device.type)
        else:
            described[key] = ("value", value, None)
    return described


@torch.no_grad()
def _whole_state(
    optimizer: Optimizer, store: StagedParameters, parameter: nn.Parameter, described: dict[str, Any]
) -> dict[str, Any]:
    name, owner = store.name_of(parameter), store.owner(parameter)
    assert name is not None
    whole: dict[str, Any] = {}
    for key, (kind, content, detail) in described.items():
        if kind == "tensor":
            mine = None if owner is None else owner.gather_like(name, optimizer.state[parameter][key])
            whole[key] = store.send_to_all(name, mine, detail, content)
        elif isinstance(content, Tensor):
            whole[key] = content.to(parameter.device if detail != "cpu" else "cpu")
        else:
            whole[key] = content
    return whole
