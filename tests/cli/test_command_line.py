"""The `alpa` command: its subcommands do their work, and what a user gets wrong is one message and
exit code 2.
"""

from pathlib import Path

import pytest
from template import run_script

from alpa_strategy.cli import main
from alpa_strategy.commands.recipe_task import PLAN_KEYS, split_overrides
from alpa_strategy.ir.plan import Plan
from alpa_strategy.page.page import models_of
from alpa_strategy.recipe import KEYS, load_recipe

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "gpt_tiny.yaml")
P3 = str(ROOT / "configs" / "clusters" / "p3_16xlarge_x8.yaml")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    command = [
        "plan",
        TINY,
        "--cluster",
        P3,
        "-o",
        str(path),
        "model.num_layers=1",
        "cluster.num_nodes=1",
    ]
    assert main([*command, "cluster.devices_per_node=2", "plan.parallel=data"]) == 0
    return path


def test_plan_is_stored_and_obeys_its_overrides(plan_file):
    plan = Plan.load(plan_file)
    (stage,) = plan.stages
    assert stage.logical_mesh == (2,)
    blocks = {
        tuple(map(str, p.modes))
        for name, p in stage.parameter_plans.items()
        if name.startswith("blocks")
    }
    assert blocks == {("R*",)}
    assert plan.predicted.step_seconds > 0


def test_another_batch_is_planned_around_a_plan_and_by_hand(plan_file, tmp_path, capsys):
    path = tmp_path / "plan.json"
    command = [
        "plan",
        TINY,
        "--cluster",
        P3,
        "-o",
        str(path),
        "model.num_layers=1",
        "cluster.num_nodes=1",
    ]
    around = [
        *command,
        "cluster.devices_per_node=2",
        "--around",
        str(plan_file),
        "data.batch_size=2",
    ]
    assert main([*around, "plan.solver=propagation"]) == 0
    first, other = Plan.load(plan_file), Plan.load(path)
    assert other.stages[0].parameter_plans == first.stages[0].parameter_plans
    assert other.fingerprint.batch != first.fingerprint.batch
    assert "layouts propagated from op to op, not optimised" in capsys.readouterr().out
    assert (
        main(
            [
                *command,
                "cluster.devices_per_node=4",
                'plan.device_map={"embed.*": "0-1", "head.*": [2, 3]}',
            ]
        )
        == 0
    )
    stages = Plan.load(path).stages
    assert (stages[0].first_device, stages[-1].first_device) == (0, 2)


def test_show_prints_and_draws(plan_file, tmp_path, capsys):
    html, svg = tmp_path / "plan.html", tmp_path / "plan.svg"
    assert main(["show", str(plan_file), "--html", str(html), "--svg", str(svg)]) == 0
    assert "blocks.0.attn.qkv.weight" in capsys.readouterr().out
    assert svg.read_text().startswith("<svg")
    (model,) = models_of(html.read_text())
    names = {parameter["name"] for parameter in model["stages"][0]["parameters"]}
    assert "blocks.0.attn.qkv.weight" in names
    assert model["detailed"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["train", TINY, "model.num_layer=2"], "did you mean 'num_layers'"),
        (["train", TINY, "trainer.accelerator=abacus"], "abacus"),
        (["train", TINY, "strategy.parallel=dta"], "dta"),
        (["plan", TINY, "--cluster", "nowhere.yaml"], "nowhere.yaml"),
        (["plan", TINY, "--cluster", P3, "cluster.num_node=2"], "num_node"),
        (["plan", TINY, "--cluster", P3, "plan.paralel=data"], "did you mean 'parallel'"),
        (["plan", TINY, "--cluster", P3, "trainer.precision=7-bit"], "7-bit"),
        (
            ["plan", TINY, "--cluster", P3, "plan.capture=never"],
            'capture="never": there is no plan of all devices',
        ),
        (
            ["plan", TINY, "--cluster", P3, "plan.batch_scope=replica", "plan.num_stages=2"],
            "but a pipeline or micro",
        ),
        (
            ["plan", TINY, "--cluster", P3, "plan.batch_scope=replica", "plan.replicas=2"],
            "replicas=2: there is no plan",
        ),
        (
            ["plan", TINY, "--cluster", P3, "plan.check_gradients=perhaps"],
            "check_gradients='perhaps'",
        ),
        (["plan", TINY, "--cluster", P3, "--search", "mcmcc"], "did you mean 'mcmc'"),
        (["plan", TINY, "--cluster", P3, "data.batch_size=0"], "data.batch_size is 0"),
        (["train", TINY, "data.batch_size=-1"], "data.batch_size is -1"),
        (["train", TINY, "data.path=nowhere.txt"], "there is no file nowhere.txt"),
        (["train", TINY, "strategy.verbose=maybe"], "verbose='maybe'"),
        (["show", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(command, message, capsys):
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_help_names_the_subcommands(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("train", "plan", "show"))


def test_help_of_whatif_names_the_plan_that_it_takes(capsys):
    with pytest.raises(SystemExit):
        main(["whatif", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "PLAN.json|RECIPE" in out
    assert "a plan that `alpa plan -o` stored, or a YAML file" in out


def test_module_runs_as_a_command():
    result = run_script(["-m", "alpa_strategy", "show", "nowhere.json"], ROOT)
    assert result.returncode == 2
    assert "nowhere.json" in result.stderr


@pytest.mark.parametrize(
    "path", ["a\0b", "x" * 5000, "d/" * 3000, "\ud800", "\x1b[2Jname", ".", "", "a\nb"]
)
def test_a_path_that_cannot_be_is_one_message(plan_file, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    drawn = [["show", str(plan_file), "--html", path], ["plan", TINY, "--cluster", P3, "-o", path]]
    cannot_be_written = drawn if path in ("a\0b", "x" * 5000, "d/" * 3000, "\ud800", ".") else []
    for command in (
        ["show", path],
        ["export", path, "out"],
        ["plan", path, "--cluster", P3],
        *cannot_be_written,
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert len(error) < 1000, command
        assert "Traceback" not in error
        assert error.startswith("error: ")
        assert "\x1b" not in error


def test_a_file_that_is_shown_speaks_no_escapes(tmp_path, capsys):
    named = tmp_path / "\x1b[31mred"
    for content in (
        "{}",
        '{"a": "\x1b[31m"}',
        "\x1b[31m",
        '{"version": "\\u001b[31m"}',
        "\0",
        "[" * 10**6,
    ):
        named.write_text(content)
        assert main(["show", str(named)]) == 2
        assert "\x1b" not in capsys.readouterr().err


COMPILED = """
import torch
from gpt import GPT


class Compiled(GPT):
    def __init__(self, **given):
        super().__init__(**given)
        self.blocks[0] = torch.compile(self.blocks[0])
"""


def test_a_part_that_the_user_compiled_is_planned_as_it_will_run(tmp_path, monkeypatch):
    """The plan file is then that of the training, which compiles the step."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    (tmp_path / "compiled_gpt.py").write_text(COMPILED)
    recipe = tmp_path / "compiled.yaml"
    recipe.write_text(Path(TINY).read_text().replace("gpt.GPT", "compiled_gpt.Compiled"))

    def planned(*overrides: str) -> str:
        path = tmp_path / "plan.json"
        sizes = ["model.num_layers=1", "cluster.num_nodes=1", "cluster.devices_per_node=1"]
        assert (
            main(["plan", str(recipe), "--cluster", P3, "-o", str(path), *sizes, *overrides]) == 0
        )
        return Plan.load(path).fingerprint.options

    assert planned() == planned("plan.compile=true") != planned("plan.compile=false")


def test_the_keys_of_overrides_are_in_the_help_and_in_the_error(capsys):
    """Held to the code: `KEYS` are what a recipe may have, and each of them is taken."""
    values = {
        "cluster": "cluster.num_nodes=1",
        "plan": "plan.parallel=data",
        "model": "model.num_layers=1",
        "data": "data.batch_size=2",
        "trainer": "trainer.max_steps=2",
        "strategy": "strategy.parallel=data",
        "seed": "seed=1",
    }
    assert set(values) == {*PLAN_KEYS, *KEYS}
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for key in values:
        assert f"{key}." in text or f"{key}," in text
    to_cluster, to_recipe = split_overrides(list(values.values()))
    assert to_cluster == {"num_nodes": "1"}
    assert load_recipe(TINY, to_recipe).strategy["parallel"] == "data"


@pytest.mark.parametrize(
    "override",
    ["clusters.num_nodes=2", "model_size=3", "=3", ".a=3", "[/red]=1", "Plan.parallel=data"],
)
def test_an_unknown_key_of_an_override_lists_all_that_are_known(override, capsys):
    assert main(["plan", TINY, "--cluster", P3, override]) == 2
    error = capsys.readouterr().err
    for key in (*PLAN_KEYS, *KEYS):
        assert key in error
    assert override in error


@pytest.mark.parametrize("override", ["plan=data", "cluster=x", "plan", "cluster"])
def test_a_section_alone_is_no_override(override, capsys):
    assert main(["plan", TINY, "--cluster", P3, override]) == 2
    assert "names no field of" in capsys.readouterr().err
