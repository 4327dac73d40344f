"""Captured steps and what runs them, by what they serve. Those used last are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from alpa_strategy.capture.non_tensor_inputs import leaves_hold
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.guards import AttributeCheck
from alpa_strategy.lightning.digests import LeafAgreement
from alpa_strategy.microbatch.microstep import Cut
from alpa_strategy.pipeline.step_programs import StepProgram


@dataclass(frozen=True)
class CapturedStep:
    """A captured step, what runs it here, and what of the module it was captured with."""

    step: StepGraph
    program: StepProgram
    attributes: AttributeCheck
    leaves: LeafAgreement  # what must be the same in the batches of all ranks
    own_rows: Mapping[int, Cut]  # see `rows_of_ranks`

    def fits(self, counters: dict[str, int]) -> bool:
        """True when the step's Python would take the same path for these counters."""
        return all(guard.holds(**counters) for guard in self.step.guards)

    def change(self, batch: Any) -> str | None:
        """What the step reads besides tensors and counters and has changed since it was captured; None: nothing."""
        if not leaves_hold(self.step.leaves, batch):
            return "a value in the batch that is no tensor"
        return self.attributes.changed()


class CapturedSteps:
    """By key: what kind of batch they are for.

    Args:
        max_keys: keys of which steps are kept, those used last.
        max_of_key: steps kept of a key, those captured last.
        drop: told of each program that no step has any more.
    """

    def __init__(self, max_keys: int, max_of_key: int, drop: Callable[[StepProgram], None]) -> None:
        self._max_keys, self._max_of_key, self._drop = max_keys, max_of_key, drop
        self._by_key: OrderedDict[Hashable, list[CapturedStep]] = OrderedDict()

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._by_key)

    @property
    def steps(self) -> list[StepGraph]:
        """All that are kept."""
        return [captured.step for steps in self._by_key.values() for captured in steps]

    def of(self, key: Hashable) -> tuple[CapturedStep, ...]:
        """The steps of a key, those captured last at the end."""
        return tuple(self._by_key.get(key, ()))

    def fitting(self, key: Hashable, counters: dict[str, int], batch: Any) -> tuple[int | None, str | None]:
        """The index of the key's step that serves the batch, or what has changed since one that would."""
        changed: str | None = None
        for index, captured in reversed(list(enumerate(self.of(key)))):
            if captured.fits(counters):
                changed = captured.change(batch)
                if changed is None:
                    return index, None
        return None, changed

    def use(self, key: Hashable) -> None:
        """A step of the key is used."""
        self._by_key.move_to_end(key)

    def add(self, key: Hashable, captured: CapturedStep) -> None:
        """Keep a new step, which is used now; the oldest go where there are too many."""
        steps = self._by_key.setdefault(key, [])
        steps.append(captured)
        self.use(key)
        dropped = steps[: -self._max_of_key]
        del steps[: -self._max_of_key]
        while len(self._by_key) > self._max_keys:
            dropped += self._by_key.popitem(last=False)[1]
        kept = {id(each.program) for steps in self._by_key.values() for each in steps}  # equal graphs share one
        for program in {id(each.program): each.program for each in dropped}.values():
            if id(program) not in kept:
                self._drop(program)
