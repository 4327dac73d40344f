"""Parameters that are gathered for use are not saved for backward, but re-gathered there (ZeRO-3).

The same holds for results that the plan recomputes (`StagePlan.recomputed`) or offloads to host
memory (`StagePlan.stored`).

Autograd saves a gathered weight, or a view of it, for the backward of the op that used it.
`SavedTensorHooks` saves a recipe instead, by `torch.autograd.graph.saved_tensors_hooks`: the
parameter, how to gather it, and the view. A tensor is recognized by its storage.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from alpa_strategy.comm.mesh import Pending
from alpa_strategy.errors import RuntimeMismatchError

# The most casts and views between a parameter and its all-gather.
MAX_DERIVATIONS = 3

_active: contextvars.ContextVar[SavedTensorHooks | None] = contextvars.ContextVar(
    "alpa_regather", default=None
)


class Gather(Protocol):
    """A resharding that gathers a parameter (`comm/reshard.py`)."""

    def values(self, tensor: Tensor) -> Tensor:
        """Return the gathered tensor, without autograd."""
        ...

    def start(self, tensor: Tensor) -> Pending:
        """Launch `values`."""
        ...


@dataclass
class _GatheredParameter:
    """The recipe of a gathered parameter: its shard, and how to re-gather it."""

    parameter: Tensor
    start: Callable[[], Pending]
    # keeps the storage's address from being used again while this recipe exists
    storage: StorageWeakRef
    # of `parameter` when it was gathered
    version: int
    num_bytes: int
    # bytes of the recipes `before` this one that are gathered in advance
    prefetched_bytes: int
    # the recipe that the forward saved before this one
    before: _GatheredParameter | None = None
    is_saved: bool = False
    # tensors saved by autograd that the backward has not unpacked yet
    uses: int = 0
    # the gather in flight
    coming: Pending | None = None
    # the re-gathered tensor, by a weak reference
    again: Callable[[], Tensor | None] = field(default=lambda: None)

    def full_tensor(self) -> Tensor:
        """Return the full parameter for one use. Launches the gathers of those that the backward
        needs next. Collective over the mesh.

        A tensor that an earlier use still has is returned again, without a gather.

        Raises:
            RuntimeMismatchError: the parameter changed since the forward.
        """
        self.uses -= 1
        full = self.again()
        if full is not None:
            return full
        if self.parameter._version != self.version:
            raise RuntimeMismatchError(
                "a parameter changed between the forward and its backward",
                "run backward before the optimizer's step",
            )
        with torch.no_grad():
            coming = self.coming or self.start()
            self._prefetch()
            full = coming.wait()
        self.coming = None
        self.again = weakref.ref(full)
        return full

    def _prefetch(self) -> None:
        """Launch the gathers that the backward needs next: it takes the uses in reverse order. They
        have at most `prefetched_bytes`.
        """
        other = self.before
        remaining_bytes = self.prefetched_bytes
        while other is not None:
            remaining_bytes -= other.num_bytes
            if remaining_bytes < 0:
                return
            # An op may have used it already: a layer norm's bias is unpacked before its weight.
            is_needed = other.uses > 0 and other.coming is None and other.again() is None
            if is_needed:
                other.coming = other.start()
            other = other.before


@dataclass
class _Recomputed:
    """The recipe of an op's result: recompute it from saved operands."""

    function: Callable[[list[Tensor]], Tensor]
    # the op's tensors in their order, each packed as autograd's saved tensors are
    operands: list[Any]
    # keeps the storage's address from being used again while this recipe exists
    storage: StorageWeakRef
    # tensors saved by autograd that the backward has not unpacked yet
    uses: int = 0
    again: Tensor | None = None

    def full_tensor(self) -> Tensor:
        """Return the op's result for one use: recomputed at the first, freed with the last."""
        if self.again is None:
            with torch.no_grad():
                self.again = self.function([_unpack(saved) for saved in self.operands])
        result = self.again
        self.uses -= 1
        if self.uses <= 0:
            self.again = None
        return result


@dataclass
class _SavedView:
    """Saved by autograd instead of a view of a tensor that has a recipe.

    The view may read the tensor's memory as another dtype.
    """

    recipe: _GatheredParameter | _Recomputed
    dtype: torch.dtype
    size: torch.Size
    # in elements of `dtype`
    stride: tuple[int, ...]
    # in elements of `dtype`
    offset: int | torch.SymInt
    # whether a complex view is conjugated when it is read
    is_conj: bool
    # whether a view is negated when it is read
    is_neg: bool

    def unpack(self) -> Tensor:
        """Return the view, of the tensor that the recipe gives."""
        full = self.recipe.full_tensor()
        if full.dtype != self.dtype:
            # All of its memory, flat, as the other dtype.
            num_elements = full.untyped_storage().nbytes() // full.dtype.itemsize
            full = full.as_strided((num_elements,), (1,), 0).view(self.dtype)
        view = full.as_strided(self.size, self.stride, self.offset)
        if self.is_conj:
            view = view.conj()
        if self.is_neg:
            view = torch._neg_view(view)
        return view


class SavedTensorHooks:
    """Context manager around a forward: parameters that it gathers are re-gathered in the backward.

    Every device of the mesh must run the same forward and backward. A context cannot be entered
    again while it is active.

    Args:
        parameters: shards that are re-gathered.
        store: offloads a tensor to host memory, and returns a function that fetches it.
        prefetched_bytes: bytes of parameters that the backward gathers before they are used.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        store: Callable[[Tensor], Callable[[], Tensor]] | None = None,
        prefetched_bytes: int = 0,
    ) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._store = store
        self._prefetched_bytes = prefetched_bytes
        self._last_saved: _GatheredParameter | None = None
        # address of a storage -> its recipe
        self._recipes: dict[int, _GatheredParameter | _Recomputed] = {}
        self._hooks: Any = None
        self._token: contextvars.Token | None = None

    def note(self, gather: Gather, tensor: Tensor, result: Tensor) -> None:
        """Record that `result` is `gather.values(tensor)`.

        Called by every Reshard while this context is active. Tensors that are not computed from a
        parameter alone are ignored, and results that share the memory of `tensor`.
        """
        if not self._is_parameter(tensor):
            return
        # A resharding that moves nothing gives the shard's memory, which is stored anyway.
        if result.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            return
        shard = tensor.detach()
        recipe = self._recipes.get(tensor.untyped_storage()._cdata)
        if isinstance(recipe, _GatheredParameter):
            # A copy of a shard in host memory is not saved for backward either.
            copy = self._pack(shard)
            self.know(
                recipe.parameter, lambda: Pending(lambda: gather.values(copy.unpack())), result
            )
        else:
            self.know(shard, partial(gather.start, shard), result)

    def know(self, parameter: Tensor, start: Callable[[], Pending], full: Tensor) -> None:
        """Record that `full` is what `start` launches to compute from `parameter`."""
        storage = full.untyped_storage()
        self._recipes[storage._cdata] = _GatheredParameter(
            parameter,
            start,
            StorageWeakRef(storage),
            parameter._version,
            storage.nbytes(),
            self._prefetched_bytes,
        )

    def note_made(
        self, result: Tensor, function: Callable[[list[Tensor]], Tensor], operands: list[Tensor]
    ) -> None:
        """Record that `result` is `function(operands)`, to be recomputed for the backward.

        `function` must not run collectives.
        """
        storage = result.untyped_storage()
        saved = [self._pack(operand.detach()) for operand in operands]
        self._recipes[storage._cdata] = _Recomputed(function, saved, StorageWeakRef(storage))

    def note_stored(self, result: Tensor) -> None:
        """Offload `result`, all of its memory, to host memory; fetch it for the backward."""
        assert self._store is not None
        num_elements = result.untyped_storage().nbytes() // result.dtype.itemsize
        flat = result.detach().as_strided((num_elements,), (1,), 0)
        fetch = self._store(flat)
        self.note_made(result, lambda _operands: fetch(), [])

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a parameter, or made of one by a few ops that save no tensors: casts,
        views, gathers.
        """
        if id(tensor) in self._parameters:
            return True
        node: Any = tensor.grad_fn
        for _ in range(MAX_DERIVATIONS + 1):
            variable = getattr(node, "variable", None)
            if variable is not None:
                return id(variable) in self._parameters
            # Set by pipeline/per_step_values.py.
            if getattr(node, "is_made_of_parameters", False):
                return True
            if node is None or len(node.next_functions) != 1:
                return False
            # mypy: a class is hashable, also one of type Any.
            if _saves_tensors(type(node)):  # type: ignore[arg-type]
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
        """Context in which autograd saves tensors as usual."""
        hooks = self._hooks
        self._hooks = nullcontext()
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
        # Saved views reference their recipes.
        self._recipes.clear()
        # The hooks reference this object.
        self._hooks = None

    def _pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves for `tensor`: a view with a recipe, or the tensor
        itself (detached if it has a graph) if its memory has none.
        """
        recipe = None
        # A sparse tensor, for example, has no storage by which to recognize it.
        if tensor.layout is torch.strided:
            recipe = self._recipes.get(tensor.untyped_storage()._cdata)
        if recipe is None:
            # An op that saves its result would otherwise reference itself: for ever, if no backward
            # runs.
            return tensor if tensor.grad_fn is None else tensor.detach()
        recipe.uses += 1
        if isinstance(recipe, _GatheredParameter) and not recipe.is_saved:
            recipe.is_saved = True
            recipe.before = self._last_saved
            self._last_saved = recipe
        return _SavedView(
            recipe,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )


@functools.cache
def _saves_tensors(node: type) -> bool:
    """Whether autograd nodes of this class save tensors for their backward.

    Views and casts save none. An op that also reads another tensor (the ids of an embedding) does,
    even if only one of its operands is differentiated.
    """
    return any(name.startswith("_raw_saved_") for name in dir(node))


def _unpack(saved: Any) -> Tensor:
    return saved.unpack() if isinstance(saved, _SavedView) else saved


def active_regather() -> SavedTensorHooks | None:
    """Return the SavedTensorHooks context that this thread's forward runs under, if any."""
    return _active.get()
