"""StepProfile: records some steps of a training on every rank, and reports what they did.

The trace of all ranks is one file. `StepReports` stores its summary beside the plan.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from alpa_strategy.comm.collectives import rank_in
from alpa_strategy.display.measured import measured_table
from alpa_strategy.ir.measured_steps import ProfiledSteps
from alpa_strategy.ir.plan import stage_ranks
from alpa_strategy.lightning.checkpoint_paths import local_folder
from alpa_strategy.lightning.rank_consistency import StepConsensus
from alpa_strategy.profiling.chrome import write_trace
from alpa_strategy.profiling.instruments import Instruments, Patch, listed
from alpa_strategy.profiling.ranges import (
    COLLECTIVE,
    EVALUATION,
    MODULE,
    PHASE,
    STEP,
    UPDATE,
    Ranges,
)
from alpa_strategy.profiling.rank_trace import slices_of
from alpa_strategy.profiling.recorder import Recorder, clock_offset, gather_records
from alpa_strategy.profiling.summary import profiled_steps
from alpa_strategy.profiling.waiting import RankRecord, mark_waiting
from alpa_strategy.runtime.step_by_bucket import StepByBucket
from alpa_strategy.urls import is_url

if TYPE_CHECKING:
    from alpa_strategy.lightning.sharded_run import ShardedRun


class StepProfile:
    """Profiles training batches `steps[0]` to `steps[1] - 1` of a `trainer.fit`, counted from 0.

    Args:
        strategy: whose steps are profiled.
        steps: the first one, and the one after the last.
    """

    def __init__(self, strategy: Any, steps: tuple[int, int]) -> None:
        self._strategy = strategy
        self._first, self._end = steps
        self._num_batches = 0
        # Number of the last profiled step.
        self._last = 0
        self._ranges = Ranges()
        self._recorder: Recorder | None = None

        # The wrapped functions, while steps are recorded, and the range of the current step.
        self._wrapped = ExitStack()
        self._step = ExitStack()

        # The range of an evaluation between two steps.
        self._evaluation = ExitStack()

        # Both on rank 0: path of the trace, and what it says in short.
        self.trace: Path | None = None
        self.profiled: ProfiledSteps | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last profiled step is over."""
        return self._num_batches > self._end

    def begin_batch(self, run: "ShardedRun") -> None:
        """Count a training batch that begins; start the profile at the first of the profiled ones,
        and end it after the last. Collective at the first and after the last step.
        """
        number = self._num_batches
        self._num_batches += 1
        self._step.close()
        if number == self._first:
            self._start(run)
        if number == self._end:
            self.end(run)
        if self._recorder is not None:
            self._last = number
            self._step.enter_context(self._ranges(f"step {number}", STEP))

    def end(self, run: "ShardedRun | None") -> None:
        """Stop recording, and report the profile, if any; rank 0 warns if no step was reached.
        Collective.

        Args:
            run: of the training; None: what was recorded is dropped.
        """
        recorder = self._recorder
        if recorder is None:
            if self._num_batches <= self._first:
                rank_zero_warn(
                    f"alpa: profile_steps=({self._first}, {self._end}): the training ended after"
                    f" {self._num_batches} steps, nothing was profiled"
                )
            return
        self._unwrap()
        events = recorder.stop()
        if run is not None:
            root = step_name(run.module)
            self._report(run, slices_of(events, self._ranges.infos, root))

    def close(self) -> None:
        """Put the runtime's functions back, and drop what was recorded. No communication."""
        recorder = self._recorder
        self._unwrap()
        if recorder is not None:
            recorder.stop()

    def _unwrap(self) -> None:
        """Put the functions that are wrapped for the profile back, and forget the recorder."""
        self._recorder = None
        self._evaluation.close()
        self._step.close()
        self._wrapped.close()

    def _start(self, run: "ShardedRun") -> None:
        """Start to record the steps of `run`; warn instead if another profiler is active."""
        recorder = Recorder()
        try:
            recorder.start()
        except RuntimeError as error:
            rank_zero_warn(
                "alpa: steps cannot be profiled, as another profiler is active"
                f" (Trainer(profiler=...)): {error}"
            )
            return
        self._recorder = recorder
        instruments = Instruments(self._ranges, step_name(run.module))
        patches = [*self._phases(instruments), *self._modules(instruments, run.module)]
        self._wrapped.enter_context(instruments.installed(patches))

    # What is wrapped, in addition to the runtime's functions.

    def _phases(self, instruments: Instruments) -> Iterator[Patch]:
        """Yield the patches that put ranges around the Trainer's calls: step, backward, optimizer
        step, evaluation.
        """
        strategy = self._strategy
        ranges = self._ranges

        def training_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(ranges("training_step", PHASE))
                if strategy.run.plan.is_eager:
                    stack.enter_context(instruments.action("F", 0, 0))
                    stack.enter_context(ranges(instruments.root, MODULE))
                return original(*args, **kwargs)

        def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(ranges("backward", PHASE))
                # A pipeline has run its backwards in `training_step`.
                if not strategy.run.plan.is_pipelined:
                    stack.enter_context(instruments.action("B", 0, 0))
                return original(*args, **kwargs)

        def optimizer_step(
            original: Callable[..., Any], optimizer: Any, closure: Any, *args: Any, **kwargs: Any
        ) -> Any:
            def ranged_closure(*inner: Any, **named: Any) -> Any:
                with ranges("closure", PHASE):
                    return closure(*inner, **named)

            with ranges("optimizer_step", PHASE):
                return original(optimizer, ranged_closure, *args, **kwargs)

        def on_validation_start(original: Callable[..., Any]) -> Any:
            self._evaluation.enter_context(ranges("evaluation", EVALUATION))
            return original()

        def on_validation_end(original: Callable[..., Any]) -> Any:
            with self._evaluation:
                return original()

        wrappers = (training_step, backward, optimizer_step)
        for wrapper in (*wrappers, on_validation_start, on_validation_end):
            name = wrapper.__name__
            yield strategy, name, partial(wrapper, getattr(strategy, name))

    def _modules(self, instruments: Instruments, module: nn.Module) -> Iterator[Patch]:
        """Yield the patches of calls of modules (eager steps), and of the ranks' consensus."""
        paths = {id(child): path for path, child in module.named_modules() if path}
        ranges = self._ranges
        original = nn.Module.__call__

        def call(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(child))
            if path is None:
                return original(child, *args, **kwargs)
            with ranges(path, MODULE):
                return original(child, *args, **kwargs)

        yield nn.Module, "__call__", call
        parameters = {id(parameter): name for name, parameter in module.named_parameters()}

        def update(_: StepByBucket, updated: Sequence[nn.Parameter]) -> Any:
            names = [parameters.get(id(parameter), "a parameter") for parameter in updated]
            return ranges(f"update of {listed(names)}", UPDATE)

        yield instruments.ranged(StepByBucket, "__call__", update)
        consensus = ("consensus of the ranks", COLLECTIVE)
        yield instruments.ranged(
            StepConsensus, "all_have", lambda *_, **__: ranges(*consensus, collective="consensus")
        )

    # What is reported.

    def _report(self, run: "ShardedRun", slices: list[Any]) -> None:
        """Gather the recorded slices of all ranks; the first rank writes the trace and prints the
        table of measured steps. Collective.

        A trace that cannot be written gives a warning on that rank.
        """
        group = run.group
        rank = rank_in(None)
        stages = []
        for index, stage in enumerate(run.plan.stages):
            if rank_in(group) in stage_ranks(stage):
                stages.append(index)
        offset = clock_offset()
        records = gather_records(RankRecord(rank, tuple(stages), slices, offset))
        folder = self._folder()
        if not records:
            return
        path = folder / f"alpa_trace_{self._first}_{self._last}.json.gz"
        mark_waiting(records)
        profiled = profiled_steps(records, self._first, str(path))
        self.profiled = profiled
        measured = run.measured_steps(profiled)
        about = {"plan": measured.plan, "model": type(run.module).__name__}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_trace(path, records, about)
            self.trace = path
        except OSError as error:
            rank_zero_warn(f"alpa: the profile cannot be written: {error}")
        run.say(measured_table(measured, run.plan))
        if self.trace is not None:
            run.say(f"alpa: trace of all ranks, for https://ui.perfetto.dev: {self.trace}")

    def _folder(self) -> Path:
        """Return the Trainer's `log_dir`; `local_folder` if it is None or a URL. Collective."""
        trainer = self._strategy.lightning_module.trainer
        folder = trainer.log_dir
        if folder is None or is_url(folder):
            return local_folder(trainer)
        return Path(folder)


def step_name(module: nn.Module) -> str:
    """Return the name of a LightningModule's own lines."""
    return f"{type(module).__name__}.training_step"
