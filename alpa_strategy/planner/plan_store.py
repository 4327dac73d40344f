"""Plan files in a folder, one per fingerprint."""

import warnings
from pathlib import Path

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.plan import Fingerprint, Plan


class PlanStore:
    """The plan files in `folder`. A file that cannot be read is reported once and ignored."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._reported: set[Path] = set()

    def path(self, fingerprint: Fingerprint) -> Path:
        """Return the path of the plan of `fingerprint`, whether it exists or not."""
        return self.folder / f"{fingerprint.digest}.json"

    def find(self, fingerprint: Fingerprint) -> Plan | None:
        """Return the plan made for exactly this fingerprint, None if there is none (`explain`
        returns the reason).
        """
        path = self.path(fingerprint)
        plan = self._load(path) if path.exists() else None
        if plan is None or plan.fingerprint != fingerprint:
            return None
        return plan

    def put(self, plan: Plan) -> Path:
        """Store a plan under its fingerprint, in the place of an older one, and return its path."""
        path = self.path(plan.fingerprint)
        plan.save(path)
        self._reported.discard(path)
        return path

    def explain(self, fingerprint: Fingerprint) -> str:
        """Return the reason why `find` returns None, such as `"graph, batch changed"`: the
        differences from the closest stored plan.
        """
        if self.path(fingerprint).exists() and self.find(fingerprint) is None:
            return f"the stored plan {self.path(fingerprint)} cannot be used"
        differences: list[list[str]] = []
        for path in sorted(self.folder.glob("*.json")):
            plan = self._load(path)
            if plan is not None:
                differences.append(plan.fingerprint.differences(fingerprint))
        if not differences:
            return f"no plan is stored in {self.folder}"
        fewest = min(differences, key=len)
        return f"{', '.join(fewest)} changed"

    def _load(self, path: Path) -> Plan | None:
        """Return a stored plan; None, with one warning, if the file is damaged."""
        try:
            return Plan.load(path)
        except PlanError as error:
            if path not in self._reported:
                self._reported.add(path)
                warnings.warn(f"ignored: {error.problem}", stacklevel=3)
            return None
