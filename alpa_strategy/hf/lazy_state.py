"""A model's state dict without values: what the library's own code makes of it for its files.

`collected` runs the library's `save_pretrained` on tensors without memory. Its ops (experts and
fused weights go back to the format of the files) are recorded, and what it would write is returned.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.hf.libraries import library
from alpa_strategy.recording.recorder import Recorder


@dataclass(frozen=True)
class FileContents:
    """The contents of one file of weights, without values."""

    # Path that the library would have written to.
    path: Path

    # Name -> deferred or small real tensor.
    tensors: dict[str, Tensor]

    metadata: dict[str, str]


class ParameterSource:
    """The reading of one parameter or buffer, as the function of a recorded op.

    Args:
        tensor: the module's own.
        read: returns its full values; collective.
    """

    def __init__(self, tensor: Tensor, read: Callable[[Tensor], Tensor]) -> None:
        self.tensor = tensor
        self._read = read

        # A buffer is each rank's: statistics of its samples.
        self.is_of_rank = not isinstance(tensor, nn.Parameter)

        # The full values, while they are in use.
        self.values: Tensor | None = None

    def load(self) -> None:
        """Gather the full values, unless they are there already. Collective."""
        if self.values is None:
            self.values = self._read(self.tensor).contiguous()

    def __call__(self) -> Tensor:
        """Return the values that `load` has gathered."""
        assert self.values is not None
        return self.values

    def __str__(self) -> str:
        return "parameter"


class LazyState:
    """The state dict of a model with full shapes and without values.

    Args:
        model: of the library, or of PEFT.
        shape_of: returns the full shape of a parameter.
        read: returns the full values of a parameter or buffer; collective.
    """

    def __init__(
        self,
        model: nn.Module,
        shape_of: Callable[[nn.Parameter], torch.Size],
        read: Callable[[Tensor], Tensor],
    ) -> None:
        self.recorder = Recorder(torch.device("cpu"), min_bytes=0)
        self.tensors: dict[str, Any] = {}

        # A tied parameter has one source and one storage.
        deferred: dict[int, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                # Extra state of a module.
                self.tensors[name] = value
                continue
            if id(value) not in deferred:
                shape = shape_of(value) if isinstance(value, nn.Parameter) else value.shape
                content = torch.empty(shape, dtype=value.dtype, device="meta")
                self.recorder.add_source(content, ParameterSource(value, read))
                deferred[id(value)] = content
            self.tensors[name] = deferred[id(value)]

    def sources(self, tensor: Tensor) -> list[ParameterSource]:
        """Return the parameters and buffers of which a deferred tensor is made."""
        sources = self.recorder.sources_of(tensor)
        return [source for source in sources if isinstance(source, ParameterSource)]

    def collected(self, save: Callable[[dict[str, Any]], None]) -> list[FileContents]:
        """Return the files of weights that `save(state dict)` would write.

        Args:
            save: of the library, which writes its other files.
        """
        files: list[FileContents] = []

        def collect(
            tensors: Mapping[str, Tensor],
            filename: Any,
            metadata: Mapping[str, str] | None = None,
        ) -> None:
            files.append(FileContents(Path(filename), dict(tensors), dict(metadata or {})))

        with _instead_of_save_file(collect), self.recorder:
            save(dict(self.tensors))
        return files


@contextmanager
def _instead_of_save_file(collect: Callable[..., None]) -> Iterator[None]:
    """Context in which `collect` is called instead of `safetensors.torch.save_file`, by whatever
    name a module has imported it.
    """
    save_file = library("safetensors.torch").save_file
    replaced: list[tuple[dict[str, Any], str]] = []
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        names = [name for name, value in list(namespace.items()) if value is save_file]
        replaced += [(namespace, name) for name in names]

    for namespace, name in replaced:
        namespace[name] = collect
    try:
        yield
    finally:
        for namespace, name in replaced:
            namespace[name] = save_file
