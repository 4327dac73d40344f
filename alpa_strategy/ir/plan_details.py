"""What a plan means for every parameter and op: layouts, local shapes, bytes, seconds, collectives.

Plan files have the decisions alone. These details follow from them and from the captured step
(`planner/details.py`); they are stored in a file beside the plan, so that the plan can be shown and
questioned where the model is not.
"""

from dataclasses import dataclass
from pathlib import Path

from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_companion import PlanCompanion


@dataclass(frozen=True)
class ValueDetails:
    """One operand or result of an op. Shapes are those of a micro-batch."""

    # Name of the parameter, buffer or op that makes it.
    maker: str

    shape: tuple[int, ...]
    dtype: str

    # Dual layout, such as `S0 R`.
    layout: str

    # Of the first device.
    local_shape: tuple[int, ...]
    local_bytes: int


@dataclass(frozen=True)
class MessageDetails:
    """Equal collectives of a parameter or an op."""

    # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    kind: str

    # The mesh axis.
    axis: int

    # `forward` or `backward` (both per micro-batch), or `step` (once per optimizer step).
    phase: str

    count: int

    # Of the full tensor on the axis, and seconds: of all `count` together.
    num_bytes: int
    seconds: float

    # `before`: an operand is brought into the layout that the op reads. `inside`: the op's own.
    # `update`: a parameter's, once per step.
    place: str

    # Maker of the value that is moved, with its layouts before and after; empty for the op's own.
    value: str = ""
    source: str = ""
    target: str = ""


@dataclass(frozen=True)
class ParameterDetails:
    """One parameter on one device of its stage."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    # One storage placement per mesh axis, such as `R* S0`.
    modes: str

    # Of the first device.
    local_shape: tuple[int, ...]

    weight_bytes: int
    gradient_bytes: int
    state_bytes: int

    # Copies that are gathered for the step, and their gradients.
    gathered_bytes: int

    # Of the optimizer's update.
    update_seconds: float

    # Names of the ops that read it.
    readers: tuple[str, ...]

    messages: tuple[MessageDetails, ...] = ()

    # Of a fused projection, of which a shard has a shard of every segment.
    num_segments: int = 1

    on_host: bool = False


@dataclass(frozen=True)
class OpDetails:
    """One op of a micro-batch on one device of its stage."""

    name: str

    # Such as `aten.linear.default`.
    target: str

    # Path of the submodule that calls it.
    module: str

    # The user's line.
    source: str

    # One strategy per mesh axis, such as `S0,R*->S0`.
    strategies: tuple[str, ...]

    operands: tuple[ValueDetails, ...]
    results: tuple[ValueDetails, ...]

    # Names of the ops that read its results.
    readers: tuple[str, ...]

    # Of its computation in one micro-batch, collectives excluded.
    forward_seconds: float
    backward_seconds: float

    # Saved for the backward, per micro-batch in flight.
    saved_bytes: int

    # Temporary, at most.
    temporary_bytes: int

    # Whether it runs once per step instead of once per micro-batch.
    is_per_step: bool = False

    is_recomputed: bool = False

    messages: tuple[MessageDetails, ...] = ()


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one device of a stage by what they are for."""

    weights: int
    gradients: int
    state: int

    # Copies that are gathered once per step, and their gradients.
    gathered: int

    # Buffers, constants, and values that are made once per step.
    other: int

    # Of one micro-batch between its forward and its backward.
    activations: int

    # Of the largest recomputed segment, while its backward runs.
    recomputed: int

    temporary: int

    # Temporary bytes of the optimizer's update.
    update: int


@dataclass(frozen=True)
class StageDetails:
    """The details of one stage."""

    memory: StageMemory

    # Of the optimizer and of collectives once per step.
    once_seconds: float

    parameters: tuple[ParameterDetails, ...]
    ops: tuple[OpDetails, ...]


@dataclass(frozen=True)
class Origin:
    """The recipe and cluster that a plan was made from, to make them once more."""

    recipe: str
    cluster: str

    # key=value, of recipe and cluster, as `alpa plan` takes them.
    overrides: tuple[str, ...] = ()

    # Flags of a model by name as seq=8192, those with their default values among them.
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutChoice:
    """One layout of a parameter or op, with the best layouts of all others around it."""

    # Storage placements, or one strategy per mesh axis joined by ` | `.
    layout: str

    # Of the plan's step; None if no layouts with it fit into memory.
    seconds: float | None

    # Of the stage's step, and of that compute and communication.
    stage_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0

    # Peak bytes of a device of the stage.
    num_bytes: int = 0

    # Number of other parameters and ops whose layouts would change, and the first of them.
    num_changes: int = 0
    changes: tuple[str, ...] = ()

    # Why it does not fit.
    problem: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why a parameter or op has its layout (`planner/explain.py`)."""

    name: str

    # `parameter` or `op`
    kind: str

    # Index of its stage.
    stage: int

    chosen: LayoutChoice

    # Other layouts, the cheapest first.
    choices: tuple[LayoutChoice, ...]

    # Sentences: what the next best costs, what binds it, what would have to change.
    reasons: tuple[str, ...]

    # Layouts that were not solved to the end: the stage is no faster with them, or does not fit.
    num_slower: int = 0


@dataclass(frozen=True)
class PlanDetails:
    """The details of all stages, and what is known of the devices."""

    # `plan_digest` of the plan that they are of.
    plan: str

    # Bytes of a device that a plan may use.
    memory_limit: float

    devices_per_node: int

    # Samples of a step, over all devices.
    batch_size: int

    stages: tuple[StageDetails, ...]

    origin: Origin | None = None

    # Answers that were computed so far.
    explanations: tuple[Explanation, ...] = ()

    def save(self, path: Path) -> None:
        """Write the details file, atomically."""
        _FILE.save(path, self)

    @classmethod
    def load(cls, path: Path) -> "PlanDetails":
        """Read a details file.

        Raises:
            PlanError: it cannot be read, or is of another version.
        """
        return _FILE.load(path)


_FILE = PlanCompanion(
    PlanDetails,
    key="details",
    version=1,
    name="the details",
    fix="make the plan again with `alpa plan -o`, or show it without details",
)


def details_path(plan_path: str | Path) -> Path:
    """Return the path of the details of a plan file: `plan.details.gz` beside `plan.json`."""
    return _FILE.path(plan_path)


def details_of_file(plan_path: str | Path, plan: Plan) -> PlanDetails | None:
    """Return the details that are stored beside a plan file.

    None if there are none, or if they are those of another plan: the plan file was edited.

    Raises:
        PlanError: the file cannot be read.
    """
    return _FILE.of_plan(plan_path, plan)
