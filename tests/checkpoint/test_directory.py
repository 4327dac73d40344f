"""A checkpoint directory is there as a whole or not at all, and what is no checkpoint is neither
read nor replaced.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_strategy import open_checkpoint
from alpa_strategy.checkpoint.opening import COMPLETE, REST, is_checkpoint
from alpa_strategy.checkpoint.saving import CheckpointWriter
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards
from alpa_strategy.errors import CheckpointError


def whole(tensor: torch.Tensor) -> LocalShards:
    return LocalShards(tensor.shape, tensor.dtype, [Chunk((0,) * tensor.dim(), tensor)])


def save(path: Path, value: float, in_background: bool = False) -> CheckpointWriter:
    writer = CheckpointWriter(None, None, is_rank_zero=True)
    checkpoint = {"state_dict": {"w": whole(torch.full((3, 4), value))}, "epoch": int(value)}
    writer.save(checkpoint, path, in_background)
    return writer


def value_at(path: Path) -> float:
    checkpoint = open_checkpoint(path)
    w = checkpoint["state_dict"]["w"]
    assert w.shape == (3, 4)
    assert w.min() == w.max() == checkpoint["epoch"]
    return float(w[0, 0])


def test_a_new_checkpoint_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for value in (1.0, 2.0):
        save(path, value)
        assert value_at(path) == value
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_it_takes_the_place_of_a_file_and_of_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file.ckpt", tmp_path / "link.ckpt"
    torch.save({}, file)
    link.symlink_to("elsewhere")
    for path in (file, link):
        save(path, 1.0)
        assert value_at(path) == 1
    assert sorted(os.listdir(tmp_path)) == ["file.ckpt", "link.ckpt"]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1.0)
    writer = CheckpointWriter(None, None, is_rank_zero=True)
    with pytest.raises(CheckpointError, match="pickle"):
        writer.save({"state_dict": {"w": whole(torch.ones(2))}, "hparams": lambda: None}, path)
    assert value_at(path) == 1
    twice = LocalShards(
        (4,), torch.float32, [Chunk((0,), torch.ones(2)), Chunk((1,), torch.ones(2))]
    )
    with pytest.raises(CheckpointError, match="overlapping"):
        writer.save({"w": twice}, path)
    assert value_at(path) == 1


def test_other_directories_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save(tmp_path / "notes", 1.0)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", [COMPLETE, REST, ".metadata", "__0_0.distcp"])
def test_what_is_incomplete_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1.0)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(path)


def test_what_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1.0)
    os.truncate(path / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match="100 bytes"):
        open_checkpoint(path)


def test_in_the_background(tmp_path: Path) -> None:
    """What changes after the call is not in the checkpoint; removals wait; a failure is raised, and
    nothing removed.
    """
    first, second = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    save(first, 1.0)
    writer = CheckpointWriter(None, None, is_rank_zero=True)
    tensor = torch.full((3, 4), 2.0)
    writer.save({"state_dict": {"w": whole(tensor)}, "epoch": 2}, second, in_background=True)
    tensor.fill_(7)
    writer.remove(first)
    writer.wait()
    assert value_at(second) == 2
    assert not first.exists()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    writer.save({"state_dict": {}}, tmp_path / "folder", in_background=True)
    time.sleep(0.2)  # it has failed
    writer.remove(second)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        writer.wait()
    assert is_checkpoint(second)
    writer.remove(second)
    assert not second.exists()


@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    cuts=st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=3, max_size=3),
    asked=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_any_box_can_be_read_from_any_chunks(
    shape: list[int], cuts: list[list[int]], asked: list, tmp_path_factory
) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    chunks = [Chunk((0,) * len(shape), tensor)]
    for dim, size in enumerate(shape):
        edges = sorted({0, size, *(cut for cut in cuts[dim] if cut < size)})
        chunks = [
            Chunk(
                (*c.offsets[:dim], low, *c.offsets[dim + 1 :]),
                c.tensor.narrow(dim, low, high - low),
            )
            for c in chunks
            for low, high in pairwise(edges)
        ]
    path = tmp_path_factory.mktemp("any") / "a.ckpt"
    held = LocalShards(shape, tensor.dtype, [Chunk(c.offsets, c.tensor.clone()) for c in chunks])
    CheckpointWriter(None, None, is_rank_zero=True).save({"state_dict": {"w": held}}, path)
    stored = open_checkpoint(path)["state_dict"]["w"]
    box = [
        (min(a, b) % size, max(a, b) % size + 1) for (a, b), size in zip(asked, shape, strict=False)
    ]
    box = [(min(low, high - 1), high) for low, high in box]
    part = torch.empty([high - low for low, high in box])
    stored.fill([Chunk(tuple(low for low, _ in box), part)])
    assert torch.equal(part, tensor[tuple(slice(*ends) for ends in box)])
    assert torch.equal(stored.full_tensor(), tensor)
