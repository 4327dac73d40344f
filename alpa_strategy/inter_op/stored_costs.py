"""Costs of runs of layers, the DP's candidates and solved stages, as records that are stored while
a planning goes on: see `partial_results.py`.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from alpa_strategy.cost.model import OpCosts, RooflineCosts
from alpa_strategy.errors import PlanError
from alpa_strategy.files import BadFileError
from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_dp import StageRange
from alpa_strategy.ir.plan import Plan, StagePlan
from alpa_strategy.partial_results import Key, Record
from alpa_strategy.schedules import BUILT_IN, SCHEDULES
from alpa_strategy.sharding.register import registered_rules

if TYPE_CHECKING:
    from alpa_strategy.inter_op.stage_costs import LayerRangeCosts, StageCostTask
    from alpa_strategy.inter_op.stage_solve import SolvedStage, StageRequest
    from alpa_strategy.inter_op.stage_space import Candidate, StageSpace

# Arrays [first layer, last + 1, candidate] of a LayerRangeCosts, and those with an entry per layer.
PER_RUN = ("seconds", "once", "always", "in_flight", "at_update", "overlapped", "shape", "remat")
PER_LAYER = ("least", "least_each", "least_apart", "least_each_apart")
# Arrays of a LayerRangeCosts by logical mesh.
FLOORS = ("floor_prices", "floor_seconds", "floor_always", "floor_working", "scale")
# Numbers of a StageCost, beside `again`.
COST_NUMBERS = (
    "forward",
    "backward",
    "once",
    "always",
    "saved",
    "segment_inputs",
    "working",
    "update",
)


def job_key(job: "StageCostTask") -> tuple[object, ...]:
    """Return all that the costs of a job's runs depend on, as values whose `repr` is complete."""
    graph = job.graph
    return (
        (graph.graph_digest, graph.parameter_digest, graph.batch_digest, graph.batch_scope),
        (graph.values, graph.received, graph.received_constants, graph.sent, graph.escaping),
        (job.cuts, job.num_microbatches, job.memory_limit, job.remat, job.is_whole_batch),
        job.overlaps_matmuls,
        [sorted(places) for places in job.places],
        sorted(job.cluster.to_dict().items()),
        (job.options.digest(), job.optimizer),
        costs_key(job.costs),
        registered_rules(op.call.target for op in graph.ops),
    )


def costs_key(costs: OpCosts) -> tuple[object, ...]:
    """Return all that op costs depend on: their name, the device, and the measured times.

    The name of a user's cost model stands for all of it (see `OpCosts`).
    """
    kind = f"{type(costs).__module__}.{type(costs).__qualname__}"
    if not isinstance(costs, RooflineCosts):
        return kind, costs.name
    times = None if costs.table is None else costs.table.times_of(costs.device.name)
    return kind, costs.name, costs.device, times


def runs_record(runs: "LayerRangeCosts") -> Record:
    """Return all fields of `runs`, for a file."""
    record = {field.name: getattr(runs, field.name) for field in fields(runs)}
    return record | {"shapes": [list(shape) for shape in runs.shapes]}


def runs_arguments(
    record: Record, job: "StageCostTask", shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Return the fields of a `LayerRangeCosts` of the job from a record.

    Raises:
        BadFileError, KeyError, TypeError: the record is not of runs of this job on these shapes.
    """
    L = job.num_layers
    if [tuple(shape) for shape in record["shapes"]] != list(shapes):
        raise BadFileError(f"it is for the logical meshes {record['shapes']}")
    expected = (L, L + 1, record["seconds"].shape[-1])
    if any(record[name].shape != expected for name in PER_RUN):
        raise BadFileError("its arrays are not of the same runs")
    if any(record[name].shape != (L,) for name in PER_LAYER):
        raise BadFileError(f"it is not of {L} layers")
    count = record["floor_prices"].shape[1]
    per_layer = len(shapes), L
    floors = (
        (len(shapes), count, 4),
        (len(shapes), count, L),
        per_layer,
        per_layer,
        (len(shapes),),
    )
    if any(record[name].shape != size for name, size in zip(FLOORS, floors, strict=True)):
        raise BadFileError("its floors are not of the same layers")
    stored = (*PER_RUN[:6], *FLOORS)
    numbers = np.concatenate([record[name].ravel() for name in stored])
    if np.isnan(numbers).any() or (record["seconds"] < 0).any():
        raise BadFileError("it has numbers that are no costs")
    if not np.isin(record["shape"], range(max(1, len(shapes)))).all():
        raise BadFileError("it names a logical mesh that does not exist")

    arrays = {name: record[name] for name in (*PER_RUN, *PER_LAYER, *FLOORS)}
    return {"shapes": tuple(shapes), **arrays}


# --- Solved stages


def stage_record(solved: "SolvedStage") -> Record:
    """Return all fields of `solved`, for a file."""
    cost = solved.cost
    numbers = [getattr(cost, name) for name in COST_NUMBERS]
    return {
        "plan": solved.plan.to_dict(),
        "cost": np.array(numbers, dtype=float),
        "again": np.array(cost.again, dtype=float),
        "gap_and_objective": np.array([solved.gap, solved.objective], dtype=float),
        "method": solved.method,
        "is_free": solved.is_free,
    }


def stage_fields(record: Record, request: "StageRequest") -> dict[str, Any]:
    """Return the fields of a `SolvedStage` from a record.

    Raises:
        BadFileError, KeyError, TypeError, ValueError: the record is not of this stage.
    """
    try:
        plan = StagePlan.from_dict(record["plan"])
    except PlanError as error:
        raise BadFileError(error.problem) from None
    if (plan.ops, plan.submesh) != ((request.first, request.last), request.submesh):
        raise BadFileError("it is another stage")

    numbers = dict(zip(COST_NUMBERS, record["cost"].tolist(), strict=True))
    gap, objective = record["gap_and_objective"].tolist()
    return {
        "plan": plan,
        "cost": StageCost(again=tuple(record["again"].tolist()), **numbers),
        "gap": gap,
        "objective": objective,
        "method": str(record["method"]),
        "is_free": record["is_free"] is True,
    }


def plan_of_record(record: Record) -> Plan:
    """Return the plan whose `to_dict` is the record.

    Raises:
        BadFileError: it is no plan.
    """
    try:
        return Plan.from_dict(record)
    except PlanError as error:
        raise BadFileError(error.problem) from None


# --- Candidates of the stage DP


def candidates_key(space: "StageSpace", ceiling: float) -> Key:
    """Return the hash of the DP's inputs: the job, its tables, and the seconds to be better than
    (`ceiling`).
    """
    key = Key(space.job.content, tuple(space.meshes), ceiling, list(SCHEDULES), space.unfit)
    if space.allowed is not None:
        key.add_array(space.allowed)
    for runs in space.runs:
        key.add(runs.shapes)
        for name in (*PER_RUN, *PER_LAYER):
            key.add_array(getattr(runs, name))
    return key


def has_own_schedules() -> bool:
    """Whether a user registered a schedule, whose code no key can stand for."""
    return not BUILT_IN.issuperset(SCHEDULES)


def candidates_record(candidates: Sequence["Candidate"]) -> Record:
    """Return all candidates, for a file."""
    rows = [
        {
            "seconds": candidate.seconds,
            "schedule": candidate.schedule,
            "stages_per_mesh": candidate.stages_per_mesh,
            "stages": [
                [stage.first, stage.last, stage.submesh, stage.candidate]
                for stage in candidate.stages
            ],
            "submesh_of": candidate.submesh_of,
            "shapes": candidate.shapes,
            "remat": candidate.remat,
            "alive": candidate.alive,
            "wires": candidate.wires,
        }
        for candidate in candidates
    ]
    return {"candidates": rows}


def candidate_fields(row: Record, space: "StageSpace") -> dict[str, Any]:
    """Return the fields of a `Candidate` from a row of the record.

    Raises:
        BadFileError, KeyError, TypeError, ValueError: it is no candidate of this space.
    """
    stages = tuple(StageRange(*map(int, stage)) for stage in row["stages"])
    ends = [0, *(stage.last for stage in stages)]
    if [*(stage.first for stage in stages), space.job.num_layers] != ends:
        raise BadFileError("its stages do not follow one another")
    if row["schedule"] not in SCHEDULES:
        raise BadFileError("it names a schedule that there is not")
    shapes = tuple(tuple(map(int, shape)) for shape in row["shapes"])
    for stage, shape in zip(stages, shapes, strict=True):
        if shape not in space.runs[stage.submesh].shapes:
            raise BadFileError("it names a logical mesh that there is not")

    return {
        "seconds": float(row["seconds"]),
        "job": space.job,
        "schedule": row["schedule"],
        "stages_per_mesh": int(row["stages_per_mesh"]),
        "stages": stages,
        "submesh_of": tuple(map(int, row["submesh_of"])),
        "shapes": shapes,
        "remat": tuple(map(bool, row["remat"])),
        "alive": tuple(map(int, row["alive"])),
        "wires": tuple(map(float, row["wires"])),
    }
