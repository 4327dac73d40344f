"""Connectionist temporal classification, row by row: what capture puts in place of `F.ctc_loss`.

PyTorch's own has no shape function where lengths are tensors, and its mean hides that rows are independent.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_LIBRARY = torch.library.Library("alpa", "FRAGMENT")
_SIGNATURE = inspect.signature(F.ctc_loss)


def _rows(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    if isinstance(log_probs, FakeTensor) or log_probs.is_meta:
        return log_probs[0, :, 0] * 1  # any differentiable [b]
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)


_LIBRARY.define(
    "ctc_rows(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity) -> Tensor"
)
_LIBRARY.impl("ctc_rows", _rows, "CompositeImplicitAutograd")
ctc_rows = torch.ops.alpa.ctc_rows.default


def replacement(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The loss of a call of `F.ctc_loss` on a batch [t, b, c], made of losses per row; None: it is another call."""
    if function is not F.ctc_loss:
        return None
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    lengths = a["input_lengths"], a["target_lengths"]
    if not all(isinstance(length, Tensor) for length in lengths) or a["log_probs"].dim() != 3:
        return None
    log_probs = a["log_probs"]
    if log_probs.dtype in (torch.float16, torch.bfloat16):  # as autocast does
        log_probs = log_probs.float()
    rows = ctc_rows(log_probs, a["targets"], *lengths, a["blank"], a["zero_infinity"])
    if a["reduction"] == "none":
        return rows
    return rows.sum() if a["reduction"] == "sum" else (rows / a["target_lengths"].clamp(min=1)).mean()
