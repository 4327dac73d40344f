"""`hf_finetune` trains on packed chats, prompts and texts, and writes adapters on the way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from covering import slow_but
from hugging_face.tiny_models import MODELS
from quiet import QUIET

from alpa_strategy.recipe import build_data, build_model, build_trainer, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
WORDS = ["<end>", "<unk>", "user", "assistant", *(f"w{i}" for i in range(20))]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"

os.environ["HF_HUB_OFFLINE"] = "1"


def make_files(folder: Path) -> tuple[Path, Path]:
    """A tiny Llama with a tokenizer of words, and a file with examples of each kind."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = MODELS["llama"].save(folder / "llama")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)

    examples = [
        {"text": "w1 w2 w3"},
        {"prompt": "w4 w5", "completion": "w6 w7"},
        {
            "messages": [
                {"role": "user", "content": "w8"},
                {"role": "assistant", "content": "w9 w10"},
            ]
        },
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps(example) for example in examples * 12))
    return path, data


def overrides(path: Path, data: Path, folder: Path, devices: int) -> list[str]:
    settings = {**QUIET, "devices": devices, "accelerator": "cpu", "default_root_dir": folder}
    return [
        f"model.name={path}",
        f"data.path={data}",
        "data.sequence_length=8",
        "data.batch_size=2",
        "model.lora.r=4",
        "model.lr=0.01",
        "trainer.callbacks.0.every_n_train_steps=2",
        "trainer.max_steps=4",
        *(f"trainer.{key}={str(value).lower()}" for key, value in settings.items()),
    ]


class Losses(lightning.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def train(settings: list[str]) -> list[float]:
    recipe = load_recipe(RECIPES / "hf_finetune.yaml", settings)
    trainer = build_trainer(recipe)
    losses = Losses()
    trainer.callbacks.append(losses)
    trainer.fit(build_model(recipe), datamodule=build_data(recipe))
    return losses.losses


def test_packed_sequences_and_masks(tmp_path):
    path, data = make_files(tmp_path)
    recipe = load_recipe(RECIPES / "hf_finetune.yaml", overrides(path, data, tmp_path, 1))
    module = build_data(recipe)
    module.setup("fit")
    tokens, targets = module.data.tensors
    ids = {word: index for index, word in enumerate(WORDS)}
    texts = ("w1 w2 w3 <end>", "w4 w5", "w6 w7 <end>", "user w8 <end>", "assistant w9 w10 <end>")
    first = " ".join(texts).split(" ")
    counted = [True] * 4 + [False] * 2 + [True] * 3 + [False] * 3 + [True] * 4
    assert tokens[:2].flatten().tolist() == [ids[word] for word in first]
    expected = []
    for word, is_counted in zip(first, counted, strict=True):
        expected.append(ids[word] if is_counted else -100)
    assert targets.flatten()[:15].tolist() == expected[1:]


@pytest.mark.parametrize("devices", slow_but((1, 2), (2,)))
def test_fine_tuning_writes_adapters(pool, tmp_path, devices):
    import peft
    import transformers

    path, data = make_files(tmp_path)
    settings = overrides(path, data, tmp_path, devices)
    losses = pool.run(devices, train, settings, init_group=devices > 1)[0]
    assert losses[-1] < losses[0]
    folders = sorted((tmp_path / "hf").iterdir())
    assert [folder.name for folder in folders] == ["step-2", "step-4"]
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    adapters = [peft.PeftModel.from_pretrained(base, folder) for folder in folders[:1]]
    assert any(p.abs().sum() for n, p in adapters[0].named_parameters() if "lora_B" in n)
    assert (folders[0] / "tokenizer.json").exists()
    assert torch.isfinite(torch.tensor(losses)).all()
