"""PlanStore: a folder of plan files, one per fingerprint. Finding none always comes with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.plan import Fingerprint, Plan


class PlanStore:
    """Plans below `folder`. The files are ordinary plan files; a broken one is reported and passed over."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._reported: set[Path] = set()  # broken files are reported once

    def path(self, fingerprint: Fingerprint) -> Path:
        """Where the plan of `fingerprint` is or would be."""
        return self.folder / f"{fingerprint.digest}.json"

    def find(self, fingerprint: Fingerprint) -> Plan | None:
        """The plan made for exactly this fingerprint, or None (`explain` says why)."""
        path = self.path(fingerprint)
        plan = self._load(path) if path.exists() else None
        return plan if plan is not None and plan.fingerprint == fingerprint else None

    def put(self, plan: Plan) -> Path:
        """Store a plan under its fingerprint, replacing an older one; returns its path."""
        path = self.path(plan.fingerprint)
        plan.save(path)
        self._reported.discard(path)
        return path

    def explain(self, fingerprint: Fingerprint) -> str:
        """Why `find` gives no plan: for example `"graph, batch changed"` against the closest stored plan."""
        if self.path(fingerprint).exists() and self.find(fingerprint) is None:
            return f"the stored plan {self.path(fingerprint)} cannot be used"
        stored = [plan.fingerprint.differences(fingerprint) for plan in self._plans()]
        if not stored:
            return f"no plan is stored in {self.folder}"
        return f"{', '.join(min(stored, key=len))} changed"

    def _plans(self) -> Iterator[Plan]:
        for path in sorted(self.folder.glob("*.json")):
            plan = self._load(path)
            if plan is not None:
                yield plan

    def _load(self, path: Path) -> Plan | None:
        try:
            return Plan.load(path)
        except PlanError as error:
            if path not in self._reported:
                self._reported.add(path)
                warnings.warn(f"ignored: {error.problem}", stacklevel=3)
            return None
