"""Make autocast explicit: run a call once under autocast to see which operands it casts.

The trace is recorded above autocast, so its ops have uncast operands. Running an op on fake tensors
under autocast reveals the casts of PyTorch's policy. `Autocast` adds them to the graph as ops; the
graph runs without autocast.
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
    """One `torch.autocast` region."""

    # Policies depend on it.
    device_type: str

    # The dtype of its casts.
    dtype: torch.dtype

    def region(self, enabled: bool = True) -> torch.autocast:
        """Return the context manager, without autocast's cache of casts."""
        return torch.autocast(
            self.device_type, dtype=self.dtype, cache_enabled=False, enabled=enabled
        )


def has_policy(target: Any, device_type: str) -> bool:
    """Whether autocast has a policy for this op, and not only for the ops that it calls."""
    # A policy is a kernel for the autocast key: see ATen/autocast_mode.h.
    key = "AutocastCUDA" if device_type == "cuda" else "AutocastCPU"
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


# Of each operand, the dtype to which it is cast; None: it is not cast.
Casts = tuple[torch.dtype | None, ...]


@lru_cache(maxsize=4096)
def done_by_autocast(call: OpCall, state: AutocastState) -> tuple[Casts, torch.dtype | None] | None:
    """Return how to compute a call without autocast as autocast computes it.

    Returns:
        The casts of the operands, and the `dtype` argument that autocast sets instead of casting
        (`fp32_set_opt_dtype`: on GPUs sum, cumsum, prod and float16's softmax), or None.
        None instead of both if there are no such casts: autocast then casts values inside an op
        without a policy that are computed from the operands. On GPUs such ops are cross entropy
        (`loss_dtype`), pairwise_distance and trapezoid.
    """
    is_policy = has_policy(call.target, state.device_type)
    no_casts = _casts_to(None, call)
    under_autocast, observed = _work(call, state, no_casts, True)
    if state.dtype in observed:
        # The op makes the other casts itself: attention sums in fp32.
        observed = _only(state.dtype, observed)

    for casts in _candidates(call, state, observed, is_policy):
        try:
            # Otherwise it logs the error of an op with a traceback.
            with patched([(_fake_log, "disabled", True)]):
                work, _ = _work(call, state, casts, False)
        except RuntimeError:
            # An op made of matmuls refuses operands of several dtypes.
            continue
        if work == under_autocast:
            return casts, None
        if casts == no_casts and is_policy and not any(observed):
            pairs = zip(under_autocast[-1], work[-1], strict=True)
            return observed, next((dtype for dtype, plain in pairs if dtype != plain), None)
    return (observed, None) if is_policy else None


def _only(dtype: torch.dtype, casts: Casts) -> Casts:
    """Return the casts with None in place of those to other dtypes than `dtype`."""
    selected: list[torch.dtype | None] = []
    for cast in casts:
        selected.append(cast if cast == dtype else None)
    return tuple(selected)


def _casts_to(dtype: torch.dtype | None, call: OpCall) -> Casts:
    """Return the casts of floating-point operands to `dtype` (None: no casts); None for others."""
    casts = []
    for meta in call.operands:
        casts.append(dtype if meta.dtype.is_floating_point else None)
    return tuple(casts)


def _candidates(
    call: OpCall, state: AutocastState, observed: Casts, is_policy: bool
) -> list[Casts]:
    """Return the casts that are tried in turn.

    Args:
        observed: the casts that autocast was seen to make.
        is_policy: whether autocast has a policy for the op.
    """
    candidates = [observed]
    if not is_policy:
        candidates += [_casts_to(state.dtype, call), _casts_to(torch.float32, call)]

    no_casts = _casts_to(None, call)
    dtypes = {meta.dtype for meta in call.operands if meta.dtype.is_floating_point}
    if len(dtypes) < 2:
        return [no_casts, *candidates]
    # The backward of an op may not convert operands of several dtypes as its forward does
    # (mse_loss, torch 2.11), so uncast operands come last.
    if not is_policy:
        candidates.append(no_casts)
    return candidates


# Ops that copy or convert elements.
_MOVES = (aten._to_copy.default, aten.clone.default, aten._unsafe_view.default)

_MATMULS = {
    getattr(aten, name).default for name in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv")
}


class _Watcher(TorchDispatchMode):
    """Records the ops inside a call, and the casts of its operands."""

    def __init__(self, operands: list[Tensor]) -> None:
        super().__init__()
        self.operands = operands

        # (op, dtypes of its results) in order. Views, casts and moves of elements are left out, as
        # they commute with other ops.
        self.work: list[Any] = []

        # Index of an operand -> the dtype to which it is cast first.
        self.casts: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The shape functions of torch 2.11 accept several dtypes.
        if func in _MATMULS and len(set(_dtypes_of(args))) > 1:
            raise RuntimeError(f"{func} of several dtypes")

        # A cast of autocast has become this op.
        if func is aten._to_copy.default:
            self._record_cast(args[0], kwargs.get("dtype"))

        result = func(*args, **kwargs)
        dtypes = _dtypes_of(result)
        if dtypes and not func.is_view and func not in _MOVES:
            self.work.append((func, dtypes))
        return result

    def _record_cast(self, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """Record the first cast of operand `tensor`, to `dtype`; nothing for None and for other
        tensors.
        """
        if dtype is None:
            return
        for index, operand in enumerate(self.operands):
            if operand is tensor:
                self.casts.setdefault(index, dtype)
                return


def _work(
    call: OpCall, state: AutocastState, casts: Casts, enabled: bool
) -> tuple[list[Any], Casts]:
    """Run a call on fake tensors, and return its ops and casts.

    Args:
        casts: casts of the operands before the call.
        enabled: whether autocast is on.

    Returns:
        (op, dtypes of its results) of every op, and last the dtypes of the call's results; then the
        first cast of every operand, None if it has none.
    """
    work: list[Any] = []
    observed: dict[int, torch.dtype] = {}

    def run(operands: list[Tensor]) -> None:
        cast_operands = []
        for operand, dtype in zip(operands, casts, strict=True):
            cast_operands.append(operand if dtype is None else operand.to(dtype))
        watcher = _Watcher(cast_operands)
        with state.region(enabled), watcher:
            result = call.call(*cast_operands)
        work.extend([*watcher.work, _dtypes_of(result)])
        observed.update(watcher.casts)

    run_fake(call, run, state.device_type)
    return work, tuple(map(observed.get, range(len(call.operands))))


def _dtypes_of(values: Any) -> list[torch.dtype]:
    """Return the dtypes of a tensor, or of the tensors in a tuple or list."""
    items = values if isinstance(values, tuple | list) else [values]
    return [item.dtype for item in items if isinstance(item, Tensor)]


# Namespaces of ops that run under the autocast of their call.
_AUTOCAST_INSIDE = ("alpa", FUNCTIONS)


class Autocast:
    """The open autocast regions of the walk, and the parameters that have been cast in them.

    Args:
        builder: of the graph, to which casts are added.
        device_type: on which the step runs: `cuda`, `cpu`.
        parameters: value indices of the parameters; filled while the inputs are added.
    """

    def __init__(self, builder: Builder, device_type: str, parameters: set[int]) -> None:
        self.builder = builder
        self.device_type = device_type
        self.parameters = parameters

        # (node that opened it, its state or None if it switches autocast off), innermost last.
        self._regions: list[tuple[fx.Node, AutocastState | None]] = []

        # (value index, dtype) -> the cast, in the outermost region.
        self._cast_parameters: dict[tuple[int, torch.dtype], ValueRef] = {}

    @property
    def state(self) -> AutocastState | None:
        """The innermost open region; None outside of all, or if autocast is off."""
        return self._regions[-1][1] if self._regions else None

    def enter(self, node: fx.Node) -> None:
        """Open a region; a disabled one for another device type changes nothing. `node` is the call
        of _enter_autocast.

        Raises:
            CaptureError: it is enabled, for another device type than the module's.
        """
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
        """Close the region that `node` opened. With the outermost, casts of parameters are
        forgotten.
        """
        self._regions = [region for region in self._regions if region[0] is not node]
        if not self._regions:
            self._cast_parameters.clear()

    def operands(
        self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of an op with the casts of the open region, or with the `dtype`
        argument that autocast sets; unchanged if there is no open region or autocast has no policy.

        The casts are added to the graph.

        Raises:
            CaptureError: casts of operands cannot give autocast's result.
        """
        state = self.state
        if state is None:
            return args, kwargs
        # Autocast may have policies for the ops inside an op.
        is_composite = target.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        )
        may_cast_inside = is_composite and target.namespace not in _AUTOCAST_INSIDE
        if not may_cast_inside and not has_policy(target, self.device_type):
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
        casts, dtype_argument = done
        if dtype_argument is not None:
            names = [argument.name for argument in target._schema.arguments]
            position = names.index("dtype") if "dtype" in names else None
            if position is not None and position < len(args):
                return (*args[:position], dtype_argument, *args[position + 1 :]), kwargs
            if position is not None:
                return args, kwargs | {"dtype": dtype_argument}
            # Such as norm.
            casts = _casts_to(dtype_argument, call)

        cast_operands = []
        for operand, dtype in zip(operands, casts, strict=True):
            cast_operands.append(operand if dtype is None else self._cast(operand, dtype))
        # In the order of `call_of`.
        remaining = iter(cast_operands)
        return map_refs((args, dict(sorted(kwargs.items()))), lambda _: next(remaining))

    def loss_dtype(self, target: OpOverload, args: tuple[Any, ...]) -> torch.dtype | None:
        """Return the dtype in which a cross entropy sums half-precision logarithms under autocast.

        On GPUs autocast has a policy for its nll_loss only. None for any other op or dtype, outside
        regions, and where cross entropy has a policy: the sum has the dtype of the operands after
        `operands`.
        """
        is_cross_entropy = target is aten.cross_entropy_loss.default
        if self.state is None or not is_cross_entropy:
            return None
        if has_policy(target, self.device_type):
            return None
        is_half = self.builder.meta(args[0]).dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if is_half else None

    def _cast(self, ref: ValueRef, dtype: torch.dtype) -> ValueRef:
        """Emit a cast of a value to `dtype`, and return its result.

        Parameters are cast once per outermost region, as autocast's cache does: it stores leaves
        that require grad only.
        """
        if ref.index not in self.parameters:
            return self.builder.emit(aten.to.dtype, ref, dtype)
        key = (ref.index, dtype)
        if key not in self._cast_parameters:
            self._cast_parameters[key] = self.builder.emit(aten.to.dtype, ref, dtype)
        return self._cast_parameters[key]
