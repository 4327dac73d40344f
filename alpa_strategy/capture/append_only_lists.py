"""Lists of the module that the step only appends to (`self.outputs.append(loss)`): part of what the step gives back.

Such a list is replaced by a stand-in while the step is traced: what is appended becomes an output of the graph, and
nothing can be read, so the list's content does not matter to the graph. Dicts and lists around it (`self.outputs[
name]`) hand out their items, and what was handed out is guarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from alpa_strategy.capture.python_state import SomeItems, patched, snapshot
from alpa_strategy.capture.symbolic_scalars import StepCounter
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import ListPlace
from alpa_strategy.ir.user_code import user_frame

Keys = tuple[Any, ...]


class _Standin:
    """What the step sees in place of a container; everything that is not defined below is a look at its content."""

    def __init__(self, label: str) -> None:
        self._label = label

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CaptureError(
            f"the step appends to {self._label} and also looks at it ({user_frame()}): a captured step does not see "
            "what earlier steps left there",
            "read the list in a hook such as on_train_epoch_end",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __len__ = __iter__ = __contains__ = __bool__ = __reversed__ = __eq__ = __add__ = __radd__ = __mul__ = _refuse
    __setitem__ = __delitem__ = __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # type: ignore[assignment]  # as of lists


class AppendedList(_Standin):
    """Stands for a list that is only appended to."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._items: list[Any] = []

    def append(self, item: Any) -> None:
        """As of a list."""
        self._items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """As of a list."""
        self._items.extend(items)

    def __iadd__(self, items: Iterable[Any]) -> AppendedList:  # type: ignore[override,misc]
        self.extend(items)
        return self

    def snapshot(self) -> Any:
        """What the attribute must equal in later steps: some list."""
        return _AnyList()


class OpenContainer(_Standin):
    """Stands for a dict or list on the way to lists that are appended to: it hands out items, by key."""

    def __init__(self, label: str, content: Any, lists: dict[Keys, AppendedList], keys: Keys, read: dict) -> None:
        super().__init__(label)
        self._content, self._lists, self._keys, self._read = content, lists, keys, read

    def __getitem__(self, key: Any) -> Any:
        if type(key) is StepCounter:
            key.refuse()
        keys = (*self._keys, key)
        if keys in self._lists:
            self._read[keys] = None
            return self._lists[keys]
        item = self._content[key]
        if any(other[: len(keys)] == keys for other in self._lists):
            return OpenContainer(self._label, item, self._lists, keys, self._read)
        self._read[keys] = item
        return item

    def __setitem__(self, key: Any, value: Any) -> None:  # type: ignore[override]
        """`outputs[key] += ...` stores what `+=` gave: the list that is there already."""
        if self._lists.get((*self._keys, key)) is not value:
            self._refuse()

    def snapshot(self) -> Any:
        """What the attribute must equal in later steps: a container with the same items where the step read some."""
        return SomeItems({keys: _AnyList() if keys in self._lists else snapshot(v) for keys, v in self._read.items()})


class _AnyList:
    """Equals any list."""

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __eq__(self, other: object) -> bool:
        return type(other) is list  # content and identity do not matter: users empty it or make a new one


@dataclass(frozen=True)
class StandIns:
    """What stood in for lists that are appended to, and for attributes by (path of the submodule, name)."""

    lists: dict[ListPlace, AppendedList]
    attributes: dict[tuple[str, str], AppendedList | OpenContainer]

    def appended(self) -> list[list[Any]]:
        """What was appended to each list."""
        return [each._items for each in self.lists.values()]

    def snapshots(self) -> dict[tuple[str, str], Any]:
        """What the attributes must equal in later steps."""
        return {place: each.snapshot() for place, each in self.attributes.items()}


@contextmanager
def lists_standing_in(module: nn.Module, places: Iterable[ListPlace]) -> Iterator[StandIns]:
    """Let stand-ins take the place of these lists' attributes."""
    by_attribute: dict[tuple[str, str], list[ListPlace]] = {}
    for place in places:
        by_attribute.setdefault((place.module, place.name), []).append(place)
    found = StandIns({}, {})
    patches: list[tuple[dict[str, Any], str, Any]] = []
    for (path, name), members in by_attribute.items():
        attributes = vars(module.get_submodule(path))
        lists = {place.keys: AppendedList(str(place)) for place in members}
        found.lists.update({place: lists[place.keys] for place in members})
        # The attribute may be the class's: the stand-in then hides it.
        label, content = f"{path}.{name}".lstrip("."), getattr(module.get_submodule(path), name)
        stand_in = lists[()] if () in lists else OpenContainer(label, content, lists, (), {})
        found.attributes[path, name] = stand_in
        patches.append((attributes, name, stand_in))
    with patched(patches):
        yield found
