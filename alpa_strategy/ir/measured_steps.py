"""What a run of a plan has measured: seconds of a step, by parts and over time.

It is stored in a file beside the plan, so that the plan's page and `alpa show` have it.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa_strategy.errors import PlanError
from alpa_strategy.files import MAX_BYTES, parse_json, replacing
from alpa_strategy.ir import plan_file
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import plan_digest

# Of the file. A file of another version is an error that says so.
MEASURED_VERSION = 1

SUFFIX = ".measured.gz"


@dataclass(frozen=True)
class MeasuredAction:
    """A forward, a backward or a half of it, or the update, on one rank."""

    # `F`, `B`, `I`, `W` as in schedules, or `U`: the optimizer's update.
    kind: str

    stage: int
    microbatch: int

    # Both in seconds, from the start of the step.
    start: float
    seconds: float


@dataclass(frozen=True)
class MeasuredMessage:
    """A micro-batch's values, or their gradients, between two stages."""

    source: int
    target: int
    microbatch: int

    # In seconds, from the start of the step: when it was sent, and until it had arrived.
    start: float
    seconds: float


@dataclass(frozen=True)
class MeasuredLane:
    """The last profiled step of the first rank of a mesh."""

    rank: int
    stages: tuple[int, ...]
    actions: tuple[MeasuredAction, ...]


@dataclass(frozen=True)
class ProfiledRank:
    """Where the time of a rank's profiled steps went."""

    rank: int
    stages: tuple[int, ...]

    # Part -> seconds of a step: `forward`, `backward`, kinds of collectives, `boundaries`,
    # `optimizer`, `waiting` and `host`.
    parts: dict[str, float]

    # Share of `training_step` and the backward within modules, collectives and messages by name.
    named_share: float


@dataclass(frozen=True)
class ProfiledSteps:
    """The profiled steps of a run. Recording them takes time, too."""

    # Number of the first one in the training, and how many.
    first: int
    count: int

    # Mean seconds of a profiled step.
    step_seconds: float

    ranks: tuple[ProfiledRank, ...]
    lanes: tuple[MeasuredLane, ...]
    messages: tuple[MeasuredMessage, ...]

    # Path of the trace.
    trace: str


@dataclass(frozen=True)
class MeasuredSteps:
    """What a run of a plan has measured."""

    # `plan_digest` of the plan.
    plan: str

    # Median seconds of a step that is not profiled; None: not known.
    step_seconds: float | None

    # None: no steps were profiled.
    profiled: ProfiledSteps | None

    def save(self, path: Path) -> None:
        """Write the file, atomically. Raises OSError."""
        data = plan_file.to_json_data(MeasuredSteps, self)
        text = json.dumps({"measured_version": MEASURED_VERSION, **data})
        with replacing(path, durable=False) as temporary:
            temporary.write_bytes(gzip.compress(text.encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> "MeasuredSteps":
        """Read a file that `save` has written.

        Raises:
            PlanError: it cannot be read, or is of another version.
        """
        try:
            with gzip.open(path) as file:
                text = file.read(MAX_BYTES).decode()
            data: Any = parse_json(text)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise PlanError(f"the measured steps {path} cannot be read: {error}", _FIX) from error
        version = plan_file.checked(data, dict, "measured").get("measured_version")
        if version != MEASURED_VERSION:
            raise PlanError(f"the measured steps {path} have version {version}", _FIX)
        return plan_file.from_json_data(MeasuredSteps, data, "measured")


_FIX = "delete the file; the next run with profile_steps= writes it again"


def measured_path(plan_path: str | Path) -> Path:
    """Return the path of the measured steps of a plan file: `plan.measured.gz` beside it."""
    path = Path(plan_path)
    return path.with_name(path.name.removesuffix(".json") + SUFFIX)


def measured_of_file(plan_path: str | Path, plan: Plan) -> MeasuredSteps | None:
    """Return the measured steps that are stored beside a plan file.

    None if there are none, or if they are those of another plan: the plan file was edited.

    Raises:
        PlanError: the file cannot be read.
    """
    path = measured_path(plan_path)
    if not path.exists():
        return None
    measured = MeasuredSteps.load(path)
    return measured if measured.plan == plan_digest(plan) else None
