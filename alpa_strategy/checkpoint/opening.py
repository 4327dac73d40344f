"""Reading a checkpoint, a directory of shards or an ordinary file: tensors are read from disk when
they are used, and no code of an untrusted file is run.

A directory's `.metadata` is a pickle, and DCP's own reader (`torch.distributed.checkpoint`)
unpickles it without restriction, even if the rest is read with `weights_only=True`. Here only the
few classes that such a file needs are accepted, and it may only name files of its own folder.
"""

import hashlib
import math
import os
import pathlib
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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

from alpa_strategy import urls
from alpa_strategy.checkpoint.downloading import Download
from alpa_strategy.checkpoint.pointer import find_local_shards, find_shards
from alpa_strategy.checkpoint.tensors import LocalShards, StoredTensor, from_file
from alpa_strategy.errors import CheckpointError
from alpa_strategy.files import is_possible, read_json


def open_checkpoint(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Return a Lightning checkpoint whose tensors stay on disk until they are used.

    Tensors of a sharded checkpoint are `StoredTensor`s, those of an ordinary file are
    memory-mapped.

    Args:
        path: of a directory or a file, or a URL. The processes of a node download each file once.
        weights_only: as of `torch.load`, for everything but the tensors of a sharded checkpoint.

    Raises:
        CheckpointError: `path` is a directory that is no complete checkpoint, or cannot be read.
        FileNotFoundError: there is no `path`.
    """
    if urls.is_url(path):
        return _open_at_url(str(path), weights_only)
    location = urls.local_path(path).absolute()
    if not is_possible(location):
        raise CheckpointError(
            f"{location} is a name that no file can have", "give a checkpoint's path"
        )
    restore_interrupted(location)
    if not location.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")

    if location.is_dir():
        # A link may be changed to another directory while this one is read (`save_last="link"`).
        location = location.resolve()
    elif not location.is_file():
        raise CheckpointError(f"{location} is no ordinary file", "give a checkpoint's path")

    with reading(location):
        folder = location if location.is_dir() else find_local_shards(location)
        if folder is not None:
            return _open_directory(folder, weights_only, str(location))
        return checked(_open_file(location, weights_only), location)


def _open_file(path: Path, weights_only: bool | None) -> Any:
    """Return the content of an ordinary file, memory-mapped if possible."""
    # Older formats of `torch.save` cannot be memory-mapped.
    can_be_mapped = zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=can_be_mapped)


def _open_directory(folder: Path, weights_only: bool | None, name: str) -> dict[str, Any]:
    """Return the checkpoint in a directory; `name` is for messages. CheckpointError if it is
    incomplete or damaged.
    """
    marker = _read_marker(folder)
    check_files(folder, marker.files)
    _check_sums(folder, marker)
    tensors = _stored_tensors(folder, marker.sums)
    return checked(from_file(folder / REST, weights_only, tensors), name)


_ACCESS = "check the URL, the network, and whether this job may read there"


def _open_at_url(url: str, weights_only: bool | None) -> dict[str, Any]:
    """Return the content of a checkpoint at a URL; shards are downloaded when they are used.

    Args:
        weights_only: as of `torch.load`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it cannot be read.
    """
    shards = _find_shards(url)
    with reading(url):
        if shards is None:
            with local_file(url) as file:
                return checked(_open_file(file, weights_only), url)

        download = Download(shards, urls.version(f"{shards}/{COMPLETE}"))
        download.file(COMPLETE)
        marker = _read_marker(download.folder)
        for name in (REST, METADATA):
            download.file(name, marker.files.get(name))
        _check_sums(download.folder, marker)

        def fetch(name: str) -> None:
            download.file(name, marker.files.get(name))

        tensors = _stored_tensors(download.folder, marker.sums, fetch)
        return checked(from_file(download.folder / REST, weights_only, tensors), url)


def _find_shards(url: str) -> str | None:
    """Return the URL of the folder with a checkpoint's shards; None if it is an ordinary file.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the URL cannot be read.
    """
    try:
        return find_shards(url, COMPLETE)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Checkpoint file not found: {url}") from error
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}", _ACCESS) from error


@contextmanager
def local_file(url: str) -> Iterator[Path]:
    """Context with a local copy of the ordinary checkpoint at a URL.

    Raises:
        CheckpointError: it cannot be read.
        FileNotFoundError: there is none.
    """
    parent, name = urls.parent_and_name(url)
    try:
        version = urls.version(url)
    except urls.UrlError as error:
        raise CheckpointError(str(error), _ACCESS) from error
    with reading(url):
        download = Download(parent, version)
        path = download.file(name)
    yield path


def is_checkpoint(path: str | Path) -> bool:
    """Whether a complete sharded checkpoint is at `path`; repairs an interrupted save first.

    Raises:
        CheckpointError: `path` is a URL that cannot be read or has an incomplete folder, or a
            damaged pointer to shards.
    """
    if urls.is_url(path):
        try:
            return _find_shards(str(path)) is not None
        except FileNotFoundError:
            return False
    path = urls.local_path(path).absolute()
    restore_interrupted(path)
    if path.is_file():
        shards = find_local_shards(path)
        return shards is not None and (shards / COMPLETE).is_file()
    return (path / COMPLETE).is_file()


# Entries of a Lightning checkpoint, and their types.
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


def checked(checkpoint: Any, path: str | Path) -> dict[str, Any]:
    """Return `checkpoint` if it has the entries of a Lightning checkpoint, with their types.

    Args:
        checkpoint: as it was read.
        path: for messages.

    Raises:
        CheckpointError: `state_dict` is missing, an entry has another type, or Lightning's version
            is no version.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(
            f"{path} has no `state_dict`: it is no checkpoint of Lightning", "load another one"
        )
    for name, kind in _PARTS.items():
        if name in checkpoint and not isinstance(checkpoint[name], kind):
            type_name = type(checkpoint[name]).__name__
            raise CheckpointError(
                f"the checkpoint {path} has a {type_name} as its {name!r}", "load another one"
            )
    version = checkpoint.get("pytorch-lightning_version", "0.0.0")
    if not re.match(r"\d+\.\d+\.\d+", version):
        raise CheckpointError(
            f"the checkpoint {path} does not specify which Lightning wrote it", "load another one"
        )
    return checkpoint


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Context in which any error of reading a damaged or foreign checkpoint becomes a
    CheckpointError that names `path`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        # Also raised for what `weights_only` refuses. Torch puts pages of advice around the cause.
        cause = str(error.__context__ or error).strip().partition("\n")[0]
        raise CheckpointError(
            f"the checkpoint {path} has more than tensors and plain values, or is damaged: {cause}",
            "if you trust its author, read it with weights_only=False (`alpa export --trust`)",
        ) from error
    except Exception as error:
        # Any error: the instructions of a damaged pickle call functions with wrong arguments.
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"the checkpoint {path} cannot be read: {cause}", "load another one"
        ) from error


# The files of a complete checkpoint directory


# Version of the marker.
FORMAT_VERSION = 1

# DCP's file.
METADATA = ".metadata"

# Everything but the tensors.
REST = "lightning.pt"

# The marker: names and bytes of all other files; written last.
COMPLETE = "complete.json"


@dataclass(frozen=True)
class _Marker:
    """The content of the marker.

    `files`: name -> bytes of all other files. `sums`: checksums of ranges of bytes, by `place_of`;
    empty for checkpoints of versions without them.
    """

    files: dict[str, int]
    sums: dict[str, int]


def _read_marker(path: Path) -> _Marker:
    """Return the content of the marker in the directory `path`.

    Raises:
        CheckpointError: the directory is no complete checkpoint of this format.
    """
    try:
        marker = read_json(path / COMPLETE)
        files = {str(name): int(size) for name, size in marker["files"].items()}
        sums = {str(location): int(crc) for location, crc in marker.get("sums", {}).items()}
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
    return _Marker(files, sums)


def _check_sums(path: Path, marker: _Marker) -> None:
    """Check the files in the directory `path` that are read completely; a marker without checksums
    passes.

    Raises:
        CheckpointError: one has other content than was written.
    """
    names = (REST, METADATA) if marker.sums else ()
    for name in names:
        with (path / name).open("rb") as file:
            _check_sum(file, _StorageInfo(name, 0, marker.files[name]), marker.sums)


def check_files(path: Path, sizes: Mapping[str, int]) -> None:
    """Check that files are in the folder `path`.

    Args:
        path: of the folder.
        sizes: name of a file -> its bytes; -1: any number.

    Raises:
        CheckpointError: one is missing, has another size, or a name that leads elsewhere.
    """
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
    """Return the key of a range of bytes among the checksums: file name and offset."""
    return f"{info.relative_path}@{info.offset}"


def checksum(file: Any, info: _StorageInfo) -> int:
    """Return the CRC-32 of a range of bytes of an open file (offset and length of `info`), up to
    its end if that comes first.

    It detects damaged and mixed-up files, not intended changes: the checksums could be changed,
    too.
    """
    file.seek(info.offset)
    crc = 0
    num_left = info.length
    while num_left > 0:
        piece = file.read(min(num_left, 1 << 20))
        if not piece:
            break
        crc = zlib.crc32(piece, crc)
        num_left -= len(piece)
    return crc


def _check_sum(file: Any, info: _StorageInfo, sums: Mapping[str, int]) -> None:
    """Check a range of bytes.

    Raises:
        CheckpointError: its checksum is not that of the bytes that were written.
    """
    if checksum(file, info) != sums.get(place_of(info)):
        raise CheckpointError(
            f"{info.relative_path} has other bytes at {info.offset} than were written there",
            "copy it again",
        )


def beside(target: Path, purpose: str) -> Path:
    """Return the hidden path of a checkpoint that is being saved, replaced or removed.

    It is in the same folder, and the same on every rank.
    """
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return target.parent / f".alpa.{digest}.{purpose}"


def restore_interrupted(target: Path) -> None:
    """Repair a save that was interrupted between its two renames.

    Saves need two on file systems that cannot swap names.
    """
    if os.path.lexists(target):
        return
    for candidate in (beside(target, "saving"), beside(target, "replaced")):
        if (candidate / COMPLETE).is_file():
            # FileNotFoundError: another rank was faster.
            with suppress(FileNotFoundError):
                os.rename(candidate, target)
            return


# The tensors, through DCP


def _stored_tensors(
    path: Path, sums: Mapping[str, int], fetch: Callable[[str], None] | None = None
) -> dict[str, StoredTensor]:
    """Return key -> tensor for all tensors of a complete checkpoint directory. No communication.

    Args:
        path: of the directory.
        sums: checksums, by `place_of`.
        fetch: brings the file with a name into the directory; None: all files are there.

    Raises:
        CheckpointError: as of `read_metadata`.
    """
    reader = RestrictedReader(path, sums)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    stored: dict[str, TensorStorageMetadata] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            stored[key] = entry

    def fill(key: str, shards: LocalShards) -> None:
        planner = DefaultLoadPlanner()
        planner.state_dict = {key: shards}
        items = create_read_items_for_chunk_list(key, stored[key], shards.__create_chunk_list__())
        with reading(path):
            if fetch is not None:
                indices = [item.storage_index for item in items]
                names = {reader.storage_data[index].relative_path for index in indices}
                for name in sorted(names):
                    fetch(name)
            reader.read_data(LoadPlan(items), planner).wait()

    return {
        key: StoredTensor(entry.size, entry.properties.dtype, key, fill)
        for key, entry in stored.items()
    }


_FIX = "load another checkpoint; if this one has an unknown author, do not trust it"

# (module, name) in a pickle -> what it becomes here.
_CLASSES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    # Pure paths are names, without access to files.
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
    ("torch", "Size"): torch.Size,
    # Returns `torch.strided` for its name.
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
}

# Names of dtypes. Quantized dtypes are left out: they abort the process.
_NUMBERS = re.compile(r"u?int(8|16|32|64)|bool|(b?float|complex)\d\w*")


class _Unpickler(pickle.Unpickler):
    """Accepts the classes of DCP's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class, function or dtype that metadata of checkpoints names.

        Raises:
            pickle.UnpicklingError: it is another one, which could run code.
        """
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]

        if module == dcp_metadata.__name__:
            record = getattr(dcp_metadata, name, None)
            if isinstance(record, type) and record.__module__ == module:
                return record
        elif module == "torch" and _NUMBERS.fullmatch(name):
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no checkpoint's metadata does"
        )


class RestrictedReader(dcp.FileSystemReader):
    """`FileSystemReader` for files of unknown authors.

    Args:
        path: of the directory.
        sums: checksums of the tensors' bytes, by `place_of`; empty if none were written.
    """

    def __init__(self, path: Path, sums: Mapping[str, int] | None = None) -> None:
        super().__init__(path)
        self._folder = path
        self._sums = sums or {}

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        """Return an item's part of a file. CheckpointError if its checksum, if there are any, is
        another one.
        """
        # Torch has no checksums of its own.
        if self._sums:
            _check_sum(file, sinfo, self._sums)
        return super()._slice_file(file, sinfo)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which tensors are stored, and the location of their bytes.

        Raises:
            CheckpointError: the file cannot be read, has other content, or names files outside of
                its folder.
        """
        path = self._folder / METADATA
        with reading(path), path.open("rb") as file:
            metadata = _Unpickler(file).load()
            # Within `reading`: objects of a damaged pickle lack attributes.
            _check(metadata, path)
        return metadata


def _check(metadata: Any, path: Path) -> None:
    """Check the content of a `.metadata` file. No other file is read.

    Args:
        metadata: the unpickled object.
        path: of the `.metadata` file, for messages.

    Raises:
        CheckpointError: it is no metadata of DCP, names a file outside of its folder, or has a
            tensor with elements for which it lists no bytes.
    """
    stored = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path} is no metadata of a checkpoint", _FIX)
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} does not specify where its tensors are stored", _FIX)
    for info in stored.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(info, _StorageInfo) or not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(
                f"{path} has a tensor in {name!r}, which is no file of its folder", _FIX
            )
        if not all(isinstance(n, int) and n >= 0 for n in (info.offset, info.length)):
            raise CheckpointError(
                f"{path} has a tensor at offset {info.offset!r} with length {info.length!r}", _FIX
            )
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata) and not _is_covered(key, tensor, stored):
            raise CheckpointError(
                f"{path} has more elements of the tensor {key!r:.80} than its files", _FIX
            )


def _is_covered(
    key: Any, tensor: TensorStorageMetadata, stored: Mapping[Any, _StorageInfo]
) -> bool:
    """Whether a tensor's chunks have all of its elements, and listed bytes for all of these.

    Elements without bytes would be uninitialized memory, or more memory than there is.

    Args:
        key: of the tensor.
        stored: `MetadataIndex` of a chunk -> file, offset and length in bytes.
    """
    element_bytes = tensor.properties.dtype.itemsize
    num_elements = 0
    for chunk in tensor.chunks:
        num_in_chunk = math.prod(chunk.sizes)
        info = stored.get(MetadataIndex(key, chunk.offsets))
        if info is None or num_in_chunk * element_bytes > info.length:
            return False
        num_elements += num_in_chunk
    return num_elements == math.prod(tensor.size)


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return name not in ("", ".", "..") and Path(name).name == name
