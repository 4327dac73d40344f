"""Models of Hugging Face, from files and back to files: parameters bit for bit, steps as in one
process, exports with the same logits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from covering import slow_but
from hugging_face.finetune import assert_losses, record
from hugging_face.tiny_models import MODELS, WITH_EXPERTS

PLANS: dict[str, dict[str, Any]] = {
    "data": {"parallel": "data"},
    "zero3": {"parallel": "zero3"},
    "tensor": {"parallel": "tensor"},
    "stages": {"num_stages": 2, "num_microbatches": 2},
    "experts": {"placements": {"*experts*": "S0"}, "logical_mesh": (2,)},
    "eager zero3": {"parallel": "zero3", "capture": "never"},
}
PLANS_OF_FOUR = {
    **PLANS,
    "data x tensor": {"parallel": ("data", "tensor"), "logical_mesh": (2, 2)},
    "experts": {"placements": {"*experts*": "R* S0"}, "logical_mesh": (2, 2)},
}
# Adapters (test_adapters.py) are around a Llama under zero3; a Mixtral is exported there,
# and trains with its experts on several devices in equality/test_third_party.py.
QUICK = [
    ("gpt2", "stages"),
    ("llama_tied", "tensor"),
    ("t5", "eager zero3"),
]


def cases(plans: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    pairs = []
    for model in MODELS:
        names = [name for name in plans if name != "experts"]
        if model in WITH_EXPERTS:
            names.append("experts")
        pairs += [(model, name) for name in names]
    return pairs


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    """The files of a model, and one process's training on them; made once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = tmp_path_factory.mktemp("models")
    results: dict[tuple[str, int], Any] = {}

    def get(name: str, world_size: int) -> tuple[Path, Any]:
        path = MODELS[name].save(folder / name)
        if (name, world_size) not in results:
            arguments = (name, str(path), None, world_size, str(folder))
            results[name, world_size] = pool.run(1, record, *arguments, init_group=False)[0]
        return path, results[name, world_size]

    return get


def check(pool, reference, tmp_path, name: str, world_size: int, options: dict[str, Any]) -> None:
    path, expected = reference(name, world_size)
    options = dict(options)
    capture = options.pop("capture", "auto")
    export = tmp_path / "export"
    root = str(tmp_path)
    arguments = (name, str(path), options, world_size, root, 2, torch.float64, True)
    runs = pool.run(world_size, record, *arguments, capture, str(export))
    for run in runs:
        assert run["first"].keys() == expected["first"].keys()
        for key, value in expected["first"].items():
            assert torch.equal(run["first"][key], value), key
        for key, value in expected["buffers"].items():
            assert torch.equal(run["buffers"][key], value), key
        assert not all(run["has_memory"].values())
        assert run["is_eager"] == (capture == "never")
        for key, value in expected["state"].items():
            torch.testing.assert_close(run["state"][key], value, rtol=1e-6, atol=1e-6)
    assert_losses(runs, expected)
    check_export(name, path, export, runs[0])


def check_export(name: str, path: Path, export: Path, run: dict[str, Any]) -> None:
    """The exported files load in the library, to the same logits, in the format of the files that
    were loaded.
    """
    import transformers
    from safetensors.torch import load_file

    auto_class = getattr(transformers, MODELS[name].auto_class)
    loaded, report = auto_class.from_pretrained(
        export, output_loading_info=True, dtype=torch.float64
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    trained = auto_class.from_pretrained(path, dtype=torch.float64)
    trained.load_state_dict(run["state"])
    batch = MODELS[name].batch(2, torch.Generator().manual_seed(5))
    with torch.no_grad():
        if name in WITH_EXPERTS:
            for model in (loaded, trained):
                model.set_experts_implementation("batched_mm")
        logits = [MODELS[name].logits(model.eval(), batch) for model in (loaded, trained)]
    assert torch.equal(*logits)

    def names(folder: Path) -> set[str]:
        files = folder.glob("*.safetensors")
        return {key for file in files for key in load_file(file)}

    assert names(export) == names(path)
    assert len(list(export.glob("*.safetensors"))) > 1


@pytest.mark.parametrize(("name", "plan"), QUICK)
def test_files_to_files(pool, reference, tmp_path, name, plan):
    check(pool, reference, tmp_path, name, 2, PLANS[plan])


@pytest.mark.parametrize("dtype", slow_but((torch.bfloat16, torch.float32), (torch.float32,)))
def test_parameters_have_the_precision_of_the_trainer(pool, reference, tmp_path, dtype):
    """Whether the library casts the weights or the Trainer does."""
    path, _ = reference("mixtral", 2)
    expected = MODELS["mixtral"].loaded(path).to(torch.bfloat16).state_dict()
    options = {"parallel": "zero3"}
    arguments = ("mixtral", str(path), options, 2, str(tmp_path), 1, dtype, True, "auto", None, "")
    for run in pool.run(2, record, *arguments, "bf16-true"):
        for key, value in run["first"].items():
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, expected[key]), key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [c for c in cases(PLANS) if c not in QUICK])
def test_files_to_files_under_all_plans(pool, reference, tmp_path, name, plan):
    check(pool, reference, tmp_path, name, 2, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), cases(PLANS_OF_FOUR))
def test_files_to_files_on_four_ranks(pool, reference, tmp_path, name, plan):
    check(pool, reference, tmp_path, name, 4, PLANS_OF_FOUR[plan])
