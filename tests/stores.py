"""A ParameterStore of one stage, from its parameters' plans alone."""

from __future__ import annotations

import math

from alpa_strategy.ir.plan import Predicted, StagePlan
from alpa_strategy.runtime.parameters import ParameterStore


def store_on(mesh, module, inputs, plans) -> ParameterStore:
    """One stage on all devices of `mesh`; not sharded yet."""
    stage = StagePlan(
        (1, math.prod(mesh.shape)), 0, tuple(mesh.shape), (0, 0), plans, {}, (), Predicted(0.0, 0)
    )
    return ParameterStore(module, inputs, (stage,), (mesh,), mesh)
