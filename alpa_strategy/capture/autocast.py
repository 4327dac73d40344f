"""Autocast made explicit: which operands of a call would be cast, found by running the call once under autocast.

The trace is taken above autocast, so its ops still see uncast operands. Replaying an op on fake tensors with autocast
on shows the casts that PyTorch's own policy makes; they become ops of the graph, and the graph runs without autocast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from alpa_strategy.capture.builder import run_fake
from alpa_strategy.sharding.op import OpCall

aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AutocastState:
    """One `torch.autocast` region: what it casts to."""

    dtype: torch.dtype


class _CastWatcher(TorchDispatchMode):
    """Notes dtype conversions: of the operands (by position), and whether anything else was converted."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensor] = []
        self.casts: dict[int, torch.dtype] = {}
        self.inner = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:
            position = next((i for i, t in enumerate(self.operands) if t is args[0]), None)
            if position is None:
                self.inner += 1
            elif (dtype := (kwargs or {}).get("dtype")) is not None:
                self.casts.setdefault(position, dtype)
        return func(*args, **(kwargs or {}))


def has_policy(target: Any, device_type: str) -> bool:
    """True when autocast treats this op itself (and not only the ops that it is made of)."""
    key = "AutocastCUDA" if device_type == "cuda" else "AutocastCPU"
    name = target._schema.name + (f".{target._schema.overload_name}" if target._schema.overload_name else "")
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@lru_cache(maxsize=4096)
def operand_casts(call: OpCall, state: AutocastState) -> tuple[torch.dtype | None, ...]:
    """The dtype that autocast gives each operand of `call`; None for those left alone."""
    watcher = _CastWatcher()

    def watch(operands: list[Tensor]) -> None:
        watcher.operands = operands

    with torch.autocast("cpu", dtype=state.dtype, cache_enabled=False), watcher:
        run_fake(call, before=watch)
    return tuple(watcher.casts.get(i) for i in range(len(call.operands)))


@lru_cache(maxsize=4096)
def casts_inside(call: OpCall, state: AutocastState) -> bool:
    """True when an op without a policy of its own is made of ops that autocast would treat."""

    def dtypes(enabled: bool) -> list[torch.dtype]:
        seen: list[torch.dtype] = []

        class Watcher(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                seen.extend(t.dtype for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
                return out

        with torch.autocast("cpu", dtype=state.dtype, cache_enabled=False, enabled=enabled), Watcher():
            run_fake(call)
        return seen

    return dtypes(True) != dtypes(False)
