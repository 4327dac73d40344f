"""The module with whole parameters for a while (user code, checkpoints), or with nothing but their shapes (capture)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.comm.collectives import any_rank


class WholeParameters:
    """Context in which the module holds whole parameters; what is changed in them is kept. May be entered again inside.

    Args:
        store: the run's parameters (`ParameterStore` or `StagedParameters`).
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._parts: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []  # parameter, its part, its gradient's part
        self._depth = 0

    @property
    def is_active(self) -> bool:
        """Whether the module holds whole parameters now."""
        return self._depth > 0

    def __enter__(self) -> WholeParameters:
        """Collective, unless the module is whole already."""
        if self._depth == 0:
            self._gather(False)
        self._depth += 1
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        self._leave(error[0] is not None, False)

    @contextmanager
    def with_gradients(self) -> Iterator[None]:
        """The same with whole gradients; where the module is whole already, gradients are left as they are."""
        if self._depth > 0:
            with self:
                yield
            return
        self._gather(True)
        self._depth += 1
        failed = True
        try:
            yield
            failed = False
        finally:
            self._depth -= 1
            self._leave(failed, True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The parts back in their place, for programs that run on them; the whole tensors are kept."""
        whole = [(parameter, parameter.data) for parameter, _, _ in self._parts]
        _set_data((parameter, part) for parameter, part, _ in self._parts)
        try:
            yield
        finally:
            _set_data(whole)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """As outside of this context, what was changed so far included: for a checkpoint that is saved inside."""
        if self._depth == 0:
            yield
            return
        self._take_changes(False)
        depth, parts = self._depth, self._parts
        whole = [(parameter, parameter.data, parameter.grad) for parameter, _, _ in parts]
        self._depth, self._parts = 0, []
        _put(parts)
        try:
            yield
        finally:
            self._depth, self._parts = depth, parts
            _put(whole)

    def _gather(self, with_gradients: bool) -> None:
        store = self._store
        # Under inference mode (validation) the gathered tensors would be unfit for the training that goes on later.
        with torch.inference_mode(False), torch.no_grad():
            parts = [(p, p.data, p.grad) for p in store.sharded_parameters]
            has_gradient = [grad is not None for _, _, grad in parts]
            has_gradient = any_rank(has_gradient) if with_gradients else [False] * len(parts)
            for (parameter, part, grad), present in zip(parts, has_gradient, strict=True):
                name = store.name_of(parameter)
                whole, whole_grad = store.gather_like(name, part), None
                if present:
                    whole_grad = store.gather_like(name, torch.zeros_like(part) if grad is None else grad)
                parameter.grad, parameter.data = None, whole
                parameter.grad = whole_grad
        self._parts = parts

    def _leave(self, failed: bool, with_gradients: bool) -> None:
        if not failed:
            self._take_changes(with_gradients)
        if self._depth == 0:
            _put(self._parts)
            self._parts = []

    def _take_changes(self, with_gradients: bool) -> None:
        """Bring what was changed in the whole tensors into the parts. No communication."""
        store = self._store
        with torch.inference_mode(False), torch.no_grad():
            for i, (parameter, part, _) in enumerate(self._parts):
                if not store.holds(parameter):
                    continue
                name = store.name_of(parameter)
                # Only what changed is written: a step between forward and backward must find its parameters untouched.
                if not torch.equal(store.shard_like(name, parameter.data), part):
                    store.take_whole(name, parameter.data, part)
                if with_gradients:
                    whole = parameter.grad
                    self._parts[i] = (parameter, part, None if whole is None else store.shard_like(name, whole))


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


def _put(tensors: list[tuple[nn.Parameter, Tensor, Tensor | None]]) -> None:
    """Give parameters their data and gradients."""
    for parameter, _, _ in tensors:
        parameter.grad = None  # of another shape than the data that comes
    _set_data((parameter, data) for parameter, data, _ in tensors)
    for parameter, _, grad in tensors:
        parameter.grad = grad


def _set_data(tensors: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for parameter, data in tensors:
            parameter.data = data
