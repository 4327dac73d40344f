"""StepGraph: one training step as data. The forward only; autograd makes the backward at run time.

Pure single assignment: ops read and write numbered values, nothing is mutated. A buffer update
(BatchNorm statistics)
is an output that the runtime writes back. Shapes are those of the **global** batch: the step as one
device runs it.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from alpa_strategy.ir.guards import COUNTERS, Guard, ValueGuard, at_counters
from alpa_strategy.ir.op import OpCall, TensorMeta

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class ValueRef:
    """Stands for value `index` of the graph in output structures and log arguments."""

    index: int


@dataclass(frozen=True)
class LeafRef:
    """Stands in an output structure for leaf `leaf` of the batch, no tensor, as the batch at hand
    has it.
    """

    leaf: int


@dataclass(frozen=True)
class Check:
    """A branch of the step that only raises: `value`, as a truth, must be `expected`.

    source: the line. raised, text: class (`builtins.ValueError`) and text of what it raises.
    """

    value: ValueRef
    expected: bool
    source: str
    raised: str = "builtins.RuntimeError"
    text: str = ""


@dataclass(frozen=True)
class ParameterInput:
    """A parameter of the module."""

    value: int
    names: tuple[str, ...]  # every name that it has in the module tree (tied weights: several)
    meta: TensorMeta  # with its shape in the step
    # set where the step sees the first dim as two, segments and rows of a segment (see
    # capture/rewrites.py)
    module_shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The first of its names: what plans and stores call it."""
        return self.names[0]

    @property
    def num_segments(self) -> int:
        """In how many equal parts the step sees it (query, key and value in one weight: 3)."""
        return 1 if self.module_shape is None else self.meta.shape[0]


@dataclass(frozen=True)
class BufferInput:
    """A buffer (or constant tensor attribute) that the step reads."""

    value: int
    name: str
    meta: TensorMeta
    update: int | None = None  # the value to write back, if any


@dataclass(frozen=True)
class BatchInput:
    """One tensor leaf of the batch."""

    value: int
    leaf: int  # its index in `torch.utils._pytree.tree_leaves(batch)`
    meta: TensorMeta
    # 0: one row per sample (its global shape is then world x the loader's); None: the same tensor
    # on every rank
    batch_dim: int | None


@dataclass(frozen=True)
class ConstantInput:
    """A tensor constant that capture found (made outside the step, not a registered buffer)."""

    value: int
    tensor: Any = field(compare=False)
    meta: TensorMeta
    digest: str


@dataclass(frozen=True)
class Op:
    """One op of the step."""

    name: str
    call: OpCall
    # operands, results: value indices, as `call` has them
    operands: tuple[int, ...]
    results: tuple[int, ...]
    module: str = ""  # path of the submodule that called it ("" for the LightningModule itself)
    source: str = ""  # the user's line


@dataclass(frozen=True)
class LogRecord:
    """One `self.log` call: `value` is a ValueRef or a plain number, or a nested structure of both;
    kwargs as given.
    """

    name: str
    value: Any
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class MetricRecord:
    """One call of a torchmetrics object inside the step: method `forward` or `update`; args hold
    ValueRefs.
    """

    metric: str
    method: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class MetricRef:
    """Stands in log records for a torchmetrics object."""

    metric: str
    # the object itself was logged, or "value": what its last `forward` or `compute` gave
    kind: str = "metric"
    key: str | None = None  # the item of a MetricCollection


def stable_text(value: Any) -> str:
    """`repr` without memory addresses: the same in every process. Functions are named, lambdas
    known by their code.
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{stable_text(k)}: {stable_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(stable_text, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}{stable_text([getattr(value, f.name) for f in fields(value)])}"
    if isinstance(value, partial):
        return f"partial{stable_text((value.func, value.args, value.keywords))}"
    name = getattr(value, "__qualname__", None) if callable(value) else None
    if name is None:
        return _ADDRESS.sub("", repr(value))
    code = getattr(value, "__code__", None)
    # Lambdas and local functions of one scope share a name: their code tells them apart.
    body = ""
    if code is not None and "<" in name:
        body = hashlib.sha256(code.co_code).hexdigest()[:8]
    return f"{getattr(value, '__module__', None)}.{name}{body}"


def tensor_digest(tensor: Tensor) -> str:
    """Hash of a tensor's content, shape and dtype."""
    data = tensor.cpu().contiguous()
    # As bytes: NumPy knows no bfloat16.
    content = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return hashlib.sha256(content + str((tuple(data.shape), data.dtype)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Place:
    """Where something is that steps change: attribute `name` of the submodule at `path`, item `key`
    of a dict that is
    one, or the leaf `leaf` of the batch, which `name` then names."""

    path: str
    name: str
    key: str | int | None = None
    leaf: int | None = None

    @property
    def attribute(self) -> str:
        """The attribute by its path, as guards call it."""
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def item(self) -> Any:
        """Under what name `holder` has it."""
        return self.name if self.key is None else self.key

    def __str__(self) -> str:
        of_attribute = f"self.{self.attribute}" + (
            f"[{self.key!r}]" if self.key is not None else ""
        )
        return self.name if self.leaf is not None else of_attribute

    def holder(self, module: nn.Module) -> dict[Any, Any]:
        """What has it, of an attribute."""
        attributes = vars(module.get_submodule(self.path))
        return attributes if self.key is None else attributes[self.name]

    def value(self, module: nn.Module, leaves: Sequence[Any] = ()) -> Any:
        """What is there now. leaves: of the batch."""
        if self.leaf is not None:
            return leaves[self.leaf]
        held: Any = getattr(module.get_submodule(self.path), self.name, None)  # may be the class's
        return held if self.key is None else held.get(self.key)


@dataclass(frozen=True)
class AppendRecord:
    """What one step appended to a list: `items` hold ValueRefs, LeafRefs, CounterRefs and plain
    values.
    """

    place: Place
    items: tuple[Any, ...]


def values_of(node: Any) -> tuple[int, ...]:
    """Value indices in an output structure, or in records of logs, metrics, lists and checks, in
    order, each once.
    """
    found: dict[int, None] = {}
    for leaf in pytree.tree_leaves(node):
        if isinstance(leaf, ValueRef):
            found[leaf.index] = None
        elif isinstance(leaf, LogRecord | MetricRecord | AppendRecord | Check):
            found |= dict.fromkeys(values_of(list(vars(leaf).values())))
    return tuple(found)


@dataclass(frozen=True)
class StepGraph:
    """A captured step."""

    values: tuple[
        TensorMeta, ...
    ]  # metadata of every value; inputs first, then op results, in order of definition
    # parameters, buffers, batch, constants: the inputs
    parameters: tuple[ParameterInput, ...]
    buffers: tuple[BufferInput, ...]
    batch: tuple[BatchInput, ...]
    constants: tuple[ConstantInput, ...]
    ops: tuple[Op, ...]  # in execution order
    loss: int  # value index of the loss (a scalar); -1 in a stage that does not make it
    # what the step returned, tensors replaced by ValueRefs: a plain ValueRef, or a dict with "loss"
    output: Any
    logs: tuple[LogRecord, ...] = ()  # the step's `self.log` calls, in order
    metrics: tuple[MetricRecord, ...] = ()  # the step's torchmetrics calls, in order
    batch_size: int = 0  # rows of the global batch
    # `rank`: every rank brings its own rows of the batched leaves; `global`: every rank brings all
    batch_scope: str = "rank"
    # for a stage: values that earlier stages (or a prologue) hand in, in its plan's layouts; the
    # whole step's numbers
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()  # for a stage: values that later stages need
    notes: tuple[str, ...] = ()  # things that the user should know (shown with the plan)
    # what the step's Python asked of its counters; when one no longer holds, capture again
    guards: tuple[Guard, ...] = ()
    # what else the step read: attributes, globals, closures, the Trainer's values; when one
    # changed, capture again
    attributes: tuple[ValueGuard, ...] = ()
    # leaves of the batch, no tensors, that the step read, with their values as text; as for
    # attributes
    leaves: tuple[tuple[int, str], ...] = ()
    # what changes from step to step, read where it is when one begins: counters by their labels
    numbers: tuple[Place, ...] = ()
    checks: tuple[Check, ...] = ()  # conditions that must hold whenever the step has run
    stored: tuple[
        ValueGuard, ...
    ] = ()  # attributes that the step sets, each time to the same value
    appended: tuple[AppendRecord, ...] = ()  # what the step appended to lists of the module

    @property
    def constant_inputs(self) -> tuple[BufferInput | ConstantInput, ...]:
        """What is neither a parameter nor of the batch: whole on every device."""
        return *self.buffers, *self.constants

    def part(self, ops: Sequence[Op], leaving: Iterable[int] = ()) -> "StepGraph":
        """Some of the ops with those inputs that they, or what leaves, need: without records,
        nothing else leaves.
        """
        leaving = tuple(dict.fromkeys(leaving))
        read = {value for op in ops for value in op.operands}.union(leaving)
        return replace(
            self,
            parameters=tuple(p for p in self.parameters if p.value in read),
            buffers=tuple(replace(b, update=None) for b in self.buffers if b.value in read),
            batch=tuple(b for b in self.batch if b.value in read),
            constants=tuple(c for c in self.constants if c.value in read),
            ops=tuple(ops),
            received=(),
            sent=(),
        ).bare(leaving)

    def part_for(self, leaving: Collection[int]) -> "StepGraph":
        """The part that computes what leaves it, and nothing else."""
        return self.part([self.ops[index] for index in self.ancestors(leaving)], leaving)

    def bare(self, leaving: Iterable[int], loss: int = -1) -> "StepGraph":
        """The graph without records: what leaves it is its output. (A loss of its own is part of
        what leaves.)
        """
        output = tuple(ValueRef(value) for value in dict.fromkeys(leaving))
        return replace(self, output=output, logs=(), metrics=(), checks=(), appended=(), loss=loss)

    def ancestors(self, values: Collection[int]) -> list[int]:
        """See `ancestors`."""
        return ancestors(self.ops, values)

    @cached_property
    def dtypes_read(self) -> dict[str, torch.dtype]:
        """By name of a parameter the half-precision dtype that all of its uses cast it to, else its
        own dtype.
        """
        kept = {*self.escaping, *self.sent}
        dtypes: dict[str, torch.dtype] = {}
        for given in self.parameters:
            # The dtypes that uses cast it to; None stands for a use without a cast.
            read_as: set[torch.dtype | None] = set()
            for op, _ in self.consumers.get(given.value, ()):
                call = self.ops[op].call
                is_cast = call.target is torch.ops.aten.to.dtype
                read_as.add(call.results[0].dtype if is_cast else None)
            dtype = None
            if len(read_as) == 1 and given.value not in kept:
                (dtype,) = read_as
            dtypes[given.name] = (
                dtype if dtype in (torch.bfloat16, torch.float16) else given.meta.dtype
            )
        return dtypes

    @cached_property
    def consumers(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Value index -> the (op index, operand position) pairs that read it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for op_index, op in enumerate(self.ops):
            for position, value in enumerate(op.operands):
                found.setdefault(value, []).append((op_index, position))
        return {value: tuple(uses) for value, uses in found.items()}

    @cached_property
    def makers(self) -> dict[int, int]:
        """Value -> index of the op that makes it."""
        return {value: index for index, op in enumerate(self.ops) for value in op.results}

    @cached_property
    def last_readers(self) -> dict[int, int]:
        """Op-made value -> index of the last op that reads it, or that a record with it has to wait
        for; -1: none.
        """
        maker = self.makers
        last = {
            value: max((op for op, _ in self.consumers.get(value, ())), default=-1)
            for value in maker
        }
        # A record is read where its last value is made.
        for record in (*self.logs, *self.metrics, *self.appended):
            made = [value for value in values_of(record) if value in maker]
            read_at = max((maker[value] for value in made), default=-1)
            for value in made:
                last[value] = max(last[value], read_at)
        return last

    @cached_property
    def escaping(self) -> tuple[int, ...]:
        """Values that leave it (loss, output, appended, logs, metrics, checks, buffers), once each,
        ascending.
        """
        found = {
            *([self.loss] if self.loss >= 0 else []),
            *(b.update for b in self.buffers if b.update is not None),
        }
        found.update(values_of((self.output, self.appended, self.logs, self.metrics, self.checks)))
        return tuple(sorted(found))

    @cached_property
    def kept_buffers(self) -> frozenset[str]:
        """Buffers that the step changes, and of which the values before it are needed after it: by
        the backward, or
        where they leave it, as copies that the graph has no op for."""
        shown = {b.value: b.name for b in self.buffers if b.update not in (None, b.value)}
        kept = {name for value, name in shown.items() if value in self.escaping}
        for op in self.ops:
            for name in [shown[value] for value in op.operands if value in shown]:
                is_view = getattr(op.call.target, "is_view", False)
                shown |= {value: name for value in op.results if is_view}
                trains = any(self.values[value].requires_grad for value in op.operands)
                if trains or (is_view and not set(self.escaping).isdisjoint(op.results)):
                    kept.add(name)
        return frozenset(kept)

    @cached_property
    def graph_digest(self) -> str:
        """Hash of the computation: ops, wiring, constants, outputs. Parameter and batch shapes are
        hashed apart.
        """
        lines = [
            f"{op.call.target_name}{op.call.args}{op.call.kwargs}{op.operands}->{op.results}"
            for op in self.ops
        ]
        # Functions among the logs' arguments (`reduce_fx`) count by their code: addresses differ
        # between processes.
        lines += [
            stable_text(
                (self.loss, self.output, self.logs, self.metrics, self.checks, self.appended)
            )
        ]
        lines += [str([(b.value, b.name, b.update) for b in self.buffers])]
        lines += [str([(c.value, c.digest) for c in self.constants])]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @cached_property
    def parameter_digest(self) -> str:
        """Hash of parameter names, shapes, dtypes and trainability."""
        return _digest(
            [
                (p.names, p.meta.shape, str(p.meta.dtype), p.meta.requires_grad)
                for p in self.parameters
            ]
        )

    @cached_property
    def batch_digest(self) -> str:
        """Hash of the global batch's shapes and dtypes."""
        return _digest([(b.leaf, b.meta.shape, str(b.meta.dtype), b.batch_dim) for b in self.batch])


def ancestors(ops: Sequence[Op], values: Iterable[int]) -> list[int]:
    """Indices of the ops that `values` depend on, their makers included, ascending."""
    needed, found = set(values), []
    for index, op in reversed(list(enumerate(ops))):
        if needed.intersection(op.results):
            found.append(index)
            needed.update(op.operands)
    return found[::-1]


def _digest(rows: list[Any]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def run_step(
    step: StepGraph,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Any],
    batch_leaves: Sequence[Tensor],
    received: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Every value of the step, run on whole tensors on one device: what a pipeline does once a
    step.

    Args:
        parameters: by any of the names that the parameter has, in the module's shapes (all tensors
            on one device).
        buffers: by name; the counters under `COUNTERS`, where the step computes with them.
        batch_leaves: global tensors in `step.batch` order.
        received: the values that others hand in (`step.received`).

    Returns:
        Value index -> tensor; `step.escaping` says which leave the graph.
    """
    received = received or {}
    values: dict[int, Tensor] = {value: received[value] for value in step.received}
    for entry in step.parameters:
        given = next(parameters[name] for name in entry.names if name in parameters)
        values[entry.value] = (
            given.view(entry.meta.shape) if entry.module_shape is not None else given
        )
    for buffer in step.buffers:
        values[buffer.value] = buffers[buffer.name]
    for leaf, tensor in zip(step.batch, batch_leaves, strict=True):
        values[leaf.value] = tensor
    # Factories (arange, zeros) have no device of their own in the graph.
    device = next((tensor.device for tensor in values.values()), torch.get_default_device())
    for constant in step.constants:
        values[constant.value] = constant.tensor.to(device)
    with device:  # for the Python functions among the targets; ATen's overloads do not look at it
        for op in step.ops:
            call = at_counters(op.call, buffers.get(COUNTERS, {})).on(device)
            out = call.call(*(values[i] for i in op.operands))
            results = (
                [t for t in out if isinstance(t, Tensor)]
                if isinstance(out, tuple | list)
                else [out]
            )
            values.update(zip(op.results, results, strict=True))
    return values
