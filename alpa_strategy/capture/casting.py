"""Autocast regions during conversion: which region is open, and the casts of an op's operands as ops of the graph.

What autocast does to one op is found in autocast.py; here its findings are put into the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from alpa_strategy.capture import as_written, functions
from alpa_strategy.capture.autocast import AutocastState, casts_around, decomposed, has_policy, operand_casts
from alpa_strategy.capture.builder import Builder
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.counters import is_late
from alpa_strategy.ir.graph import ValueRef

aten = torch.ops.aten

_AUTOCAST_INSIDE = ("alpa", functions.NAMESPACE, as_written.NAMESPACE)  # their ops run under their call's autocast


class Autocast:
    """Open autocast regions of the walk, innermost last, and the parameters already cast in the outermost.

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
        device_type, dtype, enabled = node.args[0], node.args[1], node.args[2]
        on_capture_device = device_type == self.device_type
        if enabled and not on_capture_device:
            raise CaptureError(
                f"autocast for {device_type} ({self.builder.source}), but the module is on {self.device_type}",
                f"move the module to {device_type}, or use autocast({self.device_type!r})",
            )
        state = self.state
        if on_capture_device:
            dtype = dtype or torch.get_autocast_dtype(device_type)
            state = AutocastState(device_type, dtype) if enabled else None
        self._regions.append((node, state))

    def exit(self, node: fx.Node) -> None:
        """The region that `node` opened ends."""
        self._regions = [r for r in self._regions if r[0] is not node]
        if not self._regions:
            self._cast_parameters.clear()

    def ops_inside(
        self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[fx.Graph, list[ValueRef]] | None:
        """For a composite op (einsum, ...) with casts inside: the ops it is made of, casts included, and its operands.

        None when the op stays whole.
        """
        state = self.state
        if state is None or not self._is_composite(target):
            return None
        call, operands = self.builder.call_of(target, args, kwargs)
        if not operands or casts_around(call, state) is not None:
            return None
        if is_late(call):  # its ops would be traced with the example
            raise CaptureError(
                f"{target} under autocast ({self.builder.source}) takes a number made of the step's counters",
                "call it under torch.autocast(..., enabled=False), or multiply its result by the number",
            )
        return decomposed(call, state), operands

    def operands(
        self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the casts that the open region makes of them."""
        state = self.state
        composite = self._is_composite(target)
        if state is None or not (composite or has_policy(target, self.device_type)):
            return args, kwargs
        call, operands = self.builder.call_of(target, args, kwargs)
        if not operands:
            return args, kwargs
        dtypes = (casts_around if composite else operand_casts)(call, state) or (None,) * len(operands)
        rest = iter([v if d is None else self._cast(v, d) for v, d in zip(operands, dtypes, strict=True)])

        def swap(arg: Any) -> Any:
            if isinstance(arg, ValueRef):
                return next(rest)
            return type(arg)(swap(a) for a in arg) if isinstance(arg, list | tuple) else arg

        new_args = tuple(swap(a) for a in args)
        return new_args, {k: swap(v) for k, v in sorted(kwargs.items())}

    def _is_composite(self, target: OpOverload) -> bool:
        """Whether autocast has no policy for the op, and may treat the ops that it is made of."""
        composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        return composite and target.namespace not in _AUTOCAST_INSIDE and not has_policy(target, self.device_type)

    def _cast(self, ref: ValueRef, dtype: torch.dtype) -> ValueRef:
        """A cast; parameters are cast once per outermost region, as autocast's own cache does."""
        if ref.index not in self.parameters:
            return self.builder.emit(aten.to.dtype, ref, dtype)
        key = (ref.index, dtype)
        if key not in self._cast_parameters:
            self._cast_parameters[key] = self.builder.emit(aten.to.dtype, ref, dtype)
        return self._cast_parameters[key]
