"""Reading what `torch.distributed.checkpoint` writes without running what a stranger has put there.

Its `.metadata` is a pickle, and `FileSystemReader` unpickles it without restriction, also where the rest is read with
`weights_only=True`: whoever writes that file runs code in the reader's process. Here only the few classes that such a
file is made of are found, and it may only name files of its own folder.
"""

from __future__ import annotations

import math
import pathlib
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.serialization import _get_layout

from alpa_strategy.errors import CheckpointError

_FIX = "load another checkpoint; if this one comes from somebody else, do not trust it"
_CLASSES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,  # pure: a name, no access to files
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,  # `torch.strided` by its name
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
}
_NUMBERS = re.compile(r"u?int(8|16|32|64)|bool|(b?float|complex)\d\w*")  # quantized ones end the process


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        found = getattr(dcp_metadata if module == dcp_metadata.__name__ else torch, name, None)
        if isinstance(found, type) and found.__module__ == module == dcp_metadata.__name__:  # a record
            return found
        if isinstance(found, torch.dtype) and module == "torch" and _NUMBERS.fullmatch(name):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata does")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context: whatever a damaged or foreign checkpoint makes of reading it is a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # also what `weights_only` refuses
        said = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"the checkpoint {path} holds more than tensors and plain values, or is damaged: {said}",
            "if you trust who wrote it, read it with weights_only=False (`alpa export --trust`)",
        ) from error
    # What a damaged file's instructions build fails in any way: it is not what their arguments want.
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"the checkpoint {path} cannot be read: {said}", "load another one") from error


class RestrictedReader(dcp.FileSystemReader):
    """`FileSystemReader` for files that anybody may have written.

    Args:
        sums: checksums of the tensors' bytes by `place_of`; empty where none were written.
    """

    def __init__(self, path: Path, sums: Mapping[str, int] | None = None) -> None:
        super().__init__(path)
        self._folder, self._sums = path, sums or {}

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        if self._sums:  # torch checks none of its own
            check_sum(file, sinfo, self._sums)
        return super()._slice_file(file, sinfo)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is stored where.

        Raises:
            CheckpointError: the file cannot be read, holds anything else, or points out of its folder.
        """
        path = self._folder / ".metadata"
        with reading(path), path.open("rb") as file:
            metadata = _Unpickler(file).load()
        with reading(path):  # objects made of a damaged pickle lack what theirs have
            _check(metadata, path)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp_metadata.StorageMeta()
        # As DCP's own reader does.
        metadata.storage_meta.load_id = self.load_id
        return metadata


def place_of(info: _StorageInfo) -> str:
    """Which bytes of a checkpoint's files: their name among the checksums."""
    return f"{info.relative_path}@{info.offset}"


def checksum(file: Any, offset: int, length: int) -> int:
    """CRC-32 of `length` bytes of an open file: against bytes that have changed or files that were mixed up; whoever
    means to change a checkpoint can change its checksums, too."""
    file.seek(offset)
    crc = 0
    while length > 0 and (part := file.read(min(length, 1 << 20))):
        crc, length = zlib.crc32(part, crc), length - len(part)
    return crc


def check_sum(file: Any, info: _StorageInfo, sums: Mapping[str, int]) -> None:
    """CheckpointError where the bytes are not those that were written there."""
    if checksum(file, info.offset, info.length) != sums.get(place_of(info)):
        raise CheckpointError(
            f"{info.relative_path} does not hold at {info.offset} what was written there", "copy it again"
        )


def _check(metadata: Any, path: Path) -> None:
    stored = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path} is no metadata of a checkpoint", _FIX)
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} does not say where its tensors lie", _FIX)
    for info in stored.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(info, _StorageInfo) or not isinstance(name, str) or not is_plain(name):
            raise CheckpointError(f"{path} says that a tensor lies in {name!r}, which is no file beside it", _FIX)
        if not all(isinstance(n, int) and n >= 0 for n in (info.offset, info.length)):
            raise CheckpointError(f"{path} says that a tensor lies at {info.offset!r} to {info.length!r}", _FIX)
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata) and not _is_covered(key, tensor, stored):
            raise CheckpointError(f"{path} says more of the tensor {key!r:.80} than its files hold", _FIX)


def _is_covered(key: Any, tensor: TensorStorageMetadata, stored: Mapping[Any, _StorageInfo]) -> bool:
    """Whether its chunks are as many elements as it has, and the files' bytes as many as theirs: what no file holds
    would be memory as it was found, or more of it than there is."""
    numels = [math.prod(chunk.sizes) for chunk in tensor.chunks]
    infos = [stored.get(MetadataIndex(key, chunk.offsets)) for chunk in tensor.chunks]
    size = tensor.properties.dtype.itemsize
    return sum(numels) == math.prod(tensor.size) and all(
        info is not None and numel * size <= info.length for numel, info in zip(numels, infos, strict=True)
    )


def is_plain(name: str) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return name not in ("", ".", "..") and Path(name).name == name
