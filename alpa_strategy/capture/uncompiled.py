"""Run functions under `torch.compile` eagerly for a while, as a captured or tried step needs it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def uncompiled() -> Iterator[None]:
    """Context in which functions under `torch.compile` run eagerly.

    Under a dispatch mode Dynamo would give up on a function and skip it from then on: later, when
    it is called in earnest, `fullgraph=True` would fail.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_forced_eager())
        else:
            # Nothing is compiled yet, and importing Dynamo takes seconds: wait for the first call.
            stack.enter_context(_at_first_compile(lambda: stack.enter_context(_forced_eager())))
        yield


@contextmanager
def _forced_eager() -> Iterator[None]:
    """Context in which Dynamo compiles nothing."""
    import torch._dynamo

    with (
        torch.compiler.set_stance("force_eager"),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
    ):
        yield


@contextmanager
def _at_first_compile(call: Callable[[], None]) -> Iterator[None]:
    """Context in which `call` runs once, before the first `torch.compile`."""
    compile_function = torch.compile

    def compile_after_call(*args: Any, **kwargs: Any) -> Any:
        torch.compile = compile_function
        call()
        return compile_function(*args, **kwargs)

    torch.compile = compile_after_call
    try:
        yield
    finally:
        torch.compile = compile_function
