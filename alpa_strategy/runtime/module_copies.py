"""Shallow copies of modules whose forward is replaced."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def forward_of_copy(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward to run instead if a shallow copy of `module` is being called, else None.

    A shallow copy (a learner of MAML) has all attributes of `module`, the forward that was
    installed there included: a partial with `module` among its arguments. To be called from such a
    forward: the called module is looked up in the stack of Python frames. None in `torch.compile`,
    which has no such stack.
    """
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back

    called = module if frame is None else frame.f_locals["self"]
    if called is module:
        return None

    installed_forward = vars(called).get("forward")
    is_copy = module in getattr(installed_forward, "args", ())
    return partial(type(called).forward, called) if is_copy else None
