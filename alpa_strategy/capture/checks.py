"""Branches on tensors that do nothing but raise: `assert mask.any()`, `if torch.any(var < 0): raise ValueError(...)`.

Such a check does not decide what the step computes. The capture goes on as if it had passed; its condition becomes a
value of the graph, and is looked at whenever the step has run.
"""

from __future__ import annotations

import ast
import dis
import linecache
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign)
_Position = tuple[int, int, int, int]  # line, column, last line, end column


def passing_answer(frame: FrameType) -> bool | None:
    """What a tensor that `frame` is asking for its truth must say so that nothing is raised.

    None when the answer decides more than whether something is raised, or the source is not to be had.
    """
    position = _position(frame)
    found = None if position is None else _places(frame.f_code.co_filename).get(position)
    if found is None:
        return None
    node, parents = found
    if isinstance(node, ast.stmt):  # up to Python 3.11 a jump stands where its whole statement does
        return _answer_at_jump(frame, node, position)
    answer = _answer_of(node, parents)
    is_operand = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)  # `not x` asks for x
    return answer if answer is None or not is_operand else not answer


def _passing(statement: ast.If | ast.Assert) -> bool | None:
    """What the statement's test must be so that nothing is raised; None when that is not all that it decides."""
    if isinstance(statement, ast.Assert) or _only_raises(statement.orelse):
        return True
    return False if _only_raises(statement.body) else None


def _answer_at_jump(frame: FrameType, statement: ast.If | ast.Assert, position: _Position) -> bool | None:
    """The same for the operand of the statement's test that the frame has come to: each ends in a jump, in order."""
    wanted = _passing(statement)
    if wanted is None:
        return None
    answers = _operand_answers(statement.test, wanted)
    jumps = [
        each.offset
        for each in dis.get_instructions(frame.f_code)
        if "JUMP" in each.opname and "IF" in each.opname and _in_our_order(each.positions) == position
    ]
    return answers[jumps.index(frame.f_lasti)] if len(jumps) == len(answers) and frame.f_lasti in jumps else None


def _operand_answers(test: ast.expr, wanted: bool) -> list[bool | None]:
    """What the operands of a test must be, in order; None where an operand alone does not decide."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operand_answers(test.operand, not wanted)
    if not isinstance(test, ast.BoolOp):
        return [wanted]
    found = [_operand_answers(value, wanted) for value in test.values]
    if isinstance(test.op, ast.And) != wanted:  # the last operand decides, where the others have not
        found[:-1] = [[None] * len(each) for each in found[:-1]]
    return [answer for each in found for answer in each]


def _answer_of(node: ast.expr, parents: tuple[ast.AST, ...]) -> bool | None:
    """What expression `node` must be, by the nearest of `parents` (innermost first)."""
    parent = parents[0] if parents else None
    if isinstance(parent, ast.Assert | ast.If) and parent.test is node:
        return _passing(parent)
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        answer = _answer_of(parent, parents[1:])
        return None if answer is None else not answer
    if isinstance(parent, ast.BoolOp):
        answer = _answer_of(parent, parents[1:])
        needs_all = isinstance(parent.op, ast.And) == answer  # every operand must be so; else the last one decides
        return answer if answer is not None and (needs_all or parent.values[-1] is node) else None
    is_bool = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "bool"
    return _answer_of(parent, parents[1:]) if is_bool else None


def _only_raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise) and all(isinstance(s, _SIMPLE) for s in body[:-1])


def _position(frame: FrameType) -> _Position | None:
    """Where the expression stands that the frame is evaluating."""
    return _in_our_order(next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)))


def _in_our_order(position: Any) -> _Position | None:
    """From the interpreter's order (line, last line, column, end column)."""
    if position is None or None in tuple(position):
        return None
    line, last, column, end = position
    return line, column, last, end


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
            place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            found.setdefault(place, (node, parents))
        for child in ast.iter_child_nodes(node):
            visit(child, (node, *parents[:8]))

    visit(tree, ())
    return found
