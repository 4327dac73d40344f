"""Jobs of two ranks that get a signal at a given moment, and what is looked at afterwards.

A job is the script of a user, started as users start it. At its moment each rank writes its process
id; the signal is sent; every rank must be gone in time, nothing stays behind, checkpoints are
complete, and training that resumes from the newest one has bit for bit the weights of an
undisturbed training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from models import MLP

from alpa_strategy import open_checkpoint
from alpa_strategy.checkpoint.tensors import StoredTensor, map_tensors

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
RANKS = ((0, 1), (0,), (1,))
MOMENTS = ("planning", "first step", "steady", "pipeline", "saving", "validating")
LAUNCHERS = ("own", "torchrun")
# Moments in the middle of other runs than a captured one of one stage -> their options.
PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"num_stages": 2, "num_microbatches": 2},
    "eager": {"capture": "never"},
    "eager, sharded": {"capture": "never", "parallel": "zero3"},
    "manual backward": {},
}
# Loops of the Trainer without a training.
EVALUATIONS = ("validate", "test", "predict")
OTHER_MOMENTS = (*list(PLANS)[1:], *EVALUATIONS)
ROWS_PER_RANK = 4
NUM_BATCHES = 400
TESTS = Path(__file__).resolve().parents[2]
# Seconds to wait for a job's moment, and for the end of its ranks.
READY_SECONDS = 300
GONE_SECONDS = 60

JOB = """
import os, sys, time
from signal_jobs import train
root, moment = sys.argv[1:]
train(root, moment, signalled=True)
print("FINISHED", flush=True)
"""

# SLURM's srun on one node: starts the ranks with the variables of a job.
SRUN = """
import os, subprocess, sys
job = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
    "MASTER_ADDR": "127.0.0.1",
}
processes = []
for rank in range(2):
    variables = {**os.environ, **job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    processes.append(subprocess.Popen([sys.executable, *sys.argv[1:]], env=variables))
for process in processes:
    process.wait()
"""


# In the job: a module, and where it stops to be signalled


class Model(MLP):
    """An MLP that says where it is, and keeps its unsharded weights after given steps."""

    moment = ""
    root = ""
    weights: dict[int, dict[str, torch.Tensor]]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.moment in ("first step", "steady", *PLANS) and self.global_step == 5 * (
            self.moment != "first step"
        ):
            ready(self.root)
        if self.moment:
            time.sleep(0.02)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if (self.moment == "validating" and self.global_step > 0) or (
            self.moment in EVALUATIONS and batch_idx > 5
        ):
            ready(self.root)
            time.sleep(0.05)
        self.log("val", self.net(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx > 5:
            ready(self.root)
            time.sleep(0.05)
        return self.net(batch[0])


class ByHand(Model):
    """Runs its own backward."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Weights(pl.Callback):
    """Whole weights after each step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with trainer.strategy.whole_parameters():
            self.after[trainer.global_step] = {
                k: v.detach().clone() for k, v in module.state_dict().items()
            }


def ready(root: str) -> None:
    rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    Path(root, f"ready-{rank}").write_text(str(os.getpid()))
    if (code := os.environ.get("EXIT_CODE_OF_RANK_1")) and rank == "1":
        os._exit(int(code))


def stop_when_planning(root: str) -> None:
    from alpa_strategy.comm.collectives import RankZero

    result_of = RankZero.result_of

    def slow(rank_zero: Any, work: Any, what: str) -> Any:
        ready(root)
        time.sleep(60)
        return result_of(rank_zero, work, what)

    RankZero.result_of = slow  # type: ignore[method-assign]


def stop_when_saving(root: str) -> None:
    """Every rank stops in the middle of writing its part, between two collectives of DCP."""
    from alpa_strategy.checkpoint.directory import _Writer

    write_data = _Writer.write_data

    def slow(writer: Any, plan: Any, planner: Any) -> Any:
        written = write_data(writer, plan, planner)
        ready(root)
        time.sleep(1)
        return written

    _Writer.write_data = slow  # type: ignore[method-assign]


def train(
    root: str,
    moment: str,
    signalled: bool = False,
    resume: str | None = None,
    max_steps: int = -1,
    trainer_options: dict[str, Any] | None = None,
) -> dict[int, dict[str, torch.Tensor]]:
    """One `fit` on two ranks; returns the unsharded weights after each of its steps (not where it
    is signalled).
    """
    from alpa_strategy import AlpaStrategy

    if signalled and moment == "planning":
        stop_when_planning(root)
    if signalled and moment == "saving":
        stop_when_saving(root)
    torch.manual_seed(0)
    model = (ByHand if moment == "backward by hand" else Model)(num_layers=4)
    model.moment, model.root = moment if signalled else "", root
    rows = model.example_batch(NUM_BATCHES * 2 * ROWS_PER_RANK)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*rows), batch_size=ROWS_PER_RANK
    )
    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, **PLANS.get(moment, {}))
    weights = Weights()
    saving = [
        OnExceptionCheckpoint(root, "last"),
        ModelCheckpoint(root, "every", every_n_train_steps=3),
    ]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=max_steps,
        logger=False,
        max_epochs=10**6,
        callbacks=saving if signalled else [weights],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        val_check_interval=20 if moment == "validating" else 1.0,
        num_sanity_val_steps=0,
        enable_checkpointing=signalled,
        **(trainer_options or {}),
    )
    if moment in EVALUATIONS:
        getattr(trainer, moment)(model, loader)
        return {}
    trainer.fit(model, loader, loader if signalled else None, ckpt_path=resume)
    return weights.after


# Outside: start, signal, look


@dataclass
class Case:
    number: signal.Signals
    ranks: tuple[int, ...]
    moment: str
    launcher: str

    def __str__(self) -> str:
        who = "all" if len(self.ranks) == 2 else f"rank {self.ranks[0]}"
        return f"{self.number.name} to {who}, {self.moment}, {self.launcher}"


@dataclass
class Outcome:
    """What was seen: seconds until every rank was gone, and what is wrong (nothing, in the good
    case).
    """

    seconds: float = 0.0
    resumed_from: int | None = None
    wrong: list[str] = field(default_factory=list)
    output: str = ""


CASES = [
    Case(number, ranks, moment, launcher)
    for number in NUMBERS
    for ranks in RANKS
    for moment in MOMENTS
    for launcher in LAUNCHERS
]
OTHER_CASES = [
    Case(number, ranks, moment, "own")
    for number in NUMBERS[:2]
    for ranks in RANKS
    for moment in OTHER_MOMENTS
]


@contextmanager
def started(
    root: Path, script: str, *arguments: str, launcher: str, extra: dict[str, str] | None = None
) -> Iterator:
    """The job while it runs; what is left of it afterwards is killed, process by process."""
    path = root / "job.py"
    path.write_text(script)
    command = [sys.executable]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    elif launcher == "slurm":
        command += ["-c", SRUN]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    paths = [
        str(TESTS / "extras" / "failure_watch"),
        str(TESTS),
        str(TESTS.parent),
        environment.get("PYTHONPATH", ""),
    ]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **(extra or {})}
    with (root / "output").open("w") as output:
        job = subprocess.Popen(
            [*command, str(path), *arguments],
            env=environment,
            stdout=output,
            stderr=output,
            # a shell's `&` has it ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield job
    finally:
        for pid in processes_of(root):
            os.kill(pid, signal.SIGKILL)
        job.wait()


def processes_of(root: Path) -> list[int]:
    """Processes that run the job's script, zombies left out."""
    script, found = str(root / "job.py"), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if script in arguments and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def pids(root: Path, job: subprocess.Popen) -> dict[int, int]:
    """Rank -> process, once both have come to the moment."""
    deadline = time.monotonic() + READY_SECONDS
    results = {rank: root / f"ready-{rank}" for rank in range(2)}
    while time.monotonic() < deadline and job.poll() is None:
        if all(path.exists() and path.read_text() for path in results.values()):
            return {rank: int(path.read_text()) for rank, path in results.items()}
        time.sleep(0.02)
    raise AssertionError("the job did not come so far:\n" + (root / "output").read_text())


def run_case(case: Case, root: Path, script: str = JOB, limit: float = 10.0) -> Outcome:
    """Start the job, signal it, wait for its end; `wrong` says what should not be."""
    outcome = Outcome()
    with started(root, script, str(root), case.moment, launcher=case.launcher) as job:
        processes = pids(root, job)
        for rank in case.ranks:
            os.kill(processes[rank], case.number)
        sent = time.monotonic()
        while any(map(is_alive, processes.values())) and time.monotonic() < sent + GONE_SECONDS:
            time.sleep(0.02)
        outcome.seconds = time.monotonic() - sent
        deadline = (
            time.monotonic() + GONE_SECONDS
        )  # torchrun's agent looks after its ranks now and then
        while (left := processes_of(root)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            outcome.wrong.append(f"processes {left} are left")
    outcome.output = (root / "output").read_text()
    if outcome.seconds > limit:
        outcome.wrong.append(f"it took {outcome.seconds:.1f} s")
    if "FINISHED" in outcome.output:
        outcome.wrong.append("it finished as if nothing had been")
    survives = len(case.ranks) == 1 or case.number != signal.SIGUSR1  # which ends a process at once
    if survives and any(root.glob(".*saving*")):  # else the next save removes it
        outcome.wrong.append("a partial checkpoint is left")
    _look_at_checkpoints(case, root, outcome)
    return outcome


def _look_at_checkpoints(case: Case, root: Path, outcome: Outcome) -> None:
    for path in root.glob("*.ckpt"):
        whole = map_tensors(
            open_checkpoint(path), StoredTensor, lambda stored: stored.full_tensor()
        )
        if not all(torch.isfinite(value).all() for value in whole["state_dict"].values()):
            outcome.wrong.append(f"{path.name} holds values that are not finite")
    could_save = (
        case.moment in ("first step", "steady", "saving", *PLANS) and case.number == signal.SIGTERM
    )
    if could_save and not (root / "last.ckpt").exists():
        outcome.wrong.append("SIGTERM left no checkpoint of its moment")


def newest(root: Path) -> tuple[Path, int] | None:
    """The checkpoint of the latest step, with its step."""
    results = [
        (int(open_checkpoint(path)["global_step"]), path) for path in sorted(root.glob("*.ckpt"))
    ]
    return None if not results else (max(results)[1], max(results)[0])


def check_resumption(
    case: Case, root: Path, pool: Any, undisturbed: Any, outcome: Outcome, steps: int = 4
) -> None:
    """Go on for `steps` and compare with what an undisturbed training had there, bit by bit.

    Args:
        undisturbed: moment, number of steps -> the weights after each of them (`Undisturbed`).
    """
    found = newest(root)
    path, step = (None, 0) if found is None else (str(found[0]), found[1])
    end = min(step + steps, NUM_BATCHES - 1)
    after = pool.run(
        2, train, str(root), case.moment, False, path, end, init_group=False, timeout=300
    )[0]
    expected = undisturbed(case.moment, end)
    outcome.resumed_from = step
    if sorted(after) != list(range(step + 1, end + 1)):
        outcome.wrong.append(f"resumed at step {step} it made the steps {sorted(after)}")
    for at, weights in after.items():
        for name, value in weights.items():
            if not torch.equal(value, expected[at][name]):
                outcome.wrong.append(f"resumed at step {step}, {name} differs after step {at}")
                return


class Undisturbed:
    """Weights after each step of a training without signals, for each kind of plan. It is trained
    again if more steps are needed than before.
    """

    def __init__(self, root: Path, pool: Any) -> None:
        self._root = root
        self._pool = pool
        self._weights: dict[str, dict[int, dict[str, torch.Tensor]]] = {}

    def __call__(self, moment: str, steps: int) -> dict[int, dict[str, torch.Tensor]]:
        """Return the weights after at least `steps` steps."""
        kind = moment if moment in PLANS else "steady"
        if len(self._weights.get(kind, ())) < steps:
            root = self._root / f"undisturbed-{kind}-{steps}"
            arguments = (str(root), kind, False, None, steps)
            weights, _ = self._pool.run(2, train, *arguments, init_group=False, timeout=600)
            self._weights[kind] = weights
        return self._weights[kind]
