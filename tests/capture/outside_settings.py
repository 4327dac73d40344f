"""Settings of a test model that stand in a file of their own, as users write them."""

from __future__ import annotations

from typing import Any

TEMPERATURE = 2.0
UNUSED = 1.0


class Defaults:
    """Settings in a class."""

    scale = 3.0
    other = 5.0


class Cache:
    """What a user's code remembers between calls."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}


CACHE = Cache()

COOLING = 0.5


def cooled(value: Any) -> Any:
    """A function whose file has the number that it reads."""
    return value * COOLING
