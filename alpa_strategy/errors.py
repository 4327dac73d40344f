"""Errors for users: what was written, what was expected, what to do (docs/formulas.md#errors)."""

import difflib
import re
from collections.abc import Iterable

from lightning.fabric.utilities.exceptions import MisconfigurationException

# Control characters but tab and newline, lone surrogates, what turns the direction of text (a
# terminal then shows something else than what is there), line separators, and what no XML may hold.
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffe\uffff]"
)
_LONG_WORD = re.compile(r"(\S{200})\S{300,}")


class AlpaError(RuntimeError):
    """Base of every error that this package raises for a user.

    Args:
        problem: what the user wrote or did, and why it cannot be met.
        fix: what to do about it.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = printable(problem)
        self.fix = printable(fix)
        super().__init__(f"{self.problem}\n  What to do: {self.fix}" if fix else self.problem)

    def __reduce__(self) -> "tuple[type[AlpaError], tuple[str, str]]":
        """So that an error can be raised on other ranks."""
        return type(self), (self.problem, self.fix)


def printable(text: str) -> str:
    """Text for a terminal or a page, whatever names it quotes: control characters become escapes,
    endless words are cut short.
    """
    return _LONG_WORD.sub(r"\1...", UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text))


class SetupError(AlpaError, MisconfigurationException):
    """The Trainer, module or options are put together in a way that cannot train: Lightning's kind
    of error as well.
    """


class OptionError(SetupError):
    """An option, recipe or YAML key is unknown or has a value that it cannot have."""


class ClusterError(AlpaError):
    """A cluster description is incomplete or contradicts itself or the running job."""


class CaptureError(AlpaError):
    """The training step cannot be captured as a graph."""


class NotRowsError(CaptureError):
    """The batches of all ranks are no one batch: a leaf that has no row per sample differs between
    them.
    """


class ShardingError(AlpaError):
    """A layout, rule or pin asks for something that an op cannot do."""


class PlanError(AlpaError):
    """No plan exists under the given limits, or a given plan does not fit the model or cluster."""


class DoesNotFitError(PlanError):
    """What was planned needs more memory than a device may use.

    Attributes:
        least_bytes: of a device, that every plan of the problem needs; None where that is unknown.
    """

    least_bytes: float | None = None


class RuntimeMismatchError(AlpaError):
    """What happens at run time differs from what was planned (batch shapes, optimizer, ranks)."""


class UnlikeStepsError(CaptureError, RuntimeMismatchError):
    """The ranks' batches or steps differ: there is no one step of all of them to be captured."""


class LostRankError(AlpaError):
    """Another rank of the job is gone or hangs."""


class CheckpointError(AlpaError):
    """A checkpoint cannot be written or read, or is not one."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`did you mean 'parallel'?` for a `name` near one that is known, else empty."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def check_names(names: Iterable[str], known: Iterable[str], problem: str) -> None:
    """OptionError `problem 'name'` at the first of `names` that is not known; it says the nearest,
    and all that are.
    """
    allowed = list(known)
    for name in names:
        if name not in allowed:
            near = did_you_mean(name, allowed)
            raise OptionError(
                f"{problem} {name!r}", f"{near} Known are: {', '.join(sorted(allowed))}".lstrip()
            )
