"""Folders and URLs that models are saved to."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import fsspec
import transformers
from hugging_face.tiny_models import MODELS
from torch import nn

from alpa_strategy.errors import CheckpointError, SetupError
from alpa_strategy.hf import uploads
from alpa_strategy.hf.description import describe, rebuild
from alpa_strategy.hf.saving import hugging_face_model, save_pretrained, values_in_memory


def save(model: nn.Module, folder: Path | str, **options) -> None:
    save_pretrained(model, folder, values_in_memory(nullcontext), **options)


def assert_loads(model: nn.Module, folder: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_second_save_replaces_weights_and_leaves_other_files(tmp_path):
    model = MODELS["llama"].build()
    folder = tmp_path / "saved"
    save(model, folder, max_shard_size="200KB")
    (folder / "notes.txt").write_text("mine")
    num_files = len(list(folder.glob("model-*.safetensors")))
    assert num_files > 2

    with torch.no_grad():
        model.lm_head.weight.add_(1)
    save(model, folder)
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert not list(folder.glob("*.index.json"))
    assert (folder / "notes.txt").read_text() == "mine"
    assert_loads(model, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_a_failed_save_leaves_the_last_one(tmp_path, monkeypatch):
    model = MODELS["llama"].build()
    folder = tmp_path / "saved"
    save(model, folder)

    def fails(*_):
        raise OSError("no space left")

    changed = MODELS["llama"].build()
    with torch.no_grad():
        changed.lm_head.weight.add_(1)
    monkeypatch.setattr("alpa_strategy.hf.saving.write_tensor", fails)
    with pytest.raises(CheckpointError, match="no space left"):
        save(changed, folder)
    assert_loads(model, folder)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_url_gets_the_same_files(tmp_path, in_background):
    model = MODELS["llama"].build()
    url = f"memory://exports/{in_background}"
    save(model, tmp_path / "local", max_shard_size="200KB")
    save(
        model, url, max_shard_size="200KB", upload_root=tmp_path / "up", in_background=in_background
    )
    uploads.wait()

    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.get(root, str(tmp_path / "downloaded"), recursive=True)
    local = {path.name for path in (tmp_path / "local").iterdir()}
    assert {path.name for path in (tmp_path / "downloaded").iterdir()} == local
    assert_loads(model, tmp_path / "downloaded")
    assert not list((tmp_path / "up").iterdir())


def save_statistics(folder: str) -> None:
    """Save a model on all ranks, each with statistics of its own."""
    model = resnet()
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(rank + 2)
    save(model, folder)


def resnet() -> nn.Module:
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}
    config = transformers.ResNetConfig(**sizes, layer_type="basic", num_labels=3)
    torch.manual_seed(11)
    return transformers.AutoModelForImageClassification.from_config(config)


def test_statistics_are_rank_0s(pool, tmp_path):
    pool.run(2, save_statistics, str(tmp_path / "saved"))
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "saved")
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, torch.full_like(buffer, 2)), name
    for name, parameter in resnet().named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_infinity_in_a_configuration_is_rebuilt():
    config = transformers.Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, num_hidden_layers=1, state_size=4, n_groups=1
    )
    assert config.time_step_limit[1] == float("inf")
    with torch.device("meta"):
        model = nn.ModuleDict({"model": transformers.Mamba2ForCausalLM(config)})
    rebuilt = rebuild(describe(model)["model"])
    assert rebuilt.config.time_step_limit == list(config.time_step_limit)


def test_the_model_of_a_module_is_found_or_named():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = MODELS["llama"].build()
            self.teacher = MODELS["llama"].build()

    module = Two()
    with pytest.raises(SetupError, match=r"student, teacher"):
        hugging_face_model(module)
    assert hugging_face_model(module, "teacher") is module.teacher
    with pytest.raises(SetupError, match="no model of Hugging Face"):
        hugging_face_model(nn.Linear(2, 2))
