"""Questions about plans: `alpa why`, `alpa whatif`, `alpa diff` and `alpa compare`."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cli.test_display import gpt_plan
from cli.test_timeline import staged

from alpa_strategy.cli import main
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.commands.compare import Entry, comparison_table
from alpa_strategy.commands.whatif import (
    UnchangedPlan,
    Variation,
    _overview,
    _reasons,
    _varied,
)
from alpa_strategy.display.console import make_console
from alpa_strategy.display.difference import difference_table
from alpa_strategy.errors import OptionError
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import Origin, details_of_file, details_path
from alpa_strategy.page.page import models_of, page_path
from alpa_strategy.page.run_page import write_page
from alpa_strategy.units import format_rate, format_seconds

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "gpt_tiny.yaml")
P3 = str(ROOT / "configs" / "clusters" / "p3_16xlarge_x8.yaml")
SMALL = ["model.num_layers=1", "cluster.num_nodes=1", "cluster.devices_per_node=2"]
NAME = "blocks.0.mlp.fc.weight"


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """A data parallel plan and a tensor parallel one of the same model."""
    folder = tmp_path_factory.mktemp("plans")
    for parallel in ("data", "tensor"):
        path = folder / f"{parallel}.json"
        command = ["plan", TINY, "--cluster", P3, "-o", str(path), *SMALL]
        assert main([*command, f"plan.parallel={parallel}"]) == 0
    return folder


def test_why_prints_the_other_layouts_and_adds_them_to_the_page(plans, tmp_path, capsys):
    for file in plans.glob("tensor.*"):
        shutil.copy(file, tmp_path)
    path = tmp_path / "tensor.json"
    plan = Plan.load(path)
    assert main(["why", str(path), NAME]) == 0
    out = capsys.readouterr().out
    assert NAME in out
    assert str(plan.stages[0].parameter_plans[NAME].modes[0]) in out
    (answer,) = details_of_file(path, plan).explanations
    assert answer.name == NAME
    (model,) = models_of(page_path(path).read_text())
    assert list(model["explanations"]) == [NAME]

    assert main(["why", str(path), NAME + "s"]) == 2
    assert f"did you mean '{NAME}'" in " ".join(capsys.readouterr().err.split())


def test_why_needs_to_know_the_recipe(plans, tmp_path, capsys):
    path = tmp_path / "alone.json"
    shutil.copy(plans / "data.json", path)
    assert main(["why", str(path), NAME]) == 2
    assert "alpa plan RECIPE --cluster CLUSTER -o" in " ".join(capsys.readouterr().err.split())

    # As a training stores it: with details, without a recipe.
    plan = Plan.load(path)
    details = replace(details_of_file(plans / "data.json", plan), origin=None)
    details.save(details_path(path))
    write_page(path, plan, details)
    assert main(["why", str(path), NAME]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "alpa_strategy.make_plan(module, batch, cluster).explain(NAME)" in error
    for of_page, is_explainable in ((path, False), (plans / "data.json", True)):
        (model,) = models_of(page_path(of_page).read_text())
        assert model["explainable"] is is_explainable


def test_diff_states_figures_and_layouts_that_differ(plans, tmp_path, capsys):
    before, after = plans / "data.json", plans / "tensor.json"
    page = tmp_path / "diff.html"
    assert main(["diff", str(before), str(after), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    for expected in ("data.json", "tensor.json", "step", "precision", "R* on 2", "S0 on 2"):
        assert expected in out
    models = models_of(page.read_text())
    assert [model["name"] for model in models] == ["data.json", "tensor.json"]
    assert all(model["detailed"] for model in models)

    assert main(["diff", str(before), str(before)]) == 0
    assert "both store every parameter alike" in capsys.readouterr().out


def test_diff_names_the_layers_of_stages_that_differ():
    before = gpt_plan(num_stages=2)
    first, second = before.stages
    stages = replace(first, layers="blocks.0"), replace(second, layers="blocks.1-3")
    after = replace(before, stages=stages)
    file = io.StringIO()
    make_console(file=file, width=100).print(difference_table(["a", "b"], before, after))
    text = file.getvalue()
    assert "layers of stage 1" in text
    assert "blocks.1-3" in text
    assert "both store every parameter alike, in other stages" in text


def test_whatif_plans_a_stored_plan_with_another_cluster(plans, capsys):
    path = plans / "tensor.json"
    step = Plan.load(path).predicted.step_seconds
    assert main(["whatif", str(path), "--set", "intra_node.bandwidth=2x"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "intra_node.bandwidth=2x" in out
    assert format_seconds(step) in out
    assert "The plan as it is would take" in out


def test_whatif_does_not_plan_a_stored_plan_again(plans, capsys):
    path = str(plans / "data.json")
    capsys.readouterr()
    assert main(["whatif", path, "--set", "intra_node.bandwidth=2x"]) == 0
    # Only with the change.
    assert capsys.readouterr().err.count("price mesh") == 1


def test_whatif_warns_of_a_precision_without_a_rate(plans, capsys):
    change = "trainer.precision=bf16-mixed"
    assert main(["whatif", str(plans / "data.json"), "--set", change]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"warning {change}: the cluster has no FLOP/s for bfloat16" in text
    assert 'precision="16-mixed"' in text


def test_changes_are_of_the_cluster_or_of_the_recipe():
    origin = Origin(TINY, P3)
    varied = _varied(
        origin,
        Variation("", {}, ()),
        ["inter_node.bandwidth=2x", "devices=16", "data.batch_size=3x", "plan.parallel=tensor"],
        "",
    )
    cluster = ClusterSpec.load(P3, dict(varied.to_cluster))
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 8)
    before = ClusterSpec.load(P3).inter_node.bandwidth
    assert cluster.inter_node.bandwidth == pytest.approx(2 * before)
    assert varied.overrides == ("data.batch_size=24", "strategy.parallel=tensor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inter_node.bandwidth", "KEY=VALUE"),
        ("name=2x", "no multiple"),
        ("devices=12", "full nodes of 8"),
        ("devices=none", "no number of devices"),
    ],
)
def test_a_change_that_cannot_be_is_an_error(text, message):
    with pytest.raises(OptionError, match=message):
        _varied(Origin(TINY, P3), Variation(""), [text], "")


def test_compare_prints_time_memory_and_cost(capsys):
    command = ["compare", TINY, *SMALL, "--cluster", P3, "--cluster", "dgx_h100"]
    assert main([*command, "--parallel", "zero3", "--price", "1", "--price", "5"]) == 0
    out = capsys.readouterr().out
    for expected in ("p3_16xlarge_x8", "dgx_h100", "zero3", "of a million samples"):
        assert expected in out
    assert main([*command, "--price", "1"]) == 2
    assert "give --price once for each --cluster" in " ".join(capsys.readouterr().err.split())


def test_compare_gives_each_cluster_its_nodes_and_cuts_no_figure(capsys):
    """Meshes of many stages are folded in 80 columns; every other cell is whole."""
    clusters = ["--cluster", P3, "--cluster", "dgx_h100"]
    prices = ["--price", "3", "--price", "12.25"]
    command = ["compare", TINY, *clusters, *prices]
    assert main([*command, "--nodes", "2", "--nodes", "1"]) == 0
    out = capsys.readouterr().out
    sizes = {line.split()[0]: line.split()[2] for line in out.splitlines() if " auto " in line}
    assert sizes == {"p3_16xlarge_x8": "16", "dgx_h100": "8"}
    assert main([*command, "--nodes", "2"]) == 2
    assert "give --nodes once for each --cluster" in " ".join(capsys.readouterr().err.split())

    plan = staged("1F1B", num_meshes=6)
    entry = Entry(ClusterSpec.load(P3, {}), "auto", 3.0, plan, samples=10)
    make_console(width=80).print(comparison_table([entry]))
    out = capsys.readouterr().out
    assert "…" not in out
    assert format_seconds(plan.predicted.step_seconds) in out


def test_cost_is_price_times_devices_times_hours(plans):
    plan = Plan.load(plans / "data.json")
    cluster = ClusterSpec.load(P3, {"num_nodes": 1, "devices_per_node": 2})
    entry = Entry(cluster, "data", 3.6, plan, samples=10)
    seconds = plan.predicted.step_seconds * 1e5
    assert entry.cost_per_million == pytest.approx(2 * 3.6 * seconds / 3600)
    failed = Entry(cluster, "zero3", 3.6, None, problem="too large")
    assert failed.cost_per_million is None
    assert comparison_table([entry, failed]).row_count == 2


def test_whatif_says_whether_the_unchanged_plan_still_fits(plans, capsys):
    plan = Plan.load(plans / "tensor.json")
    step = plan.predicted.step_seconds
    fits = UnchangedPlan(2 * step, 2**30, 2**31)
    assert fits.fits
    (line, *_) = _reasons(plan, plan, fits)
    assert f"{format_seconds(2 * step)} a step there, and fits: 1.00 GiB of 2.00 GiB" in line
    too_large = replace(fits, memory_limit=2**29)
    assert not too_large.fits
    (line, *_) = _reasons(plan, plan, too_large)
    assert "does not fit: it needs 1.00 GiB of 512 MiB" in line
    faster = replace(fits, seconds=step / 2)
    (line, *_) = _reasons(plan, plan, faster)
    assert line.endswith(f"The plan that was found takes {format_seconds(step / 2)} more.")
    table = _overview([Variation("a"), Variation("b")], [plan, plan], [fits, too_large])
    make_console().print(table)
    out = capsys.readouterr().out
    assert "too large" in out
    assert plan.figures is not None
    assert format_rate(plan.figures.num_tokens / step) in out


def test_the_row_of_a_change_has_the_kept_plan_where_that_is_the_better_one(plans, capsys):
    plan = Plan.load(plans / "tensor.json")
    step = plan.predicted.step_seconds
    kept = UnchangedPlan(step / 2, 2**30, 2**31)
    assert kept.is_faster_than(plan)
    assert not replace(kept, memory_limit=2**29).is_faster_than(plan)
    table = _overview([Variation("a"), Variation("b")], [plan, plan], [UnchangedPlan(), kept])
    make_console(width=120).print(table)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" b ")]
    assert row.count(format_seconds(step / 2)) == 2
    assert "-50.0%" in row
    assert "1.00 GiB" in row
    assert plan.figures is not None
    assert format_rate(2 * plan.figures.num_tokens / step) in row


def test_whatif_keeps_its_figures_in_a_narrow_terminal(plans, capsys):
    plan = Plan.load(plans / "tensor.json")
    step = plan.predicted.step_seconds
    longer = replace(plan, predicted=replace(plan.predicted, step_seconds=19.58 * step))
    label = "cluster.inter_node.bandwidth=0.001x"
    kept = UnchangedPlan(123.4 * step, 2**30, 2**31)
    table = _overview([Variation("as it is"), Variation(label)], [plan, longer], [kept, kept])
    make_console(width=72).print(table)
    out = capsys.readouterr().out
    assert "…" not in out
    for expected in ("tokens/s", "plan kept", "+1858.0%", format_seconds(123.4 * step)):
        assert expected in out
    assert label in "".join(line[:18].strip() for line in out.splitlines())


def test_whatif_prices_the_unchanged_plan_under_another_batch(plans, capsys):
    path = str(plans / "tensor.json")
    assert main(["whatif", path, "--set", "data.batch_size=2x"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a step there, and fits:" in out
    assert main(["whatif", path, "--set", "devices=1", "plan.parallel=auto"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot be used there: it is for 2 devices, not for 1" in out


def test_whatif_does_not_price_a_plan_that_the_change_excludes(plans, capsys):
    path = str(plans / "tensor.json")
    assert main(["whatif", path, "--set", "plan.num_microbatches=2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot be used there: it was made without num_microbatches=2" in out
