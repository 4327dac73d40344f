"""Errors for classes that cannot use this strategy: Fabric, and `pytorch_lightning.Trainer`.

`Fabric` has no training step to plan. `pytorch_lightning` is Lightning's code as another package,
whose Trainer does not accept strategies of `lightning`. Both only report "invalid strategy name".
So their constructors are wrapped, once, when the strategy is imported, and report what to do.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning.fabric import Fabric

from alpa_strategy.errors import SetupError
from alpa_strategy.lightning.parallel_job import ParallelJob

NAMES = ("alpa", "alpa_notebook")
OTHER_PACKAGE = "pytorch_lightning"


def fabric_error() -> SetupError:
    """Return the error for `Fabric(strategy="alpa")`."""
    return SetupError(
        "Fabric with the strategy alpa: alpa plans the training_step of a LightningModule, and "
        "Fabric has none",
        'put the step into a LightningModule and use lightning.Trainer(strategy="alpa"), or '
        "another strategy of Fabric",
    )


def other_package_error() -> SetupError:
    """Return the error for `pytorch_lightning.Trainer(strategy="alpa")`."""
    return SetupError(
        f"{OTHER_PACKAGE}.Trainer with the strategy alpa, which is one of the package lightning",
        f"write `import lightning.pytorch as pl` in the place of `import {OTHER_PACKAGE} as pl`,"
        " in all files: it is the same code (pip install lightning)",
    )


def wrap_other_entries() -> None:
    """Let `Fabric` and Trainers of `OTHER_PACKAGE`, also if it is imported later, refuse alpa."""
    refuse_alpa(Fabric, fabric_error)
    if OTHER_PACKAGE in sys.modules:
        _refuse_in_other_package(sys.modules[OTHER_PACKAGE])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def refuse_alpa(kind: type, error: Callable[[], Exception]) -> None:
    """Let the constructor of `kind` raise `error()` if its argument `strategy` is alpa. Does
    nothing if it does so already.
    """
    original: Any = kind.__init__  # type: ignore[misc]
    if hasattr(original, "_refuses_alpa"):
        return

    signature = inspect.signature(original)

    @wraps(original)
    def constructor(*args: Any, **kwargs: Any) -> None:
        try:
            strategy = signature.bind_partial(*args, **kwargs).arguments.get("strategy")
        # The original raises a better error for wrong arguments.
        except TypeError:
            strategy = None
        if _is_alpa(strategy):
            raise error()
        original(*args, **kwargs)

    constructor._refuses_alpa = True  # type: ignore[attr-defined]
    kind.__init__ = constructor  # type: ignore[misc]


def _is_alpa(strategy: Any) -> bool:
    """Return whether the argument `strategy` of a Trainer selects ours."""
    is_name = isinstance(strategy, str) and strategy.lower() in NAMES
    return is_name or isinstance(strategy, ParallelJob)


def _refuse_in_other_package(module: ModuleType) -> None:
    """Let the other package's Trainer refuse our strategy."""
    trainer = getattr(module, "Trainer", None)
    if isinstance(trainer, type):
        refuse_alpa(trainer, other_package_error)


class _WhenImported(MetaPathFinder):
    """Import hook that wraps the Trainer of `pytorch_lightning` after the import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `pytorch_lightning`, whose Trainer will refuse `strategy="alpa"`.

        None for all other packages. The finder removes itself when it has found it.
        """
        if fullname != OTHER_PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_refuse(module: ModuleType) -> None:
            load(module)
            _refuse_in_other_package(module)

        spec.loader.exec_module = load_and_refuse  # type: ignore[method-assign]
        return spec
