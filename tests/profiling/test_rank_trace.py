"""Traces of torch's profiler become nested slices whose times add up."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from alpa_strategy.profiling.chrome import chrome_trace
from alpa_strategy.profiling.parts import step_times
from alpa_strategy.profiling.programs import source_with_ranges
from alpa_strategy.profiling.ranges import COLLECTIVE, MODULE, PHASE, STEP, RangeInfo
from alpa_strategy.profiling.rank_trace import Slice, nested, slices_of
from alpa_strategy.profiling.waiting import RankRecord, mark_waiting

NODE = "autograd::engine::evaluate_function: "


def event(name: str, start: float, end: float, cat: str = "cpu_op", **arguments: Any) -> dict:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "args": arguments, **times}


def test_nodes_of_the_backward_get_the_module_of_their_forward() -> None:
    sequence = "Sequence number"
    events = [
        event("layers.0", 0, 10, "user_annotation"),
        event("aten::addmm", 1, 9, **{sequence: 0}),
        event("layers.1", 10, 20, "user_annotation"),
        event("aten::addmm", 11, 19, **{sequence: 1}),
        event("backward", 20, 60, "user_annotation"),
        event(NODE + "AddmmBackward0", 22, 30, **{sequence: 1}),
        event(NODE + "torch::autograd::AccumulateGrad", 31, 33),
        event(NODE + "AddmmBackward0", 34, 50, **{sequence: 0}),
        event("aten::mm", 35, 40, **{sequence: 0}),
    ]
    infos = {
        "layers.0": RangeInfo(MODULE),
        "layers.1": RangeInfo(MODULE),
        "backward": RangeInfo(PHASE),
    }
    slices = slices_of({"traceEvents": events, "baseTimeNanoseconds": 5000}, infos)
    backward = [each for each in slices if each.details.get("backward")]
    found = [(each.name, each.start - 5000, each.end - 5000) for each in backward]
    assert found == [("layers.1", 22_000, 34_000), ("layers.0", 34_000, 50_000)]


def test_kernels_of_a_device_get_the_module_that_launched_them() -> None:
    kernel = event("gemm", 30, 40, "kernel", device=0, stream=7, correlation=3)
    events = [
        event("layers.0", 0, 10, "user_annotation"),
        event("cudaLaunchKernel", 2, 3, "cuda_runtime", correlation=3),
        {**kernel, "tid": 7},
    ]
    slices = slices_of({"traceEvents": events}, {"layers.0": RangeInfo(MODULE)})
    (of_device,) = [each for each in slices if each.category == "kernel"]
    assert of_device.details == {"module": "layers.0"}
    assert of_device.track == "device 0, stream 7"


def test_programs_get_a_range_around_the_lines_of_a_module() -> None:
    source = "def step(a):\n    b = a\n    c = b\n    d = c\n    return (d, )\n"
    with_ranges = source_with_ranges(source, ["x", "x", "y", ""])
    entered = []

    class Range:
        def __init__(self, name: str) -> None:
            entered.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *unused: object) -> None: ...

    namespace: dict[str, Any] = {"module_range": Range}
    exec(with_ranges, namespace)
    assert namespace["step"](3) == (3,)
    assert entered == ["x", "y"]


KINDS = ["op", MODULE, COLLECTIVE, "message", PHASE]
INTERVALS = st.tuples(st.integers(0, 999), st.integers(1, 500), st.sampled_from(KINDS))


@given(st.lists(INTERVALS, max_size=30), st.integers(0, 1000))
def test_parts_add_up_to_the_steps(intervals: list[tuple[int, int, str]], until: int) -> None:
    slices = [Slice("step 0", STEP, 0, 500, "host"), Slice("step 1", STEP, 500, 1000, "host")]
    for start, length, kind in intervals:
        details = {"collective": "all_gather", "until": until} if kind == COLLECTIVE else {}
        step_end = 500 if start < 500 else 1000
        slices.append(Slice("x", kind, start, min(step_end, start + length), "host", details))
    times = step_times(nested(slices))
    assert times.count == 2
    assert times.total == 1000
    assert sum(times.parts.values()) == 1000
    assert 0 <= times.named <= times.in_step <= 1000


def test_who_comes_first_waits_for_the_last() -> None:
    records = []
    for rank, start in enumerate((100, 160)):
        details = {"collective": "all_reduce", "members": [0, 1]}
        slices = [
            Slice("step 0", STEP, 0, 400, "host"),
            Slice("all_reduce x", COLLECTIVE, start, 200, "host", details),
        ]
        records.append(RankRecord(rank, (0,), nested(slices)))
    mark_waiting(records)
    first, last = (step_times(record.slices).parts for record in records)
    assert (first["waiting"], first["all_reduce"]) == (60, 40)
    assert (last["waiting"], last["all_reduce"]) == (0, 40)


def test_collectives_in_flight_are_drawn_from_launch_to_wait() -> None:
    details = {"collective": "all_reduce", "members": [0]}
    wait = {**details, "waits_for": "all_reduce x"}
    slices = [
        Slice("all_reduce x", COLLECTIVE, 100, 110, "host", dict(details)),
        Slice("wait for all_reduce x", COLLECTIVE, 300, 400, "host", wait),
    ]
    trace = chrome_trace([RankRecord(0, (0,), nested(slices))], {})
    flight = [(e["ph"], e["ts"]) for e in trace["traceEvents"] if e["ph"] in "be"]
    assert flight == [("b", 0.0), ("e", 0.3)]
