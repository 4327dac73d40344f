"""Files beside a plan file: what follows from a plan, or what a run of it has measured.

Each is a dataclass as compressed JSON, with a version, and with the digest of its plan in the field
`plan`: plan files can be edited.
"""

import gzip
import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from alpa_strategy.errors import PlanError
from alpa_strategy.files import MAX_BYTES, parse_json, replacing
from alpa_strategy.ir import plan_file
from alpa_strategy.ir.plan import Plan, StagePlan

T = TypeVar("T")


def plan_digest(plan: Plan) -> str:
    """Return a hash of what a plan decides: stages, micro-batches and schedule."""
    stages = plan_file.to_json_data(tuple[StagePlan, ...], plan.stages)
    text = json.dumps([stages, plan.num_microbatches, plan.schedule])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PlanCompanion(Generic[T]):
    """A kind of file beside plan files."""

    # The dataclass.
    content: type[T]

    # Key of the content: `<key>_version` is the version's, `plan.<key>.gz` is beside `plan.json`.
    key: str

    # Of the format. A file of another version is an error that says so.
    version: int

    # What the file holds, and what to do if it cannot be read, for messages.
    name: str
    fix: str

    # Whether a written file is on disk before its name is.
    durable: bool = True

    def path(self, plan_path: str | Path) -> Path:
        """Return the path of the file beside a plan file."""
        path = Path(plan_path)
        return path.with_name(f"{path.name.removesuffix('.json')}.{self.key}.gz")

    def save(self, path: Path, content: T) -> None:
        """Write `content` to the file as gzipped JSON, atomically. Raises OSError."""
        data = plan_file.to_json_data(self.content, content)
        text = json.dumps({self._version_key: self.version, **data})
        with replacing(path, durable=self.durable) as temporary:
            temporary.write_bytes(gzip.compress(text.encode(), mtime=0))

    def load(self, path: Path) -> T:
        """Read a file that `save` has written.

        Raises:
            PlanError: it cannot be read, is of another version, or has a wrong field.
        """
        try:
            with gzip.open(path) as file:
                text = file.read(MAX_BYTES).decode()
            data: Any = parse_json(text)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise PlanError(f"{self.name} {path} cannot be read: {error}", self.fix) from error
        version = plan_file.checked(data, dict, self.key).get(self._version_key)
        if version != self.version:
            raise PlanError(f"{self.name} {path} have version {version}", self.fix)
        content: T = plan_file.from_json_data(self.content, data, self.key)
        return content

    def of_plan(self, plan_path: str | Path, plan: Plan) -> T | None:
        """Return the content of the file beside a plan file.

        None if there is no file, or if it is that of another plan: the plan file was edited.

        Raises:
            PlanError: the file cannot be read.
        """
        path = self.path(plan_path)
        if not path.exists():
            return None
        content: Any = self.load(path)
        return content if content.plan == plan_digest(plan) else None

    @property
    def _version_key(self) -> str:
        return f"{self.key}_version"
