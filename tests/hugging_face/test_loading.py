"""Weights from files: the values of any box, and one clear error for files that do not fit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import transformers
from hugging_face.tiny_models import MODELS
from safetensors.torch import load_file, save_file

from alpa_strategy import hf
from alpa_strategy.errors import CheckpointError, SetupError
from alpa_strategy.recording import boxes
from alpa_strategy.recording.boxes import read_box, read_into
from alpa_strategy.recording.recorder import Recorder

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


def recorded(load) -> tuple[nn.Module, Recorder]:
    recorder = Recorder(torch.device("cpu"))
    with recorder.recording():
        return load(), recorder


def random_box(shape: torch.Size, generator: random.Random) -> tuple[list[int], list[int]]:
    starts = [generator.randrange(size) for size in shape]
    sizes = [generator.randint(1, n - start) for n, start in zip(shape, starts, strict=True)]
    return starts, sizes


def assert_boxes(deferred: nn.Module, expected: nn.Module, recorder: Recorder) -> int:
    """All boxes have the values of the library's own loading. Returns the number of parameters
    that were deferred.
    """
    generator = random.Random(4)
    num_deferred = 0
    own = dict(deferred.named_parameters())
    assert own.keys() == dict(expected.named_parameters()).keys()
    for name, full in expected.named_parameters():
        assert own[name].dtype == full.dtype
        if not own[name].is_meta:
            assert torch.equal(own[name], full), name
            continue
        num_deferred += 1
        for _ in range(4):
            starts, sizes = random_box(full.shape, generator)
            box = full.detach()
            for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                box = box.narrow(dim, start, size)
            assert torch.equal(read_box(recorder, own[name].detach(), starts, sizes), box), name
        target = torch.empty_like(full)
        read_into(recorder, own[name].detach(), (0,) * full.dim(), target)
        assert torch.equal(target, full), name
        assert torch.equal(recorder.materialize(own[name].detach()), full), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(recorder.materialize(deferred.get_buffer(name)), buffer), name
    return num_deferred


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(MODELS))
def test_any_box_has_the_values_of_the_library(folder, monkeypatch, name, dtype):
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 5000)
    path = MODELS[name].save(folder / name)
    auto_class = getattr(transformers, MODELS[name].auto_class)
    expected = auto_class.from_pretrained(path, dtype=dtype)
    deferred, recorder = recorded(lambda: auto_class.from_pretrained(path, dtype=dtype))
    assert assert_boxes(deferred, expected, recorder) >= 5


def test_a_bin_file_is_mapped(folder):
    path = folder / "bin"
    model = MODELS["llama"].build()
    model.config.save_pretrained(path)
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    deferred, recorder = recorded(
        lambda: hf.from_pretrained(path, transformers.AutoModelForCausalLM)
    )
    assert assert_boxes(deferred, model, recorder) >= 5


def test_a_new_head_is_initialized_as_by_the_library(folder):
    path = MODELS["llama"].save(folder / "llama")
    auto_class = transformers.AutoModelForSequenceClassification
    arguments = {"num_labels": 400}
    torch.manual_seed(2)
    expected = auto_class.from_pretrained(path, **arguments)
    torch.manual_seed(2)
    deferred, recorder = recorded(
        lambda: hf.from_pretrained(path, auto_class, strict=False, **arguments)
    )
    assert_boxes(deferred, expected, recorder)
    assert torch.equal(recorder.materialize(deferred.score.weight.detach()), expected.score.weight)
    with pytest.raises(CheckpointError, match=r"has no weights for score\.weight"):
        hf.from_pretrained(path, auto_class, **arguments)


def changed(folder: Path, name: str, change) -> tuple[Path, Path]:
    """A copy of the Llama in one folder, and its file that has the tensor `name`, changed."""
    path = MODELS["llama"].save(folder)
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    file = path / weight_map[name]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path, file


NORM = "model.norm.weight"


def test_errors_name_file_and_tensor(tmp_path):
    auto_class = transformers.AutoModelForCausalLM

    path, _ = changed(tmp_path / "missing", NORM, lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError, match=f"{path} has no weights for {NORM}"):
        hf.from_pretrained(path, auto_class)

    def widen(tensors):
        tensors[NORM] = torch.ones(65)

    path, file = changed(tmp_path / "shape", NORM, widen)
    with pytest.raises(CheckpointError) as shape_error:
        hf.from_pretrained(path, auto_class)
    assert NORM in str(shape_error.value)
    assert file.name in str(shape_error.value)
    assert "[65]" in str(shape_error.value)

    def add(tensors):
        tensors["model.extra"] = torch.ones(3)

    path, _ = changed(tmp_path / "surplus", NORM, add)
    with pytest.raises(
        CheckpointError, match=r"weights that the model does not have: model\.extra"
    ):
        hf.from_pretrained(path, auto_class)


def test_a_damaged_or_lost_file_is_named(tmp_path):
    auto_class = transformers.AutoModelForCausalLM
    path, file = changed(tmp_path / "torn", NORM, lambda tensors: None)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{file} is damaged"):
        hf.from_pretrained(path, auto_class)

    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        hf.from_pretrained(path, auto_class)


def test_a_file_that_shrinks_before_it_is_read_is_named(tmp_path):
    path = MODELS["llama"].save(tmp_path / "llama")
    auto_class = transformers.AutoModelForCausalLM
    deferred, recorder = recorded(lambda: hf.from_pretrained(path, auto_class))
    file = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    name = next(iter(load_file(file)))
    weight = deferred.get_parameter(name).detach()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        read_box(recorder, weight, (0, 0), (1, 1))


def test_quantized_weights_are_refused(tmp_path):
    path = MODELS["llama"].save(tmp_path / "llama")
    with pytest.raises(SetupError, match="load_in_4bit: quantized weights"):
        hf.from_pretrained(path, transformers.AutoModelForCausalLM, load_in_4bit=True)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match="quantization_config in the configuration"):
        hf.from_pretrained(path, transformers.AutoModelForCausalLM)
