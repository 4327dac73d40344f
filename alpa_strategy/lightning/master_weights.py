"""`AlpaStrategy(master_weights=True)`: steps compute with bf16 copies of fp32 parameters.

The copies are casts with an autograd backward. Captured, they are ops of the step like autocast's:
a sharded parameter is cast before it is gathered, and its gradient is summed over the ranks before
it is cast back.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn
from typing_extensions import override

from alpa_strategy.capture.python_state import standing_in
from alpa_strategy.errors import SetupError


class MasterWeights(HalfPrecision):
    """Precision with fp32 parameters, gradients and optimizer state, and steps in bf16."""

    def __init__(self) -> None:
        super().__init__("bf16-true")
        self._module: nn.Module | None = None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert, in place, 16-bit parameters to fp32, floating buffers to bf16; fp64 parameters
        stay.
        """
        self._module = module
        for owner in module.modules():
            for parameter in owner._parameters.values():
                if parameter is None or not parameter.is_floating_point():
                    continue
                if parameter.dtype.itemsize < 4:
                    parameter.data = parameter.data.float()
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    owner._buffers[name] = buffer.bfloat16()
        return module

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @contextmanager
    @override
    def forward_context(self) -> Iterator[None]:
        """Context in which bf16 copies replace the floating parameters, and new tensors are bf16.

        Gradients of the copies arrive at the parameters. A tied parameter has one copy.
        """
        assert self._module is not None
        copies = {
            master: master.bfloat16()
            for master in self._module.parameters()
            if master.is_floating_point()
        }
        with standing_in(self._module, copies), super().forward_context():
            yield

    def dtype_context(self) -> AbstractContextManager[None]:
        """Context in which new tensors are bf16, without the copies, for code that is not the
        user's.
        """
        return super().forward_context()


def with_masters(plugin: Any) -> MasterWeights:
    """Return `MasterWeights` in place of the Trainer's precision `plugin`.

    Raises:
        SetupError: the precision is not bf16-true.
    """
    precision = getattr(plugin, "precision", type(plugin).__name__)
    if precision != "bf16-true":
        raise SetupError(
            f"master_weights=True with precision {precision!r}: there are no bf16 parameters to"
            " keep masters of",
            'use precision="bf16-true" (under "bf16-mixed" parameters are fp32 already), or leave'
            " master_weights out",
        )
    return MasterWeights()
