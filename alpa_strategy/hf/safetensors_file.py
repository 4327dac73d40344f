"""The file format of safetensors, written in pieces by several processes.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape
and range of bytes) and the tensors' bytes. The library's own writer needs all tensors of a file in
memory at once.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alpa_strategy.errors import CheckpointError

# Names of dtypes in a header.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}

# The tensors' bytes begin at a multiple of this.
ALIGNMENT = 8


@dataclass(frozen=True)
class Layout:
    """Where the bytes of a file's tensors are."""

    # All bytes before the first tensor.
    head: bytes

    # Name of a tensor -> offset of its first byte in the file.
    offsets: dict[str, int]

    # Bytes of the file.
    num_bytes: int


def layout_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Layout:
    """Return the layout of a file with these tensors, of which only shapes and dtypes are read.

    Tensors with larger elements come first, as the format recommends: all are aligned then.

    Args:
        tensors: by name.
        metadata: texts for the header.

    Raises:
        CheckpointError: the format has no name for a dtype.
    """
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)

    starts: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{name} has dtype {tensor.dtype}, which a file of safetensors cannot have",
                "cast it, or leave it out of the module's state dict",
            )
        starts[name] = end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    offsets = {name: len(head) + start for name, start in starts.items()}
    return Layout(head, offsets, len(head) + end)


def create(path: Path, layout: Layout) -> None:
    """Create a file with its header, and without values of its tensors."""
    with path.open("wb") as file:
        file.write(layout.head)
        file.truncate(layout.num_bytes)


def write_tensor(path: Path, offset: int, tensor: Tensor) -> None:
    """Write the bytes of a contiguous CPU tensor into an existing file, from the byte `offset` on.

    Raises:
        CheckpointError: the file system has no space left, or another error of writing.
        OSError: the file cannot be opened.
    """
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    content = memoryview(numbers)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        while content:
            num_written = os.pwrite(descriptor, content, offset)
            offset += num_written
            content = content[num_written:]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}", "free some space") from error
    finally:
        os.close(descriptor)
