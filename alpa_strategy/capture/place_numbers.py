"""A pass over the traced graph: numbers made of counters become arguments of the ops that take Python's numbers.

Where an op takes tensors only, it gets a tensor that is made of the number.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from alpa_strategy.ir.counters import STEP_NUMBER, CounterRef, LateNumber, late

aten = torch.ops.aten


@dataclass
class TraceNumbers:
    """The numbers of one trace: what `step_number(i)` stands for, and arguments of nodes that hold an example.

    made: how a number is made, and its value at capture. literals: (node, argument's name, number).
    """

    made: list[tuple[CounterRef, float]] = field(default_factory=list)
    literals: list[tuple[fx.Node, str, LateNumber]] = field(default_factory=list)

    def add_literal(self, nodes: list[fx.Node], number: LateNumber) -> bool:
        """One call was traced as `nodes` with the number's example; False unless that is an argument of one of them,
        and no other number of the type is there: it could be made of the example.
        """
        kind = type(number.example)
        found = [(node, x) for node in nodes for x in pytree.tree_leaves((node.args, node.kwargs)) if type(x) is kind]
        if len(found) != 1 or found[0][1] != number.example:
            return False
        node = found[0][0]
        if not isinstance(node.target, OpOverload) or not node.all_input_nodes:
            return False
        kinds = {argument.name: str(argument.type) for argument in node.target._schema.arguments}
        place = next((name for name, arg in _named(node).items() if type(arg) is kind), None)
        if place is None or not any(each in kinds[place] for each in ("number", "float")):
            return False
        self.literals.append((node, place, number))
        return True


def place_numbers(graph: fx.Graph, numbers: TraceNumbers, origins: MutableMapping[fx.Node, tuple[str, str]]) -> None:
    """Put the numbers where the traced graph has something else in their place; calls that failed go."""
    for node in reversed([node for node in graph.nodes if isinstance(node.target, OpOverload)]):
        if "val" not in node.meta and not node.users:
            graph.erase_node(node)
    for node, name, number in numbers.literals:
        given = {**_named(node), name: number}
        node.kwargs = {n: given.pop(n) for n in node.kwargs}
        node.args = tuple(given.values())
    late_ones = {n: late(*numbers.made[n.args[0]]) for n in graph.nodes if n.target is STEP_NUMBER}
    for user in dict.fromkeys(user for node in late_ones for user in node.users):
        together = tuple(node for node in late_ones if node in user.args)
        for nodes in (together, *((node,) for node in together)):
            form = _with_numbers(user, nodes)
            if form is not None:
                user.target = form
                user.args = fx.map_arg(user.args, lambda n, nodes=nodes: late_ones[n] if n in nodes else n)
    for node, number in late_ones.items():
        if node.users:
            with graph.inserting_before(node):
                made = graph.call_function(aten.full.default, ((), number), {"dtype": node.kwargs["dtype"]})
            made.meta, origins[made] = node.meta, origins.get(node, ("", ""))
            node.replace_all_uses_with(made)
        graph.erase_node(node)


def _named(node: fx.Node) -> dict[str, Any]:
    """Arguments by name."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _with_numbers(user: fx.Node, nodes: tuple[fx.Node, ...]) -> OpOverload | None:
    """The overload that the user's call would be if Python's numbers stood in place of `nodes`; None: none is."""
    positions = tuple(i for i, arg in enumerate(user.args) if arg in nodes)
    if not positions or not isinstance(user.target, OpOverload):
        return None
    alone = all(node.target is STEP_NUMBER for node in user.all_input_nodes)
    return None if alone else _overload(user.target, positions)


@lru_cache(maxsize=256)
def _overload(target: OpOverload, positions: tuple[int, ...]) -> OpOverload | None:
    """See `_with_numbers`. positions: of the arguments that are numbers."""
    packet, arguments = target._overloadpacket, target._schema.arguments
    if torch._C._should_allow_numbers_as_tensors(packet.__name__.rstrip("_")):
        return target
    for other in (getattr(packet, name) for name in packet.overloads()):
        others = other._schema.arguments
        pairs = list(zip(arguments, others, strict=False))
        if len(arguments) == len(others) and all(
            a.name == b.name and ("number" in str(b.type) if i in positions else a.type == b.type)
            for i, (a, b) in enumerate(pairs)
        ):
            return other
    return None
