"""A backward in two halves, for zero-bubble schedules: first the gradients of the inputs, later
those of the weights.

The first half runs the autograd graph from the results to the inputs, and catches the gradients
that arrive at the nodes from which paths to weights branch off. The second half starts there. Both
run in the graph's own order, the same on all devices of a mesh, because the graph may contain
collectives.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Grads = tuple[Tensor | None, ...]


class SplitBackward:
    """The backward of one micro-batch.

    `run_inputs` returns the inputs' gradients; `run_weights` then accumulates into `.grad` of all
    other leaves.

    Args:
        roots: edges to differentiate (`get_gradient_edge` of the results).
        root_grads: their gradients.
        inputs: leaf tensors whose gradients are needed first; must not be empty.
    """

    def __init__(
        self, roots: Sequence[GradientEdge], root_grads: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        self._roots = list(roots)
        self._root_grads = list(root_grads)
        self._inputs = list(inputs)
        self._groups: list[_Group] = []

        # The gradients that have arrived at a start node in the first half.
        self._caught: dict[Node, _Grads] = {}

    def run_inputs(self) -> list[Tensor | None]:
        """Return the gradients of the inputs; None for one that the results do not depend on."""
        inputs = {get_gradient_edge(x).node for x in self._inputs}
        self._groups = _groups([root.node for root in self._roots], inputs)
        catch = self._caught.__setitem__
        handles = [
            node.register_prehook(partial(catch, node))
            for group in self._groups
            for node in group.starts
        ]
        try:
            # The graph stays alive for `run_weights`.
            return list(
                torch.autograd.grad(
                    self._roots,
                    self._inputs,
                    self._root_grads,
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        finally:
            for handle in handles:
                handle.remove()

    def run_weights(self) -> None:
        """Accumulate the gradients of the other leaves; the graph can be freed afterwards."""
        for group in self._groups:
            edges = []
            grads = []
            for node in group.starts:
                for i, grad in enumerate(self._caught.get(node, ())):
                    if grad is not None:
                        edges.append(GradientEdge(node, i))
                        grads.append(grad)
            for position in group.roots:
                edges.append(self._roots[position])
                grads.append(self._root_grads[position])
            if not edges:
                continue
            # A start below another start of its group would get its gradient twice: by its own edge
            # and from above. A hook replaces the sum by the caught gradient.
            handles = []
            has_several = len(group.starts) + len(group.roots) > 1
            if has_several:
                for node in group.starts:
                    handles.append(node.register_prehook(_replace_by(self._caught[node])))
            try:
                torch.autograd.backward(edges, grads, inputs=group.leaves, retain_graph=True)
            finally:
                for handle in handles:
                    handle.remove()

        self._groups = []
        self._roots = []
        self._root_grads = []
        self._inputs = []
        self._caught.clear()


def _replace_by(grads: _Grads) -> Callable[[Any], Any]:
    """Return a hook that replaces the gradients of a node."""
    return lambda _: grads


@dataclass(eq=False)
class _Group:
    """Leaves that are reached from the same start nodes."""

    # In order, each once.
    starts: dict[Node, None]

    # Indices of roots above the leaves that are on no path to the inputs.
    roots: list[int]

    leaves: list[Tensor]


def _groups(roots: list[Node], inputs: set[Node]) -> list[_Group]:
    """Divide the leaves of the graph below `roots`, without `inputs`, into groups.

    The start nodes of a leaf are the first ones above it from which a path leads to the inputs.
    Leaves that share a start are in one group: their gradients come from one backward, so that the
    nodes in between run once.
    """
    order = _reached(roots, _below)
    users: dict[Node, list[Node]] = {node: [] for node in order}
    for node in order:
        for below in _below(node):
            users[below].append(node)
    to_inputs = _reached(inputs & users.keys(), users.__getitem__)

    def users_off_path(node: Node) -> list[Node]:
        return [] if node in to_inputs else users[node]

    group_of: dict[Node | int, _Group] = {}
    groups: list[_Group] = []
    for leaf in order:
        # Only AccumulateGrad nodes have a variable.
        if not hasattr(leaf, "variable") or leaf in inputs:
            continue
        reached = _reached([leaf], users_off_path)
        starts = dict.fromkeys(node for node in reached if node in to_inputs)
        off_path = []
        for i, root in enumerate(roots):
            if root in reached and root not in to_inputs:
                off_path.append(i)
        group = _Group(starts, off_path, [leaf.variable])
        groups.append(group)

        # Merge it into the groups that have one of its starts.
        shared: list[Node | int] = [*group.starts, *group.roots]
        for key in shared:
            other = group_of.get(key)
            if other is not None and other is not group:
                other.starts.update(group.starts)
                other.roots = sorted({*other.roots, *group.roots})
                other.leaves += group.leaves
                groups.remove(group)
                group = other
            group_of[key] = group
        group_of |= dict.fromkeys([*group.starts, *group.roots], group)
    return groups


def _below(node: Node) -> list[Node]:
    """Return the autograd nodes that take a node's gradients."""
    return [below for below, _ in node.next_functions if below is not None]


def _reached(nodes: Iterable[Node], following: Callable[[Node], list[Node]]) -> dict[Node, None]:
    """Return `nodes` and all nodes that follow them, in an order that depends on the graph alone.

    A dict, because it is ordered: the order of a set depends on memory addresses. Collectives need
    the same order on all devices.
    """
    reached: dict[Node, None] = {}
    stack = list(nodes)[::-1]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached[node] = None
            stack += following(node)[::-1]
    return reached
