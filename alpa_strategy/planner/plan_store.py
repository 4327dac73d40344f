"""Plan files in a folder or at a URL, one per fingerprint."""

import warnings
from pathlib import Path

from alpa_strategy import urls
from alpa_strategy.errors import PlanError
from alpa_strategy.files import replacing
from alpa_strategy.ir.plan import Fingerprint, Plan


class PlanStore:
    """The plan files in `folder`. A file that cannot be read is reported once and ignored.

    Args:
        folder: a local or mounted folder.
        url: of a folder that jobs share. Plans are downloaded from there, and uploaded; `folder`
            has copies. A URL that cannot be reached is reported once, and the copies are used.
    """

    def __init__(self, folder: str | Path, url: str | None = None) -> None:
        self.folder = Path(folder)
        self.url = url
        self._reported: set[Path] = set()

    def path(self, fingerprint: Fingerprint) -> Path:
        """Return the path of the plan of `fingerprint`, whether it exists or not."""
        return self.folder / f"{fingerprint.digest}.json"

    def location(self, fingerprint: Fingerprint) -> str:
        """Return the path of the plan of `fingerprint`, or its URL, for messages."""
        path = self.path(fingerprint)
        return str(path) if self.url is None else f"{self.url}/{path.name}"

    def find(self, fingerprint: Fingerprint) -> Plan | None:
        """Return the plan made for exactly this fingerprint, None if there is none (`explain`
        returns the reason). If plans are at a URL, it is downloaded first.
        """
        path = self.path(fingerprint)
        if self.url is not None:
            self._download(path)
        plan = self._load(path) if path.exists() else None
        if plan is None or plan.fingerprint != fingerprint:
            return None
        return plan

    def put(self, plan: Plan) -> Path:
        """Store a plan under its fingerprint, in the place of an older one, and return its path.

        Raises:
            OSError: the folder or the URL cannot be written to.
        """
        path = self.path(plan.fingerprint)
        plan.save(path)
        self._reported.discard(path)
        if self.url is not None:
            urls.replace(path, f"{self.url}/{path.name}")
        return path

    def put_companions(self, plan: Plan) -> None:
        """Upload what is beside a stored plan, such as its page, if the store has a URL.

        Raises:
            OSError: the URL cannot be written to.
        """
        if self.url is None:
            return
        path = self.path(plan.fingerprint)
        for file in sorted(self.folder.glob(f"{path.stem}.*")):
            if file != path:
                urls.upload(file, f"{self.url}/{file.name}")

    def explain(self, fingerprint: Fingerprint) -> str:
        """Return the reason why `find` returns None, such as `"the closest stored plan has another
        graph, batch"`: the differences from it, or that the stored one cannot be used, or that
        there is none.
        """
        if self.path(fingerprint).exists() and self.find(fingerprint) is None:
            return f"the stored plan {self.location(fingerprint)} cannot be used"
        differences: list[list[str]] = []
        for path in sorted(self.folder.glob("*.json")):
            plan = self._load(path)
            if plan is not None:
                differences.append(plan.fingerprint.differences(fingerprint))
        if not differences:
            return f"no plan is stored in {self.url or self.folder}"
        fewest = min(differences, key=len)
        return f"the closest stored plan has another {', '.join(fewest)}"

    def _download(self, path: Path) -> None:
        """Update the local copy of a plan from the URL; delete it if the URL has none.

        If the URL cannot be read, warn once, and leave the copy.
        """
        assert self.url is not None
        try:
            with replacing(path) as temporary:
                urls.download(f"{self.url}/{path.name}", temporary)
        except FileNotFoundError:
            path.unlink(missing_ok=True)
        except OSError as error:
            if self.folder not in self._reported:
                self._reported.add(self.folder)
                warnings.warn(f"plans are read from {self.folder} only: {error}", stacklevel=3)

    def _load(self, path: Path) -> Plan | None:
        """Return a stored plan; None, with one warning, if the file is damaged."""
        try:
            return Plan.load(path)
        except PlanError as error:
            if path not in self._reported:
                self._reported.add(path)
                warnings.warn(f"ignored: {error.problem}", stacklevel=3)
            return None
