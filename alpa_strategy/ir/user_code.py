"""The user's Python code: on which line something happened, and which names and functions a
function mentions.

Nothing is run. A name that code mentions is a may, not a must: it may stand on a path that is never
taken.
"""

import dis
import functools
import inspect
import linecache
import os
import re
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
# Found without importing them: this file is for readers that know neither.
_FRAMEWORKS: list[str] = []
for _name in ("torch", "lightning"):
    _spec = find_spec(_name)
    if _spec is not None:
        _FRAMEWORKS.extend(_spec.submodule_search_locations or ())
_NOT_USER = (
    "<",
    *(os.path.join(os.path.abspath(folder), "") for folder in (*_FRAMEWORKS, _PACKAGE)),
)
_NOT_USER_NAMES = tuple(
    f"{os.sep}{n}{os.sep}" for n in ("torchmetrics", "lightning_fabric", "pytorch_lightning")
)
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")


@cache
def is_user_file(path: str) -> bool:
    """True for code that is neither torch, Lightning, torchmetrics, the standard library nor this
    package.
    """
    if path.startswith(_NOT_USER) or any(name in path for name in _NOT_USER_NAMES):
        return False
    return not _is_pythons(path)


def is_installed(path: str) -> bool:
    """Whether a file is an installed package's."""
    return "site-packages" in path or "dist-packages" in path


def _describe(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}: {text}" if text else f"{code.co_filename}:{line}"


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost user frame at or above `frame`."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_position(frame: FrameType | None) -> tuple[str, int] | None:
    """File and line of the innermost user frame at or above `frame`."""
    found = _user_frame(frame)
    return None if found is None else (found.f_code.co_filename, found.f_lineno)


def user_frame() -> str:
    """`file:line: code` of the innermost user frame of the running stack."""
    found = _user_frame(sys._getframe(1))
    return "line unknown" if found is None else _describe(found.f_code, found.f_lineno)


def own_line() -> str:
    """`file:line: code` of the innermost frame of the running stack that is the user's own code, or
    else an installed package's.
    """
    frame = _user_frame(sys._getframe(1))
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame = _user_frame(frame.f_back)
    return user_frame() if frame is None else _describe(frame.f_code, frame.f_lineno)


def asked_by_user(frame: FrameType | None) -> bool:
    """Whether `frame` is of the user's code, or of the standard library's on its behalf.

    Not of `logging`'s, which asks for the time for itself, nor of an import, which asks once.
    """
    while (
        frame
        and ((path := frame.f_code.co_filename)[:1] == "<" or _is_pythons(path))
        and "logging" not in path
    ):
        frame = frame.f_back
    asking = frame
    while (
        frame is not None and frame.f_code.co_name != "dispatch_trace"
    ):  # where torch begins to trace
        if frame.f_code.co_name == "_find_and_load":
            return False
        frame = frame.f_back
    return asking is not None and is_user_file(asking.f_code.co_filename)


def asking_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame at or above `frame` that is not the standard library's; None where an
    import asks, once.
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
    return path.startswith(_STDLIB) and not is_installed(
        path
    )  # site-packages lies in the standard library's folder


def user_line(traceback: TracebackType | None) -> str:
    """`file:line: code` of the innermost user frame of an exception's traceback."""
    frames = [
        (f.f_code, line) for f, line in walk_tb(traceback) if is_user_file(f.f_code.co_filename)
    ]
    return _describe(*frames[-1]) if frames else "line unknown"


MAX_DEPTH = 4  # of functions that call functions
_SAYING = {
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
_FILLING = {"add", "append", "extend", "insert", "setdefault", "update"}


def mentioned_names(function: Callable[..., Any]) -> frozenset[str]:
    """Global names and attributes in the code of `function` and of the user's functions that it
    reaches by name.
    """
    return frozenset(
        name for reached in reached_functions([function]) for name in code_names(reached.__code__)
    )


def stored_names(function: Callable[..., Any]) -> frozenset[str]:
    """Attributes and outer variables that the code of `function` and of the user's functions that
    it reaches sets, or
    fills: a tensor, a container. Where it sets them by `setattr` and the like, all texts in it may
    be names."""
    found: set[str] = set()
    for reached in reached_functions([function]):
        done = list(dis.get_instructions(reached.__code__))
        for at, each in enumerate(done):
            is_method = each.opname == "LOAD_METHOD" or "NULL" in each.argrepr
            if each.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"):
                found.add(each.argval)
            elif each.opname == "STORE_SUBSCR" or (
                is_method and (each.argval in _FILLING or each.argval[-1:] == "_")
            ):
                at -= (
                    2 if each.opname == "STORE_SUBSCR" else 1
                )  # `self.count.fill_(n)`, `self.count["n"] = n`
                while done[at].opname == "BINARY_SUBSCR":
                    at -= 2
                found |= (
                    {done[at].argval}
                    if done[at].opname in ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF")
                    else set()
                )
        names = set(code_names(reached.__code__))
        if not names.isdisjoint(("setattr", "register_buffer")):
            found |= {
                value for value in (*reached.__code__.co_consts, *names) if isinstance(value, str)
            }
    return frozenset(found)


def reads_parameters(function: Callable[..., Any], first: int, end: int) -> bool:
    """Whether the code of `function` reads its positional parameters from number `first` on up to
    `end`, or `*args`.
    """
    code = unwrapped(function).__code__
    given = set(code.co_varnames[: code.co_argcount][first:end])
    if code.co_flags & inspect.CO_VARARGS:
        given.add(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
    read = (
        each.argval
        for each in dis.get_instructions(code)
        if "FAST" in each.opname or each.opname == "MAKE_CELL"
    )
    return any(
        not given.isdisjoint(names if isinstance(names, tuple) else (names,)) for names in read
    )


def is_said(frame: FrameType) -> bool:
    """Whether what a frame makes is for a call that only says it, as a statement: `print(f"batch
    {batch_idx}")`.
    """
    done = [
        each
        for each in dis.get_instructions(frame.f_code)
        if each.positions and each.positions.lineno
    ]

    def holds(call: Any, inner: Any) -> bool:
        ends = (call.end_lineno, call.end_col_offset), (inner.end_lineno, inner.end_col_offset)
        return (call.lineno, call.col_offset) <= (inner.lineno, inner.col_offset) and ends[
            1
        ] <= ends[0]

    here = dis.Positions(*list(frame.f_code.co_positions())[frame.f_lasti // 2])
    calls = [
        call
        for call, after in pairwise(done)
        if call.opname[:4] == "CALL" and after.opname == "POP_TOP"
    ]
    around = [call.positions for call in calls if holds(call.positions, here)]
    return any(
        each.argval in _SAYING and holds(call, each.positions) for call in around for each in done
    )


def names_set_from(function: types.FunctionType, source: re.Pattern[str]) -> set[str]:
    """Attributes that the code of `function` sets in a line that mentions a name like `source`."""
    lines: dict[int | None, list[dis.Instruction]] = {}
    for each in dis.get_instructions(function.__code__):
        lines.setdefault(each.positions.lineno if each.positions else None, []).append(each)
    names_set: set[str] = set()
    for instructions in lines.values():
        mentions_source = any(source.search(str(x.argval)) for x in instructions)
        if mentions_source:
            names_set.update(x.argval for x in instructions if x.opname == "STORE_ATTR")
    return names_set


def reached_functions(functions: Iterable[Callable[..., Any]]) -> list[types.FunctionType]:
    """Those of `functions` that are written in Python, and the user's functions that their code
    names.

    Names are looked up in globals, closures, and on the object that a method is bound to.
    """
    found: dict[types.FunctionType, None] = {}
    for function in functions:
        _reach(function, found, 0)
    return list(found)


def code_names(code: types.CodeType) -> Iterator[str]:
    """Names in `code` and in the functions, lambdas and comprehensions written inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


def closure_values(function: types.FunctionType) -> dict[str, types.CellType]:
    """The variables of enclosing functions that have a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {
        name: cell for name, cell in cells if cell != types.CellType()
    }  # an empty cell: not assigned yet


def is_user_code(function: Any) -> bool:
    """Whether a function is neither torch's, Lightning's nor the standard library's."""
    inner = unwrapped(function)
    return isinstance(inner, types.FunctionType) and is_user_file(inner.__code__.co_filename)


def unwrapped(function: Any) -> Any:
    """The function behind methods, partials and decorators that use `functools.wraps`."""
    return _layers(function)[-1]


def _layers(function: Any) -> list[Any]:
    """A function, and what is behind it, one after the other."""
    layers = [function]
    while True:
        inner: Any
        if isinstance(function, functools.partial):
            inner = function.func
        elif isinstance(function, types.MethodType | staticmethod | classmethod):
            inner = function.__func__
        else:  # dicts with attributes, `torch.classes` and mocks answer whatever they are asked for
            inner = getattr(function, "__dict__", {}).get("__wrapped__")
        if inner is None:
            return layers
        layers.append(function := inner)


def _reach(function: Any, found: dict[types.FunctionType, None], depth: int) -> None:
    owner, layers = getattr(function, "__self__", None), _layers(function)
    for layer in layers if depth <= MAX_DEPTH else ():
        if not isinstance(layer, types.FunctionType) or layer in found:
            continue
        if layer is not layers[-1] and not is_user_file(
            layer.__code__.co_filename
        ):  # torch's decorators
            continue
        found[layer] = None
        names = set(code_names(layer.__code__))
        held = [cell.cell_contents for cell in closure_values(layer).values()]
        held += [layer.__globals__[name] for name in names if name in layer.__globals__]
        held += imported_in(layer)
        if owner is not None:
            attributes = getattr(owner, "__dict__", {})
            held += [attributes[name] for name in names if name in attributes]
            held.append(owner)
        for value in held:
            for callee in functions_of(value, names):
                _reach(callee, found, depth + 1)


def imported_in(function: types.FunctionType) -> list[types.ModuleType]:
    """The user's modules that the code of a function may import in its body."""
    package = function.__globals__.get("__package__") or ""
    found = []
    for name in code_names(function.__code__):
        for path in (name, f"{package}.{name}"):
            module = sys.modules.get(path)
            file = getattr(module, "__file__", None)
            if module is not None and isinstance(file, str) and is_user_file(file):
                found.append(module)
    return found


_MAX_HELD = 100  # items of a container whose functions are looked at


def functions_of(value: Any, names: set[str]) -> Iterator[Any]:
    """The user's functions that code with `names` may call by way of `value`, or of the items of
    such a container.
    """
    if isinstance(value, list | tuple | dict) and len(value) <= _MAX_HELD:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _functions_of_one(item, names)
    yield from _functions_of_one(value, names)


def _functions_of_one(value: Any, names: set[str]) -> Iterator[Any]:
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        if is_user_code(value):
            yield value
    elif isinstance(value, types.ModuleType | type):  # `losses.smooth(x)`, `Schedule.now()`
        members = (
            vars(kind).get(name) for kind in getattr(value, "__mro__", (value,)) for name in names
        )
        yield from (unwrapped(member) for member in members if is_user_code(member))
    else:
        # Of all its classes: `super()` calls what another one has.
        members = (vars(kind).get(name) for kind in type(value).__mro__ for name in names)
        yield from (
            types.MethodType(unwrapped(member), value) for member in members if is_user_code(member)
        )
