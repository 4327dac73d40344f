"""Hook points: where the core calls an extra, and what it calls.

The core imports no extra. It asks a hook point for its extra, and goes on without one if there is
none. `alpa_strategy/extras/__init__.py` has the table of the extras, which registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from alpa_strategy.errors import SetupError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from alpa_strategy.errors import CaptureError
    from alpa_strategy.ir.graph import StepGraph
    from alpa_strategy.ir.plan import Plan
    from alpa_strategy.lightning.module_init import ModuleInit
    from alpa_strategy.lightning.sharded_run import RunInputs, ShardedRun
    from alpa_strategy.options import Limits, PlanOptions
    from alpa_strategy.planner.task import PlanTask
    from alpa_strategy.runtime.owner_step import OwnerStep
    from alpa_strategy.runtime.parameters import ParameterStore

T = TypeVar("T")


class HookPoint(Generic[T]):
    """A place where the core calls an extra, if there is one.

    Args:
        name: of the extra, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._load: Callable[[], T] | None = None

    def register(self, load: Callable[[], T] | None) -> None:
        """Set the extra: `load()` imports it at its first use. None switches it off."""
        self._load = load

    @property
    def extra(self) -> T | None:
        """The extra; None if it is switched off."""
        return None if self._load is None else self._load()

    def required(self, user: str) -> T:
        """Return the extra, for `user` (a noun), which does not work without it.

        Raises:
            SetupError: it is switched off.
        """
        extra = self.extra
        if extra is None:
            raise self.missing(user)
        return extra

    def missing(self, user: str) -> SetupError:
        """Return the error for `user` (a noun), which does not work without the extra."""
        return SetupError(
            f"{user} needs the extra {self.name}, which is switched off",
            "switch it on (alpa_strategy.extras.register()), or leave out what needs it",
        )


# Failure watch


class JobWatch(Protocol):
    """Watches the other ranks of a job with several, from its start to `stop`."""

    def handle_signals(self, trainer: Any) -> None:
        """Called before the Trainer registers its own handlers of signals."""

    def before_evaluation(self) -> None:
        """Called where all ranks come before an evaluation within a training. Collective."""

    def before_exchange(self) -> None:
        """Called before user code, callbacks or Lightning exchange values between ranks."""

    def after_last_batch(self) -> None:
        """Called when the training ends well. Collective."""

    def failed(self, error: BaseException) -> None:
        """Called with the error that is about to end this rank."""

    def stop(self, ends_well: bool) -> None:
        """Called at the end of the Trainer's run, after errors as well. No communication."""


class FailureWatchExtra(Protocol):
    """An error, a lost rank or a signal on one rank ends the job on all of them."""

    def launcher(self, cluster_environment: Any, num_processes: int, num_nodes: int) -> Any:
        """Return a launcher of Lightning's for the other ranks of this node."""

    def start(self, store: Any, rank: int, world_size: int, launcher: Any) -> JobWatch:
        """Called when the process group is formed.

        Args:
            store: of the process group.
            rank: of this process in the job.
            world_size: number of ranks of the job.
            launcher: of this process, if any.
        """


FAILURE_WATCH = HookPoint[FailureWatchExtra]("failure watch")


# CPU shared memory


class HostGroupsExtra(Protocol):
    """Collectives of CPU tensors between ranks on one host, faster than gloo's."""

    def shared_memory_group(
        self, group: Any, rank: int, size: int, wanted_bytes: int | None = None
    ) -> Any | None:
        """Return a group of the ranks of `group` if all are on one host; else None. Collective.

        Called where a group of CPU tensors is made.
        """


HOST_GROUPS = HookPoint[HostGroupsExtra]("CPU shared memory")


# Allocator tuning


class HostAllocatorExtra(Protocol):
    """Freed blocks of host memory are kept for reuse as far as the plan leaves headroom."""

    def keep_freed(self, keep: bool) -> None:
        """Called before a module is built without memory (False) and before it is sharded."""

    def trim(self) -> None:
        """Called when the module is sharded: what planning used is free."""

    def enforce_memory_plan(
        self, owner: object, plan: Plan, limit_bytes: float, tensor_bytes: int
    ) -> Callable[[], object]:
        """Called when a run starts; the result is called when it ends.

        Args:
            owner: ends it when it is freed.
            plan: whose predicted peak bytes count.
            limit_bytes: of tensors, for this process.
            tensor_bytes: of the tensors that the process has now.
        """

    def with_page_faults(
        self, plan: Plan, task: PlanTask, choose: Callable[[PlanTask], Plan]
    ) -> Plan:
        """Called with the best plan of a task on CPUs; returns that to be used."""


HOST_ALLOCATOR = HookPoint[HostAllocatorExtra]("allocator tuning")


# Deferred init: the class of the initialisation of a strategy's modules, instead of `ModuleInit`

DEFERRED_INIT: HookPoint[Callable[[], ModuleInit]] = HookPoint("deferred init")


# Iteration phases


class CapturedIteration(Protocol):
    """The phases of an iteration, captured."""

    @property
    def step(self) -> StepGraph:
        """The ops of the phase that trains."""

    def plan(self, task: PlanTask, choose: Callable[[PlanTask], Plan]) -> Plan:
        """Return the plan of `step`, with the costs of all phases.

        Args:
            task: of planning `step`.
            choose: returns the plan of a task.
        """


class IterationPhasesExtra(Protocol):
    """Training steps that generate, score and update."""

    def captured_iteration(
        self,
        module: Any,
        batch: Any,
        world_size: int,
        batch_scope: str,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> CapturedIteration | None:
        """Called before a module's step is captured for a plan, with the arguments of
        `capture_step`.

        Returns:
            What is planned instead of the step; None: nothing.
        """


ITERATION_PHASES = HookPoint[IterationPhasesExtra]("iteration phases")


# Eager activation checkpointing


class Recomputation(Protocol):
    """The recomputation of modules in the backwards of an eager run."""

    def installed(self) -> AbstractContextManager[None]:
        """Return the context of the run."""

    def after_forward(self, loss: Tensor) -> str | None:
        """Called between forward and backward; returns a line for the log, if any."""


class ActivationCheckpointExtra(Protocol):
    """Modules of eager steps are recomputed in the backward."""

    def __call__(
        self, root: nn.Module, remat: bool | tuple[str, ...] | None, headroom: float | None
    ) -> Recomputation:
        """Called when an eager run starts that trains.

        Args:
            root: the module that is trained.
            remat: what the user wants to be recomputed; None: not specified.
            headroom: bytes for all that autograd saves, if no more modules than necessary are to be
                recomputed; None: all of `remat`.

        Raises:
            OptionError: `remat` names no module.
        """


ACTIVATION_CHECKPOINT = HookPoint[ActivationCheckpointExtra]("activation checkpointing")


# Planned submodules


class PlannedSubmodulesExtra(Protocol):
    """Eager steps whose submodules are planned."""

    def submodule_options(
        self, options: PlanOptions, limits: Limits, num_devices: int
    ) -> tuple[int, PlanOptions] | None:
        """Called when a job's options are read.

        Returns:
            The number of replicas whose submodules are planned, and the options inside each of
            them; None: submodules are not planned.

        Raises:
            OptionError: the options contradict each other.
        """

    def new_run(self, inputs: RunInputs, why: CaptureError, recorded: Any) -> ShardedRun:
        """Called for a training with submodules to be planned whose step is not captured.

        Args:
            inputs: the module, its optimizers and the job.
            why: the reason for which the step is not captured.
            recorded: `recorded` of the training's last run, if any.
        """


PLANNED_SUBMODULES = HookPoint[PlannedSubmodulesExtra]("planned submodules")


# Eager sharding


class GatherOnUse(Protocol):
    """Parameters of a module, gathered when its eager steps use them.

    Outside of `in_use` the data of parameters are this rank's shards.
    """

    @property
    def is_active(self) -> bool:
        """Whether parameters are gathered when they are used."""

    def in_use(self, for_backward: bool = False) -> AbstractContextManager[None]:
        """Return the context of a step, a backward or an evaluation. May be nested.

        Args:
            for_backward: whether the backward re-gathers what autograd saves of parameters inside.
        """

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context within `in_use` in which parameters are shards."""

    def begin_step(self) -> None:
        """Called when a step begins. No communication."""

    def end_step(self, for_good: bool = False) -> None:
        """Called when this rank uses no more parameters. Collective.

        Args:
            for_good: not in any later step, either.
        """

    def meet(self) -> None:
        """Called before a collective of the step's own code. Collective."""

    def drop(self) -> None:
        """Called when shards have new values, outside of `in_use`."""

    def load_full(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Called when a hook has changed the full value of a parameter."""

    def watch_changes(self, look: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Called when a training starts whose steps may write to parameters.

        Args:
            look: to be called with a parameter and its full value before its shards are taken from
                that.
        """

    def remove(self) -> None:
        """Called when the run ends."""


class ShardedGradients(Protocol):
    """Steps with manual optimization, which read and set gradients themselves."""

    def in_step(self) -> AbstractContextManager[None]:
        """Return the context of a step."""


class EagerShardingExtra(Protocol):
    """Eager steps and evaluations whose parameters are sharded."""

    def gather_on_use(
        self, module: nn.Module, store: ParameterStore, group: Any, keeps: bool, has_room: bool
    ) -> GatherOnUse:
        """Called when parameters are sharded, before eager code uses them.

        Args:
            module: whose parameters `store` has sharded.
            store: of these parameters.
            group: of all ranks, with a CPU backend, used for nothing else.
            keeps: whether parameters stay full from the first use in a step to its end (ZeRO-2).
            has_room: whether memory suffices for all full parameters in addition to a step.
        """

    def sharded_gradients(
        self,
        module: nn.Module,
        store: ParameterStore,
        owner_steps: Sequence[OwnerStep],
        meet: Callable[[], None],
    ) -> ShardedGradients:
        """Called when an eager run with sharded parameters starts.

        Args:
            module: of the training.
            store: of its parameters.
            owner_steps: the steps of optimizers that need full gradients.
            meet: to be called before a collective within the user's step.
        """


EAGER_SHARDING = HookPoint[EagerShardingExtra]("eager sharding")
