"""Programs with ranges: a lowered step whose lines are recorded under the names of their modules.

A program is written once more for profiled steps. Other steps run the program without ranges.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import Tensor

from alpa_strategy.lower.lines import function_of
from alpa_strategy.lower.lowered_step import LoweredStep
from alpa_strategy.profiling.ranges import MODULE, Ranges

# Name of the function that makes a range, in the program's namespace.
_RANGE = "module_range"
_INDENT = "    "


def program_with_ranges(program: LoweredStep, ranges: Ranges) -> LoweredStep:
    """Return the same program, with a range around consecutive lines of a submodule.

    Args:
        program: of this device.
        ranges: makes the ranges.
    """
    source = source_with_ranges(program.source, program.modules)

    def module_range(name: str) -> Any:
        return ranges(name, MODULE)

    # The names that the program refers to; its own function is replaced in the copy.
    namespace = {**program.function.__globals__, _RANGE: module_range}
    function: Callable[..., tuple[Tensor, ...]] = function_of(source, "step", namespace)
    return replace(program, source=source, function=function)


def source_with_ranges(source: str, modules: Sequence[str]) -> str:
    """Return the text of a program with `with module_range(...):` around lines of a submodule.

    Args:
        source: a function's head, then one line per entry of `modules`.
        modules: path of the submodule of each line; "": the module's own step.
    """
    head, *lines = source.rstrip("\n").split("\n")
    result = [head]
    numbered = zip(modules, lines, strict=True)
    for module, group in groupby(numbered, key=lambda pair: pair[0]):
        indent = ""
        if module:
            result.append(f"{_INDENT}with {_RANGE}({module!r}):")
            indent = _INDENT
        result += [indent + line for _, line in group]
    return "\n".join(result) + "\n"
