"""A checkpoint from a stranger: what is planted in its metadata is not run, and no file outside of
it is read.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from alpa_strategy import export_checkpoint, open_checkpoint
from alpa_strategy.checkpoint.opening import COMPLETE, REST, RestrictedReader
from alpa_strategy.checkpoint.saving import CheckpointWriter
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards, StoredTensor, map_tensors
from alpa_strategy.errors import CheckpointError


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "deep": {"c": torch.ones(())},
    }
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    return tmp_path / "checkpoint"


def changed(folder: Path, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_it_reads_what_the_plain_reader_reads(folder):
    plain, ours = (
        dcp.FileSystemReader(folder).read_metadata(),
        RestrictedReader(folder).read_metadata(),
    )
    assert ours.state_dict_metadata == plain.state_dict_metadata
    assert ours.storage_data == plain.storage_data
    results = {"a": torch.zeros(2, 3)}
    dcp.load(results, storage_reader=RestrictedReader(folder), no_dist=True)
    assert torch.equal(results["a"], torch.arange(6.0).view(2, 3))


def test_a_planted_object_is_not_run(folder):
    planted = folder.parent / "ran"
    changed(folder, lambda metadata: metadata.planner_data.update(x=Planted(planted)))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        RestrictedReader(folder).read_metadata()
    assert not planted.exists()
    dcp.FileSystemReader(folder).read_metadata()
    assert planted.exists(), "the plain reader runs it: else this test shows nothing"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b"])
def test_no_file_outside_is_read(folder, name):
    def point_elsewhere(metadata):
        metadata.storage_data = {
            k: replace(v, relative_path=name) for k, v in metadata.storage_data.items()
        }

    changed(folder, point_elsewhere)
    with pytest.raises(CheckpointError, match="no file of its folder"):
        RestrictedReader(folder).read_metadata()


@pytest.mark.parametrize("dtype", ["quint8", "qint8", "qint32", "quint4x2", "bits8", "uint4"])
def test_tensors_that_are_no_plain_numbers_are_refused(folder, dtype):
    """A quantized tensor without a scale is made, and the first slice of it ends the process (found
    by fuzz.py).
    """

    def quantize(metadata):
        metadata.state_dict_metadata["a"].properties.dtype = getattr(torch, dtype)

    changed(folder, quantize)
    with pytest.raises(CheckpointError, match=f"torch.{dtype}, which no checkpoint"):
        RestrictedReader(folder).read_metadata()


def test_damaged_metadata_is_an_error_of_ours(folder):
    good = (folder / ".metadata").read_bytes()
    for seed in range(300):
        rng, content = random.Random(seed), bytearray(good)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(content))
            content[place : place + rng.choice([0, 1, 8])] = rng.randbytes(rng.choice([0, 1, 8]))
        (folder / ".metadata").write_bytes(content)
        try:
            RestrictedReader(folder).read_metadata()
        except CheckpointError:
            continue


# Whole checkpoints of ours


def saved(path: Path) -> Path:
    w = LocalShards((3, 4), torch.float32, [Chunk((0, 0), torch.ones(3, 4))])
    CheckpointWriter(None, None, is_rank_zero=True).save({"state_dict": {"w": w}, "epoch": 1}, path)
    return path


def read_all(path: Path) -> object:
    return map_tensors(open_checkpoint(path), StoredTensor, lambda stored: stored.full_tensor())


@pytest.mark.parametrize("name", [REST, ".metadata", "__0_0.distcp"])
def test_a_pickle_planted_in_any_file_is_not_run(tmp_path, name):
    path, planted = saved(tmp_path / "a.ckpt"), tmp_path / "ran"
    content = pickle.dumps(Planted(planted))
    if name == REST:
        torch.save({"rest": {"hparams": Planted(planted)}, "places": []}, path / name)
    elif name == ".metadata":
        (path / name).write_bytes(content)
    else:
        (path / name).write_bytes(content + (path / name).read_bytes())
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.name != COMPLETE}
    (path / COMPLETE).write_text(json.dumps({"format": 1, "files": sizes}))
    with pytest.raises(CheckpointError):
        read_all(path)
    with pytest.raises(CheckpointError):
        export_checkpoint(path, tmp_path / "out.ckpt")
    assert not planted.exists()
    assert not (tmp_path / "out.ckpt").exists()


def test_a_planted_ordinary_file_is_not_run_unless_trusted(tmp_path):
    torch.save({"state_dict": {}, "x": Planted(tmp_path / "ran")}, tmp_path / "plain.ckpt")
    for read in (open_checkpoint, lambda path: export_checkpoint(path, tmp_path / "out.ckpt")):
        with pytest.raises(CheckpointError, match=r"(?s)GLOBAL posix\.mkdir.*if you trust"):
            read(tmp_path / "plain.ckpt")
    assert not (tmp_path / "ran").exists()
    export_checkpoint(tmp_path / "plain.ckpt", tmp_path / "out.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_damaged_checkpoints_are_errors_of_ours(tmp_path):
    path = saved(tmp_path / "a.ckpt")
    good = {file.name: file.read_bytes() for file in path.iterdir()}
    for seed in range(120):
        rng = random.Random(seed)
        name = rng.choice(sorted(good))
        content = bytearray(good[name])
        place = rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
        for each, old in good.items():
            (path / each).write_bytes(bytes(content) if each == name else old)
        try:
            read_all(path)
        except CheckpointError:
            continue
