"""A backward in two halves, for zero-bubble schedules: first the gradients of the inputs, later those of the weights.

The first half runs the autograd graph from the results to the inputs and catches what arrives at every node from which
a path leads to weights only. The second half starts there. Everything is done in the graph's own order, the same on all
devices of a mesh, since the graph may hold collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Grads = tuple[Tensor | None, ...]


class SplitBackward:
    """The backward of one micro-batch from `roots` with gradients `root_grads`.

    Args:
        roots: edges to differentiate (`get_gradient_edge` of the results).
        root_grads: one per root.
        inputs: leaf tensors whose gradients are wanted first; must not be empty.

    `run_inputs` returns the inputs' gradients; `run_weights` then accumulates into `.grad` of all other leaves.
    """

    def __init__(self, roots: Sequence[GradientEdge], root_grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._roots, self._root_grads, self._inputs = list(roots), list(root_grads), list(inputs)
        self._groups: list[_Group] = []
        self._caught: dict[Node, _Grads] = {}

    def run_inputs(self) -> list[Tensor | None]:
        """Gradients of the inputs; None for one that the results do not depend on."""
        graph = _Graph([root.node for root in self._roots], [get_gradient_edge(x).node for x in self._inputs])
        self._groups = graph.groups()
        catch = self._caught.__setitem__
        handles = [node.register_prehook(partial(catch, node)) for group in self._groups for node in group.starts]
        try:
            # The graph stays: its other half is run by `run_weights`.
            return list(
                torch.autograd.grad(self._roots, self._inputs, self._root_grads, retain_graph=True, allow_unused=True)
            )
        finally:
            for handle in handles:
                handle.remove()

    def run_weights(self) -> None:
        """Accumulate the gradients of the other leaves; the graph can be freed afterwards."""
        for group in self._groups:
            edges, grads = [], []
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
            # A start below another start of its group would get its gradient twice: by its own edge and from above.
            starts = group.starts if len(group.starts) + len(group.roots) > 1 else ()
            below = [(node, self._caught[node]) for node in starts]
            clamps = [node.register_prehook(lambda _, caught=caught: caught) for node, caught in below]
            try:
                torch.autograd.backward(edges, grads, inputs=group.leaves, retain_graph=True)
            finally:
                for handle in clamps:
                    handle.remove()
        self._groups, self._roots, self._root_grads, self._inputs = [], [], [], []
        self._caught.clear()


class _Group:
    """Leaves that are reached from the same start nodes; `roots` are positions of roots off the inputs' paths."""

    def __init__(self) -> None:
        self.starts: dict[Node, None] = {}
        self.roots: list[int] = []
        self.leaves: list[Tensor] = []


class _Graph:
    """The autograd graph below `roots`, with what leads to `inputs` and what leads to weights only."""

    def __init__(self, roots: list[Node], inputs: list[Node]) -> None:
        self._roots = roots
        self._order = _reachable(roots)
        users: dict[Node, list[Node]] = {node: [] for node in self._order}
        for node in self._order:
            for below, _ in node.next_functions:
                if below is not None:
                    users[below].append(node)
        self._users = users
        self._is_input = set(inputs)
        self._to_inputs = self._above([node for node in inputs if node in users])

    def _above(self, nodes: list[Node]) -> set[Node]:
        """`nodes` and all nodes that lead to them."""
        found, stack = set(nodes), list(nodes)
        while stack:
            for user in self._users[stack.pop()]:
                if user not in found:
                    found.add(user)
                    stack.append(user)
        return found

    def groups(self) -> list[_Group]:
        """Leaves and their start nodes; leaves that share a start are in one group."""
        group_of: dict[Node | int, _Group] = {}
        groups: list[_Group] = []
        for leaf in self._order:
            if not hasattr(leaf, "variable") or leaf in self._is_input:  # only AccumulateGrad nodes have a variable
                continue
            group = _Group()
            groups.append(group)
            self._collect(leaf, group)
            # Leaves below one start get their gradients in one backward: what lies between is run once.
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

    def _collect(self, leaf: Node, group: _Group) -> None:
        """Walk up from `leaf` to the first nodes on the inputs' paths."""
        group.leaves.append(leaf.variable)  # type: ignore[attr-defined]  # of AccumulateGrad, see `groups`
        seen, stack = {leaf}, [leaf]
        while stack:
            node = stack.pop()
            if node in self._to_inputs:
                group.starts[node] = None
                continue
            group.roots += [i for i, root in enumerate(self._roots) if root is node and i not in group.roots]
            for user in self._users[node]:
                if user not in seen:
                    seen.add(user)
                    stack.append(user)


def _reachable(roots: list[Node]) -> list[Node]:
    """All nodes below `roots`, in an order that depends on the graph alone."""
    found: dict[Node, None] = {}  # a set that keeps its order: torch's own split iterates sets, by memory address
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found[node] = None
        stack += [below for below, _ in reversed(node.next_functions) if below is not None]
    return list(found)
