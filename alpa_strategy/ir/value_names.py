"""Names of a step's tensors for users: parameters, batch leaves, and results of ops with their
line.
"""

import os
import re

from alpa_strategy.ir.graph import Op, StepGraph

# `path/file.py:93: code`
_LINE = re.compile(r"(?P<path>.+?):(?P<line>\d+)(?::|$)")

# A component of a dotted name that is a number.
INDEX_IN_NAME = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")
_DOTTED_NAME = re.compile(r"\w+(?:\.\w+)+")
# In the name of an op with its module or line.
_COUNTER_OF_OP = re.compile(r"_\d+(?= \()")


def maker_names(step: StepGraph) -> dict[int, str]:
    """Return value -> name of the parameter, buffer, batch leaf or op that makes it; `constant`, or
    `v<value> of an earlier stage`, for others.
    """
    names = {parameter.value: parameter.name for parameter in step.parameters}
    names.update({buffer.value: buffer.name for buffer in step.buffers})
    names.update({leaf.value: f"batch[{leaf.leaf}]" for leaf in step.batch})
    names.update({constant.value: "constant" for constant in step.constants})
    for value in step.received:
        names[value] = f"v{value} of an earlier stage"
    for op in step.ops:
        for value in op.results:
            names[value] = op.name
    return names


def op_with_line(op: Op) -> str:
    """Return an op's name with its module and the user's line: `linear_3 (blocks.0.mlp,
    gpt.py:93)`.
    """
    places = [op.module] if op.module else []
    line = _LINE.match(op.source)
    if line is not None:
        places.append(f"{os.path.basename(line['path'])}:{line['line']}")
    return f"{op.name} ({', '.join(places)})" if places else op.name


def collapse_indices(name: str) -> str:
    """Return a dotted name with `*` in the place of every component that is a number."""
    return INDEX_IN_NAME.sub("*", name)


def without_indices(text: str) -> str:
    """Return a text of names, such as that of `op_with_line`, with `collapse_indices` of each
    dotted name and without the counters of ops: texts of equal layers become the same.
    """
    text = _DOTTED_NAME.sub(lambda name: collapse_indices(name[0]), text)
    return _COUNTER_OF_OP.sub("", text)
