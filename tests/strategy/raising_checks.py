"""An assert as users write it; in a file of its own, as pytest rewrites those of test files."""

from __future__ import annotations

import torch
from torch import Tensor


def asserts_finite(x: Tensor) -> None:
    """AssertionError where a value is not finite."""
    assert torch.isfinite(x).all(), "not finite"
