"""Parameters that are gathered for use are not kept until the backward, but gathered again
(ZeRO-3).

Results that the plan recomputes (`StagePlan.recomputed`) or keeps in host memory
(`StagePlan.stored`) return so, too.

Autograd saves a gathered weight (or a view of it) for the backward of the op that used it.
`SavedTensorHooks` puts a recipe in its place, by `saved_tensors_hooks`: which parameter, which
resharding, which view (found by the storage).
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from alpa_strategy.comm.mesh import Pending
from alpa_strategy.errors import RuntimeMismatchError

if TYPE_CHECKING:
    from alpa_strategy.comm.reshard import Reshard

MAX_DERIVATIONS = 3  # casts and views between a parameter and its gathering

_active: contextvars.ContextVar[SavedTensorHooks | None] = contextvars.ContextVar(
    "alpa_regather", default=None
)


@dataclass
class _Gathered:
    """A gathered parameter: its shard and how to gather that again. `storage` keeps the key unique
    while this lives.
    """

    parameter: Tensor
    start: Callable[[], Pending]
    storage: StorageWeakRef
    version: int
    num_bytes: int
    ahead_bytes: int  # of what was saved `before`: gathered meanwhile
    before: _Gathered | None = None
    is_saved: bool = False
    uses: int = 0  # of what is saved that the backward has not come to
    coming: Pending | None = None
    again: Callable[[], Tensor | None] = field(default=lambda: None)  # or a weak reference

    def whole(self) -> Tensor:
        """The gathered parameter; shared by the uses that overlap in time. Collective over the
        mesh.
        """
        self.uses -= 1
        whole = self.again()
        if whole is None:
            if self.parameter._version != self.version:
                raise RuntimeMismatchError(
                    "a parameter changed between the forward and its backward",
                    "run backward before the optimizer's step",
                )
            with torch.no_grad():
                coming = self.coming or self.start()
                self._start_those_before()
                whole = coming.wait()
            self.coming, self.again = None, weakref.ref(whole)
        return whole

    def _start_those_before(self) -> None:
        """The backward takes the uses in reverse: begin to gather what it will ask for next."""
        other, room = self.before, self.ahead_bytes
        while other is not None and (room := room - other.num_bytes) >= 0:
            # An op may have taken it already: a layer norm's bias comes before its weight.
            if other.uses > 0 and other.coming is None and other.again() is None:
                other.coming = other.start()
            other = other.before


@dataclass
class _Made:
    """What an op made, to be made again of what is kept; `uses` are left for which it is not made
    yet.
    """

    function: Callable[[list[Tensor]], Tensor]
    operands: list[Any]  # the op's tensors as they are saved, in their order
    storage: StorageWeakRef
    uses: int = 0
    again: Tensor | None = None

    def whole(self) -> Tensor:
        """Made once for all uses, and gone with the last."""
        if self.again is None:
            with torch.no_grad():
                self.again = self.function([_unpack(saved) for saved in self.operands])
        whole, self.uses = self.again, self.uses - 1
        if self.uses <= 0:
            self.again = None
        return whole


@dataclass
class _View:
    """What is saved instead of a view of a gathered parameter, which may read its memory as another
    dtype.
    """

    gathered: _Gathered | _Made
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]  # in elements of `dtype`, as `offset`
    offset: int | torch.SymInt
    is_conj: bool  # what a complex view does when it is read, as `is_neg`
    is_neg: bool

    def again(self) -> Tensor:
        """The view, of the parameter gathered again."""
        whole = self.gathered.whole()
        if whole.dtype != self.dtype:
            num_elements = whole.untyped_storage().nbytes() // whole.dtype.itemsize
            whole = whole.as_strided((num_elements,), (1,), 0).view(
                self.dtype
            )  # all of its memory, flat
        view = whole.as_strided(self.size, self.stride, self.offset)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class SavedTensorHooks:
    """Context manager around a forward: what it gathers of `parameters` is gathered again in the
    backward.

    Every device of the mesh must run the same forward and backward. Reentrant use is not supported.

    Args:
        store: puts a tensor into host memory, and gives what brings it back.
        ahead_bytes: of parameters that are gathered in the backward before they are used.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        store: Callable[[Tensor], Callable[[], Tensor]] | None = None,
        ahead_bytes: int = 0,
    ) -> None:
        self._parameters, self._store = {id(parameter) for parameter in parameters}, store
        self._ahead_bytes = ahead_bytes
        self._last: _Gathered | None = None
        self._found: dict[int, _Gathered | _Made] = {}
        self._hooks: Any = None
        self._token: contextvars.Token | None = None

    def note(self, reshard: Reshard, tensor: Tensor, result: Tensor) -> None:
        """`result` is `reshard(tensor)` (called by every Reshard while this context is active)."""
        if not self._is_parameter(tensor):
            return
        storage = result.untyped_storage()
        # A resharding that moves nothing gives the shard's own memory, which is kept anyway.
        if storage._cdata != tensor.untyped_storage()._cdata:
            shard = tensor.detach()
            brought = self._found.get(tensor.untyped_storage()._cdata)
            if isinstance(
                brought, _Gathered
            ):  # a copy of what lies in host memory: not kept either
                copy = self._pack(shard)
                self.know(
                    brought.parameter, lambda: Pending(lambda: reshard.values(copy.again())), result
                )
            else:
                self.know(shard, partial(reshard.start, shard), result)

    def know(self, parameter: Tensor, start: Callable[[], Pending], whole: Tensor) -> None:
        """`whole` is what `start` begins to make of `parameter`."""
        storage, version = whole.untyped_storage(), parameter._version
        known = _Gathered(
            parameter, start, StorageWeakRef(storage), version, storage.nbytes(), self._ahead_bytes
        )
        self._found[storage._cdata] = known

    def note_made(
        self, result: Tensor, function: Callable[[list[Tensor]], Tensor], operands: list[Tensor]
    ) -> None:
        """`result` is `function(operands)`: whoever saves it saves how to make it instead. Without
        collectives.
        """
        storage = result.untyped_storage()
        kept = [self._pack(operand.detach()) for operand in operands]
        self._found[storage._cdata] = _Made(function, kept, StorageWeakRef(storage))

    def note_stored(self, result: Tensor) -> None:
        """Whoever saves `result` saves how to bring it from host memory instead: all of its memory,
        as it lies.
        """
        assert self._store is not None
        flat = result.detach().as_strided(
            (result.untyped_storage().nbytes() // result.dtype.itemsize,), (1,), 0
        )
        bring = self._store(flat)
        self.note_made(result, lambda _operands: bring(), [])

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a parameter, or made of nothing but one (a cast to bfloat16, a
        view).
        """
        if id(tensor) in self._parameters:
            return True
        node: Any = tensor.grad_fn
        for _ in range(MAX_DERIVATIONS + 1):
            if (variable := getattr(node, "variable", None)) is not None:
                return id(variable) in self._parameters
            if getattr(node, "is_made_of_parameters", False):  # pipeline/per_step_values.py
                return True
            if node is None or len(node.next_functions) != 1:
                return False
            if _keeps_tensors(type(node)):  # type: ignore[arg-type]  # a class is hashable, of Any too
                return False
            node = node.next_functions[0][0]
        return False

    def __enter__(self) -> SavedTensorHooks:
        self._token = _active.set(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Context in which autograd keeps what it saves."""
        hooks, self._hooks = self._hooks, nullcontext()
        hooks.__exit__(None, None, None)
        try:
            yield
        finally:
            hooks.__enter__()
            self._hooks = hooks

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        assert self._token is not None
        _active.reset(self._token)
        self._found.clear()  # what was saved keeps its own recipe
        self._hooks = None  # which hold this

    def _pack(self, tensor: Tensor) -> Any:
        is_strided = (
            tensor.layout is torch.strided
        )  # a sparse adjacency, say, has no storage of its own to know it by
        gathered = self._found.get(tensor.untyped_storage()._cdata) if is_strided else None
        if gathered is None:
            # Its own result, which an op saves, would hold the op: for ever, where no backward
            # comes.
            return tensor if tensor.grad_fn is None else tensor.detach()
        gathered.uses += 1
        if isinstance(gathered, _Gathered) and not gathered.is_saved:
            gathered.is_saved, gathered.before, self._last = True, self._last, gathered
        lies = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _View(gathered, tensor.dtype, *lies, tensor.is_conj(), tensor.is_neg())


@functools.cache
def _keeps_tensors(node: type) -> bool:
    """Whether autograd's nodes of this kind save tensors for their backward. Views and casts save
    none; what also reads
    another tensor (the ids of an embedding) does, if only one of its operands is differentiated."""
    return any(name.startswith("_raw_saved_") for name in dir(node))


def _unpack(saved: Any) -> Tensor:
    return saved.again() if isinstance(saved, _View) else saved


def active_regather() -> SavedTensorHooks | None:
    """The SavedTensorHooks context that this thread's forward runs under, if any."""
    return _active.get()
