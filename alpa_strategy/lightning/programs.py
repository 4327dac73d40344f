"""Programs: captured steps and what runs them, by what they serve. Those used last are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from alpa_strategy.capture.non_tensor_inputs import leaves_hold
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import AttributeCheck


@dataclass(frozen=True)
class Program:
    """A captured step and what runs it here (`lowered`: a LoweredStep, or what runs the stages of a pipeline)."""

    step: StepGraph
    lowered: Any
    attributes: AttributeCheck

    def fits(self, counters: dict[str, int]) -> bool:
        """True when the step's Python would take the same path for these counters."""
        return all(guard.holds(**counters) for guard in self.step.guards)

    def change(self, batch: Any) -> str | None:
        """What the step reads besides tensors and counters and has changed since it was captured; None: nothing."""
        if not leaves_hold(self.step.leaves, batch):
            return "a value in the batch that is no tensor"
        return self.attributes.changed()


P = TypeVar("P", bound=Program)


class Programs(Generic[P]):
    """Programs by key: what kind of batch they are for.

    Args:
        max_keys: keys of which programs are kept, those used last.
        max_of_key: programs kept of a key, those made last.
        drop: told of each `lowered` that no program has any more.
    """

    def __init__(self, max_keys: int, max_of_key: int, drop: Callable[[Any], None]) -> None:
        self._max_keys, self._max_of_key, self._drop = max_keys, max_of_key, drop
        self._by_key: OrderedDict[Hashable, list[P]] = OrderedDict()

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._by_key)

    def of(self, key: Hashable) -> tuple[P, ...]:
        """The programs of a key, those made last at the end."""
        return tuple(self._by_key.get(key, ()))

    def fitting(self, key: Hashable, counters: dict[str, int], batch: Any) -> tuple[int | None, str | None]:
        """The index of the key's program that runs the batch, or what has changed since one that would."""
        changed: str | None = None
        for index, program in reversed(list(enumerate(self.of(key)))):
            if program.fits(counters):
                changed = program.change(batch)
                if changed is None:
                    return index, None
        return None, changed

    def use(self, key: Hashable) -> None:
        """A program of the key is used."""
        self._by_key.move_to_end(key)

    def add(self, key: Hashable, program: P) -> None:
        """Keep a new program, which is used now; the oldest go where there are too many."""
        programs = self._by_key.setdefault(key, [])
        programs.append(program)
        self.use(key)
        dropped = programs[: -self._max_of_key]
        del programs[: -self._max_of_key]
        while len(self._by_key) > self._max_keys:
            dropped += self._by_key.popitem(last=False)[1]
        kept = {id(each.lowered) for programs in self._by_key.values() for each in programs}
        for lowered in {id(each.lowered): each.lowered for each in dropped}.values():
            if id(lowered) not in kept:
                self._drop(lowered)
