"""Named ranges of profiled steps: what torch's profiler records, and what each name stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.autograd.profiler import record_function

# What a range is. Events of a trace have it as their category.
STEP = "step"
# One of the Trainer's calls: `training_step`, `backward`, `optimizer_step`, or the closure that
# the optimizer calls.
PHASE = "phase"
# A forward, a backward or a half of it, of one micro-batch in one stage.
ACTION = "action"
MODULE = "module"
COLLECTIVE = "collective"
# A message between stages, or of the batch to them.
MESSAGE = "message"
# An update of some parameters by their optimizer, while the backward runs.
UPDATE = "update"
EVALUATION = "evaluation"

# Kinds whose names are the user's modules and parameters, collectives or messages.
NAMED = frozenset({MODULE, COLLECTIVE, MESSAGE, UPDATE})

# Prefix of the range in which the host waits for a collective that was launched before.
WAIT = "wait for "


@dataclass(frozen=True)
class RangeInfo:
    """What the name of a range stands for."""

    kind: str

    # For the trace, such as the stage and the micro-batch of an action.
    details: Mapping[str, Any] = field(default_factory=dict)


class Ranges:
    """Makes ranges, and stores what their names stand for: torch's profiler stores names alone."""

    def __init__(self) -> None:
        self.infos: dict[str, RangeInfo] = {}

    def __call__(self, name: str, kind: str, **details: Any) -> record_function:
        """Return a context that is recorded under `name`.

        Args:
            name: shown to the user; it stands for one kind and one set of details.
            kind: one of this file's kinds.
            details: for the trace, as JSON data.
        """
        if name not in self.infos:
            self.infos[name] = RangeInfo(kind, details)
        return record_function(name)
