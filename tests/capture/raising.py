"""Checks of tensors as users write them; in a file of its own, as pytest rewrites the asserts of
test files.
"""

from __future__ import annotations

import torch
from torch import Tensor


def asserted(p: Tensor) -> None:
    assert torch.isfinite(p).all(), "not finite"


def raised(p: Tensor) -> None:
    if (p > 1e3).any():
        text = "too large"
        raise ValueError(text)


def compound(p: Tensor) -> None:
    if not (p > -1e3).all() or (p > 1e3).any():
        raise ValueError
    assert p.ndim == 2 and not bool((p == 1e4).any())  # noqa: PT018


def last_of_and(p: Tensor) -> None:
    if p.requires_grad and (p > 1e3).any():
        raise ValueError


def otherwise(p: Tensor) -> None:
    if torch.isfinite(p).all():
        pass
    else:
        raise ValueError


def nested(p: Tensor) -> None:
    with torch.no_grad():
        if not bool(p.ndim == 2 and (p < 1e3).all()):
            for text in ("too", "large"):
                if p.ndim:
                    raise ValueError(text)
            raise ValueError


def decides(p: Tensor) -> None:
    if (p > 0).any():
        p.mul(2)
        raise ValueError if p.ndim else TypeError
    if (p < 0).any():
        p.add(1)


def decides_in_bool(p: Tensor) -> None:
    if bool((p > 0).any() or p.ndim == 7):
        p.mul(2)


def decides_in_a_loop(p: Tensor) -> None:
    if (p > 0).any():
        for _ in range(p.ndim):
            raise ValueError


def decides_first(p: Tensor) -> None:
    if (p > 0).any() and p.ndim:
        raise ValueError
