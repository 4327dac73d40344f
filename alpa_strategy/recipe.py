"""Recipes: a YAML file that names a model, its data, the Trainer's arguments and the strategy's
options.

    model: {_target_: gpt.GPT, num_layers: 4, ...}      a LightningModule
    data: {_target_: text.TextData, batch_size: 8, ...}  a LightningDataModule
    trainer: {max_steps: 300, ...}                       arguments of lightning.Trainer
    strategy: {parallel: auto, ...}                      options of AlpaStrategy
    seed: 0

`_target_` is looked up beside the recipe file first, then as an importable name. Everything is
checked when the recipe is read, so that a misspelt key is an error before anything is built.
"""

import importlib
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from alpa_strategy import files
from alpa_strategy.errors import AlpaError, OptionError, check_names, did_you_mean
from alpa_strategy.files import RECIPES, BadFileError, find_named, shipped_names
from alpa_strategy.strategy import OPTION_NAMES, AlpaStrategy

_TARGET_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
TARGET = "_target_"
SECTIONS = ("model", "data", "trainer", "strategy")
# Of a recipe, and what overrides may begin with.
KEYS = (*SECTIONS, "seed")


@dataclass(frozen=True)
class Recipe:
    """A recipe as read and checked. The sections are plain data; `model` and `data` carry their
    `_target_`.
    """

    path: Path
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply `key=value` overrides (dotted keys, YAML values) and check every key.

    `path` is a file, or the name of a recipe that comes with the package, such as `gpt_tiny`.

    Raises OptionError: no file, a YAML mistake (with its line), an unknown key (with the nearest),
    a wrong type.
    """
    # Neither: `read_yaml` says what there is.
    path = find_named(path, RECIPES) or Path(path)
    content = read_yaml(path)
    check_names(content, KEYS, f"{path}: unknown key")
    merged = _merge(path, content, overrides, KEYS)
    seed = merged.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise OptionError(
            f"{path}: seed is {seed!r}, not a whole number", "write for example seed: 0"
        )
    sections = {section: dict(merged.get(section) or {}) for section in SECTIONS}
    recipe = Recipe(path, **sections, seed=seed)
    for section in ("model", "data"):
        if TARGET not in sections[section]:
            raise OptionError(
                f"{path}: section {section!r} has no {TARGET!r}",
                f"name the class, for example {section}: {{{TARGET}: ...}}",
            )
        _checked_target(recipe, sections[section], section)
    rows = recipe.data.get("batch_size")
    if type(rows) is int and rows < 1:
        raise OptionError(f"{path}: data.batch_size is {rows}", "give a whole number of at least 1")
    _check_call(lightning.Trainer, recipe.trainer, f"{path}: trainer", required=False)
    # The Trainer tells the strategy how many batches it accumulates; `alpa plan` takes it as an
    # option.
    check_names(
        recipe.strategy,
        [*OPTION_NAMES, "accumulate_grad_batches"],
        f"{path}: strategy: AlpaStrategy has no option",
    )
    return recipe


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping as plain data, interpolations as written; OptionError with file and line if it
    is not valid.
    """
    path = Path(path)
    try:
        content = files.read_yaml(path)
    except FileNotFoundError:
        raise OptionError(f"there is no recipe {path}", _nearest_recipe(path)) from None
    except BadFileError as error:
        raise OptionError(f"{path} {error}", "correct it: a recipe is a small YAML file") from None
    except (OSError, OmegaConfBaseException) as error:
        raise OptionError(
            f"{path} cannot be read: {_first_line(error)}", "give a YAML text file"
        ) from None
    if not OmegaConf.is_dict(content):
        raise OptionError(
            f"{path} is not a mapping of keys to values",
            "start with lines such as model: and data:",
        )
    return typing.cast("dict[str, Any]", OmegaConf.to_container(content, resolve=False))


def _nearest_recipe(path: Path) -> str:
    beside = [file.name for file in path.parent.glob("*.y*ml")]
    shipped = shipped_names(RECIPES) if len(path.parts) == 1 else []
    known = f"give a file or one of: {', '.join(shipped)}" if shipped else "check the path"
    return did_you_mean(path.name, beside) or did_you_mean(path.stem, shipped) or known


def build_model(recipe: Recipe) -> lightning.LightningModule:
    """The recipe's model (on the default device of the caller: under `torch.device("meta")` no
    weight is made).
    """
    return _instantiate(recipe, recipe.model, "model")


def build_data(recipe: Recipe) -> lightning.LightningDataModule:
    """The recipe's data module."""
    return _instantiate(recipe, recipe.data, "data")


def build_trainer(recipe: Recipe) -> lightning.Trainer:
    """The Trainer with `AlpaStrategy(**strategy)`; `trainer.strategy` (`ddp`, ...) replaces it, for
    comparison.
    """
    arguments = {
        key: _instantiate(recipe, value, f"trainer.{key}") for key, value in recipe.trainer.items()
    }
    # Else `trainer.strategy=ddp`: the recipe's own options are for ours alone.
    if arguments.get("strategy") is None:
        arguments["strategy"] = _call(
            AlpaStrategy, dict(recipe.strategy), f"{recipe.path}: strategy"
        )
    return _call(lightning.Trainer, arguments, f"{recipe.path}: trainer")


def resolve_target(target: str, folder: Path, what: str = TARGET) -> Any:
    """The class (or function) that `module.Name` means: a file in `folder` first, then an
    importable module.
    """
    if not _TARGET_NAME.fullmatch(str(target)):
        raise OptionError(
            f"{what}: {target!r} is no name in Python", "write file.Class, for example gpt.GPT"
        )
    module_name, _, name = str(target).rpartition(".")
    if not module_name:
        raise OptionError(
            f"{what}: {target!r} has no module",
            f"write file.Class, for example gpt.{target or 'GPT'}",
        )
    # `text.py` beside the recipe is meant, not an installed package of that name.
    file = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    try:
        module = (
            _import_file(module_name, file.resolve())
            if file.is_file()
            else importlib.import_module(module_name)
        )
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"{what}: {target}: {module_name} needs {error.name!r}", "install it"
            ) from None
        near = did_you_mean(module_name, [p.stem for p in folder.glob("*.py")])
        fix = near or f"put {module_name}.py into {folder}, or install the module"
        raise OptionError(f"{what}: {target}: no module {module_name!r}", fix) from None
    if not hasattr(module, name):
        members = [n for n, value in vars(module).items() if callable(value)]
        where = getattr(module, "__file__", module_name)
        raise OptionError(
            f"{what}: {target}: {where} has no {name!r}",
            did_you_mean(name, members) or "check the name",
        )
    return getattr(module, name)


def _import_file(name: str, file: Path) -> types.ModuleType:
    """Import a file by its path, once. Its folder joins the end of sys.path, for neighbours and
    loader workers.
    """
    loaded = sys.modules.get(name)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == file:
        return loaded
    # Another module of that name may be in use (`text`, `random`): it keeps its name, ours gets one
    # with its folder.
    key = name if loaded is None else f"{name}@{file.parent}"
    if key in sys.modules:
        return sys.modules[key]
    # At the end, so that a recipe's neighbour called `random.py` hides nothing. Loader workers
    # import by name.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(key, file)
    if spec is None or spec.loader is None:
        raise OptionError(f"{file} cannot be imported", "give a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[key]
        raise OptionError(
            f"{error.filename}, line {error.lineno}: {error.msg}", "correct the Python file"
        ) from None
    except BaseException:
        # A second attempt shall see the error again, not half a module.
        del sys.modules[key]
        raise
    return module


def _merge(
    path: Path, content: dict[str, Any], overrides: Sequence[str], known: Iterable[str]
) -> dict[str, Any]:
    config = OmegaConf.create(content)
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            raise OptionError(
                f"override {text!r} is not of the form key=value",
                "write for example trainer.devices=2",
            )
        check_names([parts[0]], known, f"override {text!r}: unknown key")
        for parent in accumulate(parts[:-1], "{}.{}".format):
            node = OmegaConf.select(config, parent)
            if node is not None and not OmegaConf.is_config(node):
                raise OptionError(
                    f"override {text!r}: {parent} is {node!r} and has no parts",
                    f"override {parent} itself",
                )
        try:
            # As OmegaConf reads a file: `1e-3` is a number there, `null` is None.
            parsed = OmegaConf.from_dotlist([f"value={value}"])
            OmegaConf.update(config, key, parsed["value"], merge=True, force_add=True)
        except Exception as error:
            # OmegaConf and YAML each have their own family of errors.
            raise OptionError(
                f"override {text!r}: {_first_line(error)}", "write key=value with a YAML value"
            ) from None
    try:
        merged = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise OptionError(
            f"{path}: {_first_line(error)}", "define it, or give it as key=value"
        ) from None
    # As its content was.
    assert isinstance(merged, dict)
    for section in SECTIONS:
        if not isinstance(merged.get(section) or {}, dict):
            raise OptionError(
                f"{path}: {section} is {merged[section]!r}, not a mapping",
                f"write {section}: {{key: value}}",
            )
    return typing.cast("dict[str, Any]", merged)


def _checked_target(recipe: Recipe, node: Mapping[str, Any], where: str) -> Any:
    """What a mapping's `_target_` means, which takes the other keys as arguments."""
    factory = resolve_target(node[TARGET], recipe.path.parent)
    arguments = {key: value for key, value in node.items() if key != TARGET}
    _check_call(factory, arguments, f"{recipe.path}: {where}", required=True)
    return factory


def _check_call(
    factory: Callable[..., Any], arguments: Mapping[str, Any], where: str, *, required: bool
) -> None:
    """OptionError unless `factory(**arguments)` would find every name known, present and of its
    simple type.
    """
    parameters = {n: p for n, p in inspect.signature(factory).parameters.items() if n != "self"}
    name = getattr(factory, "__name__", str(factory))
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        check_names(arguments, parameters, f"{where}: {name} has no argument")
    keywords = [
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [
        n
        for n in keywords
        if parameters[n].default is inspect.Parameter.empty and n not in arguments
    ]
    if required and missing:
        raise OptionError(
            f"{where}: {name} needs {', '.join(missing)}", "add it to the recipe or as key=value"
        )
    try:
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    # Annotations of user classes may not resolve; the constructor still checks its arguments.
    except Exception:
        return
    for key, value in arguments.items():
        if key in hints and not _fits(value, hints[key]):
            expected = (
                getattr(hints[key], "__name__", None)
                if inspect.isclass(hints[key])
                else str(hints[key])
            )
            raise OptionError(f"{where}.{key} is {value!r}", f"give a value of type {expected}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value may be meant for a hint; anything but plain numbers, strings and their
    unions passes.
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    # YAML reads `1` as a whole number where 1.0 is meant; `true` is neither.
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool):
        return isinstance(value, hint)
    return value is None if hint is type(None) else True


def _instantiate(recipe: Recipe, node: Any, where: str) -> Any:
    """Build `node` and every mapping with a `_target_` inside it (callbacks, loggers, parts of a
    model).
    """
    if isinstance(node, dict):
        factory = _checked_target(recipe, node, where) if TARGET in node else None
        built = {
            key: _instantiate(recipe, value, f"{where}.{key}")
            for key, value in node.items()
            if key != TARGET
        }
        return built if factory is None else _call(factory, built, f"{recipe.path}: {where}")
    return (
        [_instantiate(recipe, value, where) for value in node] if isinstance(node, list) else node
    )


def _call(factory: Callable[..., Any], arguments: dict[str, Any], where: str) -> Any:
    try:
        return factory(**arguments)
    except AlpaError:
        raise
    except (TypeError, ValueError, MisconfigurationException) as error:
        name = getattr(factory, "__name__", str(factory))
        raise OptionError(
            f"{where}: {name} refused its arguments: {error}", "correct the value"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
