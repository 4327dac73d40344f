"""ProgramWriter: a StepGraph and its StagePlan as the text of one device's program.

Each op becomes a line that calls it on local tensors. Reshardings stand before the first op that
reads their result. What cannot be written as a literal is bound to a name in the program's
namespace.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from alpa_strategy.capture.products import Product, product_of
from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.execution import Execution
from alpa_strategy.ir.gathers import is_gather, local_bytes
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.guards import SymbolicScalar, at_counters, is_symbolic
from alpa_strategy.ir.op import AxisStrategy, LocalCall, OpCall, Slot
from alpa_strategy.ir.per_rank import PerRank, with_rank_dim
from alpa_strategy.ir.placement import INVARIANT, DualLayout, dual_layout_to_str, value_layout
from alpa_strategy.ir.plan import StagePlan
from alpa_strategy.ir.plan_file import FIX
from alpa_strategy.ir.stage_graph import batch_layout
from alpa_strategy.ir.value_names import maker_names
from alpa_strategy.lower.bindings import python_function
from alpa_strategy.lower.lines import (
    Line,
    before_first_use,
    drop_dead,
    function_of,
    is_literal,
    launch_early,
    unpacked,
)
from alpa_strategy.lower.local_ops import batch_norm_in_parts, build_local_op
from alpa_strategy.lower.lowered_step import LoweredStep, per_step_name
from alpa_strategy.lower.others_buffers import reads_others_buffers
from alpa_strategy.lower.overlapped_matmul import MatmulSpec, OverlappedMatmul
from alpa_strategy.lower.segments import Compiler, is_compilable
from alpa_strategy.lower.unsaved_results import without_saving
from alpa_strategy.sharding.per_step import casts_of_parameters
from alpa_strategy.sharding.strategies import localize

Decided = TypeVar("Decided")


@dataclass
class ProgramWriter:
    """Writes the program line by line, and binds what the lines refer to."""

    step: StepGraph
    stage: StagePlan
    mesh: MeshComm
    device: torch.device
    random: ShardedRandom
    # layouts of values that other programs of the stage have computed
    made_before: Mapping[int, DualLayout] = field(default_factory=dict)
    # values that are computed once per step, and taken as parameters
    per_step_values: Collection[int] = ()
    compiler: Compiler | None = None

    def __post_init__(self) -> None:
        step = self.step
        stage = self.stage
        self._read_execution()
        # path of the submodule whose op is being written
        self.module = ""
        # names of the ops that are written
        self.done: set[str] = set()
        self.lines: list[Line] = []
        self.namespace: dict[str, Any] = {}
        # value -> layout in which it is computed
        self.layouts: dict[int, DualLayout] = {}
        # (value, target layout) -> variable
        self.copies: dict[tuple[int, DualLayout], str] = {}
        # values that later recompute segments read
        self.passed_on: tuple[int, ...] = ()

        sums_in_fp32 = any(plan.sums_in_fp32 for plan in stage.parameter_plans.values())
        # Casts of parameters are done by their reshardings, so that gradients are summed before
        # they are rounded. For other readers the casts are written as ops.
        casts = casts_of_parameters(step)
        self.casts = casts if sums_in_fp32 else {}
        self.plain_casts: list[Line] = []
        parameters = {parameter.value for parameter in step.parameters}
        self.parameters = {*parameters, *casts, *self.per_step_values}
        self.summed_in_fp32 = self.parameters if sums_in_fp32 else set[int]()

        num_axes = len(self.mesh.shape)
        for parameter in step.parameters:
            plan = stage.parameter_plans[parameter.name]
            self.layouts[parameter.value] = plan.step_layout(parameter.meta.requires_grad)
        for leaf in step.batch:
            self.layouts[leaf.value] = batch_layout(step, leaf.batch_dim, num_axes)
        for constant_input in step.constant_inputs:
            self.layouts[constant_input.value] = (INVARIANT,) * num_axes
        self.layouts.update(self.made_before)
        for value in step.received:
            if value in stage.received:
                self.layouts[value] = stage.received[value]
        for constant in step.constants:
            self.namespace[f"v{constant.value}"] = constant.tensor.to(self.device)

    def _read_execution(self) -> None:
        """Read what the plan says of the program besides layouts, and set it as attributes.

        Raises:
            PlanError: the plan file is of a version that did not have it.
        """
        step = self.step
        self.execution = execution = execution_of(self.stage)
        # value -> layout in which it leaves the step
        self.leaving = _decided(execution.leaving, "leaving")

        names = maker_names(step)
        early = set(execution.early_reshardings)
        # values whose resharding is launched before the forward
        self.prefetched = {value for value, name in names.items() if name in early}

        by_name = {op.name: op for op in step.ops}
        # matmul -> the matmuls that it is fused with, itself included
        self.fused: dict[str, list[Op]] = {}
        for group in execution.fused_matmuls:
            ops = [by_name[name] for name in group if name in by_name]
            self.fused.update({op.name: ops for op in ops})

        # names of the ops that are written otherwise as the program is compiled
        self.channels_last_ops: set[str] = set()
        self.split_batch_norms: set[str] = set()
        if self.compiler is not None:
            compiled = _decided(execution.compiled, "compiled")
            self.channels_last_ops.update(compiled.channels_last)
            self.split_batch_norms.update(compiled.split_batch_norms)

    # --- One op.

    def op(self, op: Op) -> None:
        """Write an op: its operands in the layouts that its strategy takes, then its call.

        Matmuls that are fused with it are written, too. Nothing is written twice.
        """
        if op.name in self.done:
            return
        self.module = op.module
        if op.name in self.fused:
            self.products(self.fused[op.name], is_fused=True)
            return
        if op.name in self.execution.chunk_dims:
            self.products([op], is_fused=False)
            return
        self.done.add(op.name)

        operands = []
        for position, value in enumerate(op.operands):
            operands.append(self.resharded(value, self.operand_layout(op, position)))
        for position, value in enumerate(op.results):
            self.layouts[value] = self.result_layout(op, position)

        strategies = self.stage.strategies[op.name]
        local = localize(op.call, strategies, self.mesh.shape, self.mesh.coordinate)
        if op.name in self.channels_last_ops:
            operands[0] = self.channels_last(op, local, operands[0])
        compilable_call: OpCall | None
        if op.name in self.split_batch_norms:
            compilable_call = self.split_batch_norm(op, local, operands)
            code = self.call_text(
                f"f_{op.name}", compilable_call.target, op, compilable_call, operands
            )
        else:
            code, compilable_call = self.call(op, local, strategies, operands)

        results = tuple(f"v{value}" for value in op.results)
        targets = ", ".join(results)
        if op.call.returns_tuple and len(results) == 1:
            targets += ","
        line = Line(
            f"{targets} = {code}",
            results,
            tuple(operands),
            op.source or op.module,
            op.module,
            compilable_call,
        )
        is_cast = bool(self.casts.keys() & op.results)
        lines = self.plain_casts if is_cast else self.lines
        lines.append(line)

    def operand_layout(self, op: Op, position: int) -> DualLayout:
        """Return the layout in which an op takes an operand."""
        return tuple(strategy.inputs[position] for strategy in self.stage.strategies[op.name])

    def result_layout(self, op: Op, position: int) -> DualLayout:
        """Return the layout in which an op computes a result."""
        return tuple(strategy.outputs[position] for strategy in self.stage.strategies[op.name])

    def call(
        self, op: Op, local: LocalCall, strategies: tuple[AxisStrategy, ...], operands: list[str]
    ) -> tuple[str, OpCall | None]:
        """Write the expression that calls the op on local operands.

        Returns:
            (the expression, the call itself if it may be compiled, else None).
        """
        function = f"f_{op.name}"
        if local.implementation is not None and is_symbolic(op.call):
            self.namespace[function] = self._call_at_counters(op, local, strategies)
            return f"{function}(counters, {', '.join(operands)})", None
        if local.implementation is not None:
            self.namespace[function] = build_local_op(op.call, strategies, local, self.mesh)
            return f"{function}({', '.join(operands)})", None

        call = local.call.on(self.device)
        target = call.target
        is_saved = op.name not in self.stage.recomputed_ops
        is_plain = is_saved and local.random_axes is None and not is_symbolic(op.call)
        if is_plain and isinstance(target, PerRank) and target.num_ranks == 1:
            return self.call_of_one_rank(op, target, operands)
        if is_plain:
            target = python_function(call)
        if not is_saved:
            target = without_saving(target, op.name in self.stage.stored)
        if local.random_axes is not None:
            target = functools.partial(self.random.run, local.random_axes, target)
        code = self.call_text(function, target, op, call, operands)
        if not is_plain or not is_compilable(call):
            return code, None
        return code, call

    def call_of_one_rank(
        self, op: Op, target: PerRank, operands: list[str]
    ) -> tuple[str, OpCall | None]:
        """Write the call of a rank's op where this device has the samples of a single rank.

        It is the op itself, so that it is compiled together with its neighbours.

        Returns:
            (the expression, the op's call if it may be compiled, else None).
        """
        inner = target.inner.on(self.device)
        of_rank = []
        for operand, is_mapped in zip(operands, target.mapped, strict=True):
            # Not `[0]`: its backward copies the gradient into zeros, which are not channels last.
            of_rank.append(f"{operand}.squeeze(0)" if is_mapped else operand)
        function = python_function(inner)
        text = self.call_text(f"f_{op.name}", function, op, inner, of_rank)
        self.namespace[with_rank_dim.__name__] = with_rank_dim
        code = f"{with_rank_dim.__name__}({text})"
        return code, inner if is_compilable(inner) else None

    def _call_at_counters(
        self, op: Op, local: LocalCall, strategies: tuple[AxisStrategy, ...]
    ) -> Callable[..., Any]:
        """Return a function of (counters by name, operands) that runs the op on shards; for an op
        whose arguments depend on the counters.

        Args:
            local: the op's call on this device's shards in the captured step.
            strategies: of the op, per mesh axis.
        """
        mesh = self.mesh

        def run(counters: Mapping[str, int], *operands: Tensor) -> Any:
            call_now = at_counters(op.call, counters)
            local_now = replace(local, call=at_counters(local.call, counters))
            return build_local_op(call_now, strategies, local_now, mesh)(*operands)

        return run

    def call_text(
        self, function: str, target: Callable[..., Any], op: Op, call: OpCall, operands: list[str]
    ) -> str:
        """Return a call of `target` with the call's arguments as text. The program's namespace gets
        it under the name `function`.
        """
        self.namespace[function] = target
        arguments = [self.argument(op, arg, operands) for arg in call.args]
        for name, value in call.kwargs:
            arguments.append(f"{name}={self.argument(op, value, operands)}")
        return f"{function}({', '.join(arguments)})"

    def argument(self, op: Op, arg: Any, operands: list[str]) -> str:
        """Return an argument of an op as source text; a value that has no literal form is bound to
        a name in the program's namespace.

        Args:
            operands: variables of the op's operands.
        """
        if isinstance(arg, Slot):
            return operands[arg.index]
        if isinstance(arg, tuple):
            items = [self.argument(op, item, operands) for item in arg]
            return f"[{', '.join(items)}]"
        # By its class it is a number, too: its value in the captured step.
        is_computed = isinstance(arg, SymbolicScalar)
        if not is_computed and is_literal(arg):
            return repr(arg)
        name = f"c{len(self.namespace)}"
        if is_computed:
            self.namespace[name] = arg.expression.value
            return f"{name}(counters)"
        self.namespace[name] = arg
        return name

    def channels_last(self, op: Op, local: LocalCall, image: str) -> str:
        """Write a convolution's images [samples, channels, height, width] as channels last.

        Kernels are faster with them, and values computed from them keep the memory format, as
        segments keep eager PyTorch's strides.

        Args:
            op: the convolution.
            local: its call on this device's shards.
            image: variable of the images.

        Returns:
            The variable of the result.
        """
        name = f"image_{op.name}"
        meta = local.call.operands[0]
        kwargs = (("memory_format", torch.channels_last),)
        call = OpCall(torch.ops.aten.contiguous.default, (Slot(0),), kwargs, (meta,), (meta,))
        code = f"{name} = {self.call_text(f'inner_{op.name}', call.target, op, call, [image])}"
        self.lines.append(Line(code, (name,), (image,), op.source or op.module, op.module, call))
        return name

    def split_batch_norm(self, op: Op, local: LocalCall, operands: list[str]) -> OpCall:
        """Write a batch norm up to the exchange of its sums between devices, and the exchange.

        So the ops before and after the exchange are compiled with their neighbours.

        Args:
            operands: variables; replaced by those that the rest reads.

        Returns:
            The call that computes the op's results from `operands`.
        """
        before, exchange, after = batch_norm_in_parts(op.call, local, self.mesh)
        x = f"x_{op.name}"
        part = f"part_{op.name}"
        carrier = f"carrier_{op.name}"
        shared = f"shared_{op.name}"
        position = before.args[0].index
        note = op.source or op.module

        before_call = self.call_text(f"before_{op.name}", before.target, op, before, operands)
        self.namespace[f"exchange_{op.name}"] = exchange
        before_line = Line(
            f"{x}, {part}, {carrier} = {before_call}",
            (x, part, carrier),
            (operands[position],),
            note,
            op.module,
            before,
        )
        exchange_line = Line(
            f"{shared} = exchange_{op.name}({part})", (shared,), (part,), note, op.module
        )
        self.lines += [before_line, exchange_line]

        operands[position] = x
        operands += [shared, carrier]
        return after

    # --- Matmuls that are overlapped with a sum over devices.

    def products(self, ops: Sequence[Op], is_fused: bool) -> None:
        """Write the line of matmuls of one input; see `OverlappedMatmul`.

        Args:
            ops: the matmuls.
            is_fused: whether the resharding of their input is part of the line, so that the sum of
                its gradient is overlapped.
        """
        into = self._input_resharding(ops[0]) if is_fused else None
        input_name = ""
        operands: list[str] = []
        results: list[str] = []
        specs: list[MatmulSpec] = []
        for op in ops:
            product = product_of(op.call)
            assert product is not None
            operands += self._weight_and_bias(op, product)
            (result,) = op.results
            value = op.operands[product.rows]
            input_name = f"v{value}"
            if into is None:
                input_name = self.resharded(value, self.operand_layout(op, product.rows))
            self.done.add(op.name)
            self.layouts[result] = self.result_layout(op, 0)
            adds_bias = self._adds_bias(op)
            if op.name not in self.execution.chunk_dims:
                specs.append(MatmulSpec(product, adds_bias))
                results.append(f"v{result}")
            else:
                summed = self._result_sum(op)
                dim = self.execution.chunk_dims[op.name]
                num_chunks = self.stage.num_chunks.get(op.name, 1)
                specs.append(MatmulSpec(product, adds_bias, summed, dim, num_chunks))
                results.append(f"v{result}_0")
                self.copies[result, summed.dst] = results[-1]

        first = ops[0]
        self.module = first.module
        name = f"products_{first.name}"
        self.namespace[name] = functools.partial(OverlappedMatmul.apply, into, specs)
        code = f"{', '.join(results)}, = {name}({', '.join([input_name, *operands])})"
        reads = (input_name, *(operand for operand in operands if operand != "None"))
        self.lines.append(
            Line(code, tuple(results), reads, first.source or first.module, first.module)
        )

    def _weight_and_bias(self, op: Op, product: Product) -> Iterator[str]:
        """Yield the variables of a matmul's weight and bias, in the layouts that it takes; the text
        `None` for a bias that it does not have.
        """
        for position in (product.weight, product.bias):
            if position is None:
                yield "None"
                continue
            value = op.operands[position]
            if value not in self.layouts:
                # A cast of a parameter that comes later in the graph.
                self.op(self.step.ops[self.step.makers[value]])
            yield self.resharded(value, self.operand_layout(op, position))

    def _adds_bias(self, op: Op) -> bool:
        """Whether this device adds the bias: of results that are summed, only the first does."""
        for axis, strategy in enumerate(self.stage.strategies[op.name]):
            if strategy.implementation is not None and self.mesh.coordinate[axis] != 0:
                return False
        return True

    def _input_resharding(self, op: Op) -> Reshard:
        """Return the resharding of a matmul's input to the layout that it takes."""
        product = product_of(op.call)
        assert product is not None
        value = op.operands[product.rows]
        return Reshard(
            self.layouts[value],
            self.operand_layout(op, product.rows),
            self.step.values[value].shape,
            self.mesh,
            subject=self.step.name_of(value),
        )

    def _result_sum(self, op: Op) -> Reshard:
        """Return the resharding of a matmul's result to the one layout in which it is read."""
        (value,) = op.results
        index, position = self.step.consumers[value][0]
        target = self.operand_layout(self.step.ops[index], position)
        shape = op.call.results[0].shape
        subject = self.step.name_of(value)
        return Reshard(self.result_layout(op, 0), target, shape, self.mesh, subject=subject)

    # --- Values in other layouts, and the program.

    def resharded(self, value: int, target: DualLayout) -> str:
        """Return the variable of `value` in `target`; it is resharded once for all consumers."""
        source = self.layouts[value]
        meta = self.step.values[value]
        has_same_value = value_layout(source) == value_layout(target)
        if source == target or (not meta.requires_grad and has_same_value):
            return f"v{value}"
        key = (value, target)
        if key not in self.copies:
            self.copies[key] = self._write_resharding(value, source, target)
        return self.copies[key]

    def _write_resharding(self, value: int, source: DualLayout, target: DualLayout) -> str:
        """Write the line of a value's resharding from one layout to another, unless it does
        nothing.

        Returns:
            The variable of its result.
        """
        meta = self.step.values[value]
        variable = f"v{value}"
        cast = None
        if value in self.casts and self.layouts[self.casts[value]] == source:
            # The resharding reads the parameter, and casts it.
            variable = f"v{self.casts[value]}"
            cast = meta.dtype

        num_copies = sum(known == value for known, _ in self.copies)
        name = f"v{value}_{num_copies}"
        function = f"reshard_{name}"
        sums_in_fp32 = value in self.summed_in_fp32
        subject = self.step.name_of(value)
        reshard = Reshard(source, target, meta.shape, self.mesh, sums_in_fp32, cast, subject)
        if reshard.is_idle:
            return variable
        self.namespace[function] = reshard
        gathered_bytes = 0
        if value in self.parameters and is_gather(source, target):
            gathered_bytes = local_bytes(meta, target, self.mesh.shape)
        self.lines.append(
            Line(
                f"{name} = {function}({variable})",
                (name,),
                (variable,),
                f"[{dual_layout_to_str(source)}] -> [{dual_layout_to_str(target)}]",
                self.module,
                is_resharding=True,
                gathers=gathered_bytes,
                is_early=value in self.prefetched,
            )
        )
        return name

    def program(self, passed_on: tuple[int, ...] = ()) -> LoweredStep:
        """Write all ops, and return the program, compiled to a function.

        Args:
            passed_on: values that are returned as well, in the layouts in which they are computed.
        """
        self.passed_on = passed_on
        for op in self.step.ops:
            self.op(op)
        self.module = ""
        self._write_return()

        parameters = {parameter.value: parameter.name for parameter in self.step.parameters}
        for value in sorted(self.per_step_values):
            parameters[value] = per_step_name(value)
        inputs = [
            *unpacked("buffers", {buffer.value: buffer.name for buffer in self.step.buffers}),
            *unpacked("batch", {leaf.value: i for i, leaf in enumerate(self.step.batch)}),
            *unpacked("received", {value: i for i, value in enumerate(self.step.received)}),
        ]
        body = launch_early([*inputs, *before_first_use(self.plain_casts, self.lines)])
        if self.compiler is not None:
            parameter_variables = {f"v{value}" for value in parameters}
            body = self.compiler.compiled(body, self.namespace, parameter_variables)
        body = launch_early(body, self.stage.prefetched_bytes)
        # Parameters may still be in flight: each is read just before its first use.
        body = before_first_use(unpacked("parameters", parameters), body)
        body = drop_dead(body)

        head = "def step(parameters, buffers, batch, received, counters):"
        source = "\n    ".join([head, *map(str, body)]) + "\n"
        return LoweredStep(
            source,
            function_of(source, "step", self.namespace),
            tuple(parameters.values()),
            self.step.escaping,
            self.step.sent,
            passed_on,
            reads_others_buffers(
                self.step, self.stage.strategies, self.layouts, self.copies, self.mesh.shape
            ),
            tuple(line.module for line in body),
        )

    def _write_return(self) -> None:
        """Write the return of all results in their layouts."""
        results = []
        for value in self.step.escaping:
            results.append(self.resharded(value, self.leaving[value]))
        results += [self.resharded(value, self.stage.sent[value]) for value in self.step.sent]
        results += [f"v{value}" for value in self.passed_on]
        # With a comma after each, so that one result is a tuple, too.
        returned = "".join(f"{result}, " for result in results)
        self.lines.append(Line(f"return ({returned})", (), tuple(results)))


def execution_of(stage: StagePlan) -> Execution:
    """Return the planner's decisions on a stage's programs.

    Raises:
        PlanError: the plan file is of a version that did not have it.
    """
    if stage.execution is None:
        raise PlanError("the plan lacks the `execution` of a stage", FIX)
    return stage.execution


def _decided(field: Decided | None, name: str) -> Decided:
    """Return a field of a stage's execution.

    Raises:
        PlanError: the plan file is of a version that did not have it, or the field is None as
            nothing was to be compiled.
    """
    if field is None:
        raise PlanError(f"the plan lacks `execution.{name}` of a stage", FIX)
    return field
