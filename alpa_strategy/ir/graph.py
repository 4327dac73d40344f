"""StepGraph: one training step as data, forward only. Autograd computes the backward at run time.

The graph is in single assignment form: ops read and write numbered values, nothing is mutated. A
buffer update (BatchNorm statistics) is an output that the runtime writes back. Shapes are those of
the **global** batch: the step as one device runs it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.ir.guards import Guard, ValueGuard
from alpa_strategy.ir.of_ranks import OfRanks
from alpa_strategy.ir.op import OpCall, TensorMeta
from alpa_strategy.ir.places import Place

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class ValueRef:
    """Stands for value `index` of the graph in output structures and log arguments."""

    index: int


@dataclass(frozen=True)
class LeafRef:
    """Stands in an output structure for leaf `leaf` of the current batch, which is no tensor."""

    leaf: int


@dataclass(frozen=True)
class Check:
    """A branch of the step that only raises an error: `bool(value)` must be `expected`."""

    value: ValueRef
    expected: bool

    # The user's line.
    source: str

    # Class of the error, such as `builtins.ValueError`.
    raised: str = "builtins.RuntimeError"

    # Message of the error.
    text: str = ""


@dataclass(frozen=True)
class ParameterInput:
    """A parameter of the module."""

    value: int

    # All its names in the module tree; tied weights have several.
    names: tuple[str, ...]

    # The shape is that in the step.
    meta: TensorMeta

    # Shape in the module, if the step sees its first dim as two: segments, and rows of a segment
    # (capture/rewrites.py).
    module_shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The first of its names. Plans and checkpoints use this one."""
        return self.names[0]

    @property
    def num_segments(self) -> int:
        """Number of equal segments in the step (query, key and value in one weight: 3)."""
        return 1 if self.module_shape is None else self.meta.shape[0]


@dataclass(frozen=True)
class BufferInput:
    """A buffer (or constant tensor attribute) that the step reads."""

    value: int
    name: str
    meta: TensorMeta

    # The value that is written back after the step, if any. Each rank writes the value of its own
    # batch if it is among `StepGraph.of_ranks`.
    update: int | None = None

    # Whether it is a parameter of the module: one that only the step changes (the teacher that
    # follows a student), and no optimizer.
    is_parameter: bool = False


@dataclass(frozen=True)
class BatchInput:
    """One tensor leaf of the batch."""

    value: int

    # Its index in `torch.utils._pytree.tree_leaves(batch)`.
    leaf: int

    meta: TensorMeta

    # 0: the ranks' tensors follow one another along dim 0 (its global size is world size x the
    # loader's). None: every rank has the same tensor.
    batch_dim: int | None

    # Whether micro-batches split dim 0. They also may if it has no samples: the walk over the ops
    # proves that each micro-batch is right (microbatch/states.py).
    is_split: bool = True


@dataclass(frozen=True)
class ConstantInput:
    """A tensor that the step reads and that is made outside of it, and is no registered buffer."""

    value: int
    tensor: Any = field(compare=False)
    meta: TensorMeta
    digest: str


@dataclass(frozen=True)
class Op:
    """One op of the step."""

    name: str
    call: OpCall

    # Value indices, in the order of `call.operands` and `call.results`.
    operands: tuple[int, ...]
    results: tuple[int, ...]

    # Path of the submodule that called it ("" for the LightningModule itself).
    module: str = ""

    # The user's line.
    source: str = ""


@dataclass(frozen=True)
class LogRecord:
    """One `self.log` call."""

    name: str

    # A ValueRef, a plain number, or a nested structure of both.
    value: Any

    # (name, value) of the other arguments.
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class MetricRecord:
    """One call of a torchmetrics object inside the step."""

    # Name of the metric in the module tree.
    metric: str

    # `forward` or `update`
    method: str

    # Arguments, with ValueRefs in place of tensors.
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class MetricRef:
    """Stands in log records for a torchmetrics object."""

    metric: str

    # "metric": the object itself was logged. "value": the result of its last `forward` or
    # `compute`.
    kind: str = "metric"

    # The item of a MetricCollection.
    key: str | None = None


def stable_text(value: Any) -> str:
    """Return `repr(value)` without memory addresses, so that it is the same in every process.

    Functions are named. Lambdas and local functions are identified by their code.
    """
    if isinstance(value, dict):
        items = [f"{stable_text(key)}: {stable_text(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(stable_text, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        field_values = [getattr(value, item.name) for item in fields(value)]
        return f"{type(value).__qualname__}{stable_text(field_values)}"
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
    """Return a hash of a tensor's content, shape and dtype."""
    data = tensor.cpu().contiguous()
    content = b""
    if data.numel():
        # As bytes: NumPy knows no bfloat16.
        content = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    description = str((tuple(data.shape), data.dtype))
    return hashlib.sha256(content + description.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class AppendRecord:
    """The items that one step appends to a list, or the tensor that it writes into its batch."""

    # Location of the list, or of the leaf of the batch.
    place: Place

    # ValueRefs, LeafRefs, CounterRefs and plain values; of a leaf, the ValueRef of its new value.
    items: tuple[Any, ...]


@dataclass(frozen=True)
class SetRecord:
    """An attribute that one step sets (`self.aux_loss = loss`)."""

    # Location of the attribute.
    place: Place

    # A structure with ValueRefs, LeafRefs, CounterRefs and plain values.
    value: Any


def values_of(node: Any) -> tuple[int, ...]:
    """Return the value indices in an output structure or in records, in order, each once.

    Records are those of logs, metrics, lists, attributes and checks.
    """
    indices: dict[int, None] = {}
    for leaf in pytree.tree_leaves(node):
        if isinstance(leaf, ValueRef):
            indices[leaf.index] = None
        elif isinstance(leaf, LogRecord | MetricRecord | AppendRecord | SetRecord | Check):
            indices |= dict.fromkeys(values_of(list(vars(leaf).values())))
    return tuple(indices)


@dataclass(frozen=True)
class StepGraph:
    """A captured step."""

    # Metadata of every value: inputs first, then op results, in order of definition.
    values: tuple[TensorMeta, ...]

    # The inputs.
    parameters: tuple[ParameterInput, ...]
    buffers: tuple[BufferInput, ...]
    batch: tuple[BatchInput, ...]
    constants: tuple[ConstantInput, ...]

    # In execution order.
    ops: tuple[Op, ...]

    # Value index of the loss (a scalar); -1 in a stage without it.
    loss: int

    # The return value of the step, with ValueRefs in place of tensors: a plain ValueRef, or a dict
    # with "loss".
    output: Any

    # The step's `self.log` calls, in order.
    logs: tuple[LogRecord, ...] = ()

    # The step's torchmetrics calls, in order.
    metrics: tuple[MetricRecord, ...] = ()

    # Samples of the global batch.
    batch_size: int = 0

    # `rank`: every rank loads its local samples; `global`: every rank loads the global batch.
    batch_scope: str = "rank"

    # Of a stage: the values from earlier stages (or a prologue), in the layouts of its plan. Their
    # indices are those of the full step.
    received: tuple[int, ...] = ()

    # Of `received`: those that are made of buffers and constants alone (rotary tables, masks). They
    # are small, and every device gets them in full.
    received_constants: tuple[int, ...] = ()

    # Of a stage: the values that later stages need.
    sent: tuple[int, ...] = ()

    # Lines for the user, shown with the plan.
    notes: tuple[str, ...] = ()

    # Conditions on counters that the step's Python evaluated. If one changes, the step is captured
    # again.
    guards: tuple[Guard, ...] = ()

    # Other values that the step read: attributes, globals, closures, the Trainer's. If one changes,
    # the step is captured again.
    attributes: tuple[ValueGuard, ...] = ()

    # (index, value as text) of the batch leaves that the step read and that are no tensors.
    # Likewise.
    leaves: tuple[tuple[int, str], ...] = ()

    # Locations of numbers that change from step to step. They are read when a step starts and are
    # counters, named by their labels.
    numbers: tuple[Place, ...] = ()

    # Attributes with tensors that one step leaves for the next. Their leaves are inputs, and follow
    # those of the batch.
    states: tuple[Place, ...] = ()

    # Conditions that must hold after the step.
    checks: tuple[Check, ...] = ()

    # Attributes that the step sets, each time to the same value.
    stored: tuple[ValueGuard, ...] = ()

    # Items that the step appends to lists of the module.
    appended: tuple[AppendRecord, ...] = ()

    # Attributes of modules that the step sets, each time to another value.
    assigned: tuple[SetRecord, ...] = ()

    # (value index, how it holds the ranks' values) of values that leave the step. All others that
    # leave it are the same on every rank.
    of_ranks: tuple[tuple[int, OfRanks], ...] = ()

    # Value index of the loss in the output, if each rank has a loss of its own: `loss` is their
    # mean. -1: it is `loss`.
    loss_of_ranks: int = -1

    @property
    def constant_inputs(self) -> tuple[BufferInput | ConstantInput, ...]:
        """Buffers and constants: the inputs that every device has in full."""
        return *self.buffers, *self.constants

    def part(self, ops: Sequence[Op], leaving: Iterable[int] = ()) -> "StepGraph":
        """Return the graph of some of the ops, without records, updates of buffers, and values
        received from or sent to other stages.

        Its inputs are those that the ops read or that leave it.

        Args:
            leaving: value indices of its outputs.
        """
        leaving = tuple(dict.fromkeys(leaving))
        read = {value for op in ops for value in op.operands}.union(leaving)
        part = replace(
            self,
            parameters=tuple(p for p in self.parameters if p.value in read),
            buffers=tuple(replace(b, update=None) for b in self.buffers if b.value in read),
            batch=tuple(b for b in self.batch if b.value in read),
            constants=tuple(c for c in self.constants if c.value in read),
            ops=tuple(ops),
            received=(),
            received_constants=(),
            sent=(),
        )
        return part.bare(leaving)

    def part_for(self, leaving: Collection[int]) -> "StepGraph":
        """Return the graph that computes the values `leaving`, and nothing else."""
        return self.part([self.ops[index] for index in self.ancestors(leaving)], leaving)

    def bare(self, leaving: Iterable[int], loss: int = -1) -> "StepGraph":
        """Return the graph without records, with the values `leaving` as its output.

        They leave it in full: values of all ranks stay together.

        Args:
            loss: value index of its loss, which is one of `leaving`.
        """
        output = tuple(ValueRef(value) for value in dict.fromkeys(leaving))
        return replace(
            self,
            output=output,
            logs=(),
            metrics=(),
            checks=(),
            appended=(),
            assigned=(),
            loss=loss,
            of_ranks=(),
            loss_of_ranks=-1,
        )

    def ancestors(self, values: Collection[int]) -> list[int]:
        """Return the indices of the ops that `values` depend on, ascending."""
        return ancestors(self.ops, values)

    @cached_property
    def dtypes_read(self) -> dict[str, torch.dtype]:
        """Parameter name -> the dtype in which the step uses it.

        That is a half-precision dtype if all uses cast the parameter to it and it does not leave
        the graph, else its stored dtype.
        """
        leaving = {*self.escaping, *self.sent}
        dtypes: dict[str, torch.dtype] = {}
        for parameter in self.parameters:
            # The dtypes that uses cast it to; None stands for a use without a cast.
            read_as: set[torch.dtype | None] = set()
            for op, _ in self.consumers.get(parameter.value, ()):
                call = self.ops[op].call
                is_cast = call.target is torch.ops.aten.to.dtype
                read_as.add(call.results[0].dtype if is_cast else None)

            dtypes[parameter.name] = parameter.meta.dtype
            if len(read_as) == 1 and parameter.value not in leaving:
                (cast,) = read_as
                if cast in (torch.bfloat16, torch.float16):
                    dtypes[parameter.name] = cast
        return dtypes

    @cached_property
    def consumers(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Value index -> the (op index, operand position) pairs that read it."""
        consumers: dict[int, list[tuple[int, int]]] = {}
        for op_index, op in enumerate(self.ops):
            for position, value in enumerate(op.operands):
                consumers.setdefault(value, []).append((op_index, position))
        return {value: tuple(uses) for value, uses in consumers.items()}

    @cached_property
    def makers(self) -> dict[int, int]:
        """Value index -> index of the op that computes it."""
        return {value: index for index, op in enumerate(self.ops) for value in op.results}

    @cached_property
    def made_of_constants(self) -> frozenset[int]:
        """Values of ops that are made of buffers and constants alone, without random numbers."""
        values = self.values_of_constants(lambda call: call.is_deterministic)
        return values.intersection(self.makers)

    def values_of_constants(self, is_repeatable: Callable[[OpCall], bool]) -> frozenset[int]:
        """Return buffers, constants, received constants, and the values that are computed from
        these alone.

        Args:
            is_repeatable: whether a call has the same results for the same operands.
        """
        values = {constant.value for constant in self.constant_inputs}
        values.update(self.received_constants)
        for op in self.ops:
            if values.issuperset(op.operands) and is_repeatable(op.call):
                values.update(op.results)
        return frozenset(values)

    def name_of(self, value: int) -> str:
        """Return the name of a value: of the parameter that it is made of, or of its op; `an input`
        for others.
        """
        parameters = {parameter.value: parameter.name for parameter in self.parameters}
        if value in parameters:
            return parameters[value]
        if value not in self.makers:
            return "an input"
        op = self.ops[self.makers[value]]
        # A cast or a view of a parameter.
        if len(op.operands) == 1 and op.operands[0] in parameters:
            return parameters[op.operands[0]]
        return f"{op.name} of {op.module}" if op.module else op.name

    @cached_property
    def last_readers(self) -> dict[int, int]:
        """Value index -> index of the last op that reads it, or -1 if none does; of all results of
        ops.

        A record reads its values when the last of them has been computed.
        """
        maker = self.makers
        last = {}
        for value in maker:
            readers = [op for op, _ in self.consumers.get(value, ())]
            last[value] = max(readers, default=-1)

        for record in (*self.logs, *self.metrics, *self.appended, *self.assigned):
            computed = [value for value in values_of(record) if value in maker]
            read_at = max((maker[value] for value in computed), default=-1)
            for value in computed:
                last[value] = max(last[value], read_at)
        return last

    @cached_property
    def escaping(self) -> tuple[int, ...]:
        """Indices of the values that leave the graph, each once, ascending.

        These are the loss, the output, buffer updates, and values of records.
        """
        leaving = {buffer.update for buffer in self.buffers if buffer.update is not None}
        if self.loss >= 0:
            leaving.add(self.loss)
        records = (self.output, self.appended, self.assigned, self.logs, self.metrics, self.checks)
        leaving.update(values_of(records))
        return tuple(sorted(leaving))

    @cached_property
    def kept_buffers(self) -> frozenset[str]:
        """Names of the buffers that the step updates and whose former values are still needed.

        They are needed if the backward reads them, or if they leave the graph: it has no op that
        copies them.
        """
        # Value index of a buffer that is updated, or of a view of it -> the buffer's name.
        names = {b.value: b.name for b in self.buffers if b.update not in (None, b.value)}
        needed = {name for value, name in names.items() if value in self.escaping}
        for op in self.ops:
            for name in [names[value] for value in op.operands if value in names]:
                is_view = getattr(op.call.target, "is_view", False)
                if is_view:
                    names |= dict.fromkeys(op.results, name)
                has_backward = any(self.values[value].requires_grad for value in op.operands)
                leaves = is_view and not set(self.escaping).isdisjoint(op.results)
                if has_backward or leaves:
                    needed.add(name)
        return frozenset(needed)

    @cached_property
    def graph_digest(self) -> str:
        """Hash of the computation: ops, wiring, constants, outputs.

        Shapes of parameters and of the batch are not in it.
        """
        lines = []
        for op in self.ops:
            call = op.call
            lines.append(f"{call.target_name}{call.args}{call.kwargs}{op.operands}->{op.results}")

        # Functions among the logs' arguments (`reduce_fx`) are identified by their code: addresses
        # differ between processes.
        results = (self.loss, self.output, self.logs, self.metrics, self.checks, self.appended)
        lines.append(stable_text(results))
        if self.assigned:
            lines.append(stable_text(self.assigned))
        lines.append(str([(b.value, b.name, b.update) for b in self.buffers]))
        lines.append(str([(c.value, c.digest) for c in self.constants]))
        if self.of_ranks:
            lines.append(str((self.of_ranks, self.loss_of_ranks)))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @cached_property
    def parameter_digest(self) -> str:
        """Hash of parameter names, shapes, dtypes and trainability."""
        rows = []
        for parameter in self.parameters:
            meta = parameter.meta
            rows.append((parameter.names, meta.shape, str(meta.dtype), meta.requires_grad))
        return _digest(rows)

    @cached_property
    def batch_digest(self) -> str:
        """Hash of the global batch's shapes and dtypes."""
        return _digest([(b.leaf, b.meta.shape, str(b.meta.dtype), b.batch_dim) for b in self.batch])


def ancestors(ops: Sequence[Op], values: Iterable[int]) -> list[int]:
    """Return the indices of the ops that compute `values` or that these depend on, ascending."""
    needed = set(values)
    indices = []
    for index, op in reversed(list(enumerate(ops))):
        if needed.intersection(op.results):
            indices.append(index)
            needed.update(op.operands)
    return indices[::-1]


def _digest(rows: list[Any]) -> str:
    """Return a hash of the rows, the same in every process."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
