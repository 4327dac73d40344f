"""Numbers in the Python code behind an op: thresholds and magic values, which random data would hardly ever hit.

Only hints where to look: an op in C++, or one that computes its threshold, gives none.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from alpa_strategy.capture.code_reads import closure_values, code_names, reached_functions

MOST = 12


def numbers_in_code(target: Any) -> tuple[float, ...]:
    """Up to `MOST` numbers that the op's code names, forward and backward: literals, globals and variables around it.

    Without 0 and +-1, which trials hold anyway. In the order of the code, so equal for equal code.
    """
    found: dict[float, None] = {}
    for function in reached_functions(_python_code(target)):
        for number in (*_literals(function.__code__), *_named(function)):
            if math.isfinite(number) and abs(number) not in (0.0, 1.0):
                found.setdefault(float(number))
    return tuple(found)[:MOST]


def _python_code(target: Any) -> list[Callable[..., Any]]:
    """The Python functions that an op is made of; none for ops of other languages."""
    if not isinstance(target, torch._ops.OpOverload):
        return [target]
    functions = list(getattr(target, "python_code", ()))  # a custom autograd.Function (capture/functions.py)
    definition = OPDEFS.get(target._schema.name)
    if definition is not None:
        functions += [definition._init_fn, definition._backward_fn, *definition._backend_fns.values()]
    return [function for function in functions if function is not None]


def _literals(code: types.CodeType) -> Iterator[float]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _literals(constant)
        else:
            yield from _numbers(constant)


def _named(function: types.FunctionType) -> Iterator[float]:
    """Globals and variables of enclosing functions that the code names, and defaults of arguments."""
    for name in dict.fromkeys(code_names(function.__code__)):
        yield from _numbers(function.__globals__.get(name))
    for cell in closure_values(function).values():
        yield from _numbers(cell.cell_contents)
    yield from _numbers(function.__defaults__)
    yield from _numbers(tuple((function.__kwdefaults__ or {}).values()))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, tuple | list | frozenset):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        yield value
