"""A pass over the traced graph: numbers made of counters become arguments of the ops that take Python's numbers.

Where an op takes tensors only, it gets a tensor that is made of the number.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from alpa_strategy.capture.numbers import STEP_NUMBER, CounterRef, late

aten = torch.ops.aten


def place_numbers(
    graph: fx.Graph, numbers: Sequence[tuple[CounterRef, float]], origins: MutableMapping[fx.Node, tuple[str, str]]
) -> None:
    """Replace the calls of `step_number(i)`, which stand for `numbers[i]`: how it is made, and its value at capture."""
    for node in [node for node in graph.nodes if node.target is STEP_NUMBER]:
        number = late(*numbers[node.args[0]])
        for user in list(node.users):
            form = _with_numbers(user, node)
            if form is not None:
                user.target = form
                user.args, user.kwargs = _swapped(user.args, node, number), _swapped(user.kwargs, node, number)
        if node.users:
            with graph.inserting_before(node):
                made = graph.call_function(aten.full.default, ((), number), {"dtype": node.kwargs["dtype"]})
            made.meta, origins[made] = node.meta, origins.get(node, ("", ""))
            node.replace_all_uses_with(made)
        graph.erase_node(node)


def _swapped(arguments: Any, node: fx.Node, number: Any) -> Any:
    return fx.map_arg(arguments, lambda n: number if n is node else n)


def _with_numbers(user: fx.Node, node: fx.Node) -> OpOverload | None:
    """The overload that the user's call would be if Python's number stood in place of `node`; None: none is."""
    alone = all(n.target is STEP_NUMBER for n in user.all_input_nodes)
    if not isinstance(user.target, OpOverload) or node in user.kwargs.values() or alone:
        return None
    return _overload(user.target, tuple(i for i, arg in enumerate(user.args) if arg is node))


@lru_cache(maxsize=256)
def _overload(target: OpOverload, positions: tuple[int, ...]) -> OpOverload | None:
    """See `_with_numbers`. positions: of the arguments that are numbers."""
    packet, arguments = target._overloadpacket, target._schema.arguments
    if torch._C._should_allow_numbers_as_tensors(packet.__name__.rstrip("_")):
        return target if positions else None
    for other in (getattr(packet, name) for name in packet.overloads()):
        others = other._schema.arguments
        pairs = list(zip(arguments, others, strict=False))
        if (
            positions
            and len(arguments) == len(others)
            and all(
                a.name == b.name and ("number" in str(b.type) if i in positions else a.type == b.type)
                for i, (a, b) in enumerate(pairs)
            )
        ):
            return other
    return None
