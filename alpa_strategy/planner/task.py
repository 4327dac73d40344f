"""PlanTask: what is planned, for which cluster, and under which wishes. Every way to plan takes
one.
"""

import hashlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.model import OpCosts, RooflineCosts
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import FORMAT_VERSION, Fingerprint, Plan
from alpa_strategy.options import PlanOptions
from alpa_strategy.partial_results import NOT_STORED, PartialResults
from alpa_strategy.sharding.register import registered_rules

Progress = Callable[
    [str], AbstractContextManager[object]
]  # around a phase of planning, which it is given by name


@dataclass(frozen=True)
class PlanTask:
    """See the module's docstring."""

    step: StepGraph
    cluster: ClusterSpec
    options: PlanOptions
    optimizer: OptimizerInfo
    costs: OpCosts | None = (
        None  # op costs where the options name no model; None: the roofline of `cluster.device`
    )
    progress: Progress = nullcontext
    # makes those of pipelines, when they are looked at; None: the same
    stage_costs: Callable[[], OpCosts] | None = None
    # where costs and solutions are stored as they are computed, for a planning that is interrupted
    results: PartialResults = NOT_STORED

    def __post_init__(self) -> None:
        if self.options.fp32_reduction:
            object.__setattr__(self, "optimizer", replace(self.optimizer, gradient_itemsize=4))
        if self.cluster.device.is_cpu:  # parameters are updated one by one
            object.__setattr__(self, "optimizer", replace(self.optimizer, scratch=0.0))

    @cached_property
    def op_costs(self) -> OpCosts:
        """Seconds and bytes of one local op."""
        own = self.options.costs or self.costs
        return own or RooflineCosts(self.cluster.device, compiled=self.options.compile)

    def for_stages(self) -> "PlanTask":
        """The task with the costs of pipelines."""
        return (
            self
            if self.stage_costs is None
            else replace(self, costs=self.stage_costs(), stage_costs=None)
        )

    @property
    def memory_limit(self) -> float:
        """Bytes of a device that a plan may use."""
        return self.options.usable_bytes(self.cluster.device.memory_bytes)

    @property
    def fingerprint(self) -> Fingerprint:
        """What a plan that is made for this task is stored under, as hashes part by part.

        The optimizer counts as an option: its state needs memory. So do registered rules of the
        step's ops.
        """
        own = self.optimizer
        option_text = f"{self.options.digest()} {own.state_bytes:g} {own.element_wise} {own.moved_bytes} {own.scratch}"
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
    """PlanError unless a plan that a user gave (`source` names it) can run what `wanted` describes.

    Cluster and options may differ: the user chose the plan, and whether its device count fits is
    checked where the mesh is built. Graph, parameters, batch and format must be the same, or its
    strategies mean other ops.
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


# --- PlanStore: a folder of plan files, one per fingerprint. Finding none always comes with the
# reason.


class PlanStore:
    """Plans below `folder`. The files are ordinary plan files; a broken one is reported and passed
    over.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._reported: set[Path] = set()  # broken files are reported once

    def path(self, fingerprint: Fingerprint) -> Path:
        """Where the plan of `fingerprint` is or would be."""
        return self.folder / f"{fingerprint.digest}.json"

    def find(self, fingerprint: Fingerprint) -> Plan | None:
        """The plan made for exactly this fingerprint, or None (`explain` says why)."""
        path = self.path(fingerprint)
        plan = self._load(path) if path.exists() else None
        return plan if plan is not None and plan.fingerprint == fingerprint else None

    def put(self, plan: Plan) -> Path:
        """Store a plan under its fingerprint, replacing an older one; returns its path."""
        path = self.path(plan.fingerprint)
        plan.save(path)
        self._reported.discard(path)
        return path

    def explain(self, fingerprint: Fingerprint) -> str:
        """Why `find` gives no plan: for example `"graph, batch changed"` against the closest stored
        plan.
        """
        if self.path(fingerprint).exists() and self.find(fingerprint) is None:
            return f"the stored plan {self.path(fingerprint)} cannot be used"
        plans = filter(None, map(self._load, sorted(self.folder.glob("*.json"))))
        stored: list[list[str]] = [plan.fingerprint.differences(fingerprint) for plan in plans]
        if not stored:
            return f"no plan is stored in {self.folder}"
        closest: list[str] = min(stored, key=len)
        return f"{', '.join(closest)} changed"

    def _load(self, path: Path) -> Plan | None:
        try:
            return Plan.load(path)
        except PlanError as error:
            if path not in self._reported:
                self._reported.add(path)
                warnings.warn(f"ignored: {error.problem}", stacklevel=3)
            return None
