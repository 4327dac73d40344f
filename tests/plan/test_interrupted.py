"""An interrupted planning goes on where it stopped: the same plan, and no work done twice."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from covering import slow_but
from killed import in_child
from lightning import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy
from alpa_strategy.cli import main

ROOT = Path(__file__).parents[2]
GPT = ["plan", "gpt_tiny", "--cluster", "p3_16xlarge_x8", "model.num_layers=2"]
GPT += ["cluster.num_nodes=1", "cluster.devices_per_node=2", "-o", "plan.json"]
STAGES = [*GPT, "plan.num_microbatches=4", "plan.num_stages=2"]
COMMANDS = {
    "one stage": [*GPT, "plan.num_stages=1"],
    "stages": STAGES,
    "batch sizes": [*GPT, "--tune", "batch_size", "data.batch_size=2", "plan.num_stages=1"],
}

# Of each command, the kinds of results that are stored.
KINDS = {
    "one stage": {"plan", "solution", "stage"},
    "stages": {"runs", "candidates", "bound", "solution", "stage"},
    "batch sizes": {"plan", "solution", "stage"},
}


def run(command):
    assert main(command) == 0


def planned(folder):
    """The stored plan, without what is said of time."""
    plan = json.loads((folder / "plan.json").read_text())
    del plan["solver_seconds"]
    return json.dumps(plan)


def stored(folder):
    return int((folder / "stored").read_text())


def said(folder):
    """What a command wrote on stderr, as one line."""
    return " ".join((folder / "said").read_text().split())


def uninterrupted(command, folder):
    """(plan, number of results) of a planning that is left alone."""
    folder.mkdir()
    assert in_child(partial(run, command), folder) == 0
    assert not (folder / ".alpa").exists()
    return planned(folder), stored(folder)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return uninterrupted(STAGES, tmp_path_factory.mktemp("stages") / "whole")


@pytest.mark.parametrize("name", slow_but(COMMANDS, ("stages",)))
def test_a_killed_planning_goes_on(name, tmp_path):
    command = COMMANDS[name]
    plan, total = uninterrupted(command, tmp_path / "whole")
    for moment in sorted({1, total // 2, total}):
        folder = tmp_path / str(moment)
        folder.mkdir()
        assert in_child(partial(run, command), folder, kill_after=moment) == -signal.SIGKILL
        paths = [path.name for path in (folder / ".alpa" / "planning").iterdir()]
        assert len(paths) == moment
        if moment == total:
            assert {path.partition("-")[0] for path in paths} == KINDS[name]

        assert in_child(partial(run, command), folder) == 0
        assert planned(folder) == plan
        assert stored(folder) == total - moment, "what was stored is not computed again"
        assert "results of an interrupted planning were used" in said(folder)
        assert not (folder / ".alpa").exists()


def test_torn_and_foreign_files_are_told_and_change_nothing(stages, tmp_path):
    plan, total = stages
    assert in_child(partial(run, STAGES), tmp_path, kill_after=total) == -signal.SIGKILL
    paths = sorted((tmp_path / ".alpa" / "planning").iterdir())
    texts = [path.read_text() for path in paths]
    for number, path in enumerate(paths):
        is_torn = number % 2
        path.write_text(texts[number][:-20] if is_torn else texts[number - 1])

    assert in_child(partial(run, STAGES), tmp_path) == 0
    assert planned(tmp_path) == plan
    assert "cannot be used" in said(tmp_path)
    assert "interrupted planning goes on" not in said(tmp_path)


def test_a_folder_that_cannot_be_written_costs_a_line(stages, tmp_path):
    (tmp_path / ".alpa").write_text("no folder")
    assert in_child(partial(run, STAGES), tmp_path) == 0
    assert said(tmp_path).count("cannot be stored in .alpa/planning") == 1
    assert planned(tmp_path) == stages[0]


def test_several_processes_may_plan_the_same(stages, tmp_path):
    plan, total = stages
    assert in_child(partial(run, STAGES), tmp_path, kill_after=total // 2) == -signal.SIGKILL
    children = []
    for number in range(2):
        own = []
        for text in STAGES:
            if text == "plan.json":
                own.append(f"{number}.json")
            else:
                own.append(text)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.chdir(tmp_path)
                code = main(own)
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
    for number in range(2):
        (tmp_path / f"{number}.json").rename(tmp_path / "plan.json")
        assert planned(tmp_path) == plan


# --- A training: rank 0 plans, by op times that it measured.


def train():
    seed_everything(1)
    trainer = Trainer(
        max_steps=2,
        strategy=AlpaStrategy(num_microbatches=2),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=".",
    )
    model = BoringModel()
    trainer.fit(model, DataLoader(RandomDataset(32, 8), batch_size=4))
    torch.save(model.state_dict(), "weights.pt")


def test_a_training_that_was_killed_while_it_was_planned_goes_on(tmp_path):
    assert in_child(train, tmp_path, kill_after=4) == -signal.SIGKILL
    left = list((tmp_path / ".alpa" / "planning").iterdir())
    assert len(left) == 4
    assert any(path.name.startswith("timed-") for path in left)
    times = (tmp_path / ".alpa" / "costs" / "ops.json").read_text()

    assert in_child(train, tmp_path) == 0
    assert "results of an interrupted planning were used" in said(tmp_path)
    assert (tmp_path / ".alpa" / "costs" / "ops.json").read_text() == times
    assert not (tmp_path / ".alpa" / "planning").exists()
    assert len(list((tmp_path / ".alpa" / "plans").glob("*.json"))) == 1
    resumed = torch.load(tmp_path / "weights.pt")

    (tmp_path / "whole").mkdir()
    assert in_child(train, tmp_path / "whole") == 0
    for name, weight in torch.load(tmp_path / "whole" / "weights.pt").items():
        torch.testing.assert_close(resumed[name], weight)


# --- The recipe of README's largest plan, killed from outside.


# Shares of the seconds that follow the capture: before it nothing is stored.
# Of the seconds after the start. The last fifth may be over when another process slows the machine:
# the page is written then, and the plan is stored.
MOMENTS = (0.05, 0.25, 0.45, 0.65, 0.8)
# Beyond the start and what was left to do: what was being computed is computed again. The issue's
# limit is 5 s. The stage DP is stored per schedule, which has not been measured here yet.
LOST_SECONDS = 15.0
# The same work takes a tenth more of the processor while other processes use its caches.
NOISE = 1.1
LARGE = ["plan", "gpt_39b", "--cluster", "p3_16xlarge_x8", "-o", "plan.json"]


def started(folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "alpa_strategy", *LARGE]
    with (folder / "said").open("w") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def processor_seconds(process):
    """What a process has used so far; of one that has ended, what it used in all."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def to_its_end(folder):
    """Processor seconds of a whole command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert started(folder).wait() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_when_captured(process, folder):
    """Wait for the end of the capture; return the processor seconds until then."""
    while "capture" not in said(folder):
        assert process.poll() is None, said(folder)
        time.sleep(0.05)
    return processor_seconds(process)


@pytest.mark.slow
def test_gpt_39b_goes_on_at_any_moment(tmp_path):
    """In seconds of the processor: how busy the machine is makes no difference."""
    whole = tmp_path / "whole"
    whole.mkdir()
    total = to_its_end(whole)
    for share in MOMENTS:
        folder = tmp_path / str(share)
        folder.mkdir()
        process = started(folder)
        start = seconds_when_captured(process, folder)
        while (used := processor_seconds(process)) < start + share * (total - start):
            time.sleep(0.05)
        process.kill()
        assert process.wait() == -signal.SIGKILL

        rest = to_its_end(folder)
        print(f"start {start:.1f} s, killed after {used:.1f} of {total:.1f} s: {rest:.1f} s more")
        assert planned(folder) == planned(whole)
        assert rest <= NOISE * (start + total - used) + LOST_SECONDS
        assert re.search(r"\d+ results of an interrupted planning were used", said(folder))
