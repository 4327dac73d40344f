"""Checkpoints at URLs: written and read as in local folders, staged in the background, complete or
absent.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoint import store
from checkpoint.runs import (
    ONE_STAGE,
    PIPELINE,
    Scheduled,
    assert_bitwise,
    fit,
    make_loader,
    make_model,
    make_trainer,
    whole_state,
)
from covering import slow_but
from lightning.pytorch.callbacks import ModelCheckpoint
from quiet import QUIET
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy, export_checkpoint, open_checkpoint
from alpa_strategy.checkpoint.opening import is_checkpoint
from alpa_strategy.checkpoint.tensors import StoredTensor, map_tensors
from alpa_strategy.cli import main
from alpa_strategy.errors import CheckpointError, SetupError
from alpa_strategy.ir.plan import Plan

PLANS = {
    "zero3": ONE_STAGE["zero3"],
    "data": ONE_STAGE["data"],
    "pipeline": PIPELINE,
    "single": {**ONE_STAGE["zero3"], "checkpoint": "single"},
}


def bucket(root: str) -> str:
    return f"store://{root}/bucket"


def saving(root: str, every: int = 2) -> ModelCheckpoint:
    return ModelCheckpoint(
        bucket(root), "{step}", every_n_train_steps=every, save_top_k=1, save_last=True
    )


@contextlib.contextmanager
def environment(**variables: str) -> Any:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def loaded(url: str) -> dict[str, Any]:
    """Weights of the module that is made of a checkpoint, in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        return dict(Scheduled.load_from_checkpoint(url).state_dict())
    finally:
        torch.set_default_dtype(torch.float32)


def files_in(root: str) -> list[str]:
    return sorted(os.listdir(f"{root}/bucket"))


# Saving, resuming, reading


def save_and_resume(root: str, options: dict[str, Any]) -> dict[str, Any]:
    _, _, expected = fit(f"{root}/undisturbed", options, 2, 6)
    trainer, _, _ = fit(root, options, 2, 4, callbacks=[saving(root)])
    file_names = files_in(root)
    folders = os.listdir(f"{root}/bucket/.alpa") if ".alpa" in file_names else []
    _, _, steps = fit(root, options, 2, 6, ckpt_path="last", callbacks=[saving(root, 100)])
    assert sorted(steps) == [5, 6]
    assert_bitwise(steps, {number: expected[number] for number in steps})

    trainer.save_checkpoint(f"{bucket(root)}/by_hand.ckpt")
    weights = loaded(f"{bucket(root)}/by_hand.ckpt")
    assert_bitwise({name: weights[name] for name in expected[4]["weights"]}, expected[4]["weights"])
    return {"kept": file_names, "folders": len(folders), "staged": staged(root)}


def staged(root: str) -> list[str]:
    folder = Path(root) / ".alpa/staging"
    return sorted(os.listdir(folder)) if folder.exists() else []


# A pipeline is below, and one whole file in `test_one_device_writes_to_memory`.
@pytest.mark.parametrize("plan", slow_but(PLANS, ("zero3",)))
def test_a_run_is_saved_and_resumed_bit_for_bit(pool, tmp_path: Path, plan: str) -> None:
    result = pool.run(2, save_and_resume, str(tmp_path), PLANS[plan], timeout=300)[0]
    assert [name for name in result["kept"] if name != ".alpa"] == ["last.ckpt", "step=4.ckpt"]
    assert result["folders"] == (2 if plan in ("zero3", "pipeline") else 0)
    assert result["staged"] == []


def train_on_nodes(root: str, options: dict[str, Any], steps: int, resumes: bool) -> Any:
    """Train on ranks that share no folder but the bucket."""
    node = f"{root}/node{os.environ['RANK']}"
    os.makedirs(f"{node}/tmp", exist_ok=True)
    tempfile.tempdir = f"{node}/tmp"
    ckpt_path = "last" if resumes else None
    _, _, recorded = fit(node, options, 2, steps, ckpt_path=ckpt_path, callbacks=[saving(root)])
    left = [*os.listdir(f"{node}/tmp/alpa-checkpoints-{os.getuid()}")] if resumes else []
    tempfile.tempdir = None
    return recorded, left


@pytest.mark.parametrize("plan", slow_but(("zero3", "pipeline"), ("pipeline",)))
def test_nodes_need_no_shared_folder(pool, tmp_path: Path, plan: str) -> None:
    root, options = str(tmp_path), PLANS[plan]
    expected, _ = pool.run(2, train_on_nodes, f"{root}/once", options, 6, False, timeout=200)[0]
    pool.run(2, train_on_nodes, root, options, 4, False, timeout=200)
    assert staged(f"{root}/node0") == staged(f"{root}/node1") == []
    for steps, left in pool.run(2, train_on_nodes, root, options, 6, True, timeout=200):
        assert_bitwise(steps, {number: expected[number] for number in (5, 6)})
        assert left == []


def save_one(root: str, name: str) -> None:
    trainer, _, _ = fit(root, {**ONE_STAGE["zero3"], "checkpoint": "sharded"}, 2, 1)
    trainer.save_checkpoint(f"{bucket(root)}/{name}")


def test_other_readers_take_urls_and_copies(pool, tmp_path: Path) -> None:
    root = str(tmp_path)
    pool.run(2, save_one, root, "a.ckpt")
    url = f"{bucket(root)}/a.ckpt"
    assert is_checkpoint(url)
    exported = export_checkpoint(url, tmp_path / "plain.ckpt")
    expected = torch.load(exported)["state_dict"]
    stored = map_tensors(open_checkpoint(url)["state_dict"], StoredTensor, StoredTensor.full_tensor)
    assert_bitwise(dict(stored), dict(expected))

    # A bucket that is copied to a disk is read there, and a folder of shards by itself.
    assert is_checkpoint(f"{root}/bucket/a.ckpt")
    (shards,) = (tmp_path / "bucket/.alpa").iterdir()
    for copy in (f"{root}/bucket/a.ckpt", shards, f"store://{shards}"):
        assert open_checkpoint(copy)["global_step"] == 1

    export_checkpoint(url, f"{bucket(root)}/plain.ckpt")
    assert_bitwise(
        dict(open_checkpoint(f"{bucket(root)}/plain.ckpt")["state_dict"]), dict(expected)
    )


def resume_and_log(root: str, log: str) -> None:
    os.environ[store.LOG] = log
    fit(root, ONE_STAGE["zero2"], 2, 2, ckpt_path=f"{bucket(root)}/a.ckpt")
    del os.environ[store.LOG]


def test_a_node_downloads_each_file_once(pool, tmp_path: Path) -> None:
    root = str(tmp_path)
    pool.run(2, save_one, root, "a.ckpt")
    pool.run(2, resume_and_log, root, f"{root}/log")
    downloads = Counter((tmp_path / "log").read_text().split())
    assert len(downloads) == 5
    assert set(downloads.values()) == {1}


def test_one_device_writes_to_memory(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/one.ckpt"
    trainer, model, _ = fit(str(tmp_path), {"checkpoint": "sharded"}, 1, 2)
    trainer.save_checkpoint(url)
    assert_bitwise(loaded(url), dict(model.state_dict()))
    trainer.strategy.remove_checkpoint(url)
    trainer.strategy._checkpoints.close(interrupted=False)
    with pytest.raises(FileNotFoundError, match=r"one\.ckpt"):
        open_checkpoint(url)


# Failures and kills


def save_then_die(root: str, kills: str | None, rank: int) -> None:
    """Train from the last checkpoint on; the transfer to a path like `kills` kills the rank."""
    if kills is not None and int(os.environ["RANK"]) == rank:
        os.environ[store.KILLS] = kills
    fit(root, ONE_STAGE["zero3"], 2, 4, ckpt_path="last", callbacks=[saving(root, 1)])


KILLED_AT = {
    "first shards": (r"step=2.*/__0_0", 0, 1),
    "second shards": (r"step=2.*/__1_0", 1, 1),
    "marker": (r"step=2.*/complete", 0, 1),
    "pointer": (r"bucket/step=2\.ckpt", 0, 1),
    "last, its shards": (r"last.*/__0_0", 0, None),
    "last, its pointer": (r"bucket/last\.ckpt", 0, None),
}


# By default the last moment of all, when everything but a pointer is there.
QUICK = ("last, its pointer",)


@pytest.fixture(scope="module")
def state_of_undisturbed(pool, tmp_path_factory) -> Any:
    """The state after a training that nothing has killed."""
    root = str(tmp_path_factory.mktemp("undisturbed"))
    return pool.run(2, undisturbed, root, timeout=200)[0]


@pytest.mark.parametrize("moment", slow_but(KILLED_AT, QUICK))
def test_after_kill_9_the_last_complete_checkpoint_is_read(
    pool, tmp_path: Path, state_of_undisturbed: Any, moment: str
) -> None:
    root = str(tmp_path)
    pattern, rank, step = KILLED_AT[moment]
    with pytest.raises(WorkerError):
        pool.run(2, save_then_die, root, pattern, rank, timeout=200)

    complete = {}
    for path in sorted((tmp_path / "bucket").glob("*.ckpt")):
        checkpoint = open_checkpoint(f"store://{path}")
        map_tensors(checkpoint, StoredTensor, StoredTensor.full_tensor)
        complete[path.name] = checkpoint["global_step"]
    assert complete.get("last.ckpt") == step
    state = pool.run(2, finish, root, timeout=200)[0]
    assert_bitwise(state, state_of_undisturbed)
    # The shards of the killed save are gone.
    assert len(list((tmp_path / "bucket/.alpa").iterdir())) == len(
        list((tmp_path / "bucket").glob("*.ckpt"))
    )


def undisturbed(root: str) -> Any:
    trainer, model, _ = fit(root, ONE_STAGE["zero3"], 2, 4)
    return whole_state(trainer, model)


def finish(root: str) -> Any:
    trainer, model, _ = fit(
        root, ONE_STAGE["zero3"], 2, 4, ckpt_path="last", callbacks=[saving(root, 1)]
    )
    return whole_state(trainer, model)


def fail(root: str, options: dict[str, Any], steps: int, fails: str) -> str:
    with environment(**{store.FAILS: fails}):
        try:
            fit(root, options, 2, steps, callbacks=[saving(root, 2)])
        except CheckpointError as error:
            return str(error)
    return ""


FAILURES = {
    "at the next save": (6, r"step=4\.ckpt$", ["last.ckpt", "step=2.ckpt"]),
    "at the end": (4, r"step=4.*/__1_0", ["last.ckpt", "step=2.ckpt"]),
    "of the first save": (2, r"__0_0", []),
}


@pytest.mark.parametrize("moment", slow_but(FAILURES, ("at the next save", "of the first save")))
def test_a_failed_upload_is_one_error_and_nothing_is_lost(
    pool, tmp_path: Path, moment: str
) -> None:
    root = str(tmp_path)
    steps, fails, expected = FAILURES[moment]
    errors = pool.run(2, fail, root, ONE_STAGE["zero3"], steps, fails, timeout=200)
    assert len(set(errors)) == 1
    assert "was not uploaded" in errors[0]
    assert "the bucket is read-only" in errors[0]
    assert sorted(name for name in files_in(root) if name.endswith(".ckpt")) == expected
    for name in expected:
        map_tensors(
            open_checkpoint(f"{bucket(root)}/{name}"), StoredTensor, StoredTensor.full_tensor
        )


class Timed(AlpaStrategy):
    """Notes the seconds that the last `save_checkpoint` took."""

    seconds = 0.0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        super().save_checkpoint(*args, **kwargs)
        self.seconds = time.perf_counter() - begin


def save_slowly(root: str) -> tuple[float, float]:
    """Seconds of a save in a training, and after it. The first save of all imports modules."""
    options = {"cluster": "pcie_8gpu", "plan_dir": f"{root}/plans", "verbose": False}
    strategy = Timed(parallel="zero3", checkpoint="sharded", **options)
    model = make_model()
    with environment(**{store.SECONDS: "2"}):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=2,
            default_root_dir=root,
            callbacks=[ModelCheckpoint(bucket(root), "one", every_n_train_steps=1, save_top_k=1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            precision="64-true",
        )
        trainer.fit(model, make_loader(model, 2))
        blocked = strategy.seconds
        trainer.save_checkpoint(f"{bucket(root)}/two.ckpt")
    return blocked, strategy.seconds


@pytest.mark.slow
def test_training_is_not_blocked_by_a_slow_store(pool, tmp_path: Path) -> None:
    blocked, synchronous = pool.run(2, save_slowly, str(tmp_path), timeout=200)[0]
    print(f"blocked {blocked:.3f} s, synchronous {synchronous:.1f} s")
    assert synchronous > 8
    assert blocked <= 0.05 * synchronous


def test_a_missing_library_is_one_error_before_the_training(tmp_path: Path) -> None:
    model = make_model()
    trainer = make_trainer(str(tmp_path), {}, 1, default_root_dir="s3://bucket/run")
    with pytest.raises(SetupError, match=r"s3://bucket/run needs .*\n.*pip install s3fs"):
        trainer.fit(model, make_loader(model, 1))


def plan_at(root: str, plans: str) -> str:
    strategy = AlpaStrategy(cluster="pcie_8gpu", plan_dir=plans, verbose=False, **PIPELINE)
    model = make_model()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=1,
        default_root_dir=root,
        precision="64-true",
        **QUIET,
    )
    trainer.fit(model, make_loader(model, 2))
    return strategy.plan.fingerprint.digest


def test_plans_are_shared_at_a_url(pool, tmp_path: Path) -> None:
    root, plans = str(tmp_path), f"{bucket(str(tmp_path))}/plans"
    digest = pool.run(2, plan_at, f"{root}/first", plans)[0]
    stored = tmp_path / "bucket/plans"
    assert {path.name for path in stored.iterdir()} == {f"{digest}.json", f"{digest}.html"}

    stored.joinpath(f"{digest}.html").unlink()
    again = pool.run(2, plan_at, f"{root}/second", plans)[0]
    assert again == digest
    # It was found: a new one would come with its page.
    assert [path.name for path in stored.iterdir()] == [f"{digest}.json"]
    plan = f"{plans}/{digest}.json"
    assert Plan.load(plan).is_pipelined
    assert main(["show", plan, "--html", f"{root}/page.html"]) == 0
    assert (tmp_path / "page.html").stat().st_size > 0
