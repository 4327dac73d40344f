"""Forwards of modules of which autograd keeps the inputs alone: in the backward they run again (PyTorch's checkpoint).

The second run finds what the first one found: random numbers, buffers, attributes, and the containers in them. What it
changes of these is taken back, so that statistics are updated once. What it cannot have as it was (a weight that was
changed in between) is an error. Works on steps as they are written, which nobody has captured.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from alpa_strategy.capture.python_state import (
    KeptGenerator,
    changed_names,
    framework_attributes,
    kept_in,
    patched,
    put_back,
    version_of,
)
from alpa_strategy.errors import OptionError, RuntimeMismatchError

_LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential


def modules_to_make_again(root: nn.Module, remat: bool | tuple[str, ...] | None) -> dict[str, nn.Module]:
    """By name, the outermost modules that `PlanOptions.remat` means in a step as it is written.

    Names are those of modules; `True` means the items of the outermost lists of modules, and sequences of layers.

    Raises:
        OptionError: there are none.
    """
    if remat is True:
        found = dict(_repeated("", root))
        if not found:
            raise OptionError(
                f"remat=True makes the items of ModuleLists and Sequentials again where a step runs as it is written, "
                f"and {type(root).__name__} has none",
                'name modules, as in remat=["encoder"], or leave remat out',
            )
        return found
    found = {}
    for name in remat or ():
        own = {k: m for path, each in root.named_modules() if fnmatchcase(path, name) for k, m in _callable(path, each)}
        if not own:
            raise OptionError(
                f"remat={name!r} names no module, and a step that runs as it is written has no other names",
                'name modules as named_modules() does, such as "blocks.*"',
            )
        found |= own
    return {k: m for k, m in found.items() if k and not any(k.startswith(f"{other}.") for other in found)}


def _callable(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module; in place of a list, which nobody calls, its items."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _callable(f"{path}.{name}", child)


def _repeated(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Items of the outermost lists below a module, and sequences of nothing but layers."""
    is_list = isinstance(module, _LISTS)
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    if is_list and all(_is_layer(child) for _, child in children):
        if isinstance(module, nn.Sequential) and len(children) > 1:
            yield path, module
        return
    for name, child in children:
        if is_list and not isinstance(child, _LISTS):
            if not _is_layer(child):
                yield name, child
        else:
            yield from _repeated(name, child)


def _is_layer(module: nn.Module) -> bool:
    """One of PyTorch's without parts: it keeps what it is given, which making it again would keep as well."""
    return next(module.children(), None) is None and type(module).__module__.startswith("torch.nn.")


class MadeAgain:
    """See the file's docstring. Modules run as they do until `in_use`, and where autograd does not watch.

    Args:
        modules: by name.
        around: context around a module's forward without its hooks, in which its parameters are whole.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        around: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.modules, self._around = dict(modules or {}), around or (lambda _module: nullcontext())
        self._is_active = False

    def installed(self) -> AbstractContextManager[None]:
        """Context in which the modules' forwards are ours."""
        return patched((m, "forward", partial(self._forward, name, m, m.forward)) for name, m in self.modules.items())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context of a step, and of forwards that run again for it."""
        was_active, self._is_active = self._is_active, True
        try:
            yield
        finally:
            self._is_active = was_active

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy of the module is nobody's

    @torch.compiler.disable
    def _forward(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_function = torch._C._functorch.peek_interpreter_stack() is not None  # whose tensors are no one's to keep
        if not self._is_active or is_function or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = (*args, *kwargs.values())
        start = _Start(name, module, given)
        unique = list({id(value): value for value in given}.values())  # code asks whether `query is key`
        places = [next(i for i, value in enumerate(unique) if value is each) for each in given]

        def run(*unique: Any) -> Any:
            again = [unique[place] for place in places]
            with self.in_use(), start.entered(), self._around(module):
                return forward(*again[: len(args)], **dict(zip(kwargs, again[len(args) :], strict=True)))

        return checkpoint(run, *unique, use_reentrant=False)


class _Python:
    """What a module's tree and the arguments of a call hold beside tensors, and the random numbers to come."""

    def __init__(self, module: nn.Module, arguments: Iterable[Any]) -> None:
        own, seen, skipped = [vars(each) for each in module.modules()], set[int](), framework_attributes()
        self._names = [(names, dict(names)) for names in (*own, *(each._buffers for each in module.modules()))]
        attributes = (value for names in own for key, value in names.items() if key not in skipped)
        values = [v for v in (*attributes, *arguments) if not isinstance(v, Tensor | int | float | str | None)]
        self._kept = [each for value in values for each in kept_in(value, "", "", seen)]
        for each in (random.random.__self__, np.random.rand.__self__):  # type: ignore[attr-defined]
            self._kept.append(KeptGenerator("", each, each.__getstate__()))
        self._generators = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]

    def restore(self) -> None:
        """Let all of it be as it was."""
        for names, before in self._names:
            put_back(names, before, changed_names(names, before))
        for each in self._kept:
            each.restore()
        for generator, state in self._generators:
            generator.set_state(state)


class _Start:
    """Where a forward of a module began, to begin there again.

    Args:
        name: of the module, for messages.
        arguments: of the call.
    """

    def __init__(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._name, self._module, self._has_begun = name, module, False
        self._arguments = [each for each in arguments if not isinstance(each, Tensor)]
        self._python = _Python(module, self._arguments)
        self._values = {t: t.detach().clone() for t in self._own_tensors()}
        self._versions = {t: version_of(t) for t in self._values}
        # A user's own checkpoint around this one does not keep what it is given.
        leaves = (each for each in tree_leaves(arguments) if isinstance(each, Tensor))
        self._given = [(weakref.ref(each), version_of(each)) for each in leaves]

    def _own_tensors(self) -> Iterator[Tensor]:
        """Buffers, and attributes that are tensors of no graph."""
        for names in (names for each in self._module.modules() for names in (each._buffers, vars(each))):
            yield from (t for t in names.values() if isinstance(t, Tensor) and not t.requires_grad)

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
            return
        given = ((tensor, version) for ref, version in self._given if (tensor := ref()) is not None)
        if any(version_of(tensor) != version for tensor, version in (*given, *self._versions.items())):
            raise RuntimeMismatchError(
                f"what {self._name} computed with was changed in place before its backward, for which it runs again",
                "change it after the backward, or leave the module out of remat",
            )
        now = _Python(self._module, self._arguments)
        self._python.restore()
        again = {id(t): self._values.get(t, t).clone() for t in self._own_tensors()}
        for names in (names for each in self._module.modules() for names in (each._buffers, vars(each))):
            names.update({key: again[id(value)] for key, value in names.items() if id(value) in again})
        try:
            yield
        finally:
            now.restore()

    def _keep_changed(self) -> None:
        """Values are kept of what the first run has changed, and of vectors: norms update their statistics unseen."""
        changed = {t for t in self._values if version_of(t) != self._versions[t]}
        self._values = {t: value for t, value in self._values.items() if t in changed or t.ndim < 2}
        self._versions = {t: v for t, v in self._versions.items() if t not in self._values}
        for each in self._module.modules():  # not `parameters()`: these may have to be gathered for it
            self._versions |= {p: p._version for p in dict.values(each._parameters) if p is not None}
