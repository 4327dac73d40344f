"""Refuse and undo changes that the step makes outside of the module: to globals, closures, classes
and objects that its code names.
"""

import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from torch import nn

from alpa_strategy.capture.kept_state import restored, snapshots_in
from alpa_strategy.capture.lightning_adapter import LightningModule
from alpa_strategy.capture.python_state import (
    RECORDS,
    WITH_STATE,
    functions_in,
    has_fields,
    is_own_class,
    is_user_module,
    user_classes,
)
from alpa_strategy.capture.snapshots import Kind, NamesThatCount, OfData, Snapshot, take
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir import user_code


@contextmanager
def globals_kept(
    module: nn.Module, seen: set[int], of_data: OfData = lambda _: False
) -> Iterator[dict[str, dict[str, Any]]]:
    """Undo changes of globals and closures, and refuse a step that makes any.

    They are those of the methods of the module's classes, and of the functions that these name.
    Those of installed packages are undone, not refused. Caches (`functools.lru_cache`) that the
    step fills with fake tensors are emptied.

    Args:
        seen: ids of objects that have snapshots elsewhere; gets those of the objects searched here.
        of_data: whether a tensor has values of the batch.

    Yields:
        Module name -> its globals.

    Raises:
        CaptureError: the step sets a global, or changes a container or an object in globals or
            closures.
    """
    kinds = user_classes(module)
    step: Any = module.training_step
    methods = user_code.reached_functions([step, *_step_methods(kinds)])
    named: set[str] = set()
    for method in methods:
        named.update(user_code.code_names(method.__code__))
    files = _named_files(methods, named)
    installed = _installed_modules(module, files, kinds)

    snapshots: list[Snapshot] = []
    for path, namespace in files.items():
        is_noticed = path not in installed
        names = NamesThatCount(counted=frozenset(named))
        snapshots.append(take(Kind.NAMES, path, namespace, is_noticed, names=names))

    values = _values_of(files, named)
    for method in methods:
        values += _closure_and_defaults(method)
    values += [(f"{kind.__module__}.{kind.__name__}", "", kind) for kind in kinds]
    values += _trainer_objects(module, user_code.stored_names(step))
    for place, name, value in values:
        if _may_change(name, value):
            is_noticed = place.rpartition(".")[0] not in installed
            snapshots += snapshots_in(value, place, seen, is_noticed=is_noticed, named=named)

    caches = _caches(files, kinds, [value for _, _, value in values])
    try:
        with restored(snapshots, of_data) as changed:
            yield files
    finally:
        for function, num_misses in caches:
            if function.cache_info().misses != num_misses:
                function.cache_clear()
    if changed:
        raise CaptureError(
            f"the step changes variables outside of the module ({', '.join(sorted(changed))}): a"
            " captured step repeats tensor work only, so this would happen once and never again",
            "do it before training or in a hook such as on_train_batch_end (the returned dict"
            " arrives there), or use register_buffer for tensors",
        )


# (path in messages, name, value)
_Value = tuple[str, str, Any]


def _values_of(files: dict[str, dict[str, Any]], named: Set[str]) -> list[_Value]:
    """Return (path, name, value) of the globals called `named`."""
    values = []
    for path, namespace in files.items():
        for name in sorted(named & namespace.keys()):
            values.append((f"{path}.{name}", name, namespace[name]))
    return values


def _installed_modules(
    module: nn.Module, files: dict[str, dict[str, Any]], kinds: Iterable[type]
) -> set[str]:
    """Return the names of modules of installed packages, other than those of the user's classes.

    They fill caches (einops: a dict of backends), which are no changes of the user's.

    Args:
        files: module name -> its globals.
        kinds: the classes of the module and its submodules.
    """
    own_packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    installed = {kind.__module__ for kind in kinds if not is_own_class(kind)}
    for path, namespace in files.items():
        is_foreign = path.partition(".")[0] not in own_packages
        if is_foreign and _is_installed_file(namespace.get("__file__")):
            installed.add(path)
    return installed


def _caches(
    files: dict[str, dict[str, Any]], kinds: Iterable[type], values: Iterable[Any]
) -> list[tuple[Any, int]]:
    """Return the functions with a `functools` cache, each with its number of misses.

    Args:
        files: module name -> its globals.
        kinds: the module's classes.
        values: what closures hold, and globals.
    """
    namespaces: list[Mapping[str, Any]] = [vars(kind) for kind in kinds]
    namespaces += files.values()
    functions = list(values)
    for namespace in namespaces:
        functions += namespace.values()
    caches = []
    for function in functions:
        if hasattr(type(function), "cache_info"):
            caches.append((function, function.cache_info().misses))
    return caches


def _step_methods(kinds: Iterable[type]) -> list[types.FunctionType]:
    """Return the methods of the module's classes that a step may call.

    Lightning's other hooks are left out. They are reached if the step's code names them.
    """
    hooks = {name for name in dir(LightningModule) if name[:1] != "_"} - {"forward"}
    return [function for function in functions_in(kinds) if function.__name__ not in hooks]


def _named_files(
    methods: Collection[types.FunctionType], named: Set[str]
) -> dict[str, dict[str, Any]]:
    """Return module name -> globals, of the methods and of the user's modules that these name.

    Such as `meters.ITEMS`.
    """
    files = {method.__globals__["__name__"]: method.__globals__ for method in methods}
    for method in methods:
        for module in user_code.imported_in(method):
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
    """Return whether a file belongs to an installed package, not to the user."""
    return path is not None and user_code.is_installed(path)


def _trainer_objects(module: nn.Module, sets: Collection[str]) -> Iterator[_Value]:
    """Yield (place, name, object) of the Trainer's callbacks, data module and datasets.

    Threads (a monitor, a loader) may use them during the step. So only those are included that have
    attributes which the step sets or changes.

    Args:
        sets: names of these attributes.
    """
    trainer: Any = getattr(module, "_trainer", None)
    objects = []
    for callback in getattr(trainer, "callbacks", ()):
        objects.append(("trainer.callbacks", "callback", callback))
    objects.append(("trainer.datamodule", "datamodule", getattr(trainer, "datamodule", None)))
    for loader in loaders_of(trainer):
        objects.append(("the dataset", "dataset", getattr(loader, "dataset", None)))

    for place, name, value in objects:
        if not set(sets).isdisjoint(dir(value)):
            yield place, name, value


def loaders_of(trainer: Any) -> list[Any]:
    """Return the user's loaders of training batches; [] if the Trainer has not made them yet."""
    combined = getattr(getattr(trainer, "fit_loop", None), "_combined_loader", None)
    if combined is None:
        return []
    return [getattr(loader, "_loader", loader) for loader in combined.flattened]


def _closure_and_defaults(function: types.FunctionType) -> Iterator[_Value]:
    """Yield (place, name, value) of a function's variables of enclosing functions, each as its cell
    and as its content, and of its default arguments.
    """
    for name, cell in user_code.closure_values(function).items():
        place = f"{name} of {function.__qualname__}"
        yield place, name, cell
        yield place, name, cell.cell_contents
    for defaults in (function.__defaults__, function.__kwdefaults__):
        yield f"defaults of {function.__qualname__}", "defaults", defaults


def _may_change(name: str, value: Any) -> bool:
    """Whether a value may be changed by the user's code: not an object of a library, a logger.
    False for names that begin with `__`.
    """
    if name.startswith("__"):
        return False
    is_users = is_user_module(sys.modules.get(type(value).__module__))
    return is_users or not has_fields(value) or isinstance(value, (*RECORDS, *WITH_STATE))
