"""The one place where errors for users are worded: what was written, what was expected, what to do."""

from __future__ import annotations


class AlpaError(Exception):
    """Base of every error that this package raises for a user.

    Args:
        problem: what the user wrote or did, and why it cannot be met.
        fix: what to do about it.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = problem
        self.fix = fix
        super().__init__(f"{problem}\n  What to do: {fix}" if fix else problem)


class OptionError(AlpaError):
    """An option, recipe or YAML key is unknown or has a value that it cannot have."""


class ClusterError(AlpaError):
    """A cluster description is incomplete or contradicts itself or the running job."""


class CaptureError(AlpaError):
    """The training step cannot be captured as a graph."""


class ShardingError(AlpaError):
    """A layout, rule or pin asks for something that an op cannot do."""


class PlanError(AlpaError):
    """No plan exists under the given limits, or a given plan does not fit the model or cluster."""


class DoesNotFitError(PlanError):
    """What was planned needs more memory than a device may use."""


class RuntimeMismatchError(AlpaError):
    """What happens at run time differs from what was planned (batch shapes, optimizer, ranks)."""


class LostRankError(AlpaError):
    """Another rank of the job is gone or hangs."""


class CheckpointError(AlpaError):
    """A checkpoint cannot be written or read, or is not one."""
