"""An exception on one rank ends the whole job, quickly, with that exception shown, and leaves no
process behind.
"""

from __future__ import annotations

import re
import time
from itertools import product
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from jobs import failing_job, processes_left, run_job
from models import MLP
from quiet import QUIET
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy


# By default `training_step` of the next test, which asserts the same and more.
@pytest.mark.slow
def test_one_ranks_exception_ends_all_ranks(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run_job(tmp_path, failing_job("on_train_batch_end"), str(tmp_path))
    assert done.returncode != 0
    assert "FINISHED" not in done.stdout
    assert time.monotonic() - started < 100
    shown = done.stderr.split("rank 0 ends because rank 1 failed:")
    assert len(shown) == 2, done.stderr
    assert "ValueError: the user's own mistake" in shown[1]
    assert processes_left(tmp_path) == ""


FAILING = (Path(__file__).parent / "failing_job.py").read_text()
PLACES = (
    "training_step",
    "validation_step",
    "dataset",
    "optimizer",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_after_backward",
    "configure_optimizers",
    "on_save_checkpoint",
)
CASCADE = re.compile("gloo/|connection (reset|closed)|broken pipe|LostRankError", re.IGNORECASE)


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        (PLACES[0], 1),
        pytest.param(PLACES[0], 0, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(PLACES[1:], (0, 1))),
    ],
)
def test_one_rank_shows_its_error_and_the_others_only_name_it(
    tmp_path: Path, place: str, rank: int
) -> None:
    done = run_job(tmp_path, FAILING, place, str(rank), str(tmp_path))
    assert done.returncode != 0
    assert "FINISHED" not in done.stdout
    # The error's own traceback, once, with torch's prefix; nothing that follows from it.
    shown = re.findall(r"^(?:\[rank\d\]: )?Traceback .most recent", done.stderr, re.MULTILINE)
    # Its causes, why the step was not captured among them, have one each before it.
    causes = re.findall(
        r"^(?:\[rank\d\]: )?(?:The above exception was|During handling of)",
        done.stderr,
        re.MULTILINE,
    )
    assert len(shown) - len(causes) == 1, done.stderr
    assert not CASCADE.search(done.stderr), done.stderr
    others = re.findall(rf"^alpa: rank {1 - rank} .*$", done.stderr, re.MULTILINE)
    expected = f"alpa: rank {1 - rank} ends because rank {rank} failed: Mistake: my own mistake"
    assert others == [expected], done.stderr
    assert processes_left(tmp_path) == ""


# By default ranks of the pool do, in the next test.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank", "more"),
    [
        ("should_stop", 0, ()),
        ("should_stop", 1, ()),
        ("should_stop", 1, ("without validation",)),
        ("should_stop", 0, ("without validation",)),
        ("should_stop at an end", 0, ()),
        ("should_stop at an end", 1, ("without validation",)),
    ],
)
def test_one_rank_that_stops_alone_is_named(tmp_path: Path, place: str, rank: int, more: tuple):
    done = run_job(tmp_path, FAILING, place, str(rank), str(tmp_path), *more)
    assert done.returncode != 0
    assert "FINISHED" not in done.stdout
    assert f"trainer.should_stop is set on rank {rank} alone" in done.stderr
    assert done.stderr.count("What to do: let all ranks decide alike") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not CASCADE.search(done.stderr), done.stderr
    assert processes_left(tmp_path) == ""


class StopsAlone(pl.Callback):
    """Ends the training of rank 0."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.is_global_zero and trainer.global_step == 2:
            trainer.should_stop = True


def train_until_one_stops(root: str) -> None:
    model = MLP()
    rows = torch.utils.data.TensorDataset(*model.example_batch(64))
    trainer = pl.Trainer(
        strategy=AlpaStrategy(cluster="pcie_8gpu", verbose=False),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        callbacks=[StopsAlone()],
        default_root_dir=root,
        **QUIET,
    )
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))


def test_a_rank_of_the_pool_that_stops_alone_is_named(pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"trainer\.should_stop is set on rank 0 alone"):
        pool.run(2, train_until_one_stops, str(tmp_path))
