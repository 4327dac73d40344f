"""The state of a sharded training as a checkpoint's tensors, and back: parameters and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.capture.python_state import patched
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards, StoredTensor, read_chunks
from alpa_strategy.errors import CheckpointError
from alpa_strategy.runtime.optimizer_state import numbers_of
from alpa_strategy.runtime.parameters import ParameterStore


class Sharing:
    """Who writes what: of the ranks that hold the same part, each writes about as many bytes as the others.

    Every rank goes through all parameters in the same order, so that all come to the same shares.

    Args:
        store: the run's parameters.
    """

    def __init__(self, store: ParameterStore) -> None:
        self.store = store
        self._loads: dict[int, list[int]] = {}

    def shards(self, parameter: nn.Parameter, tensor: Tensor) -> LocalShards:
        """What this rank writes of a tensor that lies as `parameter` does (the parameter itself, a moment of it)."""
        shape = self.store.whole_shape(parameter)
        replica = self.store.replica(parameter)  # which of how many equal copies this rank holds; None: no part of it
        which, of = self.store.copies
        is_mine = replica is not None and self._is_mine(
            replica[0] + which * replica[1], replica[1] * of, shape.numel() * tensor.element_size()
        )
        boxes = self.store.chunks(parameter, tensor) if is_mine else []
        return LocalShards(shape, tensor.dtype, [Chunk(offsets, view.detach()) for offsets, view in boxes])

    def _is_mine(self, index: int, count: int, num_bytes: int) -> bool:
        loads = self._loads.setdefault(count, [0] * count)
        writer = loads.index(min(loads))
        loads[writer] += num_bytes
        return writer == index


def module_state(module: nn.Module, sharing: Sharing) -> dict[str, Any]:
    """`module.state_dict()` with `LocalShards` in the place of parameters, whatever the module makes of its names."""
    shards = {p: sharing.shards(p, p.detach()) for p in module.parameters()}  # tied ones are written once
    with _standing_in(module, shards):
        return module.state_dict()


def _standing_in(module: nn.Module, others: Mapping[nn.Parameter, Tensor]) -> AbstractContextManager[None]:
    """Context in which the module has other tensors in the place of parameters."""
    places = [(m._parameters, key, p) for m in module.modules() for key, p in m._parameters.items()]
    return patched((parameters, key, others[p]) for parameters, key, p in places if p is not None and p in others)


@torch.no_grad()
def restore_state(optimizer: Optimizer, stored: Mapping[int, Mapping[str, Any]], store: ParameterStore) -> None:
    """Read this rank's part of the optimizer's state, by number of the parameter; its groups stay as they are.

    Args:
        stored: as in a plain optimizer's state dict, with whole tensors on disk or in memory.
    """
    now = optimizer.state_dict()
    state = {}
    for parameter, number in numbers_of(optimizer, now).items():
        if number in stored and store.holds(parameter):
            state[number] = {key: _local(value, parameter, store) for key, value in stored[number].items()}
    optimizer.load_state_dict({**now, "state": state})


def _local(value: Any, parameter: nn.Parameter, store: ParameterStore) -> Any:
    if not isinstance(value, Tensor):
        return value
    if parameter in store and value.dim() > 0 and value.shape == store.whole_shape(parameter):
        local = torch.empty(parameter.shape, dtype=value.dtype, device=parameter.device)
        read_chunks(value, [Chunk(offsets, view) for offsets, view in store.chunks(parameter, local)])
        return local
    return value.whole() if isinstance(value, StoredTensor) else value.clone()


# Reading into a module, or into the parts of it that this rank holds


def load_parameters(state_dict: Mapping[str, Tensor], store: ParameterStore) -> None:
    """Read this rank's part of the parameters that `state_dict` names into `store`. No communication.

    Args:
        state_dict: names among those of `store`'s parameters -> whole tensor, on disk
            (`open_checkpoint(path)["state_dict"]`) or in memory.

    Raises:
        CheckpointError: a parameter has another shape there.
    """
    for parameter in store.parameters:
        source, shape = state_dict.get(store.name_of(parameter)), store.whole_shape(parameter)
        if source is None:
            continue
        if source.shape != shape:
            raise CheckpointError(
                f"{store.name_of(parameter)} has shape {list(source.shape)} in the checkpoint and {list(shape)} here",
                "load a checkpoint of the same model",
            )
        held = store.chunks(parameter, parameter.detach())
        read_chunks(source, [Chunk(offsets, view) for offsets, view in held])


def load_others(module: nn.Module, state_dict: Mapping[str, Tensor], store: ParameterStore, strict: bool) -> None:
    """`module.load_state_dict(state_dict, strict)`, without the values of the parameters in `store`.

    Raises:
        RuntimeError: as torch does, when `strict` and a name is missing or surplus, or a shape another one.
    """
    shapes = {p: torch.empty(store.whole_shape(p), device="meta") for p in module.parameters() if p in store}
    try:
        with _standing_in(module, shapes):
            module.load_state_dict(state_dict, strict)
    except RuntimeError:  # torch makes one text of all that went wrong
        for name, value in state_dict.items():
            if isinstance(value, StoredTensor) and value.failure is not None:
                raise value.failure from None
            if value is None:
                raise CheckpointError(f"the checkpoint has no values of {name!r}", "load another one") from None
        raise
