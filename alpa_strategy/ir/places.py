"""The locations of Python values that steps change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Place:
    """The location of a Python value that steps change.

    It is an attribute of a submodule, an item of a dict that is such an attribute, or a leaf of the
    batch.
    """

    # Path of the submodule.
    path: str

    # Name of the attribute; of a leaf, its name in messages.
    name: str

    # Key of the item, if the attribute is a dict.
    key: str | int | None = None

    # Index of the leaf.
    leaf: int | None = None

    @property
    def attribute(self) -> str:
        """The attribute with its path, as guards name it."""
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def item(self) -> Any:
        """The key of the value in `holder`."""
        return self.name if self.key is None else self.key

    def __str__(self) -> str:
        if self.leaf is not None:
            return self.name
        if self.key is not None:
            return f"self.{self.attribute}[{self.key!r}]"
        return f"self.{self.attribute}"

    def holder(self, module: nn.Module) -> dict[Any, Any]:
        """Return the dict that stores the value: the submodule's `__dict__`, or the attribute."""
        attributes = vars(module.get_submodule(self.path))
        return attributes if self.key is None else attributes[self.name]

    def value(self, module: nn.Module, leaves: Sequence[Any] = ()) -> Any:
        """Return the current value; None if the attribute, or the item of a dict that is there, is
        missing.

        Args:
            leaves: those of the batch.
        """
        if self.leaf is not None:
            return leaves[self.leaf]
        # The attribute may be one of the class.
        attribute: Any = getattr(module.get_submodule(self.path), self.name, None)
        return attribute if self.key is None else attribute.get(self.key)


@dataclass(frozen=True)
class OptimizerNumber(Place):
    """The location of a number of an optimizer or of a learning rate scheduler of the Trainer."""

    # Index of the optimizer or scheduler, and of its group of parameters.
    optimizer: int = 0
    group: int = 0

    # Whether it is the scheduler's last learning rate.
    is_last: bool = False

    def __str__(self) -> str:
        if self.is_last:
            return f"lr_schedulers[{self.optimizer}].get_last_lr()[{self.group}]"
        return f"optimizers[{self.optimizer}].param_groups[{self.group}][{self.name!r}]"

    def value(self, module: Any, leaves: Sequence[Any] = ()) -> Any:
        """Return the current value. Args: as of `Place.value`."""
        trainer = module._trainer
        if self.is_last:
            return trainer.lr_scheduler_configs[self.optimizer].scheduler.get_last_lr()[self.group]
        return trainer.optimizers[self.optimizer].param_groups[self.group][self.name]
