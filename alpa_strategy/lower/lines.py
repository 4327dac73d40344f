"""The lines of a generated program: where values are defined, begun and dropped."""

from __future__ import annotations

import re
from collections.abc import Mapping

_VARIABLE = re.compile(r"\bv\d+(?:_\d+)?\b")


def before_first_use(definitions: Mapping[str, str], lines: list[str]) -> list[str]:
    """`lines` with each variable's defining line before the first line that reads it; those never read left out."""
    placed: dict[str, None] = {}
    result = []
    for line in lines:
        for name in _variables(line.partition("  #")[0]):
            if name in definitions and name not in placed:
                placed[name] = None
                result.append(definitions[name])
        result.append(line)
    return result


def begin_first(begun: Mapping[str, list[str]], lines: list[str]) -> list[str]:
    """`lines` with `begun[v]` behind the definition of v, and all these and what they need before the others."""
    followed: list[tuple[str, bool]] = []
    for line in lines:
        followed.append((line, False))
        for name in _split(line)[0]:
            followed += [(follower, True) for follower in begun.get(name, ())]
    first: list[str] = []
    others: list[str] = []
    needed: set[str] = set()
    for line, is_begun in reversed(followed):
        defined, read = _split(line)
        if is_begun or needed.intersection(defined):
            needed.update(read)
            first.append(line)
        else:
            others.append(line)
    return [*reversed(first), *reversed(others)]


def drop_dead(lines: list[str]) -> list[str]:
    """Add `del` after the last use of every value, so that memory is freed as in hand-written code."""
    last_use: dict[str, int] = {}
    defined: dict[str, int] = {}
    for number, line in enumerate(lines[:-1]):
        made, read = _split(line)
        last_use |= dict.fromkeys(read, number)
        defined |= dict.fromkeys(made, number)
    returned = set(_variables(lines[-1]))
    dead: dict[int, list[str]] = {}
    for name, number in defined.items():
        if name not in returned:
            dead.setdefault(last_use.get(name, number), []).append(name)
    result = []
    for number, line in enumerate(lines):
        code, mark, comment = line.partition("  #")
        if number in dead:
            code += f"; del {', '.join(dead[number])}"
        result.append(code + mark + comment)
    return result


def _split(line: str) -> tuple[list[str], list[str]]:
    """(variables that the line defines, variables that it reads); a `return` defines none."""
    left, is_definition, right = line.partition("  #")[0].partition(" = ")
    return (_variables(left), _variables(right)) if is_definition else ([], _variables(left))


def _variables(code: str) -> list[str]:
    """Value variables (`v12`, `v12_0`) in a piece of the program."""
    return _VARIABLE.findall(code)
