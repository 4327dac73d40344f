"""Fresh copies of an optimizer for other parameters, on which it is tried.

An optimizer is made by its constructor, from its settings. One that holds others, or whose
constructor wants something else, is copied: its attributes, with the new parameters in the place of
its own and without state.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from alpa_strategy.ir.held_optimizers import groups_in, held_by, optimizers_in, parameters_in

# Members of a parameter group that are no settings.
MEMBERS = ("params", "param_names")
# In the place of a parameter that a copy does not have.
_GONE = object()
_UNCHANGED = (int, float, complex, bool, str, bytes, type(None), type, FunctionType, torch.dtype)


def rebuilt(
    optimizer: Optimizer, like: nn.Parameter, parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """Return a fresh optimizer that steps `parameters` as `optimizer` steps `like`, with the
    settings of its groups as schedulers left them, except that the rate is at least 1e-3 and
    kernels for devices are off.

    Raises whatever the optimizer's class does if neither its constructor nor a copy will do.
    """
    copied = _Copies(optimizer, like, parameters).of(optimizer)
    for group in groups_in(copied):
        group.update(_settings_to_try(group))
    return copied


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any] | None:
    """Return the optimizer's group with a parameter; None if there is none."""
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            return group
    return None


class _Copies:
    """Copies of an optimizer, of those that it holds, and of what they share."""

    def __init__(
        self, optimizer: Optimizer, like: nn.Parameter, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._like = like
        self._parameters = list(parameters)
        self._others = {id(p) for p in parameters_in(optimizer) if p is not like}
        # By the id of the original: a memo of `copy.deepcopy`.
        self._copies: dict[int, Any] = {}

    def of(self, optimizer: Optimizer) -> Optimizer:
        """Return the copy of one optimizer."""
        if id(optimizer) in self._copies:
            return self._copies[id(optimizer)]
        held = held_by(optimizer)
        if not held:
            # Any class of any package is made here, so any error may come.
            with suppress(Exception):
                return self._constructed(optimizer)
        for inner in held:
            self.of(inner)
        return self._copied(optimizer)

    def _constructed(self, optimizer: Optimizer) -> Optimizer:
        """Return a fresh optimizer of the same class and settings for the copies of the parameters,
        and record it as the copy.

        An optimizer of other parameters alone gets one parameter of its own: it does nothing here,
        but its holder calls it.
        """
        group = group_of(optimizer, self._like)
        parameters = self._parameters
        if group is None:
            # It does nothing here, but its holder calls it.
            group = optimizer.param_groups[0]
            parameters = [nn.Parameter(torch.zeros((1,) * group["params"][0].dim()))]
        fresh: Any = _constructed(optimizer, group, parameters)
        self._copies |= {id(optimizer): fresh, id(group): fresh.param_groups[0]}
        for name in ("param_groups", "state", "defaults"):
            if name in vars(optimizer):
                self._copies[id(vars(optimizer)[name])] = getattr(fresh, name)
        return fresh

    def _copied(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer with copies of the attributes. TypeError: as of `_converted`."""
        copied = object.__new__(type(optimizer))
        self._copies[id(optimizer)] = copied
        for name, value in vars(optimizer).items():
            if name == "step":
                # A scheduler's, around the class's own.
                continue
            if name.startswith("_optimizer_") and isinstance(value, Mapping):
                vars(copied)[name] = OrderedDict()
            elif name == "state":
                fresh: Any = defaultdict(dict) if isinstance(value, defaultdict) else {}
                vars(copied)[name] = self._copies.setdefault(id(value), fresh)
            else:
                vars(copied)[name] = self._converted(value)
        return copied

    def _converted(self, value: Any) -> Any:
        """Return the copy of a value of an attribute; `_GONE` if it belongs to other parameters.

        Raises:
            TypeError: the value is a module.
        """
        if id(value) in self._copies:
            return self._copies[id(value)]
        if value is self._like:
            return self._parameters[0]
        if id(value) in self._others:
            return _GONE
        if isinstance(value, _UNCHANGED):
            return value
        if isinstance(value, nn.Module):
            raise TypeError("an optimizer that holds a module cannot be copied")
        if isinstance(value, dict):
            return self._converted_dict(value)
        if isinstance(value, list | tuple):
            members = self._converted_members(value)
            result = members if isinstance(value, list) else tuple(members)
            self._copies[id(value)] = result
            return result
        return copy.deepcopy(value, self._copies)

    def _converted_members(self, values: Iterable[Any]) -> list[Any]:
        """Return copies of a list's members: all new parameters in the place of `like`."""
        members: list[Any] = []
        for value in values:
            if value is self._like:
                members += self._parameters
            else:
                members.append(self._converted(value))
        return [member for member in members if member is not _GONE]

    def _converted_dict(self, values: dict[Any, Any]) -> Any:
        """Return the copy of a dictionary: a group, settings, or a parameter's state; `_GONE` for
        the group of other parameters.
        """
        result = copy.copy(values)
        result.clear()
        self._copies[id(values)] = result
        for key, value in values.items():
            if id(key) in self._others:
                continue
            converted = self._converted(value)
            if converted is not _GONE:
                result[self._converted(key)] = converted
        is_group_of_others = "params" in values and not result["params"]
        if is_group_of_others:
            self._copies[id(values)] = _GONE
        return self._copies[id(values)]


def _constructed(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> Optimizer:
    """Return a fresh optimizer of the same class for `parameters`, with the settings of a group."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    settings: dict[str, Any] = {}
    for name, value in optimizer.defaults.items():
        if takes_any or name in accepted:
            settings[name] = copy.copy(group.get(name, value))
    for name, value in vars(optimizer).items():
        # Settings that are not of groups: the size of blocks.
        is_setting = isinstance(value, bool | int | float | str)
        if is_setting and name in accepted and name not in settings:
            settings[name] = value
    settings |= _settings_to_try(settings)

    group_options: dict[str, Any] = {}
    for name, value in group.items():
        # GaLore's `rank`.
        if name not in settings and name not in MEMBERS:
            group_options[name] = copy.copy(value)
    optimizer_class: Any = type(optimizer)
    if group_options:
        return optimizer_class([{**group_options, "params": parameters}], **settings)
    return optimizer_class(parameters, **settings)


def _settings_to_try(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, or members of a group, that a fresh copy has otherwise: a rate of at
    least 1e-3, and `fused` and `capturable` off where they are on.
    """
    changed: dict[str, Any] = {}
    if settings.get("lr") is not None:
        # A warmup begins at none.
        changed["lr"] = max(settings["lr"], 1e-3)
    # Kernels for devices: what they compute is the same, and the CPU tries it.
    changed |= {key: False for key in ("fused", "capturable") if settings.get(key)}
    return changed


class LeftAlone(TorchDispatchMode):
    """Context in which trying copies of an optimizer can do no harm: the optimizer's own parameters
    are not written to, and no process communicates.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._name = type(optimizer).__name__
        tensors = [p for p in parameters_in(optimizer) if not p.is_meta]
        self._storages = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(
                f"{self._name} communicates by itself ({func}): use its version for one device,"
                " whose work is divided among the devices"
            )
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.is_write:
                    self._check(value)
        return func(*args, **(kwargs or {}))

    def _check(self, written: Any) -> None:
        """Check that no written tensor is a parameter of the optimizer that is copied.

        Raises:
            RuntimeError: one is.
        """
        for tensor in pytree.tree_leaves(written):
            is_real = isinstance(tensor, Tensor) and not tensor.is_meta
            if is_real and tensor.untyped_storage()._cdata in self._storages:
                raise RuntimeError(f"a copy of {self._name} steps the parameters of the original")


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> list[Any]:
    """Return the values of a parameter's state, in the optimizer and in those that it holds."""
    values: list[Any] = []
    for one in optimizers_in(optimizer):
        state = vars(one).get("state", {})
        if parameter in state:
            values += state[parameter].values()
    return values


def periods_of(optimizer: Optimizer) -> set[int]:
    """Return the integers among the optimizer's settings: they may be numbers of steps after which
    it does something else.
    """
    values: list[Any] = []
    for one in optimizers_in(optimizer):
        values += vars(one).values()
    for group in groups_in(optimizer):
        values += group.values()
    return {value for value in values if type(value) is int}
