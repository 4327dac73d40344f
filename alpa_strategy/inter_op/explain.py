"""Why no stages fit: the layer that needs the most memory, whatever it runs on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa_strategy.inter_op.layer_matrix import WORKING
from alpa_strategy.inter_op.layers import span_name
from alpa_strategy.inter_op.stage_costs import CostJob, allowed_shapes, run_parts
from alpa_strategy.units import format_bytes


def largest_need(job: CostJob, meshes: Sequence[tuple[int, int]]) -> str | None:
    """A sentence that names the layer which needs the most bytes a device as a stage of its own, on its best submesh.

    With one micro-batch in flight: every plan needs at least that. None where layouts of the user's stand in the way.
    """
    least = np.full(job.num_layers, np.inf)
    for submesh in meshes:
        for shape in allowed_shapes(job, submesh):
            parts = run_parts(job, submesh, shape)
            for layer in range(job.num_layers):
                forward, _, _, always, saved, _, leaving = parts[:, layer, layer + 1, :WORKING].T
                need = always + saved + leaving + parts[:, layer, layer + 1, WORKING]
                least[layer] = min(least[layer], np.where(np.isfinite(forward), need, np.inf).min())
    if not np.isfinite(least).all():
        return None
    worst = int(least.argmax())
    name = span_name(job.graph, *job.cuts[worst : worst + 2])
    alone = f"of all layers, {name} needs the most: {format_bytes(least[worst])} a device on its best submesh"
    if least[worst] <= job.memory_limit:
        alone += (
            ", which fits; with what the schedule keeps for other micro-batches, and with other layers, it does not"
        )
    return alone
