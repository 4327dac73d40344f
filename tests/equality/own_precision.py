"""For libraries that compute parts of a float64 model in float32, which rounds sums by their order:
those parts in
float64, so that what is left can be held to 1e-9."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType


def in_float64(model: type) -> type:
    """The class from a copy of its own file that says float64 wherever the file says float32."""
    name = f"{model.__module__}_in_float64"
    if name not in sys.modules:
        path = Path(inspect.getfile(model))
        text = re.sub(r"torch\.float(32)?\b", "torch.float64", path.read_text()).replace(
            ".float()", ".double()"
        )
        copy = ModuleType(name)
        copy.__package__, copy.__file__ = name.rpartition(".")[0], str(path)
        sys.modules[name] = copy  # the library looks its classes' modules up
        exec(compile(text, path, "exec"), vars(copy))
    return getattr(sys.modules[name], model.__name__)
