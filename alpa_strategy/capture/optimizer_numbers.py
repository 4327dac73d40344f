"""Numbers of optimizers that the step reads, such as the learning rate that it logs.

Each is an input of the step (`OptimizerNumber`): a counter stands for it.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.places import OptimizerNumber
from alpa_strategy.ir.user_code import user_frame

# (number, location) -> the counter that stands for it.
ToCounter = Callable[[Any, OptimizerNumber], Any]


def refuse(name: str = "self.optimizers() or self.lr_schedulers()") -> NoReturn:
    """Refuse to read anything but numbers of optimizers and schedulers in the step.

    Args:
        name: of what the step calls.

    Raises:
        CaptureError: always.
    """
    raise CaptureError(
        f"{name} is called in the step ({user_frame()}): the captured step would keep the first"
        " value of what it reads there",
        "read numbers of its groups alone (`param_groups[0]['lr']`), the rest in a callback or in"
        " on_train_batch_end",
    )


def optimizer_views(trainer: Any, to_counter: ToCounter) -> list["OptimizerView"]:
    """Return a view of each of the Trainer's optimizers, whose numbers are counters."""
    optimizers = list(getattr(trainer, "optimizers", ()))
    return [OptimizerView(optimizer, i, to_counter) for i, optimizer in enumerate(optimizers)]


def scheduler_views(trainer: Any, to_counter: ToCounter) -> list["SchedulerView"]:
    """Return a view of each of the Trainer's learning rate schedulers, whose numbers are
    counters.
    """
    views = []
    for index, config in enumerate(getattr(trainer, "lr_scheduler_configs", ())):
        views.append(SchedulerView(config.scheduler, index, to_counter))
    return views


def one_or_all(views: list[Any]) -> Any:
    """Return as `LightningModule.optimizers()`: a single one is in no list. CaptureError if there
    is none.
    """
    if not views:
        refuse()
    return views[0] if len(views) == 1 else views


class OptimizerView:
    """Stands for an optimizer: only numbers of its groups can be read."""

    def __init__(self, optimizer: Any, index: int, to_counter: ToCounter) -> None:
        self.param_groups = []
        for number, group in enumerate(optimizer.param_groups):
            self.param_groups.append(_Group(group, index, number, to_counter))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"{name} of an optimizer")


class _Group:
    """Stands for a group of an optimizer's parameters."""

    def __init__(self, group: Any, index: int, number: int, to_counter: ToCounter) -> None:
        self._group = group
        self._index = index
        self._number = number
        self._to_counter = to_counter

    def __getitem__(self, name: str) -> Any:
        value = self._group[name]
        if type(value) not in (int, float):
            refuse(f"{name!r} of an optimizer's group")
        place = OptimizerNumber("", name, optimizer=self._index, group=self._number)
        return self._to_counter(value, place)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"{name} of an optimizer's group")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the number `name`."""
        return self[name] if name in self._group else default

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        refuse(f"setting {name!r} of an optimizer's group")

    def __iter__(self) -> NoReturn:
        refuse("a loop over an optimizer's group")


class SchedulerView:
    """Stands for a learning rate scheduler: only its last learning rates can be read."""

    def __init__(self, scheduler: Any, index: int, to_counter: ToCounter) -> None:
        self._scheduler = scheduler
        self._index = index
        self._to_counter = to_counter

    def get_last_lr(self) -> list[Any]:
        """Return counters of the last learning rates; CaptureError if one is no int or float."""
        counters = []
        for number, rate in enumerate(self._scheduler.get_last_lr()):
            if type(rate) not in (int, float):
                refuse("get_last_lr()")
            place = OptimizerNumber("", "lr", optimizer=self._index, group=number, is_last=True)
            counters.append(self._to_counter(rate, place))
        return counters

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"{name} of a learning rate scheduler")
