"""Lines of a generated program: their order, and where values are dropped."""

import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from alpa_strategy.ir.gathers import launched_counts
from alpa_strategy.ir.op import OpCall

LITERALS = (bool, int, float, str, type(None))
INFINITIES = (float("inf"), float("-inf"))


@dataclass(frozen=True)
class Line:
    """One line of a program."""

    code: str
    # variables that it defines
    defines: tuple[str, ...] = ()
    # variables that it reads
    reads: tuple[str, ...] = ()
    # a comment
    note: str = ""
    # path of the submodule that it runs for
    module: str = ""
    # the op on local shards, if the line is nothing but a deterministic call of it; else None
    call: OpCall | None = None
    # whether it redistributes a value to another layout
    is_resharding: bool = False
    # bytes of the parameter that it gathers, if it depends on parameters alone; else 0
    gathers: int = 0
    # whether it is a resharding that is launched before all other lines
    is_early: bool = False

    def __str__(self) -> str:
        return f"{self.code}  # {self.note}" if self.note else self.code


def function_of(
    source: str, name: str, namespace: dict[str, Any]
) -> Callable[..., tuple[Tensor, ...]]:
    """Compile `source`, and return its function `name`; tracebacks show its lines.

    Args:
        namespace: what the function refers to; the function is added to it.
    """
    filename = f"<alpa {name} {id(namespace):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), namespace)
    weakref.finalize(namespace[name], linecache.cache.pop, filename, None)
    return namespace[name]


def is_literal(arg: Any) -> bool:
    """Whether Python reads `repr(arg)` as `arg`: not so for infinities and NaN."""
    if not isinstance(arg, LITERALS):
        return False
    is_nan = arg != arg
    return arg not in INFINITIES and not is_nan


def unpacked(source: str, values: Mapping[int, int | str]) -> list[Line]:
    """Return a line per value that takes it out of `source`.

    Args:
        values: value -> its index or name in `source`.
    """
    return [Line(f"v{value} = {source}[{key!r}]", (f"v{value}",)) for value, key in values.items()]


def before_first_use(definitions: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """Return `lines` with each definition before the first line that reads it; those that none
    reads are dropped.

    Args:
        definitions: lines that define one variable each.
    """
    waiting = {line.defines[0]: line for line in definitions}
    result = []
    for line in lines:
        result += [waiting.pop(name) for name in line.reads if name in waiting]
        result.append(line)
    return result


def launch_early(lines: Sequence[Line], prefetched_bytes: int = 0) -> list[Line]:
    """Split reshardings into a line that launches one and a line that waits for it.

    Early reshardings are launched before all other lines. Gathers of parameters are launched when
    an earlier one is waited for, at most `prefetched_bytes` before they are needed; with 0 they are
    not split. Lines on which a launch depends move with it.
    """
    gathers: list[int] = []
    if prefetched_bytes:
        gathers = [number for number, line in enumerate(lines) if line.gathers]
    # gather -> number of gathers that are launched before it is waited for
    num_launched = dict(
        zip(
            gathers,
            launched_counts([lines[number].gathers for number in gathers], prefetched_bytes),
            strict=True,
        )
    )
    makers: dict[str, int] = {}
    for number, line in enumerate(lines):
        for name in line.defines:
            makers[name] = number

    result: list[Line] = []
    launched: set[int] = set()
    done: set[int] = set()

    def launch(number: int) -> None:
        if number in launched:
            return
        launched.add(number)
        line = lines[number]
        (variable,) = line.reads
        finish(makers.get(variable))
        code = f"coming_{line.code}".replace(f"({variable})", f".start({variable})")
        result.append(Line(code, (f"coming_{line.defines[0]}",), (variable,), line.note))

    def finish(number: int | None) -> None:
        if number is None or number in done:
            return
        done.add(number)
        line = lines[number]
        if number in num_launched or line.is_early:
            launch(number)
            for other in gathers[: num_launched.get(number, 0)]:
                launch(other)
            line = _waiting(line)
        for name in line.reads:
            finish(makers.get(name))
        result.append(line)

    for number, line in enumerate(lines):
        if line.is_early:
            launch(number)
    for number in range(len(lines)):
        finish(number)
    return result


def _waiting(line: Line) -> Line:
    """Return the line that waits for the resharding of `line`, which another line has launched."""
    (variable,) = line.reads
    coming = f"coming_{line.defines[0]}"
    code = line.code.replace(f"({variable})", f"({variable}, {coming})")
    return Line(code, line.defines, (variable, coming), module=line.module)


def drop_dead(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with a `del` after the last use of every value that they define, except in
    the last line (the return), so that memory is freed as in hand-written code.
    """
    last_use: dict[str, int] = {}
    for number, line in enumerate(lines):
        last_use |= dict.fromkeys((*line.reads, *line.defines), number)

    dead: dict[int, list[str]] = {}
    for line in lines:
        for name in line.defines:
            dead.setdefault(last_use[name], []).append(name)

    result = []
    for number, line in enumerate(lines):
        # The last line is the return.
        if number in dead and number != len(lines) - 1:
            line = replace(line, code=f"{line.code}; del {', '.join(dead[number])}")
        result.append(line)
    return result
