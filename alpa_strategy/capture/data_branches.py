"""What Python's questions about the values of tensors get while the step runs on fake tensors.

Known values (masks, position tables: made of constants and buffers alone) are computed for real, by running the traced
nodes; a buffer that was asked for is guarded: when it changes, capture again. Branches that do nothing but raise
(`assert mask.any()`, `if torch.any(var < 0): raise ValueError(...)`) do not decide what the step computes: the capture
goes on as if the check had passed, and its condition becomes a value of the graph that is looked at after every step.
"""

from __future__ import annotations

import ast
import dis
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_ASKING = {torch.is_nonzero, torch.equal, torch.allclose, Tensor.is_nonzero, Tensor.equal, Tensor.allclose}
_ASKING |= {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist}
UNKNOWN = object()


class ConstantValues:
    """Runs the nodes of the growing trace that depend on constants and buffers only, in order, when a value is asked.

    Args:
        buffers: placeholder number -> (name, real buffer); those on the meta device are unknown.
        is_symbolic: whether a node computes with a number that is another one at every step.
    """

    def __init__(self, buffers: Mapping[int, tuple[str, Tensor]], is_symbolic: Callable[[fx.Node], bool]) -> None:
        self._is_symbolic = is_symbolic
        self._buffers = {index: given for index, given in buffers.items() if not given[1].is_meta}
        self._values: dict[fx.Node, Any] = {}
        self._sources: dict[fx.Node, frozenset[str]] = {}
        self._last: fx.Node | None = None
        self._num_placeholders = 0
        self.asked_buffers: set[str] = set()

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `func(*args, **kwargs)` gives if it asks for known values, else UNKNOWN."""
        proxy_mode = get_proxy_mode()
        if func not in _ASKING or proxy_mode is None:
            return UNKNOWN
        tracer = proxy_mode.tracer
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        slots = [get_proxy_slot(x, tracer, None) if isinstance(x, Tensor) else None for x in leaves]
        if any(slot is None for x, slot in zip(leaves, slots, strict=True) if isinstance(x, Tensor)):
            return UNKNOWN
        self._advance(tracer.graph)
        nodes = [None if slot is None else slot.proxy.node for slot in slots]
        if any(node is not None and node not in self._values for node in nodes):
            return UNKNOWN
        self.asked_buffers.update(*(self._sources[node] for node in nodes if node is not None))
        real = [x if node is None else self._values[node] for x, node in zip(leaves, nodes, strict=True)]
        args, kwargs = pytree.tree_unflatten(real, spec)
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _advance(self, graph: fx.Graph) -> None:
        """Run what was traced since the last question."""
        root = graph._root
        node = root.next if self._last is None else self._last.next
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
                    self._set(node, given[1].detach().cpu().clone(), frozenset({given[0]}))
            return
        inputs = node.all_input_nodes
        if node.op != "call_function" or not self._can_run(node):
            if _writes(node):  # something unknown is written into memory that others may share
                for shared in self._sharing(inputs):
                    del self._values[shared], self._sources[shared]
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            value = node.target(*args, **kwargs)  # type: ignore[operator]  # of a call_function node
        sources = frozenset().union(*(self._sources[n] for n in inputs))
        self._set(node, value, sources)
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
        return all(t.numel() <= MAX_ELEMENTS for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor))

    def _set(self, node: fx.Node, value: Any, sources: frozenset[str]) -> None:
        self._values[node], self._sources[node] = value, sources

    def _sharing(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Known nodes that use the memory of one of `nodes`."""
        storages = {s for n in nodes if n in self._values for s in _storages(self._values[n])}
        return [n for n, value in self._values.items() if storages & _storages(value)]


MAX_ELEMENTS = 2**26  # of a tensor that is computed to answer a question


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _storages(value: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in pytree.tree_leaves(value) if isinstance(t, Tensor)}


_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign)
_Position = tuple[int, int, int, int]  # line, column, last line, end column


def passing_answer(frame: FrameType) -> bool | None:
    """What a tensor that `frame` is asking for its truth must say so that nothing is raised.

    None when the answer decides more than whether something is raised, or the source is not to be had.
    """
    # Instructions are 2 bytes each, `f_lasti` is the offset of the current one.
    position = _in_our_order(next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)))
    found = None if position is None else _places(frame.f_code.co_filename).get(position)
    if position is None or found is None:
        return None
    node, parents = found
    if isinstance(node, ast.If | ast.Assert):  # up to Python 3.11 a jump stands where its whole statement does
        return _answer_at_jump(frame, node, position)
    answer = _answer_of(node, parents)
    is_operand = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)  # `not x` asks for x
    return answer if answer is None or not is_operand else not answer


def _answer_at_jump(frame: FrameType, statement: ast.If | ast.Assert, position: _Position) -> bool | None:
    """The same for the operand of the statement's test that the frame has come to: each ends in a jump, in order."""
    operands = list(_operands(statement.test))
    jumps = [
        each.offset
        for each in dis.get_instructions(frame.f_code)
        if "JUMP" in each.opname and "IF" in each.opname and _in_our_order(each.positions) == position
    ]
    if len(jumps) != len(operands) or frame.f_lasti not in jumps:
        return None
    operand, parents = _places(frame.f_code.co_filename)[_place_of(operands[jumps.index(frame.f_lasti)])]
    return _answer_of(operand, parents) if isinstance(operand, ast.expr) else None


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    """What a test asks for its truth, in order."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value)
    else:
        yield test


def _answer_of(node: ast.expr, parents: tuple[ast.AST, ...]) -> bool | None:
    """What expression `node` must be, by the nearest of `parents` (innermost first)."""
    parent = parents[0] if parents else None
    if isinstance(parent, ast.Assert | ast.If) and parent.test is node:
        if isinstance(parent, ast.Assert) or _only_raises(parent.orelse):
            return True
        return False if _only_raises(parent.body) else None  # else more is decided than whether something is raised
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        answer = _answer_of(parent, parents[1:])
        return None if answer is None else not answer
    if isinstance(parent, ast.BoolOp):
        answer = _answer_of(parent, parents[1:])
        needs_all = isinstance(parent.op, ast.And) == answer  # every operand must be so; else the last one decides
        return answer if answer is not None and (needs_all or parent.values[-1] is node) else None
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "bool":
        return _answer_of(parent, parents[1:])
    return None


def _only_raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise) and all(isinstance(s, _SIMPLE) for s in body[:-1])


def _in_our_order(position: Any) -> _Position | None:
    """From the interpreter's order (line, last line, column, end column)."""
    if position is None or None in tuple(position):
        return None
    line, last, column, end = position
    return line, column, last, end


def _place_of(node: ast.expr | ast.stmt) -> _Position:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


@lru_cache(maxsize=32)
def _places(filename: str) -> dict[_Position, tuple[ast.expr | ast.If | ast.Assert, tuple[ast.AST, ...]]]:
    """Position -> the test or expression that stands there (the outermost), and what it stands in, innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return {}
    found: dict[_Position, tuple[Any, tuple[ast.AST, ...]]] = {}

    def visit(node: ast.AST, parents: tuple[ast.AST, ...]) -> None:
        if isinstance(node, ast.expr | ast.If | ast.Assert):
            found.setdefault(_place_of(node), (node, parents))
        for child in ast.iter_child_nodes(node):
            visit(child, (node, *parents[:8]))  # more than a condition is deep

    visit(tree, ())
    return found
