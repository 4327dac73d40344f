"""An evaluation step around the parameters of a running stage: they are pinned as they lie; forward only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.ir.graph import ParameterInput, StepGraph
from alpa_strategy.ir.plan import ParameterPlan
from alpa_strategy.runtime.parameters import ParameterStore


def without_unused_parameters(step: StepGraph) -> StepGraph:
    """The step without the parameters that nothing in it reads: bringing them to it would cost communication."""
    escaping = set(step.escaping)
    used = (p for p in step.parameters if p.value in step.consumers or p.value in escaping)
    return replace(step, parameters=tuple(used))


def evaluation_pins(step: StepGraph, running: Mapping[str, ParameterPlan], num_axes: int) -> dict[str, ParameterPlan]:
    """How the running plan's parameters arrive in an evaluation step: name -> plan of modes R and S<d> only.

    What is gathered once per step arrives whole (`R`), shards arrive as shards. A parameter that the running plan does
    not have, or sees in other segments, arrives whole.
    """
    pins: dict[str, ParameterPlan] = {}
    for given in step.parameters:
        own = next((running[name] for name in given.names if name in running), None)
        if own is None or own.num_segments != given.num_segments:
            modes: tuple[str, ...] = ("R",) * num_axes
        else:
            modes = tuple(mode if mode[0] == "S" else "R" for mode in own.modes)
        pins[given.name] = ParameterPlan(modes, given.num_segments)
    return pins


def evaluation_inputs(
    module: Any, step: StepGraph, store: ParameterStore, pins: Mapping[str, ParameterPlan]
) -> dict[str, Tensor]:
    """Name -> the tensor that `pins` promise. Collective where one is gathered."""
    return {given.name: _input(module, given, store, pins[given.name]) for given in step.parameters}


def _input(module: Any, given: ParameterInput, store: ParameterStore, pin: ParameterPlan) -> Tensor:
    parameter = module.get_parameter(given.name)
    name = store.name_of(parameter)
    shape = torch.Size(given.meta.shape)
    if name is None:
        return parameter.detach().view(shape)
    if all(mode == "R" for mode in pin.modes):
        tensor = store.step_input(name).detach()
        if tensor.numel() != shape.numel():  # a shard, of other segments than the step's
            tensor = store.gather(name)
        return tensor.reshape(shape)
    return store.step_input(name).detach()


class EvaluationParameters:
    """The parameters of one pipeline stage as an evaluation step takes them (a `staged_step.StageParameters`)."""

    def __init__(self, module: Any, graph: StepGraph, store: ParameterStore, pins: Mapping[str, ParameterPlan]) -> None:
        self._module, self._graph, self._store, self._pins = module, graph, store, pins

    def step_inputs(self) -> dict[str, Tensor]:
        """Name -> what the stage's program takes."""
        return evaluation_inputs(self._module, self._graph, self._store, self._pins)

    def regather_hooks(self) -> AbstractContextManager[Any]:
        """Nothing is kept for a backward."""
        return nullcontext()

    def sync(self, enabled: bool) -> None:
        """Nothing: there are no gradients."""

    def hold(self, names: Collection[str]) -> None:
        """Nothing: there are no gradients."""

    def finish_backward(self) -> None:
        """Nothing: there are no gradients."""
