"""Run the step once on fake tensors and record its ATen ops, before autograd and autocast act on
them.

`make_fx(pre_dispatch=True)` gives the same graph as torch.export (linear, layer_norm, ... are one
op each), about five times faster. The result is an fx graph with in-place ops and with markers of
grad mode and autocast; `convert` (capture.py) makes the StepGraph.
"""

import logging
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from alpa_strategy.capture import python_reads
from alpa_strategy.capture.attribute_writes import note_writes
from alpa_strategy.capture.batch_leaves import (
    have_common_size,
    same_tensors,
    size_of_batch,
)
from alpa_strategy.capture.clear_errors import clear_errors
from alpa_strategy.capture.communication import check_no_collectives
from alpa_strategy.capture.data_branches import ConstantValues
from alpa_strategy.capture.fake_question import fake_only_if
from alpa_strategy.capture.intercept import Recording, recording
from alpa_strategy.capture.kept_state import restored
from alpa_strategy.capture.lightning_adapter import LightningModule, takes_batch_idx
from alpa_strategy.capture.module_state import changed_attributes
from alpa_strategy.capture.non_tensor_inputs import (
    UnreadLeaf,
    index_of,
    may_be_unread,
    traced_with_leaves,
    value_text,
)
from alpa_strategy.capture.python_state import patched, snapshot, standing_in
from alpa_strategy.capture.snapshots import Kind, take
from alpa_strategy.capture.state_tensors import StateInputs
from alpa_strategy.capture.symbolic_scalars import FunctionsRequested, StepCounter
from alpa_strategy.capture.tracer_mode import TracerMode
from alpa_strategy.capture.uncompiled import uncompiled
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import BatchInput, BufferInput, LeafRef, ParameterInput, ValueRef
from alpa_strategy.ir.guards import ValueGuard
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.places import Place
from alpa_strategy.ir.user_code import reached_functions

# `value` is the index among the traced function's arguments.
TracedInput = ParameterInput | BufferInput | BatchInput


@dataclass(frozen=True)
class Trace:
    """The fx graph of one run of the step, and the records of that run."""

    module: fx.GraphModule

    # In the order of the graph's placeholders.
    inputs: tuple[TracedInput, ...]

    # {"output", "logs", "metrics", "buffers", "checks", "appended"}, in which ValueRefs number the
    # graph's outputs.
    results: dict[str, Any]

    recording: Recording

    # Node -> (path of the submodule that called it, the user's line).
    origins: Mapping[fx.Node, tuple[str, str]]

    # The device of the fake tensors.
    device: torch.device

    # Samples of the batch.
    batch_size: int

    # (index, value as text) of the batch leaves that the step's Python read.
    read_leaves: tuple[tuple[int, str], ...] = ()

    # The module's parameters and buffers, in the order of the first inputs.
    module_tensors: tuple[Tensor, ...] = ()

    # The leaves of the batch, then of the tensors that one step leaves for the next.
    leaves: tuple[Any, ...] = ()

    # As of `StepCall`.
    state: frozenset[str] | None = None


@dataclass(frozen=True)
class StepCall:
    """The call that is captured: `module.training_step(batch, batch_idx)`, and its context."""

    module: LightningModule
    batch: Any

    batch_idx: int

    # As of `capture_step`.
    context: Callable[[], AbstractContextManager[Any]]

    # Lists to which the step is known to append.
    appended: tuple[Place, ...] = ()

    # Globals of code that computes with counters, see `functions_of_counters`.
    namespaces: tuple[dict[str, Any], ...] = ()

    # Numbers that change between steps.
    numbers: tuple[Place, ...] = ()

    # Attributes with tensors that one step leaves for the next.
    states: tuple[Place, ...] = ()

    # Names of the parameters that are state of the step; None: those that it writes to.
    state: frozenset[str] | None = None

    # Called with the batch instead of `module.training_step`, if given.
    step: Callable[[Any], Any] | None = None


def trace_step(call: StepCall) -> Trace:
    """Run the step of `call` on fake tensors, and return its trace.

    Batch leaves that are no tensors have their values only if the step reads them.

    Raises:
        CaptureError: the step cannot be captured. The message has the user's line.
    """
    while True:
        try:
            return traced_with_leaves(call.batch, partial(_trace_once, call))
        except FunctionsRequested as request:
            call = replace(call, namespaces=(*call.namespaces, request.namespace))


def names_by_tensor(module: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Return every parameter and buffer once, parameters first, with all its names."""
    by_id: dict[int, tuple[Tensor, list[str]]] = {}
    for group in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in group:
            by_id.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [(tensor, tuple(names)) for tensor, names in by_id.values()]


def _trace_once(call: StepCall, read: frozenset[int], seen: set[int]) -> Trace:
    """Return one trace.

    Args:
        read: indices of the batch leaves that have their values.
        seen: gets the indices of the other leaves that the step reads.
    """
    return _Tracing(call, read, seen).trace()


class _Tracing:
    """One run of the step under `make_fx`. Args: as of `_trace_once`."""

    def __init__(self, call: StepCall, read: frozenset[int], seen: set[int]) -> None:
        self.call = call
        self.module = call.module
        self.read = read
        self.seen = seen

        self.device = _capture_device(call.module, call.context)
        self.leaves, self.batch_spec = pytree.tree_flatten(call.batch)
        self.batched = have_common_size(self.leaves)
        self.batch_size = size_of_batch(self.leaves, self.batched)
        self.states = StateInputs(call.module, call.states)

        # Leaf -> the first leaf that is the same tensor. Calls of submodules keep their inputs.
        self.same = {} if call.step else same_tensors(self.leaves)
        self.names = names_by_tensor(call.module)

        # Node -> (path of the submodule, the user's line).
        self.origins: dict[fx.Node, tuple[str, str]] = {}

        # Index of a leaf that changes between steps -> its label.
        self.changing = {place.leaf: str(place) for place in call.numbers}

    def trace(self) -> Trace:
        """Run the step and return the trace; CaptureError if it cannot be traced."""
        call = self.call
        module = self.module

        # Constants of the step are real tensors.
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            inputs, fakes = _fake_inputs(
                self.names, *self._tensors_of_step(), self.device, self.same
            )
        self.inputs = inputs

        with (
            recording(module, self.device, call.appended, call.namespaces) as record,
            python_reads.counters_for(
                module, call.numbers, record.counter, record.assigned
            ) as stand_ins,
            # It logs tracebacks of ops that are only tried.
            patched([(vars(logging.getLogger("torch._subclasses.fake_tensor")), "disabled", True)]),
            generators_kept(),
            clear_errors(),
            uncompiled(),
            mode,
            torch.enable_grad(),
        ):
            self.record = record
            self.stand_ins = stand_ins
            self.buffers = {}
            for entry in inputs:
                if isinstance(entry, BufferInput):
                    self.buffers[entry.value] = (entry.name, self.names[entry.value][0])
            self.known = ConstantValues(self.buffers, record.numbers.is_symbolic)

            # "real": the inputs are fake already. Pre-dispatch: above autograd and autocast, so
            # linear stays one op.
            module_graph = make_fx(self._run, tracing_mode="real", pre_dispatch=True)(*fakes)
            check_no_collectives(module_graph.graph, self.origins)
            # After the trace: while it runs, ops must see plain numbers.
            record.numbers.put()

        if call.step is not None and (record.assigned or record.states):
            places = (*record.assigned, *record.states)
            raise changed_attributes(place.attribute for place in places)
        record.attributes = self._attribute_guards()
        return Trace(
            module_graph,
            tuple(inputs),
            self.results,
            record,
            self.origins,
            self.device,
            self.batch_size,
            self._read_leaves(),
            tuple(tensor for tensor, _ in self.names),
            tuple(self._tensors_of_step()[0]),
            call.state,
        )

    def _run(self, *tensors: Tensor) -> list[Tensor]:
        """Run the step on `tensors`, one per input, and return the tensors of its results.

        `self.results` gets the structure of the results, `self.reads` the attributes that were
        read. CaptureError if the step changes what it may not.
        """
        module = self.module
        record = self.record
        of_module = {}
        for (tensor, _), fake in zip(self.names, tensors, strict=False):
            of_module[tensor] = fake
        remaining = iter(tensors[len(self.names) :])
        batch = self._batch(remaining)

        with (
            standing_in(module, of_module),
            self.states.standing_in(remaining),
            self.call.context(),
            TracerMode(module, self.origins, self.device, self.known, record),
            fake_only_if(self.known.is_unknown),
        ):
            arguments = self._arguments(batch)
            before = _module_inputs(module, self.inputs)
            with python_reads.attribute_reads(module) as reads:
                if self.call.step is None:
                    output = module.training_step(*arguments)
                else:
                    output = self.call.step(batch)
            record.traced_by(get_proxy_mode(), self.buffers)
            _check_added(module, self.call.batch, batch)
            self.reads = reads
            in_module = tensors[: len(self.names)]
            known = self.known.value_of
            note_writes(
                module,
                record,
                record.snapshots,
                reads,
                in_module,
                known,
                self.stand_ins,
                self.states,
            )
            after = _module_inputs(module, self.inputs)
            reassigned = _reassigned_buffers(before, after, self.inputs)

        results: dict[str, Any] = {
            "output": output,
            "logs": record.logs,
            "metrics": record.metrics,
            "buffers": reassigned,
            "checks": record.checks,
            "appended": [appended._items for appended in record.appended.values()],
            "assigned": list(record.assigned.values()),
        }
        outputs: list[Tensor] = []
        self.results = pytree.tree_map(partial(_placeholder, outputs), results)
        return outputs

    def _tensors_of_step(self) -> tuple[list[Any], tuple[bool, ...]]:
        """Return the leaves of the batch, then of states; and for every tensor, whether it has the
        batch's size.
        """
        states = self.states.leaves
        num_states = sum(isinstance(leaf, Tensor) for leaf in states)
        return [*self.leaves, *states], (*self.batched, *[False] * num_states)

    def _batch(self, tensors: Iterator[Tensor]) -> Any:
        """Return the step's batch: the next `tensors` (one for all places of the same tensor), and
        other leaves with values or without.
        """
        leaves: list[Any] = []
        for index, leaf in enumerate(self.leaves):
            if self.same.get(index, index) != index:
                leaves.append(leaves[self.same[index]])
            elif isinstance(leaf, Tensor):
                leaves.append(next(tensors))
            elif index in self.changing:
                leaves.append(self.record.counter(leaf, self.changing[index]))
            elif may_be_unread(leaf) and index not in self.read:
                leaves.append(UnreadLeaf(index, self.seen))
            else:
                leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self.batch_spec)

    def _arguments(self, batch: Any) -> list[Any]:
        """Return the arguments of `training_step`: the batch, and a counter if it takes
        `batch_idx`.

        They are passed by position, as the Trainer does: users choose their names.
        """
        arguments = [batch]
        step = self.module.training_step
        if takes_batch_idx(step):
            arguments.append(self.record.counter(self.call.batch_idx, "batch_idx"))
        return arguments

    def _attribute_guards(self) -> tuple[ValueGuard, ...]:
        """Return guards on all values that the step's Python read, besides counters and leaves."""
        module = self.module
        record = self.record
        changing = {*record.appended, *record.assigned, *self.call.states}
        changing -= {*self.call.numbers, *record.guarded}
        attributes = python_reads.attribute_guards(module, self.reads, changing)
        # A snapshot equals its buffer until that is replaced or changed in place.
        buffers = {}
        for name in sorted(self.known.asked_buffers):
            buffers[name] = snapshot(module.get_buffer(name))
        return (
            *python_reads.freed(attributes, self.call.numbers),
            *self.states.guards(),
            *python_reads.guards_at(module, buffers),
            *python_reads.global_guards(module, self.reads),
            *python_reads.guards_at(module._trainer, record.trainer_reads, "trainer."),
        )

    def _read_leaves(self) -> tuple[tuple[int, str], ...]:
        """Return (index, value as text) of the leaves that the step's Python read, without tensors,
        changing numbers and leaves of kinds that always enter with their value.
        """
        read_leaves = []
        for index in sorted(self.read - self.changing.keys()):
            if may_be_unread(self.leaves[index]):
                read_leaves.append((index, value_text(self.leaves[index])))
        return tuple(read_leaves)


def _check_added(module: LightningModule, batch: Any, after: Any) -> None:
    """Raise CaptureError if the step adds an item to its batch that a hook reads.

    Hooks get the batch as it was loaded. Only a batch that is a dict is checked.

    Args:
        batch, after: the batch before and after the step.
    """
    added = after.keys() - batch.keys() if isinstance(batch, dict) else set()
    if not added:
        return
    for user in (module, *getattr(module._trainer, "callbacks", ())):
        constants: set[Any] = set()
        for function in reached_functions([user.on_train_batch_end]):
            constants.update(function.__code__.co_consts)
        read = added & constants
        if read:
            raise CaptureError(
                f"training_step puts {read} into its batch, for"
                f" {type(user).__name__}.on_train_batch_end",
                "return it from training_step: its result is passed to on_train_batch_end as"
                " outputs",
            )


def _fake_inputs(
    names: list[tuple[Tensor, tuple[str, ...]]],
    leaves: list[Any],
    rows_flags: tuple[bool, ...],
    device: torch.device,
    same: Mapping[int, int],
) -> tuple[list[TracedInput], list[Tensor]]:
    """Return the inputs of the traced function, and a fake tensor for each.

    These are parameters and buffers in the order of `names`, then the batch's tensors, each once.

    Args:
        names: parameters and buffers, with all their names.
        leaves: of the batch.
        rows_flags: for each tensor among them, whether it has a batch dim.
        same: leaf -> the first leaf that is the same tensor.

    Raises:
        CaptureError: a tensor of the batch is sparse.
    """
    inputs: list[TracedInput] = []
    fakes: list[Tensor] = []
    for tensor, tensor_names in names:
        fake = torch.empty_strided(
            tensor.shape, _strides(tensor), dtype=tensor.dtype, device=device
        )
        meta = TensorMeta(tuple(tensor.shape), tensor.dtype, bool(tensor.requires_grad))
        if isinstance(tensor, nn.Parameter):
            fakes.append(nn.Parameter(fake, meta.requires_grad))
            inputs.append(ParameterInput(len(inputs), tensor_names, meta))
        else:
            fakes.append(fake)
            inputs.append(BufferInput(len(inputs), tensor_names[0], meta))
    flags = iter(rows_flags)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.layout is not torch.strided:
            raise CaptureError(
                f"the batch holds a tensor of layout {leaf.layout}", "let it hold dense ones"
            )
        is_batched = next(flags)
        if same.get(index, index) != index:
            continue
        shape = tuple(leaf.shape)
        fakes.append(
            torch.empty(shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)
        )
        meta = TensorMeta(shape, leaf.dtype, leaf.requires_grad)
        inputs.append(BatchInput(len(inputs), index, meta, 0 if is_batched else None))
    return inputs, fakes


def _placeholder(outputs: list[Tensor], leaf: Any) -> Any:
    """Return the leaf that replaces `leaf` in the structure of results.

    A tensor is appended to `outputs` and replaced by a ValueRef, an unread leaf of the batch by a
    LeafRef, a StepCounter by its expression. Others stay.
    """
    index = index_of(leaf)
    if index is not None:
        return LeafRef(index)
    if type(leaf) is StepCounter:
        return leaf.expression
    if not isinstance(leaf, Tensor):
        return leaf
    outputs.append(leaf)
    return ValueRef(len(outputs) - 1)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides.

    A parameter without memory is one expanded element. It gets contiguous strides.
    """
    if 0 in tensor.stride() and tensor.numel() > 1:
        return torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride()


def _module_inputs(module: nn.Module, inputs: list[TracedInput]) -> dict[str, Any]:
    """Return the module's current parameters and buffers among `inputs`, by name."""
    names = [entry.name for entry in inputs if not isinstance(entry, BatchInput)]
    return {name: operator.attrgetter(name)(module) for name in names}


def _reassigned_buffers(
    before: dict[str, Any], after: dict[str, Any], inputs: list[TracedInput]
) -> dict[str, Tensor]:
    """Return the buffers that the step replaced by another tensor (`self.buffer = ...`), by name.

    Args:
        before, after: the module's parameters and buffers before and after the step.

    Raises:
        CaptureError: it replaced a parameter, or the new tensor does not fit the buffer's memory.
    """
    buffers = {entry.name for entry in inputs if isinstance(entry, BufferInput)}
    replaced = {name: tensor for name, tensor in after.items() if tensor is not before[name]}
    for name, tensor in replaced.items():
        is_buffer = name in buffers and isinstance(tensor, Tensor)
        if not is_buffer or _kind(tensor) != _kind(before[name]):
            raise CaptureError(
                f"the step puts another parameter, shape or dtype in the place of {name}",
                "keep shape and dtype of buffers, and leave parameters to the optimizer and to"
                " hooks",
            )
    return replaced


def _kind(tensor: Tensor) -> tuple[bool, bool, bool, torch.Size]:
    """Return shape and kind of numbers: a tensor can be copied into one that has the same."""
    dtype = tensor.dtype
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool, tensor.shape


def _capture_device(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]]
) -> torch.device:
    """Return the device of the fake tensors. Tracing allocates no memory on it.

    It is the first parameter's device if that is an accelerator. Else it is a GPU if `context`
    casts for GPUs and there is one, else the CPU.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type not in ("meta", "cpu"):
        return device
    with context():
        for_gpu = torch.is_autocast_enabled("cuda")
    is_cuda = for_gpu and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def _owner_of(method: Any) -> Any:
    """Return the object of a bound method."""
    return method.__self__


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch at the end.

    Raises:
        CaptureError: the step drew from Python's or NumPy's: its numbers would be constants of the
            graph.
    """
    refused = {
        "random": _owner_of(random.random),
        "numpy.random": _owner_of(np.random.rand),
    }
    states = [take(Kind.STATE, name, generator) for name, generator in refused.items()]
    states.append(take(Kind.STATE, "torch", torch.default_generator, is_noticed=False))
    with restored(states) as drawn:
        yield
    if drawn:
        raise CaptureError(
            f"training_step draws numbers from {' and '.join(drawn)}: the captured step would"
            " repeat the first ones forever",
            "draw with torch (torch.rand, torch.randint) and choose with torch.where, or draw in"
            " the dataset",
        )
