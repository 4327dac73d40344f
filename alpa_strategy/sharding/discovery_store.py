"""What discovery found, kept in a JSON file from run to run. Hints only: `discover` proves every entry again."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from alpa_strategy.ir.op import OpCall, Slot

_FORMAT = 1
_log = logging.getLogger(__name__)


class DiscoveryStore:
    """Strategies by op name, arguments, and ranks and dtypes of the operands (sizes only as far as they are equal).

    An unreadable file is reported and started anew. `put` writes the file at once and atomically.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._found: dict[str, list[str]] = {}
        self.load()

    def load(self) -> None:
        """Read the file, if there is one."""
        try:
            content = json.loads(self.path.read_text())
            if content["format"] == _FORMAT:
                self._found = {key: [str(text) for text in texts] for key, texts in content["strategies"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("discovered rules in %s are unreadable and will be found again: %s", self.path, error)

    def save(self) -> None:
        """Write the file (temporary file in the same folder, then rename)."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"format": _FORMAT, "strategies": self._found}, indent=1, sort_keys=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
            file.write(content)
        os.replace(file.name, self.path)

    def get(self, call: OpCall) -> list[str] | None:
        """Strategy texts found for calls like this one; None: never looked for."""
        return self._found.get(_key(call))

    def put(self, call: OpCall, strategies: list[str]) -> None:
        """Remember what was found."""
        self._found[_key(call)] = strategies
        self.save()


def _key(call: OpCall) -> str:
    """Readable key; sizes become letters, equal sizes the same letter."""
    letters: dict[int, str] = {1: "1"}

    def letter(size: int) -> str:
        return letters.setdefault(size, f"n{len(letters)}")

    operands = [
        f"{meta.dtype}[{','.join(map(letter, meta.shape))}]{'g' if meta.requires_grad else ''}"
        for meta in call.operands
    ]

    def show(arg: Any) -> str:
        if isinstance(arg, tuple):
            return f"({','.join(map(show, arg))})"
        if isinstance(arg, Slot):
            return f"#{arg.index}"
        if isinstance(arg, int) and not isinstance(arg, bool) and arg >= 8:
            return letters.get(arg, str(arg))
        return repr(arg)

    kwargs = [f"{name}={show(value)}" for name, value in call.kwargs]
    return f"{call.target_name}({','.join([*map(show, call.args), *kwargs])}) {' '.join(operands)}"
