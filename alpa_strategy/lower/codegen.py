"""Lowering: StepGraph + StagePlan -> this device's program on local tensors, with explicit
collectives.

The program is plain generated Python, one line an op, every value dropped after its last use: as
fast as the user's own code, readable in a traceback (`LoweredStep.source`), and traceable by
`torch.compile`. It never dispatches on layouts.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.comm.saved_tensor_hooks import active_regather
from alpa_strategy.cost.flops import product_kind
from alpa_strategy.inter_op.subgraph import slice_stage
from alpa_strategy.intra_op.build import batch_layout
from alpa_strategy.intra_op.options import is_gather, local_bytes
from alpa_strategy.intra_op.overlap import Product, product_of
from alpa_strategy.intra_op.per_step import PerStep, casts_of_parameters, per_step
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.guards import COUNTERS, SymbolicScalar, at_counters, is_symbolic
from alpa_strategy.ir.op import AxisStrategy, LocalCall, OpCall, Slot, map_slots, with_slots
from alpa_strategy.ir.placement import INVARIANT, DualLayout, dual_layout_to_str, value_layout
from alpa_strategy.ir.plan import StagePlan
from alpa_strategy.lower.lines import (
    Line,
    before_first_use,
    begun_ahead,
    drop_dead,
    function_of,
    unpacked,
)
from alpa_strategy.lower.local_ops import batch_norm_in_parts, build_local_op
from alpa_strategy.lower.overlapped_matmul import MatmulSpec, OverlappedMatmul
from alpa_strategy.lower.segments import Compiler, is_compilable
from alpa_strategy.sharding.strategies import is_random, localize

LITERALS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class LoweredStep:
    """This device's training step; `loss.backward()` on its result gives local gradients.

    parameters: name (`ParameterInput.name`) -> the tensor that the modes promise: local shard for
    `S<d>` axes, whole
        for `R`, `R*` and `G<d>` axes. Gradients come out complete over `R` and `S`; over `R*` and
        `G<d>` they are left Partial, for the once-per-step reduction.
    buffers: name -> whole tensor (buffers are replicated); the counters under `COUNTERS`.
    batch: the batch's tensor leaves in `step.batch` order, this rank's rows.
    received: local tensors of `step.received`, in that order and in the layouts of
    `StagePlan.received`.
    """

    source: str
    function: Callable[..., tuple[Tensor, ...]] = field(repr=False)
    parameter_names: tuple[str, ...]
    escaping: tuple[int, ...]
    sent: tuple[int, ...] = ()
    made: tuple[int, ...] = ()

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Any],
        batch: Sequence[Tensor],
        received: Sequence[Tensor] = (),
    ) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        """By value index what leaves the step, whole on every device (the loss included); what
        later stages get, in the
        layouts of `StagePlan.sent`; what later spans of the stage get, in the layouts in which it
        is made."""
        left = iter(self.function(parameters, buffers, batch, received, buffers.get(COUNTERS)))
        escaping, sent, made = (
            {value: next(left) for value in values}
            for values in (self.escaping, self.sent, self.made)
        )
        return escaping, sent, made


def lower(
    step: StepGraph,
    stage: StagePlan,
    mesh: MeshComm,
    device: torch.device,
    random: ShardedRandom,
    compiler: Compiler | None = None,
    overlaps: bool = True,
) -> LoweredStep:
    """Write the program of the device at `mesh.coordinate`, with a `compiler` in compiled segments.
    With `overlaps` products go on beside collectives (`lower/overlapped_matmul.py`): not where a
    backward is divided in two, or differentiated.
    """
    return _Writer(
        step, stage, mesh, device, random, {}, (), prefetchable(step), compiler, overlaps
    ).program()


@dataclass(frozen=True)
class LoweredStage:
    """A stage that runs micro-batches."""

    per_step: PerStep  # what of it is made of the parameters alone, once per step
    # one per derivation of `per_step`; each gives its values as what is `made`
    per_step_programs: tuple[LoweredStep, ...]
    # what it runs for every micro-batch, one after the other, each with its graph: one, or those
    # that it recomputes one by one (`StagePlan.spans`). A span's `received` includes what earlier
    # spans make; it takes the per-step values as parameters of the name `per_step_name(value)`.
    spans: tuple[tuple[StepGraph, LoweredStep], ...]


def per_step_name(value: int) -> str:
    """What a program calls a value that it takes as a parameter."""
    return f"<value {value}>"


def lower_stage(
    step: StepGraph,
    stage: StagePlan,
    mesh: MeshComm,
    device: torch.device,
    random: ShardedRandom,
    compiler: Compiler | None = None,
    overlaps: bool = True,
) -> LoweredStage:
    """The programs of a stage of the micro-batched `step`; what runs once per step is not compiled.
    See `lower`.
    """
    whole = slice_stage(step, *stage.ops)
    once_per_step = PerStep() if stage.recompute_per_microbatch else per_step(whole)
    programs: list[LoweredStep] = []
    layouts: dict[int, DualLayout] = {}
    for derivation in once_per_step.derivations:
        own_graph = whole.part(
            [whole.ops[index] for index in derivation.ops]
        )  # nothing leaves it but the values
        writer = _Writer(own_graph, stage, mesh, device, random)
        programs.append(writer.program(derivation.values))
        layouts |= {value: writer.layouts[value] for value in derivation.values}
    left_out = {whole.ops[index].name for index in once_per_step.ops}
    graphs = [
        _without(slice_stage(step, *span), left_out, once_per_step.values) for span in stage.spans
    ]
    spans: list[tuple[StepGraph, LoweredStep]] = []
    for number, graph in enumerate(graphs):
        read_later = {value for later in graphs[number + 1 :] for value in later.received}
        made = tuple(value for value in graph.sent if value in read_later)
        graph = replace(graph, sent=tuple(value for value in graph.sent if value in whole.sent))
        prefetched = frozenset() if stage.remat else prefetchable(graph)
        given = layouts, once_per_step.values, prefetched, compiler, overlaps
        writer = _Writer(graph, stage, mesh, device, random, *given)
        spans.append((graph, writer.program(made)))
        layouts |= {value: writer.layouts[value] for value in made}
    return LoweredStage(once_per_step, tuple(programs), tuple(spans))


def _without(
    graph: StepGraph, names: Collection[str], per_step_values: Collection[int]
) -> StepGraph:
    """A span without the ops that run once per step; `per_step_values` is what it takes of them."""
    ops = tuple(op for op in graph.ops if op.name not in names)
    read = {value for op in ops for value in op.operands}.union(graph.escaping) - set(
        per_step_values
    )
    return replace(
        graph, ops=ops, received=tuple(value for value in graph.received if value in read)
    )


@dataclass
class _Writer:
    """Emits the program line by line and binds what the lines refer to."""

    step: StepGraph
    stage: StagePlan
    mesh: MeshComm
    device: torch.device
    random: ShardedRandom
    made_before: Mapping[int, DualLayout] = field(default_factory=dict)
    per_step_values: Collection[int] = ()
    prefetched: Collection[int] = ()  # values whose resharding starts before the forward
    compiler: Compiler | None = None
    overlaps: bool = False

    def __post_init__(self) -> None:
        step, stage = self.step, self.stage
        self.module = ""  # whose op is being written
        self.done: set[str] = set()  # ops that are written
        self.lines: list[Line] = []
        self.namespace: dict[str, Any] = {}
        self.layouts: dict[int, DualLayout] = {}  # value -> layout in which it is made
        self.copies: dict[tuple[int, DualLayout], str] = {}  # (value, target layout) -> variable
        wide = any(plan.sums_in_fp32 for plan in stage.parameter_plans.values())
        # Their casts are parts of reshardings, whose sums are then not rounded; for other readers
        # they are written.
        casts = casts_of_parameters(step)
        self.casts = casts if wide else {}
        self.plain_casts: list[Line] = []
        self.parameters = {*(p.value for p in step.parameters), *casts, *self.per_step_values}
        self.wide = self.parameters if wide else set[int]()
        num_axes = len(self.mesh.shape)
        for parameter in step.parameters:
            plan = stage.parameter_plans[parameter.name]
            self.layouts[parameter.value] = plan.step_layout(parameter.meta.requires_grad)
        for leaf in step.batch:
            self.layouts[leaf.value] = batch_layout(step, leaf.batch_dim, num_axes)
        for given in step.constant_inputs:
            self.layouts[given.value] = (INVARIANT,) * num_axes
        self.layouts.update(self.made_before)
        self.layouts |= {
            value: stage.received[value] for value in step.received if value in stage.received
        }
        for constant in step.constants:
            self.namespace[f"v{constant.value}"] = constant.tensor.to(self.device)

    def op(self, op: Op) -> None:
        """One op: its operands in the layouts that its strategy takes, then its call."""
        if op.name in self.done:
            return
        strategies = self.stage.strategies[op.name]
        self.module = op.module
        if self.overlaps and self.overlap_with_allreduce(op):
            return
        self.done.add(op.name)
        operands = [
            self.resharded(value, self.wanted(op, position))
            for position, value in enumerate(op.operands)
        ]
        for position, value in enumerate(op.results):
            self.layouts[value] = tuple(s.outputs[position] for s in strategies)
        results = tuple(f"v{value}" for value in op.results)
        targets = ", ".join(results) + "," * (op.call.returns_tuple and len(results) == 1)
        local = localize(op.call, strategies, self.mesh.shape, self.mesh.coordinate)
        if (
            self.compiler is not None
            and product_kind(op.call) == "convolution"
            and len(op.call.operands[0].shape) == 4
        ):
            operands[0] = self.channels_last(op, local, operands[0])
        plain: OpCall | None
        if (
            local.implementation == "batch_norm_sync"
            and self.compiler is not None
            and not is_symbolic(op.call)
        ):
            plain = self.exchanged(op, local, operands)
            code = self.written(f"f_{op.name}", plain.target, op, plain, operands)
        else:
            code, plain = self.call(op, local, strategies, operands)
        line = Line(
            f"{targets} = {code}",
            results,
            tuple(operands),
            op.source or op.module,
            op.module,
            plain,
        )
        (self.plain_casts if self.casts.keys() & op.results else self.lines).append(line)

    def overlap_with_allreduce(self, op: Op) -> bool:
        """Write a product beside the sum of its input's gradients or of its result; False: there is
        none to hide.
        """
        product = self.product(op)
        if product is None:
            return False
        value, wanted = op.operands[product.rows], self.wanted(op, product.rows)
        into = Reshard(self.layouts[value], wanted, self.step.values[value].shape, self.mesh)
        reads = [(self.step.ops[index], position) for index, position in self.step.consumers[value]]
        # The sum is one for all that reads the input so.
        ops = list(
            dict.fromkeys(
                reader for reader, position in reads if self.wanted(reader, position) == wanted
            )
        )
        is_summed = self.step.values[value].requires_grad and len(into.gradient_sums) == 1
        if is_summed and self.are_products_of(value, ops):
            self.products(ops, into)
        elif self.num_chunks(op) is not None:
            self.products([op], None)
        return op.name in self.done

    def are_products_of(self, value: int, ops: Sequence[Op]) -> bool:
        """Whether `ops`, none of them written, are products of `value` with what is there or is
        made of parameters.
        """
        for op in ops:
            product = None if op.name in self.done else self.product(op)
            if (
                product is None
                or op.operands[product.rows] != value
                or op.operands.count(value) > 1
            ):
                return False
            for other in (
                each for each in op.operands if each != value and each not in self.layouts
            ):
                if not self.parameters.issuperset(self.step.ops[self.step.makers[other]].operands):
                    return False
        return True

    def products(self, ops: Sequence[Op], into: Reshard | None) -> None:
        """The line of products of one input; see `OverlappedMatmul`."""
        rows, operands, results, found = "", list[str](), list[str](), list[MatmulSpec]()
        for op in ops:
            product, how = product_of(op.call), self.num_chunks(op)
            assert product is not None
            for position in (product.weight, product.bias):
                if position is None:
                    operands.append("None")
                    continue
                value = op.operands[position]
                if value not in self.layouts:  # a cast that comes later
                    self.op(self.step.ops[self.step.makers[value]])
                operands.append(self.resharded(value, self.wanted(op, position)))
            (result,), value = op.results, op.operands[product.rows]
            rows = (
                f"v{value}"
                if into is not None
                else self.resharded(value, self.wanted(op, product.rows))
            )
            self.done.add(op.name)
            self.layouts[result] = tuple(s.outputs[0] for s in self.stage.strategies[op.name])
            strategies = enumerate(self.stage.strategies[op.name])
            adds_bias = all(
                s.implementation is None or self.mesh.coordinate[axis] == 0
                for axis, s in strategies
            )
            found.append(MatmulSpec(product, adds_bias, *(how or ())))
            results.append(f"v{result}" if how is None else f"v{result}_0")
            if how is not None:
                self.copies[result, how[0].dst] = results[-1]
        name, self.module = f"products_{ops[0].name}", ops[0].module
        self.namespace[name] = functools.partial(OverlappedMatmul.apply, into, found)
        code = f"{', '.join(results)}, = {name}({', '.join([rows, *operands])})"
        reads, note = (
            (rows, *(each for each in operands if each != "None")),
            ops[0].source or ops[0].module,
        )
        self.lines.append(Line(code, tuple(results), reads, note, ops[0].module))

    def product(self, op: Op) -> Product | None:
        """The product that the device has to compute for an op; None where it is something else."""
        plain = {None, "bias_on_first"}.issuperset(
            s.implementation for s in self.stage.strategies[op.name]
        )
        is_able = plain and not is_symbolic(op.call) and op.name not in self.stage.recomputed_ops
        return product_of(op.call) if is_able else None

    def num_chunks(self, op: Op) -> tuple[Reshard, int, int] | None:
        """(sum, dim, number of parts) of a product's result, where the plan says so and one layout
        of it is read.
        """
        parts = self.stage.num_chunks.get(op.name, 1)
        value = op.results[0]
        meta = op.call.results[0]
        reads = self.step.consumers.get(value, ())
        targets = {self.wanted(self.step.ops[index], position) for index, position in reads}
        leaves = value in {*self.step.escaping, *self.step.sent, *self.made}
        if parts == 1 or leaves or len(targets) != 1:
            return None
        product = self.product(op)
        if product is None:
            return None
        is_in_segments = len(meta.shape) != len(op.call.operands[product.rows].shape)
        if is_in_segments:
            return None
        source = tuple(s.outputs[0] for s in self.stage.strategies[op.name])
        reshard = Reshard(source, targets.pop(), meta.shape, self.mesh)
        sizes = value_layout(source).local_shape(meta.shape, self.mesh.shape, self.mesh.coordinate)
        if len(reshard.value_sums) != 1:
            return None
        dims = [
            dim
            for dim in range(len(sizes) - 1)
            if dim != reshard.value_sums[0].dim and sizes[dim] > 1
        ]
        dim = max(dims, key=sizes.__getitem__, default=None)
        return None if dim is None else (reshard, dim, min(parts, sizes[dim]))

    def wanted(self, op: Op, position: int) -> DualLayout:
        """The layout in which an op takes an operand."""
        return tuple(s.inputs[position] for s in self.stage.strategies[op.name])

    def channels_last(self, op: Op, local: LocalCall, image: str) -> str:
        """The variable of a convolution's images [rows, channels, height, width] with channels
        innermost in memory.

        So do kernels want them, and all that is made of them is so: segments keep eager PyTorch's
        strides.
        """
        name, meta = f"image_{op.name}", local.call.operands[0]
        given = (("memory_format", torch.channels_last),)
        call = OpCall(torch.ops.aten.contiguous.default, (Slot(0),), given, (meta,), (meta,))
        code = f"{name} = {self.written(f'inner_{op.name}', call.target, op, call, [image])}"
        self.lines.append(Line(code, (name,), (image,), op.source or op.module, op.module, call))
        return name

    def exchanged(self, op: Op, local: LocalCall, operands: list[str]) -> OpCall:
        """The call that makes the op's results of `operands`, to which what devices exchange in its
        midst is added.

        So that what is before the exchange and what is after it are compiled, with the ops around
        them.
        """
        before, exchange, after = batch_norm_in_parts(op.call, local, self.mesh)
        x, part, carrier, shared = (
            f"{what}_{op.name}" for what in ("x", "part", "carrier", "shared")
        )
        code = f"{x}, {part}, {carrier} = {self.written(f'before_{op.name}', before.target, op, before, operands)}"
        position, note = before.args[0].index, op.source or op.module
        self.namespace[f"exchange_{op.name}"] = exchange
        self.lines.append(
            Line(code, (x, part, carrier), (operands[position],), note, op.module, before)
        )
        self.lines.append(
            Line(f"{shared} = exchange_{op.name}({part})", (shared,), (part,), note, op.module)
        )
        operands[position] = x
        operands += [shared, carrier]
        return after

    def call(
        self, op: Op, local: LocalCall, strategies: tuple[AxisStrategy, ...], operands: list[str]
    ) -> tuple[str, OpCall | None]:
        """The expression that calls the op on local operands, and the call itself where a compiler
        may have it.
        """
        function = f"f_{op.name}"
        if local.implementation is not None and is_symbolic(op.call):
            mesh = self.mesh

            def run(
                counters: Mapping[str, int], *given: Tensor
            ) -> Any:  # whose arguments are known now
                at_call, at_local = (
                    at_counters(op.call, counters),
                    at_counters(local.call, counters),
                )
                return build_local_op(at_call, strategies, replace(local, call=at_local), mesh)(
                    *given
                )

            self.namespace[function] = run
            return f"{function}(counters, {', '.join(operands)})", None
        if local.implementation is not None:
            self.namespace[function] = build_local_op(op.call, strategies, local, self.mesh)
            return f"{function}({', '.join(operands)})", None
        call = local.call.on(self.device)
        target = call.target
        is_kept = op.name not in self.stage.recomputed_ops
        if not is_kept:
            target = _not_kept(target, op.name in self.stage.stored)
        if local.random_axes is not None:
            target = functools.partial(self.random.run, local.random_axes, target)
        is_plain = local.random_axes is None and not is_symbolic(op.call) and is_compilable(call)
        return self.written(
            function, target, op, call, operands
        ), call if is_plain and is_kept else None

    def written(
        self, function: str, target: Callable[..., Any], op: Op, call: OpCall, operands: list[str]
    ) -> str:
        """A call of `target`, under the name `function`, with the call's arguments."""
        self.namespace[function] = target
        arguments = [self.argument(op, arg, operands) for arg in call.args]
        arguments += [f"{name}={self.argument(op, value, operands)}" for name, value in call.kwargs]
        return f"{function}({', '.join(arguments)})"

    def argument(self, op: Op, arg: Any, operands: list[str]) -> str:
        """An argument as source text; what has no literal form is bound to a name."""
        if isinstance(arg, Slot):
            return operands[arg.index]
        if isinstance(arg, tuple):
            return f"[{', '.join(self.argument(op, a, operands) for a in arg)}]"
        is_made = isinstance(arg, SymbolicScalar)  # a number by its class, as an example
        if (
            not is_made
            and isinstance(arg, LITERALS)
            and arg not in (float("inf"), float("-inf"))
            and arg == arg
        ):
            return repr(arg)
        name = f"c{len(self.namespace)}"
        self.namespace[name] = arg.made.value if is_made else arg
        return f"{name}(counters)" if is_made else name

    def resharded(self, value: int, target: DualLayout) -> str:
        """The variable that holds `value` in `target`, resharded once for all consumers that ask
        for it.
        """
        source = self.layouts[value]
        meta = self.step.values[value]
        if source == target or (
            not meta.requires_grad and value_layout(source) == value_layout(target)
        ):
            return f"v{value}"
        key = (value, target)
        if key not in self.copies:
            variable, name = f"v{value}", f"v{value}_{sum(v == value for v, _ in self.copies)}"
            function = f"reshard_{name}"
            sums, cast = value in self.wide, None
            if value in self.casts and self.layouts[self.casts[value]] == source:
                variable, cast = f"v{self.casts[value]}", meta.dtype
            reshard = Reshard(source, target, meta.shape, self.mesh, sums, cast)
            if reshard.is_idle:
                self.copies[key] = variable
                return variable
            self.namespace[function] = reshard
            note = f"[{dual_layout_to_str(source)}] -> [{dual_layout_to_str(target)}]"
            code, is_early = f"{name} = {function}({variable})", value in self.prefetched
            is_own = value in self.parameters and is_gather(source, target)
            gathers = local_bytes(meta, target, self.mesh.shape) if is_own else 0
            self.lines.append(
                Line(code, (name,), (variable,), note, self.module, None, True, gathers, is_early)
            )
            self.copies[key] = name
        return self.copies[key]

    def program(self, made: tuple[int, ...] = ()) -> LoweredStep:
        """All ops, results in their layouts (`made`: as they are), the inputs unpacked, as a
        compiled function.
        """
        self.made = made
        for op in self.step.ops:
            self.op(op)
        self.module = ""
        whole = (INVARIANT,) * len(self.mesh.shape)
        results = [self.resharded(value, whole) for value in self.step.escaping]
        results += [self.resharded(value, self.stage.sent[value]) for value in self.step.sent]
        results += [f"v{value}" for value in made]
        self.lines.append(
            Line(f"return ({''.join(f'{r}, ' for r in results)})", (), tuple(results))
        )
        given = {p.value: p.name for p in self.step.parameters}
        given |= {value: per_step_name(value) for value in sorted(self.per_step_values)}
        inputs = [
            *unpacked("buffers", {buffer.value: buffer.name for buffer in self.step.buffers}),
            *unpacked("batch", {leaf.value: i for i, leaf in enumerate(self.step.batch)}),
            *unpacked("received", {value: i for i, value in enumerate(self.step.received)}),
        ]
        body = begun_ahead([*inputs, *before_first_use(self.plain_casts, self.lines)])
        if self.compiler is not None:
            body = self.compiler.compiled(body, self.namespace, {f"v{value}" for value in given})
        # Parameters may yet be on their way: each is asked for where it is used first.
        body = before_first_use(
            unpacked("parameters", given), begun_ahead(body, self.stage.ahead_bytes)
        )
        body = drop_dead(body)
        head = "def step(parameters, buffers, batch, received, counters):"
        source = "\n    ".join([head, *map(str, body)]) + "\n"
        function = function_of(source, "step", self.namespace)
        return LoweredStep(
            source, function, tuple(given.values()), self.step.escaping, self.step.sent, made
        )


def _not_kept(target: Callable[..., Tensor], is_stored: bool) -> Callable[..., Tensor]:
    """`target`, whose result is made again for others' backward, or brought from host memory (see
    `SavedTensorHooks`).
    """

    def run(*args: Any, **kwargs: Any) -> Tensor:
        result = target(*args, **kwargs)
        regather = active_regather()
        if regather is None or not result.requires_grad:
            return result
        if is_stored:
            regather.note_stored(result)
        else:
            operands: list[Tensor] = []
            given = with_slots(
                (args, tuple(kwargs.items())), Tensor, operands
            )  # holds none of the operands

            def again(tensors: list[Tensor]) -> Tensor:
                same_args, same_kwargs = map_slots(given, lambda slot: tensors[slot.index])
                return target(*same_args, **dict(same_kwargs))

            regather.note_made(result, again, operands)
        return result

    return run


def prefetchable(step: StepGraph) -> frozenset[int]:
    """The batch's leaves and what is computed of them without parameters and random numbers.

    A mean over targets that are not ignored divides by their number among all devices' rows. Where
    the loss needs it, all devices would wait for the slowest; started first, it is there long
    before. Values with more bytes than the
    batch, and what needs them, are left out: they would be kept for longer.
    """
    known = {leaf.value for leaf in step.batch}
    most = sum(step.values[leaf.value].num_bytes for leaf in step.batch)
    given = {given.value for given in step.constant_inputs}
    for op in step.ops:
        metas = [step.values[value] for value in op.results]
        small = all(meta.num_bytes <= most and not meta.requires_grad for meta in metas)
        reads_batch = any(value in known for value in op.operands)
        reads_nothing_else = (known | given).issuperset(op.operands)
        if small and reads_batch and reads_nothing_else and not is_random(op.call):
            known.update(op.results)
    return frozenset(known)
