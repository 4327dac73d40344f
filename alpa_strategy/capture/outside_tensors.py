"""Real tensors from outside of the step, which a trace must leave as they are.

Under torch's fake tensors an op that writes in place runs for real if all of its operands are real
tensors and numbers (`self.scale.mul_(0.9)`, where `scale` is no buffer).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

# Methods with two underscores that begin like in-place operators and write nothing.
_READS = ("__index__", "__int__", "__invert__", "__iter__", "__instancecheck__")


class OutsideTensors:
    """Copies of the real tensors into which a trace may write."""

    def __init__(self) -> None:
        # Id of a tensor -> the tensor, its version, and a copy.
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def keep(self, function: Any, arguments: Iterable[Any], keywords: Mapping[str, Any]) -> None:
        """Copy the real tensors among `arguments`, not inside of them, if the function writes in
        place by its name or has the keyword `out`. Each is copied once until `restore`.
        """
        if not _writes(function) and "out" not in keywords:
            return
        for argument in arguments:
            is_real = issubclass(type(argument), Tensor) and not isinstance(argument, FakeTensor)
            if is_real and id(argument) not in self._copies:
                with _no_modes():
                    copy = argument.detach().clone()
                self._copies[id(argument)] = argument, argument._version, copy

    def restore(self) -> None:
        """Give the tensors that were written into their former content, and drop all copies."""
        with _no_modes(), torch.no_grad():
            for tensor, version, copy in self._copies.values():
                if tensor._version != version:
                    tensor.copy_(copy)
        self._copies.clear()


def _writes(function: Any) -> bool:
    """Whether a function of torch writes into its first argument, by its name."""
    name = getattr(function, "__name__", "")
    if name.startswith("__i"):
        return name not in _READS
    if name.startswith("__"):
        return name == "__setitem__"
    return name.endswith("_")


@contextmanager
def _no_modes() -> Iterator[None]:
    """Run torch's own functions on real tensors."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
