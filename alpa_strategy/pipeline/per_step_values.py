"""Values that a stage computes from its parameters alone (casts, weight norm): once per step,
stored for all its micro-batches.

In the autograd graph of a micro-batch they are one node between the parameters and their uses.
Gradients so reach the parameters micro-batch by micro-batch, in the order and precision in which
they would if each micro-batch computed the values itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.lower.lowered_step import LoweredStep, per_step_name
from alpa_strategy.runtime.mesh_parameters import LazyTensors


@dataclass(frozen=True)
class _Made:
    """The values that one program has computed."""

    # Detached parameters by name, at which the program's graph ends.
    leaves: dict[str, Tensor]

    # The values by name, with their graph.
    results: dict[str, Tensor]


class PerStepValues:
    """The values of a stage on this device, made by `LoweredStage.per_step_programs`."""

    def __init__(self, programs: Sequence[LoweredStep]) -> None:
        # By the name of each value that a program makes.
        self._programs: dict[str, LoweredStep] = {}
        for program in programs:
            for value in program.passed_on:
                self._programs[per_step_name(value)] = program

        # By id of the program.
        self._made: dict[int, _Made] = {}

    def forget(self) -> None:
        """Free the values at the end of a step."""
        self._made.clear()

    def beside(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """Return a mapping with the parameters and the values, for one run of a stage's program.

        Values are computed at their first access.

        Args:
            parameters: of the stage, by name.
            buffers: of the stage, by name.
        """
        if not self._programs:
            return parameters

        # Not stored in the mapping itself: `make` would be part of a reference cycle, and the
        # values would live until a garbage collection.
        values: dict[str, Tensor] = {}

        def make(name: str) -> Tensor:
            if name not in self._programs:
                return parameters[name]
            if name not in values:
                values.update(self.hand_out(name, parameters, buffers))
            return values[name]

        return LazyTensors(make)

    def hand_out(
        self, name: str, parameters: Mapping[str, Tensor], buffers: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Return all values of the program that computes `name`, connected to the graph of
        `parameters`; detached if none is trained or gradients are disabled. The program runs at the
        first call of a step.

        Args:
            name: of a value.
            parameters: of the stage, by name.
            buffers: of the stage, by name.
        """
        program = self._programs[name]
        computed = self._made.get(id(program))
        if computed is None:
            computed = self._computed(program, parameters, buffers)
            self._made[id(program)] = computed

        trained = [parameters[name] for name, leaf in computed.leaves.items() if leaf.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return {name: value.detach() for name, value in computed.results.items()}
        return dict(zip(computed.results, _Derived.apply(computed, *trained), strict=True))

    def _computed(
        self, program: LoweredStep, parameters: Mapping[str, Tensor], buffers: Mapping[str, Any]
    ) -> _Made:
        """Run one program on detached parameters, and return these and its results.

        Args:
            parameters: of the step, by name.
            buffers: of the step, by name.
        """
        leaves: dict[str, Tensor] = {}
        for name in program.parameter_names:
            parameter = parameters[name]
            leaves[name] = parameter.detach().requires_grad_(parameter.requires_grad)

        # Saved tensors are stored unchanged, not re-gathered for each micro-batch. They are
        # detached: a saved result would else refer to its own graph.
        plain_hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)
        with torch.enable_grad(), plain_hooks:
            results = program(leaves, buffers, ())[2]
        return _Made(leaves, {per_step_name(value): tensor for value, tensor in results.items()})


class _Derived(torch.autograd.Function):
    """(computed values, their trained parameters) -> the values. Their graph stays for the next
    micro-batch.

    `is_made_of_parameters` lets the backward re-gather what is gathered of these values.
    """

    @staticmethod
    def forward(ctx: Any, computed: _Made, *trained: Tensor) -> tuple[Tensor, ...]:
        """Return the results of a program that has run.

        Args:
            trained: its parameters that need a gradient, which autograd connects to the results.
        """
        ctx.computed = computed
        ctx.is_made_of_parameters = True
        ctx.set_materialize_grads(False)

        results = list(computed.results.values())
        outputs = tuple(value.detach() for value in results)
        pairs = zip(outputs, results, strict=True)
        ctx.mark_non_differentiable(*[out for out, value in pairs if not value.requires_grad])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of `trained`. The program's graph stays for later micro-batches."""
        results = ctx.computed.results.values()
        leaves = [leaf for leaf in ctx.computed.leaves.values() if leaf.requires_grad]
        values: list[Tensor] = []
        value_grads: list[Tensor] = []
        for value, grad in zip(results, grads, strict=True):
            if grad is not None:
                values.append(value)
                value_grads.append(grad)
        if not values:
            return (None,) * (1 + len(leaves))
        return None, *torch.autograd.grad(
            values, leaves, value_grads, retain_graph=True, allow_unused=True
        )
