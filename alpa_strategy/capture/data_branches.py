"""Values of tensors that Python needs while the step runs on fake tensors.

Known values are computed by running the traced nodes: those made of constants and buffers alone
(masks, position tables), and comparisons whose result is the same for all random numbers
(`torch.rand([]) < self.layerdrop`, which is 0). A buffer that was read is guarded: if it changes,
the step is captured again.

Branches that only raise an error (`assert mask.any()`, `if torch.any(var < 0): raise
ValueError(...)`) do not change the computation. Capture continues as if the check had passed, and
the condition becomes a value of the graph that is checked after every step.
"""

import dis
import linecache
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from alpa_strategy.capture.graph_builder import storages_of

# Functions that return a value of a tensor to Python.
_READS_VALUE = {
    torch.is_nonzero,
    torch.equal,
    torch.allclose,
    Tensor.is_nonzero,
    Tensor.equal,
    Tensor.allclose,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.item,
    Tensor.tolist,
}

# The answer if a value is not known.
UNKNOWN = object()


class ConstantValues:
    """The known values of a growing trace.

    Nodes that depend on constants and buffers only are run in order, when a value is needed.

    Args:
        buffers: placeholder number -> (name, real buffer); those on the meta device are unknown.
        is_symbolic: whether a node computes with a number that is another one at every step.
    """

    def __init__(
        self, buffers: Mapping[int, tuple[str, Tensor]], is_symbolic: Callable[[fx.Node], bool]
    ) -> None:
        self._is_symbolic = is_symbolic
        self._buffers: dict[int, tuple[str, Tensor]] = {}
        for index, (name, buffer) in buffers.items():
            if not buffer.is_meta:
                self._buffers[index] = name, buffer

        # Node -> its value, of known nodes.
        self._values: dict[fx.Node, Any] = {}

        # Node -> names of the buffers that its value depends on.
        self._sources: dict[fx.Node, frozenset[str]] = {}

        # The last node that was visited.
        self._last: fx.Node | None = None
        self._num_placeholders = 0

        # Names of the buffers on which answers depend.
        self.asked_buffers: set[str] = set()

    def answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return `func(*args, **kwargs)` if it returns a known value to Python, else UNKNOWN. The
        buffers that the value depends on are noted.
        """
        if func not in _READS_VALUE:
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
        """Return the node that computes a tensor with a known value, or None."""
        proxy_mode = get_proxy_mode()
        slot = None if proxy_mode is None else get_proxy_slot(tensor, proxy_mode.tracer, None)
        if proxy_mode is None or slot is None:
            return None
        self._advance(proxy_mode.tracer.graph)
        return slot.proxy.node if slot.proxy.node in self._values else None

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor's known value, on its device; None if it is not known. The
        buffers that the value depends on are noted.
        """
        node = self.known_node(tensor)
        if node is None:
            return None
        self.asked_buffers |= self._sources[node]
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value: Tensor = self._values[node].detach().clone()
            return value.to(tensor.device)

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are not known."""
        return self.known_node(tensor) is None

    def _advance(self, graph: fx.Graph) -> None:
        """Run the nodes that were traced since the last call."""
        root = graph._root
        node = root.next if self._last is None else self._last.next
        # These ops, on the CPU, are no part of the step.
        with torch._C.DisableTorchFunction():
            while node is not root:
                self._run(node)
                self._last = node
                node = node.next

    def _run(self, node: fx.Node) -> None:
        """Compute the value of a node, if it is known. If an unknown value is written into memory,
        the values of the tensors that share it are known no longer.
        """
        if node.op == "placeholder":
            self._add_buffer(node)
            return

        inputs = node.all_input_nodes
        decided = _decided(node)
        if decided is not None and not self._is_symbolic(node):
            with _disable_current_modes():
                self._values[node] = torch.full(node.meta["val"].shape, decided)
            self._sources[node] = frozenset()
            return
        if node.op != "call_function" or not self._can_run(node):
            # An unknown value is written into memory that known tensors may share.
            if _writes(node):
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

    def _add_buffer(self, node: fx.Node) -> None:
        """Set the value of the next placeholder to a copy on the CPU, if it is a known buffer."""
        known = self._buffers.get(self._num_placeholders)
        self._num_placeholders += 1
        if known is None:
            return
        name, buffer = known
        with _disable_current_modes():
            # A copy: the step may write into the buffer, and the real one must not change.
            self._values[node] = buffer.detach().cpu().clone()
        self._sources[node] = frozenset({name})

    def _can_run(self, node: fx.Node) -> bool:
        """Whether a node's value can be computed now: its inputs are known, it is the same at every
        step, and its tensors have at most `MAX_ELEMENTS` elements each.
        """
        if not all(n in self._values for n in node.all_input_nodes):
            return False
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.target is operator.getitem
        if any(isinstance(a, torch.device) for a in node.args) or self._is_symbolic(node):
            return False
        # Random numbers differ in every step.
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
        # Masks and tables are computed, models are not.
        return all(
            t.numel() <= MAX_ELEMENTS
            for t in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(t, Tensor)
        )

    def _sharing(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Return the known nodes that share memory with one of `nodes`."""
        storages = {s for n in nodes if n in self._values for s in storages_of(self._values[n])}
        return [n for n, value in self._values.items() if storages & storages_of(value)]


def _decided(node: fx.Node) -> bool | None:
    """Return the result of comparing random numbers from [0, 1), the first operand, with a limit.

    None if it is no such comparison, other nodes read the numbers, or the result depends on them.
    """
    compare = _COMPARISONS.get(node.target)
    if compare is None:
        return None
    drawn, limit = node.args
    if not isinstance(drawn, fx.Node) or drawn.target not in _UNIFORM:
        return None
    # Another user may be a view that is written to.
    if len(drawn.users) > 1:
        return None
    smallest = compare(0.0, limit)
    largest = compare(math.nextafter(1.0, 0.0), limit)
    return smallest if smallest == largest else None


aten = torch.ops.aten
_UNIFORM = (aten.rand.default, aten.rand_like.default)
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    getattr(aten, name).Scalar: getattr(operator, name) for name in ("lt", "le", "gt", "ge")
}

# Larger tensors are not computed.
MAX_ELEMENTS = 2**26


def _writes(node: fx.Node) -> bool:
    """Whether a node is an op that writes to its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def passing_answer(frame: FrameType) -> bool | None:
    """Return the truth value of a tensor for which `frame` raises no error.

    Both branches of the code are followed. None unless exactly one of them only raises an error.
    """
    raises = [_raises_after(frame.f_code, frame.f_lasti, truth) for truth in (False, True)]
    return None if raises[0] == raises[1] else raises[0]


def raised_where_not(frame: FrameType, answer: bool) -> tuple[str, str]:
    """Return the exception that `frame` raises if the tensor's truth value is not `answer`.

    Returns:
        The exception's class as `module.name`, RuntimeError if the code does not tell; and its
        text, if that is a constant, or "".
    """
    code = frame.f_code
    start = _start_of_branch(code, frame.f_lasti, not answer)
    # Otherwise `passing_answer` would have returned None.
    assert start is not None
    name = "builtins.RuntimeError"
    text = ""
    for instruction in _path_to_raise(code, start):
        opname = instruction.opname
        if opname == "LOAD_ASSERTION_ERROR":
            name = "builtins.AssertionError"
            text = ""
        elif opname.startswith("LOAD_CONST"):
            if isinstance(instruction.argval, str):
                text = instruction.argval
        elif opname.startswith("LOAD_"):
            value = _value_of(frame, instruction.argval)
            if isinstance(value, type) and issubclass(value, BaseException):
                name = f"{value.__module__}.{value.__qualname__}"
                text = ""
        elif opname in ("FORMAT_VALUE", "BUILD_STRING", "FORMAT_SIMPLE", "BINARY_OP"):
            # The text has values of this batch.
            return name, ""
    return name, text


def _value_of(frame: FrameType, name: Any) -> Any:
    """Return the variable `name` of a frame, or None."""
    for namespace in (frame.f_locals, frame.f_globals, frame.f_builtins):
        if name in namespace:
            return namespace[name]
    return None


def _path_to_raise(code: CodeType, start: int) -> list[dis.Instruction]:
    """Return the instructions from index `start` to the first raise, or to the end if there is
    none. Unconditional jumps are followed.
    """
    instructions, index_at = _instructions(code)
    path: list[dis.Instruction] = []
    index = start
    while index < len(instructions) and len(path) <= len(instructions):
        instruction = instructions[index]
        path.append(instruction)
        if instruction.opname == "RAISE_VARARGS":
            break
        jumps = instruction.opname in _ALWAYS_JUMP
        index = index_at[instruction.argval] if jumps else index + 1
    return path


def _raises_after(code: CodeType, offset: int, truth: bool) -> bool:
    """Whether the code always raises if the truth value that it reads at `offset` is `truth`."""
    start = _start_of_branch(code, offset, truth)
    return start is not None and _only_raises(code, start)


def _start_of_branch(code: CodeType, offset: int, truth: bool) -> int | None:
    """Return the index of the first instruction after the branch on a truth value.

    None if the code does not branch on it.

    Args:
        offset: of the instruction that reads the truth value.
        truth: the truth value.
    """
    instructions, index_at = _instructions(code)
    index = index_at.get(offset, len(instructions))
    while index < len(instructions):
        instruction = instructions[index]
        opname = instruction.opname
        if "IF_TRUE" in opname or "IF_FALSE" in opname:
            jumps = truth == ("IF_TRUE" in opname)
            if not jumps:
                return index + 1
            index = index_at[instruction.argval]
            # In Python 3.11, `bool(x and y)` keeps x as the argument of bool.
            if "OR_POP" in opname:
                continue
            return index
        if opname == "UNARY_NOT":
            truth = not truth
        elif opname in ("PRECALL", "CALL"):
            if not _is_bool(code, instruction.positions):
                return None
        # Python 3.13 and later have TO_BOOL before each jump.
        elif opname != "TO_BOOL":
            return None
        index += 1
    return None


def _only_raises(code: CodeType, start: int) -> bool:
    """Whether every path through the code from index `start` ends in a raise."""
    instructions, index_at = _instructions(code)
    waiting = [start]
    seen = set()
    while waiting:
        index = waiting.pop()
        if index in seen:
            continue
        seen.add(index)
        instruction = instructions[index]
        opname = instruction.opname
        if opname.startswith(("RETURN_VALUE", "RETURN_CONST", "YIELD", "RERAISE")):
            return False
        if instruction.opcode in _JUMPS:
            waiting.append(index_at[instruction.argval])
        if opname != "RAISE_VARARGS" and opname not in _ALWAYS_JUMP:
            waiting.append(index + 1)
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
