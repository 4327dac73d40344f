"""Figures of the step and the devices that a plan was made for: what is beside its seconds and
bytes.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step's matmuls, convolutions and attention. Recomputation does not count."""

    forward: float
    backward: float

    # Of attention, forward and backward: a part of the two above.
    attention: float

    # Dtype of the operands -> FLOPs, forward and backward. The dtype with the most comes first.
    by_dtype: dict[str, float]

    @property
    def total(self) -> float:
        """Of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class TaskFigures:
    """Figures that do not depend on the plan. All of a step are of all devices together."""

    # Samples of a step; 0: not known.
    num_samples: int = 0

    # Tokens of a step; 0: its batch has none.
    num_tokens: int = 0

    # The Trainer's name of the dtypes of parameters and matmuls, such as `bf16-mixed`. "": not
    # known.
    precision: str = ""

    # Class of the optimizer; "": not known.
    optimizer_name: str = ""

    # What the step multiplies and adds; None: not known, or nothing.
    flops: StepFlops | None = None

    # Seconds of the matmuls of a step if all devices were at their peak; None: not known.
    peak_seconds: float | None = None

    # A precision in which the matmuls have a higher peak, and the share of the ops' seconds that
    # the step takes with its matmuls in it. "": there is none.
    half_precision: str = ""
    half_share: float | None = None

    # Dtype of matmuls for which the cluster has no FLOP/s -> the dtype whose FLOP/s were taken.
    assumed_rates: dict[str, str] = field(default_factory=dict)

    # Dtypes of matmuls for which the cluster has no FLOP/s: their `peak_seconds` are not known.
    unrated_dtypes: tuple[str, ...] = ()

    # A precision of matmuls in half precision that the cluster has FLOP/s for, where it has none
    # for the step's. "": there is none.
    rated_precision: str = ""

    # Bytes of a device that the plan may use; None: no limit.
    memory_limit: float | None = None

    # Bytes of a device. What the limit leaves is for the allocator and the libraries. None: not
    # known.
    device_bytes: float | None = None

    # Options that were pinned, such as `num_microbatches=16`: only plans with these were searched.
    pins: tuple[str, ...] = ()

    # Changes that were planned as well, the nearest first, and what each brings:
    # `plan.compile=true: 1.20x the tokens/s, +2.00 GiB`.
    planned_changes: tuple[str, ...] = ()

    @property
    def unusable_bytes(self) -> float:
        """Bytes of a device that no plan may use; 0 if they are not known."""
        if self.device_bytes is None or self.memory_limit is None:
            return 0.0
        return max(0.0, self.device_bytes - self.memory_limit)

    def samples_per_second(self, step_seconds: float) -> float | None:
        """Return the samples per second of steps that take `step_seconds`; None: not known."""
        return _rate(self.num_samples, step_seconds)

    def tokens_per_second(self, step_seconds: float) -> float | None:
        """Return the tokens per second of steps that take `step_seconds`; None: not known."""
        return _rate(self.num_tokens, step_seconds)

    def mfu(self, step_seconds: float) -> float | None:
        """Return the model FLOPs utilization of steps that take `step_seconds`, 0 to 1: the share
        of the devices' peak that the step's matmuls reach (PaLM, arXiv:2204.02311, appendix B).

        Recomputation does not count. None: not known.
        """
        return _rate(self.peak_seconds or 0.0, step_seconds)


def _rate(amount: float, seconds: float) -> float | None:
    """Return an amount per second; None if either is not known."""
    if amount <= 0 or seconds <= 0:
        return None
    return amount / seconds
