"""Everything that a user may pin or tune. All defaults mean "solve it"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PARALLEL_NAMES = ("auto", "data", "zero1", "zero2", "zero3", "tensor")


@dataclass(frozen=True)
class PlanOptions:
    """What planning depends on (part of the fingerprint).

    Attributes:
        parallel: one name for every mesh axis, or one per axis of `logical_mesh`: `auto` (solved), `data`, `zero1` / `zero2`,
            `zero3`, `tensor`. Restricts the space; what is left open is solved.
        logical_mesh: shape of the device grid, or None to try all.
        placements: glob pattern of parameter names -> modes on the mesh axes such as `"S0"` or `"R S1"`
            (see `ParameterPlan`). Later patterns win.
        memory_limit: bytes per device, None for the device's own memory; `float("inf")` switches the limit off.
        memory_fraction: share of the device's memory that a plan may use when `memory_limit` is None.
        batch_scope: `rank`: every rank loads its own rows (as under DDP); `global`: the loader yields the whole batch on
            every rank.
        solver_seconds: time limit of one ILP solve; the gap is reported when it strikes.
        baselines: also predict data, zero2, zero3 and tensor plans for comparison (data is always predicted).
    """

    parallel: str | tuple[str, ...] = "auto"
    logical_mesh: tuple[int, ...] | None = None
    placements: tuple[tuple[str, str], ...] = ()
    memory_limit: float | None = None
    memory_fraction: float = 0.9
    batch_scope: str = "rank"
    solver_seconds: float = 60.0
    baselines: bool = False

    @classmethod
    def from_user(
        cls,
        *,
        parallel: str | Sequence[str] = "auto",
        logical_mesh: Sequence[int] | None = None,
        placements: Mapping[str, str] | None = None,
        **rest: object,
    ) -> PlanOptions:
        """Validate and freeze what a user wrote; OptionError names the option, the value and the allowed ones."""
        raise NotImplementedError


@dataclass(frozen=True)
class OptimizerInfo:
    """What planning needs to know of the optimizer.

    Attributes:
        state_bytes: bytes of optimizer state per parameter element (Adam on fp32: 8).
        element_wise: True when its update of a shard equals the shard of its update.
        name: class name, for messages.
    """

    state_bytes: float = 8.0
    element_wise: bool = True
    name: str = "Adam"


@dataclass(frozen=True)
class Limits:
    """Runtime knobs that no plan depends on."""

    plan_timeout_seconds: float = 3600.0
    collective_timeout_seconds: float = 1800.0
    bucket_bytes: int = 25 * 2**20
    extra: dict[str, object] = field(default_factory=dict)
