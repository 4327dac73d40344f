"""What surrounds a trace: generators that stay as they were, compiled code as it is written, clear errors."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from alpa_strategy.capture.as_written import DataShapeError
from alpa_strategy.capture.blame import user_line
from alpa_strategy.capture.counters import StepCounter
from alpa_strategy.errors import CaptureError


@contextmanager
def rng_kept(step: str) -> Iterator[None]:
    """Restore all generators; refuse a step that draws from Python's or NumPy's, whose numbers capture would freeze."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    drawn: list[str] = []
    try:
        yield
        if random.getstate() != python_state:
            drawn.append("random")
        if numpy_random is not None and not _same_numpy_state(numpy_random.get_state(), numpy_state):
            drawn.append("numpy.random")
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
    if drawn:
        raise CaptureError(
            f"{step} draws numbers from {' and '.join(drawn)}: the captured step would repeat the first ones forever",
            "draw with torch (torch.rand, torch.randint) and choose with torch.where, or draw in the dataset",
        )


def _same_numpy_state(a: Any, b: Any) -> bool:
    return a[0] == b[0] and a[1].tobytes() == b[1].tobytes() and a[2:] == b[2:]


@contextmanager
def compiled_as_written() -> Iterator[None]:
    """What the user compiled (`torch.compile`) runs as it is written: the graph that is captured replaces it."""
    if "torch._dynamo" not in sys.modules:  # so nothing was compiled, and importing it takes seconds
        yield
        return
    import torch._dynamo

    with torch.compiler.set_stance("force_eager"), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


_PYTHON_VALUE = (
    "torch.where chooses between values, register_buffer keeps state, callbacks and hooks may look at numbers"
)


@contextmanager
def clear_errors(step: str) -> Iterator[None]:
    """Turn what tracing cannot follow into a CaptureError with the user's line; other errors stay the user's own."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        line = user_line(error.__traceback__)
        shape = isinstance(error, DynamicOutputShapeException)
        what = (
            f"the shape of a tensor depends on its data ({error.func})"
            if shape
            else "a tensor's value is needed by Python (a branch on it, .item(), .tolist(), int() or float())"
        )
        fix = (
            "keep shapes fixed: multiply by a mask or use torch.where instead of selecting rows, pad instead of "
            "packing; or move this part into a submodule that returns fixed shapes: it then runs as it is written"
            if shape
            else _PYTHON_VALUE
        )
        if not shape:
            raise CaptureError(f"{step} cannot be captured: {what}\n  at {line}", fix) from error
        refusal = DataShapeError(f"{step} cannot be captured: {what}\n  at {line}", fix)
        refusal.modules = getattr(error, "modules", ())
        raise refusal from error
    except (RuntimeError, TypeError) as error:
        if StepCounter.__name__ in str(error):
            raise CaptureError(
                f"{step} cannot be captured: a number made of batch_idx, global_step or current_epoch stands where "
                f"torch takes numbers only\n  at {user_line(error.__traceback__)}",
                "use it element by element (`beta * x`), or write int(self.current_epoch); keep others in a registered "
                "buffer that the step updates",
            ) from error
        if "TorchScript" in str(error):
            raise CaptureError(
                f"{step} cannot be captured: TorchScript does not show its ops\n  at {user_line(error.__traceback__)}",
                "leave out torch.jit.script and trace (torch.compile may stay)",
            ) from error
        if ".numpy() is not supported" not in str(error):
            raise
        line = user_line(error.__traceback__)
        raise CaptureError(
            f"{step} cannot be captured: a tensor is turned into a numpy array\n  at {line}",
            "use torch functions in the step, or do it in a callback or hook",
        ) from error
