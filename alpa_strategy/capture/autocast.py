"""Autocast made explicit: which operands of a call would be cast, found by running the call once
under autocast.

The trace is taken above autocast, so its ops still see uncast operands. Replaying an op on fake
tensors with autocast on shows the casts of PyTorch's own policy; `Autocast` puts them into the
graph as ops, which runs without autocast.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from alpa_strategy.capture.graph_builder import Builder, map_refs, run_fake
from alpa_strategy.capture.ops import FUNCTIONS
from alpa_strategy.capture.python_state import patched
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import ValueRef
from alpa_strategy.ir.op import OpCall

aten = torch.ops.aten
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True)
class AutocastState:
    """One `torch.autocast` region: its device type (policies differ) and what it casts to."""

    device_type: str
    dtype: torch.dtype

    def region(self, enabled: bool = True) -> torch.autocast:
        """The region itself, without autocast's cache of casts."""
        return torch.autocast(
            self.device_type, dtype=self.dtype, cache_enabled=False, enabled=enabled
        )


def has_policy(target: Any, device_type: str) -> bool:
    """True when autocast treats this op itself (and not only the ops that it is made of)."""
    # A kernel for the autocast key is what a policy is: see ATen/autocast_mode.h.
    key = "AutocastCUDA" if device_type == "cuda" else "AutocastCPU"
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


Casts = tuple[torch.dtype | None, ...]  # of each operand; None: left alone


@lru_cache(maxsize=4096)
def done_by_autocast(call: OpCall, state: AutocastState) -> tuple[Casts, torch.dtype | None] | None:
    """Casts of the operands with which the call does without autocast what it does under it; and
    what autocast has it compute in by its `dtype`, casting none: on GPUs sum, cumsum, prod and
    float16's softmax (`fp32_set_opt_dtype`).

    None: there are none such; what autocast casts inside of an op without a policy of its own is
    made of the operands
    by more than moving elements. On GPUs these are known: cross entropy (`loss_dtype`),
    pairwise_distance, trapezoid.
    """
    is_policy = has_policy(call.target, state.device_type)
    as_they_are, low, full = (
        tuple(dtype if m.dtype.is_floating_point else None for m in call.operands)
        for dtype in (None, state.dtype, torch.float32)
    )
    under_autocast, seen = _work(call, state, as_they_are, True)
    if state.dtype in seen:  # other casts are of the op's own making: attention adds up in fp32
        seen = tuple(dtype if dtype == state.dtype else None for dtype in seen)
    # Of operands of several dtypes the backward may not do what the forward does for them
    # (mse_loss, torch 2.11): last.
    are_alike = len({m.dtype for m in call.operands if m.dtype.is_floating_point}) < 2
    candidates = [seen] if is_policy else [seen, low, full]
    for casts in (
        [as_they_are, *candidates] if are_alike else [*candidates, *[as_they_are] * (not is_policy)]
    ):
        try:
            with patched(
                [(_fake_log, "disabled", True)]
            ):  # else it logs what an op refuses, with its traceback
                work, _ = _work(call, state, casts, False)
        except RuntimeError:  # what an op made of matmuls says to operands of several dtypes
            continue
        if work == under_autocast:
            return casts, None
        if casts == as_they_are and is_policy and not any(seen):
            pairs = zip(under_autocast[-1], work[-1], strict=True)
            return seen, next((dtype for dtype, plain in pairs if dtype != plain), None)
    return (seen, None) if is_policy else None


_MOVES = (aten._to_copy.default, aten.clone.default, aten._unsafe_view.default)
_PRODUCTS = {
    getattr(aten, name).default for name in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv")
}


def _work(
    call: OpCall, state: AutocastState, casts: Casts, enabled: bool
) -> tuple[list[Any], Casts]:
    """What a call computes, by op and dtypes, and last the dtypes of its results; casts and moves
    of elements are left
    out, as they commute. And to what dtype each operand was cast first on the way."""
    work: list[Any] = []
    seen: dict[int, torch.dtype] = {}

    def run(operands: list[Tensor]) -> None:
        operands = [t if d is None else t.to(d) for t, d in zip(operands, casts, strict=True)]

        class Watcher(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func in _PRODUCTS and len({t.dtype for t in args if isinstance(t, Tensor)}) > 1:
                    raise RuntimeError(
                        f"{func} of several dtypes"
                    )  # shape functions of torch 2.11 let it pass
                if (
                    func is aten._to_copy.default
                ):  # what autocast's own casts are by the time they come here
                    position = next((i for i, t in enumerate(operands) if t is args[0]), None)
                    dtype = (kwargs or {}).get("dtype")
                    if position is not None and dtype is not None:
                        seen.setdefault(position, dtype)
                out = func(*args, **(kwargs or {}))
                if _dtypes_of(out) and not func.is_view and func not in _MOVES:
                    work.append((func, _dtypes_of(out)))  # order counts, shapes do not
                return out

        with state.region(enabled), Watcher():
            work.append(_dtypes_of(call.call(*operands)))

    run_fake(call, run, state.device_type)
    return work, tuple(map(seen.get, range(len(call.operands))))


def _dtypes_of(out: Any) -> list[torch.dtype]:
    return [
        t.dtype for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)
    ]


_AUTOCAST_INSIDE = ("alpa", FUNCTIONS)  # their ops run under their call's autocast


class Autocast:
    """Open autocast regions of the walk, innermost last, and the parameters already cast in the
    outermost.

    Args:
        parameters: value indices of the parameters; filled while the inputs are added.
    """

    def __init__(self, builder: Builder, device_type: str, parameters: set[int]) -> None:
        self.builder, self.device_type, self.parameters = builder, device_type, parameters
        self._regions: list[tuple[fx.Node, AutocastState | None]] = []  # None: switched off
        self._cast_parameters: dict[tuple[int, torch.dtype], ValueRef] = {}

    @property
    def state(self) -> AutocastState | None:
        """The innermost open region, None outside of all."""
        return self._regions[-1][1] if self._regions else None

    def enter(self, node: fx.Node) -> None:
        """A region opens: `node` is the call of _enter_autocast."""
        arguments: Any = node.args
        device_type, dtype, enabled = arguments[:3]
        on_capture_device = device_type == self.device_type
        if enabled and not on_capture_device:
            raise CaptureError(
                f"autocast for {device_type} ({self.builder.source}), but the module is on"
                f" {self.device_type}",
                f"move the module to {device_type}, or use autocast({self.device_type!r})",
            )
        state = self.state
        if on_capture_device:
            dtype = dtype or torch.get_autocast_dtype(device_type)
            state = AutocastState(device_type, dtype) if enabled else None
        self._regions.append((node, state))

    def exit(self, node: Any) -> None:
        """The region that `node` opened ends."""
        self._regions = [r for r in self._regions if r[0] is not node]
        if not self._regions:
            self._cast_parameters.clear()

    def operands(
        self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the casts that the open region makes of them."""
        state = self.state
        # Without a policy of its own, autocast may treat the ops that it is made of.
        composite = target.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        )
        composite = composite and target.namespace not in _AUTOCAST_INSIDE
        if state is None or not (composite or has_policy(target, self.device_type)):
            return args, kwargs
        call, operands = self.builder.call_of(target, args, kwargs)
        if not operands:
            return args, kwargs
        done = done_by_autocast(call, state)
        if done is None:
            raise CaptureError(
                f"{target} ({self.builder.source}) computes differently under autocast, and not"
                " only on cast operands",
                "call it under torch.autocast(..., enabled=False), with operands of one dtype",
            )
        dtypes, given = done
        if given is not None:
            place = next(
                (i for i, a in enumerate(target._schema.arguments) if a.name == "dtype"), None
            )
            if place is not None and place < len(args):
                return (*args[:place], given, *args[place + 1 :]), kwargs
            if place is not None:
                return args, kwargs | {"dtype": given}
            dtypes = tuple(
                given if m.dtype.is_floating_point else None for m in call.operands
            )  # norm
        rest = iter(
            [v if d is None else self._cast(v, d) for v, d in zip(operands, dtypes, strict=True)]
        )
        return map_refs(
            (args, dict(sorted(kwargs.items()))), lambda _: next(rest)
        )  # in the order of `call_of`

    def loss_dtype(self, target: OpOverload, args: tuple[Any, ...]) -> torch.dtype | None:
        """In what a cross entropy sums logarithms of another dtype: on GPUs autocast sees to its
        nll_loss alone.

        None: in that of its operands when `operands` is done with them.
        """
        if (
            self.state is None
            or target is not aten.cross_entropy_loss.default
            or has_policy(target, self.device_type)
        ):
            return None
        return (
            torch.float32
            if self.builder.meta(args[0]).dtype in (torch.float16, torch.bfloat16)
            else None
        )

    def _cast(self, ref: ValueRef, dtype: torch.dtype) -> ValueRef:
        """A cast; parameters are cast once per outermost region, as autocast's own cache does."""
        if ref.index not in self.parameters:  # autocast's cache holds leaves that require grad only
            return self.builder.emit(aten.to.dtype, ref, dtype)
        key = (ref.index, dtype)
        if key not in self._cast_parameters:
            self._cast_parameters[key] = self.builder.emit(aten.to.dtype, ref, dtype)
        return self._cast_parameters[key]
