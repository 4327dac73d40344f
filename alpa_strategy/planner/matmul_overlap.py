"""Which matmuls overlap with a sum over devices, in a program (`lower/overlapped_matmul.py`).

Matmuls that read one input in one layout are fused if the gradient of the input is one sum over
devices: the sum runs while the gradients of their weights are computed. A matmul whose result is
one sum may be computed in chunks (`StagePlan.num_chunks`): one is summed while the next is
multiplied.
"""

from collections.abc import Collection, Mapping, Sequence

from alpa_strategy.capture.products import Product
from alpa_strategy.intra_op.matmul_sums import (
    IMPLEMENTATIONS,
    chunk_dims,
    is_in_segments,
    overlapping_matmul,
    sums_gradient,
)
from alpa_strategy.ir.graph import Op, StepGraph
from alpa_strategy.ir.placement import INVARIANT, DualLayout
from alpa_strategy.ir.plan import StagePlan
from alpa_strategy.ir.stage_graph import batch_layout
from alpa_strategy.sharding.per_step import casts_of_parameters
from alpa_strategy.sharding.stage_graphs import SegmentGraph

# Names of matmuls of one input, in the order of the graph.
Group = tuple[str, ...]


def layouts_of_stage(stage_graph: StepGraph, stage: StagePlan) -> dict[int, DualLayout]:
    """Return value -> the layout in which a stage has it: as it arrives, or as its op makes it.

    Args:
        stage_graph: all ops of the stage.
        stage: its plan.
    """
    num_axes = len(stage.logical_mesh)
    layouts: dict[int, DualLayout] = {}
    for parameter in stage_graph.parameters:
        plan = stage.parameter_plans[parameter.name]
        layouts[parameter.value] = plan.step_layout(parameter.meta.requires_grad)
    for leaf in stage_graph.batch:
        layouts[leaf.value] = batch_layout(stage_graph, leaf.batch_dim, num_axes)
    for constant in stage_graph.constant_inputs:
        layouts[constant.value] = (INVARIANT,) * num_axes
    layouts.update(stage.received)
    for op in stage_graph.ops:
        for position, value in enumerate(op.results):
            strategies = stage.strategies[op.name]
            layouts[value] = tuple(strategy.outputs[position] for strategy in strategies)
    return layouts


class MatmulOverlap:
    """Goes through a program's ops in the order in which lowering writes them.

    Fused matmuls are written at the first of them, which can only be done if all their operands are
    there by then.

    Args:
        segment: the program.
        stage: the plan of its stage.
        layouts: `layouts_of_stage`.
        per_step_values: those that are computed once per step.
        wanted: the groups that are fused, and the matmuls that are computed in chunks; None: all
            that can be.

    Attributes:
        groups: the groups that are fused.
        chunk_dims: matmul -> the dim of its result that is in chunks.
    """

    def __init__(
        self,
        segment: SegmentGraph,
        stage: StagePlan,
        layouts: Mapping[int, DualLayout],
        per_step_values: Collection[int] = (),
        wanted: tuple[Collection[Group], Mapping[str, int]] | None = None,
    ) -> None:
        self.groups: list[Group] = []
        self.chunk_dims: dict[str, int] = {}
        self._graph = segment.graph
        self._passed_on = segment.passed_on
        self._stage = stage
        self._layouts = layouts
        self._wanted = wanted
        parameters = {parameter.value for parameter in self._graph.parameters}
        casts = casts_of_parameters(self._graph)
        # Values that are made of parameters alone and can be written early.
        self._of_parameters = {*parameters, *casts, *per_step_values}
        # Names of ops that are written.
        self._written: set[str] = set()
        for op in self._graph.ops:
            if op.name not in self._written:
                self._write(op)

    def _write(self, op: Op) -> None:
        """Record the group and the chunk dims of an op, and of those that are fused with it, as the
        program's writer comes to them.
        """
        group = self._group(op)
        if group:
            self.groups.append(tuple(member.name for member in group))
        for member in group or (op,):
            dims = self._possible_dims(member)
            chosen = self._chosen_dim(member, dims)
            if chosen is not None:
                self.chunk_dims[member.name] = chosen
            if group or chosen is not None:
                self._write_operands(member)
            self._written.add(member.name)

    def _write_operands(self, op: Op) -> None:
        """Write casts of parameters that come later in the graph."""
        for value in op.operands:
            if not self._is_there(value):
                self._written.add(self._graph.ops[self._graph.makers[value]].name)

    def _is_there(self, value: int) -> bool:
        """Whether a value arrives in the program or is computed so far."""
        maker = self._graph.makers.get(value)
        return maker is None or self._graph.ops[maker].name in self._written

    # Matmuls of one input.

    def _group(self, op: Op) -> Sequence[Op]:
        """Return the matmuls that are fused with `op`, itself the first; () if it is alone."""
        matmul = self._matmul(op)
        if matmul is None:
            return ()
        value = op.operands[matmul.rows]
        layout = self._operand_layout(op, matmul.rows)
        if not self._graph.values[value].requires_grad:
            return ()
        if not sums_gradient(self._layouts[value], layout, self._stage.logical_mesh):
            return ()

        # Gradients of all ops that read the input in this layout are summed at once. An op may read
        # it twice.
        readers: dict[str, Op] = {}
        for index, position in self._graph.consumers[value]:
            reader = self._graph.ops[index]
            if self._operand_layout(reader, position) == layout:
                readers[reader.name] = reader
        if self._wanted is not None and tuple(readers) not in self._wanted[0]:
            return ()
        group = list(readers.values())
        return group if self._are_matmuls_of(value, group) else ()

    def _are_matmuls_of(self, value: int, ops: Sequence[Op]) -> bool:
        """Whether `ops` are matmuls of `value` that can be written now.

        None of them is written. Their other operands are, or are computed from parameters alone.
        """
        for op in ops:
            if op.name in self._written:
                return False
            matmul = self._matmul(op)
            if matmul is None or op.operands[matmul.rows] != value:
                return False
            if op.operands.count(value) > 1:
                return False
            for other in op.operands:
                if other == value or self._is_there(other):
                    continue
                maker = self._graph.ops[self._graph.makers[other]]
                if not self._of_parameters.issuperset(maker.operands):
                    return False
        return True

    def _matmul(self, op: Op) -> Product | None:
        """Return the matmul that a device computes for an op; None if it is something else."""
        if op.name in self._stage.recomputed_ops:
            return None
        for strategy in self._stage.strategies[op.name]:
            if strategy.implementation not in IMPLEMENTATIONS:
                return None
        return overlapping_matmul(op.call)

    def _operand_layout(self, op: Op, position: int) -> DualLayout:
        """Return the layout in which an op takes an operand."""
        return tuple(strategy.inputs[position] for strategy in self._stage.strategies[op.name])

    # Results in chunks.

    def _chosen_dim(self, op: Op, dims: Mapping[int, int]) -> int | None:
        """Return the dim in whose chunks a matmul's result is computed; None: in none. It is the
        wanted one if it is possible; if none are given, the longest.

        Args:
            op: the matmul.
            dims: the possible dims, with their local sizes.
        """
        if self._wanted is not None:
            wanted = self._wanted[1].get(op.name)
            return wanted if wanted in dims else None
        splittable = [dim for dim, size in dims.items() if size > 1]
        return max(splittable, key=dims.__getitem__, default=None)

    def _possible_dims(self, op: Op) -> dict[int, int]:
        """Return the dims in whose chunks the result of a matmul may be computed, with the sizes
        that the last device has of them.

        Empty unless the plan has a number of chunks for the matmul, and its result is read in one
        layout alone and does not leave the program.
        """
        if self._stage.num_chunks.get(op.name, 1) == 1:
            return {}
        matmul = self._matmul(op)
        if matmul is None:
            return {}
        (value,) = op.results
        targets = set()
        for index, position in self._graph.consumers.get(value, ()):
            targets.add(self._operand_layout(self._graph.ops[index], position))
        leaves = value in {*self._graph.escaping, *self._graph.sent, *self._passed_on}
        if leaves or is_in_segments(op.call, matmul) or len(targets) != 1:
            return {}
        shape = op.call.results[0].shape
        mesh_shape = self._stage.logical_mesh
        return chunk_dims(shape, self._layouts[value], targets.pop(), mesh_shape)
