"""Errors of code that cannot be traced, as CaptureErrors with the user's line."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from alpa_strategy.capture.symbolic_scalars import StepCounter
from alpa_strategy.errors import AlpaError, CaptureError
from alpa_strategy.ir.user_code import user_line

# Text in torch's error about code that cannot be traced -> (the problem, what to do).
_CLEARER = {
    StepCounter.__name__: (
        "a number made of batch_idx, global_step or current_epoch stands where torch takes numbers"
        " only",
        "use it element by element (`beta * x`), or write int(self.current_epoch); keep others in a"
        " registered buffer that the step updates",
    ),
    "TorchScript": (
        "TorchScript does not show its ops",
        "leave out torch.jit.script and trace (torch.compile may stay)",
    ),
    ".numpy() is not supported": (
        "a tensor is turned into a numpy array",
        "use torch functions in the step, or do it in a callback or hook",
    ),
}


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn the errors of code that cannot be traced into CaptureErrors with the user's line.

    Errors of the user's own code pass unchanged.

    Raises:
        CaptureError: the code depends on values of tensors or does something else that cannot be
            traced.
    """
    try:
        yield
    except DataDependentOutputException as error:
        raise CaptureError(
            "training_step cannot be captured: a tensor's value is needed by Python (a branch on"
            " it, .item(), .tolist(), int() or float())\n"
            f"  at {user_line(error.__traceback__)}",
            "torch.where chooses between values, register_buffer keeps state, callbacks and hooks"
            " may look at numbers",
        ) from error
    except DynamicOutputShapeException as error:
        raise CaptureError(
            "training_step cannot be captured: the shape of a tensor depends on its data"
            f" ({error.func})\n"
            f"  at {user_line(error.__traceback__)}",
            "keep shapes fixed: multiply by a mask or use torch.where instead of selecting rows, do"
            " not pack",
        ) from error
    except AlpaError:
        raise
    except (RuntimeError, TypeError) as error:
        for text, (problem, fix) in _CLEARER.items():
            if text in str(error):
                line = user_line(error.__traceback__)
                raise CaptureError(
                    f"training_step cannot be captured: {problem}\n  at {line}", fix
                ) from error
        raise
