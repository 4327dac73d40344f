"""Deferred initialization: under the mode `Recorder`, large tensors have no memory, and the ops
that would compute their values are recorded.

Under `recording()`, a tensor of `min_bytes` or more becomes a meta tensor, and the ops on it are
recorded, in place or not. Random ops draw their numbers into memory that is freed at once, so that
generators advance as on a single device; `materialize` makes a tensor later, from the states that
the generators had. Small tensors are real: Python may read them.
"""

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from alpa_strategy.recording.mapped_files import MappedFiles
from alpa_strategy.recording.recorded_op import (
    RealTensor,
    RecordedOp,
    View,
    generators_of,
    is_for_meta,
    is_loading,
    meta_kwargs,
    on_real_device,
    storage_key,
    to_meta,
    view_of,
    written_by,
)

# Tensors from this size on are deferred, and views of mapped files: experts are merged of many.
MIN_BYTES = 64 * 2**10
MIN_FILE_BYTES = 2**10

# The user's data up to this size is copied, so that it may change afterwards.
COPIED_BYTES = 2**20


class Recorder(TorchDispatchMode):
    """Records the ops on deferred tensors in order, and runs those that one tensor needs.

    Args:
        device: of the real tensors of those that are created without a device, or on `meta`.
        min_bytes: smaller tensors are not deferred.
    """

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        super().__init__()
        self.device, self.min_bytes = device, min_bytes
        self.lines: list[RecordedOp] = []
        # Address of a meta storage -> its number. All else is by this number.
        self._numbers: dict[int, int] = {}

        # The lines that write to a storage, ascending.
        self._writers: dict[int, list[int]] = defaultdict(list)

        # Size of a storage, and the device of its real memory.
        self._num_bytes: dict[int, int] = {}
        self._devices: dict[int, torch.device] = {}

        # Number of writes to the storages in which tensors of this one were before.
        self._earlier_writes: dict[int, int] = {}

        # Keeps the meta storages alive, so that no other gets the same address.
        self._storages: list[torch.UntypedStorage] = []

        # Files that are mapped while ops are recorded -> a meta tensor of their bytes.
        self.files = MappedFiles()
        self._bytes_of: dict[int, Tensor] = {}

        # Storages that a library made on the meta device before it loads weights. Their random
        # numbers are drawn when they are needed: most often other values take their place.
        self._for_meta: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which tensors are deferred. Nested in itself it does nothing."""
        if self in _get_current_dispatch_mode_stack():
            yield
            return
        with self.files.watching(), self, _RealDeviceView(self):
            yield

    def is_deferred(self, tensor: Tensor) -> bool:
        """Whether this recorder can compute the values of a meta tensor."""
        number = self._numbers.get(storage_key(tensor)) if tensor.is_meta else None
        if number is None:
            return False
        return any(self.lines[index].writes[number] for index in self._writers[number])

    def materialize(self, tensor: Tensor) -> Tensor:
        """Return the real tensor that a deferred one stands for, computed anew at every call.

        A real tensor is returned as it is.

        Raises:
            CaptureError: a meta tensor is not deferred, or data that was recorded has changed.
        """
        if not tensor.is_meta:
            return tensor
        if not self.is_deferred(tensor):
            raise CaptureError(
                f"the values of a meta tensor of shape {list(tensor.shape)} are not known",
                "build the module in configure_model, or give its modules a reset_parameters"
                " method",
            )
        view = self.describe(tensor)
        with torch.no_grad(), _disable_current_modes():
            # All other memory is freed while the ops run.
            contents = self._contents({view.storage})
            return view_of(contents[view.storage], view)

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Return False if a deferred tensor was changed in place while nothing was recorded, as far
        as its version shows.
        """
        number = self._numbers.get(storage_key(tensor))
        return number is None or tensor._version <= self._num_writes(number)

    def new_data(self, tensor: Tensor, before: int) -> None:
        """Record that `tensor.data = ...` gave the tensor another storage, though its version goes
        on counting.

        Does nothing unless both storages are known and differ.

        Args:
            tensor: with its new storage.
            before: address of the storage that it had before.
        """
        old = self._numbers.get(before)
        new = self._numbers.get(storage_key(tensor))
        if old is not None and new is not None and old != new:
            self._earlier_writes[new] = self._earlier_writes.get(new, 0) + self._num_writes(old)

    def _num_writes(self, number: int) -> int:
        """Return an upper bound of the recorded changes of any tensor that is now in a storage."""
        return len(self._writers[number]) + self._earlier_writes.get(number, 0)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device of the real tensor that a meta tensor stands for."""
        return self._devices.get(self._numbers.get(storage_key(tensor), -1), self.device)

    def describe(self, tensor: Tensor) -> View:
        """Return the layout of a meta tensor in its storage, which is recorded if it is new."""
        key = storage_key(tensor)
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
        """Give a meta tensor's storage a number.

        Args:
            tensor: on the meta device.
            device: of the real memory, by default the recorder's.
        """
        storage = tensor.untyped_storage()
        number = self._numbers[storage_key(tensor)] = len(self._storages)
        self._storages.append(storage)
        self._num_bytes[number] = storage.nbytes()
        self._devices[number] = device or self.device

    # What the mode does with an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on real tensors, or record it and return meta tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            args, kwargs = pytree.tree_map_only(Tensor, self._deferred_file, (args, kwargs))
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if not any(tensor.is_meta for tensor in tensors):
                if is_for_meta(kwargs) and is_loading() and _is_empty(func, args, kwargs):
                    # By an empty tensor libraries ask on which device they build.
                    return func(*args, **kwargs)
                if not self._makes_big_tensor(func, args, kwargs, tensors):
                    return func(*args, **on_real_device(kwargs, self.device))
            elif func is torch.ops.aten._local_scalar_dense.default:
                return func(self.materialize(tensors[0]))
            return self._record(func, args, kwargs)

    def _deferred_file(self, tensor: Tensor) -> Tensor:
        """Return the deferred tensor in the place of a large one that is a view of a mapped file;
        all others as they are.
        """
        min_bytes = min(self.min_bytes, MIN_FILE_BYTES)
        file = self.files.of(tensor) if tensor.nbytes >= min_bytes else None
        if file is None:
            return tensor

        if file.address not in self._bytes_of:
            new = torch.empty(file.num_bytes, dtype=torch.uint8, device="meta")
            self.add_source(new, file.open)
            self._bytes_of[file.address] = new
        content = self._bytes_of[file.address].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device="meta")
        offset = (tensor.data_ptr() - file.address) // tensor.element_size()
        view.set_(content, offset, tensor.size(), tensor.stride())
        return view.requires_grad_(tensor.requires_grad)

    def add_source(self, content: Tensor, read: Callable[[], Tensor]) -> None:
        """Record that a new meta tensor has the values that a function returns.

        Args:
            content: contiguous, all of its storage.
            read: returns them in a tensor of the same layout, at every call anew.
        """
        self._adopt(content, torch.device("cpu"))
        view = self.describe(content)
        self._writers[view.storage].append(len(self.lines))
        dtype = torch.get_default_dtype()
        self.lines.append(RecordedOp(read, (), {}, (), {view.storage: True}, (view,), dtype))

    def deferred_copy(self, tensor: Tensor) -> Tensor:
        """Return a deferred tensor with the values that a real one has now; a meta tensor as it is.

        Args:
            tensor: small, or of the user: it is not to be changed in place by what gets the copy.
        """
        if tensor.is_meta:
            return tensor
        with _disable_current_modes():
            copy = torch.empty_like(tensor, device="meta", requires_grad=False)
        self._adopt(copy, tensor.device)
        self._record(torch.ops.aten.copy_.default, (copy, tensor.detach()), {})
        return copy

    def sources_of(self, tensor: Tensor) -> list[Any]:
        """Return the functions given to `add_source` that the values of a tensor depend on."""
        return [func for func in self.functions_of(tensor) if not hasattr(func, "_schema")]

    def functions_of(self, tensor: Tensor) -> list[Any]:
        """Return the ops and sources that the values of a tensor depend on, in their order; [] if
        it was not recorded.
        """
        number = self._numbers.get(storage_key(tensor)) if tensor.is_meta else None
        if number is None:
            return []
        return [self.lines[index].func for index in self._needed({number})]

    def _makes_big_tensor(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> bool:
        """Whether an op on real `tensors`, or on none, makes a tensor that is to be deferred."""
        if tensors:
            # Only if it moves one to the device of a deferred tensor.
            is_large = any(tensor.nbytes >= self.min_bytes for tensor in tensors)
            return is_for_meta(kwargs) and is_large

        if not any("Tensor" in str(result.type) for result in func._schema.returns):
            return False
        if is_for_meta(kwargs) and is_loading():
            return True

        # The op on the meta device shows how large the results would be.
        for leaf in pytree.tree_leaves(func(*args, **meta_kwargs(func, kwargs))):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() >= self.min_bytes:
                return True
        return False

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an op and return meta tensors; run it on real ones if it cannot be
        (`_run_for_real`).
        """
        try:
            result = func(*pytree.tree_map(to_meta, args), **meta_kwargs(func, kwargs))
        except (NotImplementedError, RuntimeError):
            # The shapes of its results depend on data.
            return self._run_for_real(func, args, kwargs)

        written = written_by(func, args, kwargs)
        if any(not tensor.is_meta for tensor, _ in written):
            return self._run_for_real(func, args, kwargs)

        line = self._line(func, args, kwargs, result, written)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and not self._for_meta.issuperset(line.writes):
            # Generators advance as on a single device; the drawn numbers are freed at once.
            states = [generator.get_state() for generator in generators_of(kwargs, self.device)]
            with torch.no_grad(), _disable_current_modes():
                self._execute(line, self._contents(set(line.reads)))
            line.random = states

        # An op without writes makes a view, which is known by its storage.
        if line.writes:
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
        """Return the record of an op.

        Args:
            func: the op.
            args: of the call.
            kwargs: of the call.
            result: of the op on the meta device.
            written: see `written_by`.
        """
        real_kwargs = on_real_device(kwargs, self.device)
        positional, named = pytree.tree_map(self._argument, (args, real_kwargs))
        leaves = pytree.tree_leaves((positional, named))
        views = [leaf for leaf in leaves if isinstance(leaf, View)]

        writes: dict[int, bool] = {}
        unread: set[int] = set()
        for tensor, is_overwritten in written:
            view = self.describe(tensor)
            num_uses = sum(other.storage == view.storage for other in views)
            only_target = is_overwritten and num_uses == 1
            is_all_of_it = tensor.nbytes == self._num_bytes[view.storage]
            writes[view.storage] = only_target and is_all_of_it
            if only_target:
                unread.add(view.storage)

        of_first = self._devices[views[0].storage] if views else torch.device("cpu")
        device = named.get("device") or of_first
        results: list[View | None] = []
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and storage_key(leaf) in self._numbers:
                results.append(None)
            elif isinstance(leaf, Tensor):
                self._adopt(leaf, device)
                view = self.describe(leaf)
                if is_for_meta(kwargs) and is_loading():
                    self._for_meta.add(view.storage)
                results.append(view)
                writes[view.storage] = True
        reads = tuple(dict.fromkeys(view.storage for view in views if view.storage not in unread))
        return RecordedOp(
            func, positional, named, reads, writes, tuple(results), torch.get_default_dtype()
        )

    def _argument(self, leaf: Any) -> Any:
        """Return the record of one leaf of an op's arguments."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            return self.describe(leaf)
        is_copy = leaf.untyped_storage().nbytes() <= COPIED_BYTES
        data = leaf.detach().clone() if is_copy else leaf
        return RealTensor(data, data._version, is_copy)

    def _run_for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on the tensors that deferred ones stand for.

        Raises:
            CaptureError: it changes a deferred tensor in place.
        """
        for tensor, _ in written_by(func, args, kwargs):
            if tensor.is_meta:
                raise CaptureError(
                    f"{func} changes a deferred tensor of shape {list(tensor.shape)} and cannot be"
                    " deferred itself",
                    "change the parameter after it was made, by an op that is known for the meta"
                    " device",
                )
        args, kwargs = pytree.tree_map_only(Tensor, self.materialize, (args, kwargs))
        return func(*args, **on_real_device(kwargs, self.device))

    # Running the ops that some storages need

    def last_writer(self, storage: int, end: int) -> RecordedOp | None:
        """Return the last op before line `end` that writes to a storage."""
        writers = self._writers[storage]
        position = bisect_left(writers, end)
        return self.lines[writers[position - 1]] if position else None

    def index_of_writer(self, storage: int, end: int) -> int:
        """Return the line of `last_writer`."""
        writers = self._writers[storage]
        return writers[bisect_left(writers, end) - 1]

    def value_at(self, view: View, end: int) -> Tensor:
        """Return the real tensor of a view as it was before line `end`, computed anew."""
        with torch.no_grad(), _disable_current_modes():
            return view_of(self._contents({view.storage}, end)[view.storage], view)

    def _needed(self, storages: Iterable[int], end: int | None = None) -> list[int]:
        """Return the indices of the lines that determine the contents of `storages`, ascending.

        Args:
            storages: numbers of storages.
            end: only lines before this one count; None: all.
        """
        needed: set[int] = set()
        visited: set[tuple[int, int]] = set()
        end_of_all = len(self.lines) if end is None else end
        waiting = [(storage, end_of_all) for storage in storages]
        while waiting:
            storage, before = waiting.pop()
            writers = self._writers[storage]
            last = bisect_left(writers, before)
            if (storage, last) in visited:
                continue
            visited.add((storage, last))
            for index in reversed(writers[:last]):
                line = self.lines[index]
                if index not in needed:
                    needed.add(index)
                    waiting += [(read, index) for read in line.reads if read != storage]
                if line.writes[storage]:
                    # It overwrites everything: earlier writes do not matter.
                    break
        return sorted(needed)

    def _contents(
        self, wanted: set[int], end: int | None = None
    ) -> dict[int, torch.UntypedStorage]:
        """Return storage -> its real memory after all ops before line `end`, for the `wanted`;
        uninitialised where none writes.
        """
        indices = self._needed(wanted, end)
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
        # Nothing was ever written to these.
        for storage in wanted - storages.keys():
            storages[storage] = self._allocate(storage)
        return storages

    def _allocate(self, storage: int) -> torch.UntypedStorage:
        """Return real memory for a recorded storage."""
        return torch.UntypedStorage(self._num_bytes[storage], device=self._devices[storage])

    def _execute(self, line: RecordedOp, storages: dict[int, torch.UntypedStorage]) -> None:
        """Run a recorded op on real memory, and add the storages that it makes to `storages`."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, View):
                if leaf.storage not in storages:
                    # This op overwrites all of it.
                    storages[leaf.storage] = self._allocate(leaf.storage)
                return view_of(storages[leaf.storage], leaf)
            return leaf.value() if isinstance(leaf, RealTensor) else leaf

        args, kwargs = pytree.tree_map(real, (line.args, line.kwargs))
        leaves = pytree.tree_leaves(self._call(line, args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for result, tensor in zip(line.results, tensors, strict=True):
            if result is None or result.storage in storages:
                continue
            # The meta kernel may have given other strides than the real one; views were recorded
            # with the former.
            if tensor.stride() != result.stride or tensor.storage_offset() != result.offset:
                tensor = view_of(self._allocate(result.storage), result).copy_(tensor)
            storages[result.storage] = tensor.untyped_storage()

    def _call(self, line: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op with the default dtype and the generators' states of its recording, and
        return its result. A random op without recorded states draws now, and its states are
        recorded in `line`.
        """
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(line.default_dtype)

            # Without recorded states it draws for the first time, and advances the generators.
            generators = generators_of(kwargs, self.device)
            if line.is_random and not line.random:
                line.random = [generator.get_state() for generator in generators]
                return line.func(*args, **kwargs)
            for generator, state in zip(generators, line.random, strict=False):
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            return line.func(*args, **kwargs)

    def draw(self, tensors: Iterable[Tensor]) -> None:
        """Draw the random numbers that deferred tensors still need, in the order of the ops."""
        numbers = {self._numbers.get(storage_key(t)) for t in tensors if t.is_meta}
        known = {number for number in numbers if number is not None}
        for index in self._needed(known):
            line = self.lines[index]
            if line.is_random and not line.random:
                with torch.no_grad(), _disable_current_modes():
                    self._execute(line, self._contents(set(line.reads), index))

    # The same script on all ranks

    def digest(self) -> str:
        """Return a hash of the ops, without the numbers that they draw and the data they read."""
        content = hashlib.sha256()
        for line in self.lines:
            content.update(line.text().encode())
        return content.hexdigest()[:16]

    def rank_dependent(self) -> list[Tensor]:
        """Return the tensors that may differ between ranks that ran the same code, in the order of
        the ops: random states and small data. They may be written to, by `.data`. CaptureError: one
        has changed.

        Data that is not copied (a file that every rank reads) is taken to be the same.
        """
        tensors: list[Tensor] = []
        for line in self.lines:
            tensors += line.random
            for leaf in pytree.tree_leaves((line.args, line.kwargs)):
                if isinstance(leaf, RealTensor) and leaf.is_copy:
                    tensors.append(leaf.value())
        return tensors


class _RealDeviceView(TorchFunctionMode):
    """Shows Python deferred tensors on their real device: much code does nothing for meta tensors
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
                is_deferred = args[0].is_meta and args[0].numel() > 0
                return self._recorder.device_of(args[0]) if is_deferred else args[0].device
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            target, data = args
            before = storage_key(target)
            if target.is_meta == data.is_meta:
                func(target, data)
            else:
                # `data = ...` refuses that. The Python object stays the same.
                replacement = data.detach().requires_grad_(target.requires_grad)
                torch._C._swap_tensor_impl(target, replacement)
            self._recorder.new_data(target, before)
            return None
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "device" not in str(error) or not _are_mixed(args, kwargs):
                raise
            return self._on_one_device(func, args, kwargs, error)

    def _on_one_device(self, func: Any, args: Any, kwargs: Any, error: RuntimeError) -> Any:
        """Call a function that refuses tensors of two devices (`torch._weight_norm`) with deferred
        copies of the real ones.

        Raises:
            RuntimeError: it changes one of the copies: `error`.
        """
        args, kwargs = pytree.tree_map_only(Tensor, self._recorder.deferred_copy, (args, kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        if [tensor._version for tensor in tensors] != versions:
            raise error
        return result


def _are_mixed(args: Any, kwargs: Any) -> bool:
    """Whether some tensors of a call are deferred and some are real."""
    with torch._C.DisableTorchFunction():
        leaves = pytree.tree_leaves((args, kwargs))
        return len({leaf.is_meta for leaf in leaves if isinstance(leaf, Tensor)}) == 2


def _is_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op for the meta device returns one tensor without elements."""
    result = func(*args, **kwargs)
    return isinstance(result, Tensor) and result.numel() == 0
