"""Recorder: a mode under which big tensors are made without memory, and what would be in them is
written down.

Under `recording()`, a tensor of `min_bytes` or more becomes a meta tensor; the ops on it are
recorded, in place or not. Random ops draw their numbers into memory that is freed at once, so that
generators go on as on a single device;
`whole` makes a tensor later, from the states that they had. Small tensors are real: they may be
read by Python.
"""

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from alpa_strategy.errors import CaptureError

MIN_BYTES = 64 * 2**10
COPIED_BYTES = 2**20  # given data up to this size is copied, so that it may change afterwards
# Ops that change their arguments 3 and 4 when argument 5 is true, which their schemas do not say.
NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
# In-place ops whose result does not depend on what was there.
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
    """A recorded tensor: how it lies in storage number `storage`."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RealTensor:
    """A real tensor that an op reads: data of the user's, or a small tensor that is not worth
    deferring.
    """

    tensor: Tensor
    version: int
    is_copy: bool = True

    def value(self) -> Tensor:
        """The tensor; CaptureError when it was changed after it had been read."""
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

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]  # storages whose contents it needs
    writes: dict[int, bool]  # storage -> whether all of it is overwritten (and nothing of it read)
    # the tensors that it makes, in order of the leaves that it returns; None for one in storage
    # that was there before
    results: tuple[View | None, ...]
    default_dtype: (
        torch.dtype
    )  # torch's when it ran: what a factory makes that is not told, and numbers become
    random: Sequence[Tensor] = ()  # of an op that draws numbers, the states of `generators_of` it

    def text(self) -> str:
        """What is the same on all ranks: everything but numbers drawn and data given."""
        plain = pytree.tree_map_only(
            RealTensor, lambda g: (tuple(g.tensor.shape), g.tensor.dtype), (self.args, self.kwargs)
        )
        plain = pytree.tree_map_only(
            torch.device, lambda device: device.type, plain
        )  # not which GPU of its node
        plain = pytree.tree_map_only(torch.Generator, lambda _: "generator", plain)
        return f"{self.func}{plain}{self.results}{self.default_dtype}"


class Recorder(TorchDispatchMode):
    """Makes and remembers deferred tensors: the ops on them in order, and how to run those that one
    tensor needs.

    Args:
        device: where tensors really lie that are asked for without a device, or on `meta`.
        min_bytes: smaller tensors are made as they are.
    """

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        super().__init__()
        self.device, self.min_bytes = device, min_bytes
        self.lines: list[RecordedOp] = []
        self._writers: dict[int, list[int]] = defaultdict(
            list
        )  # storage -> the lines that write to it, ascending
        self._num_bytes: dict[int, int] = {}  # storage -> its size
        self._devices: dict[int, torch.device] = {}  # storage -> where it is really to lie
        self._numbers: dict[int, int] = {}  # storage's address -> its number
        self._earlier_writes: dict[
            int, int
        ] = {}  # storage -> writes to what a tensor in it had been in before
        self._storages: list[
            torch.UntypedStorage
        ] = []  # kept, so that no other storage gets the same key

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Tensors made in this context are deferred. Within itself it does nothing."""
        if self in _get_current_dispatch_mode_stack():
            yield
            return
        with self, _RealDeviceView(self):
            yield

    def is_deferred(self, tensor: Tensor) -> bool:
        """Whether this recorder can say what is in a meta tensor."""
        number = self._numbers.get(_key(tensor)) if tensor.is_meta else None
        return number is not None and any(
            self.lines[i].writes[number] for i in self._writers[number]
        )

    def whole(self, tensor: Tensor) -> Tensor:
        """The real tensor that a deferred one stands for, made anew at every call; a real one as it
        is.
        """
        if not tensor.is_meta:
            return tensor
        if not self.is_deferred(tensor):
            raise CaptureError(
                f"nothing says what is in a meta tensor of shape {list(tensor.shape)}",
                "build the module in configure_model, or give its modules a reset_parameters"
                " method",
            )
        view = self._describe(tensor)
        with (
            torch.no_grad(),
            _disable_current_modes(),
        ):  # all memory but its own is freed on the way
            return _view_of(self._contents({view.storage})[view.storage], view)

    def is_unchanged(self, tensor: Tensor) -> bool:
        """False when a deferred tensor was changed in place while nothing was recorded (and that
        can be seen).
        """
        number = self._numbers.get(_key(tensor))
        return number is None or tensor._version <= self._num_writes(number)

    def new_data(self, tensor: Tensor, before: int) -> None:
        """`tensor.data = ...` gave the tensor another storage than `before`: its version goes on
        counting.
        """
        old, new = self._numbers.get(before), self._numbers.get(_key(tensor))
        if old is not None and new is not None and old != new:
            self._earlier_writes[new] = self._earlier_writes.get(new, 0) + self._num_writes(old)

    def _num_writes(self, number: int) -> int:
        """At least as many changes as tensors that are now in this storage can have seen while they
        were recorded.
        """
        return len(self._writers[number]) + self._earlier_writes.get(number, 0)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where the real tensor of a meta tensor will lie."""
        return self._devices.get(self._numbers.get(_key(tensor), -1), self.device)

    def _describe(self, tensor: Tensor) -> View:
        key = _key(tensor)
        if key not in self._numbers:
            self._adopt(tensor)
        return View(
            self._numbers[key],
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def _adopt(self, tensor: Tensor, device: torch.device | None = None) -> None:
        """Give a meta tensor's storage a number."""
        storage = tensor.untyped_storage()
        number = self._numbers[_key(tensor)] = len(self._storages)
        self._storages.append(storage)
        self._num_bytes[number] = storage.nbytes()
        self._devices[number] = device or self.device

    # What the mode does with an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func` for real, or records it and gives meta tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            tensors = [
                leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            ]
            if not any(tensor.is_meta for tensor in tensors):
                if not self._makes_big_tensor(func, args, kwargs, tensors):
                    return func(*args, **_on_real_device(kwargs, self.device))
            elif func is torch.ops.aten._local_scalar_dense.default:
                return func(self.whole(tensors[0]))
            return self._record(func, args, kwargs)

    def _makes_big_tensor(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> bool:
        """Whether an op on real `tensors`, or on none, makes a tensor that is to be deferred."""
        if tensors:  # only what goes to the device of a deferred tensor
            return _asks_for_meta(kwargs) and any(
                tensor.nbytes >= self.min_bytes for tensor in tensors
            )
        if not any("Tensor" in str(result.type) for result in func._schema.returns):
            return False
        # On the meta device: how large the result would be, without making it.
        made = pytree.tree_leaves(func(*args, **_meta_kwargs(func, kwargs)))
        return any(
            isinstance(t, Tensor) and t.untyped_storage().nbytes() >= self.min_bytes for t in made
        )

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = func(*pytree.tree_map(_to_meta, args), **_meta_kwargs(func, kwargs))
        except (NotImplementedError, RuntimeError):  # its results cannot be known without data
            return self._run_for_real(func, args, kwargs)
        written = _written(func, args, kwargs)
        if any(not tensor.is_meta for tensor, _ in written):
            return self._run_for_real(func, args, kwargs)
        line = self._line(func, args, kwargs, result, written)
        if torch.Tag.nondeterministic_seeded in func.tags:
            states = [generator.get_state() for generator in generators_of(kwargs, self.device)]
            with (
                torch.no_grad(),
                _disable_current_modes(),
            ):  # as a single device would, into memory freed at once
                self._execute(line, self._contents(set(line.reads)))
            line.random = states
        if line.writes:  # a view is found again by its storage
            for storage in line.writes:
                self._writers[storage].append(len(self.lines))
            self.lines.append(line)
        return result

    def _line(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        written: list[tuple[Tensor, bool]],
    ) -> RecordedOp:
        given, named = pytree.tree_map(self._argument, (args, _on_real_device(kwargs, self.device)))
        views = [leaf for leaf in pytree.tree_leaves((given, named)) if isinstance(leaf, View)]
        writes: dict[int, bool] = {}
        unread: set[int] = set()
        for tensor, whole in written:
            view = self._describe(tensor)
            only_target = whole and sum(other.storage == view.storage for other in views) == 1
            writes[view.storage] = only_target and tensor.nbytes == self._num_bytes[view.storage]
            if only_target:
                unread.add(view.storage)
        of_first = self._devices[views[0].storage] if views else torch.device("cpu")
        device = named.get("device") or of_first
        results: list[View | None] = []
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) in self._numbers:
                results.append(None)
            elif isinstance(leaf, Tensor):
                self._adopt(leaf, device)
                view = self._describe(leaf)
                results.append(view)
                writes[view.storage] = True
        reads = tuple(dict.fromkeys(view.storage for view in views if view.storage not in unread))
        return RecordedOp(
            func, given, named, reads, writes, tuple(results), torch.get_default_dtype()
        )

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            return self._describe(leaf)
        is_copy = leaf.untyped_storage().nbytes() <= COPIED_BYTES
        given = leaf.detach().clone() if is_copy else leaf
        return RealTensor(given, given._version, is_copy)

    def _run_for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on the tensors that deferred ones stand for. What it changes in place must be
        real itself.
        """
        for tensor, _ in _written(func, args, kwargs):
            if tensor.is_meta:
                raise CaptureError(
                    f"{func} changes a deferred tensor of shape {list(tensor.shape)} and cannot be"
                    " deferred itself",
                    "change the parameter after it was made, by an op that is known for the meta"
                    " device",
                )
        args, kwargs = pytree.tree_map_only(Tensor, self.whole, (args, kwargs))
        return func(*args, **_on_real_device(kwargs, self.device))

    # Running the part of the ops that some storages need

    def _needed(self, storages: Iterable[int]) -> list[int]:
        """Lines without which `storages` would not be what they are at the end, ascending."""
        needed: set[int] = set()
        seen: set[tuple[int, int]] = set()
        waiting = [(storage, len(self.lines)) for storage in storages]
        while waiting:
            storage, end = waiting.pop()
            writers = self._writers[storage]
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

    def _contents(self, wanted: set[int]) -> dict[int, torch.UntypedStorage]:
        """Storage -> what the ops so far have left in it."""
        indices = self._needed(wanted)
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
        return torch.UntypedStorage(self._num_bytes[storage], device=self._devices[storage])

    def _execute(self, line: RecordedOp, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, View):
                if leaf.storage not in storages:  # this op overwrites all of it
                    storages[leaf.storage] = self._allocate(leaf.storage)
                return _view_of(storages[leaf.storage], leaf)
            return leaf.value() if isinstance(leaf, RealTensor) else leaf

        args, kwargs = pytree.tree_map(real, (line.args, line.kwargs))
        made = [
            leaf
            for leaf in pytree.tree_leaves(self._call(line, args, kwargs))
            if isinstance(leaf, Tensor)
        ]
        for result, tensor in zip(line.results, made, strict=True):
            if result is None or result.storage in storages:
                continue
            # A meta kernel may have said other strides than the real one gives; views were recorded
            # by the former's.
            if tensor.stride() != result.stride or tensor.storage_offset() != result.offset:
                tensor = _view_of(self._allocate(result.storage), result).copy_(tensor)
            storages[result.storage] = tensor.untyped_storage()

    def _call(self, line: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(line.default_dtype)
            # No states yet: it draws for the first time, and moves the generators on.
            for generator, state in zip(
                generators_of(kwargs, self.device), line.random, strict=False
            ):
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            return line.func(*args, **kwargs)

    # The same script on all ranks

    def digest(self) -> str:
        """Hash of the ops, without the numbers that they draw and the data that they were given."""
        content = hashlib.sha256()
        for line in self.lines:
            content.update(line.text().encode())
        return content.hexdigest()[:16]

    def rank_dependent(self) -> list[Tensor]:
        """What may differ between ranks that ran the same code: random states and small data, in
        the ops' order. They may be written to, by `.data`.

        Data that is only referred to (a file that every rank reads) is taken to be the same.
        """
        found: list[Tensor] = []
        for line in self.lines:
            found += line.random
            given = [
                leaf
                for leaf in pytree.tree_leaves((line.args, line.kwargs))
                if isinstance(leaf, RealTensor)
            ]
            found += [each.value() for each in given if each.is_copy]
        return found


class _RealDeviceView(TorchFunctionMode):
    """Python sees deferred tensors on their real device: much code does nothing for meta tensors
    (`nn.init`, ...).
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == torch.Tensor.device.__get__:
            with torch._C.DisableTorchFunction():
                return self._recorder.device_of(args[0]) if args[0].is_meta else args[0].device
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            target, data = args
            before = _key(target)
            if target.is_meta == data.is_meta:
                func(target, data)
            else:  # which `data = ...` refuses; the object stays the same
                torch._C._swap_tensor_impl(
                    target, data.detach().requires_grad_(target.requires_grad)
                )
            self._recorder.new_data(target, before)
            return None
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> int:
    with (
        torch._C.DisableTorchFunction()
    ):  # a lazy module's parameters refuse to be asked before they have a shape
        return tensor.untyped_storage()._cdata


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.dim() > 0:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _meta_kwargs(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for running `func` on meta tensors: no numbers are drawn there."""
    result = {name: pytree.tree_map(_to_meta, value) for name, value in kwargs.items()}
    if "generator" in result:
        result["generator"] = None
    if any(argument.name == "device" for argument in func._schema.arguments):
        result["device"] = torch.device("meta")
    return result


def _asks_for_meta(kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("device")
    return asked is not None and torch.device(asked).type == "meta"


def _on_real_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Keyword arguments with `device` where they say meta."""
    return {**kwargs, "device": device} if _asks_for_meta(kwargs) else kwargs


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, bool]]:
    """(tensor that the op changes in place, whether without reading it)."""
    found = []
    if func._schema.name in NORMS and args[5]:
        found = [(statistic, False) for statistic in args[3:5] if statistic is not None]
    overwrites = func._schema.name.partition("::")[2] in OVERWRITING
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, Tensor):
                found.append((tensor, overwrites or argument.is_out))
    return found


def generators_of(kwargs: Mapping[str, Any], device: torch.device) -> list[torch.Generator]:
    """The generators that a random op may draw from: the one that is passed to it, or the default
    ones.
    """
    if (own := kwargs.get("generator")) is not None:
        return [own]
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # before it there are none
    return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]


def _view_of(storage: torch.UntypedStorage, view: View) -> Tensor:
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.size, view.stride)
