"""Custom `torch.autograd.Function`s in a captured step: each call becomes one op, with the user's own backward.

The op takes and gives lists of tensors; what else the call was given is part of the op. It is composite: running it
runs `Function.apply`, so autograd finds the user's backward. Its sharding is found by experiment, as any op's.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import stable_text
from alpa_strategy.ir.user_code import user_frame

NAMESPACE = "alpa_function"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_APPLY = torch.autograd.Function.apply.__func__  # capture puts its own in place of it


@dataclass
class _LastResult:
    """What a Function returned last: its structure, and which leaves are tensors (the others are None)."""

    spec: pytree.TreeSpec | None = None
    is_tensor: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class _Call:
    """A Function with everything that its call was given besides tensors."""

    function: type
    spec: pytree.TreeSpec
    constants: tuple[Any, ...]  # leaves; a Tensor's place is held by `Tensor` itself
    autocast: tuple[str, torch.dtype] | None
    last: _LastResult = field(default_factory=_LastResult, compare=False)

    def __hash__(self) -> int:
        return hash((self.function, self.text))

    @property
    def text(self) -> str:
        """The same in every process."""
        return stable_text((self.function, str(self.spec), self.constants, self.autocast))

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call the Function; the tensors among what it returns."""
        rest = iter(tensors)
        leaves = [next(rest) if constant is Tensor else constant for constant in self.constants]
        with self._region():
            result = _APPLY(self.function, *pytree.tree_unflatten(leaves, self.spec))
        results, self.last.spec = pytree.tree_flatten(result)
        self.last.is_tensor = [isinstance(r, Tensor) for r in results]
        if not all(isinstance(r, Tensor) or r is None for r in results):
            raise CaptureError(
                f"the autograd.Function {self.function.__name__} returns something that is no tensor",
                "return tensors only",
            )
        return [r for r in results if isinstance(r, Tensor)]

    def _region(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.autocast[0], dtype=self.autocast[1])


def apply_as_op(function: type, *args: Any) -> Any:
    """What `function.apply(*args)` returns, as one op of the step that is being traced.

    Raises:
        CaptureError: the Function changes a tensor in place.
    """
    leaves, spec = pytree.tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # Outside tracing; inside another Function; PyTorch's own wrapper of a custom op's backward.
    if get_proxy_mode() is None or not tensors or function.__module__.startswith("torch._library"):
        return _APPLY(function, *args)
    device = tensors[0].device.type
    enabled = torch.is_autocast_enabled(device)
    autocast = (device, torch.get_autocast_dtype(device)) if enabled else None
    call = _Call(function, spec, tuple(Tensor if isinstance(x, Tensor) else x for x in leaves), autocast)
    versions = [tensor._version for tensor in tensors]
    call, op = _op_of(call)
    results = iter(op(tensors))
    if [tensor._version for tensor in tensors] != versions:
        raise CaptureError(
            f"the autograd.Function {function.__name__} changes a tensor in place ({user_frame()})",
            "return a new tensor (and leave out ctx.mark_dirty)",
        )
    last = call.last  # of the run on fake tensors just now
    assert last.spec is not None
    return pytree.tree_unflatten([next(results) if is_tensor else None for is_tensor in last.is_tensor], last.spec)


@cache
def _op_of(call: _Call) -> tuple[_Call, torch._ops.OpOverload]:
    """The op of a call, defined once per process."""
    digest = hashlib.sha256(call.text.encode()).hexdigest()[:8]
    stem = f"{re.sub('[^A-Za-z0-9]+', '_', call.function.__qualname__)}_{digest}"
    name, number = stem, 1
    while hasattr(getattr(torch.ops, NAMESPACE), name):  # another Function of the same name and text
        number += 1
        name = f"{stem}_{number}"
    _LIBRARY.define(f"{name}(Tensor[] tensors) -> Tensor[]")
    _LIBRARY.impl(name, call.run, "CompositeImplicitAutograd")
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    op.python_code = (call.function.forward, call.function.backward)  # for sharding/code_numbers.py
    return call, op
