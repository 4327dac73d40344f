"""Plans survive the round trip; what is wrong with a file is named; the store says why it finds
nothing.
"""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_strategy.errors import PlanError
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.plan import (
    Collective,
    Fingerprint,
    ParameterMode,
    ParameterPlan,
    Plan,
    Predicted,
    StagePlan,
)
from alpa_strategy.planner.plan_store import PlanStore

FINGERPRINT = Fingerprint("g", "p", "b", "c", "o", "1")
MODES = st.sampled_from(
    [ParameterMode.parse(text) for text in ("R", "R*", "S0", "S1", "G0", "G12")]
)
AXIS_STRATEGIES = st.sampled_from(
    [
        AxisStrategy.parse(t)
        for t in ("S0,R*,R*->S0", "R*,S0,S0->S1", "R,R->P", "S0->S0@sharded_loss", "->R")
    ]
)
SECONDS = st.floats(0, 1e6)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_axes = draw(st.integers(1, 2))
    names = st.text(min_size=1, max_size=8)
    predicted = Predicted(draw(SECONDS), draw(st.integers(0, 10**15)), draw(SECONDS))
    remat, num_ops = draw(st.booleans()), draw(st.integers(1, 99))
    if remat and num_ops > 1:
        cuts = draw(st.sets(st.integers(1, num_ops - 1), max_size=4))
    else:
        cuts = ()
    stage = StagePlan(
        submesh=(draw(st.integers(1, 4)), draw(st.integers(1, 8))),
        first_device=draw(st.integers(0, 64)),
        logical_mesh=tuple(draw(st.lists(st.integers(1, 8), min_size=num_axes, max_size=num_axes))),
        ops=(0, num_ops),
        parameter_plans={
            n: ParameterPlan(tuple(draw(MODES) for _ in range(num_axes)))
            for n in draw(st.sets(names))
        },
        strategies={
            n: tuple(draw(AXIS_STRATEGIES) for _ in range(num_axes)) for n in draw(st.sets(names))
        },
        collectives=(Collective("all_reduce", 0, "step", 3, 12, draw(SECONDS)),),
        predicted=predicted,
        remat=remat,
        recompute_splits=tuple(sorted(cuts)),
        recompute_per_microbatch=draw(st.booleans()),
    )
    return Plan(
        fingerprint=FINGERPRINT,
        stages=(stage,),
        predicted=predicted,
        baselines={"data": draw(SECONDS), "tensor": None},
        gap=draw(SECONDS),
        notes=tuple(draw(st.lists(st.text(), max_size=2))),
        solver_seconds={"solve": draw(SECONDS)},
        cluster_name=draw(st.text()),
    )


STRATEGIES = {"linear": (AxisStrategy.parse("S0,R*->S0"),)}
STAGE = StagePlan(
    (1, 2), 0, (2,), (0, 1), {"w": ParameterPlan.parse("R*")}, STRATEGIES, (), Predicted(1.0, 2)
)
PLAN = Plan(FINGERPRINT, (STAGE,), Predicted(1.0, 2))


@given(plans())
def test_dict_round_trip_through_json(plan: Plan) -> None:
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_file_round_trip_is_atomic_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    PLAN.save(path)
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    stage = json.loads(path.read_text())["stages"][0]
    assert stage["parameters"] == {"w": "R*"}
    assert stage["strategies"] == {"linear": "S0,R*->S0"}


def edited(path: tuple, value: object) -> dict:
    data = json.loads(json.dumps(PLAN.to_dict()))
    node = data
    for key in path[:-1]:
        node = node[key]
    if value is KeyError:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format_version",), 99, "version 99"),
        (("stages",), KeyError, "plan.stages is missing"),
        (("stages",), [], "no stages"),
        (("fingerprint", "batch"), KeyError, "fingerprint.batch is missing"),
        (("predicted", "step_seconds"), "fast", "step_seconds is 'fast', expected a number"),
        (("stages", 0, "parameters", "w"), "X0", r"parameters\['w'\]: 'X0'"),
        (("stages", 0, "parameters", "w"), "R R", "2 entries for 1 mesh axes"),
        (("stages", 0, "strategies", "linear"), "S0;R", "'S0;R' is not a strategy"),
        (("stages", 0, "logical_mesh"), [], "logical_mesh has 0 numbers"),
        (("stages", 0, "remat"), 1, "remat is 1, expected a bool"),
        (("stages", 0, "remat_cuts"), [1], "remat_cuts must ascend between 0 and 1"),
    ],
)
def test_a_wrong_field_is_named(path: tuple, value: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(edited(path, value)))
    with pytest.raises(PlanError, match=message):
        Plan.load(file)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format_version": 1,')
    with pytest.raises(PlanError, match="not JSON"):
        Plan.load(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(PlanError, match="expected an object"):
        Plan.load(tmp_path / "list.json")


def test_store_finds_exactly_and_explains(tmp_path: Path) -> None:
    store = PlanStore(tmp_path / "plans")
    assert store.find(FINGERPRINT) is None
    assert "no plan is stored" in store.explain(FINGERPRINT)
    store.put(PLAN)
    store.put(replace(PLAN, fingerprint=replace(FINGERPRINT, graph="x", cluster="y", options="z")))
    assert store.find(FINGERPRINT) == PLAN
    other = replace(FINGERPRINT, graph="g2", batch="b2")
    assert store.find(other) is None
    assert store.explain(other) == "the closest stored plan has another graph, batch"


def test_store_reports_and_ignores_a_corrupted_file(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    path = store.put(PLAN)
    path.write_text(path.read_text()[:100])
    with pytest.warns(UserWarning, match="not JSON"):
        assert store.find(FINGERPRINT) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert "cannot be used" in store.explain(FINGERPRINT)
    store.put(PLAN)
    assert store.find(FINGERPRINT) == PLAN


def test_store_at_a_url_is_shared_by_machines(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/plans"
    first = PlanStore(tmp_path / "first", url)
    assert first.find(FINGERPRINT) is None
    assert url in first.explain(FINGERPRINT)
    first.put(PLAN)
    second = PlanStore(tmp_path / "second", url)
    assert second.find(FINGERPRINT) == PLAN
    assert Plan.load(second.location(FINGERPRINT)) == PLAN

    fsspec.filesystem("memory").rm(f"{url}/{FINGERPRINT.digest}.json")
    assert second.find(FINGERPRINT) is None


def test_store_at_a_url_that_cannot_be_reached_uses_its_copies(tmp_path: Path) -> None:
    # No server listens there, and fsspec cannot write to any.
    store = PlanStore(tmp_path, "http://127.0.0.1:9/plans")
    with pytest.warns(UserWarning, match=r"plans are read from .* only: http://127\.0\.0\.1:9"):
        assert store.find(FINGERPRINT) is None
    with pytest.raises(OSError, match="cannot be written"):
        store.put(PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert store.find(FINGERPRINT) == PLAN


NOTES = [
    # The plan's notes and those on its step, the step's now, what is shown then.
    ((), (), (), ()),
    (("a", "p"), ("a",), ("a",), ("a", "p")),
    (("a", "p"), ("a",), (), ("p",)),
    (("a", "p"), ("a",), ("b",), ("b", "p")),
    (("p",), (), ("b",), ("b", "p")),
    (("a", "b", "p", "q"), ("a", "b"), ("b",), ("b", "p", "q")),
    (("a", "p"), ("a",), ("p",), ("p",)),
    (("a",), ("a",), ("c", "d"), ("c", "d")),
    (("p", "a", "q"), ("a",), ("c",), ("c", "p", "q")),
    (("old note of a file without the field",), (), (), ("old note of a file without the field",)),
]


@pytest.mark.parametrize(("notes", "step_notes", "now", "shown"), NOTES)
def test_a_stored_plan_has_the_notes_of_the_step_that_runs(notes, step_notes, now, shown, tmp_path):
    made = replace(PLAN, notes=notes, step_notes=step_notes)
    made.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json").with_notes_of(now)
    assert plan.notes == shown
    assert plan.step_notes == now
    assert plan.with_notes_of(now) == plan
