"""PyTorch's Python functions of ATen ops, which a program calls instead of the ops.

A call of an `OpOverload` matches its arguments against the op's schema, which takes the host 1.5 to
3 us more than the functions that a user calls (`torch.add`, `Tensor.view`). On a small model, or a
fast GPU, the host is what a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from alpa_strategy.ir.op import OpCall, aten_name

# Where PyTorch generates a Python function for each ATen op; all are written in C++.
_GENERATED = (torch._C.TensorBase, torch._C._VariableFunctions, torch._C._nn)

# What `python_function` has returned, by op and kinds of arguments.
_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}


def python_function(call: OpCall) -> Callable[..., Any]:
    """Return the function to call in place of `call.target`, with the same arguments.

    PyTorch's Python functions choose an overload by the kinds of their arguments. So a function is
    taken only if, called on tensors without data, it runs the same ops with the same arguments and
    returns the same as the target.

    Args:
        call: a call whose arguments are numbers, lists, dtypes and the like, and tensors.

    Returns:
        The function; the target itself if there is none, or it is not an op of ATen.
    """
    name = aten_name(call.target)
    if not name:
        return call.target
    key = (call.target, *_kinds(call))
    if key not in _functions:
        _functions[key] = _same_function(call, name) or call.target
    return _functions[key]


def _kinds(call: OpCall) -> Iterator[Any]:
    """Yield the names and types of a call's arguments, nested ones too, by which PyTorch chooses an
    overload.

    A tensor without dims may stand for a number.
    """
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    yield structure
    yield from map(type, leaves)
    for meta in call.operands:
        yield meta.dtype, len(meta.shape)


def _same_function(call: OpCall, name: str) -> Callable[..., Any] | None:
    """Return PyTorch's generated function `name` (as in `torch._C._nn`) if it runs the same op as
    the call, perhaps with the schema's defaults as arguments; else None.
    """
    expected = _effect(call, call.target)
    if expected is None:
        return None
    for place in _GENERATED:
        function = getattr(place, name, None)
        # An attribute (`Tensor.mT`) is none.
        if not callable(function):
            continue
        for candidate in (function, _with_defaults(function, call)):
            if _effect(call, candidate) == expected:
                return candidate
    return None


def _with_defaults(function: Callable[..., Any], call: OpCall) -> Callable[..., Any]:
    """Return `function` with the arguments that the call leaves out, as the op's schema has them.

    Some functions have other defaults: that of `torch._C._nn.mse_loss` is no reduction.
    """
    named = {name for name, _ in call.kwargs}
    defaults = {}
    for argument in call.target._schema.arguments[len(call.args) :]:
        if argument.name not in named and argument.default_value is not None:
            defaults[argument.name] = argument.default_value
    return partial(function, **defaults)


def _effect(call: OpCall, function: Callable[..., Any]) -> list[Any] | None:
    """Return the ops that `function` runs, with their arguments, and its results.

    None if it cannot be called so: it takes other arguments, or needs the values of tensors.
    """
    operands = [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in call.operands]
    recorder = _OpRecorder(operands)
    try:
        with torch.no_grad(), recorder:
            results = replace(call, target=function).call(*operands)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        # The op itself is called then.
        return None
    # Several results are a tuple, or a named one.
    is_tuple = isinstance(results, tuple | list)
    return [*recorder.ops, recorder.described(list(results) if is_tuple else results)]


class _OpRecorder(TorchDispatchMode):
    """Records the ops that reach the dispatcher, with their arguments.

    Args:
        operands: the tensors that exist before; they get the first numbers.
    """

    def __init__(self, operands: list[Tensor]) -> None:
        super().__init__()
        self.ops: list[Any] = []

        # All tensors so far, in the order in which they appeared. They are kept alive, so that no
        # other one gets the same id.
        self._tensors = list(operands)
        self._numbers = {id(tensor): number for number, tensor in enumerate(operands)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = self.described((args, kwargs or {}))
        results = func(*args, **(kwargs or {}))
        self.ops.append((func, arguments, self.described(results)))
        return results

    def described(self, values: Any) -> Any:
        """Return nested values with tensors as (number, shape, dtype), comparable by `==`."""
        leaves, structure = pytree.tree_flatten(values)
        described_leaves = [self._describe(leaf) for leaf in leaves]
        return described_leaves, structure

    def _describe(self, leaf: Any) -> tuple[Any, ...]:
        """Return a description of an argument that is equal for the same tensor or number."""
        if not isinstance(leaf, Tensor):
            # As `True == 1`, the type too.
            return type(leaf), leaf
        number = self._numbers.setdefault(id(leaf), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(leaf)
        return number, leaf.shape, leaf.dtype
