"""Forwards of modules of which autograd keeps the inputs alone: in the backward they run again
(PyTorch's checkpoint).

The second run finds what the first one found: random numbers, buffers, attributes, and the
containers in them. What it changes of these is taken back, so that statistics are updated once.
What it cannot have as it was (a weight that was changed in between) is an error. Works on steps as
they are written, which nobody has captured.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from alpa_strategy.capture.kept_state import KeptNames, kept_in
from alpa_strategy.capture.python_state import framework_attributes, patched, version_of
from alpa_strategy.errors import OptionError, RuntimeMismatchError
from alpa_strategy.units import format_bytes


def modules_to_checkpoint(
    root: nn.Module, remat: bool | tuple[str, ...] | None
) -> dict[str, nn.Module]:
    """By name, the outermost modules that `PlanOptions.remat` means in a step as it is written.

    `True` and None mean the items of lists of modules, those of inner lists instead of these.

    Raises:
        OptionError: what is asked for is not there.
    """
    lists = (nn.ModuleList, nn.ModuleDict)
    called = {k: m for k, m in root.named_modules() if k and not isinstance(m, lists)}
    if isinstance(remat, tuple):
        matching = {name: [k for k in called if fnmatchcase(k, name)] for name in remat}
        names, unmet = (
            [k for own in matching.values() for k in own],
            [repr(n) for n in remat if not matching[n]],
        )
    else:
        owners = (m for m in root.modules() if isinstance(m, (*lists, nn.Sequential)))
        # A layer without parts keeps no more than what it is given.
        items = {
            m for owner in owners for m in owner.children() if next(m.children(), None) is not None
        }
        names = [k for k, m in called.items() if m in items and items.isdisjoint(m.children())]
        unmet = ["True"] if remat and not names else []
    if unmet:
        raise OptionError(
            f"remat={unmet[0]} names no module, and a step that runs as it is written has nothing"
            " else to make again",
            'name modules that are called, such as "blocks.*" (True names the items of ModuleLists'
            " and Sequentials)",
        )
    return {k: called[k] for k in names if not any(k.startswith(f"{other}.") for other in names)}


class ModuleCheckpoint:
    """See the file's docstring. Modules run as they do in evaluation, and where autograd does not
    watch.

    Args:
        root: what is trained; None: nothing is.
        room: says which modules run again; None: all.
    """

    def __init__(
        self, root: nn.Module | None = None, room: "ActivationBudget | None" = None
    ) -> None:
        self._root, self._room = root, room

    def installed(self, modules: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
        """Context in which the forwards of modules, by name, are ours."""
        return patched(
            (m, "forward", partial(self._forward, name, m, m.forward))
            for name, m in modules.items()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy of the module is nobody's

    @torch.compiler.disable
    def _forward(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if (of_copy := forward_of_copy(module)) is not None:
            return of_copy(*args, **kwargs)
        is_function = (
            torch._C._functorch.peek_interpreter_stack() is not None
        )  # whose tensors are no one's to keep
        if (
            self._root is None
            or not self._root.training
            or not torch.is_grad_enabled()
            or is_function
        ):
            return forward(*args, **kwargs)
        given = (*args, *kwargs.values())
        if self._room is not None and not self._room.is_short_for(name, given):
            return self._room.learn(name, forward(*args, **kwargs), given)
        start = ForwardSnapshot(name, module, given)
        unique = list(
            {id(value): value for value in given}.values()
        )  # code asks whether `query is key`
        places = [next(i for i, value in enumerate(unique) if value is each) for each in given]

        def run(*unique: Any) -> Any:
            again = [unique[place] for place in places]
            with start.entered():
                return forward(
                    *again[: len(args)], **dict(zip(kwargs, again[len(args) :], strict=True))
                )

        return checkpoint(run, *unique, use_reentrant=False)


def forward_of_copy(module: nn.Module) -> Callable[..., Any] | None:
    """What a forward of ours is to run instead, a partial with `module` among its arguments, where
    that is called as a
    shallow copy's, which has it with all other attributes (a learner of MAML)."""
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    called = module if frame is None else frame.f_locals["self"]
    is_copy = called is not module and module in getattr(vars(called).get("forward"), "args", ())
    return partial(type(called).forward, called) if is_copy else None


class ActivationBudget:
    """Which modules run again so that what a pass (a forward and its backward) keeps fits: the
    first, as few as do.

    What a module keeps is in proportion to what it is given, as in the first of its kind, which did
    not run again. What the pass keeps outside of the modules is known from the first backward on;
    until then half the room is left for it.

    Args:
        num_bytes: for what autograd keeps.
    """

    def __init__(self, root: nn.Module, modules: Mapping[str, nn.Module], num_bytes: float) -> None:
        self._num_bytes, self._has_told = num_bytes, False
        self._kinds = {k: (type(m), *(p.shape for p in m.parameters())) for k, m in modules.items()}
        self._tensors = [*root.parameters(), *root.buffers()]
        self._shares: dict[Any, float] = {}  # by kind: bytes kept for each byte given
        self._given: dict[str, int] = {}  # bytes, at the last call
        self._outside: tuple[float, int] | None = (
            None  # bytes, and those that the modules were given then
        )
        self._begin()

    def _begin(self) -> None:
        self._to_come, self._again = (
            set(self._kinds),
            dict[str, float](),
        )  # with the bytes that are made again
        self._kept = self._inputs = (
            0.0  # bytes, of modules that do not run again, and of those that do
        )
        self._before: list[tuple[Tensor, int]] = []  # what the module is given that runs now

    def is_short_for(self, name: str, given: Iterable[Any]) -> bool:
        """Whether a module is to run again: if not, those that are still to come could not all keep
        what they do.
        """
        leaves = tree_leaves(given)
        if name not in self._to_come or not all(
            isinstance(each, Tensor | float | int | str | None) for each in leaves
        ):
            return (
                name in self._again
            )  # the first call decided; what else than tensors it is given, it may change
        self._to_come.remove(name)
        size = self._given[name] = sum(each.nbytes for each in leaves if isinstance(each, Tensor))
        if (share := self._shares.get(self._kinds[name])) is None:
            self._before = [(each, version_of(each)) for each in leaves if isinstance(each, Tensor)]
            return False
        to_come = (
            (self._given.get(k, size), self._shares.get(self._kinds[k], share))
            for k in self._to_come
        )
        needed = (
            self._kept
            + self._inputs
            + size * (1 + share)
            + sum(given * (1 + share) for given, share in to_come)
        )
        room = self._num_bytes / 2 if self._outside is None else self._num_bytes - self._outside[0]
        if is_short := needed > room:
            self._again[name], self._inputs = size * share, self._inputs + size
        else:
            self._kept += size * (1 + share)
        return is_short

    def learn(self, name: str, output: Any, given: Iterable[Any]) -> Any:
        """The output of a module that does not run again, looked at."""
        kind, size, before, self._before = (
            self._kinds[name],
            self._given.get(name, 0),
            self._before,
            [],
        )
        keeps_them = all(
            version_of(each) == version for each, version in before
        )  # else it cannot run again
        if kind not in self._shares and size and keeps_them:
            self._shares[kind] = kept_bytes(output, given, self._tensors) / size
            self._kept += size * (1 + self._shares[kind])
        return output

    def ends_in(self, loss: Tensor) -> str | None:
        """The pass ends in the backward of a loss. What is to be said of it, once."""
        was_known, given = self._outside is not None, sum(self._given.values())
        if self._outside is None or given > self._outside[1]:
            self._outside = max(0.0, kept_bytes(loss, (), self._tensors) - self._kept), given
        again, largest = list(self._again), max(self._again.values(), default=0.0)
        needed = self._outside[0] + self._inputs + max(self._kept, largest)
        self._begin()
        if not (was_known and again) or self._has_told:
            return None
        self._has_told = True
        return (
            f"a step's backward needs {format_bytes(needed)}, parameters leave"
            f" {format_bytes(self._num_bytes)} for it: "
            f"{len(again)} of {len(self._kinds)} modules run again in it, from {again[0]} to"
            f" {again[-1]}"
        )


def kept_bytes(results: Any, until: Any, apart: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps for the backward of `results` down to `until`, beside these and the
    memory of `apart`.

    What hooks have put in the place of tensors (what runs again, parameters in parts) does not
    count.
    """
    ends = [each for each in tree_leaves(until) if isinstance(each, Tensor)]
    seen: set[Any] = {None, *(each.grad_fn for each in ends)}
    waiting: set[Any] = {
        each.grad_fn for each in tree_leaves(results) if isinstance(each, Tensor)
    } - seen
    own, found = set(apart), dict[int, int]()
    while waiting:
        node = waiting.pop()
        seen.add(node)
        waiting |= {before for before, _ in node.next_functions} - seen
        for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
            with suppress(RuntimeError):  # an earlier backward has dropped it
                saved = (getattr(each, "data", None) for each in tree_leaves(getattr(node, name)))
                kept = (t for t in saved if isinstance(t, Tensor) and t.layout is torch.strided)
                # A parameter whose data was exchanged since then (ZeRO-2) is known by itself.
                storages = [t.untyped_storage() for t in kept if own.isdisjoint((t, t._base))]
                found |= {storage._cdata: storage.nbytes() for storage in storages}
    known = {
        each.untyped_storage()._cdata for each in (*ends, *own) if each.layout is torch.strided
    }
    return sum(size for storage, size in found.items() if storage not in known)


def _spaces(module: nn.Module) -> Iterator[dict[str, Any]]:
    for each in module.modules():
        yield from (vars(each), each._buffers)


def _as_it_is(module: nn.Module, arguments: Iterable[Any]) -> Callable[[], None]:
    """What lets all that a module's tree and other objects hold, and random numbers to come, be as
    now; no tensors.
    """
    skipped, seen = (
        framework_attributes(),
        set(map(id, module.modules())),
    )  # whose own attributes are `_spaces`
    attributes = (
        value for space in _spaces(module) for key, value in space.items() if key not in skipped
    )
    values = [
        v for v in (*attributes, *arguments) if not isinstance(v, Tensor | int | float | str | None)
    ]
    values += [random.random.__self__, np.random.rand.__self__]  # type: ignore[attr-defined]
    kept: list[Any] = [KeptNames("", space, dict(space)) for space in _spaces(module)]
    kept += [each for value in values for each in kept_in(value, "", seen)]

    def put_all_back() -> None:
        for each in kept:
            each.restore()

    return put_all_back


class ForwardSnapshot:
    """Where a forward of a module began, to begin there again."""

    def __init__(self, name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._name, self._module, self._has_begun = name, module, False
        self._given = [each for each in given if not isinstance(each, Tensor)]
        self._put_back = _as_it_is(module, self._given)
        self._values = {t: t.detach().clone() for t in self._own_tensors()}
        leaves = (each for each in tree_leaves(given) if isinstance(each, Tensor))
        self._versions = WeakIdKeyDictionary({t: version_of(t) for t in (*self._values, *leaves)})

    def _own_tensors(self) -> list[Tensor]:
        """Buffers, and attributes that are tensors of no graph."""
        values = (value for space in _spaces(self._module) for value in space.values())
        return [value for value in values if isinstance(value, Tensor) and not value.requires_grad]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context of a run: of the first, or of one that begins again.

        Raises:
            RuntimeMismatchError: something that it cannot have back was changed since then.
        """
        if not self._has_begun:
            self._has_begun = True
            yield
            self._keep_changed()
            self._check()
            return
        self._check()
        put_back_now = _as_it_is(self._module, self._given)
        self._put_back()
        again = {id(t): self._values.get(t, t).clone() for t in self._own_tensors()}
        for space in _spaces(self._module):
            space.update(
                {key: again[id(value)] for key, value in space.items() if id(value) in again}
            )
        try:
            yield
        finally:
            put_back_now()

    def _check(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self._versions.items()):
            raise RuntimeMismatchError(
                f"what {self._name} computes with is changed in place before its backward, for"
                " which it runs again",
                "change a copy, or change it after the backward, or let all be kept (remat=False)",
            )

    def _keep_changed(self) -> None:
        """Values are kept of what the first run has changed, and of vectors: norms update their
        statistics unseen.
        """
        for tensor in list(self._values):
            is_kept = tensor.ndim < 2 or version_of(tensor) != self._versions[tensor]
            del (self._versions if is_kept else self._values)[tensor]
        for (
            each
        ) in self._module.modules():  # not `parameters()`: these may have to be gathered for it
            self._versions.update(
                {p: p._version for p in dict.values(each._parameters) if p is not None}
            )
