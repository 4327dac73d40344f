"""Builds the StepGraph: values numbered, ops inferred on fake tensors one by one; checks of what can be a loss.

Identical calls (same target, arguments and operand metadata) are inferred once, so identical layers cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import Op, ValueRef
from alpa_strategy.ir.op import OpCall, TensorMeta, with_slots


@lru_cache(maxsize=1)
def _inference_mode() -> FakeTensorMode:
    return FakeTensorMode()


def run_fake(call: OpCall, run: Callable[[list[Tensor]], Any] | None = None, device: str = "cpu") -> Any:
    """Call on contiguous fake operands in grad mode; `run`, if given, is called with the operands instead."""
    # In grad mode, whatever the step's is: `requires_grad` of the results must come out as in training.
    with _inference_mode(), torch.enable_grad():
        operands = [
            torch.empty(m.shape, dtype=m.dtype, device=device, requires_grad=m.requires_grad) for m in call.operands
        ]
        return call.call(*operands) if run is None else run(operands)


@lru_cache(maxsize=4096)
def infer(call: OpCall) -> tuple[OpCall, tuple[int | None, ...]]:
    """The call with its results, requires_grad included; and per item that it returns its tensor's number, None where
    that is no tensor."""
    out = run_fake(call)
    returned = list(out) if isinstance(out, tuple | list) else [out]
    tensors = [item for item in returned if isinstance(item, Tensor)]
    metas = tuple(TensorMeta(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors)  # strides do not matter
    number = iter(range(len(tensors)))
    items = tuple(next(number) if isinstance(item, Tensor) else None for item in returned)
    return replace(call, results=metas, returns_tuple=isinstance(out, tuple | list)), items


class Builder:
    """Grows values and ops. Arguments given to `emit` hold ValueRefs for tensors."""

    def __init__(self) -> None:
        self.values: list[TensorMeta] = []
        self.ops: list[Op] = []
        self.module = ""
        self.source = ""

    def add_value(self, meta: TensorMeta) -> ValueRef:
        """A new value of the graph."""
        self.values.append(meta)
        return ValueRef(len(self.values) - 1)

    def meta(self, ref: ValueRef) -> TensorMeta:
        """What is known of a value."""
        return self.values[ref.index]

    def call_of(self, target: Any, args: Any, kwargs: dict[str, Any] | None = None) -> tuple[OpCall, list[ValueRef]]:
        """The OpCall without results, and its operands: equal calls of other tensors are equal OpCalls."""
        operands: list[ValueRef] = []
        own_args = with_slots(tuple(args), ValueRef, operands)
        own_kwargs = tuple((k, with_slots(v, ValueRef, operands)) for k, v in sorted((kwargs or {}).items()))
        return OpCall(target, own_args, own_kwargs, tuple(map(self.meta, operands)), ()), operands

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add an op; a ValueRef, or a tuple of ValueRefs and Nones when the op returns a tuple."""
        without_results, operands = self.call_of(target, args, kwargs)
        call, numbers = infer(without_results)
        refs = [self.add_value(meta) for meta in call.results]
        self.ops.append(
            Op("", call, tuple(o.index for o in operands), tuple(r.index for r in refs), self.module, self.source)
        )
        items = tuple(None if i is None else refs[i] for i in numbers)
        return items if call.returns_tuple else items[0]


def map_refs(tree: Any, fn: Callable[[ValueRef], Any]) -> Any:
    """Replace the ValueRefs of a pytree."""
    return pytree.tree_map_only(ValueRef, fn, tree)


def loss_of(output: Any) -> ValueRef:
    """The loss in what `training_step` returned: the tensor itself or `["loss"]`."""
    if output is None:
        raise CaptureError(
            "training_step returned None: skipping a batch is not supported", "return a loss for every batch"
        )
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, ValueRef):
        raise CaptureError(
            f"training_step returned {type(output).__name__} without a loss tensor",
            'return the loss, or a dict with "loss"',
        )
    return loss


def check_loss(meta: TensorMeta) -> None:
    """CaptureError unless the loss is one number that depends on a parameter."""
    if meta.num_elements != 1:
        raise CaptureError(
            f"training_step returned a loss of shape {list(meta.shape)}; a loss is one number",
            "reduce it: loss.mean() or loss.sum()",
        )
    if not meta.requires_grad:
        raise CaptureError(
            "training_step returned a loss that depends on no parameter that requires grad: there is nothing to train",
            "look for .detach(), no_grad or frozen parameters on the way to the loss",
        )
