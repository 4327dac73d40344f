"""The user's Python code: the line of an event, and the names and functions in a function's code.

Nothing is run. A name in the code may be on a path that is never taken.
"""

import dis
import functools
import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Located without importing them: neither is needed here.
_FRAMEWORKS: list[str] = []
for _name in ("torch", "lightning"):
    _spec = find_spec(_name)
    if _spec is not None:
        _FRAMEWORKS.extend(_spec.submodule_search_locations or ())
_NOT_USER = (
    "<",
    # Launchers such as `alpa` and `torchrun`.
    os.path.join(sysconfig.get_path("scripts"), ""),
    *(os.path.join(os.path.abspath(folder), "") for folder in (*_FRAMEWORKS, _PACKAGE)),
)
_NOT_USER_NAMES = tuple(
    f"{os.sep}{name}{os.sep}" for name in ("torchmetrics", "lightning_fabric", "pytorch_lightning")
)
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")


@cache
def is_user_file(path: str) -> bool:
    """Whether a file belongs to the user, or to a library other than those below.

    These are torch, Lightning, torchmetrics, the standard library, installed launchers and this
    package.
    """
    if path.startswith(_NOT_USER) or any(name in path for name in _NOT_USER_NAMES):
        return False
    return not _is_pythons(path)


def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed package."""
    return "site-packages" in path or "dist-packages" in path


def _describe(code: CodeType, line: int) -> str:
    """Return `file:line: code`."""
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}: {text}" if text else f"{code.co_filename}:{line}"


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost user frame at or above `frame`."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_position(frame: FrameType | None) -> tuple[str, int] | None:
    """Return file and line of the innermost user frame at or above `frame`; None without one."""
    user = _user_frame(frame)
    return None if user is None else (user.f_code.co_filename, user.f_lineno)


def user_frame() -> str:
    """Return `file:line: code` of the innermost user frame of the running stack."""
    user = _user_frame(sys._getframe(1))
    return "line unknown" if user is None else _describe(user.f_code, user.f_lineno)


def own_line() -> str:
    """Return `file:line: code` of the innermost frame of the running stack in the user's project.

    If there is none, the frame may be in an installed package; without any, it is `line unknown`.
    """
    frame = _user_frame(sys._getframe(1))
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame = _user_frame(frame.f_back)
    return user_frame() if frame is None else _describe(frame.f_code, frame.f_lineno)


def asked_by_user(frame: FrameType | None) -> bool:
    """Whether `frame` runs the user's code, or the standard library's on its behalf.

    Calls of `logging` do not count, which reads the time for its records, nor do imports, which run
    once.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        is_library = path[:1] == "<" or _is_pythons(path)
        if not is_library or "logging" in path:
            break
        frame = frame.f_back
    caller = frame

    # `dispatch_trace` is the function of torch that starts to trace.
    while frame is not None and frame.f_code.co_name != "dispatch_trace":
        if frame.f_code.co_name == "_find_and_load":
            return False
        frame = frame.f_back
    return caller is not None and is_user_file(caller.f_code.co_filename)


def asking_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame at or above `frame` that is not the standard library's.

    None inside an import, which runs once, and if there is no such frame.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if frame.f_code.co_name == "_find_and_load":
            return None
        if path[:1] != "<" and not _is_pythons(path):
            return frame
        frame = frame.f_back
    return None


def _is_pythons(path: str) -> bool:
    """Whether a file belongs to the standard library."""
    # The folder site-packages is inside the standard library's.
    return path.startswith(_STDLIB) and not is_installed(path)


def user_line(traceback: TracebackType | None) -> str:
    """Return `file:line: code` of the innermost user frame of an exception's traceback.

    It is `line unknown` if there is none.
    """
    innermost = None
    for frame, line in walk_tb(traceback):
        if is_user_file(frame.f_code.co_filename):
            innermost = frame.f_code, line
    return "line unknown" if innermost is None else _describe(*innermost)


# How many calls deep functions are followed.
MAX_DEPTH = 4

# Calls that only print or log.
_PRINTING = {
    "print",
    "write",
    "debug",
    "info",
    "warning",
    "warn",
    "rank_zero_info",
    "rank_zero_debug",
    "rank_zero_warn",
}

# Methods that change a container.
_CONTAINER_CHANGES = {"add", "append", "extend", "insert", "setdefault", "update"}


def mentioned_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the global names and attributes in the code of `function` and of what it calls.

    That are the user's functions of `reached_functions`.
    """
    names: set[str] = set()
    for reached in reached_functions([function]):
        names.update(code_names(reached.__code__))
    return frozenset(names)


def stored_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the attributes and outer variables that the code of `function` may set or change.

    Changes are those of tensors (`self.count.fill_(n)`) and containers (`self.count["n"] = n`). The
    functions that it calls are included (`reached_functions`). If the code calls `setattr` or the
    like, all its strings may be names.
    """
    stored: set[str] = set()
    for reached in reached_functions([function]):
        instructions = list(dis.get_instructions(reached.__code__))
        for position, instruction in enumerate(instructions):
            if instruction.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"):
                stored.add(instruction.argval)
            elif instruction.opname == "STORE_SUBSCR":
                stored |= _changed_name(instructions, position - 2)
            elif _loads_changing_method(instruction):
                stored |= _changed_name(instructions, position - 1)

        names = set(code_names(reached.__code__))
        if not names.isdisjoint(("setattr", "register_buffer")):
            constants = reached.__code__.co_consts
            stored.update(value for value in (*constants, *names) if isinstance(value, str))
    return frozenset(stored)


def _loads_changing_method(instruction: dis.Instruction) -> bool:
    """Whether an instruction loads a method that changes a container or a tensor (`fill_`)."""
    is_method = instruction.opname == "LOAD_METHOD" or "NULL" in instruction.argrepr
    if not is_method:
        return False
    return instruction.argval in _CONTAINER_CHANGES or instruction.argval[-1:] == "_"


def _changed_name(instructions: list[dis.Instruction], position: int) -> set[str]:
    """Return the name of the object that is loaded at `position`, or of which it is an item.

    Empty if it is a local variable.
    """
    # Of `self.count[key]`, the instructions before are those of `self.count` and `key`.
    while instructions[position].opname == "BINARY_SUBSCR":
        position -= 2
    if instructions[position].opname in ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF"):
        return {instructions[position].argval}
    return set()


def is_said(frame: FrameType) -> bool:
    """Whether the current expression of a frame is only printed or logged by a statement.

    Such as the f-string of `print(f"batch {batch_idx}")`.
    """
    instructions = []
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.positions and instruction.positions.lineno:
            instructions.append(instruction)
    current = dis.Positions(*list(frame.f_code.co_positions())[frame.f_lasti // 2])

    for call, following in pairwise(instructions):
        # A statement drops the result of its call.
        is_statement = call.opname[:4] == "CALL" and following.opname == "POP_TOP"
        if not is_statement or not _contains(call.positions, current):
            continue
        for instruction in instructions:
            is_printing = instruction.argval in _PRINTING
            if is_printing and _contains(call.positions, instruction.positions):
                return True
    return False


def _contains(outer: Any, inner: Any) -> bool:
    """Whether the source range `inner` (`dis.Positions`) is inside `outer`."""
    starts_inside = (outer.lineno, outer.col_offset) <= (inner.lineno, inner.col_offset)
    outer_end = (outer.end_lineno, outer.end_col_offset)
    inner_end = (inner.end_lineno, inner.end_col_offset)
    return starts_inside and inner_end <= outer_end


def reached_functions(functions: Iterable[Callable[..., Any]]) -> list[types.FunctionType]:
    """Return those of `functions` that are written in Python, and the user's functions they name.

    Names are looked up in globals, closures, and on the object that a method is bound to.
    """
    reached: dict[types.FunctionType, None] = {}
    for function in functions:
        _reach(function, reached, 0)
    return list(reached)


def code_names(code: types.CodeType) -> Iterator[str]:
    """Yield the globals and attributes (`co_names`) in `code` and in functions, lambdas and
    comprehensions inside it.
    """
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


def closure_values(function: types.FunctionType) -> dict[str, types.CellType]:
    """Return the variables of enclosing functions that have a value, as cells by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # An empty cell: the variable has not been assigned yet.
    return {name: cell for name, cell in cells if cell != types.CellType()}


def is_user_code(function: Any) -> bool:
    """Whether a function is written in Python, in a file of the user (`is_user_file`)."""
    inner = unwrapped(function)
    return isinstance(inner, types.FunctionType) and is_user_file(inner.__code__.co_filename)


def unwrapped(function: Any) -> Any:
    """Return the function behind methods, partials and decorators with `functools.wraps`."""
    return _layers(function)[-1]


def _layers(function: Any) -> list[Any]:
    """Return a function and the functions that it wraps, outermost first."""
    layers = [function]
    while True:
        inner: Any
        if isinstance(function, functools.partial):
            inner = function.func
        elif isinstance(function, types.MethodType | staticmethod | classmethod):
            inner = function.__func__
        else:
            # Not by `getattr`: mocks, `torch.classes` and dicts with attributes have any attribute.
            inner = getattr(function, "__dict__", {}).get("__wrapped__")
        if inner is None:
            return layers
        function = inner
        layers.append(function)


def _reach(function: Any, reached: dict[types.FunctionType, None], depth: int) -> None:
    """Add `function` and the user's functions that its code names, and theirs in turn, to
    `reached`.

    Args:
        depth: how many functions are between it and the first one; at most `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        return
    owner = getattr(function, "__self__", None)
    layers = _layers(function)
    for layer in layers:
        if not isinstance(layer, types.FunctionType) or layer in reached:
            continue
        # Decorators of torch are skipped.
        is_decorator = layer is not layers[-1]
        if is_decorator and not is_user_file(layer.__code__.co_filename):
            continue

        reached[layer] = None
        names = set(code_names(layer.__code__))
        for value in _named_values(layer, names, owner):
            for callee in functions_of(value, names):
                _reach(callee, reached, depth + 1)


def _named_values(function: types.FunctionType, names: set[str], owner: Any) -> list[Any]:
    """Return the objects that code with `names` may use.

    Args:
        owner: the object that a method is bound to, or None.
    """
    values = [cell.cell_contents for cell in closure_values(function).values()]
    values += [function.__globals__[name] for name in names if name in function.__globals__]
    values += imported_in(function)
    if owner is not None:
        attributes = getattr(owner, "__dict__", {})
        values += [attributes[name] for name in names if name in attributes]
        values.append(owner)
    return values


def imported_in(function: types.FunctionType) -> list[types.ModuleType]:
    """Return the user's modules that the code of a function may import in its body; only modules
    that are imported already.
    """
    package = function.__globals__.get("__package__") or ""
    modules = []
    for name in code_names(function.__code__):
        for path in (name, f"{package}.{name}"):
            module = sys.modules.get(path)
            file = getattr(module, "__file__", None)
            if module is not None and isinstance(file, str) and is_user_file(file):
                modules.append(module)
    return modules


# Containers with more items are not searched for functions.
_MAX_ITEMS = 100


def functions_of(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield the user's functions that code with `names` may call through `value`.

    Args:
        value: a function, a module, a class, an object, or a container of these; larger ones than
            `_MAX_ITEMS` are not searched.
    """
    if isinstance(value, list | tuple | dict) and len(value) <= _MAX_ITEMS:
        # A subclass's own `values` may compute them.
        for item in dict.values(value) if isinstance(value, dict) else value:
            yield from _functions_of_one(item, names)
    yield from _functions_of_one(value, names)


def _functions_of_one(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield the functions of `functions_of`, without those of a container's items."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        if is_user_code(value):
            yield value
    elif isinstance(value, types.ModuleType | type):
        # Such as `losses.smooth(x)` and `Schedule.now()`.
        for member in _members(getattr(value, "__mro__", (value,)), names):
            yield unwrapped(member)
    else:
        for member in _members(type(value).__mro__, names):
            yield types.MethodType(unwrapped(member), value)


def _members(owners: Iterable[Any], names: set[str]) -> Iterator[Any]:
    """Yield the user's functions called `names` of modules or of a class and its bases.

    All bases count, as `super()` may call theirs.
    """
    for owner in owners:
        namespace = vars(owner)
        for name in names & namespace.keys():
            member = namespace[name]
            if is_user_code(member):
                yield member
