"""A pickle planted in each file of each kind of checkpoint, through every loader of ours under its
defaults: not run.

And what happens to files by accident, in ways that leave them readable: no other value is read
without a word.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fuzz_checkpoints import KINDS, LOADERS, files_of, load_open, planted_in, write

from alpa_strategy.checkpoint.directory import save_directory
from alpa_strategy.checkpoint.opening import beside
from alpa_strategy.errors import AlpaError, CheckpointError

FILES = {
    "two ranks": (".metadata", "__0_0.distcp", "__1_0.distcp", "complete.json", "lightning.pt"),
    "background": (".metadata", "__0_0.distcp", "__1_0.distcp", "complete.json", "lightning.pt"),
    "one rank": (".metadata", "__0_0.distcp", "complete.json", "lightning.pt"),
    "one file": ("one_file.ckpt",),
}


@pytest.fixture(scope="module")
def good(pool, tmp_path_factory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("good"), {}
    for kind, (devices, options) in KINDS.items():
        found[kind] = folder / (kind.replace(" ", "_") + ".ckpt")
        pool.run(devices, write, str(folder), devices, options, found[kind].name, init_group=False)
    return found


def copied(path: Path, folder: Path) -> Path:
    target = folder / path.name
    shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    return target


def test_every_file_has_its_turn(good):
    assert {
        kind: tuple(file.name for file in files_of(path)) for kind, path in good.items()
    } == FILES


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in FILES.items() for name in names]
)
def test_it_is_not_run(good, tmp_path, kind, name, loader):
    path, planted = copied(good[kind], tmp_path), tmp_path / "ran"
    planted_in(path, name, str(planted))
    with pytest.raises(AlpaError):
        LOADERS[loader](path)
    assert not planted.exists()


@pytest.mark.parametrize(
    ("kind", "name"), [("one rank", "lightning.pt"), ("two ranks", ".metadata"), ("one file", "")]
)
def test_a_reader_that_trusts_runs_it(good, tmp_path, kind, name):
    """Else the test above shows nothing."""
    path, planted = copied(good[kind], tmp_path), tmp_path / "ran"
    planted_in(path, name or path.name, str(planted))
    if name == ".metadata":
        pickle.loads((path / name).read_bytes())
    else:
        torch.load(path / name if name else path, weights_only=False)
    assert planted.exists()


def on_two_ranks(path: str, verb: str) -> str:
    from fuzz_checkpoints import Tiny, rows, trainer_of

    try:
        getattr(trainer_of(str(Path(path).parent), 2, {}, 2), verb)(Tiny(), rows(), ckpt_path=path)
    except CheckpointError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize("name", FILES["two ranks"])
def test_nor_on_two_ranks(pool, good, tmp_path, name):
    path, planted = copied(good["two ranks"], tmp_path), tmp_path / "ran"
    planted_in(path, name, str(planted))
    assert "read" not in pool.run(2, on_two_ranks, str(path), "fit", init_group=False)
    assert not planted.exists()


@pytest.mark.parametrize(
    "loader", ["open", "load_from_checkpoint", "export_checkpoint", "fit(ckpt_path=)"]
)
def test_files_that_are_mixed_up_are_refused(good, tmp_path, loader):
    """The parts of two ranks have one size and one form: only their checksums tell."""
    path = copied(good["two ranks"], tmp_path)
    first, second = path / "__0_0.distcp", path / "__1_0.distcp"
    assert first.stat().st_size == second.stat().st_size
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(CheckpointError, match="were written there"):
        LOADERS[loader](path)


def test_any_changed_bit_is_seen(good, tmp_path):
    path = copied(good["two ranks"], tmp_path)
    expected = load_open(path)
    for file in files_of(path):
        content = file.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 40)):
            changed = bytearray(content)
            changed[place] ^= 4
            file.write_bytes(changed)
            try:
                assert all(
                    torch.equal(value, expected[name]) for name, value in load_open(path).items()
                )
            except CheckpointError:
                continue
        file.write_bytes(content)


def test_checkpoints_of_before_there_were_checksums_are_read(good, tmp_path):
    import json

    path = copied(good["two ranks"], tmp_path)
    marker = json.loads((path / "complete.json").read_text())
    del marker["sums"]
    (path / "complete.json").write_text(json.dumps(marker))
    assert load_open(path).keys() == load_open(good["two ranks"]).keys()


def test_partial_checkpoints_are_removed(pool, tmp_path):
    """What a killed job has left, under another name than this one saves; not what a living one is
    writing.
    """
    import fcntl

    abandoned, alive = (
        beside(tmp_path / "other.ckpt", "saving"),
        beside(tmp_path / "third.ckpt", "saving"),
    )
    for folder in (abandoned, alive):
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"half")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    pool.run(1, write, str(tmp_path), 1, {"checkpoint": "sharded"}, "own.ckpt", init_group=False)
    os.close(lock)
    assert not abandoned.exists()
    assert alive.exists()
    with pytest.raises(CheckpointError):
        save_directory(tmp_path / "failing.ckpt", {}, ValueError("no rest"))
    assert not beside(tmp_path / "failing.ckpt", "saving").exists()


def test_files_follow_the_umask(pool, tmp_path):
    for mask in (0o022, 0o007):
        pool.run(1, write_under, str(tmp_path), mask, init_group=False)
        for file in files_of(tmp_path / f"{mask}.ckpt"):
            assert file.stat().st_mode & 0o777 == 0o666 & ~mask, file
        (plan,) = (tmp_path / f"plans-{mask}").glob("*.json")
        assert plan.stat().st_mode & 0o777 == 0o666 & ~mask


def write_under(root: str, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(
            root, 1, {"checkpoint": "sharded", "plan_dir": f"{root}/plans-{mask}"}, f"{mask}.ckpt"
        )
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "states",
    [[True], [None], [], [{"state": {}}], [{"state": {0: 3}, "param_groups": []}], [{}, {}]],
    ids=str,
)
def test_states_of_optimizers_that_are_none_are_refused(good, tmp_path, states):
    path = copied(good["one file"], tmp_path)
    stored = torch.load(path, weights_only=True)
    torch.save({**stored, "optimizer_states": states}, path)
    with pytest.raises(CheckpointError, match="optimizer"):
        LOADERS["fit(ckpt_path=)"](path)
