"""Steps that compute with low-precision copies of the parameters, which themselves stay fp32 (master weights).

The copies are casts that autograd knows. Captured, they are ops of the step like autocast's: a parameter in shards is
cast before it is gathered, and its gradient summed over the ranks before it is cast back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from alpa_strategy.capture.python_state import patched
from alpa_strategy.errors import SetupError


def check_has_masters(precision: object) -> None:
    """SetupError where `master_weights=True` means nothing: at any precision of the Trainer's but bf16-true."""
    if precision != "bf16-true":
        raise SetupError(
            f"master_weights=True with precision {precision!r}: there are no bf16 parameters to keep masters of",
            'use precision="bf16-true" (under "bf16-mixed" parameters are fp32 already), or leave master_weights out',
        )


def keep_masters(module: nn.Module, dtype: torch.dtype) -> None:
    """Bring a module into the form that `low_precision_copies` wants: parameters in fp32, floating buffers in `dtype`.

    fp64 parameters stay: nobody asked for less of them.
    """
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype.itemsize < 4:
                parameter.data = parameter.data.float()
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.to(dtype)


@contextmanager
def low_precision_copies(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which the module's floating parameters are copies of them in `dtype`, and so are new tensors.

    Gradients of the copies arrive at the parameters. A tied parameter has one copy.
    """
    places = [
        (owner._parameters, name, master)
        for owner in module.modules()
        for name, master in list(owner._parameters.items())
        if master is not None and master.is_floating_point()
    ]
    copies = {master: master.to(dtype) for _, _, master in places}
    default = torch.get_default_dtype()
    with patched((parameters, name, copies[master]) for parameters, name, master in places):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
