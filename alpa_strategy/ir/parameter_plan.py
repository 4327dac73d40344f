"""How parameters are stored on a mesh: one `ParameterMode` per mesh axis, and the `ParameterPlan`
that combines them.
"""

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Any

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from alpa_strategy.ir.placement import (
    INVARIANT,
    REPLICATE,
    DualLayout,
    DualPlacement,
    Layout,
    shard,
)

_MODE = re.compile(r"(R\*?)|([SG])(\d+)")


class Storage(Enum):
    """How a parameter is stored along one mesh axis, and when it is gathered for its uses."""

    INVARIANT = "R"
    """Unsharded; every device computes the full gradient."""

    REPLICATE = "R*"
    """Unsharded; the gradient is all-reduced once per step (data parallel)."""

    SHARD = "S"
    """Sharded; used as shards (tensor parallel) or gathered at each use (ZeRO-3)."""

    GATHER_ONCE = "G"
    """Sharded; gathered, and the gradient reduce-scattered, once per step (ZeRO-1)."""


@dataclass(frozen=True, eq=False)
class ParameterMode:
    """The storage placement of a parameter on one mesh axis.

    Instances come from `parse` alone, which returns the same object for the same text. They are
    compared by identity, because planning hashes them by the million.

    Pins and plan files write them as `R`, `R*`, `S<dim>` or `G<dim>`.
    """

    storage: Storage

    # The sharded dim; None if the parameter is unsharded on this axis.
    dim: int | None = None

    @classmethod
    @cache
    def parse(cls, text: str) -> "ParameterMode":
        """Return the mode written as `R`, `R*`, `S<dim>` or `G<dim>`.

        Raises:
            ValueError: `text` is none of these.
        """
        match = _MODE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a mode")
        unsharded, sharded, dim = match.groups()
        if unsharded:
            return cls(Storage(unsharded))
        return cls(Storage(sharded), int(dim))

    def __str__(self) -> str:
        if self.dim is None:
            return self.storage.value
        return f"{self.storage.value}{self.dim}"

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterMode.parse, (str(self),)

    @property
    def is_unsharded(self) -> bool:
        """Whether every device of the axis stores the full parameter (`R`, `R*`)."""
        return self.dim is None

    @property
    def is_shard(self) -> bool:
        """Whether it is stored in shards that the step takes as they are (`S<dim>`)."""
        return self.storage is Storage.SHARD

    @property
    def is_gathered_once(self) -> bool:
        """Whether it is stored in shards that are gathered once per step (`G<dim>`)."""
        return self.storage is Storage.GATHER_ONCE

    @property
    def stored(self) -> Placement:
        """The placement of the stored values."""
        if self.dim is None:
            return Replicate()
        return Shard(self.dim)

    def step_placement(self, requires_grad: bool = True) -> DualPlacement:
        """Return the placement of the parameter and of its gradient inside the step."""
        if self.is_shard and self.dim is not None:
            return shard(self.dim)
        if not requires_grad or self.storage is Storage.INVARIANT:
            return INVARIANT
        return REPLICATE

    def shifted(self, by: int) -> "ParameterMode":
        """Return the mode with its dim moved by `by`: `S1` shifted by -1 is `S0`.

        `R` and `R*` have no dim and are returned as they are.
        """
        if self.dim is None:
            return self
        return ParameterMode.parse(f"{self.storage.value}{self.dim + by}")


def parse_modes(text: str) -> tuple[ParameterMode, ...]:
    """Return the modes of a text such as `"R* S0"`, one per mesh axis.

    Raises:
        ValueError: a word of `text` is not a mode.
    """
    return tuple(map(ParameterMode.parse, text.split()))


def modes_text(modes: tuple[ParameterMode, ...]) -> str:
    """Return `modes` as text; the inverse of `parse_modes`."""
    return " ".join(map(str, modes))


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is stored and gathered for its uses; one mode per mesh axis.

    Dims are those that the step sees. If the step sees a fused projection in `num_segments`
    segments (query, key and value in one weight: 3), that is one dim more than the module has.
    """

    # One per mesh axis, in the step's dims.
    modes: tuple[ParameterMode, ...]

    # Number of equal segments of a fused projection; 1 for any other parameter.
    num_segments: int = 1

    # Whether the local shard, its gradient and the optimizer's state are stored in host memory.
    on_host: bool = False

    # Whether the gradient is reduced over devices in fp32 or wider, whatever its own dtype.
    sums_in_fp32: bool = False

    @classmethod
    def parse(cls, text: str, num_segments: int = 1) -> "ParameterPlan":
        """Return the plan for modes in the step's dims: `ParameterPlan.parse("R* S0")`.

        Raises:
            ValueError: a word of `text` is not a mode.
        """
        return cls(parse_modes(text), num_segments)

    @property
    def layout(self) -> Layout:
        """The storage layout, in the step's dims."""
        return Layout(mode.stored for mode in self.modes)

    @property
    def module_modes(self) -> tuple[ParameterMode, ...]:
        """The modes in the dims of the module's parameter, which users read and write."""
        if self.num_segments == 1:
            return self.modes
        return tuple(mode.shifted(-1) for mode in self.modes)

    @property
    def is_unsharded(self) -> bool:
        """Whether every device stores the full parameter."""
        return all(mode.is_unsharded for mode in self.modes)

    @property
    def uses_shards(self) -> bool:
        """Whether the step takes it in shards on some axis.

        That is tensor parallelism, or ZeRO-3 if the shards are gathered at each use.
        """
        return any(mode.is_shard for mode in self.modes)

    @cached_property
    def is_gathered_once(self) -> bool:
        """Whether it is gathered once per step on some axis (ZeRO-1)."""
        return any(mode.is_gathered_once for mode in self.modes)

    @cached_property
    def is_fetched(self) -> bool:
        """Whether it is copied from host memory for each use.

        Its gradient is then complete as soon as autograd has computed it. Any other parameter in
        host memory is copied once per step, and its gradient is reduced once per step.
        """
        needs_no_step_collective = all(
            mode.storage in (Storage.INVARIANT, Storage.SHARD) for mode in self.modes
        )
        return self.on_host and needs_no_step_collective

    def step_layout(self, requires_grad: bool = True) -> DualLayout:
        """Return the layout of the parameter and of its gradient inside the step."""
        return tuple(mode.step_placement(requires_grad) for mode in self.modes)
