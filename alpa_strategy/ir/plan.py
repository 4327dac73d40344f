"""Plan: the whole decision, as a small JSON file that a person can read and edit (docs/formulas.md#plan-file)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpa_strategy.errors import PlanError
from alpa_strategy.files import BadFileError, read_json, write_json
from alpa_strategy.ir.plan_file import plan_fields, plan_to_data
from alpa_strategy.ir.stage_plan import Collective, Fingerprint, Predicted, StagePlan

AS_WRITTEN = "as written"  # the schedule of a plan whose steps are not captured


@dataclass(frozen=True)
class Plan:
    """The whole decision. Frozen; `save` and `load` are inverse.

    Attributes:
        fingerprint: what it was made for.
        stages: in pipeline order (one for now).
        num_microbatches, schedule: 1 and "none" for a single stage; `AS_WRITTEN` where nothing but the storage of
            parameters is decided.
        predicted: prediction for the whole step on the slowest device.
        baselines: name -> predicted seconds per step of named alternatives under the same costs (None: does not fit).
        gap: how far `predicted.step_seconds` is from a lower bound, as a share of it; 0.0 when proved optimal. Of one
            stage, of all plans of one stage; else of all stages, meshes and layouts with so many micro-batches.
        notes: things that a user should know (replicated ops, unproved optimality, ...).
        solver_seconds: how long planning took, by phase.
        cluster_name: for display.
    """

    fingerprint: Fingerprint
    stages: tuple[StagePlan, ...]
    predicted: Predicted
    num_microbatches: int = 1
    schedule: str = "none"
    baselines: dict[str, float | None] = field(default_factory=dict)
    gap: float = 0.0
    notes: tuple[str, ...] = ()
    solver_seconds: dict[str, float] = field(default_factory=dict)
    cluster_name: str = ""

    @property
    def is_pipelined(self) -> bool:
        """Whether it is more than one stage that runs the whole batch at once."""
        return len(self.stages) > 1 or self.num_microbatches > 1 or any(stage.remat for stage in self.stages)

    @property
    def is_as_written(self) -> bool:
        """Whether every rank runs the user's own step, on its own batch."""
        return self.schedule == AS_WRITTEN

    def collectives(self) -> list[Collective]:
        """Every kind of collective of every stage, with kind, mesh axis, bytes and times per step."""
        return [c for stage in self.stages for c in stage.collectives]

    def save(self, path: str | Path) -> None:
        """Write JSON atomically (temporary file in the same folder, then rename): a reader never sees half a plan."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; PlanError when the file is unreadable, of another format version, or incomplete."""
        try:
            data = read_json(path)
        except OSError as error:
            raise PlanError(f"cannot read the plan file {path}: {error.strerror}", "check the path") from error
        except BadFileError as error:
            raise PlanError(f"the plan file {path} {error}", "delete it, or give another one") from error
        try:
            return cls.from_dict(data)
        except PlanError as error:
            raise PlanError(f"the plan file {path} cannot be used: {error.problem}", error.fix) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return plan_to_data(self)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Inverse of `to_dict`; PlanError names the field that is missing or wrong."""
        return cls(**plan_fields(data))
