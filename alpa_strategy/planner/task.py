"""What is planned, for which cluster and by which options: the input of every planner."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts, RooflineCosts
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import FORMAT_VERSION, Fingerprint, Plan
from alpa_strategy.options import PlanOptions
from alpa_strategy.partial_results import NOT_STORED, PartialResults
from alpa_strategy.sharding.register import registered_rules

# Returns the context around a phase of planning; the argument is the phase's name.
Progress = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class PlanTask:
    """A step to plan for a cluster."""

    step: StepGraph
    cluster: ClusterSpec
    options: PlanOptions
    optimizer: OptimizerInfo
    # Costs of ops, unless the options have a cost model; None: the roofline of `cluster.device`.
    costs: OpCosts | None = None
    # Around each phase of planning.
    progress: Progress = nullcontext
    # Makes the costs of ops for pipelines when they are searched; None: `costs`.
    stage_costs: Callable[[], OpCosts] | None = None
    # Where costs and solutions are stored as they are computed, so that an interrupted planning
    # goes on.
    results: PartialResults = NOT_STORED

    def __post_init__(self) -> None:
        if self.options.fp32_reduction:
            object.__setattr__(self, "optimizer", replace(self.optimizer, gradient_itemsize=4))
        if self.cluster.device.is_cpu:
            # Parameters are updated one by one.
            object.__setattr__(self, "optimizer", replace(self.optimizer, scratch=0.0))

    @cached_property
    def op_costs(self) -> OpCosts:
        """Seconds and bytes of one local op."""
        costs = self.options.costs or self.costs
        return costs or RooflineCosts(self.cluster.device, compiled=self.options.compile)

    def for_stages(self) -> "PlanTask":
        """Return the task with the costs of ops for pipelines."""
        if self.stage_costs is None:
            return self
        return replace(self, costs=self.stage_costs(), stage_costs=None)

    @property
    def memory_limit(self) -> float:
        """Bytes of a device that a plan may use."""
        return self.options.usable_bytes(self.cluster.device.memory_bytes)

    @property
    def fingerprint(self) -> Fingerprint:
        """Hashes of all that a plan for this task depends on, part by part.

        The optimizer counts as an option: its state needs memory. So do registered rules of the
        step's ops.
        """
        optimizer = self.optimizer
        option_text = (
            f"{self.options.digest()} {optimizer.state_bytes:g} {optimizer.element_wise}"
            f" {optimizer.moved_bytes} {optimizer.scratch}"
        )
        if not optimizer.element_wise and optimizer.parameter_wise:
            flops = sum(update.flops for _, update in optimizer.full_updates)
            option_text += f" owners {flops:g}"
        option_text += registered_rules(op.call.target for op in self.step.ops)
        return Fingerprint(
            graph=self.step.graph_digest,
            parameters=self.step.parameter_digest,
            batch=self.step.batch_digest,
            cluster=self.cluster.digest(),
            options=hashlib.sha256(option_text.encode()).hexdigest()[:16],
            format=str(FORMAT_VERSION),
        )


def check_fits(plan: Plan, wanted: Fingerprint, source: str) -> None:
    """Check that a plan of the user's can run what `wanted` describes.

    Cluster and options may differ: the user chose the plan, and its number of devices is checked
    when the mesh is built. Graph, parameters, batch and format must be the same, or the plan's
    strategies mean other ops.

    Args:
        source: names the plan in the error.

    Raises:
        PlanError: the plan was made for something else.
    """
    differing = [
        part for part in plan.fingerprint.differences(wanted) if part not in ("cluster", "options")
    ]
    if differing:
        raise PlanError(
            f"the plan {source} was made for something else: {', '.join(differing)} changed",
            "leave `plan` out to make a new one, or run it with the model, batch size and ranks it"
            " was made for",
        )
