"""capture_step: an ordinary LightningModule and one batch in, the training step as a StepGraph out.

`trace` runs the step; here the raw fx trace becomes the StepGraph: one walk over the nodes, then
removal of what has no effect. Factories (arange, zeros, ...) and conversions to the capture device
lose their `device`: lowering has its own.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from alpa_strategy.capture import graph_builder, rewrites
from alpa_strategy.capture.autocast import Autocast
from alpa_strategy.capture.graph_builder import Builder, Memory, View, ViewStep, Write, map_refs
from alpa_strategy.capture.module_state import changed_attributes, initialized
from alpa_strategy.capture.non_tensor_inputs import register_batch_types
from alpa_strategy.capture.python_state import Same
from alpa_strategy.capture.trace import StepCall, Trace, trace_step
from alpa_strategy.errors import CaptureError, OptionError
from alpa_strategy.ir import graph as ir
from alpa_strategy.ir.guards import ValueGuard
from alpa_strategy.ir.op import TensorMeta, bound_arguments, frozen


def capture_step(
    module: LightningModule,
    batch: Any,
    *,
    world_size: int = 1,
    batch_scope: str = "rank",
    batch_idx: int = 0,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
    rows: tuple[bool, ...] | None = None,
    numbers: tuple[ir.Place, ...] = (),
) -> ir.StepGraph:
    """Capture `module.training_step(batch, batch_idx)`. Nothing real is computed and the module is
    left as it was.

    Args:
        module: parameters on any device, meta included; with or without a trainer.
        batch: one rank's batch, any pytree of tensors (real, fake or meta) and constants.
        world_size: number of ranks that load rows.
        batch_scope: `rank`: leaves of rows are `world_size` times longer in the graph; `global`: it
            is the whole batch.
        batch_idx: what the step sees as batch_idx; comparisons with it become guards.
        context: the precision plugin's `train_step_context`, so that autocast's casts are captured.
        rows: of every tensor leaf whether it has one row per sample; None: those do whose dim 0 is
            the most frequent.
        numbers: attributes and leaves that are other numbers at other steps.

    Raises:
        CaptureError: with the user's line and a way out. Errors of the user's own code pass
            unchanged.
    """
    if batch_scope not in ("rank", "global"):
        raise OptionError(f"batch_scope={batch_scope!r}", "use 'rank' or 'global'")
    if not module.automatic_optimization:
        raise CaptureError(
            "the module uses manual optimization (automatic_optimization = False)",
            "return the loss from training_step and let Lightning step one optimizer; for `alpa"
            " plan`, say what a step "
            "consists of (iteration_phases)",
        )
    register_batch_types(batch)
    rows_factor = world_size if batch_scope == "rank" else 1
    call = StepCall(
        module, batch, rows_factor, batch_idx, context or nullcontext, rows, numbers=numbers
    )
    trace = trace_step(call)
    # Which lists only grow is known at the end, when what was read of them is in the trace already.
    if trace.recording.grown:  # lists that the step appended to: once more, with stand-ins for them
        call = replace(call, appended=tuple(trace.recording.grown))
        trace = trace_step(call)
    graph = convert(trace)
    if trace.recording.stored:
        graph = _after_first_call(call, graph, trace.recording.stored)
    return replace(rewrites.segment_fused_linears(graph), batch_scope=batch_scope, numbers=numbers)


def _after_first_call(
    call: StepCall, graph: ir.StepGraph, stored: Mapping[str, Any]
) -> ir.StepGraph:
    """The step of a module that sets flags in its first call (libraries install their hooks so),
    captured once more.

    It counts as initialization if the second call stores nothing and does the same tensor work;
    else CaptureError.
    """
    with initialized(stored):
        trace = trace_step(call)
        again = convert(trace)
        # A counter (`self.calls += 1`) stores something else in every call.
        if (
            trace.recording.stored
            or trace.recording.grown
            or again.graph_digest != graph.graph_digest
        ):
            raise changed_attributes(stored)
    return replace(
        again,
        stored=tuple(ValueGuard(label, name, held, v) for label, (held, name, v) in stored.items()),
    )


aten = torch.ops.aten

# All overloads of these.
_SAME_VALUE = (aten.alias, aten.lift, aten.resolve_conj, aten.resolve_neg)
_COPIES = (aten.to, aten._to_copy, aten.type_as, aten.lift_fresh_copy)


class _Converter:
    """State of the walk: the Builder, the memory of views, grad mode, autocast."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.builder = Builder()
        self.memory = Memory(self.builder)
        self.views: dict[Any, Any] = {}  # fx.Node -> View, or a tuple of Views and Nones
        self.input_views: list[View] = []
        self.constants: list[ir.ConstantInput] = []
        self.constant_views: dict[str, View] = {}
        self.memory_guards: list[ValueGuard] = []
        self.grad_enabled = True
        self.parameters: set[int] = set()
        self.autocast = Autocast(self.builder, trace.device.type, self.parameters)
        self.detached: dict[int, ir.ValueRef] = {}  # value -> itself without its gradient
        self.outputs: list[ir.ValueRef] = []

    # Inputs

    def add_inputs(self, placeholders: list[fx.Node]) -> None:
        """All inputs come first in the numbering: parameters, buffers, batch leaves, constants."""
        for node, entry in zip(placeholders, self.trace.inputs, strict=True):
            ref, parameter = self.builder.add_value(entry.meta), ""
            if isinstance(entry, ir.ParameterInput):
                parameter = entry.name
                self.parameters.add(ref.index)
            self.views[node] = self.memory.new(ref, parameter)
            self.input_views.append(self.views[node])
        for node in self.trace.module.graph.nodes:
            if node.op == "get_attr":
                self.views[node] = self._constant(node)

    def _constant(self, node: fx.Node) -> View:
        name = str(node.target)
        if name not in self.constant_views:
            tensor = getattr(self.trace.module, name)
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
                    "make it with functions of torch, and leave no tensor of an earlier step in"
                    " use",
                )
            # torch.func (vmap, grad) leaves its wrapper as a constant of the graph: its layers are
            # no ops.
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise CaptureError(
                    f"the step transforms a function by torch.func ({self._source_of(node)})",
                    "write the mapped dim out: broadcasting, einsum, torch.bmm",
                )
            # `teacher.weight.data = ...`
            where = f"the memory of a tensor that is no buffer ({self._source_of(node)})"
            self.memory_guards.append(
                ValueGuard(where, name, {name: tensor}, Same(tensor, Tensor.data_ptr))
            )
            tensor = tensor.detach()
            meta = TensorMeta(tuple(tensor.shape), tensor.dtype)
            ref = self.builder.add_value(meta)
            self.constants.append(
                ir.ConstantInput(ref.index, tensor, meta, ir.tensor_digest(tensor))
            )
            self.constant_views[name] = self.memory.new(ref)
            self.constant_views[name].storage.is_outside = True
        return self.constant_views[name]

    def _source_of(self, node: fx.Node) -> str:
        return next(
            (self.trace.origins[n][1] for n in node.users if n in self.trace.origins),
            "line unknown",
        )

    # The walk

    def run(self) -> None:
        for node in self.trace.module.graph.nodes:
            self.builder.module, self.builder.source = self.trace.origins.get(node, ("", ""))
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.outputs = [self.memory.read(self.views[n]) for n in node.args[0]]

    def _call(self, node: fx.Node) -> None:
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
            if (
                target.namespace != "profiler"
            ):  # record_function: names for a profiler, of this one run
                self._op(node, target)
        else:
            raise CaptureError(
                f"{getattr(target, '__name__', target)} ({self.builder.source}) cannot be part of a"
                " captured step",
                "write it with ordinary torch functions",
            )

    def _op(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        if (
            target is aten._conj.default
        ):  # a bit that says how memory is read, which messages do not carry
            node.target = target = aten.conj_physical.default
        if target.overloadpacket in _SAME_VALUE:
            self.views[node] = self.memory.same(self.views[node.args[0]])
            return
        if (
            target is aten.lift_fresh.default
        ):  # of what the step has made by itself: `torch.tensor(...)`
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
        args, kwargs = self._arguments(node)
        # No `sparse`, nor a `sparse_grad` (in `_arguments`): reductions know dense gradients only.
        args = tuple(
            a.name != "sparse" and x for a, x in zip(target._schema.arguments, args, strict=False)
        )
        args = rewrites.without_empty_tensors(self.builder, target, args)
        if target is aten.broadcast_tensors.default:
            self._broadcast(node)
            return
        norm = rewrites.rewrite_norm(self.builder, target, args, kwargs)
        if norm is not None:
            self._norm_with_statistics(node, norm)
            return
        if (bags := rewrites.rewrite_bags(self.builder, node, args, kwargs)) is not None:
            self.views[node] = (
                self.memory.new(bags),
                None,
                None,
                None,
            )  # offsets, sizes, indices: for no one
            return
        summed_in = self.autocast.loss_dtype(target, args)
        if summed_in is None:
            args, kwargs = self.autocast.operands(target, args, kwargs)
        if (traced := node.meta.get("val")) is None:  # it has failed, which the step has caught
            return
        kwargs = rewrites.with_traced_dtype(target, args, kwargs, traced)
        result = rewrites.rewrite_loss(self.builder, target, args, kwargs, summed_in)
        if (
            result is None
            and target.overloadpacket in (aten.mH, aten.adjoint, aten.matrix_H)
            and traced.is_conj()
        ):
            result = self.builder.emit(
                aten.conj_physical.default, self.builder.emit(aten.mT.default, *args)
            )
        if result is None:
            result = self.builder.emit(target, *args, **kwargs)
        if isinstance(result, ir.ValueRef) and self.builder.meta(result).dtype != traced.dtype:
            result = (
                rewrites.emit_from_whole_numbers(self.builder, target, args, kwargs, traced.dtype)
                or result
            )
        if (
            isinstance(result, ir.ValueRef)
            and (dtype := self.builder.meta(result).dtype) != traced.dtype
        ):
            raise CaptureError(
                f"{target} ({self.builder.source}) gives {traced.dtype} in the step but {dtype} in"
                " the captured graph",
                "cast its operands by hand",
            )
        self._bind(node, result, args, kwargs)

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's arguments, with the values of its operands now, and without those that say
        where it runs.
        """

        def read(n: fx.Node) -> Any:
            return self._read(self.views[n])

        args: Any = fx.map_arg(node.args, read)
        kwargs: Any = fx.map_arg(node.kwargs, read)
        # The run sets its own device around the ops; the trace has seen that the step asks for no
        # other.
        dropped = ("device", "pin_memory", "layout", "non_blocking", "sparse_grad")
        return args, {k: v for k, v in kwargs.items() if k not in dropped and v is not None}

    def _read(self, view: View) -> ir.ValueRef:
        """The value of a view; inside no_grad, detached from what requires grad."""
        ref = self.memory.read(view)
        return ref if self.grad_enabled else self._detached(ref)

    def _detached(self, ref: ir.ValueRef) -> ir.ValueRef:
        if not self.builder.meta(ref).requires_grad:
            return ref
        if ref.index not in self.detached:
            self.detached[ref.index] = self.builder.emit(aten.detach.default, ref)
        return self.detached[ref.index]

    def _detach(self, node: fx.Node) -> None:
        base = self.views[node.args[0]]
        ref = self.memory.read(base)
        if not self.builder.meta(ref).requires_grad:
            self.views[node] = self.memory.same(base)
        else:
            self.views[node] = self.memory.derive(
                base, ViewStep(aten.detach.default, (None,), (), 0, None), self._detached(ref)
            )

    def _copy(self, node: fx.Node) -> None:
        """Clones, conversions of dtype and device: nothing, a cast, or a copy."""
        base, value = self.views[node.args[0]], node.meta["val"]
        ref = self._read(base)
        if value.dtype != self.builder.meta(ref).dtype:
            self.views[node] = self.memory.new(self.builder.emit(aten.to.dtype, ref, value.dtype))
        elif graph_builder.sharing_node(value, node) is not None:
            self.views[node] = self.memory.same(base)
        else:
            self.views[node] = self.memory.new(ref)

    def _broadcast(self, node: fx.Node) -> None:
        """broadcast_tensors: an expand for each tensor that needs one."""
        views: list[View] = []
        operands: Any = node.args[0]
        for operand, value in zip(operands, node.meta["val"], strict=True):
            base, shape = self.views[operand], tuple(value.shape)
            ref = self._read(base)
            if self.builder.meta(ref).shape == shape:
                views.append(self.memory.same(base))
            else:
                step = ViewStep(aten.expand.default, (None, shape), (), 0, None)
                views.append(
                    self.memory.derive(
                        base, step, self.builder.emit(aten.expand.default, ref, shape)
                    )
                )
        self.views[node] = tuple(views)

    def _bind(
        self, node: fx.Node, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Give the node its views: of an operand when it shares that one's memory (the fake tensors
        know), else new.
        """
        traced = node.meta["val"]
        many = isinstance(result, tuple)
        traced_items = list(traced) if many else [traced]

        def view(item: int, ref: ir.ValueRef | None) -> View | None:
            if ref is None:
                return None
            owner = graph_builder.sharing_node(
                traced_items[item], node
            )  # reshape: a view or not, as strides say
            if owner is None:
                return self.memory.new(ref)
            position = next((i for i, a in enumerate(node.args) if a is owner), None)
            step_args = tuple(None if i == position else frozen(a) for i, a in enumerate(args))
            step_kwargs = tuple(sorted((k, frozen(v)) for k, v in kwargs.items()))
            step = ViewStep(node.target, step_args, step_kwargs, position, item if many else None)
            return self.memory.derive(self.views[owner], step, ref)

        if many:
            self.views[node] = tuple(view(i, ref) for i, ref in enumerate(result))
        else:
            self.views[node] = view(0, result)

    # Mutation

    def _write(self, node: fx.Node, write: Write) -> None:
        """`x.op_(...)` or `op(..., out=x)`: compute out of place, write the result to x."""
        view = self.views[write.into]
        before = self.memory.read(view)
        if view.storage.parameter:
            raise CaptureError(
                f"the step changes parameter {view.storage.parameter} in place"
                f" ({self.builder.source})",
                "parameters are changed by the optimizer; do it in a hook such as"
                " on_train_batch_end",
            )
        meta = self.builder.meta(before)
        if not self.grad_enabled and meta.requires_grad:
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
        """results: (y,) or (y, new running mean, new running variance)."""
        given = bound_arguments(node.target, tuple(node.args), dict(node.kwargs))
        y, *statistics = results
        self.views[node] = self.memory.new(y)
        for name, new in zip(("running_mean", "running_var"), statistics, strict=False):
            self.memory.write(self.views[given[name]], new)

    # The end

    def finish(self) -> ir.StepGraph:
        """The graph of the ops that have an effect: dead code is left out, values are numbered
        anew, ops named.
        """
        found = map_refs(
            self.trace.results, lambda ref: self.outputs[ref.index]
        )  # what the step left behind
        loss, updates = (
            _loss_of(found["output"], self.builder),
            self._buffer_updates(found.pop("buffers")),
        )
        leaving = {
            leaf.index for leaf in pytree.tree_leaves(found) if isinstance(leaf, ir.ValueRef)
        }
        leaving |= {*updates.values(), loss.index}
        kept = [self.builder.ops[index] for index in ir.ancestors(self.builder.ops, leaving)]
        needed = leaving.union(*(op.operands for op in kept))
        new_index: dict[int, int] = {}
        values: list[TensorMeta] = []

        def define(old: int) -> int:
            new_index[old] = len(values)
            values.append(self.builder.values[old])
            return new_index[old]

        for entry in self.trace.inputs:  # parameters also unused: the run has them all
            if (
                not isinstance(entry, ir.BufferInput)
                or entry.value in needed
                or entry.value in updates
            ):
                define(entry.value)
        inputs = [
            replace(e, value=new_index[e.value]) for e in self.trace.inputs if e.value in new_index
        ]
        constants = [replace(c, value=define(c.value)) for c in self.constants if c.value in needed]
        counts: dict[str, int] = {}
        ops: list[ir.Op] = []
        for op in kept:
            base = op.call.target_name.split(".")[
                1
            ]  # "aten.mul.Tensor": ops are named mul_0, mul_1, ...
            number = counts[base] = counts.get(base, -1) + 1
            operands = tuple(new_index[o] for o in op.operands)
            ops.append(
                replace(
                    op,
                    name=f"{base}_{number}",
                    operands=operands,
                    results=tuple(map(define, op.results)),
                )
            )

        new_values = {new_index[old]: new_index[new] for old, new in updates.items()}
        found = map_refs(found, lambda ref: ir.ValueRef(new_index[ref.index]))
        lists = zip(self.trace.recording.appended, found["appended"], strict=True)
        return ir.StepGraph(
            values=tuple(values),
            parameters=tuple(e for e in inputs if isinstance(e, ir.ParameterInput)),
            buffers=tuple(
                replace(e, update=new_values.get(e.value))
                for e in inputs
                if isinstance(e, ir.BufferInput)
            ),
            batch=tuple(e for e in inputs if isinstance(e, ir.BatchInput)),
            constants=tuple(constants),
            ops=tuple(ops),
            loss=new_index[loss.index],
            output=found["output"],
            logs=tuple(ir.LogRecord(n, v, tuple(sorted(k.items()))) for n, v, k in found["logs"]),
            metrics=tuple(
                ir.MetricRecord(n, m, tuple(a), tuple(sorted(k.items())))
                for n, m, a, k in found["metrics"]
            ),
            batch_size=self.trace.batch_size,
            guards=tuple(self.trace.recording.guards),
            attributes=(*self.trace.recording.attributes, *self.memory_guards),
            leaves=self.trace.read_leaves,
            checks=tuple(ir.Check(*check) for check in found["checks"]),
            notes=tuple(self.trace.recording.notes),
            appended=tuple(ir.AppendRecord(place, tuple(items)) for place, items in lists if items),
        )

    def _buffer_updates(self, reassigned: dict[str, ir.ValueRef]) -> dict[int, int]:
        """Value of a buffer -> its new value: written in place, or another tensor (`reassigned`, by
        name).
        """
        updates: dict[int, int] = {}
        for entry, view in zip(self.trace.inputs, self.input_views, strict=True):
            if isinstance(entry, ir.BufferInput) and view.storage.version:
                updates[entry.value] = self._detached(view.storage.value).index
            if isinstance(entry, ir.BufferInput) and entry.name in reassigned:
                updates[entry.value] = self._detached(reassigned[entry.name]).index
        tensors = *self.trace.own, *(constant.tensor for constant in self.constants)
        storages = [
            graph_builder.storages_of(t) if t.layout is torch.strided else set() for t in tensors
        ]
        shared = Counter(storage for own in storages for storage in own)
        for entry in (
            e for e in self.trace.inputs if isinstance(e, ir.BufferInput) and e.value in updates
        ):
            if any(shared[storage] > 1 for storage in storages[entry.value]):
                raise CaptureError(
                    f"the step changes buffer {entry.name}, of which another tensor is a view, made"
                    " before",
                    "make views of buffers in the step",
                )
        return updates


def convert(trace: Trace) -> ir.StepGraph:
    """The frozen graph of a trace."""
    converter = _Converter(trace)
    converter.add_inputs([n for n in trace.module.graph.nodes if n.op == "placeholder"])
    converter.run()
    return converter.finish()


def _loss_of(output: Any, builder: Builder) -> ir.ValueRef:
    """The loss in what `training_step` returned: the tensor itself or `["loss"]`.

    CaptureError unless it is one number that depends on a parameter.
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
