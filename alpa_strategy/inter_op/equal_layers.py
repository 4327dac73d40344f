"""Which layers of a step are equal by structure, so that one of them is priced for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from alpa_strategy.inter_op.layer_matrix import LayerBoundary
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.stage_graph import stage_on
from alpa_strategy.options import PlanOptions


@dataclass(frozen=True)
class Layers:
    """The layers of a step on meshes of one size. All lists have one entry per layer."""

    # Each layer as a graph.
    graphs: list[StepGraph]

    # Equal for layers that differ only in the numbers of their values.
    kinds: list[int]

    # Value -> its position among the layer's values in the order of their first occurrence.
    positions: list[dict[int, int]]


def layers_of(
    graph: StepGraph, cuts: Sequence[int], options: PlanOptions, num_devices: int
) -> Layers:
    """Split a step at `cuts` (op indices, both ends included) into layers. Layers with the same
    structure get the same kind.

    Args:
        options: if they pin placements, layers whose parameters have other names differ in kind.
        num_devices: size of the mesh that a layer is planned on.
    """
    layers = Layers([], [], [])
    kind_of: dict[tuple, int] = {}
    for first, last in pairwise(cuts):
        layer = stage_on(graph, first, last, num_devices)
        content, positions = _content(layer, options)
        kind = kind_of.setdefault(content, len(kind_of))
        layers.graphs.append(layer)
        layers.kinds.append(kind)
        layers.positions.append(positions)
    return layers


def structure(part: StepGraph, options: PlanOptions) -> tuple:
    """Return a key that is equal for parts which differ only in the numbers of their values."""
    return _content(part, options)[0]


def boundary_structure(layer: StepGraph, positions: dict[int, int], ends: LayerBoundary) -> tuple:
    """Return a key that is equal for equal layers whose boundary values are equal as well.

    Args:
        positions: of the layer (`Layers.positions`).
    """
    metas = layer.values
    leaders: list[Any] = []
    for value in (ends.entering, ends.leaving):
        leaders.append(None if value is None else (positions.get(value), metas[value]))

    # Which of the passing values is a leader, and the metadata of the others.
    passing = []
    for value in ends.passing:
        passing.append((value == ends.entering, value == ends.leaving, metas[value]))
    return tuple(leaders), ends.entering_layouts, ends.leaving_layouts, tuple(passing)


def _content(part: StepGraph, options: PlanOptions) -> tuple[tuple, dict[int, int]]:
    """Return a key that is equal for parts with the same structure, and the position of each value
    by first occurrence.

    Names of parameters count only if `options` pin placements, or `parallel` is not one name.
    """
    positions: dict[int, int] = {}

    def position(value: int) -> int:
        return positions.setdefault(value, len(positions))

    # The order of these lines numbers the values.
    ops = []
    for op in part.ops:
        operands = tuple(map(position, op.operands))
        results = tuple(map(position, op.results))
        ops.append((op.call, operands, results))

    # Names count if pins may refer to them.
    has_pins = options.placements or not isinstance(options.parallel, str)
    parameters = []
    for parameter in part.parameters:
        names = parameter.names if has_pins else None
        number = position(parameter.value)
        parameters.append((number, parameter.meta, parameter.module_shape, names))

    buffers = tuple((position(b.value), b.meta, b.update is not None) for b in part.buffers)
    batch = tuple((position(leaf.value), leaf.meta, leaf.batch_dim) for leaf in part.batch)
    constants = tuple((position(c.value), c.meta) for c in part.constants)

    metas = part.values
    received = tuple(
        (position(value), metas[value], value in part.received_constants) for value in part.received
    )
    sent = tuple((position(value), metas[value]) for value in part.sent)
    escaping = tuple(position(value) for value in part.escaping)

    content = (
        tuple(ops),
        tuple(parameters),
        buffers,
        batch,
        constants,
        received,
        sent,
        escaping,
        part.batch_scope,
    )
    return content, positions
