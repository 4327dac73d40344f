"""The results of a captured step in its StepGraph: the loss, the records, and the numbers of live
ops and values.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from alpa_strategy.capture.batch_leaves import sharing_memory
from alpa_strategy.capture.graph_builder import Builder
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir import graph as ir
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.places import Place


def loss_of(output: Any, builder: Builder) -> ir.ValueRef:
    """Return the loss in the result of `training_step`: the tensor itself or `["loss"]`.

    Raises:
        CaptureError: it is not one number that depends on a parameter.
    """
    if output is None:
        raise CaptureError(
            "training_step returned None: skipping a batch is not supported",
            "return a loss for every batch",
        )
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, ir.ValueRef):
        raise CaptureError(
            f"training_step returned {type(output).__name__} without a loss tensor",
            'return the loss, or a dict with "loss"',
        )
    meta = builder.meta(loss)
    if meta.num_elements != 1:
        raise CaptureError(
            f"training_step returned a loss of shape {list(meta.shape)}; a loss is one number",
            "reduce it: loss.mean() or loss.sum()",
        )
    if not meta.requires_grad:
        raise CaptureError(
            "training_step returned a loss that depends on no parameter that requires grad: there"
            " is nothing to train",
            "look for .detach(), no_grad or frozen parameters on the way to the loss",
        )
    return loss


def with_records(
    graph: ir.StepGraph,
    results: dict[str, Any],
    lists: Iterable[Place],
    attributes: Iterable[Place] = (),
) -> ir.StepGraph:
    """Return the graph with its output and records.

    Args:
        results: as of `Trace.results`, with ValueRefs of the graph.
        lists: the locations of the lists in `results["appended"]`; those that got no item have no
            record.
        attributes: the locations of the values in `results["assigned"]`.
    """
    logs = []
    for name, value, kwargs in results["logs"]:
        logs.append(ir.LogRecord(name, value, tuple(sorted(kwargs.items()))))
    metrics = []
    for name, method, args, kwargs in results["metrics"]:
        sorted_kwargs = tuple(sorted(kwargs.items()))
        metrics.append(ir.MetricRecord(name, method, tuple(args), sorted_kwargs))
    appended = []
    for place, items in zip(lists, results["appended"], strict=True):
        if items:
            appended.append(ir.AppendRecord(place, tuple(items)))
    assigned = []
    for place, value in zip(attributes, results["assigned"], strict=True):
        assigned.append(ir.SetRecord(place, value))
    return replace(
        graph,
        output=results["output"],
        logs=tuple(logs),
        metrics=tuple(metrics),
        checks=tuple(ir.Check(*check) for check in results["checks"]),
        appended=tuple(appended),
        assigned=tuple(assigned),
    )


def check_memory_of(
    updated: Iterable[ir.ParameterInput | ir.BufferInput | ir.BatchInput],
    module_tensors: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> None:
    """Check that no other tensor shares memory with a buffer that the step updates.

    Args:
        updated: inputs that are buffers; the number of each value is its index in
            `module_tensors`.
        module_tensors: parameters and buffers.
        constants: other tensors that the step reads.

    Raises:
        CaptureError: one does.
    """
    shared = sharing_memory(module_tensors, constants)
    for entry in updated:
        if entry.value in shared and isinstance(entry, ir.BufferInput):
            raise CaptureError(
                f"the step changes buffer {entry.name}, of which another tensor is a view, made"
                " before",
                "make views of buffers in the step",
            )


class Numbering:
    """New indices for some of a builder's values, in order of definition.

    Args:
        all_values: metadata of the builder's values.
    """

    def __init__(self, all_values: list[TensorMeta]) -> None:
        self.all_values = all_values

        # Index in the builder -> new index.
        self.index: dict[int, int] = {}

        # Metadata of the new values.
        self.values: list[TensorMeta] = []

    def define(self, value: int) -> int:
        """Return a new index for `value`, the next one, and record its metadata."""
        self.index[value] = len(self.values)
        self.values.append(self.all_values[value])
        return self.index[value]


def renumbered_ops(ops: list[ir.Op], numbering: Numbering) -> list[ir.Op]:
    """Return the ops on new values, named `mul_0`, `mul_1`, ... after their targets. `numbering`
    gets their results.
    """
    renumbered = []
    counts: Counter[str] = Counter()
    for op in ops:
        # Of "aten.mul.Tensor", `mul`.
        base = op.call.target_name.split(".")[1]
        name = f"{base}_{counts[base]}"
        counts[base] += 1

        operands = tuple(numbering.index[value] for value in op.operands)
        results = tuple(map(numbering.define, op.results))
        renumbered.append(replace(op, name=name, operands=operands, results=results))
    return renumbered
