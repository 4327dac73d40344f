"""Adapters of PEFT around a sharded base: frozen, without state, read and written in PEFT's format;
and checkpoints in the format of Hugging Face.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from equality.harness import Rows, _loader, _parallel_arguments
from hugging_face.finetune import SAMPLES, FineTuning, assert_losses, record
from hugging_face.tiny_models import MODELS
from quiet import QUIET

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora", {"parallel": "zero3"}),
        pytest.param("dora", {"parallel": "zero3", "capture": "never"}, marks=pytest.mark.slow),
        pytest.param("lora", {"num_stages": 2}, marks=pytest.mark.slow),
    ],
)
def test_adapters_around_a_frozen_base(pool, tmp_path, kind, options):
    import peft
    import transformers

    path = str(MODELS["llama"].save(tmp_path / "llama"))
    root = str(tmp_path)
    fixed = (2, torch.float64, True)
    alone = ("llama", path, None, 2, root, *fixed, "auto", None, kind)
    expected = pool.run(1, record, *alone, init_group=False)[0]

    options = dict(options)
    capture = options.pop("capture", "auto")
    export = tmp_path / "adapter"
    together = ("llama", path, options, 2, root, *fixed, capture, str(export), kind)
    runs = pool.run(2, record, *together)
    for run in runs:
        for name, value in expected["first"].items():
            assert torch.equal(run["first"][name], value), name
        for name, value in expected["state"].items():
            torch.testing.assert_close(run["state"][name], value, rtol=1e-6, atol=1e-6)
    assert_losses(runs, expected)
    with_state = sorted({name for run in runs for name in run["state_of"]})
    assert with_state == expected["state_of"]
    assert all("lora" in name for name in with_state)
    if options.get("parallel") == "zero3":
        assert any("base_layer" in name for name in runs[0]["is_sharded"])

    assert (export / "adapter_config.json").exists()
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    loaded = peft.PeftModel.from_pretrained(base, export)
    own = loaded.state_dict()
    for name, value in runs[0]["state"].items():
        assert torch.equal(own[name], value.to(own[name].dtype)), name


class FromAdapter(FineTuning):
    """The base from its files, the adapter from PEFT's."""

    def __init__(self, path: str, adapter: str) -> None:
        super().__init__("llama", path, torch.float64, by_name=True)
        self.adapter = adapter

    def configure_model(self) -> None:
        import peft

        super().configure_model()
        if not isinstance(self.model, peft.PeftModel):
            self.model = peft.PeftModel.from_pretrained(self.model, self.adapter, is_trainable=True)


def adapter_of_one_step(
    path: str, adapter: str, root: str, checkpoint: str
) -> dict[str, torch.Tensor]:
    """Train one step with the adapter, save a checkpoint, and return weights before and after."""
    before: dict[str, torch.Tensor] = {}

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
            for name, parameter in module.model.named_parameters():
                before[name] = trainer.strategy.store.gather(parameter).clone()

    rows = MODELS["llama"].batch(SAMPLES, torch.Generator().manual_seed(3))
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        precision="64-true",
        callbacks=[Look()],
        default_root_dir=root,
        **QUIET,
        **_parallel_arguments({"parallel": "zero3"}, 2),
    )
    module = FromAdapter(path, adapter)
    trainer.fit(module, _loader(Rows(rows), {"parallel": "zero3"}, 2, 1, SAMPLES))
    trainer.save_checkpoint(checkpoint)
    return {"before": before, "after": dict(module.model.state_dict())}


def test_an_adapter_is_read_and_a_checkpoint_exported(pool, tmp_path):
    import peft
    import transformers

    from alpa_strategy.cli import main

    path = MODELS["llama"].save(tmp_path / "llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    made = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    adapter = tmp_path / "adapter"
    made.save_pretrained(adapter)

    checkpoint = tmp_path / "trained.ckpt"
    arguments = (str(path), str(adapter), str(tmp_path), str(checkpoint))
    run = pool.run(2, adapter_of_one_step, *arguments)[0]
    for name, parameter in made.named_parameters():
        assert torch.equal(run["before"][name], parameter.to(torch.float64)), name

    folder = tmp_path / "exported"
    assert main(["export", str(checkpoint), "--hf", str(folder)]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    loaded = peft.PeftModel.from_pretrained(base, folder).state_dict()
    for name, value in run["after"].items():
        assert torch.equal(loaded[name], value.to(loaded[name].dtype)), name


def checkpoint_of(name: str, path: str, root: str, checkpoint: str) -> dict[str, torch.Tensor]:
    """Train one step, save a checkpoint, and return the weights."""
    rows = MODELS[name].batch(SAMPLES, torch.Generator().manual_seed(3))
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        default_root_dir=root,
        **QUIET,
        **_parallel_arguments({"parallel": "zero3"}, 2),
    )
    module = FineTuning(name, path, torch.float32, by_name=False)
    trainer.fit(module, _loader(Rows(rows), {"parallel": "zero3"}, 2, 1, SAMPLES))
    trainer.save_checkpoint(checkpoint)
    return dict(module.model.state_dict())


def test_a_checkpoint_is_exported_to_the_format_of_the_files(pool, tmp_path):
    import transformers
    from safetensors.torch import load_file

    from alpa_strategy.cli import main

    path = MODELS["mixtral"].save(tmp_path / "mixtral")
    (path / "tokenizer_config.json").write_text("{}")
    checkpoint, folder = tmp_path / "trained.ckpt", tmp_path / "exported"
    arguments = ("mixtral", str(path), str(tmp_path), str(checkpoint))
    trained = pool.run(2, checkpoint_of, *arguments)[0]

    command = ["export", str(checkpoint), "--hf", str(folder), "--max-shard-size", "200KB"]
    assert main(command) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(trained[name], value), name

    def names(where: Path) -> set[str]:
        return {key for file in where.glob("*.safetensors") for key in load_file(file)}

    assert names(folder) == names(path)
    assert (folder / "tokenizer_config.json").exists()
    assert (folder / "README.md").exists()
