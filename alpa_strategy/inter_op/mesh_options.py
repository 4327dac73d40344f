"""What the user's options say about the logical meshes and the parameters of a part of the step."""

from dataclasses import replace
from fnmatch import fnmatchcase

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.options import PlanOptions


def allowed_shapes(
    cluster: ClusterSpec, options: PlanOptions, submesh: tuple[int, int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the logical shapes of a submesh that the options allow; empty if none is.

    `logical_mesh` pins a shape, placements and a sequence `parallel` pin its number of axes.

    Args:
        submesh: (nodes, devices per node); None: all devices.
    """
    counts = axis_counts(options)
    pinned = options.logical_mesh
    shapes = []
    for shape in cluster.logical_shapes(submesh):
        is_pinned_shape = pinned is None or shape == tuple(pinned)
        has_pinned_axes = not counts or counts == {len(shape)}
        if is_pinned_shape and has_pinned_axes:
            shapes.append(shape)
    return tuple(shapes)


def axis_counts(options: PlanOptions) -> set[int]:
    """Return the numbers of mesh axes that pinned placements name, and the length of `parallel` if
    it is a sequence; empty without pins.
    """
    counts = {len(text.split()) for _, text in options.placements}
    if not isinstance(options.parallel, str):
        counts.add(len(options.parallel))
    return counts


def options_of_part(options: PlanOptions, part: StepGraph) -> PlanOptions:
    """Return the options without the placements that match no parameter of `part`."""
    names = [name for parameter in part.parameters for name in parameter.names]
    placements = []
    for pattern, text in options.placements:
        if any(fnmatchcase(name, pattern) for name in names):
            placements.append((pattern, text))
    return replace(options, placements=tuple(placements))
