"""Signals of schedulers and users: every rank is gone in 10 seconds, whatever it was doing, no
process stays, and
training resumes from the last checkpoint as if nothing had been. `scripts/signal_matrix.py` runs
all, with times."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
import torch
from signal_jobs import (
    CASES,
    EVALUATIONS,
    JOB,
    OTHER_CASES,
    Undisturbed,
    check_resumption,
    is_alive,
    pids,
    processes_of,
    run_case,
    started,
    train,
)

LIMIT = 10.0 * (
    3 if os.environ.get("CI") else 2
)  # the machine of the tests does other things beside
QUICK = ("SIGTERM to rank 1, steady, own",)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, pool):
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), pool)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case)) for case in CASES if str(case) in QUICK),
        *(
            pytest.param(case, marks=pytest.mark.slow, id=str(case))
            for case in CASES
            if str(case) not in QUICK
        ),
    ],
)
def test_every_rank_ends_and_training_goes_on(tmp_path, pool, undisturbed, case):
    outcome = run_case(case, tmp_path, limit=LIMIT)
    check_resumption(case, tmp_path, pool, undisturbed, outcome)
    assert not outcome.wrong, (outcome.wrong, outcome.output)
    if case.number == signal.SIGTERM and case.moment == "steady":
        assert outcome.resumed_from >= 5  # saved at its moment, not only every third step


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHER_CASES, ids=str)
def test_so_do_runs_of_other_kinds(tmp_path, pool, undisturbed, case):
    outcome = run_case(case, tmp_path, limit=LIMIT)
    if case.moment not in EVALUATIONS:
        check_resumption(case, tmp_path, pool, undisturbed, outcome)
    assert not outcome.wrong, (outcome.wrong, outcome.output)


# By default checkpoint/test_environments.py resumes a job that SLURM requeued.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param((0, 1), id="all"), pytest.param((0,), id="rank 0")])
def test_slurm_requeues_and_goes_on_bit_for_bit(tmp_path, pool, undisturbed, ranks):
    """SIGUSR1 before the time limit: Lightning's own checkpoint and `scontrol requeue`, then
    SIGTERM ends the job.
    """
    scontrol, called = tmp_path / "scontrol", tmp_path / "called"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
    scontrol.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    extra = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_PORT": str(port)}
    with started(tmp_path, JOB, str(tmp_path), "steady", launcher="slurm", extra=extra) as job:
        processes = pids(tmp_path, job)
        for rank in ranks:
            os.kill(processes[rank], signal.SIGUSR1)
        deadline = time.monotonic() + 3 * LIMIT
        while not called.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes.values():
            os.kill(process, signal.SIGTERM)
        sent = time.monotonic()
        while any(map(is_alive, processes.values())) and time.monotonic() < sent + 3 * LIMIT:
            time.sleep(0.05)
        output = (tmp_path / "output").read_text()
        assert time.monotonic() - sent < LIMIT, output
    assert called.read_text() == "requeue 77\n", output
    path = tmp_path / "hpc_ckpt_1.ckpt"
    # The plan is replicated: its checkpoint is one ordinary file.
    step = torch.load(path, weights_only=False)["global_step"]
    after = pool.run(
        2, train, str(tmp_path), "steady", False, str(path), step + 4, init_group=False, timeout=300
    )[0]
    for at in range(step + 1, step + 5):
        for name, value in undisturbed("steady", step + 4)[at].items():
            assert torch.equal(after[at][name], value), (at, name)


# By default a rank is ended above, and killed in test_lost_rank.py.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_rank_0_is_stopped(tmp_path, launcher):
    """A stopped process does nothing, and the job's store is its own: the others end; it, when it
    goes on.
    """
    with started(tmp_path, JOB, str(tmp_path), "steady", launcher=launcher) as job:
        processes = pids(tmp_path, job)
        os.kill(processes[0], signal.SIGSTOP)
        time.sleep(1)
        for rank, wakes in ((1, ()), (0, (signal.SIGCONT,))):
            for number in (signal.SIGTERM, *wakes):
                os.kill(processes[rank], number)
            sent = time.monotonic()
            while is_alive(processes[rank]) and time.monotonic() < sent + 3 * LIMIT:
                time.sleep(0.05)
            assert time.monotonic() - sent < LIMIT, (rank, (tmp_path / "output").read_text())
        job.wait(60)
        assert not processes_of(tmp_path)
    assert "killed (out of memory" not in (tmp_path / "output").read_text()


# By default test_lost_rank.py has a rank that ends.
@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_a_rank_that_leaves_is_not_called_killed(tmp_path, launcher, code):
    extra = {"EXIT_CODE_OF_RANK_1": str(code)}
    with started(tmp_path, JOB, str(tmp_path), "steady", launcher=launcher, extra=extra) as job:
        job.wait(120)
        assert not processes_of(tmp_path)
    output = (tmp_path / "output").read_text()
    assert job.returncode != 0, output
    assert "out of memory" not in output
    if launcher == "own" and code:
        assert "rank 1 (process" in output
        assert f"ended with exit code {code}" in output
