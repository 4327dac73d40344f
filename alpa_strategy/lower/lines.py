"""Lines of a generated program, and what is done to them as text: their order, and when values are dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_strategy.intra_op.prefetch import begun
from alpa_strategy.ir.op import OpCall


@dataclass(frozen=True)
class Line:
    """One line of a program.

    Attributes:
        defines, reads: variables.
        note: a comment.
        module: path of the submodule that it runs for.
        call: the op on local shards, where the line is nothing but a deterministic call of it; else None.
        is_resharding: whether it brings a value into another layout.
        gathers: bytes of the parameter that it makes whole, which nothing but parameters are needed for; else 0.
    """

    code: str
    defines: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    note: str = ""
    module: str = ""
    call: OpCall | None = None
    is_resharding: bool = False
    gathers: int = 0

    def __str__(self) -> str:
        return f"{self.code}  # {self.note}" if self.note else self.code


def unpacked(source: str, values: Mapping[int, int | str]) -> list[Line]:
    """A line per value that takes it out of `source`. values: value -> its place or name there."""
    return [Line(f"v{value} = {source}[{key!r}]", (f"v{value}",)) for value, key in values.items()]


def before_first_use(definitions: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """`lines` with each definition before the first line that reads it; those never read left out."""
    waiting = {line.defines[0]: line for line in definitions}
    result = []
    for line in lines:
        result += [waiting.pop(name) for name in line.reads if name in waiting]
        result.append(line)
    return result


def prefetch_first(prefetches: Mapping[str, Sequence[Line]], lines: Sequence[Line]) -> list[Line]:
    """`lines` with `prefetches[v]` behind the definition of v, and all these and what they need before the others."""
    placed: list[tuple[Line, bool]] = []
    for line in lines:
        placed.append((line, False))
        placed += [(start, True) for name in line.defines for start in prefetches.get(name, ())]
    first: list[Line] = []
    others: list[Line] = []
    needed: set[str] = set()
    for line, is_prefetch in reversed(placed):
        if is_prefetch or needed.intersection(line.defines):
            needed.update(line.reads)
            first.append(line)
        else:
            others.append(line)
    return [*reversed(first), *reversed(others)]


def begun_ahead(lines: Sequence[Line], ahead_bytes: int) -> list[Line]:
    """`lines` in which gatherings of parameters begin where an earlier one is waited for, and so many bytes ahead. What
    they need of casts moves with them."""
    gathers = [number for number, line in enumerate(lines) if line.gathers]
    if not gathers or not ahead_bytes:
        return list(lines)
    makers = {name: number for number, line in enumerate(lines) for name in line.defines}
    counts = dict(zip(gathers, begun([lines[number].gathers for number in gathers], ahead_bytes), strict=True))
    result: list[Line] = []
    placed, num_begun = set[int](), 0

    def place(number: int) -> None:
        for name in lines[number].reads:
            if name in makers and makers[name] not in placed:
                place(makers[name])
        placed.add(number)
        line, (variable, *_) = lines[number], (*lines[number].reads, "")
        if line.gathers:
            code, coming = line.code.replace(f"({variable})", f".start({variable})"), f"coming_{line.defines[0]}"
            line = Line(f"coming_{code}", (coming,), (variable,), line.note)
        result.append(line)

    for number, line in enumerate(lines):
        if number in counts:
            for ahead in gathers[num_begun : counts[number]]:
                place(ahead)
            num_begun, (variable,), coming = counts[number], line.reads, f"coming_{line.defines[0]}"
            code = line.code.replace(f"({variable})", f"({variable}, {coming})")
            result.append(replace(line, code=code, reads=(variable, coming), note=""))
        elif number not in placed:
            placed.add(number)
            result.append(line)
    return result


def drop_dead(lines: Sequence[Line]) -> list[Line]:
    """Add `del` after the last use of every value, so that memory is freed as in hand-written code."""
    last_use: dict[str, int] = {}
    for number, line in enumerate(lines):
        last_use |= dict.fromkeys((*line.reads, *line.defines), number)
    dead: dict[int, list[str]] = {}
    for name in (name for line in lines for name in line.defines):
        dead.setdefault(last_use[name], []).append(name)
    dead.pop(len(lines) - 1, None)  # what is returned
    return [
        replace(line, code=f"{line.code}; del {', '.join(dead[number])}") if number in dead else line
        for number, line in enumerate(lines)
    ]
