"""A checkpoint from a stranger: what is planted in its metadata is not run, and no file outside of it is read."""

from __future__ import annotations

import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from alpa_strategy.checkpoint.restricted import RestrictedReader
from alpa_strategy.errors import CheckpointError


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "deep": {"c": torch.ones(())}}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    return tmp_path / "checkpoint"


def changed(folder: Path, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_it_reads_what_the_plain_reader_reads(folder):
    plain, ours = dcp.FileSystemReader(folder).read_metadata(), RestrictedReader(folder).read_metadata()
    assert ours.state_dict_metadata == plain.state_dict_metadata
    assert ours.storage_data == plain.storage_data
    found = {"a": torch.zeros(2, 3)}
    dcp.load(found, storage_reader=RestrictedReader(folder), no_dist=True)
    assert torch.equal(found["a"], torch.arange(6.0).view(2, 3))


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
        metadata.storage_data = {k: replace(v, relative_path=name) for k, v in metadata.storage_data.items()}

    changed(folder, point_elsewhere)
    with pytest.raises(CheckpointError, match="no file beside it"):
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
