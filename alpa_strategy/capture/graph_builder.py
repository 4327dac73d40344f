"""Builds the StepGraph: values numbered and ops inferred on fake tensors one by one, then the end of conversion.

Identical calls (same target, arguments and operand metadata) are inferred once, so identical layers cost nothing. At
the end, ops and constants without effect go, values are numbered anew, and a loss that cannot be one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from alpa_strategy.capture.trace import Trace, TracedInput
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import (
    AppendRecord,
    BatchInput,
    BufferInput,
    Check,
    ConstantInput,
    LogRecord,
    MetricRecord,
    Op,
    ParameterInput,
    StepGraph,
    ValueRef,
)
from alpa_strategy.ir.op import OpCall, Slot, TensorMeta


@dataclass(frozen=True)
class Inferred:
    """Results of a call: metadata of its tensors, whether it returns a tuple, and per returned item its tensor's
    number (None where the op returned no tensor).
    """

    results: tuple[TensorMeta, ...]
    returns_tuple: bool
    items: tuple[int | None, ...]


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
def infer(call: OpCall) -> Inferred:
    """Infer what `call` (with empty `results`) returns, requires_grad included."""
    out = run_fake(call)
    returned = list(out) if isinstance(out, tuple | list) else [out]
    metas: list[TensorMeta] = []
    items: list[int | None] = []
    for item in returned:
        if isinstance(item, Tensor):
            items.append(len(metas))
            metas.append(TensorMeta(tuple(item.shape), item.dtype, item.requires_grad))  # strides do not matter
        else:
            items.append(None)
    return Inferred(tuple(metas), isinstance(out, tuple | list), tuple(items))


def frozen(arg: Any) -> Any:
    """Lists become tuples, recursively."""
    return tuple(frozen(a) for a in arg) if isinstance(arg, list | tuple) else arg


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
        """The OpCall without results, and its operands."""
        operands: list[ValueRef] = []

        def slot(arg: Any) -> Any:
            if isinstance(arg, ValueRef):
                operands.append(arg)
                return Slot(len(operands) - 1)  # equal calls of other tensors are then equal OpCalls
            return tuple(slot(a) for a in arg) if isinstance(arg, list | tuple) else arg

        new_args = slot(tuple(args))
        new_kwargs = tuple((k, slot(v)) for k, v in sorted((kwargs or {}).items()))
        return OpCall(target, new_args, new_kwargs, tuple(self.meta(v) for v in operands), ()), operands

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add an op; a ValueRef, or a tuple of ValueRefs and Nones when the op returns a tuple."""
        call, operands = self.call_of(target, args, kwargs)
        inferred = infer(call)
        refs = [self.add_value(meta) for meta in inferred.results]
        call = OpCall(call.target, call.args, call.kwargs, call.operands, inferred.results, inferred.returns_tuple)
        self.ops.append(
            Op("", call, tuple(o.index for o in operands), tuple(r.index for r in refs), self.module, self.source)
        )
        items = tuple(None if i is None else refs[i] for i in inferred.items)
        return items if inferred.returns_tuple else items[0]


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


def check_loss(meta: TensorMeta, is_trainable: bool) -> None:
    """CaptureError unless the loss is one number that depends on a parameter. is_trainable: some parameter is."""
    if meta.num_elements != 1:
        raise CaptureError(
            f"training_step returned a loss of shape {list(meta.shape)}; a loss is one number",
            "reduce it: loss.mean() or loss.sum()",
        )
    if not is_trainable:
        raise CaptureError(
            "no parameter of the module requires grad: there is nothing to train",
            "give the module parameters, or unfreeze some (requires_grad_(True))",
        )
    if not meta.requires_grad:
        raise CaptureError(
            "the loss that training_step returned depends on no parameter that requires grad",
            "look for .detach(), no_grad or frozen parameters on the way to the loss",
        )


def finish(
    trace: Trace,
    builder: Builder,
    inputs: list[tuple[TracedInput, int]],
    constants_found: list[ConstantInput],
    found: Mapping[str, Any],
    loss: int,
    updates: Mapping[int, int],
) -> StepGraph:
    """The graph of the ops that have an effect: dead code is left out, values are numbered anew, ops named.

    Args:
        inputs: with their values.
        found: what the step left behind besides buffers ({"output", "logs", ...}, see `Trace`), with ValueRefs.
        loss: its value.
        updates: value of a buffer -> its new value.
    """
    # Backwards from what leaves the step: an op counts if something needs one of its results.
    needed = {leaf.index for leaf in pytree.tree_leaves(found) if isinstance(leaf, ValueRef)}
    needed |= {*updates.values(), loss}
    kept: list[Op] = []  # backwards, so that an op's users are seen before it
    for op in reversed(builder.ops):
        if needed.intersection(op.results):
            kept.append(op)
            needed.update(op.operands)
    kept.reverse()
    new_index: dict[int, int] = {}
    values: list[TensorMeta] = []

    def define(old: int) -> int:
        new_index[old] = len(values)
        values.append(builder.values[old])
        return new_index[old]

    parameters, buffers, batch = [], [], []
    for entry, old in inputs:
        meta = builder.values[old]
        match entry.kind:
            case "parameter":
                parameters.append(ParameterInput(define(old), entry.names, meta))  # also unused: the run has them all
            case "buffer":
                if old in needed or old in updates:
                    buffers.append((define(old), old, entry.names[0], meta))
            case _:
                batch.append(BatchInput(define(old), entry.leaf, meta, entry.batch_dim))
    constants = [replace(c, value=define(c.value)) for c in constants_found if c.value in needed]
    counts: dict[str, int] = {}
    ops: list[Op] = []
    for op in kept:
        base = op.call.target_name.split(".")[1]  # "aten.mul.Tensor": ops are named mul_0, mul_1, ...
        number = counts[base] = counts.get(base, -1) + 1
        operands = tuple(new_index[o] for o in op.operands)
        ops.append(replace(op, name=f"{base}_{number}", operands=operands, results=tuple(map(define, op.results))))

    found = map_refs(found, lambda ref: ValueRef(new_index[ref.index]))
    lists = zip(trace.recording.appended, found["appended"], strict=True)
    return StepGraph(
        values=tuple(values),
        parameters=tuple(parameters),
        buffers=tuple(
            BufferInput(new, name, meta, new_index[updates[old]] if old in updates else None)
            for new, old, name, meta in buffers
        ),
        batch=tuple(batch),
        constants=tuple(constants),
        ops=tuple(ops),
        loss=new_index[loss],
        output=found["output"],
        logs=tuple(LogRecord(n, v, tuple(sorted(k.items()))) for n, v, k in found["logs"]),
        metrics=tuple(MetricRecord(n, m, tuple(a), tuple(sorted(k.items()))) for n, m, a, k in found["metrics"]),
        batch_size=trace.batch_size,
        guards=tuple(trace.recording.guards),
        attributes=trace.recording.attributes,
        leaves=trace.read_leaves,
        checks=tuple(Check(ref.index, expected, source) for ref, expected, source in found["checks"]),
        notes=tuple(trace.recording.notes),
        appended=tuple(AppendRecord(place, tuple(items)) for place, items in lists if items),
    )
