"""The seconds and bytes of a stage under one assignment of layouts."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StageCost:
    """The costs of an assignment, see `CostBreakdown`.

    `again` has one number per recompute segment. `working` are temporary bytes in addition.
    `update` are those of the optimizer's step, less what of `always` is freed by then, as
    activations are: the values that are made once per step.
    """

    forward: float
    backward: float
    once: float
    always: float
    saved: float
    # `saved` under recomputation: inputs of segments
    segment_inputs: float
    again: tuple[float, ...]
    working: float = 0.0
    update: float = 0.0

    def seconds(self, remat: bool = False) -> float:
        """Return seconds of forward and backward of a micro-batch; with `remat` two forwards."""
        return self.forward * (2 if remat else 1) + self.backward

    def num_bytes(self, in_flight: float, remat: bool = False) -> float:
        """Return the peak bytes of one device. With recomputation, one segment's activations count
        at a time.
        """
        alive = self.activation_bytes(in_flight, remat)
        return self.always + max(alive + self.working, self.update)

    def activation_bytes(self, in_flight: float, remat: bool = False) -> float:
        """Return the bytes of activations at the end of a forward."""
        return (
            self.segment_inputs * in_flight + max(self.again) if remat else self.saved * in_flight
        )

    def memory_parts(
        self, of_parameters: Mapping[str, float], in_flight: float, remat: bool = False
    ) -> dict[str, float]:
        """Return the parts of `num_bytes` at the peak: name in `MEMORY_PARTS` -> bytes.

        The peak is in a micro-batch or, if that needs more, while the optimizer updates; then
        activations are 0, and values that are made once per step count as `temporary`, not as
        `weights`.

        Args:
            of_parameters: `parameter_bytes` of the assignment.
            in_flight: micro-batches whose activations are stored.
            remat: whether the stage recomputes its activations.
        """
        parts = dict(of_parameters)
        # Values that are made once per step, such as casts of weights.
        per_step = max(0.0, self.always - sum(parts.values()))
        activations = self.activation_bytes(in_flight, remat)
        if activations + self.working >= self.update:
            parts["weights"] += per_step
            return {**parts, "activations": activations, "temporary": self.working}
        return {**parts, "activations": 0.0, "temporary": self.update + per_step}


def whole_bytes(parts: Mapping[str, float], total: float) -> dict[str, int]:
    """Return the parts, rounded down one after the other, as whole numbers whose sum is
    `int(total)`: the last one takes the rest.
    """
    rounded = {}
    rounded_up_to = 0
    summed = 0.0
    for name, num_bytes in parts.items():
        summed += num_bytes
        end = int(min(summed, total))
        rounded[name] = end - rounded_up_to
        rounded_up_to = end
    rounded[name] += int(total) - rounded_up_to
    return rounded
