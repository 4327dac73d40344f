"""What libraries are told that ask torch whether a tensor is fake.

They ask because a fake tensor has no values that Python could read: transformers then builds causal
masks that fast kernels do not support. In a captured step some values are known
(`data_branches.py`), and can be read.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from alpa_strategy.capture.python_state import patched


def fake_only_if(is_unknown: Callable[[FakeTensor], bool]) -> AbstractContextManager[None]:
    """Return a context in which `isinstance(x, torch._subclasses.FakeTensor)` is false for fake
    tensors with known values, outside of torch's own code.

    Args:
        is_unknown: whether a fake tensor's values are unknown.
    """

    class Kind(type):
        """The kind of a stand-in for the class of fake tensors."""

        def __instancecheck__(cls, instance: Any) -> bool:
            if not isinstance(instance, FakeTensor):
                return False
            asking = sys._getframe(1).f_globals.get("__name__", "")
            return asking.partition(".")[0] == "torch" or is_unknown(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, FakeTensor)

        def __getattr__(cls, name: str) -> Any:
            return getattr(FakeTensor, name)

    stand_in = Kind("FakeTensor", (), {})
    return patched([(torch._subclasses, "FakeTensor", stand_in)])
