"""Convert the fx graph of a trace to a StepGraph: one walk over the nodes, then ops without effect
are removed.

Factories (arange, zeros, ...) and conversions to the capture device lose their `device` argument:
lowering adds one.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from alpa_strategy.capture import graph_builder, rewrites
from alpa_strategy.capture.autocast import Autocast
from alpa_strategy.capture.batch_leaves import sharing_memory
from alpa_strategy.capture.graph_builder import Builder, Memory, View, ViewStep, Write, map_refs
from alpa_strategy.capture.graph_results import (
    Numbering,
    check_memory_of,
    loss_of,
    renumbered_ops,
    with_records,
)
from alpa_strategy.capture.python_state import Same
from alpa_strategy.capture.state_parameters import StateParameters
from alpa_strategy.capture.state_tensors import WrittenConstantError
from alpa_strategy.capture.trace import Trace
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir import graph as ir
from alpa_strategy.ir.guards import ValueGuard
from alpa_strategy.ir.op import TensorMeta, bound_arguments, frozen
from alpa_strategy.ir.places import Place

aten = torch.ops.aten

# Ops whose result is their operand, and ops that copy or convert it. All overloads.
_SAME_VALUE = (aten.alias, aten.lift, aten.resolve_conj, aten.resolve_neg)
_COPIES = (aten.to, aten._to_copy, aten.type_as, aten.lift_fresh_copy)

# Ops that conjugate and transpose.
_ADJOINTS = (aten.mH, aten.adjoint, aten.matrix_H)

# Arguments that the graph does not have. The run sets its device around the ops, and the trace has
# checked that the step requests no other. Reductions support dense gradients only.
_DROPPED_ARGUMENTS = ("device", "pin_memory", "layout", "non_blocking", "sparse_grad")


class _Converter:
    """Converts the nodes of a trace to ops, in order.

    Its state are the Builder, the memory that views share, grad mode and autocast.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.builder = Builder()
        self.memory = Memory(self.builder)

        # fx.Node -> its View, or a tuple of Views and Nones.
        self.views: dict[Any, Any] = {}

        # Of the trace's inputs, in their order.
        self.input_views: list[View] = []

        self.state = StateParameters(trace.state)
        self.constants: list[ir.ConstantInput] = []
        self.constant_views: dict[str, View] = {}
        self.memory_guards: list[ValueGuard] = []
        self.grad_enabled = True

        # Value indices of the parameters.
        self.parameters: set[int] = set()

        self.autocast = Autocast(self.builder, trace.device.type, self.parameters)

        # Value index -> the same value, detached.
        self.detached: dict[int, ir.ValueRef] = {}

        # The trace's outputs.
        self.outputs: list[ir.ValueRef] = []

    # Inputs

    def add_inputs(self, placeholders: list[fx.Node]) -> None:
        """Add a value to the graph for every input: parameters, buffers, batch leaves, constants.
        CaptureError if a tensor from outside is no constant.

        Args:
            placeholders: nodes of the trace, in the order of `trace.inputs`.
        """
        for node, entry in zip(placeholders, self.trace.inputs, strict=True):
            ref = self.builder.add_value(entry.meta)
            parameter = ""
            if isinstance(entry, ir.ParameterInput):
                parameter = entry.name
                self.state.add(entry)
                self.parameters.add(ref.index)
            self.views[node] = self.memory.new(ref, parameter)
            self.input_views.append(self.views[node])
        for node in self.trace.module.graph.nodes:
            if node.op == "get_attr":
                self.views[node] = self._constant(node)

    def _constant(self, node: fx.Node) -> View:
        """Return the view of a tensor that was made outside the step. The first time, it is added
        to the graph's constants, with a guard on its memory.

        Raises:
            CaptureError: it is no constant.
        """
        name = str(node.target)
        if name in self.constant_views:
            return self.constant_views[name]

        tensor = getattr(self.trace.module, name)
        self._check_constant(tensor, node)
        # `teacher.weight.data = ...` gives a tensor other memory.
        label = f"the memory of a tensor that is no buffer ({self._source_of(node)})"
        same_memory = Same(tensor, Tensor.data_ptr)
        self.memory_guards.append(ValueGuard(label, name, {name: tensor}, same_memory))

        tensor = tensor.detach()
        meta = TensorMeta(tuple(tensor.shape), tensor.dtype)
        ref = self.builder.add_value(meta)
        digest = ir.tensor_digest(tensor)
        self.constants.append(ir.ConstantInput(ref.index, tensor, meta, digest))

        view = self.memory.new(ref)
        view.storage.is_outside = True
        self.constant_views[name] = view
        return view

    def _constant_of(self, view: View) -> Tensor:
        """Return the tensor from outside of the step whose memory a view has."""
        names = self.constant_views.items()
        name = next(name for name, other in names if other.storage is view.storage)
        tensor: Tensor = getattr(self.trace.module, name)
        return tensor

    def _check_constant(self, tensor: Tensor, node: fx.Node) -> None:
        """Raise CaptureError if `tensor` requires grad, is fake or is a wrapper of torch.func."""
        if tensor.requires_grad:
            raise CaptureError(
                "the step uses a tensor that requires grad and is not a parameter of the module"
                f" (shape {tuple(tensor.shape)})",
                "register it: assign an nn.Parameter to a module attribute (lists need"
                " nn.ParameterList)",
            )
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                "a tensor of the step is used in a way that capture does not see"
                f" ({self._source_of(node)})",
                "make it with functions of torch, and leave no tensor of an earlier step in use",
            )
        # torch.func (vmap, grad) leaves its wrapper as a constant of the graph: its layers are no
        # ops.
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise CaptureError(
                f"the step transforms a function by torch.func ({self._source_of(node)})",
                "write the mapped dim out: broadcasting, einsum, torch.bmm",
            )

    def _source_of(self, node: fx.Node) -> str:
        """Return the user's line of the first op that reads a node, or `line unknown`."""
        for user in node.users:
            if user in self.trace.origins:
                return self.trace.origins[user][1]
        return "line unknown"

    # The walk

    def run(self) -> None:
        """Convert all calls, and set `outputs` to the values of the trace's results."""
        for node in self.trace.module.graph.nodes:
            self.builder.module, self.builder.source = self.trace.origins.get(node, ("", ""))
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.outputs = [self.memory.read(self.views[n]) for n in node.args[0]]

    def _call(self, node: fx.Node) -> None:
        """Convert a node that calls a function; ops of a profiler are left out.

        Raises:
            CaptureError: it is not an op, nor a context of PyTorch that the graph can express; or
                the op cannot be captured.
        """
        target = node.target
        if target is operator.getitem:
            self.views[node] = self.views[node.args[0]][node.args[1]]
        elif target is torch._C._set_grad_enabled:
            self.grad_enabled = bool(node.args[0])
        elif target is torch.amp.autocast_mode._enter_autocast:
            self.autocast.enter(node)
        elif target is torch.amp.autocast_mode._exit_autocast:
            self.autocast.exit(node.args[0])
        elif isinstance(target, torch._ops.OpOverload):
            # record_function gives names to a profiler of this run.
            if target.namespace != "profiler":
                self._op(node, target)
        else:
            raise CaptureError(
                f"{getattr(target, '__name__', target)} ({self.builder.source}) cannot be part of a"
                " captured step",
                "write it with ordinary torch functions",
            )

    def _op(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        """Add the call of an op to the graph, or only note it if it changes views or memory.

        Args:
            node: of the traced graph; its target is replaced if it is a physical conjugate.
        """
        # A lazy conjugation is a bit of the tensor, which messages between devices do not have.
        if target is aten._conj.default:
            target = aten.conj_physical.default
            node.target = target

        if target.overloadpacket in _SAME_VALUE:
            self.views[node] = self.memory.same(self.views[node.args[0]])
            return
        # A tensor that the step has made: `torch.tensor(...)`.
        if target is aten.lift_fresh.default:
            self.views[node] = self.memory.new(self.memory.read(self.views[node.args[0]]))
            return
        is_clone = target is aten.clone.default and not node.kwargs.get("memory_format")
        if is_clone or target.overloadpacket in _COPIES:
            self._copy(node)
            return
        if target in (aten.detach.default, aten.detach_.default):
            self._detach(node)
            return
        write = graph_builder.write_of(node, target, self.builder.source)
        if write is not None:
            self._write(node, write)
            return
        self._computation(node, target)

    def _computation(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        """Convert the call of an op that computes new values."""
        args, kwargs = self._arguments(node)
        args = rewrites.with_dense_gradients(target, args)
        args = rewrites.without_empty_tensors(self.builder, target, args)
        if target is aten.broadcast_tensors.default:
            self._broadcast(node)
            return
        norm = rewrites.rewrite_norm(self.builder, target, args, kwargs)
        if norm is not None:
            self._norm_with_statistics(node, norm)
            return
        bags = rewrites.rewrite_bags(self.builder, node, args, kwargs)
        if bags is not None:
            # The other results (offsets, sizes, indices) are for the backward.
            self.views[node] = (self.memory.new(bags), None, None, None)
            return

        summed_in = self.autocast.loss_dtype(target, args)
        if summed_in is None:
            args, kwargs = self.autocast.operands(target, args, kwargs)
        traced = node.meta.get("val")
        # The op has failed, and the step has caught the error.
        if traced is None:
            return
        kwargs = rewrites.with_traced_dtype(target, args, kwargs, traced)

        result = rewrites.rewrite_loss(self.builder, target, args, kwargs, summed_in)
        if result is None and target.overloadpacket in _ADJOINTS and traced.is_conj():
            transposed = self.builder.emit(aten.mT.default, *args)
            result = self.builder.emit(aten.conj_physical.default, transposed)
        if result is None:
            result = self.builder.emit(target, *args, **kwargs)
        result = self._with_traced_dtype(result, target, args, kwargs, traced)
        self._bind(node, result, args, kwargs)

    def _with_traced_dtype(
        self,
        result: Any,
        target: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        traced: Any,
    ) -> Any:
        """Return the op's result in the dtype that it has in the step; a tuple unchanged.

        Args:
            traced: the op's result in the trace.

        Raises:
            CaptureError: the graph computes another dtype.
        """
        if not isinstance(result, ir.ValueRef):
            return result
        if self.builder.meta(result).dtype == traced.dtype:
            return result

        converted = rewrites.emit_from_whole_numbers(
            self.builder, target, args, kwargs, traced.dtype
        )
        result = converted or result
        if not isinstance(result, ir.ValueRef):
            return result
        dtype = self.builder.meta(result).dtype
        if dtype != traced.dtype:
            raise CaptureError(
                f"{target} ({self.builder.source}) gives {traced.dtype} in the step but {dtype} in"
                " the captured graph",
                "cast its operands by hand",
            )
        return result

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node, with ValueRefs of its operands' current values.

        Keyword arguments about devices and sparse gradients are left out, and those that are None.
        """

        def read(operand: fx.Node) -> Any:
            return self._read(self.views[operand])

        node_args: Any = fx.map_arg(node.args, read)
        node_kwargs: Any = fx.map_arg(node.kwargs, read)

        kwargs = {}
        for name, value in node_kwargs.items():
            if name not in _DROPPED_ARGUMENTS and value is not None:
                kwargs[name] = value
        return node_args, kwargs

    def _read(self, view: View) -> ir.ValueRef:
        """Return the current value of a view, detached inside no_grad."""
        ref = self.memory.read(view)
        if not self.grad_enabled:
            return self._detached(ref)
        self.state.read(view)
        return ref

    def _detached(self, ref: ir.ValueRef) -> ir.ValueRef:
        """Return a value without its gradient; itself if it requires none."""
        if not self.builder.meta(ref).requires_grad:
            return ref
        if ref.index not in self.detached:
            self.detached[ref.index] = self.builder.emit(aten.detach.default, ref)
        return self.detached[ref.index]

    def _detach(self, node: fx.Node) -> None:
        """Convert `detach`: a view without gradient, or the same tensor if it needs none."""
        base = self.views[node.args[0]]
        ref = self.memory.read(base)
        if not self.builder.meta(ref).requires_grad:
            self.views[node] = self.memory.same(base)
        else:
            self.views[node] = self.memory.derive(
                base, ViewStep(aten.detach.default, (None,), (), 0, None), self._detached(ref)
            )

    def _copy(self, node: fx.Node) -> None:
        """Convert a clone, or a conversion of dtype or device, to a cast if the dtype differs, else
        to no op. The result has memory of its own, unless the fake tensors share it.
        """
        base = self.views[node.args[0]]
        value = node.meta["val"]
        ref = self._read(base)
        if value.dtype != self.builder.meta(ref).dtype:
            self.views[node] = self.memory.new(self.builder.emit(aten.to.dtype, ref, value.dtype))
        elif graph_builder.sharing_node(value, node) is not None:
            self.views[node] = self.memory.same(base)
        else:
            self.views[node] = self.memory.new(ref)

    def _broadcast(self, node: fx.Node) -> None:
        """Convert broadcast_tensors to an expand of each tensor that needs one."""
        views: list[View] = []
        operands: Any = node.args[0]
        for operand, value in zip(operands, node.meta["val"], strict=True):
            base = self.views[operand]
            shape = tuple(value.shape)
            ref = self._read(base)
            if self.builder.meta(ref).shape == shape:
                views.append(self.memory.same(base))
            else:
                step = ViewStep(aten.expand.default, (None, shape), (), 0, None)
                expanded = self.builder.emit(aten.expand.default, ref, shape)
                views.append(self.memory.derive(base, step, expanded))
        self.views[node] = tuple(views)

    def _bind(
        self, node: fx.Node, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Set the views of a node.

        A result that shares memory with an operand is a view of it. The fake tensors tell: whether
        a reshape is a view depends on strides.

        Args:
            result: a ValueRef, or a tuple of ValueRefs and Nones, whose view is None.
            args, kwargs: the op's arguments.
        """
        traced = node.meta["val"]
        has_several = isinstance(result, tuple)
        traced_items = list(traced) if has_several else [traced]

        def view(item: int, ref: ir.ValueRef | None) -> View | None:
            if ref is None:
                return None
            owner = graph_builder.sharing_node(traced_items[item], node)
            if owner is None:
                return self.memory.new(ref)

            position = next((i for i, arg in enumerate(node.args) if arg is owner), None)
            step_args = []
            for index, arg in enumerate(args):
                step_args.append(None if index == position else frozen(arg))
            step_kwargs = tuple(sorted((name, frozen(value)) for name, value in kwargs.items()))
            step_item = item if has_several else None
            step = ViewStep(node.target, tuple(step_args), step_kwargs, position, step_item)
            return self.memory.derive(self.views[owner], step, ref)

        if has_several:
            self.views[node] = tuple(view(item, ref) for item, ref in enumerate(result))
        else:
            self.views[node] = view(0, result)

    # Mutation

    def _write(self, node: fx.Node, write: Write) -> None:
        """Convert `x.op_(...)` or `op(..., out=x)`: compute out of place, write the result to x.

        Raises:
            CaptureError: x is a parameter that trains, or requires grad inside no_grad, or gets
                another shape; or the op has no form without writing.
            WrittenConstantError: x is a tensor from outside of the step.
        """
        view = self.views[write.into]
        before = self.memory.read(view)
        if view.storage.is_outside:
            raise WrittenConstantError(self.builder.source, self._constant_of(view))
        parameter = view.storage.parameter
        if parameter:
            self.state.write(parameter, self.builder.source)
        meta = self.builder.meta(before)
        if not self.grad_enabled and meta.requires_grad and not parameter:
            raise CaptureError(
                f"under no_grad, {write.name} changes a tensor that requires grad"
                f" ({self.builder.source})",
                "change a detached clone instead: `y = x.detach().clone()`",
            )
        args, kwargs = self._arguments(node)
        new = graph_builder.new_value(
            self.builder, write, args, kwargs, meta, self._detached(before)
        )
        self.memory.write(view, graph_builder.in_its_dtype(self.builder, write, new, meta))
        self.views[node] = view

    def _norm_with_statistics(self, node: fx.Node, results: tuple[ir.ValueRef, ...]) -> None:
        """Set the view of a norm's result, and write its new running statistics.

        Args:
            results: (y,) or (y, new running mean, new running variance).
        """
        bound = bound_arguments(node.target, tuple(node.args), dict(node.kwargs))
        y, *statistics = results
        self.views[node] = self.memory.new(y)
        for name, new in zip(("running_mean", "running_var"), statistics, strict=False):
            self.memory.write(self.views[bound[name]], new)

    # The end

    def finish(self) -> ir.StepGraph:
        """Return the graph of the ops that have an effect.

        Dead ops, unused buffers and constants are left out, values are renumbered, ops named. A
        CaptureError if there is no loss, or a changed tensor shares its memory.
        """
        # The step's results, with ValueRefs of the builder.
        results = map_refs(self.trace.results, lambda ref: self.outputs[ref.index])
        loss = loss_of(results["output"], self.builder)
        updates = self._buffer_updates(results.pop("buffers"))
        written = self._written_leaves()
        results["appended"] += [[value] for value in written.values()]

        leaving = {*updates.values(), loss.index}
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, ir.ValueRef):
                leaving.add(leaf.index)
        live_ops = [self.builder.ops[index] for index in ir.ancestors(self.builder.ops, leaving)]
        needed = leaving.union(*(op.operands for op in live_ops))

        numbering = Numbering(self.builder.values)
        inputs = []
        for entry in self.state.inputs(self.trace.inputs):
            # Unused parameters are inputs as well: the run has them all.
            is_buffer = isinstance(entry, ir.BufferInput)
            if not is_buffer or entry.value in needed or entry.value in updates:
                inputs.append(replace(entry, value=numbering.define(entry.value)))
        constants = []
        for constant in self.constants:
            if constant.value in needed:
                constants.append(replace(constant, value=numbering.define(constant.value)))
        ops = renumbered_ops(live_ops, numbering)

        new = numbering.index
        new_updates = {new[buffer]: new[update] for buffer, update in updates.items()}
        buffers = []
        for entry in inputs:
            if isinstance(entry, ir.BufferInput):
                buffers.append(replace(entry, update=new_updates.get(entry.value)))

        graph = ir.StepGraph(
            values=tuple(numbering.values),
            parameters=tuple(entry for entry in inputs if isinstance(entry, ir.ParameterInput)),
            buffers=tuple(buffers),
            batch=tuple(entry for entry in inputs if isinstance(entry, ir.BatchInput)),
            constants=tuple(constants),
            ops=tuple(ops),
            loss=new[loss.index],
            output=None,
            batch_size=self.trace.batch_size,
            guards=tuple(self.trace.recording.guards),
            attributes=(*self.trace.recording.attributes, *self.memory_guards),
            leaves=self.trace.read_leaves,
            notes=tuple(self.trace.recording.notes),
        )
        results = map_refs(results, lambda ref: ir.ValueRef(new[ref.index]))
        lists = [*self.trace.recording.appended]
        lists += [Place("", "the batch", leaf=leaf) for leaf in written]
        return with_records(graph, results, lists, self.trace.recording.assigned)

    def _written_leaves(self) -> dict[int, ir.ValueRef]:
        """Return index of a leaf that the step writes in place -> its new value.

        Raises:
            CaptureError: another tensor shares its memory.
        """
        entries = []
        views = []
        for entry, view in zip(self.trace.inputs, self.input_views, strict=True):
            if isinstance(entry, ir.BatchInput):
                entries.append(entry)
                views.append(view)
        tensors = [self.trace.leaves[entry.leaf] for entry in entries]
        constants = [constant.tensor for constant in self.constants]
        shared = sharing_memory(tensors, (*self.trace.module_tensors, *constants))

        written = {}
        for index, (entry, view) in enumerate(zip(entries, views, strict=True)):
            if not view.storage.version:
                continue
            if index in shared:
                raise CaptureError(
                    "the step changes a tensor of its batch or of an attribute in place, and"
                    " another tensor shares its memory",
                    "copy it before (clone), or compute a new tensor in the step",
                )
            written[entry.leaf] = self._detached(view.storage.value)
        return written

    def _buffer_updates(self, reassigned: dict[str, ir.ValueRef]) -> dict[int, int]:
        """Return value index of a buffer -> index of its new value.

        The buffer was written in place, or replaced by another tensor.

        Args:
            reassigned: buffer name -> the tensor that replaces it.

        Raises:
            CaptureError: another tensor shares memory with a buffer that is updated.
        """
        updates: dict[int, int] = {}
        for entry, view in zip(self.state.inputs(self.trace.inputs), self.input_views, strict=True):
            if not isinstance(entry, ir.BufferInput):
                continue
            if view.storage.version:
                updates[entry.value] = self._detached(view.storage.value).index
            if entry.name in reassigned:
                updates[entry.value] = self._detached(reassigned[entry.name]).index

        inputs = self.state.inputs(self.trace.inputs)
        updated = [entry for entry in inputs if entry.value in updates]
        constants = [constant.tensor for constant in self.constants]
        check_memory_of(updated, self.trace.module_tensors, constants)
        return updates


def convert(trace: Trace) -> ir.StepGraph:
    """Return the graph of a trace.

    Raises:
        CaptureError: an op cannot be captured, the step returns no loss, or a tensor that it
            changes shares its memory.
    """
    converter = _Converter(trace)
    placeholders = [node for node in trace.module.graph.nodes if node.op == "placeholder"]
    converter.add_inputs(placeholders)
    converter.run()
    return converter.finish()
