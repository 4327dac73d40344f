"""Files that are mapped into memory while a module is built, as `safetensors` and
`torch.load(mmap=True)` do.

Under `watching()`, every such file is noted, so that a tensor can be traced to its bytes on disk.
Only its pages that are read take memory; a mapping of its own for each use (`MappedFile.open`)
gives these back afterwards.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.errors import CheckpointError

# Transformers reads weights in threads of its own, in which ops are not recorded, unless this is
# set.
SINGLE_THREADED = "HF_DEACTIVATE_ASYNC_LOAD"


@dataclass(frozen=True)
class MappedFile:
    """A file of which a process has mapped the first bytes."""

    path: str

    # Bytes that were mapped; the file had at least these.
    num_bytes: int

    # Address of the first byte.
    address: int

    # Keeps the mapping alive, so that no other gets its addresses.
    storage: torch.UntypedStorage

    def open(self) -> Tensor:
        """Return the bytes, uint8 [num_bytes], in a new mapping. Writes do not change the file.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        try:
            size = os.path.getsize(self.path)
            if size < self.num_bytes:
                raise OSError(f"it had {self.num_bytes} bytes and now has {size}")
            storage: Any = torch.UntypedStorage.from_file(self.path, False, self.num_bytes)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"the weights in {self.path} cannot be read: {error}",
                "leave files of weights unchanged until training has begun",
            ) from error
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def __str__(self) -> str:
        # Ranks may have the file in different folders.
        return f"file of {self.num_bytes} bytes"


class MappedFiles:
    """The files that were mapped under `watching`."""

    def __init__(self) -> None:
        self._files: list[MappedFile] = []

    def of(self, tensor: Tensor) -> MappedFile | None:
        """Return the file of which a CPU tensor is a view, None if there is none."""
        if not self._files or tensor.device.type != "cpu" or tensor.numel() == 0:
            return None

        with torch._C.DisableTorchFunction():
            address = tensor.data_ptr()
        for file in self._files:
            if file.address <= address < file.address + file.num_bytes:
                return file
        return None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which files that are mapped privately are noted.

        It replaces `torch.UntypedStorage.from_file` and sets the environment variable
        `SINGLE_THREADED`; both are restored at its end.
        """
        original = torch.UntypedStorage.from_file
        threads = os.environ.get(SINGLE_THREADED)

        def from_file(path: Any, *args: Any, **kwargs: Any) -> Any:
            storage: Any = original(path, *args, **kwargs)
            is_shared = kwargs.get("shared", args[0] if args else False)
            if not is_shared:
                location = os.path.abspath(os.fspath(path))
                file = MappedFile(location, storage.nbytes(), storage.data_ptr(), storage)
                self._files.append(file)
            return storage

        torch.UntypedStorage.from_file = from_file  # type: ignore[method-assign,assignment]
        os.environ[SINGLE_THREADED] = "1"
        try:
            yield
        finally:
            torch.UntypedStorage.from_file = original  # type: ignore[method-assign]
            if threads is None:
                del os.environ[SINGLE_THREADED]
            else:
                os.environ[SINGLE_THREADED] = threads
