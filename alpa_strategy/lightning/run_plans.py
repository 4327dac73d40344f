"""The plans that a run uses, for its checkpoints, and those of the run that it resumes.

A resumed run goes on under the checkpoint's plans: plans that are made from costs measured in
another folder, or on a busier machine, may differ, and results would differ in their last bits.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.plan import Fingerprint, Plan

if TYPE_CHECKING:
    from alpa_strategy.planner.smaller_batch import BatchShapes

# `Plan.to_dict()`.
PlanData = Mapping[str, Any]


class RunPlans:
    """One per run of the Trainer.

    Args:
        resumed: plans of the run that is resumed. Empty where nothing is resumed, and on ranks that
            make no plans.
        planned_batch: `batch_shapes` of the step that the resumed run's first plan was made for.
    """

    def __init__(
        self, resumed: Sequence[PlanData] = (), planned_batch: "BatchShapes | None" = None
    ) -> None:
        self.planned_batch = planned_batch
        self._resumed = tuple(resumed)
        self._used: dict[str, PlanData] = {}

    @property
    def used(self) -> list[PlanData]:
        """Return the plans that this run has used so far, and those of the resumed run that it may
        still use, each once, for a checkpoint.
        """
        earlier = {_digest(plan): plan for plan in self._resumed}
        return list({**earlier, **self._used}.values())

    def add(self, plan: PlanData) -> None:
        """Add a plan that the run uses."""
        self._used[_digest(plan)] = plan

    def find(self, wanted: Fingerprint, cluster: ClusterSpec, memory_limit: float) -> Plan | None:
        """Return the resumed run's plan with the fingerprint `wanted`; None if it has none that
        fits.

        A cluster that is measured is another one by its measurements: what fits into the memory of
        its devices fits. One that the user has described differently counts.

        Raises:
            PlanError: its data is no plan of this version.
        """
        for data in self._resumed:
            differing = _differences(data, wanted)
            if differing == [] or (differing == ["cluster"] and cluster.measured):
                plan = Plan.from_dict(data)
                if not differing or plan.predicted.peak_bytes <= memory_limit:
                    return plan
        return None

    def report_new_plan(self, wanted: Fingerprint, why: str | None = None) -> None:
        """Tell the user that the run is resumed under another plan than the checkpoint's; nothing
        if there is no checkpoint's, or it was used.

        Args:
            why: the checkpoint's plan cannot be used; None: what it was made for differs.
        """
        if self._used or not self._resumed:
            return
        if why is None:
            differing = min((_differences(data, wanted) for data in self._resumed), key=len)
            names = ", ".join(differing) or "the number of devices"
            why = f"it was made for something else: {names} changed"
        rank_zero_info(
            f"alpa: the run is resumed under a new plan, not under the checkpoint's ({why}). The"
            " same "
            "training goes on, but results may differ in their last bits from those of an "
            "uninterrupted run"
        )


def resumed_plans(state: Mapping[str, Any]) -> RunPlans:
    """Return the plans of the resumed run.

    Args:
        state: its `ShardedRun.state_dict()`; empty if there is none.
    """
    main = state.get("plan")
    plans = [*state.get("plans", ()), *([] if main is None else [main])]
    return RunPlans([plan for plan in plans if _is_plan(plan)], state.get("planned_batch"))


def _is_plan(data: Any) -> bool:
    """Return whether data of a checkpoint is a plan of this version."""
    prints = data.get("fingerprint") if isinstance(data, Mapping) else None
    return isinstance(prints, Mapping) and set(prints) == set(Fingerprint.__dataclass_fields__)


def _digest(plan: PlanData) -> str:
    return Fingerprint(**plan["fingerprint"]).digest


def _differences(plan: PlanData, wanted: Fingerprint) -> list[str]:
    return Fingerprint(**plan["fingerprint"]).differences(wanted)
