"""LoweredStep: one device's program as a function of local tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from alpa_strategy.ir.guards import COUNTERS


@dataclass(frozen=True)
class LoweredStep:
    """This device's training step; `loss.backward()` on its result gives local gradients."""

    # text of the program
    source: str
    function: Callable[..., tuple[Tensor, ...]] = field(repr=False)
    parameter_names: tuple[str, ...]
    # values that leave the step, by their numbers in the graph
    escaping: tuple[int, ...]
    # values that later stages receive
    sent: tuple[int, ...] = ()
    # values that later recompute segments of the stage receive
    passed_on: tuple[int, ...] = ()
    # whether a device reads buffers of other ranks, which are then to be equal on all ranks
    reads_others_buffers: bool = False
    # path of the submodule for each line of `source` after the first, for traces
    modules: tuple[str, ...] = ()

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Any],
        batch: Sequence[Tensor],
        received: Sequence[Tensor] = (),
    ) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        """Run the step.

        Args:
            parameters: name (`ParameterInput.name`) -> local tensor in the parameter's storage
                placement: a shard on `S<d>` axes, full on `R`, `R*` and `G<d>` axes. Gradients are
                complete over `R` and `S` axes. Over `R*` and `G<d>` axes they are Partial, for the
                reduction once per step.
            buffers: name -> full tensor (buffers are replicated); the counters under `COUNTERS`.
            batch: the batch's tensor leaves in `step.batch` order, this rank's samples.
            received: local tensors of `step.received`, in that order and in the layouts of
                `StagePlan.received`.

        Returns:
            Tensors by value number: those that leave the step, the loss among them, in their
            `leaving_layouts`; those that later stages receive, in the layouts of `StagePlan.sent`;
            those that later recompute segments receive, in the layouts in which they are computed.
        """
        counters = buffers.get(COUNTERS)
        results = iter(self.function(parameters, buffers, batch, received, counters))
        # A `zip` ends with its first argument: the rest is left for the next one.
        escaping = dict(zip(self.escaping, results, strict=False))
        sent = dict(zip(self.sent, results, strict=False))
        passed_on = dict(zip(self.passed_on, results, strict=False))
        return escaping, sent, passed_on


def per_step_name(value: int) -> str:
    """Return the parameter name under which a program takes a value that is computed once per
    step.
    """
    return f"<value {value}>"
