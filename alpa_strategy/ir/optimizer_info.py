"""OptimizerInfo: the properties of an optimizer that plans and costs depend on; Reads: what its
update of a parameter looks at.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass(frozen=True)
class Reads:
    """Which elements the update of a parameter's element reads: itself, slices, or all of them."""

    # Dims along which the update of a shard is the shard of the update.
    free_dims: frozenset[int]

    # Of the parameter; vectors and scalars count as one dim.
    num_dims: int

    # Whether it looks at no other parameter.
    is_parameter_wise: bool

    @property
    def is_element_wise(self) -> bool:
        """Whether it may be sharded along any dim."""
        return len(self.free_dims) == self.num_dims


@dataclass(frozen=True)
class FullUpdate:
    """The update of a parameter of which an optimizer needs more than the elements of a shard."""

    reads: Reads

    # Of its matrix products, for the full parameter; 0 if it has none.
    flops: float

    # Of these products.
    dtype: torch.dtype


@dataclass(frozen=True)
class OptimizerInfo:
    """An optimizer as planning knows it. The default is Adam on float32."""

    # bytes of optimizer state per parameter element, in the dtype of the optimizer's state (Adam on
    # float32: 8, on bfloat16: 4)
    state_bytes: float = 8.0
    # whether its update of a shard is the shard of its update
    element_wise: bool = True
    # class name, for messages
    name: str = "Adam"
    # whether it updates every parameter by that parameter's gradient alone: a stage of a pipeline
    # has only some of the parameters
    parameter_wise: bool = True
    # bytes of a gradient's element where it is reduced and accumulated; None: the parameter's
    gradient_itemsize: int | None = None
    # bytes that a step reads and writes per element; None: parameter, gradient and state once, as
    # fused kernels do
    moved_bytes: float | None = None
    # temporary bytes per byte of gradient in a step of all parameters at once (`foreach` on GPUs)
    scratch: float = 0.0
    # (name in the module, update) of each parameter that it cannot step element by element
    full_updates: tuple[tuple[str, FullUpdate], ...] = ()
    # why it cannot be tried; empty if it can
    problem: str = field(default="", compare=False, repr=False)
    # seconds of its Python in a step, without the bytes that it moves; 0 if they were not measured.
    # No plan depends on it, so no key may: keys hash the text (repr).
    step_seconds: float = field(default=0.0, compare=False, repr=False)
    # seconds of its Python for each parameter in a step, as `step_seconds`
    parameter_seconds: float = field(default=0.0, compare=False, repr=False)

    @property
    def may_step_shards(self) -> bool:
        """Whether parameters may be sharded: it steps each shard where it is stored, or each full
        parameter at one device (`runtime/owner_step.py`).
        """
        return self.element_wise or self.parameter_wise

    @property
    def why_in_full(self) -> str:
        """A sentence that says why all parameters must be there in full, if they must."""
        if self.problem:
            return (
                f"{self.name} cannot be tried on small parameters ({self.problem}), so it may need"
                " all of them in full"
            )
        return (
            f"{self.name} updates parameters by other parameters' gradients or in train() and"
            " eval()"
        )

    @cached_property
    def _full_update_of(self) -> dict[str, FullUpdate]:
        return dict(self.full_updates)

    def full_update(self, names: Iterable[str]) -> FullUpdate | None:
        """Return the update of a parameter with these names; None if it is element-wise."""
        if not self.full_updates:
            return None
        updates = (self._full_update_of.get(name) for name in names)
        return next((update for update in updates if update is not None), None)

    def update_bytes(self, itemsize: int) -> float:
        """Return the bytes that a step reads and writes per parameter element.

        Args:
            itemsize: bytes of the element.
        """
        if self.moved_bytes is not None:
            return self.moved_bytes
        return 3 * itemsize + 2 * self.state_bytes

    def gradient_scale(self, itemsize: int) -> float:
        """Return the bytes of a gradient per byte of its parameter.

        Args:
            itemsize: bytes of the parameter's element.
        """
        return 1.0 if self.gradient_itemsize is None else self.gradient_itemsize / itemsize
