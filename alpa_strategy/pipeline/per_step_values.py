"""Values that a stage makes of its parameters alone (casts, weight norm): computed once per step,
kept for all its micro-batches. To a micro-batch's autograd they are one node between the parameters
and their uses, so that gradients
reach the parameters micro-batch by micro-batch, in the order and precision in which they would
without this."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.lower.codegen import LoweredStep, per_step_name
from alpa_strategy.runtime.mesh_parameters import LazyTensors


@dataclass(frozen=True)
class _Made:
    """What one derivation made: its graph lies between `leaves` and `results`, by name."""

    leaves: dict[str, Tensor]
    results: dict[str, Tensor]


class PerStepValues:
    """The derivations of a stage (`LoweredStage.per_step_programs`) on this device."""

    def __init__(self, programs: Sequence[LoweredStep]) -> None:
        self._programs = {
            per_step_name(value): program for program in programs for value in program.made
        }
        self._made: dict[int, _Made] = {}

    def forget(self) -> None:
        """A step has ended: its values go."""
        self._made.clear()

    def beside(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """`parameters` and the derived values, each made when it is first asked for: for one run of
        a program.
        """
        if not self._programs:
            return parameters

        # Not in the mapping itself: `make` would hold what holds it, and a collection alone would
        # free a step's values.
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
        """All values of the derivation that makes `name`, as a graph sees them that starts at
        `parameters`.
        """
        program = self._programs[name]
        made = self._made.get(id(program))
        if made is None:
            given = {name: parameters[name] for name in program.parameter_names}
            leaves = {
                name: each.detach().requires_grad_(each.requires_grad)
                for name, each in given.items()
            }
            # What its backward needs is kept as it is, not gathered again for each micro-batch; a
            # result that an op saves without its graph, which would hold itself.
            as_it_is = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)
            with torch.enable_grad(), as_it_is:
                results = program(leaves, buffers, ())[2]
            made = _Made(
                leaves, {per_step_name(value): tensor for value, tensor in results.items()}
            )
            self._made[id(program)] = made
        trained = [parameters[name] for name, leaf in made.leaves.items() if leaf.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return {name: value.detach() for name, value in made.results.items()}
        return dict(zip(made.results, _Derived.apply(made, *trained), strict=True))


class _Derived(torch.autograd.Function):
    """(what was made, its trained parameters) -> the derived values; their graph stays for the next
    micro-batch.

    `is_made_of_parameters` is for `regather`: what is gathered of these values is gathered again.
    """

    @staticmethod
    def forward(ctx: Any, made: _Made, *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.made, ctx.is_made_of_parameters = made, True
        ctx.set_materialize_grads(False)
        handed = tuple(value.detach() for value in made.results.values())
        plain = [
            h
            for h, value in zip(handed, made.results.values(), strict=True)
            if not value.requires_grad
        ]
        ctx.mark_non_differentiable(*plain)
        return handed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        results = ctx.made.results.values()
        pairs = [
            (value, grad) for value, grad in zip(results, grads, strict=True) if grad is not None
        ]
        leaves = [leaf for leaf in ctx.made.leaves.values() if leaf.requires_grad]
        if not pairs:
            return (None,) * (1 + len(leaves))
        values, given = zip(*pairs, strict=True)
        return None, *torch.autograd.grad(
            values, leaves, given, retain_graph=True, allow_unused=True
        )
