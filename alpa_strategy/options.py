"""Everything that a user may pin or tune: planning options, runtime limits, optimizer facts.

The defaults of planning options mean "solve it". Values are validated and frozen here, once.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from alpa_strategy.errors import OptionError, check_names
from alpa_strategy.option_values import ILP, read_option
from alpa_strategy.option_values import PROPAGATION as PROPAGATION

if TYPE_CHECKING:
    from alpa_strategy.cost.model import OpCosts

# A value of `remat`.
SELECTIVE = "selective"

# Bytes of gradients that one collective reduces; costs are computed for this size.
BUCKET_BYTES = 25 * 2**20

# Training steps between two replica checks. A checksum of all parameters takes at most a thousandth
# of that time.
CHECK_REPLICAS_EVERY = 50

# A small model's gradients are split into several buckets as well, so that their reduction overlaps
# with the backward. No bucket is smaller than the second number.
SEVERAL_BUCKETS = 8
LEAST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class PlanOptions:
    """Options that a plan depends on. They are part of its fingerprint.

    Attributes:
        parallel: one name for every mesh axis, or one per axis of `logical_mesh`: `auto` (solved),
            `data`, `zero1` / `zero2`, `zero3`, `tensor`. A name restricts the search; everything
            that it leaves open is solved.
        logical_mesh: shape of the device grid; None: all shapes are tried.
        placements: glob pattern of parameter names -> one storage placement per mesh axis, such as
            `"S0"` or `"R S1"` (see `ParameterPlan`). Later patterns win.
        device_map: glob pattern of parameter names -> ranks: every stage that uses such a parameter
            runs on exactly these devices. Later patterns win. On clusters with unequal links the
            devices are then in the order of their numbers.
        solver: solver of layouts. `ilp`: an integer program; `propagation`: op by op, each takes
            the strategy that is cheapest for the layouts of its operands. An unpinned parameter
            then gets the layout that is cheapest for its first use.
        memory_limit: bytes per device; None: the device's memory; `float("inf")`: no limit.
        memory_fraction: fraction of the device's memory that a plan may use when `memory_limit` is
            None.
        batch_scope: the batch that a step computes. `rank`: every rank loads its own batch, and
            numbers are DDP's; the step must be captured. `auto`: the same, and a step that cannot
            be captured runs eagerly. `global`: every rank loads the global batch, and numbers are
            those of one device on it. `replica`: eager steps, or with `replicas=` captured steps
            of groups of ranks.
        solver_seconds: time limit of one ILP solve; a solve that reaches it reports its gap.
        accumulate_grad_batches: training steps per optimizer step. They share the costs that occur
            once per optimizer step. The strategy fills in the Trainer's setting.
        baselines: also predict data, zero2, zero3 and tensor plans for comparison (data is always
            predicted).
        num_microbatches, num_stages: numbers of at least 1 to pin; None: solved.
        stages: the modules of every stage, such as `"embed, blocks.0-11"`; unnamed modules join a
            neighbouring stage. Empty: solved.
        schedule: a name to pin (see schedules.py), for at least two stages; None: solved.
            `from_user` also takes a `Schedule`, or a function that writes its orders, and registers
            it.
        remat: whether stages recompute their activations in the backward, segment by segment; None:
            solved stage by stage. Or names (glob patterns): results of these ops and modules are
            recomputed one by one, all others are saved. "selective": recomputes norms and pointwise
            ops, and saves matmuls, convolutions and attention. An eager step checkpoints full
            modules: the named ones, or the first items of the named lists.
        compile: whether stages run compiled: chains of pointwise ops are one kernel. `from_user`
            takes the same values as `AlpaStrategy(compile=)`.
        offload: whether parameters, with their gradients and optimizer state, are stored in host
            memory: all, none, or those with a matching name (glob patterns). None: solved, if the
            plan exceeds device memory and the cluster has a `host`.
        costs: a cost model of your own (`alpa_strategy.OpCosts`); None: measured op times if the
            cluster is measured, else the roofline of its device.
        fp32_reduction: whether gradients are summed over devices in fp32 at least, if steps compute
            in bf16 or fp16: twice the bytes. Otherwise they are summed in the precision in which
            their parameters are gathered.
        completes: whether gradients must be complete as soon as the backward has computed them.
            Parameters are then full with the same work on all devices, or sharded (`R`, `S<dim>`).
            Filled in for calls of submodules.
        kept_whole: names of parameters that stay full, in their current memory. Filled in by a
            running job.
    """

    parallel: str | tuple[str, ...] = "auto"
    logical_mesh: tuple[int, ...] | None = None
    placements: tuple[tuple[str, str], ...] = ()
    device_map: tuple[tuple[str, tuple[int, ...]], ...] = ()
    solver: str = ILP
    memory_limit: float | None = None
    memory_fraction: float = 0.9
    batch_scope: str = "auto"
    solver_seconds: float = 20.0
    accumulate_grad_batches: int = 1
    baselines: bool = False
    num_microbatches: int | None = None
    schedule: str | None = None
    num_stages: int | None = None
    stages: tuple[str, ...] = ()
    remat: bool | tuple[str, ...] | None = None
    offload: bool | tuple[str, ...] | None = None
    costs: "OpCosts | None" = None
    compile: bool = False
    fp32_reduction: bool = False
    completes: bool = False
    kept_whole: tuple[str, ...] = ()

    @classmethod
    def from_user(cls, **values: object) -> "PlanOptions":
        """Validate a user's option values and freeze them.

        `stages` sets `num_stages`. `memory_limit` may also be a text such as `"16GB"` or `"80GiB"`.

        Raises:
            OptionError: an option is unknown, has a value that it cannot have, or contradicts
                another one.
        """
        known = [option.name for option in fields(cls)]
        check_names(values, known, "unknown option")

        options = cls(**{name: _read(name, value) for name, value in values.items()})
        for problem, fix in _contradictions(options):
            raise OptionError(problem, fix)
        return replace(options, num_stages=len(options.stages) or options.num_stages)

    @property
    def asks_for_pipeline(self) -> bool:
        """Whether a pinned option requires a pipeline or micro-batches: a schedule, or more than
        one stage or micro-batch.
        """
        if self.schedule is not None:
            return True

        num_stages = self.num_stages or 1
        num_microbatches = self.num_microbatches or 1
        return max(num_stages, num_microbatches) > 1

    @property
    def rows(self) -> str:
        """Which samples of a captured step a rank loads: `rank`, its own, or `global`, all."""
        return "global" if self.batch_scope == "global" else "rank"

    def usable_bytes(self, device_bytes: float) -> float:
        """Return the bytes that a plan may use of a device with `device_bytes` of memory."""
        if self.memory_limit is None:
            return device_bytes * self.memory_fraction

        return self.memory_limit

    def digest(self) -> str:
        """Return a hash of every option: option sets with the same digest have the same plan."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        # `auto` and `replica` plan the same captured step as `rank`.
        values["batch_scope"] = self.rows
        values["costs"] = None if self.costs is None else self.costs.name

        # Digests of stored plans are older than these two options.
        for name in ("completes", "kept_whole"):
            if not values[name]:
                del values[name]

        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def bucket_limit(total_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Return the bytes at which a bucket is full, for gradients of `total_bytes` in all."""
    return min(bucket_bytes, max(total_bytes // SEVERAL_BUCKETS, LEAST_BUCKET_BYTES))


def _contradictions(options: PlanOptions) -> Iterator[tuple[str, str]]:
    """Yield a problem and its fix for each option that contradicts another one."""
    mesh = options.logical_mesh
    parallel = options.parallel
    stages = options.stages

    if isinstance(parallel, tuple) and mesh is not None and len(parallel) != len(mesh):
        problem = (
            f"parallel={list(parallel)} names {len(parallel)} mesh axes,"
            f" logical_mesh={list(mesh)} has others"
        )
        yield problem, "give one name per mesh axis, or a single name for all"

    if isinstance(parallel, tuple) and mesh is None and len(parallel) > 1:
        problem = f"parallel={list(parallel)} needs a mesh shape"
        yield problem, "give logical_mesh as well, such as [2, 2]"

    if mesh is not None:
        for pattern, modes in options.placements:
            count = len(modes.split())
            if count != len(mesh):
                noun = "1 axis" if count == 1 else f"{count} axes"
                problem = (
                    f"placements[{pattern!r}]={modes!r} is for {noun},"
                    f" logical_mesh={list(mesh)} has others"
                )
                yield problem, "write one placement per mesh axis"

    if stages and options.num_stages not in (None, len(stages)):
        problem = f"num_stages={options.num_stages}, but stages has {len(stages)} entries"
        yield problem, "leave num_stages out"

    if options.num_stages == 1 and options.schedule is not None:
        problem = f"num_stages=1 leaves nothing for schedule={options.schedule!r} to order"
        yield problem, "leave one of them out, or set num_stages to at least 2"

    if options.compile and isinstance(options.remat, tuple):
        problem = (
            f"remat={list(options.remat)} names ops, but compiled programs decide by themselves"
            " which results they save"
        )
        yield problem, "leave one of remat and compile out, or write remat=True"


def _read(name: str, value: object) -> Any:
    """Return the frozen value of the option `name`; None stays None if it means "solve it".

    Raises:
        OptionError: the option cannot have this value.
    """
    if value is None and name in _SOLVED:
        return None

    return read_option(name, value)


# Options whose value None means "solve it".
_SOLVED = {option.name for option in fields(PlanOptions) if option.default is None}


@dataclass(frozen=True)
class Limits:
    """Runtime options that no plan depends on. `AlpaStrategy` documents each of them."""

    # Seconds that the other ranks wait for rank 0's plan.
    plan_timeout_seconds: float = 3600.0

    # Seconds after which a collective of the process group fails.
    collective_timeout_seconds: float = 1800.0

    # Bytes of gradients that are reduced by one collective.
    bucket_bytes: int = BUCKET_BYTES

    # One of CAPTURES: whether steps that cannot be captured run eagerly.
    capture: str = "auto"

    # Steps between two comparisons of replicated parameters; 0: none.
    check_replicas_every: int = CHECK_REPLICAS_EVERY

    # Whether every step's gradients are checked for non-finite values.
    check_gradients: bool = False

    # Whether rank 0 prints phases, plan and step times.
    verbose: bool = True

    # Whether the Trainer's loggers get the plan and step times.
    log_plan: bool = True

    # (first, last + 1) training steps that are profiled; None: none.
    profile_steps: tuple[int, int] | None = None

    # Whether training continues while a checkpoint is written.
    async_checkpoint: bool = False

    # Number of replicas that the devices are divided into; None: each device is one, and its steps
    # are eager.
    replicas: int | None = None

    # Whether bf16-true trainings keep fp32 parameters.
    master_weights: bool = False

    @classmethod
    def from_user(cls, **values: Any) -> "Limits":
        """Validate a user's values and freeze them.

        Raises:
            OptionError: an option has a value that it cannot have.
        """
        return cls(**{name: _read(name, value) for name, value in values.items()})
