"""Instruments: ranges around the runtime's functions, in place for profiled steps alone.

The functions are replaced by wrapped ones when profiling starts, and put back when it ends. So the
runtime has no code for profiling, and other steps pay nothing for it.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch.distributed as dist

from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.mesh import AxisComm, Pending
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.lower.lowered_step import LoweredStep
from alpa_strategy.pipeline import step_programs
from alpa_strategy.pipeline.executor import Pipeline
from alpa_strategy.pipeline.stage_worker import ChannelEnd, StageWorker
from alpa_strategy.profiling.programs import program_with_ranges
from alpa_strategy.profiling.ranges import ACTION, COLLECTIVE, MESSAGE, MODULE, WAIT, Ranges
from alpa_strategy.runtime.gradient_buckets import Bucket
from alpa_strategy.runtime.parameters import ParameterStore

Patch = tuple[Any, str, Any]

# Methods of `AxisComm` -> kind of the collective, as plans name it.
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "start_all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "start_all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "start_reduce_scatter": "reduce_scatter",
    "start_reduce_scatter_of": "reduce_scatter",
    "all_to_all": "all_to_all",
    "start_exchange": "all_to_all",
}

# By kind of action: its name.
ACTION_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "backward to the weights",
}


class Instruments:
    """Wraps the runtime's functions in ranges.

    Args:
        ranges: makes the ranges.
        root: name of the LightningModule's own lines.
    """

    def __init__(self, ranges: Ranges, root: str) -> None:
        self._ranges = ranges
        self.root = root

        # The program with ranges of each program, by the id of its function.
        self._programs: dict[int, LoweredStep] = {}

        # What is moved now, such as the name of a parameter.
        self._subject = ""

        # Whether a forward or a backward runs.
        self._in_action = False

        # Whether a collective is being launched: the functions call each other.
        self._in_collective = False

        # Collectives that are launched and not waited for -> their names.
        self._in_flight: weakref.WeakKeyDictionary[Pending, str] = weakref.WeakKeyDictionary()

        # Ranks of a process group, by its id.
        self._members: dict[int, list[int]] = {}

    def installed(self, others: Sequence[Patch] = ()) -> AbstractContextManager[None]:
        """Return the context in which ranges are recorded.

        Args:
            others: (owner, name, value) that are replaced as well.
        """
        return patched([*self._patches(), *others])

    def _patches(self) -> Iterator[Patch]:
        """Yield the patches that put ranges around programs, collectives and waiting for them."""
        yield LoweredStep, "__call__", self._program_call()
        for name, kind in _COLLECTIVES.items():
            yield AxisComm, name, self._collective(kind, vars(AxisComm)[name])
        yield Pending, "wait", self._wait(vars(Pending)["wait"])

        for name in ("__call__", "values", "start"):
            yield self._with_subject(Reshard, name, lambda reshard: reshard.subject)
        for name in ("gradients", "start_gradients"):
            yield self._with_subject(Reshard, name, _gradient_of)
        for name in ("start", "advance"):
            yield self._with_subject(Bucket, name, _gradients_of_bucket)
        yield self._gather_of_store()
        yield from self._pipeline_patches()

    def _pipeline_patches(self) -> Iterator[Patch]:
        """Yield the patches that put ranges around a pipeline's actions and messages."""
        yield self.ranged(StageWorker, "forward", self._forward)
        yield self.ranged(StageWorker, "backward", self._backward)
        yield self.ranged(StageWorker, "backward_weights", self._backward_weights)
        yield self.ranged(ChannelEnd, "take", self._receive)
        yield self.ranged(ChannelEnd, "send", self._send)
        batch = ("samples of the batch to the stages", MESSAGE)
        yield self.ranged(Pipeline, "_start_step", lambda *_: self._ranges(*batch))
        shared = ("gradients of parameters that stages share", MESSAGE)
        yield self.ranged(Pipeline, "_sum_shared", lambda *_: self._ranges(*shared))
        results = ("results of the step to all ranks", MESSAGE)
        yield self.ranged(Pipeline, "_collect", lambda *_: self._ranges(*results))
        # The loss of this rank, from that of all.
        yield self.ranged(step_programs, "of_this_rank", lambda *_: self._ranges(self.root, MODULE))

    def ranged(
        self, owner: Any, name: str, make_range: Callable[..., AbstractContextManager[Any]]
    ) -> Patch:
        """Return the patch of a function that runs in a range.

        Args:
            owner: class or module of the function.
            name: of the function.
            make_range: returns the range for the function's arguments.
        """
        original = vars(owner)[name]

        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            with make_range(*args, **kwargs):
                return original(*args, **kwargs)

        return owner, name, run

    # Programs.

    def _program_call(self) -> Callable[..., Any]:
        """Return a `LoweredStep.__call__` that runs the program's version with ranges."""
        original = LoweredStep.__call__

        @wraps(original)
        def run(program: LoweredStep, *args: Any, **kwargs: Any) -> Any:
            key = id(program.function)
            if key not in self._programs:
                self._programs[key] = program_with_ranges(program, self._ranges)
            # Without micro-batches, nothing around it is an action.
            action = nullcontext() if self._in_action else self.action("F", 0, 0)
            with action, self._ranges(self.root, MODULE):
                return original(self._programs[key], *args, **kwargs)

        return run

    # Collectives, by their kind, their subject and their mesh axis.

    def _collective(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of `AxisComm` that runs in a range named `all-gather weight on tensor`.

        Collectives on an axis of one device, and those that another one launches, get no range.

        Args:
            kind: of the collective, as plans name it.
            original: the method.
        """

        @wraps(original)
        def run(axis: AxisComm, *args: Any, **kwargs: Any) -> Any:
            if axis.size == 1 or self._in_collective:
                return original(axis, *args, **kwargs)
            words = [kind, self._subject, "on", axis.name]
            name = " ".join(word for word in words if word)
            members = self._members_of(axis)
            self._in_collective = True
            try:
                with self._ranges(name, COLLECTIVE, collective=kind, members=members):
                    result = original(axis, *args, **kwargs)
            finally:
                self._in_collective = False
            if isinstance(result, Pending):
                self._in_flight[result] = name
            return result

        return run

    def _members_of(self, axis: AxisComm) -> list[int]:
        """Return the ranks of an axis among all ranks of the job; [] if its group, of another
        library or of threads, does not know them.
        """
        key = id(axis.group)
        if key not in self._members:
            group = dist.group.WORLD if axis.group is None else axis.group
            try:
                self._members[key] = dist.get_process_group_ranks(group)
            except (KeyError, ValueError, RuntimeError, AttributeError):
                self._members[key] = []
        return self._members[key]

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Pending.wait` in a range, with the name of the collective that it waits for;
        without a range if that had none.
        """

        @wraps(original)
        def wait(pending: Pending) -> Any:
            name = self._in_flight.pop(pending, None)
            if name is None or self._in_collective:
                return original(pending)
            details = self._ranges.infos[name].details
            with self._ranges(WAIT + name, COLLECTIVE, **details, waits_for=name):
                return original(pending)

        return wait

    def _with_subject(self, owner: Any, name: str, subject_of: Callable[[Any], str]) -> Patch:
        """Return the patch of a method whose collectives are named by its object.

        Args:
            owner: class of the method.
            name: of the method.
            subject_of: the object -> what its collectives move, such as a parameter's name.
        """
        original = vars(owner)[name]

        @wraps(original)
        def run(moved: Any, *args: Any, **kwargs: Any) -> Any:
            with self._moving(subject_of(moved)):
                return original(moved, *args, **kwargs)

        return owner, name, run

    @contextmanager
    def _moving(self, subject: str) -> Iterator[None]:
        """Context in which collectives are named by `subject`, unless that is empty."""
        outer = self._subject
        self._subject = subject or outer
        try:
            yield
        finally:
            self._subject = outer

    def _gather_of_store(self) -> Patch:
        """Return the patch that names gathers of parameters by these."""
        original = ParameterStore.start_gather

        @wraps(original)
        def run(store: ParameterStore, parts: Mapping[Any, Any]) -> Any:
            with self._moving(listed([store.name_of(parameter) for parameter in parts])):
                return original(store, parts)

        return ParameterStore, "start_gather", run

    # Pipelines.

    @contextmanager
    def action(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Context of a stage's action on a micro-batch, in its range.

        Args:
            kind: one of `ACTION_NAMES`.
        """
        name = f"{ACTION_NAMES[kind]} of stage {stage}, micro-batch {microbatch}"
        outer = self._in_action
        self._in_action = True
        try:
            with self._ranges(name, ACTION, action=kind, stage=stage, microbatch=microbatch):
                yield
        finally:
            self._in_action = outer

    def _forward(self, worker: StageWorker, microbatch: int) -> AbstractContextManager[Any]:
        return self.action("F", worker.index, microbatch)

    def _backward(
        self, worker: StageWorker, microbatch: int, in_halves: bool
    ) -> AbstractContextManager[Any]:
        return self.action("I" if in_halves else "B", worker.index, microbatch)

    def _backward_weights(
        self, worker: StageWorker, microbatch: int
    ) -> AbstractContextManager[Any]:
        return self.action("W", worker.index, microbatch)

    def _receive(self, end: ChannelEnd, microbatch: int) -> AbstractContextManager[Any]:
        """Return the range of receiving a micro-batch's values or gradients from the peer stage."""
        kind = "gradients" if end.is_source else "values"
        name = f"receive {kind} of micro-batch {microbatch}, stage {end.peer} to {end.stage}"
        ends = (end.peer, end.stage, kind, microbatch)
        return self._ranges(name, MESSAGE, receives=list(ends))

    def _send(
        self, end: ChannelEnd, outbox: Any, tensors: Any, microbatch: int
    ) -> AbstractContextManager[Any]:
        """Return the range of sending a micro-batch's values or gradients to the peer stage."""
        kind = "values" if end.is_source else "gradients"
        name = f"send {kind} of micro-batch {microbatch}, stage {end.stage} to {end.peer}"
        ends = (end.stage, end.peer, kind, microbatch)
        return self._ranges(name, MESSAGE, sends=list(ends))


def _gradient_of(reshard: Reshard) -> str:
    """Return the name of what the backward of a `Reshard` moves."""
    return f"gradient of {reshard.subject}" if reshard.subject else "a gradient"


def _gradients_of_bucket(bucket: Bucket) -> str:
    """Return the name of what a bucket's collectives move."""
    return "gradients of " + listed([sharded.name for sharded in bucket.parameters])


def listed(names: Sequence[str]) -> str:
    """Return the first name and how many others there are: `a.weight and 3 more`."""
    if not names:
        return "nothing"
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
