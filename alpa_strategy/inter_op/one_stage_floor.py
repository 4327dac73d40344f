"""A lower bound of the seconds of one stage over all devices, to tell before it is solved whether
it can be better than a pipeline.

Solving one stage on every logical mesh of thousands of devices takes longer than this bound, which
is computed layer by layer: few layers differ. As in floors.py, the least of seconds plus a price of
bytes, less that price of the memory limit, is a lower bound for every price. Gathers of parameters
and reductions of gradients count without the share that may be hidden behind computation.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from alpa_strategy.inter_op.floors import FloorPrice, layer_floors, least_working
from alpa_strategy.inter_op.layer_matrix import LayerProblem, without_hidden_gathers
from alpa_strategy.inter_op.layer_pricing import UnpricedLayers, unpriced_layers
from alpa_strategy.inter_op.mesh_options import allowed_shapes
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.decode import BLOCK_BYTES
from alpa_strategy.intra_op.options import REDUCTIONS, bucketed_seconds, step_collectives_of
from alpa_strategy.options import BUCKET_BYTES

# Prices of memory, as multiples of the seconds per byte of a step that all devices share evenly.
MULTIPLES = (0.0, 0.1, 0.3, 1.0, 3.0, 5.0, 10.0, 100.0)


def least_one_stage_seconds(
    job: StageCostTask, shared_seconds: float
) -> dict[tuple[int, ...], float]:
    """Return logical mesh -> a lower bound of the seconds of a step in one stage over all devices,
    which computes the batch at once and recomputes nothing.

    A bound is inf, or far above `shared_seconds`, if such a stage needs more memory than there is.

    Args:
        job: of one micro-batch, split into layers.
        shared_seconds: of the step's ops if the devices shared them evenly.

    Raises:
        OptionError, PlanError: a pin cannot be met.
    """
    submesh = (job.cluster.num_nodes, job.cluster.devices_per_node)
    least: dict[tuple[int, ...], float] = {}
    for shape in allowed_shapes(job.cluster, job.options, submesh):
        layers = unpriced_layers(job, submesh, shape, has_per_step_ops=False, hides_gathers=False)
        least[shape] = _least_on(job, layers, shared_seconds)
    return least


def _least_on(job: StageCostTask, layers: UnpricedLayers, shared_seconds: float) -> float:
    """Return the bound on one logical mesh, in seconds of a step; inf if nothing fits.

    Args:
        layers: on this logical mesh.
        shared_seconds: as of `least_one_stage_seconds`; prices of memory are multiples of it.
    """
    limit = job.memory_limit - max(least_working(problem) for problem in layers.problems)
    if limit <= 0:
        return math.inf
    # Without a limit memory has no price.
    multiples = MULTIPLES if math.isfinite(limit) else (0.0,)
    scale = shared_seconds / limit
    prices = [FloorPrice(scale * multiple, 1.0, 1.0, 0.0) for multiple in multiples]

    # The price of all bytes that there are.
    paid = shared_seconds * np.array(multiples)
    overlap = job.cluster.overlap
    least = 0.0
    # No more is hidden than there is communication, nor than there is computation.
    for shown in (_without_hidden, _without_hiding) if overlap else (_without_hidden,):
        of_kinds: list[np.ndarray] = []
        for problem, passing in zip(layers.problems, layers.passing, strict=True):
            visible = shown(problem, overlap)
            of_kinds.append(layer_floors(visible, prices, job.num_microbatches, passing))
        # [price]
        seconds = np.sum([of_kinds[kind] for kind in layers.kinds], axis=0)
        least = max(least, float((seconds - paid).max()))
    return least


def _without_hidden(problem: LayerProblem, overlap: float) -> LayerProblem:
    """Return a layer's problem without the share of the communication of parameters that may be
    hidden behind computation (`beside_compute.without_prefetched`).

    Without `overlap`, all reductions of gradients may be (`one_stage.seconds_with_overlap`).
    """
    problem = without_hidden_gathers(problem, overlap)
    intra = problem.stage.intra
    share = overlap or 1.0
    kinds = (*REDUCTIONS, "all_gather") if overlap else REDUCTIONS
    choices = list(problem.choices)
    for index in range(len(intra.parameters)):
        visible = choices[index].once - share * _seconds_once(intra, index, kinds)
        choices[index] = replace(choices[index], once=np.maximum(visible, 0.0))
    return replace(problem, choices=tuple(choices))


def _without_hiding(problem: LayerProblem, overlap: float) -> LayerProblem:
    """Return a layer's problem with all of its communication, and without the share `overlap` of
    its computation that may hide some of it.
    """
    shown = 1 - overlap
    intra = problem.stage.intra
    choices = list(problem.choices)
    first_op = len(intra.parameters)
    for index in range(first_op, first_op + len(intra.ops)):
        costs = choices[index]
        choices[index] = replace(
            costs, forward=shown * costs.forward, backward=shown * costs.backward
        )
    return replace(problem, choices=tuple(choices))


def _seconds_once(intra: IntraOp, index: int, kinds: Collection[str]) -> np.ndarray:
    """Return [option] the seconds of a parameter's collectives once per step, in buckets of the
    size with which they take longer.

    Args:
        index: of the parameter.
        kinds: of the collectives that count.
    """
    parameter = intra.step.parameters[index]
    scale = intra.tables.optimizer.gradient_scale(parameter.meta.dtype.itemsize)
    read = intra.step.dtypes_read[parameter.name]
    seconds = []
    for plan in intra.parameters[index].plans:
        counted: list[tuple[str, int, int]] = []
        for kind, axis, num_bytes in step_collectives_of(
            plan, parameter.meta, read, intra.mesh.shape
        ):
            if kind in kinds:
                moved = int(num_bytes * (scale if kind in REDUCTIONS else 1))
                counted.append((kind, axis, moved))
        seconds.append(_longest(intra, counted))
    return np.array(seconds)


def _longest(intra: IntraOp, collectives: Sequence[tuple[str, int, int]]) -> float:
    """Return the seconds of collectives (kind, mesh axis, bytes), each in buckets of the size in
    which it is slower.
    """
    total = 0.0
    for kind, axis, num_bytes in collectives:
        link = intra.mesh.axes[axis]
        sizes = (BUCKET_BYTES, BLOCK_BYTES)
        total += max(bucketed_seconds(link, kind, num_bytes, size) for size in sizes)
    return total
