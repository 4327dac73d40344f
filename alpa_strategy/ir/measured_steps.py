"""What a run of a plan has measured: seconds of a step, by parts and over time.

It is stored in a file beside the plan, so that the plan's page and `alpa show` have it.
"""

from dataclasses import dataclass
from pathlib import Path

from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_companion import PlanCompanion


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

    # Predicted for a step with the Trainer's loop as the run has measured it; None: as planned.
    predicted_seconds: float | None = None

    # As `predicted_seconds`, of the earlier run that `profiled` is of; None: it is of this run.
    earlier_predicted_seconds: float | None = None

    @property
    def profile_predicted_seconds(self) -> float | None:
        """Predicted for a step in the run that was profiled; None: as planned."""
        if self.earlier_predicted_seconds is not None:
            return self.earlier_predicted_seconds
        return self.predicted_seconds

    def save(self, path: Path) -> None:
        """Write the file, atomically. Raises OSError."""
        _FILE.save(path, self)

    @classmethod
    def load(cls, path: Path) -> "MeasuredSteps":
        """Read a file that `save` has written.

        Raises:
            PlanError: it cannot be read, or is of another version.
        """
        return _FILE.load(path)


_FILE = PlanCompanion(
    MeasuredSteps,
    key="measured",
    version=1,
    name="the measured steps",
    fix="delete the file; the next run with profile_steps= writes it again",
    durable=False,
)


def measured_path(plan_path: str | Path) -> Path:
    """Return the path of the measured steps of a plan file: `plan.measured.gz` beside it."""
    return _FILE.path(plan_path)


def measured_of_file(plan_path: str | Path, plan: Plan) -> MeasuredSteps | None:
    """Return the measured steps that are stored beside a plan file.

    None if there are none, or if they are those of another plan: the plan file was edited.

    Raises:
        PlanError: the file cannot be read.
    """
    return _FILE.of_plan(plan_path, plan)
