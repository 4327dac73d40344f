"""Optimizers that hold others, such as Muon and AdamW in a chain, or Lookahead around either: the
groups, states and parameters of all of them.

An optimizer that holds none has only its own.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

T = TypeVar("T")

# Attributes in which no optimizers are looked for: they have an entry for each parameter.
_OF_PARAMETERS = ("state", "param_groups")


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and all that it holds, the outermost first, in a fixed order."""
    result: list[Optimizer] = [optimizer]
    known = {id(optimizer)}
    for holder in result:
        for held in held_by(holder):
            if id(held) not in known:
                known.add(id(held))
                result.append(held)
    return result


def held_by(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in attributes of this one, and in lists, tuples and dictionaries that
    are its attributes.

    Each is listed once. `_OF_PARAMETERS` are attributes that are not searched.
    """
    held: list[Optimizer] = []
    for name, value in vars(optimizer).items():
        if name not in _OF_PARAMETERS:
            held += _once(_optimizers_among(value))
    return _once(held)


def _optimizers_among(value: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in a value of an attribute."""
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _optimizers_among(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _optimizers_among(entry)


def groups_in(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of the optimizer and of all that it holds.

    A group that several of them share is there once.
    """
    return _once(group for one in optimizers_in(optimizer) for group in one.param_groups)


def states_in(optimizer: Optimizer) -> list[MutableMapping[nn.Parameter, Any]]:
    """Return the states of the optimizer and of all that it holds, a shared one once.

    Views that an optimizer makes of others' states are left out.
    """
    states = (vars(one).get("state") for one in optimizers_in(optimizer))
    return _once(state for state in states if isinstance(state, MutableMapping))


def parameters_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in a fixed order."""
    return _once(parameter for group in groups_in(optimizer) for parameter in group["params"])


def _once(items: Iterable[T]) -> list[T]:
    """Return the items in order, an object that comes again only once."""
    return list({id(item): item for item in items}.values())
