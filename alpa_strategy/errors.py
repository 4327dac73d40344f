"""Errors for users: what was written, what was expected, what to do (docs/formulas.md#errors)."""

import difflib
import re
from collections.abc import Iterable

from lightning.fabric.utilities.exceptions import MisconfigurationException

# Control characters but tab and newline, lone surrogates, characters that reverse the direction of
# text (a terminal would show another text), line separators, and characters that XML forbids.
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffe\uffff]"
)
_LONG_WORD = re.compile(r"(\S{200})\S{300,}")


class AlpaError(RuntimeError):
    """Base of every error that this package raises for a user.

    Args:
        problem: the value or action of the user, and the reason why it fails.
        fix: the action that solves it.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = printable(problem)
        self.fix = printable(fix)
        super().__init__(f"{self.problem}\n  What to do: {self.fix}" if fix else self.problem)

    def __reduce__(self) -> "tuple[type[AlpaError], tuple[str, str]]":
        """Pickle `problem` and `fix`, so that the error can be raised on other ranks."""
        return type(self), (self.problem, self.fix)


def printable(text: str) -> str:
    """Return `text` for a terminal or a page: control characters escaped, long words shortened."""
    escaped = UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)
    return _LONG_WORD.sub(r"\1...", escaped)


class SetupError(AlpaError, MisconfigurationException):
    """The combination of Trainer, module and options cannot train.

    Lightning's own error class is a base, for callers that catch it.
    """


class OptionError(SetupError):
    """An option, recipe or YAML key is unknown or has a value that it cannot have."""


class ClusterError(AlpaError):
    """A cluster description is incomplete or contradicts itself or the running job."""


class CaptureError(AlpaError):
    """The training step cannot be captured as a graph."""


class RuntimeMismatchError(AlpaError):
    """The run differs from its plan: in batch shapes, optimizer or ranks."""


class FailedCheckError(CaptureError, RuntimeMismatchError):
    """A check of the training step (`assert`, `if ...: raise`) fails on a batch.

    Args:
        problem: as of AlpaError.
        fix: as of AlpaError.
        local_error: the exception that the step would raise, with its text.
    """

    def __init__(self, problem: str, fix: str = "", local_error: Exception | None = None) -> None:
        super().__init__(problem, fix)
        self.local_error = local_error


class ShardingError(AlpaError):
    """A layout, rule or pin requires a sharding that an op does not have."""


class PlanError(AlpaError):
    """No plan exists under the given limits, or a given plan does not fit the model or cluster.

    Attributes:
        stage: index of the stage that has no plan, in the pipeline that was to be planned; None if
            no single stage is the cause.
    """

    stage: int | None = None


class DoesNotFitError(PlanError):
    """Every plan needs more memory than a device may use.

    Attributes:
        least_bytes: bytes per device that every plan needs at least, as far as is known; None if
            unknown.
    """

    least_bytes: float | None = None


class UnlikeStepsError(CaptureError, RuntimeMismatchError):
    """The ranks' batches or steps differ, so that there is no common step to capture."""


class LostRankError(AlpaError):
    """Another rank of the job is gone or hangs."""


class CheckpointError(AlpaError):
    """A checkpoint cannot be written or read, or is not one."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `did you mean 'parallel'?` if `name` is similar to a known one, else an empty text."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def check_names(names: Iterable[str], known: Iterable[str], problem: str) -> None:
    """Check that all `names` are known.

    Args:
        names: names that a user wrote.
        known: names that are allowed; the error lists them.
        problem: beginning of the error's text, before the unknown name.

    Raises:
        OptionError: a name is unknown.
    """
    allowed = list(known)
    for name in names:
        if name not in allowed:
            near = did_you_mean(name, allowed)
            raise OptionError(
                f"{problem} {name!r}", f"{near} Known are: {', '.join(sorted(allowed))}".lstrip()
            )
