"""The display: numbers, grouping, and a plan of a realistic GPT as table, picture and page."""

import os
import xml.etree.ElementTree as ET
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from alpa_strategy.display.console import DottedName
from alpa_strategy.display.difference import stages_text
from alpa_strategy.display.full_plan import plan_svg, plan_table
from alpa_strategy.display.plan_words import plan_words
from alpa_strategy.display.progress import Progress
from alpa_strategy.display.table import measured_line, parameter_groups, plan_timing
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.ir.plan import Collective, Fingerprint, ParameterPlan, Plan, Predicted, StagePlan
from alpa_strategy.lightning.machine_load import busy_machine
from alpa_strategy.units import format_bytes, format_seconds

LAYERS = 24


def gpt_plan(num_stages: int = 1) -> Plan:
    """A plan of a 24-layer GPT: data parallel x tensor parallel, the last four layers without
    ZeRO.
    """
    modes = {"embed.weight": ("R*", "S0")}
    for layer in range(LAYERS):
        zero = "G0" if layer < LAYERS - 4 else "R*"
        modes |= {
            f"blocks.{layer}.attn.qkv.weight": ("G0", "S0"),
            f"blocks.{layer}.attn.qkv.bias": ("R*", "S0"),
            f"blocks.{layer}.mlp.fc.weight": (zero, "S0"),
        }
    predicted = Predicted(0.8, 11 * 2**30, 0.6, 0.15, 0.05)
    stages = tuple(
        StagePlan(
            submesh=(2, 4),
            first_device=8 * index,
            logical_mesh=(2, 4),
            ops=(0, 100),
            parameter_plans={name: ParameterPlan.parse(" ".join(m)) for name, m in modes.items()},
            strategies={},
            collectives=(Collective("all_reduce", 1, "forward", 48, 3 * 2**29, 0.05),),
            predicted=predicted,
        )
        for index in range(num_stages)
    )
    return Plan(
        fingerprint=Fingerprint("g", "p", "b", "c", "o", "1"),
        stages=stages,
        predicted=predicted,
        baselines={"data": None, "zero3": 1.2},
        notes=("aten.foo runs whole on every device <really>",),
        solver_seconds={"capture": 3.0, "solve": 4.5},
        cluster_name="p3",
    )


def as_text(renderable, width: int = 120) -> str:
    console = Console(width=width, record=True, quiet=False, file=StringIO())
    console.print(renderable)
    return console.export_text()


def test_table_says_what_was_decided():
    plan = gpt_plan()
    plan = replace(
        plan,
        stages=(replace(plan.stages[0], shapes={"embed.weight": (51200, 2048)}), *plan.stages[1:]),
    )
    text = as_text(plan_table(plan, memory_limit=14 * 2**30))
    for expected in (
        "8 devices on p3, mesh 2 x 4, proved optimal",
        "800 ms",
        "communication 150 ms",
        "peak 11.0 GiB of 14.0 GiB per device (79%), 3.00 GiB left",
        "data does not fit, zero3 1.20 s (1.50x)",
        "blocks.*.attn.qkv.weight",
        "x24",
        "51200 x 2048",
        "blocks.{0-19}.mlp.fc.weight",
        "blocks.{20-23}.mlp.fc.weight",
        "all_reduce",
        "1.50 GiB",
        "aten.foo runs whole on every device <really>",
    ):
        assert expected in text


def test_table_of_two_stages_shows_both():
    plan = gpt_plan(num_stages=2)
    first = replace(plan.stages[0], collectives=())
    text = as_text(plan_table(replace(plan, stages=(first, plan.stages[1]))))
    assert "Stage 0  devices 0-7" in text
    assert "Stage 1  devices 8-15" in text


def test_equal_stages_are_listed_once():
    plan = gpt_plan(num_stages=4)
    last = replace(plan.stages[3], logical_mesh=(4, 2))
    text = as_text(plan_table(replace(plan, stages=(*plan.stages[:3], last))))
    assert "Stages 0-2  each mesh 2 x 4" in text
    assert "Stage 3  devices 24-31" in text
    assert text.count("embed.weight") == 2


def test_table_of_seconds_near_the_largest_number():
    """Found by scripts/fuzz.py: their sums overflow."""
    plan = gpt_plan()
    plan = replace(
        plan, predicted=replace(plan.predicted, compute_seconds=1e308, communication_seconds=1e308)
    )
    assert "communication" in as_text(plan_table(plan))


def test_table_says_how_long_the_busiest_stage_waits():
    plan = gpt_plan(num_stages=2)
    plan = replace(plan, predicted=replace(plan.predicted, step_seconds=1.2))
    assert "waiting 400 ms" in as_text(plan_table(plan))


@pytest.mark.parametrize("num_stages", [1, 22])
def test_table_fits_a_narrow_terminal(num_stages):
    plan = gpt_plan(num_stages)
    stages = [
        replace(
            s,
            layers=f"blocks.{i + 10}-blocks.{i + 12}, norm",
            forward_seconds=0.0241,
            backward_seconds=0.0932,
            remat=True,
            recompute_splits=(20, 40),
        )
        for i, s in enumerate(plan.stages)
    ]
    plan = replace(plan, stages=tuple(stages), schedule="1F1B", num_microbatches=1024)
    lines = as_text(plan_table(plan), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    if num_stages > 1:
        assert (
            sum("blocks.1" in line and line.endswith("%") for line in lines) == 10
        )  # the layers and the idle share


def test_timing_and_measured_line():
    assert "planned in 7.50 s: capture 3.00 s, solve 4.50 s" in as_text(
        plan_timing(gpt_plan(), 2**30)
    )
    assert "measured 1.00 s, predicted 800 ms: 1.25x" in as_text(
        measured_line(gpt_plan().predicted, 1.0)
    )


def test_two_predictions_of_a_step_are_told_apart():
    """The plan's, and that with the Trainer's loop as the job has measured it."""
    in_job = Predicted(0.192, 1, 0.181)
    text = as_text(measured_line(in_job, 0.628, planned_seconds=0.181), 300)
    assert "predicted 192 ms (181 ms by the plan, 11.0 ms more in the Trainer's loop" in text
    assert "3.27x the prediction" in text
    less = as_text(measured_line(in_job, 0.628, planned_seconds=0.2), 300)
    assert "predicted 192 ms (200 ms by the plan, 8.00 ms less in" in less
    assert "by the plan" not in as_text(measured_line(in_job, 0.628, planned_seconds=0.192), 300)


def test_the_report_says_where_the_host_limits():
    limited = Predicted(3e-3, 1, 0.5e-3, host_seconds=1e-3, loop_seconds=1.5e-3)
    busy = Predicted(3e-3, 1, 2.5e-3, host_seconds=0.2e-3, loop_seconds=0.3e-3)

    text = as_text(measured_line(limited, 3e-3), 200)
    assert "limited by the host: 2.50 ms of 3.00 ms, 1.50 ms in the Trainer's loop" in text
    assert "limited" not in as_text(measured_line(busy, 3e-3), 200)


@pytest.mark.parametrize(
    ("device", "load", "ratio", "is_named"),
    [
        ("cpu", 14.2, 5.6, True),
        # As predicted, not busy, and not on CPUs.
        ("cpu", 14.2, 1.4, False),
        ("cpu", 2.1, 5.6, False),
        ("cuda", 14.2, 5.6, False),
    ],
)
def test_the_report_names_a_busy_machine(device, load, ratio, is_named, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    line = measured_line(Predicted(0.1, 1, 0.1), 0.1 * ratio, likely_cause=busy_machine(device))
    assert ("the machine is busy: load 14 on 2 cores" in as_text(line, 200)) is is_named


@pytest.mark.parametrize("num_stages", [1, 3])
def test_picture_is_well_formed_and_complete(num_stages):
    root = ET.fromstring(plan_svg(gpt_plan(num_stages)))
    shown = []
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        shown += (node.text or "").split()
    # the title, then the text of the table
    table = as_text(plan_table(gpt_plan(num_stages)), 120)
    assert "".join(shown) == "alpa" + "".join(table.split())


def test_picture_is_self_contained_and_escaped():
    picture = plan_svg(gpt_plan())
    assert "&lt;really&gt;" in picture
    assert not any(text in picture for text in ("src=", "src:", "url(http", "<link"))


@given(st.floats(1e-9, 1e9))
def test_seconds_keep_three_digits(seconds):
    text = format_seconds(seconds)
    number, unit = text.split(" ")[:2]
    if unit == "min":
        assert int(number) == round(seconds) // 60
        return
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=6e-3, abs=6e-9)
    assert len(number) <= 5


@given(st.integers(0, 2**60))
def test_bytes_keep_three_digits(num_bytes):
    number, unit = format_bytes(num_bytes).split(" ")
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert float(number) * scale == pytest.approx(num_bytes, rel=6e-3)


names = st.lists(st.sampled_from(["a", "b", "0", "1", "7"]), min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(names, st.sampled_from(["R", "S0", "R*"]).map(ParameterPlan.parse)))
def test_groups_partition_the_parameters(plans):
    groups = parameter_groups(plans, {})
    grouped = [name for group in groups for name in group.names]
    assert sorted(grouped) == sorted(plans)
    assert all(plans[name].modes == group.modes for group in groups for name in group.names)
    lines = [(group.pattern, tuple(map(str, group.modes))) for group in groups]
    assert len(set(lines)) == len(lines)


def test_progress_prints_one_line_a_phase():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    phases = Progress(enabled=True, console=console)
    with phases("plan"), phases("capture"):
        pass
    with pytest.raises(ValueError, match="broken"), phases("solve"):
        raise ValueError("broken")
    lines = console.export_text().splitlines()
    assert [("✓" in line, "✗" in line) for line in lines] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert "capture" in lines[0]


def test_progress_is_silent_where_it_is_not_enabled():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with Progress(enabled=False, console=console)("capture"):
        pass
    assert console.export_text() == ""


def test_words_of_interleaved_stages_name_the_groups_of_devices():
    plan = gpt_plan(4)
    assert plan_words(plan).startswith("4 pipeline stages of ")
    stages = [replace(s, first_device=s.first_device % 16) for s in plan.stages]
    words = plan_words(replace(plan, stages=tuple(stages)))
    assert words.startswith("4 pipeline stages on 2 groups of devices, each ")


def test_words_name_matrices_that_are_divided_beside_data_parallelism():
    by_samples, by_columns = map(AxisStrategy.parse, ("S0,R*->S0", "R*,S0->S1"))
    modes = {"attn.qkv.weight": "G0", "attn.proj.weight": "G0", "mlp.fc.weight": "S0"}
    strategies = {"linear_0": by_samples, "linear_1": by_samples, "linear_2": by_columns}
    stage = replace(
        gpt_plan(1).stages[0],
        submesh=(1, 4),
        logical_mesh=(4,),
        parameter_plans={name: ParameterPlan.parse(mode) for name, mode in modes.items()},
        shapes=dict.fromkeys(modes, (64, 64)),
        strategies={name: (strategy,) for name, strategy in strategies.items()},
    )
    plan = replace(gpt_plan(1), stages=(stage,))
    assert plan_words(plan) == "4-way data parallel, 4-way tensor parallel in some layers, ZeRO-1"

    alone = replace(stage, strategies=dict.fromkeys(strategies, (by_samples,)))
    plan = replace(plan, stages=(stage, alone))
    assert "up to 4-way tensor parallel in some layers (most in stage 0)" in plan_words(plan)


@pytest.mark.parametrize("mode", ["R", "R*"])
def test_words_do_not_take_parameters_that_are_stored_in_full_for_zero3(mode):
    stage = replace(
        gpt_plan(1).stages[0],
        submesh=(1, 2),
        logical_mesh=(2,),
        parameter_plans={"fc.weight": ParameterPlan.parse(mode)},
        shapes={"fc.weight": (64, 64)},
        strategies={"linear_0": (AxisStrategy.parse("S0,R*->S0"),)},
    )
    assert plan_words(replace(gpt_plan(1), stages=(stage,))) == "2-way data parallel"


def test_words_tell_tokens_of_a_sequence_from_samples():
    by_samples, by_tokens = map(AxisStrategy.parse, ("S0,R*->S0", "S1,R*->S1"))
    stage = replace(
        gpt_plan(1).stages[0],
        submesh=(1, 8),
        logical_mesh=(2, 4),
        parameter_plans={"fc.weight": ParameterPlan.parse("R* R*")},
        shapes={"fc.weight": (64, 64)},
        strategies={"linear_0": (by_samples, by_tokens), "linear_1": (by_samples, by_tokens)},
    )
    plan = replace(gpt_plan(1), stages=(stage,))
    assert plan_words(plan) == "2-way data parallel, 4-way sequence parallel"


def test_words_are_true_of_stages_that_differ():
    plan = gpt_plan(3)
    alone = replace(plan.stages[1], submesh=(1, 1), logical_mesh=(1, 1))
    plan = replace(plan, stages=(plan.stages[0], alone, plan.stages[2]))
    assert plan_words(plan) == (
        "3 pipeline stages on 1 to 8 devices each, up to 2-way data parallel (most in stages"
        " 0, 2), up to 4-way tensor parallel (most in stages 0, 2), ZeRO-1 in 2 of 3 stages"
    )
    assert stages_text(plan) == "3 stages, on meshes 2 x 4, 1 x 1, 2 x 4"
    alone = replace(plan, stages=(replace(alone, remat=True),))
    assert plan_words(alone) == "one device, activation checkpointing"
    assert stages_text(gpt_plan(3)) == "3 stages, each on mesh 2 x 4"


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (60, ["encoder.layers.*.self_attn.in_proj_weight"]),
        (30, ["encoder.layers.*.self_attn.", "in_proj_weight"]),
        (15, ["encoder.layers.", "*.self_attn.", "in_proj_weight"]),
        # A part that is wider than the column is folded.
        (10, ["encoder.", "layers.*.", "self_attn.", "in_proj_we", "ight"]),
    ],
)
def test_long_names_break_after_a_dot(width, lines):
    name = DottedName("encoder.layers.*.self_attn.in_proj_weight")
    assert [line.rstrip() for line in as_text(name, width).splitlines()] == lines
