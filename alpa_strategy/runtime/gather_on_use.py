"""Parameters in parts under code that nobody has captured: each is whole while the module that owns it runs.

Forward hooks and the modules' own attribute access bring a parameter when it is needed and drop it afterwards; what
autograd saves of it is a recipe, by which it is gathered again (`comm/regather.py`). Elsewhere a parameter in parts has
its whole shape and no values (NaN): code that reaches it past its module computes nothing that could be taken for true.

Ranks need not do the same. They meet in rounds: each says what it needs next, everything that anybody needs is gathered
by all, and who is done serves the others. Nothing hangs where branches, shapes or numbers of batches differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alpa_strategy.comm.collectives import world_size
from alpa_strategy.comm.regather import Regather
from alpa_strategy.runtime.parameters import ParameterStore

_DONE, _GONE = -1, -2  # what a rank says instead of a unit


class Rounds:
    """Gatherings that all ranks make, whatever each of them needs. All methods are collective, in any order.

    Args:
        gather: all of a unit of parameters, by number; collective.
        group: of all ranks, with a CPU backend, used for nothing else.
    """

    def __init__(self, gather: Callable[[int], list[Tensor]], group: dist.ProcessGroup | None) -> None:
        self._gather, self._group = gather, group

    def fetch(self, unit: int) -> list[Tensor]:
        """What this rank needs now; others may get something else in the same round."""
        found: list[Tensor] = []
        for wanted in _units(self._said(unit)):
            values = self._gather(wanted)
            found = values if wanted == unit else found
        return found

    def finish(self, for_good: bool = False) -> None:
        """This rank needs no more: serve the others until all say so.

        Args:
            for_good: until nobody comes back, not even from here.
        """
        own = _GONE if for_good else _DONE
        while max(said := self._said(own)) > own:
            for unit in _units(said):
                self._gather(unit)

    def _said(self, own: int) -> list[int]:
        if world_size() == 1:
            return [own]
        said = torch.empty(world_size(), dtype=torch.int64)
        dist.all_gather_into_tensor(said, torch.tensor([own]), self._group)
        return said.tolist()


def _units(said: list[int]) -> list[int]:
    return sorted({unit for unit in said if unit >= 0})


class GatherOnUse:
    """See the file's docstring. Nothing happens between `leave` and `enter`: parameters are this device's parts.

    Args:
        module: whose parameters `store` holds.
        group: see `Rounds`.
        keeps: whether parameters stay whole from the first `enter` until `drop` (ZeRO-2), instead of while they are
            used.
    """

    def __init__(
        self, module: nn.Module, store: ParameterStore, group: dist.ProcessGroup | None, keeps: bool = False
    ) -> None:
        self._module, self._store, self._keeps = module, store, keeps
        self._sharded = store.sharded_parameters
        self._units: list[list[nn.Parameter]] = []
        self._unit_of: dict[nn.Parameter, int] = {}
        self._parts: dict[nn.Parameter, Tensor] = {}
        self._whole: dict[nn.Parameter, Tensor] = {}
        self._users: Counter[nn.Parameter] = Counter()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._plain: list[tuple[nn.Module, dict[str, Any]]] = []
        self._regather: Regather | None = None
        self._depth = 0
        self.rounds = Rounds(self._gather, group)
        self._install()

    @property
    def is_active(self) -> bool:
        """Whether parameters are gathered when they are used."""
        return self._depth > 0

    # In and out

    def enter(self, for_backward: bool = False) -> None:
        """From here on parameters are gathered when they are used.

        Args:
            for_backward: what autograd saves inside is gathered again in the backward.
        """
        self._depth += 1
        if self._depth > 1:
            return
        self._parts = {parameter: parameter.data for parameter in self._sharded}
        if self._keeps and not self._whole:  # all ranks are here together
            self._whole = {p: self._store.gather(self._name(p)) for p in self._sharded}
        for parameter in self._sharded:
            self._set(parameter, self._whole[parameter] if self._keeps else self._nothing(parameter))
        if for_backward and not self._keeps:
            self._regather = Regather(())
            self._regather.__enter__()

    def leave(self, failed: bool = False) -> None:
        """Parameters are parts again; what was changed in whole ones is kept. No communication."""
        self._depth -= 1
        if self._depth > 0:
            return
        if self._regather is not None:
            self._regather.__exit__(None, None, None)
            self._regather = None
        for parameter in () if failed else list(self._whole):
            self._take_changes(parameter)
        if not self._keeps:
            self._whole.clear()
        self._users.clear()
        for parameter, part in self._parts.items():
            self._set(parameter, part)
        self._parts = {}

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """As outside, within `enter` and `leave`."""
        depth, self._depth = self._depth, min(self._depth, 1)
        is_active, regathers = depth > 0, self._regather is not None
        if is_active:
            self.leave()
        try:
            yield
        finally:
            if is_active:
                self.enter(regathers)
                self._depth = depth

    def meet(self) -> None:
        """Before a collective of the step's own: serve the other ranks until all have come to theirs."""
        if self._depth and not self._keeps:
            self.rounds.finish()

    def drop(self) -> None:
        """Parts have new values: whole copies are old. Not between `enter` and `leave`."""
        self._whole.clear()

    def remove(self) -> None:
        """Give the module back as it was."""
        for hook in self._hooks:
            hook.remove()
        for owner, plain in self._plain:
            owner.__dict__["_parameters"] = plain
        self._hooks.clear()
        self._plain.clear()

    # While it is active

    def need(self, parameter: nn.Parameter) -> None:
        """Let a parameter be whole. Collective, see `Rounds`, unless it is."""
        if parameter in self._whole or parameter not in self._parts:
            return
        unit = self._unit_of[parameter]
        for each, whole in zip(self._units[unit], self.rounds.fetch(unit), strict=True):
            if each not in self._whole:
                self._whole[each] = whole
                self._set(each, whole)
                if self._regather is not None:
                    self._regather.know(self._parts[each], _Again(self, each), whole)

    def _before(self, owner: nn.Module, *_: Any) -> None:
        if self._depth and not self._keeps:
            for parameter in self._owned(owner):
                self.need(parameter)
                self._users[parameter] += 1

    def _after(self, owner: nn.Module, *_: Any) -> None:
        if not self._depth or self._keeps:
            return
        for parameter in self._owned(owner):
            self._users[parameter] -= 1
            if self._users[parameter] <= 0 and parameter in self._whole:
                self._take_changes(parameter)
                del self._whole[parameter]
                self._set(parameter, self._nothing(parameter))

    def _owned(self, owner: nn.Module) -> Iterator[nn.Parameter]:
        return (p for p in dict.values(owner._parameters) if p is not None and p in self._unit_of)

    def _install(self) -> None:
        known = set(self._sharded)
        for owner in self._module.modules():
            own = [p for p in owner._parameters.values() if p is not None and p in known]
            if not own:
                continue
            self._plain.append((owner, owner._parameters))
            owner.__dict__["_parameters"] = _NeedOnAccess(owner._parameters, self)
            if owner is not self._module:  # the step itself is no forward of the root's
                self._hooks.append(owner.register_forward_pre_hook(self._before))
                self._hooks.append(owner.register_forward_hook(self._after, always_call=True))
            if new := [p for p in dict.fromkeys(own) if p not in self._unit_of]:
                self._unit_of.update(dict.fromkeys(new, len(self._units)))
                self._units.append(new)

    def _gather(self, unit: int) -> list[Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            return [self._store.gather_like(self._name(p), self._parts[p]) for p in self._units[unit]]

    def _take_changes(self, parameter: nn.Parameter) -> None:
        """Into the part, of this device's own; `data`: nobody's version of it counts this."""
        if self._store.holds(parameter):
            with torch.inference_mode(False), torch.no_grad():
                own = self._store.shard_like(self._name(parameter), parameter.data)
                self._parts[parameter].data.copy_(own)

    def _name(self, parameter: nn.Parameter) -> str:
        name = self._store.name_of(parameter)
        assert name is not None
        return name

    def _nothing(self, parameter: nn.Parameter) -> Tensor:
        """NaN in the whole shape, one element of memory."""
        value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
        shape = self._store.whole_shape(self._name(parameter))
        return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(shape)

    @staticmethod
    def _set(parameter: nn.Parameter, data: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            parameter.data = data


class _Again:
    """How a parameter comes back in the backward: `values` as a Reshard has them."""

    def __init__(self, on_use: GatherOnUse, parameter: nn.Parameter) -> None:
        self._on_use, self._parameter = on_use, parameter

    def values(self, tensor: Tensor) -> Tensor:
        """All of the parameter; `tensor` is this device's part."""
        on_use, parameter = self._on_use, self._parameter
        whole = on_use._whole.get(parameter)
        if whole is not None:
            return whole
        unit = on_use._unit_of[parameter]
        both = zip(on_use._units[unit], on_use.rounds.fetch(unit), strict=True)
        return next(whole for each, whole in both if each is parameter)


class _NeedOnAccess(dict[str, Any]):
    """A module's own parameters by name, whole when somebody asks for one."""

    def __init__(self, plain: dict[str, Any], on_use: GatherOnUse) -> None:
        super().__init__(plain)
        self._on_use = on_use

    def __getitem__(self, name: str) -> Any:
        return self._needed(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._needed(super().get(name, default))

    def items(self) -> Any:
        return [(name, self._needed(parameter)) for name, parameter in super().items()]

    def values(self) -> Any:
        return [self._needed(parameter) for parameter in super().values()]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(super().items()),)  # a copy of the module is nobody's

    def _needed(self, parameter: Any) -> Any:
        if self._on_use.is_active and parameter is not None:
            self._on_use.need(parameter)
        return parameter
