"""Custom `torch.autograd.Function`s, each one op of the captured step.

Such an op takes and gives lists of tensors; what else the call was given is part of the op. It is composite, so
autograd sees what runs inside, the user's own backward included. How it may be sharded: sharding/functions.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import stable_text
from alpa_strategy.ir.op import CUSTOM_OPS, CustomOp
from alpa_strategy.ir.user_code import user_frame

FUNCTIONS = "alpa_function"  # namespace of the ops; saved plans name them

_LIBRARY = torch.library.Library(FUNCTIONS, "FRAGMENT")
_APPLY = vars(torch.autograd.Function)["apply"].__func__  # capture puts its own in place of it


@dataclass(frozen=True)
class _Given:
    """What a call is given besides tensors."""

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]  # leaves of the arguments; a Tensor's place is held by `Tensor` itself
    autocast: tuple[str, torch.dtype] | None

    @classmethod
    def of(cls, arguments: Any, device_type: str) -> _Given:
        """`arguments`: any pytree. The op runs under the autocast that its call stands in."""
        leaves, spec = pytree.tree_flatten(arguments)
        enabled = torch.is_autocast_enabled(device_type)
        autocast = (device_type, torch.get_autocast_dtype(device_type)) if enabled else None
        return cls(spec, tuple(Tensor if isinstance(x, Tensor) else x for x in leaves), autocast)

    @property
    def texts(self) -> tuple[Any, ...]:
        """What tells it from others, the same in every process once made a `stable_text`."""
        return str(self.spec), self.constants, self.autocast

    def __hash__(self) -> int:
        return hash(stable_text(self.texts))

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """The arguments with `tensors` in their places."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if x is Tensor else x for x in self.constants], self.spec)

    def region(self) -> AbstractContextManager[Any]:
        """The autocast region to run in."""
        return nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], dtype=self.autocast[1])


class _FunctionCall:
    """A call of `function.apply` that is an op: `run` takes and gives tensors."""

    def __init__(self, function: Any, given: _Given) -> None:
        self.function, self.given = function, given
        self.op = self._define()
        self._result_spec: pytree.TreeSpec | None = None
        self._are_tensors: list[bool] = []

    def _define(self) -> OpOverload:
        """An op for the call, under a name that no other has."""
        text = stable_text((self.function, *self.given.texts))
        stem = re.sub("[^A-Za-z0-9]+", "_", self.function.__qualname__)
        stem += f"_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        name, number = stem, 1
        while hasattr(getattr(torch.ops, FUNCTIONS), name):  # other code of the same name and text
            number += 1
            name = f"{stem}_{number}"
        _LIBRARY.define(f"{name}(Tensor[] tensors) -> Tensor[]")
        _LIBRARY.impl(name, self.run, "CompositeImplicitAutograd")
        op = getattr(getattr(torch.ops, FUNCTIONS), name).default
        CUSTOM_OPS[op] = CustomOp(f"{FUNCTIONS}.{stem}.default", self.function)
        return op

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the op does; the structure of what the Function returned is known afterwards."""
        with self.given.region():
            result = _APPLY(self.function, *self.given.filled(tensors))
        leaves, self._result_spec = pytree.tree_flatten(result)
        if not all(isinstance(leaf, Tensor) or leaf is None for leaf in leaves):
            raise CaptureError(
                f"the autograd.Function {self.function.__name__} returns something that is no tensor",
                "return tensors only",
            )
        self._are_tensors = [leaf is not None for leaf in leaves]
        return [leaf for leaf in leaves if leaf is not None]

    def closed(self, tensors: list[Tensor]) -> Any:
        """What the Function returns, given the op's results: in the structure of its last run."""
        assert self._result_spec is not None
        rest = iter(tensors)
        leaves = [next(rest) if is_tensor else None for is_tensor in self._are_tensors]
        return pytree.tree_unflatten(leaves, self._result_spec)


_CALLS: dict[tuple[type, _Given], _FunctionCall] = {}


def apply_as_op(function: Any, *args: Any) -> Any:
    """What `function.apply(*args)` returns, as one op of the step that is being traced.

    Raises:
        CaptureError: the Function changes a tensor in place.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    # Outside tracing; inside another Function; PyTorch's own wrapper of a custom op's backward.
    if get_proxy_mode() is None or not tensors or function.__module__.startswith("torch._library"):
        return _APPLY(function, *args)
    key = function, _Given.of(args, tensors[0].device.type)
    if key not in _CALLS:
        _CALLS[key] = _FunctionCall(*key)
    call = _CALLS[key]
    versions = [tensor._version for tensor in tensors]
    results = call.op(tensors)
    if [tensor._version for tensor in tensors] != versions:
        raise CaptureError(
            f"the autograd.Function {function.__name__} changes a tensor in place ({user_frame()})",
            "return a new tensor (and leave out ctx.mark_dirty)",
        )
    return call.closed(results)
