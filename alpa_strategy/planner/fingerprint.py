"""What a plan is made for, as hashes part by part: graph, parameters, batch, cluster, options, format."""

from __future__ import annotations

import hashlib

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import FORMAT_VERSION, Fingerprint, Plan
from alpa_strategy.options import OptimizerInfo, PlanOptions


def fingerprint_of(
    step: StepGraph, cluster: ClusterSpec, options: PlanOptions, optimizer: OptimizerInfo
) -> Fingerprint:
    """The fingerprint of planning `step` on `cluster`. The optimizer counts as an option: its state needs memory."""
    option_text = f"{options.digest()} {optimizer.state_bytes:g} {optimizer.element_wise}"
    if optimizer.steps_in_backward:
        option_text += " steps in backward"
    return Fingerprint(
        graph=step.graph_digest,
        parameters=step.parameter_digest,
        batch=step.batch_digest,
        cluster=cluster.digest(),
        options=hashlib.sha256(option_text.encode()).hexdigest()[:16],
        format=str(FORMAT_VERSION),
    )


def is_for(plan: Plan, step: StepGraph) -> bool:
    """Whether a plan was made for this very step: its strategies mean other ops otherwise."""
    return (plan.fingerprint.graph, plan.fingerprint.batch) == (step.graph_digest, step.batch_digest)


def check_fits(plan: Plan, wanted: Fingerprint, source: str) -> None:
    """PlanError unless a plan that a user gave (`source` names it) can run what `wanted` describes.

    Cluster and options may differ: the user chose the plan, and whether its device count fits is checked where the
    mesh is built. Graph, parameters, batch and format must be the same, or its strategies mean other ops.
    """
    differing = [part for part in plan.fingerprint.differences(wanted) if part not in ("cluster", "options")]
    if differing:
        raise PlanError(
            f"the plan {source} was made for something else: {', '.join(differing)} changed",
            "leave `plan` out to make a new one, or run it with the model, batch size and ranks it was made for",
        )
