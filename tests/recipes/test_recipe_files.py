"""Recipes: every file is readable, what is misspelt is named, overrides reach their place, the
model is a GPT.
"""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy.commands.recipe_task import example_batch
from alpa_strategy.errors import OptionError
from alpa_strategy.recipe import build_data, build_model, load_recipe, read_yaml

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = RECIPES / "gpt_tiny.yaml"
MILLIONS = {  # parameters as the names promise
    "dpo_tiny": 0.241,  # policy and reference
    "gpt_tiny": 0.84,
    "grpo_tiny": 0.206,
    "gpt_small": 124,
    "gpt_350m": 355,
    "gpt_1_3b": 1315,
    "gpt_2_6b": 2650,
    "gpt_6_7b": 6660,
    "gpt_15b": 15400,
    "gpt_39b": 39100,
    "gpt_175b": 174600,
    "llama_tiny": 0.459,
    "llama_125m": 125,
    "llama_1b": 1100,
    "llama_8b": 8030,
    "llama_70b": 70554,
    "llama_405b": 405853,
    "lora_tiny": 0.501,
    "lora_8b": 8072,
    "mixtral_tiny": 0.755,
    "mixtral_8x7b": 46703,
    "deepseek_tiny": 0.551,
    "deepseek_16b": 15706,
    "vit_tiny": 0.102,
    "vit_b16": 86.6,
    "vit_l16": 304,
    "clip_tiny": 0.219,
    "clip_b16": 149.6,
    "ddpm_tiny": 0.177,
    "ddpm_36m": 35.7,
    "moe_tiny": 1.63,
    "moe_380m": 384,
    "moe_1_3b": 1347,
    "moe_2_4b": 2383,
    "moe_10b": 10168,
    "moe_27b": 26640,
    "moe_70b": 70400,
    "wide_resnet_tiny": 0.197,
    "wide_resnet_250m": 254,
    "wide_resnet_1b": 1006,
    "wide_resnet_2b": 1965,
    "wide_resnet_4b": 4001,
    "wide_resnet_6_8b": 6728,
    "wide_resnet_13b": 12633,
}


# Recipes for the user's own files: see `test_hf_recipe.py`.
OF_FILES = {"hf_finetune"}
NAMED = [path for path in sorted(RECIPES.glob("*.yaml")) if path.stem not in OF_FILES]


@pytest.mark.parametrize("path", NAMED, ids=lambda path: path.stem)
def test_every_recipe_builds_the_model_it_names(path):
    recipe = load_recipe(path)
    with torch.device("meta"):
        model = build_model(recipe)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(
        MILLIONS[path.stem], rel=0.01
    )
    inputs, targets = build_data(recipe).example_batch()
    assert len(inputs) == len(targets) == recipe.data["batch_size"]
    if "sequence_length" in recipe.model:
        assert (
            inputs.shape
            == targets.shape
            == (recipe.data["batch_size"], recipe.model["sequence_length"])
        )


@pytest.mark.parametrize("path", NAMED, ids=lambda path: path.stem)
def test_the_model_is_as_long_as_the_sequences_of_the_data(path):
    if "sequence_length" not in load_recipe(path).data:
        return
    recipe = load_recipe(path, ["data.sequence_length=256"])
    # That of the model itself, or of the one that a wrapper trains.
    sections = [
        recipe.model,
        *(value for value in recipe.model.values() if isinstance(value, dict)),
    ]
    assert [s["sequence_length"] for s in sections if "sequence_length" in s] == [256]


def test_loss_falls_and_biases_do_not_decay():
    model = build_model(
        load_recipe(TINY, ["model.num_layers=1", "model.dropout=0", "model.warmup_steps=0"])
    )
    data = build_data(load_recipe(TINY, ["data.batch_size=4"]))
    optimizer = model.configure_optimizers()["optimizer"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(p.ndim < 2 for p in optimizer.param_groups[1]["params"])
    batch = next(iter(data.train_dataloader()))
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_attention_is_causal():
    model = build_model(load_recipe(TINY)).eval()
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])


def test_windows_are_the_same_for_every_reader(tmp_path):
    text = tmp_path / "some.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 10)
    overrides = [f"data.path={text}", "data.sequence_length=16"]
    one, two = (
        build_data(load_recipe(TINY, overrides)).train_dataloader().dataset for _ in range(2)
    )
    assert len(one) == 450 // 16
    for index in (0, 5, len(one) - 1):
        (tokens, targets), (again, _) = one[index], two[index]
        assert torch.equal(tokens, again)
        assert torch.equal(tokens[1:], targets[:-1])
    decoded = bytes(one[3][0].tolist()).decode()
    assert decoded in text.read_text()


def test_token_ids_from_a_bin_file(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(torch.arange(1000, dtype=torch.int32).numpy().astype("uint16").tobytes())
    dataset = build_data(load_recipe(TINY, [f"data.path={path}"])).train_dataloader().dataset
    tokens, targets = dataset[0]
    assert torch.equal(targets, tokens + 1)
    assert tokens.dtype == torch.int64


def test_overrides_reach_their_place_and_are_typed():
    recipe = load_recipe(
        TINY, ["model.lr=1e-3", "trainer.devices=2", "strategy.parallel=data", "seed=7"]
    )
    assert recipe.model["lr"] == 1e-3
    assert recipe.trainer["devices"] == 2
    assert recipe.strategy == {"parallel": "data"}
    assert recipe.seed == 7
    pins = load_recipe(TINY, ["strategy.placements={'blocks.*.fc.weight': S0}"]).strategy[
        "placements"
    ]
    assert pins == {"blocks.*.fc.weight": "S0"}


@pytest.mark.parametrize(
    ("override", "problem", "fix"),
    [
        ("model.num_layer=2", "num_layer", "num_layers"),
        ("data.batchsize=2", "batchsize", "batch_size"),
        ("trainer.device=2", "device", "devices"),
        ("strategy.paralel=data", "paralel", "parallel"),
        ("modell.num_layers=2", "modell", "model"),
        ("model.num_layers=many", "num_layers is 'many'", "int"),
        ("model.num_layers=2.5", "num_layers is 2.5", "int"),
        ("model._target_=gtp.GPT", "no module 'gtp'", "gpt"),
        ("model._target_=gpt.GTP", "no 'GTP'", "GPT"),
        ("model.lr.start=1", "model.lr", "itself"),
        ("model=3", "model is 3", "model:"),
        ("seed=x", "seed", "whole number"),
        ("trainer.devices", "key=value", "trainer.devices=2"),
    ],
)
def test_a_wrong_override_is_named_with_the_nearest_right_one(override, problem, fix):
    with pytest.raises(OptionError) as caught:
        load_recipe(TINY, [override])
    assert problem in str(caught.value)
    assert fix in str(caught.value)


def test_a_constructor_that_refuses_is_one_message():
    with pytest.raises(OptionError, match="multiple of num_heads"):
        build_model(load_recipe(TINY, ["model.num_heads=3"]))


def test_yaml_mistake_names_file_and_line(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("model:\n  a: 1\n   b: 2\n")
    with pytest.raises(OptionError, match=r"broken\.yaml is not valid YAML in line 3, column"):
        load_recipe(path)


def test_missing_file_suggests_its_neighbour():
    with pytest.raises(OptionError, match=r"gpt_tiny\.yaml"):
        load_recipe(RECIPES / "gpt_tinny.yaml")


def test_unknown_top_level_key(tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text(TINY.read_text().replace("trainer:", "trainr:"))
    with pytest.raises(OptionError) as caught:
        load_recipe(path)
    assert "'trainr'" in caught.value.problem
    assert "'trainer'" in caught.value.fix


def test_missing_argument_and_missing_target(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Model:\n    def __init__(self, size: int) -> None:\n        self.size = size\n"
    )
    path = tmp_path / "mine.yaml"
    path.write_text("model: {_target_: mine.Model}\ndata: {_target_: mine.Model, size: 2}\n")
    with pytest.raises(OptionError, match="needs size"):
        load_recipe(path)
    assert build_model(load_recipe(path, ["model.size=3"])).size == 3
    path.write_text("model: {size: 3}\ndata: {_target_: mine.Model, size: 2}\n")
    with pytest.raises(OptionError, match="_target_"):
        load_recipe(path)


def test_two_folders_with_modules_of_one_name(tmp_path):
    for folder, size in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "samename.py").write_text(f"class Model:\n    size = {size}\n")
        content = "model: {_target_: samename.Model}\ndata: {_target_: samename.Model}\n"
        (tmp_path / folder / "recipe.yaml").write_text(content)
    sizes = [
        build_model(load_recipe(tmp_path / folder / "recipe.yaml")).size
        for folder in ("one", "two", "one")
    ]
    assert sizes == [1, 2, 1]


class Pairs(pl.LightningDataModule):
    """Ten pairs of numbers.

    Args:
        loader: arguments of the training loader.
    """

    def __init__(self, **loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        pairs = TensorDataset(torch.arange(20.0).reshape(10, 2))
        return DataLoader(pairs, **self.loader)


@pytest.mark.parametrize(("batch_size", "num_rows"), [(4, 4), (16, 10)])
def test_a_plan_is_for_the_first_batch_of_the_loader(batch_size, num_rows):
    (rows,) = example_batch(Pairs(batch_size=batch_size), load_recipe("gpt_tiny"))
    assert rows.shape == (num_rows, 2)


def test_a_loader_without_a_batch_is_one_message():
    data = Pairs(batch_size=16, drop_last=True)
    with pytest.raises(OptionError, match="it has 10 samples, and batch_size=16"):
        example_batch(data, load_recipe("gpt_tiny"))


def test_read_yaml_refuses_a_list(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(OptionError, match="mapping"):
        read_yaml(path)
