"""Reading a checkpoint, a directory of shards or an ordinary file, whoever has written it: tensors
come from disk when they are used, and nothing that a stranger has put there is run.

A directory's `.metadata` is a pickle, and DCP's own reader (`torch.distributed.checkpoint`)
unpickles it without restriction, also where the rest is read with `weights_only=True`. Here only
the few classes that such a file is made of are found, and it may only name files of its own folder.
"""

import hashlib
import math
import os
import pathlib
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.serialization import _get_layout

from alpa_strategy.checkpoint.tensors import LocalShards, StoredTensor, from_file
from alpa_strategy.errors import CheckpointError
from alpa_strategy.files import is_possible, read_json


def open_checkpoint(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """A Lightning checkpoint whose tensors stay on disk until they are used.

    Tensors of a sharded checkpoint are `StoredTensor`s, those of an ordinary file are
    memory-mapped.

    Args:
        weights_only: as of `torch.load`, for everything but the tensors of a sharded checkpoint.

    Raises:
        CheckpointError: `path` is a directory that is no complete checkpoint, or cannot be read.
        FileNotFoundError: nothing is there.
    """
    place = Path(path).absolute()
    if not is_possible(place):
        raise CheckpointError(
            f"{place} is a name that no file can have", "give a checkpoint's path"
        )
    restore_interrupted(place)
    if not place.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if place.is_dir():
        place = (
            place.resolve()
        )  # behind a link that may be turned to another one (`save_last="link"`)
    elif not place.is_file():
        raise CheckpointError(f"{place} is no ordinary file", "give a checkpoint's path")
    with reading(place):
        if place.is_dir():
            sums = _check_complete(place)
            return checked(
                from_file(place / REST, weights_only, _stored_tensors(place, sums)), place
            )
        mapped = zipfile.is_zipfile(
            place
        )  # only the format of today's `torch.save` can be memory-mapped
        return checked(
            torch.load(place, map_location="cpu", weights_only=weights_only, mmap=mapped), place
        )


def is_checkpoint(path: str | Path) -> bool:
    """Whether a complete sharded checkpoint is at `path`; finishes what a save left undone."""
    path = Path(path).absolute()
    restore_interrupted(path)
    return (path / COMPLETE).is_file()


_PARTS: dict[str, type] = {
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
}


def checked(checkpoint: Any, path: Path) -> dict[str, Any]:
    """`checkpoint` if it has the parts of a Lightning checkpoint, each of its kind, else a
    CheckpointError.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(
            f"{path} has no `state_dict`: it is no checkpoint of Lightning", "load another one"
        )
    for name, kind in _PARTS.items():
        if name in checkpoint and not isinstance(checkpoint[name], kind):
            found = type(checkpoint[name]).__name__
            raise CheckpointError(
                f"the checkpoint {path} has a {found} as its {name!r}", "load another one"
            )
    if not re.match(r"\d+\.\d+\.\d+", checkpoint.get("pytorch-lightning_version", "0.0.0")):
        raise CheckpointError(
            f"the checkpoint {path} does not say which Lightning wrote it", "load another one"
        )
    return checkpoint


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context: whatever a damaged or foreign checkpoint makes of reading it is a
    CheckpointError.
    """
    try:
        yield
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # also what `weights_only` refuses
        said = (
            str(error.__context__ or error).strip().partition("\n")[0]
        )  # torch puts pages of advice around its own
        raise CheckpointError(
            f"the checkpoint {path} holds more than tensors and plain values, or is damaged:"
            f" {said}",
            "if you trust who wrote it, read it with weights_only=False (`alpa export --trust`)",
        ) from error
    # What a damaged file's instructions build fails in any way: it is not what their arguments
    # want.
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"the checkpoint {path} cannot be read: {said}", "load another one"
        ) from error


# What makes a directory a complete checkpoint


FORMAT_VERSION = 1  # of the marker
METADATA = ".metadata"  # of DCP
REST = "lightning.pt"  # everything but the tensors
COMPLETE = "complete.json"  # names and bytes of all other files; written last


def _check_complete(path: Path) -> dict[str, int]:
    """CheckpointError unless the directory `path` holds a complete checkpoint of this format.

    Returns:
        The checksums of what its files hold, by `place_of`; none in checkpoints of before there
        were any.
    """
    try:
        marker = read_json(path / COMPLETE)
        files = {str(name): int(size) for name, size in marker["files"].items()}
        sums = {str(place): int(crc) for place, crc in marker.get("sums", {}).items()}
        version = marker["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is a directory, but not a complete checkpoint ({COMPLETE}: {error})",
            "load another one",
        ) from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, this version reads {FORMAT_VERSION}",
            "use the version that wrote it",
        )
    check_files(path, files)
    for name in (REST, METADATA) if sums else ():
        with (path / name).open("rb") as file:
            _check_sum(file, _StorageInfo(name, 0, files[name]), sums)
    return sums


def check_files(path: Path, sizes: Mapping[str, int]) -> None:
    """CheckpointError unless all files are in the folder `path`, of these sizes (-1: of any)."""
    for name, size in sizes.items():
        file = path / name
        if not _is_plain(name) or not file.is_file():
            raise CheckpointError(
                f"{name} is missing in {path}",
                "write checkpoints to a folder that all nodes share, and copy all of it",
            )
        if size >= 0 and file.stat().st_size != size:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, {size} were written", "copy it again"
            )


def place_of(info: _StorageInfo) -> str:
    """Which bytes of a checkpoint's files: their name among the checksums."""
    return f"{info.relative_path}@{info.offset}"


def checksum(file: Any, info: _StorageInfo) -> int:
    """CRC-32 of bytes of an open file: against bytes that have changed or files that were mixed up;
    whoever means to
    change a checkpoint can change its checksums, too."""
    file.seek(info.offset)
    crc, length = 0, info.length
    while length > 0 and (part := file.read(min(length, 1 << 20))):
        crc, length = zlib.crc32(part, crc), length - len(part)
    return crc


def _check_sum(file: Any, info: _StorageInfo, sums: Mapping[str, int]) -> None:
    """CheckpointError where the bytes are not those that were written there."""
    if checksum(file, info) != sums.get(place_of(info)):
        raise CheckpointError(
            f"{info.relative_path} does not hold at {info.offset} what was written there",
            "copy it again",
        )


def beside(target: Path, purpose: str) -> Path:
    """The hidden place of a checkpoint that is being saved, replaced or removed: the same on every
    rank.
    """
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return target.parent / f".alpa.{digest}.{purpose}"


def restore_interrupted(target: Path) -> None:
    """Finish what a save left undone between its two renames (file systems without the
    exchange).
    """
    if os.path.lexists(target):
        return
    for candidate in (beside(target, "saving"), beside(target, "replaced")):
        if (candidate / COMPLETE).is_file():
            with suppress(FileNotFoundError):  # another rank was quicker
                os.rename(candidate, target)
            return


# Its tensors, through DCP


def _stored_tensors(path: Path, sums: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Key -> tensor, of all that a complete checkpoint directory holds. Each process reads for
    itself.
    """
    reader = RestrictedReader(path, sums)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    stored = {
        k: t
        for k, t in metadata.state_dict_metadata.items()
        if isinstance(t, TensorStorageMetadata)
    }

    def fill(key: str, shards: LocalShards) -> None:
        planner = DefaultLoadPlanner()
        planner.state_dict = {key: shards}
        items = create_read_items_for_chunk_list(key, stored[key], shards.__create_chunk_list__())
        with reading(path):
            reader.read_data(LoadPlan(items), planner).wait()

    return {
        key: StoredTensor(found.size, found.properties.dtype, key, fill)
        for key, found in stored.items()
    }


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
_NUMBERS = re.compile(
    r"u?int(8|16|32|64)|bool|(b?float|complex)\d\w*"
)  # quantized ones end the process


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        found = getattr(dcp_metadata if module == dcp_metadata.__name__ else torch, name, None)
        if (
            isinstance(found, type) and found.__module__ == module == dcp_metadata.__name__
        ):  # a record
            return found
        if isinstance(found, torch.dtype) and module == "torch" and _NUMBERS.fullmatch(name):
            return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no checkpoint's metadata does"
        )


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
            _check_sum(file, sinfo, self._sums)
        return super()._slice_file(file, sinfo)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is stored where.

        Raises:
            CheckpointError: the file cannot be read, holds anything else, or points out of its
                folder.
        """
        path = self._folder / METADATA
        with reading(path), path.open("rb") as file:
            metadata = _Unpickler(file).load()
            _check(metadata, path)  # objects made of a damaged pickle lack what theirs have
        return metadata


def _check(metadata: Any, path: Path) -> None:
    stored = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path} is no metadata of a checkpoint", _FIX)
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} does not say where its tensors lie", _FIX)
    for info in stored.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(info, _StorageInfo) or not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(
                f"{path} says that a tensor lies in {name!r}, which is no file beside it", _FIX
            )
        if not all(isinstance(n, int) and n >= 0 for n in (info.offset, info.length)):
            raise CheckpointError(
                f"{path} says that a tensor lies at {info.offset!r} to {info.length!r}", _FIX
            )
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata) and not _is_covered(key, tensor, stored):
            raise CheckpointError(
                f"{path} says more of the tensor {key!r:.80} than its files hold", _FIX
            )


def _is_covered(
    key: Any, tensor: TensorStorageMetadata, stored: Mapping[Any, _StorageInfo]
) -> bool:
    """Whether its chunks are as many elements as it has, and the files' bytes as many as theirs:
    what no file holds
    would be memory as it was found, or more of it than there is."""
    numels = [math.prod(chunk.sizes) for chunk in tensor.chunks]
    infos = [stored.get(MetadataIndex(key, chunk.offsets)) for chunk in tensor.chunks]
    size = tensor.properties.dtype.itemsize
    return sum(numels) == math.prod(tensor.size) and all(
        info is not None and numel * size <= info.length
        for numel, info in zip(numels, infos, strict=True)
    )


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return name not in ("", ".", "..") and Path(name).name == name
