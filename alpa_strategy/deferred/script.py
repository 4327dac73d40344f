"""Script: the recorded ops that make tensors, and how to run the part of them that one tensor needs.

A recorded tensor is a view of a numbered storage (a meta tensor's), so that views, `.data`, `detach` and tied
weights need no care. Nothing here intercepts anything; `recorder.py` writes the script.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from alpa_strategy.errors import CaptureError, RuntimeMismatchError


@dataclass(frozen=True)
class View:
    """A recorded tensor: how it lies in storage number `storage`."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.size).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Given:
    """A real tensor that an op reads: data of the user's, or a small tensor that is not worth deferring."""

    tensor: Tensor
    version: int
    is_copy: bool = True

    def value(self) -> Tensor:
        """The tensor; CaptureError when it was changed after it had been read."""
        if self.tensor._version != self.version:
            raise CaptureError(
                f"a tensor of shape {list(self.tensor.shape)} that initialises a parameter was changed afterwards",
                "leave it as it is until training has begun, or copy it (`.clone()`) before it is changed",
            )
        return self.tensor


@dataclass(frozen=True)
class RandomStates:
    """Where the generators stood when a random op ran: the default ones, or the one that was passed to it."""

    cpu: Tensor | None = None
    cuda: Tensor | None = None
    own: Tensor | None = None


@dataclass
class RecordedOp:
    """One recorded op.

    Attributes:
        reads: storages whose contents it needs.
        writes: storage -> whether all of it is overwritten (and nothing of it read).
        results: the tensors that it makes, in the order of the tensor leaves of what it returns; None for one that
            lies in storage which was there before.
        default_dtype: torch's when it ran: what a factory makes that is not told, and numbers become.
        random: set for an op that draws numbers.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: dict[int, bool]
    results: tuple[View | None, ...]
    default_dtype: torch.dtype
    random: RandomStates | None = None

    def text(self) -> str:
        """What is the same on all ranks: everything but numbers drawn and data given."""
        plain = pytree.tree_map_only(Given, lambda g: (tuple(g.tensor.shape), g.tensor.dtype), (self.args, self.kwargs))
        plain = pytree.tree_map_only(torch.device, lambda device: device.type, plain)  # not which GPU of its node
        plain = pytree.tree_map_only(torch.Generator, lambda _: "generator", plain)
        return f"{self.func}{plain}{self.results}{self.default_dtype}"


@dataclass
class Script:
    """Recorded ops in order.

    Attributes:
        device: where tensors made without a device, or on `meta`, are really to lie.
        writers: storage -> the lines that write to it, ascending.
        num_bytes: storage -> its size.
        devices: storage -> where it is really to lie.
    """

    device: torch.device
    lines: list[RecordedOp] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    devices: dict[int, torch.device] = field(default_factory=dict)

    def add(self, line: RecordedOp) -> None:
        """Append an op."""
        for storage in line.writes:
            self.writers.setdefault(storage, []).append(len(self.lines))
        self.lines.append(line)

    def is_defined(self, storage: int) -> bool:
        """Whether the ops say what is in `storage`."""
        return any(self.lines[i].writes[storage] for i in self.writers.get(storage, ()))

    def value(self, view: View) -> Tensor:
        """The real tensor that `view` stands for, made now; all memory but its own is freed on the way."""
        return self.values([view])[0]

    def values(self, views: list[View]) -> list[Tensor]:
        """Several at once; see `value`."""
        wanted = {view.storage for view in views}
        with torch.no_grad(), _disable_current_modes():
            storages = self._run(self._needed(wanted), wanted)
            return [_view_of(storages[view.storage], view) for view in views]

    def _needed(self, storages: Iterable[int]) -> list[int]:
        """Lines without which `storages` would not be what they are at the end, ascending."""
        needed: set[int] = set()
        seen: set[tuple[int, int]] = set()
        waiting = [(storage, len(self.lines)) for storage in storages]
        while waiting:
            storage, end = waiting.pop()
            writers = self.writers.get(storage, [])
            last = bisect_left(writers, end)
            if (storage, last) in seen:
                continue
            seen.add((storage, last))
            for index in reversed(writers[:last]):
                line = self.lines[index]
                if index not in needed:
                    needed.add(index)
                    waiting += [(read, index) for read in line.reads if read != storage]
                if line.writes[storage]:  # all of it: what was there before does not matter
                    break
        return sorted(needed)

    def _run(self, indices: list[int], wanted: set[int]) -> dict[int, torch.UntypedStorage]:
        last_use: dict[int, int] = {}
        for index in indices:
            line = self.lines[index]
            last_use.update(dict.fromkeys((*line.reads, *line.writes), index))
        storages: dict[int, torch.UntypedStorage] = {}
        for index in indices:
            line = self.lines[index]
            self._execute(line, storages)
            for storage in {*line.reads, *line.writes}:
                if last_use[storage] == index and storage not in wanted:
                    storages.pop(storage, None)
        for storage in wanted - storages.keys():  # nothing was ever written there
            storages[storage] = self._allocate(storage)
        return storages

    def _allocate(self, storage: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(self.num_bytes[storage], device=self.devices[storage])

    def _execute(self, line: RecordedOp, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, View):
                if leaf.storage not in storages:  # this op overwrites all of it
                    storages[leaf.storage] = self._allocate(leaf.storage)
                return _view_of(storages[leaf.storage], leaf)
            return leaf.value() if isinstance(leaf, Given) else leaf

        args, kwargs = pytree.tree_map(real, (line.args, line.kwargs))
        made = [leaf for leaf in pytree.tree_leaves(self._call(line, args, kwargs)) if isinstance(leaf, Tensor)]
        for result, tensor in zip(line.results, made, strict=True):
            if result is None or result.storage in storages:
                continue
            # A meta kernel may have said other strides than the real one gives; views were recorded by the former's.
            if tensor.stride() != result.stride or tensor.storage_offset() != result.offset:
                tensor = _view_of(self._allocate(result.storage), result).copy_(tensor)
            storages[result.storage] = tensor.untyped_storage()

    def _call(self, line: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if line.random is None:
            with _default_dtype(line.default_dtype):
                return line.func(*args, **kwargs)
        generator = kwargs.get("generator")
        before = current_states(generator, self.device)
        _set_states(line.random, generator, self.device)
        try:
            with _default_dtype(line.default_dtype):
                return line.func(*args, **kwargs)
        finally:
            _set_states(before, generator, self.device)

    # The same script on all ranks

    def digest(self) -> str:
        """Hash of the ops, without the numbers that they draw and the data that they were given."""
        content = hashlib.sha256()
        for line in self.lines:
            content.update(line.text().encode())
        return content.hexdigest()[:16]

    def rank_dependent(self) -> list[Any]:
        """What may differ between ranks that ran the same code: random states and small data.

        Data that is only referred to (a file that every rank reads) is taken to be the same.
        """
        return [(line.random, [g.value() for g in self._givens(line)]) for line in self.lines if self._varies(line)]

    def rank_dependent_digest(self) -> str:
        """Hash of `rank_dependent()`."""
        content = hashlib.sha256()
        for random, tensors in self.rank_dependent():
            states = () if random is None else (random.cpu, random.cuda, random.own)
            for tensor in (*states, *tensors):
                if tensor is not None:
                    content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return content.hexdigest()

    def take_rank_dependent(self, rank_dependent: list[Any]) -> None:
        """Take over another rank's `rank_dependent()`. RuntimeMismatchError when they belong to other ops."""
        lines = [line for line in self.lines if self._varies(line)]
        if len(lines) != len(rank_dependent):
            raise RuntimeMismatchError(
                "the ranks initialise their modules differently", "build the same module on every rank"
            )
        for line, (random, tensors) in zip(lines, rank_dependent, strict=True):
            line.random = random
            fresh = iter([Given(tensor, tensor._version) for tensor in tensors])
            line.args, line.kwargs = pytree.tree_map(
                lambda leaf, fresh=fresh: next(fresh) if _is_copy(leaf) else leaf, (line.args, line.kwargs)
            )

    def _varies(self, line: RecordedOp) -> bool:
        return line.random is not None or bool(self._givens(line))

    @staticmethod
    def _givens(line: RecordedOp) -> list[Given]:
        return [leaf for leaf in pytree.tree_leaves((line.args, line.kwargs)) if _is_copy(leaf)]


def _is_copy(leaf: Any) -> bool:
    return isinstance(leaf, Given) and leaf.is_copy


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def current_states(generator: torch.Generator | None, device: torch.device) -> RandomStates:
    """Where the generators that a random op may draw from stand."""
    if generator is not None:
        return RandomStates(own=generator.get_state())
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomStates(torch.get_rng_state(), cuda)


def _set_states(states: RandomStates, generator: torch.Generator | None, device: torch.device) -> None:
    if states.own is not None:
        assert generator is not None
        generator.set_state(states.own)
        return
    if states.cpu is not None:
        torch.set_rng_state(states.cpu)
    if states.cuda is not None:
        torch.cuda.set_rng_state(states.cuda, device)


def _view_of(storage: torch.UntypedStorage, view: View) -> Tensor:
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.size, view.stride)
