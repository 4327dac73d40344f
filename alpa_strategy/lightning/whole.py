"""The module with whole parameters for a while (user code, checkpoints), or with nothing but their shapes (capture)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WholeParameters:
    """Context in which the module holds whole parameters. Collective on entry.

    Args:
        store: the run's parameters (`ParameterStore` or `StagedParameters`).
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._shards: list[tuple[nn.Parameter, Tensor]] = []

    def __enter__(self) -> WholeParameters:
        # Under inference mode (validation) the gathered tensors would be unfit for the training that goes on later.
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self._store.parameters:
                self._shards.append((parameter, parameter.data))
                parameter.data = self._store.gather(self._store.name_of(parameter))
        return self

    def __exit__(self, *error: Any) -> None:
        _set_data(self._shards)
        self._shards = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The shards back in their place, for programs that run on them; the whole tensors are kept."""
        whole = [(parameter, parameter.data) for parameter, _ in self._shards]
        _set_data(self._shards)
        try:
            yield
        finally:
            _set_data(whole)


@contextmanager
def shapes_only(store: Any) -> Iterator[None]:
    """The module with parameters of their whole shapes that hold one element each: enough for capture, and free."""
    shards = [(parameter, parameter.data) for parameter in store.parameters]
    with torch.inference_mode(False), torch.no_grad():
        for parameter, data in shards:
            shape = store.whole_shape(store.name_of(parameter))
            if data.shape != shape:
                parameter.data = data.new_zeros(()).expand(shape)
    try:
        yield
    finally:
        _set_data(shards)


def _set_data(tensors: list[tuple[nn.Parameter, Tensor]]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for parameter, data in tensors:
            parameter.data = data
