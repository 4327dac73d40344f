"""The options of ops and parameters and the tables of transfers on one mesh, each made once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.intra_op.options import (
    OpOptions,
    ParameterOptions,
    op_options,
    parameter_options,
    picked,
    without_parameters,
)
from alpa_strategy.ir.graph import ParameterInput, StepGraph
from alpa_strategy.ir.op import OpCall, TensorMeta
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.placement import INVARIANT, DualLayout


@dataclass(frozen=True)
class TransferTables:
    """The tables that a value's transfer shares with those of equal values.

    Attributes:
        source: [strategy] index of the layout that the maker gives.
        required: [reader][strategy] index of the layout that a reader requires.
        sources, targets: the layouts.
        cost, memory: [source, target], see `Transfer`.
        hidden, hidden_in_backward: [source, target], see `TransferLayouts`.
    """

    source: np.ndarray
    required: tuple[np.ndarray, ...]
    sources: tuple[DualLayout, ...]
    targets: tuple[DualLayout, ...]
    cost: np.ndarray
    memory: np.ndarray
    hidden: np.ndarray
    hidden_in_backward: np.ndarray


class OptionTables:
    """Options per op call and per parameter shape on one mesh, computed once for all layers that
    share them.
    """

    def __init__(
        self,
        mesh: LogicalMesh,
        costs: OpCosts,
        optimizer: OptimizerInfo,
        steps_per_update: int = 1,
        overlaps_matmuls: bool = True,
    ) -> None:
        self.mesh = mesh
        self.costs = costs
        self.optimizer = optimizer
        self.steps_per_update = steps_per_update
        # Whether programs overlap matmuls with sums: not if their backward is split.
        self.overlaps_matmuls = overlaps_matmuls
        self.unsharded: DualLayout = (INVARIANT,) * len(mesh.shape)
        self.only_unsharded = (self.unsharded,)
        self._ops: dict[OpCall, OpOptions] = {}
        self._repeated: dict[OpCall, OpOptions] = {}
        self._parameters: dict[tuple[Any, ...], ParameterOptions] = {}
        # By the identity of options: each entry holds what it is found by.
        self._resident: dict[tuple, tuple[OpOptions, OpOptions]] = {}
        self._layouts: dict[tuple[int, bool, int], tuple[OpOptions, tuple[DualLayout, ...]]] = {}
        self._transfers: dict[tuple, tuple[tuple, TransferTables]] = {}

    def op(self, call: OpCall) -> OpOptions:
        """Return the strategies of an op and their costs, made at the first such call."""
        if call not in self._ops:
            self._ops[call] = op_options(call, self.mesh, self.costs)
        return self._ops[call]

    def repeated_op(self, call: OpCall) -> OpOptions:
        """Return only the first strategy of an op, which repeats it on every device."""
        if call not in self._repeated:
            self._repeated[call] = picked(self.op(call), [0])
        return self._repeated[call]

    def without_parameters(
        self, options: OpOptions, metas: tuple[TensorMeta | None, ...]
    ) -> OpOptions:
        """Return the options without bytes of parameters; equal arguments give the same object.

        Args:
            options: of an op.
            metas: of each operand, None for operands that are no parameters.
        """
        key = id(options), metas
        if key not in self._resident:
            self._resident[key] = options, without_parameters(options, metas, self.mesh)
        return self._resident[key][1]

    def layouts(self, options: OpOptions, is_input: bool, position: int) -> tuple[DualLayout, ...]:
        """Return, per strategy, the layout of an op's operand or result. Equal arguments give the
        same object.

        Args:
            is_input: whether it is an operand.
            position: among the op's operands or results.
        """
        key = id(options), is_input, position
        if key not in self._layouts:
            by_strategy = options.inputs if is_input else options.outputs
            self._layouts[key] = (
                options,
                tuple(layouts_of_strategy[position] for layouts_of_strategy in by_strategy),
            )
        return self._layouts[key][1]

    def transfer(
        self,
        ends: tuple[tuple[DualLayout, ...], ...],
        more: tuple,
        compute: Callable[[], "TransferTables"],
    ) -> "TransferTables":
        """Return the tables of a value's transfer, computed once for all values with the same ends.

        Args:
            ends: per strategy, the layouts of the maker and of each reader. Equal ops have the same
                objects (`layouts`), so these stand for the ops' costs as well.
            more: all else that the tables depend on.
            compute: makes the tables.
        """
        key = tuple(map(id, ends)), more
        if key not in self._transfers:
            self._transfers[key] = ends, compute()
        return self._transfers[key][1]

    def parameter(
        self, parameter_input: ParameterInput, step: StepGraph, on_host: bool = False
    ) -> ParameterOptions:
        """Return the ways to store a parameter of the step, in host memory if `on_host`, else on
        the device. Equal parameters share one object.
        """
        key = (
            parameter_input.meta,
            parameter_input.num_segments,
            step.dtypes_read[parameter_input.name],
            on_host,
            self.optimizer.full_update(parameter_input.names),
        )
        if key not in self._parameters:
            self._parameters[key] = parameter_options(
                parameter_input,
                key[2],
                self.mesh,
                self.costs,
                self.optimizer,
                self.steps_per_update,
                on_host,
            )
        return self._parameters[key]
