"""What Python's questions about the values of tensors get while the step runs on fake tensors.

Known values (masks, position tables: made of constants and buffers alone) are computed for real, by
running the traced nodes; a buffer that was asked for is guarded: when it changes, capture again. So
are comparisons that random numbers cannot decide (`torch.rand([]) < self.layerdrop`, which is 0).
Branches that do nothing but raise (`assert mask.any()`, `if torch.any(var < 0): raise
ValueError(...)`) do not decide what the step computes: the capture goes on as if the check had
passed, and its condition becomes a value of the graph that is looked at after every step.
"""

import dis
import linecache
import math
import operator
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from alpa_strategy.capture.graph_builder import storages_of
from alpa_strategy.capture.python_state import patched

_ASKING = {
    torch.is_nonzero,
    torch.equal,
    torch.allclose,
    Tensor.is_nonzero,
    Tensor.equal,
    Tensor.allclose,
}
_ASKING |= {
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.item,
    Tensor.tolist,
}
UNKNOWN = object()


class ConstantValues:
    """Runs the nodes of the growing trace that depend on constants and buffers only, in order, when
    a value is asked.

    Args:
        buffers: placeholder number -> (name, real buffer); those on the meta device are unknown.
        is_symbolic: whether a node computes with a number that is another one at every step.
    """

    def __init__(
        self, buffers: Mapping[int, tuple[str, Tensor]], is_symbolic: Callable[[fx.Node], bool]
    ) -> None:
        self._is_symbolic = is_symbolic
        self._buffers = {index: given for index, given in buffers.items() if not given[1].is_meta}
        self._values: dict[fx.Node, Any] = {}
        self._sources: dict[fx.Node, frozenset[str]] = {}
        self._last: fx.Node | None = None
        self._num_placeholders = 0
        self.asked_buffers: set[str] = set()

    def answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What `func(*args, **kwargs)` gives if it asks for known values, else UNKNOWN."""
        if func not in _ASKING:
            return UNKNOWN
        arguments = args, dict(kwargs)
        nodes = []
        for leaf in pytree.tree_leaves(arguments):
            if isinstance(leaf, Tensor):
                nodes.append(self.known_node(leaf))
        known_nodes = [node for node in nodes if node is not None]
        if len(known_nodes) < len(nodes):
            return UNKNOWN

        self.asked_buffers.update(*(self._sources[node] for node in known_nodes))
        remaining = iter(known_nodes)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda _: self._values[next(remaining)], arguments
        )
        with _disable_current_modes():
            return func(*args, **kwargs)

    def known_node(self, tensor: Any) -> fx.Node | None:
        """What made a tensor, where a question about its value would be answered."""
        proxy_mode = get_proxy_mode()
        slot = None if proxy_mode is None else get_proxy_slot(tensor, proxy_mode.tracer, None)
        if proxy_mode is None or slot is None:
            return None
        self._advance(proxy_mode.tracer.graph)
        return slot.proxy.node if slot.proxy.node in self._values else None

    def told_to_libraries(self) -> AbstractContextManager[None]:
        """Context in which transformers asks, instead of building causal masks that fast kernels do
        not take.
        """
        if (library := sys.modules.get("transformers.utils.import_utils")) is None:
            return patched([])
        return patched([(vars(library), "is_fake_tensor", lambda x: self.known_node(x) is None)])

    def _advance(self, graph: fx.Graph) -> None:
        """Run what was traced since the last question."""
        root = graph._root
        node = root.next if self._last is None else self._last.next
        with torch._C.DisableTorchFunction():  # what runs here, on the CPU, is no part of the step
            while node is not root:
                self._run(node)
                self._last, node = node, node.next

    def _run(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            given = self._buffers.get(self._num_placeholders)
            self._num_placeholders += 1
            if given is not None:
                with _disable_current_modes():
                    # A copy: the step may write into the buffer, which is no write to the real one.
                    self._values[node] = given[1].detach().cpu().clone()
                    self._sources[node] = frozenset({given[0]})
            return
        inputs = node.all_input_nodes
        if (decided := _decided(node)) is not None and not self._is_symbolic(node):
            with _disable_current_modes():
                self._values[node] = torch.full(node.meta["val"].shape, decided)
            self._sources[node] = frozenset()
            return
        if node.op != "call_function" or not self._can_run(node):
            if _writes(node):  # something unknown is written into memory that others may share
                for shared in self._sharing(inputs):
                    del self._values[shared], self._sources[shared]
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            # The target of a call_function node.
            self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        self._sources[node] = sources = frozenset().union(*(self._sources[n] for n in inputs))
        if _writes(node):
            for shared in self._sharing(inputs):
                self._sources[shared] |= sources

    def _can_run(self, node: fx.Node) -> bool:
        if not all(n in self._values for n in node.all_input_nodes):
            return False
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.target is operator.getitem
        if any(isinstance(a, torch.device) for a in node.args) or self._is_symbolic(node):
            return False
        if torch.Tag.nondeterministic_seeded in node.target.tags:  # other numbers in every step
            return False
        # A question is cheap, so what it may cost is bounded: masks and tables, not models.
        return all(
            t.numel() <= MAX_ELEMENTS
            for t in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(t, Tensor)
        )

    def _sharing(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Known nodes that use the memory of one of `nodes`."""
        storages = {s for n in nodes if n in self._values for s in storages_of(self._values[n])}
        return [n for n, value in self._values.items() if storages & storages_of(value)]


def _decided(node: fx.Node) -> bool | None:
    """What a comparison of numbers drawn from [0, 1) with another number gives, where that is the
    same for all.
    """
    compare = _COMPARISONS.get(node.target)
    drawn, limit = node.args if compare is not None else (None, None)
    if (
        compare is None
        or not isinstance(drawn, fx.Node)
        or drawn.target not in _UNIFORM
        or len(drawn.users) > 1
    ):
        return None  # another user may be a view that something is written into
    found = {compare(end, limit) for end in (0.0, math.nextafter(1.0, 0.0))}
    return found.pop() if len(found) == 1 else None


aten = torch.ops.aten
_UNIFORM = (aten.rand.default, aten.rand_like.default)
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    getattr(aten, name).Scalar: getattr(operator, name) for name in ("lt", "le", "gt", "ge")
}
MAX_ELEMENTS = 2**26  # of a tensor that is computed to answer a question


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def passing_answer(frame: FrameType) -> bool | None:
    """What a tensor that `frame` is asking for its truth must say so that nothing is raised.

    Both ways of the code from there are followed: one does nothing but raise. None when the answer
    decides more.
    """
    raises = [_raises_after(frame.f_code, frame.f_lasti, truth) for truth in (False, True)]
    return None if raises[0] == raises[1] else raises[0]


def raised_where_not(frame: FrameType, answer: bool) -> tuple[str, str]:
    """Which exception `frame` raises where the truth that it asks for is not `answer`.

    Returns the exception's class as `module.name`, and its text: the code's constant, or empty.
    """
    code = frame.f_code
    start = _start_of_branch(code, frame.f_lasti, not answer)
    assert start is not None  # `passing_answer` has been there
    name, text = "builtins.RuntimeError", ""
    for each in _way_to_raise(code, start):
        if each.opname == "LOAD_ASSERTION_ERROR":
            name, text = "builtins.AssertionError", ""
        elif each.opname.startswith("LOAD_CONST"):
            text = each.argval if isinstance(each.argval, str) else text
        elif each.opname.startswith("LOAD_"):
            held = _value_of(frame, each.argval)
            if isinstance(held, type) and issubclass(held, BaseException):
                name, text = f"{held.__module__}.{held.__qualname__}", ""
        elif each.opname in ("FORMAT_VALUE", "BUILD_STRING", "FORMAT_SIMPLE", "BINARY_OP"):
            return name, ""  # a text of this batch's values
    return name, text


def _value_of(frame: FrameType, name: Any) -> Any:
    namespaces = (frame.f_locals, frame.f_globals, frame.f_builtins)
    return next((each[name] for each in namespaces if name in each), None)


def _way_to_raise(code: CodeType, start: int) -> list[dis.Instruction]:
    """The instructions from one on to the first raise, jumps followed that are always taken."""
    instructions, places = _instructions(code)
    way: list[dis.Instruction] = []
    place = start
    while place < len(instructions) and len(way) <= len(instructions):
        each = instructions[place]
        way.append(each)
        if each.opname == "RAISE_VARARGS":
            break
        place = places[each.argval] if each.opname in _ALWAYS_JUMP else place + 1
    return way


def _raises_after(code: CodeType, offset: int, truth: bool) -> bool:
    """Whether the code ends in a raise, whatever else it finds, where the truth asked for at
    `offset` is this one.
    """
    start = _start_of_branch(code, offset, truth)
    return start is not None and _only_raises(code, start)


def _start_of_branch(code: CodeType, offset: int, truth: bool) -> int | None:
    """Place of the instruction with which the code goes on after a branch on the truth asked for
    at `offset`; None where nothing branches on it.
    """
    instructions, places = _instructions(code)
    place = places.get(offset, len(instructions))
    while place < len(instructions):
        each = instructions[place]
        if "IF_TRUE" in each.opname or "IF_FALSE" in each.opname:
            jumps = truth == ("IF_TRUE" in each.opname)
            # `bool(x and y)` in Python 3.11: x is what bool is given
            if not (jumps and "OR_POP" in each.opname):
                return places[each.argval] if jumps else place + 1
            place = places[each.argval]
            continue
        if each.opname == "UNARY_NOT":
            truth = not truth
        elif each.opname in ("PRECALL", "CALL"):
            if not _is_bool(code, each.positions):
                return None
        elif each.opname != "TO_BOOL":  # from Python 3.13 on, before each jump
            return None
        place += 1
    return None


def _only_raises(code: CodeType, start: int) -> bool:
    """Whether every way through the code from an instruction on ends in a raise."""
    instructions, places = _instructions(code)
    waiting, seen = [start], set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        each = instructions[place]
        if each.opname.startswith(("RETURN_VALUE", "RETURN_CONST", "YIELD", "RERAISE")):
            return False
        if each.opcode in _JUMPS:
            waiting.append(places[each.argval])
        if each.opname != "RAISE_VARARGS" and each.opname not in _ALWAYS_JUMP:
            waiting.append(place + 1)
    return True


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ALWAYS_JUMP = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    """Return the code's instructions, and offset -> index among them."""
    instructions = list(dis.get_instructions(code))
    index_at = {instruction.offset: index for index, instruction in enumerate(instructions)}
    return instructions, index_at


def _is_bool(code: CodeType, positions: dis.Positions | None) -> bool:
    """Whether a call is `bool(...)` in the source code."""
    if positions is None or positions.lineno is None:
        return False
    # Columns are counted in bytes.
    line = linecache.getline(code.co_filename, positions.lineno).encode()
    return line[positions.col_offset :].startswith(b"bool(")
