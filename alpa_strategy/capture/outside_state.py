"""Globals, closures, classes and objects outside of the module that the step's code names: a step
that changes them is refused, and all is put back.
"""

import sys
import types
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from alpa_strategy.capture.kept_state import (
    Kept,
    KeptNames,
    KeptState,
    OfData,
    kept_in,
    restored,
    state_of,
)
from alpa_strategy.capture.python_state import (
    MAX_ITEMS,
    RECORDS,
    WITH_STATE,
    functions_in,
    has_fields,
    is_own_class,
    is_user_module,
    user_classes,
)
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir import user_code


@contextmanager
def globals_kept(
    module: nn.Module, seen: set[int], of_data: OfData = lambda _: False
) -> Iterator[dict[str, dict[str, Any]]]:
    """Restore the globals (which the block is given, by file) and closures of the methods of the
    module's classes, and of the functions that they name; caches (`functools.lru_cache`) that were
    filled, with fake tensors, are emptied.

    Raises:
        CaptureError: when the step set a global, or changed a container or an object that globals
            or closures hold.
    """
    kinds = user_classes(module)
    members = [member for kind in kinds for member in vars(kind).values()]
    step: Any = module.training_step
    methods = user_code.reached_functions([step, *_step_methods(kinds)])
    named = {name for method in methods for name in user_code.code_names(method.__code__)}
    files = _named_files(methods, named)
    found = [
        (f"{where}.{name}", name, names[name])
        for where, names in files.items()
        for name in sorted(named & names.keys())
    ]
    every = [value for names in files.values() for value in names.values()]
    found += [each for method in methods for each in _held_by(method)]
    found += [(f"{kind.__module__}.{kind.__name__}", "", kind) for kind in kinds]
    found += _beside(module, user_code.stored_names(step))
    own = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    # What other packages fill are their caches (einops: a dict of backends).
    foreign = {where: each for where, each in files.items() if where.partition(".")[0] not in own}
    installed = {
        where for where, each in foreign.items() if _is_installed_file(each.get("__file__"))
    }
    installed |= {kind.__module__ for kind in kinds if not is_own_class(kind)}
    kept: list[Kept] = [
        KeptNames(where, names, dict(names), where not in installed, counted=frozenset(named))
        for where, names in files.items()
    ]
    for place, name, value in found:
        if _may_change(name, value):
            where = place.rpartition(".")[0]
            kept += kept_in(value, place, seen, is_noticed=where not in installed, named=named)
    cached = [
        (v, v.cache_info().misses) for v in (*members, *every) if hasattr(type(v), "cache_info")
    ]
    try:
        with restored(kept, of_data) as changed:
            yield files
    finally:
        for function, misses in cached:
            if function.cache_info().misses != misses:
                function.cache_clear()
    if changed:
        raise CaptureError(
            f"the step changes variables outside of the module ({', '.join(sorted(changed))}): a"
            " captured step "
            "repeats tensor work only, so this would happen once and never again",
            "do it before training or in a hook such as on_train_batch_end (the returned dict"
            " arrives there), or "
            "use register_buffer for tensors",
        )


def _step_methods(kinds: Iterable[type]) -> list[types.FunctionType]:
    """Methods of the classes of the module tree that a step may call: not Lightning's other hooks,
    unless the step's code names them.
    """
    hooks = {name for name in dir(LightningModule) if name[:1] != "_"} - {"forward"}
    return [each for each in functions_in(kinds) if each.__name__ not in hooks]


def _named_files(
    methods: Collection[types.FunctionType], named: Set[str]
) -> dict[str, dict[str, Any]]:
    """Globals by file: those of the methods, and of the user's modules that these name
    (`meters.ITEMS`).
    """
    files = {method.__globals__["__name__"]: method.__globals__ for method in methods}
    for module in (each for method in methods for each in user_code.imported_in(method)):
        if not _is_installed_file(module.__file__):
            files.setdefault(module.__name__, vars(module))
    waiting = list(files.values())
    while waiting:
        names = waiting.pop()
        for name in named & names.keys():
            value = names[name]
            is_own = is_user_module(value) and not _is_installed_file(value.__file__)
            if is_own and value.__name__ not in files:
                files[value.__name__] = vars(value)
                waiting.append(vars(value))
    return files


def _is_installed_file(path: str | None) -> bool:
    return path is not None and user_code.is_installed(path)


def _beside(module: nn.Module, sets: Collection[str]) -> Iterator[tuple[str, str, Any]]:
    """(place, name, value) of the Trainer's callbacks, data module and datasets.

    What threads work on beside the step (a monitor's, a loader's) only where the step sets or
    fills such attributes.
    """
    trainer: Any = getattr(module, "_trainer", None)
    found = [("trainer.callbacks", "callback", each) for each in getattr(trainer, "callbacks", ())]
    found.append(("trainer.datamodule", "datamodule", getattr(trainer, "datamodule", None)))
    datasets = (getattr(loader, "dataset", None) for loader in loaders_of(trainer))
    found += [("the dataset", "dataset", each) for each in datasets]
    yield from (each for each in found if not set(sets).isdisjoint(dir(each[2])))


def loaders_of(trainer: Any) -> list[Any]:
    """The user's loaders of training batches."""
    combined = getattr(getattr(trainer, "fit_loop", None), "_combined_loader", None)
    return (
        [getattr(each, "_loader", each) for each in combined.flattened]
        if combined is not None
        else []
    )


def fields_kept(owner: Any, *functions: Any) -> AbstractContextManager[dict[str, Any]]:
    """An object's fields, what functions name or hold, containers, generators and small tensors in
    these: afterwards as
    they were. CaptureError where the functions name an iterator, which cannot go back."""
    seen, names = set[int](), set[str]()
    found = [("", "", getattr(owner, "__dict__", {})), ("", "", type(owner))]
    for function in user_code.reached_functions(functions):
        names.update(user_code.code_names(function.__code__))
        found += [
            *_held_by(function),
            *((n, n, v) for n, v in function.__globals__.items() if n in names),
        ]
    kept = [each for at, name, v in found if _may_change(name, v) for each in kept_in(v, at, seen)]
    named = [
        v
        for each in kept
        if isinstance(each.before, dict)
        for n, v in each.before.items()
        if n in names
    ]
    named += [v for _, _, v in found]
    if any(isinstance(each, Iterator) for each in named):
        raise CaptureError("an iterator cannot go back to where it was")
    tensors = (
        each.detach() for each in named if isinstance(each, Tensor) and each.numel() <= MAX_ITEMS
    )
    return restored([*kept, *(KeptState("", each, state_of(each)) for each in tensors)])


def _held_by(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """(place, name, value) of what a function closes over, and of its defaults."""
    for name, cell in user_code.closure_values(function).items():
        yield from (
            (f"{name} of {function.__qualname__}", name, each)
            for each in (cell, cell.cell_contents)
        )
    defaults = (function.__defaults__, function.__kwdefaults__)
    yield from ((f"defaults of {function.__qualname__}", "defaults", each) for each in defaults)


def _may_change(name: str, value: Any) -> bool:
    """Not for objects of libraries: a logger, a console."""
    if name.startswith("__"):
        return False
    is_users = is_user_module(sys.modules.get(type(value).__module__))
    return is_users or not has_fields(value) or isinstance(value, (*RECORDS, *WITH_STATE))
