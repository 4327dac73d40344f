"""Functions that take StepCounters while the step is captured: those of `math`, and where they are asked for by name,
`float` and `int` (Python wants plain numbers of them, so a StepCounter cannot answer by itself).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from alpa_strategy.capture.counters import NumberType, StepCounter, number_of

_KINDS = {kind.__name__: NumberType(kind.__name__, (), {"kind": kind}) for kind in (float, int)}


@contextmanager
def functions_of_counters(namespaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Functions of `math` take StepCounters in the block; in `namespaces`, globals of the user's code, also those that
    were imported from it, and `float` and `int`.
    """
    taking = {function: _taking(function) for function in vars(math).values() if type(function) is type(math.cos)}
    swaps: list[tuple[dict[str, Any], str, Any]] = []
    for namespace in (vars(math), *namespaces):
        swaps += [(namespace, n, taking[f]) for n, f in namespace.items() if type(f) is type(math.cos) and f in taking]
    swaps += [
        (namespace, name, kind) for namespace in namespaces for name, kind in _KINDS.items() if name not in namespace
    ]
    before = [(namespace, name, namespace.get(name)) for namespace, name, _ in swaps]
    for namespace, name, function in swaps:
        namespace[name] = function
    try:
        yield
    finally:
        for namespace, name, function in before:
            if function is None:
                del namespace[name]
            else:
                namespace[name] = function


def _taking(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and any(type(arg) is StepCounter for arg in args):
            result = number_of(function, *args)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)

    return call
