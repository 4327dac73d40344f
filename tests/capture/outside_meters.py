"""Meters and registries of a test model that stand in a file of their own, as users write them."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

ITEMS: list[Any] = []
TOTALS: dict[str, Any] = {"loss": 0.0}
CALLS = 0


class Meter:
    """Keeps all values in every usual way."""

    every: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.count = 0
        self.by_name: dict[str, list[Any]] = {}
        self.last: dict[str, Any] = {}
        self.recent: deque[Any] = deque(maxlen=2)

    def update(self, value: Any) -> None:
        """Append to a list and count."""
        self.values.append(value)
        self.count += 1

    def record(self, name: str, value: Any) -> None:
        """Append to a list that is made at its first use."""
        if name not in self.by_name:
            self.by_name[name] = []
        self.by_name[name].append(value)


METER = Meter()
METERS = {"loss": Meter()}
GROUPS: defaultdict[str, list[Any]] = defaultdict(list)


@dataclass
class Slots:
    """A record of slots."""

    __slots__ = ("values",)
    values: list[Any]


SLOTS = Slots([])


@dataclass
class Record:
    """A record with fields."""

    values: list[Any] = field(default_factory=list)


RECORD = Record()


class Store:
    """A registry without objects."""

    items: ClassVar[list[Any]] = []
    _hidden: ClassVar[dict[str, Any]] = {}
    count = 0

    class Inner:
        """A registry in a registry."""

        items: ClassVar[list[Any]] = []

    @classmethod
    def add(cls, value: Any) -> None:
        """Append to the class's list."""
        cls.items.append(value)

    @staticmethod
    def bump() -> None:
        """Count in the class."""
        Store.count += 1


class Derived(Store):
    """Its list is its base class's."""


class Writer(threading.Thread):
    """A thread with a list of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.values: list[Any] = []


WRITER = Writer()
HOOKS = {"loss": METER.update}
CALLBACKS = [Store.add]


def record(value: Any) -> None:
    """Append to a list of this file."""
    ITEMS.append(value)


def count() -> None:
    """Count in this file."""
    global CALLS
    CALLS += 1
