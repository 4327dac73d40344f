"""Lists of the module that the step only appends to (`self.outputs.append(loss)`): part of what the step gives back.

Such a list is replaced by a stand-in while the step is traced: what is appended becomes an output of the graph, and
nothing can be read, so the list's content does not matter to the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from alpa_strategy.capture.python_state import patched
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.graph import ListPlace
from alpa_strategy.ir.user_code import user_frame


class AppendedList:
    """Stands for a list that is only appended to; everything that is not defined here is a look at its content."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._items: list[Any] = []

    def append(self, item: Any) -> None:
        """As of a list."""
        self._items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """As of a list."""
        self._items.extend(items)

    def __iadd__(self, items: Iterable[Any]) -> AppendedList:  # type: ignore[misc]
        self.extend(items)
        return self

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


class _AnyList:
    """Equals any list."""

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __eq__(self, other: object) -> bool:
        return type(other) is list  # content and identity do not matter: users empty it or make a new one


@dataclass(frozen=True)
class StandIns:
    """What stood in for lists that are appended to."""

    lists: dict[ListPlace, AppendedList]

    def appended(self) -> list[list[Any]]:
        """What was appended to each list."""
        return [each._items for each in self.lists.values()]

    def snapshots(self) -> dict[tuple[str, str], Any]:
        """What the attributes, by (path of the submodule, name), must equal in later steps: some list."""
        return {(place.module, place.name): _AnyList() for place in self.lists}


@contextmanager
def lists_standing_in(module: nn.Module, places: Iterable[ListPlace]) -> Iterator[StandIns]:
    """Let stand-ins take the place of these lists."""
    found = StandIns({place: AppendedList(str(place)) for place in places})
    # The attribute may be the class's: the stand-in then hides it.
    owners = ((vars(module.get_submodule(place.module)), place.name, each) for place, each in found.lists.items())
    with patched(owners):
        yield found
