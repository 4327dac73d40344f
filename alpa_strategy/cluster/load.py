"""Reading cluster files: find the YAML, check every field, say exactly what is wrong with it.

Strict on purpose: a mistyped field that is silently ignored would give a plan for another machine.
"""

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from alpa_strategy.errors import ClusterError
from alpa_strategy.files import CLUSTERS, find_named, read_yaml, shipped_names


def read_cluster_yaml(
    path: str | Path, overrides: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str]:
    """Return the plain content of a cluster file, with `overrides` applied, and its name for
    messages.

    Args:
        path: of the file, or the name of one that the package has.
        overrides: dotted field -> value; a text is read as YAML.

    Raises:
        ClusterError: no such file, one that cannot be read, or not a YAML mapping.
    """
    file = find_named(path, CLUSTERS)
    if file is None:
        known = ", ".join(shipped_names(CLUSTERS))
        raise ClusterError(f"no cluster file {str(path)!r}", f"give a YAML file or one of: {known}")
    # Loaded where a file is read: most processes read none.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = read_yaml(file)
        for key, value in (overrides or {}).items():
            # text is read as OmegaConf reads a file, so that 3e9 is a number on the command line
            # too
            parsed = OmegaConf.from_dotlist([f"{key}={value}"]) if isinstance(value, str) else None
            OmegaConf.update(
                content, key, value if parsed is None else OmegaConf.select(parsed, key)
            )
        data = OmegaConf.to_container(content, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise ClusterError(
            f"cluster file {file} cannot be read: {error}", "correct the file"
        ) from error
    if not isinstance(data, dict):
        raise ClusterError(
            f"cluster file {file} holds no fields",
            "write name:, num_nodes:, ... as in configs/clusters",
        )
    return {str(key): value for key, value in data.items()}, str(file)


# Of a number in a cluster file: beyond, costs that are made of several are no numbers, and tables
# of them no tables.
SMALLEST, LARGEST = 1e-15, 1e24
MAX_DEVICES = 1 << 20


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold: `10**400` is a whole number, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


class Fields:
    """One mapping of a cluster description, read field by field. All methods raise ClusterError,
    with the file and the field, if a field is missing or wrong; `expected` is what the error tells
    the user to write.
    """

    def __init__(self, data: Any, known: tuple[str, ...], file: str, prefix: str = "") -> None:
        self.file, self.prefix = file, prefix
        if not isinstance(data, Mapping):
            raise self._error(
                prefix.rstrip("."), f"is {data!r}", f"give it the fields {', '.join(known)}"
            )
        self.data = data
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                hint = (
                    f"did you mean {prefix}{close[0]}?"
                    if close
                    else f"known fields: {', '.join(known)}"
                )
                raise self._error(f"{prefix}{key}", "is not a field of a cluster", hint)

    def value(self, key: str, expected: str, default: Any = None) -> Any:
        """Return the raw value of a field; `default` if it is missing.

        Raises:
            ClusterError: it is missing and has no default, or is empty.
        """
        if key not in self.data and default is not None:
            return default
        if key not in self.data or self.data[key] is None:
            raise self._error(self.prefix + key, "is missing", f"add it: {expected}")
        return self.data[key]

    def valid(self, key: str, value: Any, holds: bool, expected: str) -> Any:
        """Return `value` if `holds`.

        Raises:
            ClusterError: `holds` is False.
        """
        if not holds:
            raise self._error(self.prefix + key, f"is {value!r:.80}", f"write {expected}")
        return value

    def text(self, key: str, expected: str) -> str:
        """Return a text that is not empty."""
        value = self.value(key, expected)
        return self.valid(key, value, isinstance(value, str) and value != "", expected)

    def number(
        self,
        key: str,
        expected: str,
        default: float | None = None,
        *,
        zero: bool = False,
        maximum: float = math.inf,
    ) -> float:
        """Return a number that a rate or a time can be (with `zero` also 0), at most `maximum`;
        ClusterError if the field is something else.
        """
        value = self.value(key, expected, default)
        lower = 0.0 if zero else SMALLEST
        upper = min(LARGEST, maximum)
        is_valid = _is_finite(value) and lower <= value <= upper
        return float(self.valid(key, value, is_valid, expected))

    def integer(
        self,
        key: str,
        expected: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: float = 1e18,
    ) -> int:
        """Return a whole number from `minimum` to `maximum`; 16e9 counts as one."""
        value = self.value(key, expected, default)
        holds = _is_finite(value) and value == int(value) and minimum <= value <= maximum
        return int(self.valid(key, value, holds, expected))

    def section(
        self, key: str, known: tuple[str, ...], expected: str, default: Any = None
    ) -> "Fields":
        """Return the fields of a nested mapping, which may have only the `known` ones."""
        return Fields(self.value(key, expected, default), known, self.file, f"{self.prefix}{key}.")

    def items(self, key: str, expected: str, default: Any = None) -> list[Any]:
        """Return a list."""
        value = self.value(key, expected, default)
        return list(self.valid(key, value, isinstance(value, list | tuple), expected))

    def _error(self, field: str, problem: str, fix: str) -> ClusterError:
        """Return the error for a field of the file."""
        return ClusterError(f"cluster file {self.file}: field {field} {problem}", fix)
