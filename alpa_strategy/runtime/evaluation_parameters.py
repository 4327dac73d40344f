"""The parameters of a running stage as an evaluation step takes them: pinned as they lie, forward only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.ir.graph import ParameterInput, StepGraph
from alpa_strategy.ir.parameter_plan import ParameterMode, ParameterPlan
from alpa_strategy.ir.stage_plan import StagePlan
from alpa_strategy.runtime.parameters import MeshParameters

_WHOLE = ParameterMode.parse("R")


def evaluation_pins(step: StepGraph, running: StagePlan) -> dict[str, ParameterPlan]:
    """How the running stage's parameters arrive in an evaluation step: name -> plan of modes R and S<d> only.

    What is gathered once per step arrives whole (`R`), shards arrive as shards. A parameter that the running stage does
    not have, or sees in other segments, arrives whole.
    """
    plans, num_axes = running.parameter_plans, len(running.logical_mesh)
    pins: dict[str, ParameterPlan] = {}
    for given in step.parameters:
        own = next((plans[name] for name in given.names if name in plans), None)
        if own is None or own.num_segments != given.num_segments:
            modes = (_WHOLE,) * num_axes
        else:
            modes = tuple(mode if mode.is_shard else _WHOLE for mode in own.modes)
        pins[given.name] = ParameterPlan(modes, given.num_segments)
    return pins


class EvaluationParameters:
    """What a stage's program asks of its parameters (`pipeline.stage_worker.StageParameters`), for evaluation.

    Args:
        graph: what the stage runs.
        held: the stage's parameters as they lie.
        pins: `evaluation_pins`.
    """

    def __init__(
        self, module: nn.Module, graph: StepGraph, held: MeshParameters, pins: Mapping[str, ParameterPlan]
    ) -> None:
        self._module, self._graph, self._held, self._pins = module, graph, held, pins

    def step_inputs(self) -> dict[str, Tensor]:
        """Name -> the tensor that `pins` promise. Collective over the mesh where one is gathered."""
        return {given.name: self._input(given, self._pins[given.name]) for given in self._graph.parameters}

    def _input(self, given: ParameterInput, pin: ParameterPlan) -> Tensor:
        parameter = self._module.get_parameter(given.name)
        name = self._held.name_of(parameter)
        shape = torch.Size(given.meta.shape)
        if name is None:
            return parameter.detach().view(shape)
        if not pin.is_whole:
            return self._held.step_input(name).detach()
        tensor = self._held.step_input(name).detach()
        if tensor.numel() != shape.numel():  # a shard, of other segments than the step's
            tensor = self._held.gather_like(name, parameter.detach())
        return tensor.reshape(shape)

    def regather_hooks(self) -> AbstractContextManager[Any]:
        """Nothing is kept for a backward."""
        return nullcontext()

    def sync(self, enabled: bool) -> None:
        """Nothing: there are no gradients."""

    def hold(self, names: Collection[str]) -> None:
        """Nothing: there are no gradients."""

    def finish_backward(self) -> None:
        """Nothing: there are no gradients."""
