"""PlanTask: what is planned, for which cluster, and under which wishes. Every way to plan takes one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts
from alpa_strategy.cost.roofline import RooflineCosts
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import Fingerprint
from alpa_strategy.options import OptimizerInfo, PlanOptions
from alpa_strategy.planner.fingerprint import fingerprint_of

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_costs import CostStore

Progress = Callable[[str], AbstractContextManager[None]]


def unseen(name: str) -> AbstractContextManager[None]:
    """A phase of planning that nobody is shown."""
    return nullcontext()


@dataclass(frozen=True)
class PlanTask:
    """See the module's docstring.

    Attributes:
        costs: op costs; None: the roofline of `cluster.device`.
        progress: shows phases.
        store: where costs of pipeline stages are kept as they come, so that a planning that was interrupted resumes;
            None: in memory.
    """

    step: StepGraph
    cluster: ClusterSpec
    options: PlanOptions
    optimizer: OptimizerInfo
    costs: OpCosts | None = None
    progress: Progress = unseen
    store: CostStore | None = None

    @property
    def op_costs(self) -> OpCosts:
        """Seconds and bytes of one local op."""
        return self.costs or RooflineCosts(self.cluster.device)

    @property
    def memory_limit(self) -> float:
        """Bytes of a device that a plan may use."""
        return self.options.usable_bytes(self.cluster.device.memory_bytes)

    @property
    def fingerprint(self) -> Fingerprint:
        """What a plan that is made for this task is stored under."""
        return fingerprint_of(self.step, self.cluster, self.options, self.optimizer)
