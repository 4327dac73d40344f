"""One op of a module's initialization as it is recorded, and what ops read, write and draw.

`recording/recorder.py` records and runs them.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from alpa_strategy.errors import CaptureError

# Name of the functions by which libraries load models (transformers, diffusers, peft).
LOADER = "from_pretrained"

# Ops that change their arguments 3 and 4 when argument 5 is true, which their schemas leave out.
NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
# In-place ops whose result does not depend on the previous contents.
_DRAWN = (
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "bernoulli_",
)
OVERWRITING = frozenset({*_DRAWN, "zero_", "fill_", "copy_"})


@dataclass(frozen=True)
class View:
    """A recorded tensor: its layout in a recorded storage."""

    # Number of the storage.
    storage: int

    # Elements per dim, and elements of the storage between two neighbours of a dim.
    size: tuple[int, ...]
    stride: tuple[int, ...]

    # Elements of the storage before its first one.
    offset: int

    dtype: torch.dtype


@dataclass(frozen=True)
class RealTensor:
    """A real tensor that an op reads: the user's data, or a small tensor that is not deferred."""

    tensor: Tensor

    # Its version when it was recorded.
    version: int

    # Whether `tensor` is a copy; else it is the user's own, which has to stay unchanged.
    is_copy: bool = True

    def value(self) -> Tensor:
        """Return the tensor.

        Raises:
            CaptureError: it was changed after it had been recorded.
        """
        if self.tensor._version != self.version:
            raise CaptureError(
                f"a tensor of shape {list(self.tensor.shape)} that initialises a parameter was"
                " changed afterwards",
                "leave it as it is until training has begun, or copy it (`.clone()`) before it is"
                " changed",
            )
        return self.tensor


@dataclass
class RecordedOp:
    """One recorded op."""

    # The op, and its arguments with a `View` or a `RealTensor` in the place of each tensor.
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    # Storages whose contents it needs.
    reads: tuple[int, ...]

    # Storage -> whether all of it is overwritten (and nothing of it read).
    writes: dict[int, bool]

    # The tensors that it makes, in the order of the leaves that it returns; None for one in a
    # storage that existed before.
    results: tuple[View | None, ...]

    # Torch's default dtype when it ran: of factories without a dtype, and of Python's numbers.
    default_dtype: torch.dtype

    # Of an op that draws random numbers, the states of its generators (see `generators_of`).
    random: Sequence[Tensor] = ()

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in getattr(self.func, "tags", ())

    def text(self) -> str:
        """Return a description that is the same on all ranks: without drawn numbers and data."""
        plain = pytree.tree_map_only(RealTensor, _shape_and_dtype, (self.args, self.kwargs))
        # Ranks have different GPUs of their node.
        plain = pytree.tree_map_only(torch.device, lambda device: device.type, plain)
        plain = pytree.tree_map_only(torch.Generator, lambda _: "generator", plain)
        # A bound method's text has the address of its object.
        func = getattr(self.func, "__self__", self.func)
        return f"{func}{plain}{self.results}{self.default_dtype}"


def _shape_and_dtype(data: RealTensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(data.tensor.shape), data.tensor.dtype


def storage_key(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    # The parameters of a lazy module refuse this function before they have a shape.
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def to_meta(leaf: Any) -> Any:
    """Return a meta tensor in place of a real one with dims; other leaves unchanged."""
    if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.dim() > 0:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def meta_kwargs(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments to run `func` on meta tensors, where no numbers are drawn: without a
    generator, and with `device` "meta" if the op takes one.
    """
    result = {name: pytree.tree_map(to_meta, value) for name, value in kwargs.items()}
    if "generator" in result:
        result["generator"] = None
    if any(argument.name == "device" for argument in func._schema.arguments):
        result["device"] = torch.device("meta")
    return result


def is_for_meta(kwargs: dict[str, Any]) -> bool:
    """Return whether a call's arguments ask for the meta device."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def is_loading() -> bool:
    """Whether a library builds a model for weights that it is about to load.

    Their loaders build on the meta device, and expect that no number is drawn.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == LOADER:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def on_real_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments with `device` in the place of the meta device."""
    return {**kwargs, "device": device} if is_for_meta(kwargs) else kwargs


def written_by(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Tensor, bool]]:
    """Return pairs of a tensor that the op changes in place, and whether it does not read it."""
    written = []
    if func._schema.name in NORMS and args[5]:
        written = [(statistic, False) for statistic in args[3:5] if statistic is not None]
    overwrites = func._schema.name.partition("::")[2] in OVERWRITING
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, Tensor):
                written.append((tensor, overwrites or argument.is_out))
    return written


def generators_of(kwargs: Mapping[str, Any], device: torch.device) -> list[torch.Generator]:
    """Return the generators that a random op may draw from: the one that is passed to it, or the
    default ones, also of a GPU if that is its `device`.
    """
    passed = kwargs.get("generator")
    if passed is not None:
        return [passed]
    if device.type != "cuda":
        return [torch.default_generator]
    # CUDA's generators exist from here on.
    torch.cuda.init()
    return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]


def view_of(storage: torch.UntypedStorage, view: View) -> Tensor:
    """Return a tensor on the memory of a storage."""
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.size, view.stride)
