"""Several ranks of a notebook: forked workers, which have the notebook's classes and data.

As Lightning's launcher of `ddp_notebook`, with these differences. A worker's exception is raised in
the notebook as it is, once, and ends the other workers. A worker that a signal ended is named. The
notebook's Trainer gets the plan, the progress of its loops, and the states of its callbacks.
"""

import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from torch.multiprocessing.spawn import _prctl_pr_set_pdeathsig
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from alpa_strategy.errors import LostRankError, SetupError
from alpa_strategy.ir.plan import Plan
from alpa_strategy.lightning.exit_text import exit_text

# Seconds for the other workers to end by themselves, after an error and after Ctrl+C.
ERROR_SECONDS = 2.0
INTERRUPT_SECONDS = 6.0

# Texts of PyTorch for processes that were forked too late.
_FORKED_TOO_LATE = ("Cannot re-initialize CUDA in forked", "autograd's threading in combination")


def interactive_error() -> SetupError:
    """Return the error for several devices in an interactive session, without `fork`."""
    return SetupError(
        "strategy alpa on several devices in a notebook or an interactive session: it starts the"
        " script once more for each device, and here is no script",
        'use Trainer(strategy="alpa_notebook"), or AlpaStrategy(start_method="fork") with your'
        " options; or write the training to a file and start that: !python train.py",
    )


def _late_fork_error(cause: str) -> SetupError:
    return SetupError(
        f"workers of a notebook are forked, and {cause}",
        "restart the kernel, and run `trainer.fit` before anything that uses a GPU or computes"
        " gradients; or write the training to a file and start that: !python train.py",
    )


@dataclass(frozen=True)
class _Worker:
    """A forked rank."""

    rank: int
    process: Any

    # Receives a `_Report`.
    receiver: Connection


@dataclass(frozen=True)
class _Report:
    """The last message of a worker."""

    # Of rank 0, if it ended well: `_Output`, as torch.save writes it.
    output: bytes | None = None

    # A pickled exception, if it failed.
    error: bytes | None = None

    # Whether Ctrl+C ended it.
    is_interrupted: bool = False


@dataclass(frozen=True)
class _Output:
    """What rank 0 leaves to the notebook's Trainer. Tensors are on the CPU."""

    # Returned by the Trainer's call: metrics of `test`, predictions of `predict`.
    result: Any

    state: TrainerState

    # File with the module's state dict; None: it was not trained, or does not fit one device.
    weights_path: str | None

    # Metrics by the name of the Trainer's attribute.
    metrics: Mapping[str, Any]

    # States of callbacks by their `state_key`.
    callbacks: Mapping[str, Any]

    # Paths and scores of each ModelCheckpoint, in their order.
    checkpoints: Sequence[Mapping[str, Any]]

    # Progress of the loops of `fit`.
    progress: Mapping[str, Any] | None

    # As of `Plan.to_dict`.
    plan: Mapping[str, Any] | None


class NotebookLauncher(_MultiProcessingLauncher):
    """Forks a worker for each device, and brings the results into the notebook's Trainer."""

    # An AlpaStrategy.
    _strategy: Any

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Run `function` in forked workers and return its result on rank 0.

        Parameters, metrics and the state of loops and callbacks become those of the notebook's
        Trainer.

        Args:
            function: called with `args` and `kwargs` in each worker.
            trainer: the notebook's Trainer.

        Returns:
            None if the workers ended without a result.

        Raises:
            SetupError: as of `_check`.
            BaseException: as of `_wait`: that of a worker.
        """
        self._check(trainer)
        with _own_port(self._strategy.cluster_environment):
            workers = self._start(trainer, function, args, kwargs)
            output = _wait(workers)
        if output is None:
            return None
        self._already_fit |= output.state.fn == TrainerFn.FITTING
        self._restore(trainer, output)
        return output.result

    def _check(self, trainer: Any) -> None:
        """Check that workers can be forked now.

        Raises:
            SetupError: CUDA is initialized, or this Trainer has trained before and is to train.
        """
        uses_cuda = self._strategy.root_device.type == "cuda"
        if uses_cuda and torch.cuda.is_initialized():
            raise _late_fork_error("CUDA is already initialized in this one")
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise SetupError(
                "this Trainer has trained before: its optimizers' state ended with its workers",
                "make a new Trainer: the module has its trained weights, and"
                " `fit(ckpt_path=...)` continues with the optimizers' state of a checkpoint",
            )

    def _start(
        self, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> list[_Worker]:
        """Fork a worker for each device, which runs `function(*args, **kwargs)` as one rank."""
        context = multiprocessing.get_context("fork")
        workers = []
        for rank in range(self._strategy.num_processes):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (self, rank, sender, trainer, function, args, kwargs)
            process = context.Process(target=_work, args=arguments, name=f"alpa-rank-{rank}")
            process.start()
            # Later workers must not inherit it: a worker's end closes its pipe.
            sender.close()
            workers.append(_Worker(rank, process, receiver))
        self.procs = [worker.process for worker in workers]
        return workers

    def output(self, trainer: Any, result: Any) -> bytes:
        """Return the `_Output` of this worker as bytes, as `torch.save` writes it.

        After a `fit` it stores the module's weights in a temporary file, too.

        Args:
            trainer: the worker's.
            result: what the Trainer's call returned.
        """
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        connector = trainer._logger_connector
        checkpoints = []
        for callback in _checkpoints_of(trainer):
            checkpoints.append({name: getattr(callback, name) for name in _CHECKPOINT_NAMES})
        plan = self._strategy.plan
        output = _Output(
            result=result,
            state=trainer.state,
            weights_path=self._save_weights() if is_fitting else None,
            metrics={name: dict(getattr(connector, name)) for name in _METRIC_NAMES},
            callbacks=_callback_states(trainer),
            checkpoints=checkpoints,
            progress=trainer.fit_loop.state_dict() if is_fitting else None,
            plan=None if plan is None else plan.to_dict(),
        )
        buffer = io.BytesIO()
        fields = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), vars(output))
        torch.save(_Output(**fields), buffer)
        return buffer.getvalue()

    def _save_weights(self) -> str | None:
        """Store the module's weights in a temporary file and return its path; None if they are
        still sharded.
        """
        if self._strategy.run is not None:
            return None
        handle, path = tempfile.mkstemp(prefix="alpa-weights-")
        os.close(handle)
        torch.save(self._strategy.lightning_module.state_dict(), path)
        return path

    def _restore(self, trainer: Any, output: _Output) -> None:
        """Give the notebook's Trainer and module the state, metrics and weights of rank 0."""
        if output.weights_path is not None:
            _load_weights(trainer.lightning_module, Path(output.weights_path))
        trainer.state = output.state
        for name, metrics in output.metrics.items():
            getattr(trainer._logger_connector, name).update(metrics)
        for callback in trainer.callbacks:
            state = output.callbacks.get(callback.state_key)
            if state:
                callback.load_state_dict(state)
        for callback, values in zip(_checkpoints_of(trainer), output.checkpoints, strict=True):
            vars(callback).update(values)
        if output.progress is not None:
            trainer.fit_loop.load_state_dict(output.progress)
            trainer.fit_loop.restarting = False
        if output.plan is not None:
            self._strategy._session.plan = Plan.from_dict(output.plan)


_METRIC_NAMES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_CHECKPOINT_NAMES = (
    "best_model_path",
    "best_model_score",
    "last_model_path",
    "best_k_models",
    "kth_best_model_path",
)


def _checkpoints_of(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _callback_states(trainer: Any) -> dict[str, Any]:
    """Return the states of callbacks other than ModelCheckpoint, which knows its folder alone."""
    states = {}
    for callback in trainer.callbacks:
        if not isinstance(callback, ModelCheckpoint):
            states[callback.state_key] = callback.state_dict()
    return states


def _load_weights(module: pl.LightningModule, path: Path) -> None:
    """Load a worker's weights and remove their file. Layers that only workers have built are built
    by `configure_model` first; other names without a match are ignored.
    """
    weights = torch.load(path, weights_only=True)
    path.unlink()
    names = module.state_dict().keys()
    if any(name not in names for name in weights):
        # Only the workers have built these layers.
        module.configure_model()
    # A callback may have added or removed layers in the workers.
    module.load_state_dict(weights, strict=False)


@contextmanager
def _own_port(environment: Any) -> Iterator[None]:
    """Context with the port for the workers in the environment; a later launch chooses its own."""
    has_port = "MASTER_PORT" in os.environ
    os.environ["MASTER_PORT"] = str(environment.main_port)
    try:
        yield
    finally:
        if not has_port:
            del os.environ["MASTER_PORT"]


# In a worker


def _work(
    launcher: NotebookLauncher,
    rank: int,
    sender: Connection,
    trainer: Any,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> None:
    """Run `function` as one rank, in a worker, and send a `_Report` to the notebook.

    Args:
        rank: of this worker.
        sender: end of its pipe to the notebook.
        function, args, kwargs: the call of the Trainer.
    """
    # Ends with the notebook's process.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    strategy = launcher._strategy
    os.environ["LOCAL_RANK"] = str(rank)
    # OpenMP's threads are not forked: a child that uses more than its own waits for them forever,
    # if the notebook has computed anything with several.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # This process is a rank: it launches no others.
    strategy._launcher = None
    try:
        result = _call_and_handle_interrupt(trainer, function, *args, **kwargs)
        report = _Report(launcher.output(trainer, result) if rank == 0 else None)
        if dist.is_initialized():
            dist.destroy_process_group()
    # Lightning ends the process after Ctrl+C.
    except (SystemExit, KeyboardInterrupt):
        report = _Report(is_interrupted=True)
    except BaseException as error:
        report = _Report(error=_pickled(error))
    sender.send(report)
    sender.close()


def _pickled(error: BaseException) -> bytes:
    """Return an exception with its traceback as bytes; as a RuntimeError if it has no pickle."""
    try:
        data = pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
        pickle.loads(data)
    # Any error of any user's class.
    except Exception:
        text = RuntimeError(f"{type(error).__name__}: {error}")
        data = pickle.dumps(ExceptionWithTraceback(text, error.__traceback__))
    return data


# In the notebook


def _wait(workers: Sequence[_Worker]) -> _Output | None:
    """Wait until all workers have ended; return rank 0's output, None if it has none.

    Raises:
        LostRankError: a worker was ended from outside.
        KeyboardInterrupt: the user ended them.
        BaseException: of the first worker that failed.
    """
    output = None
    pending = {worker.receiver: worker for worker in workers}
    grace_seconds = ERROR_SECONDS
    try:
        while pending:
            for receiver in wait(list(pending)):
                # Connections alone are waited for.
                assert isinstance(receiver, Connection)
                report = _received(pending.pop(receiver))
                if report.output is not None:
                    output = torch.load(io.BytesIO(report.output), weights_only=False)
    except KeyboardInterrupt:
        grace_seconds = INTERRUPT_SECONDS
        raise
    finally:
        _end(workers, grace_seconds)
    return output


def _received(worker: _Worker) -> _Report:
    """Wait for a worker's report and return it.

    Raises:
        LostRankError: the worker was ended from outside.
        KeyboardInterrupt: the user ended it.
        BaseException: its error; SetupError if it failed because it was forked too late.
    """
    try:
        report = worker.receiver.recv()
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode
        raise LostRankError(
            f"rank {worker.rank} (process {worker.process.pid}) {exit_text(code)}",
            "see what it printed; with less memory per rank (a smaller batch) it may fit",
        ) from None
    if report.is_interrupted:
        raise KeyboardInterrupt
    if report.error is not None:
        error = pickle.loads(report.error)
        if any(text in str(error) for text in _FORKED_TOO_LATE):
            raise _late_fork_error("this one has used a GPU or computed gradients") from error
        raise error
    return report


def _end(workers: Sequence[_Worker], grace_seconds: float) -> None:
    """Wait `grace_seconds` for the workers to end by themselves, then kill those that are left."""
    deadline = time.monotonic() + grace_seconds
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join()
        worker.receiver.close()
