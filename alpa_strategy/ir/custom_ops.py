"""What is known of the ops that capture defined, by op: nothing is stuck onto torch's OpOverload objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload


@dataclass(frozen=True)
class CustomOp:
    """An op that stands for the user's Python code.

    Attributes:
        shared_name: name in plans, the same in every process; torch's own may end in a number.
        is_opaque: shapes inside depend on data, so nothing is tried with it: every device runs it whole.
        is_random: whether it draws random numbers; None: not known.
        python_code: the functions behind it, forward and backward.
    """

    shared_name: str
    is_opaque: bool = False
    is_random: bool | None = None
    python_code: tuple[Callable[..., Any], ...] = ()


_KNOWN: dict[OpOverload, CustomOp] = {}


def register_custom_op(op: OpOverload, known: CustomOp) -> None:
    """Say what `op` is; what was said of it before no longer holds."""
    _KNOWN[op] = known


def custom_op(target: Any) -> CustomOp | None:
    """What is known of an op that capture defined; None of any other target."""
    return _KNOWN.get(target)


def is_opaque(target: Any) -> bool:
    """Whether the op is a module whose inner shapes depend on data."""
    known = _KNOWN.get(target)
    return known is not None and known.is_opaque
