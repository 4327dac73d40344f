"""Lines of a generated program, and what is done to them as text: their order, and when values are
dropped.
"""

import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from alpa_strategy.intra_op.decode import begun
from alpa_strategy.ir.op import OpCall


@dataclass(frozen=True)
class Line:
    """One line of a program."""

    code: str
    # defines, reads: variables
    defines: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    note: str = ""  # a comment
    module: str = ""  # path of the submodule that it runs for
    # the op on local shards, where the line is nothing but a deterministic call of it; else None
    call: OpCall | None = None
    is_resharding: bool = False  # whether it brings a value into another layout
    # bytes of the parameter that it makes whole, which nothing but parameters are needed for; else
    # 0
    gathers: int = 0
    is_early: bool = False  # whether it is a resharding that begins before all else

    def __str__(self) -> str:
        return f"{self.code}  # {self.note}" if self.note else self.code


def function_of(
    source: str, what: str, namespace: dict[str, Any]
) -> Callable[..., tuple[Tensor, ...]]:
    """The function that `source` defines; tracebacks show its lines. It stands in `namespace`,
    which it refers to.
    """
    filename = f"<alpa {what} {id(namespace):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), namespace)
    weakref.finalize(namespace[what], linecache.cache.pop, filename, None)
    return namespace[what]


def unpacked(source: str, values: Mapping[int, int | str]) -> list[Line]:
    """A line per value that takes it out of `source`. values: value -> its place or name there."""
    return [Line(f"v{value} = {source}[{key!r}]", (f"v{value}",)) for value, key in values.items()]


def before_first_use(definitions: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """`lines` with each definition before the first line that reads it; those never read left
    out.
    """
    waiting = {line.defines[0]: line for line in definitions}
    result = []
    for line in lines:
        result += [waiting.pop(name) for name in line.reads if name in waiting]
        result.append(line)
    return result


def begun_ahead(lines: Sequence[Line], ahead_bytes: int = 0) -> list[Line]:
    """`lines` in which early reshardings begin first of all, and gatherings of parameters so many
    bytes ahead, where an
    earlier one is waited for (0: where they are needed). What these need moves with them."""
    gathers = []
    if ahead_bytes:
        gathers = [number for number, line in enumerate(lines) if line.gathers]
    early = [number for number, line in enumerate(lines) if line.is_early]
    makers = {name: number for number, line in enumerate(lines) for name in line.defines}
    counts = dict(
        zip(gathers, begun([lines[number].gathers for number in gathers], ahead_bytes), strict=True)
    )
    result: list[Line] = []
    started, done = set[int](), set[int]()

    def start(number: int) -> None:
        line, (variable,) = lines[number], lines[number].reads
        if number not in started:
            started.add(number)
            finish(makers.get(variable))
            code = f"coming_{line.code}".replace(f"({variable})", f".start({variable})")
            result.append(Line(code, (f"coming_{line.defines[0]}",), (variable,), line.note))

    def finish(number: int | None) -> None:
        if number is None or number in done:
            return
        done.add(number)
        line = lines[number]
        if number in counts or line.is_early:
            for other in (number, *gathers[: counts.get(number, 0)]):
                start(other)
            (variable,), coming = line.reads, f"coming_{line.defines[0]}"
            code = line.code.replace(f"({variable})", f"({variable}, {coming})")
            line = Line(code, line.defines, (variable, coming), module=line.module)
        for name in line.reads:
            finish(makers.get(name))
        result.append(line)

    for number in early:
        start(number)
    for number in range(len(lines)):
        finish(number)
    return result


def drop_dead(lines: Sequence[Line]) -> list[Line]:
    """Add `del` after the last use of every value, so that memory is freed as in hand-written
    code.
    """
    last_use: dict[str, int] = {}
    for number, line in enumerate(lines):
        last_use |= dict.fromkeys((*line.reads, *line.defines), number)
    dead: dict[int, list[str]] = {}
    for name in (name for line in lines for name in line.defines):
        dead.setdefault(last_use[name], []).append(name)
    dead.pop(len(lines) - 1, None)  # what is returned
    return [
        replace(line, code=f"{line.code}; del {', '.join(dead[number])}")
        if number in dead
        else line
        for number, line in enumerate(lines)
    ]
