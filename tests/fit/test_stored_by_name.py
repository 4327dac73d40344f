"""Plans of models by name that `-o` has stored, and flags in the wrong place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fit.small import write_config

from alpa_strategy.cli import main
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.commands.origin import request_of
from alpa_strategy.ir.plan import Plan
from alpa_strategy.ir.plan_details import Origin, PlanDetails, details_of_file, details_path

pytest.importorskip("transformers")

TWO = ["--cluster", "dgx_h100", "cluster.num_nodes=1", "cluster.devices_per_node=2"]
PINNED = ["plan.num_stages=1", "plan.num_microbatches=2", "plan.remat=false"]
ASKED = [*TWO, *PINNED, "--seq", "64", "--batch", "4", "--changes", "0"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a small model by name."""
    folder = tmp_path_factory.mktemp("stored")
    model = write_config(folder / "tiny", num_hidden_layers=1)
    assert main(["plan", f"hf:{model}", *ASKED, "-o", str(folder / "plan.json")]) == 0
    return folder / "plan.json"


def details_of(path: Path) -> PlanDetails:
    details = details_of_file(str(path), Plan.load(path))
    assert details is not None
    return details


def test_a_plan_is_stored_with_all_its_flags(stored: Path) -> None:
    origin = details_of(stored).origin
    assert origin is not None
    assert origin.flags == ("seq=64", "batch=4", "optimizer=adamw", "precision=bf16-mixed")


def test_of_equal_flags_the_last_counts() -> None:
    flags = ("seq=64", "batch=4", "lora=8", "seq=128")
    cluster = ClusterSpec.load("dgx_h100", {"num_nodes": "1"})
    request = request_of(Origin("hf:tiny", "dgx_h100", (), flags), cluster)
    assert request is not None
    assert (request.source, request.sequence_length, request.lora_rank) == ("tiny", 128, 8)
    assert request_of(Origin("gpt_tiny", "dgx_h100"), cluster) is None


def test_why_answers_for_a_plan_by_name(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert main(["why", str(stored), name]) == 0
    assert name in capsys.readouterr().out
    assert [answer.name for answer in details_of(stored).explanations] == [name]


def test_whatif_varies_a_plan_by_name(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(stored), "--set", "seq=2x"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "seq=2x" in out
    assert "The plan as it is would take" in out or "cannot be used" in out


def test_a_plan_of_an_older_version_says_what_is_missing(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    path.write_text(stored.read_text())
    details = details_of(stored)
    assert details.origin is not None
    replace(details, origin=replace(details.origin, flags=())).save(details_path(path))
    for command in (["why", str(path), "lm_head"], ["whatif", str(path), "--set", "seq=2x"]):
        assert main(command) == 2
        assert "without the flags" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seq", "64"], "data.sequence_length=64"),
        (["--batch", "8"], "data.batch_size=8"),
        (["--precision", "bf16-true"], "trainer.precision=bf16-true"),
        (["--lora", "4", "--optimizer", "sgd"], "--lora, --optimizer are flags of models by name"),
        (["--sweep", "devices=1,2"], "--set devices=16"),
    ],
)
def test_flags_of_models_by_name_are_refused_for_a_recipe(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["plan", "gpt_tiny", *TWO, *flags]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_whatif_refuses_them_for_a_recipe_too(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["whatif", "gpt_tiny", *TWO, "--seq", "64", "--set", "devices=4"]
    assert main(arguments) == 2
    assert "data.sequence_length=64" in " ".join(capsys.readouterr().err.split())


def test_flags_of_recipes_are_refused_for_a_model_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path / "tiny")
    assert main(["plan", f"hf:{model}", *TWO, "--tune", "batch_size"]) == 2
    assert "--tune is for recipes" in " ".join(capsys.readouterr().err.split())
