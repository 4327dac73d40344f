"""Recipes: YAML files with a model, its data, the Trainer's arguments and the strategy's options.

    model: {_target_: gpt.GPT, num_layers: 4, ...}      a LightningModule
    data: {_target_: text.TextData, batch_size: 8, ...}  a LightningDataModule
    trainer: {max_steps: 300, ...}                       arguments of lightning.Trainer
    strategy: {parallel: auto, ...}                      options of AlpaStrategy
    seed: 0

`_target_` is looked up in the recipe's folder first, then as an importable name. Every key is
checked when the recipe is read: a misspelt one is an error before anything is built.
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
# Keys of a recipe, and first keys of its overrides.
KEYS = (*SECTIONS, "seed")


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and checked. Its sections are plain data."""

    # The recipe's file.
    path: Path

    # `_target_`, a LightningModule, and its arguments.
    model: Mapping[str, Any]

    # `_target_`, a LightningDataModule, and its arguments.
    data: Mapping[str, Any]

    # Arguments of the Trainer.
    trainer: Mapping[str, Any] = field(default_factory=dict)

    # Options of AlpaStrategy.
    strategy: Mapping[str, Any] = field(default_factory=dict)

    # Seed of all random states; None: they are not seeded.
    seed: int | None = None


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply overrides and check every key.

    Args:
        path: a file, or the name of a recipe that comes with the package, such as `gpt_tiny`.
        overrides: texts `key=value` with dotted keys and YAML values.

    Raises:
        OptionError: there is no such file, it is not valid YAML, a key is unknown or missing, or a
            value is wrong.
    """
    # Without such a file, `read_yaml` raises an error with the names that there are.
    path = find_named(path, RECIPES) or Path(path)
    content = read_yaml(path)
    check_names(content, KEYS, f"{path}: unknown key")
    merged = _merge(path, content, overrides, KEYS)

    seed = merged.get("seed")
    is_integer = isinstance(seed, int) and not isinstance(seed, bool)
    if seed is not None and not is_integer:
        raise OptionError(
            f"{path}: seed is {seed!r}, not a whole number", "write for example seed: 0"
        )

    sections = {}
    for section in SECTIONS:
        sections[section] = dict(merged.get(section) or {})
    recipe = Recipe(path, **sections, seed=seed)

    for section in ("model", "data"):
        if TARGET not in sections[section]:
            raise OptionError(
                f"{path}: section {section!r} has no {TARGET!r}",
                f"name the class, for example {section}: {{{TARGET}: ...}}",
            )
        _checked_target(recipe, sections[section], section)

    batch_size = recipe.data.get("batch_size")
    if type(batch_size) is int and batch_size < 1:
        problem = f"{path}: data.batch_size is {batch_size}"
        raise OptionError(problem, "give a whole number of at least 1")

    _check_call(lightning.Trainer, recipe.trainer, f"{path}: trainer", required=False)
    # `alpa plan` has no Trainer that sets `accumulate_grad_batches`: there it is an option.
    check_names(
        recipe.strategy,
        [*OPTION_NAMES, "accumulate_grad_batches"],
        f"{path}: strategy: AlpaStrategy has no option",
    )
    return recipe


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping as plain data; interpolations stay unresolved.

    Raises:
        OptionError: the file does not exist, cannot be read, or is no valid YAML mapping.
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
    """Return the fix for a missing recipe: a similar name; else all shipped names if `path` is a
    bare name, or to check the path.
    """
    neighbours = [file.name for file in path.parent.glob("*.y*ml")]
    shipped = shipped_names(RECIPES) if len(path.parts) == 1 else []
    known = f"give a file or one of: {', '.join(shipped)}" if shipped else "check the path"
    return did_you_mean(path.name, neighbours) or did_you_mean(path.stem, shipped) or known


def build_model(recipe: Recipe) -> lightning.LightningModule:
    """Build the recipe's model on the default device (`torch.device("meta")`: without memory)."""
    return _instantiate(recipe, recipe.model, "model")


def build_data(recipe: Recipe) -> lightning.LightningDataModule:
    """Build the recipe's data module."""
    return _instantiate(recipe, recipe.data, "data")


def build_trainer(recipe: Recipe) -> lightning.Trainer:
    """Build the Trainer with `AlpaStrategy(**strategy)`; OptionError if an argument is refused.

    An override `trainer.strategy=ddp` replaces the strategy, for comparison.
    """
    arguments = {}
    for key, value in recipe.trainer.items():
        arguments[key] = _instantiate(recipe, value, f"trainer.{key}")

    if arguments.get("strategy") is None:
        options = dict(recipe.strategy)
        arguments["strategy"] = _call(AlpaStrategy, options, f"{recipe.path}: strategy")
    return _call(lightning.Trainer, arguments, f"{recipe.path}: trainer")


def resolve_target(target: str, folder: Path, label: str = TARGET) -> Any:
    """Return the class or function that `module.Name` means.

    Args:
        target: the name. Its module is a file in `folder`, else an importable module.
        folder: folder of the recipe.
        label: the key or option that has this value, for messages.

    Raises:
        OptionError: there is no such module or name, the module needs one that is missing, or its
            file in `folder` has a syntax error. Other errors of its code pass.
    """
    if not _TARGET_NAME.fullmatch(str(target)):
        raise OptionError(
            f"{label}: {target!r} is no name in Python", "write file.Class, for example gpt.GPT"
        )
    module_name, _, name = str(target).rpartition(".")
    if not module_name:
        raise OptionError(
            f"{label}: {target!r} has no module",
            f"write file.Class, for example gpt.{target or 'GPT'}",
        )

    # A `text.py` in the recipe's folder precedes an installed package of that name.
    file = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    try:
        if file.is_file():
            module = _import_file(module_name, file.resolve())
        else:
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"{label}: {target}: {module_name} needs {error.name!r}", "install it"
            ) from None
        near = did_you_mean(module_name, [p.stem for p in folder.glob("*.py")])
        fix = near or f"put {module_name}.py into {folder}, or install the module"
        raise OptionError(f"{label}: {target}: no module {module_name!r}", fix) from None

    if not hasattr(module, name):
        members = [n for n, value in vars(module).items() if callable(value)]
        path = getattr(module, "__file__", module_name)
        raise OptionError(
            f"{label}: {target}: {path} has no {name!r}",
            did_you_mean(name, members) or "check the name",
        )
    return getattr(module, name)


def _import_file(name: str, file: Path) -> types.ModuleType:
    """Import a file by its path, once.

    Its folder joins the end of sys.path, for imports of its neighbours and in loader workers.

    Raises:
        OptionError: the file is no Python file, or has a syntax error. Other errors of its code
            pass.
    """
    loaded = sys.modules.get(name)
    if loaded is not None:
        loaded_file = getattr(loaded, "__file__", None) or ""
        if Path(loaded_file).resolve() == file:
            return loaded

    # Another module of that name may be in use (`text`, `random`). It keeps its name, and the
    # name of this one includes its folder.
    key = name if loaded is None else f"{name}@{file.parent}"
    if key in sys.modules:
        return sys.modules[key]

    # At the end, so that a file called `random.py` in the recipe's folder hides no other module.
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
        # A second import must raise the error again, not return an incomplete module.
        del sys.modules[key]
        raise
    return module


def _merge(
    path: Path, content: dict[str, Any], overrides: Sequence[str], known: Iterable[str]
) -> dict[str, Any]:
    """Return the recipe's content with overrides applied and interpolations resolved.

    Args:
        path: the recipe's file, for messages.
        content: the file's content.
        overrides: texts `key=value`.
        known: first keys that overrides may have.

    Raises:
        OptionError: an override or an interpolation is invalid, or a section is no mapping.
    """
    config = OmegaConf.create(content)
    for text in overrides:
        _apply_override(config, text, known)

    try:
        merged = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise OptionError(
            f"{path}: {_first_line(error)}", "define it, or give it as key=value"
        ) from None

    # The content is a mapping.
    assert isinstance(merged, dict)
    for section in SECTIONS:
        if not isinstance(merged.get(section) or {}, dict):
            raise OptionError(
                f"{path}: {section} is {merged[section]!r}, not a mapping",
                f"write {section}: {{key: value}}",
            )
    return typing.cast("dict[str, Any]", merged)


def _apply_override(config: Any, text: str, known: Iterable[str]) -> None:
    """Apply one override, `key=value`, to the recipe's OmegaConf content, in place.

    Args:
        known: the sections that a recipe may have.

    Raises:
        OptionError: it is no `key=value`, names an unknown section, or does not fit the content.
    """
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
                f"override {text!r}: {parent} is {node!r} and has no keys",
                f"override {parent} itself",
            )

    try:
        # Parsed as OmegaConf parses a file: `1e-3` is a number, `null` is None.
        parsed = OmegaConf.from_dotlist([f"value={value}"])
        OmegaConf.update(config, key, parsed["value"], merge=True, force_add=True)
    # OmegaConf and YAML each have their own family of errors.
    except Exception as error:
        raise OptionError(
            f"override {text!r}: {_first_line(error)}", "write key=value with a YAML value"
        ) from None


def _checked_target(recipe: Recipe, node: Mapping[str, Any], where: str) -> Any:
    """Return the `_target_` of a mapping, whose other keys are arguments that it accepts;
    OptionError if not.
    """
    factory = resolve_target(node[TARGET], recipe.path.parent)
    arguments = {key: value for key, value in node.items() if key != TARGET}
    _check_call(factory, arguments, f"{recipe.path}: {where}", required=True)
    return factory


def _check_call(
    factory: Callable[..., Any], arguments: Mapping[str, Any], where: str, *, required: bool
) -> None:
    """Check the arguments of a call against the signature of `factory`.

    Args:
        factory: the class or function to be called.
        arguments: its keyword arguments.
        where: path of these arguments in the recipe, for messages.
        required: whether arguments without a default must be present.

    Raises:
        OptionError: an argument is unknown or missing, or has not its annotated simple type. Types
            are not checked if annotations cannot be resolved.
    """
    parameters = dict(inspect.signature(factory).parameters)
    parameters.pop("self", None)
    name = getattr(factory, "__name__", str(factory))
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        check_names(arguments, parameters, f"{where}: {name} has no argument")

    missing = []
    for parameter in parameters.values():
        is_keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        has_default = parameter.default is not inspect.Parameter.empty
        if is_keyword and not has_default and parameter.name not in arguments:
            missing.append(parameter.name)
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
            hint = hints[key]
            expected = hint.__name__ if inspect.isclass(hint) else str(hint)
            raise OptionError(f"{where}.{key} is {value!r}", f"give a value of type {expected}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value may have the annotated type.

    Only numbers, strings, booleans, None and their unions are checked; other types pass.
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    # YAML reads `1` as an integer, also for a float argument. A bool is an int in Python.
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool):
        return isinstance(value, hint)
    return value is None if hint is type(None) else True


def _instantiate(recipe: Recipe, node: Any, where: str) -> Any:
    """Return `node` with an object in the place of every mapping that has a `_target_`, itself
    included (callbacks, loggers, submodules).

    Args:
        recipe: for the message.
        where: path of the node in the recipe, for the message.

    Raises:
        OptionError: a target cannot be imported, or does not take its arguments.
    """
    if isinstance(node, list):
        return [_instantiate(recipe, value, where) for value in node]
    if not isinstance(node, dict):
        return node

    # Checked before any of its arguments is built.
    factory = _checked_target(recipe, node, where) if TARGET in node else None
    built = {}
    for key, value in node.items():
        if key != TARGET:
            built[key] = _instantiate(recipe, value, f"{where}.{key}")
    return built if factory is None else _call(factory, built, f"{recipe.path}: {where}")


def _call(factory: Callable[..., Any], arguments: dict[str, Any], where: str) -> Any:
    """Call a class or function of a recipe.

    Raises:
        OptionError: it refuses its arguments; `where` names their place in the recipe.
    """
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
    """Return the first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
