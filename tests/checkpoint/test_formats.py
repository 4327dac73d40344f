"""A checkpoint format of one's own: an object with four methods, and its line in FORMATS."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alpa_strategy import open_checkpoint
from alpa_strategy.checkpoint.formats import FORMATS, is_checkpoint
from alpa_strategy.checkpoint.saving import CheckpointWriter
from alpa_strategy.checkpoint.tensors import Chunk, LocalShards, StoredTensor, from_file, put_tensors


class PlainFiles:
    """A folder with one file per tensor (of one process)."""

    def is_one(self, path: Path) -> bool:
        return (path / "rest.plain").is_file()

    def save(self, path: Path, shards: dict[str, LocalShards], rest: bytes, group: None) -> None:
        path.mkdir()
        for key, held in shards.items():
            torch.save(held.chunks[0].tensor, path / key)
        (path / "rest.plain").write_bytes(rest)

    def load(self, path: Path, weights_only: bool | None) -> dict:
        def fill(key: str, shards: LocalShards) -> None:
            for chunk in shards.chunks:
                chunk.tensor.copy_(torch.load(path / key)[tuple(slice(*ends) for ends in chunk.ranges)])

        rest, places = from_file(path / "rest.plain", weights_only)
        whole = {key: torch.load(path / key) for key in places.values()}
        tensors = {key: StoredTensor(tensor.shape, tensor.dtype, key, fill) for key, tensor in whole.items()}
        return put_tensors(rest, places, tensors)

    def remove(self, path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


def test_a_format_of_ones_own_is_written_found_read_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "plain", PlainFiles())
    path, tensor = tmp_path / "a.ckpt", torch.rand(3, 4)
    writer = CheckpointWriter(None, is_rank_zero=True, form="plain")
    writer.save({"state_dict": {"w": LocalShards((3, 4), tensor.dtype, [Chunk((0, 0), tensor)])}, "epoch": 2}, path)
    assert is_checkpoint(path)
    found = open_checkpoint(path)
    assert found["epoch"] == 2
    assert torch.equal(found["state_dict"]["w"].whole(), tensor)
    writer.remove(path)
    assert not path.exists()
