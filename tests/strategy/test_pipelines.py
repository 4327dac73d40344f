"""Pipelines under the Trainer: the same training as on one device, whatever stages, schedule and micro-batches."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from equality.harness import assert_same, record
from lightning.pytorch.callbacks import ModelCheckpoint
from models import MLP
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy

STEPS = 3
CASES = {
    "gpt": {"ignore_fraction": 0.4, "num_layers": 2, "vocab_size": 33},
    "llama": {"num_layers": 1},
    "bert": {"num_layers": 1},
    "mlp": {},
}


@pytest.fixture(scope="session")
def plain(pool):
    """Runs of a plain single-process Trainer, computed once."""
    found = {}

    def get(model, optimizer, world_size, clip=None, accumulate=1):
        key = (model, optimizer, world_size, clip, accumulate)
        if key not in found:
            kwargs = {**CASES[model], "optimizer": optimizer}
            found[key] = pool.run(
                1, record, model, kwargs, None, STEPS, world_size, clip, accumulate, init_group=False
            )[0]
        return found[key]

    return get


def run_case(pool, plain, tmp_path, model, world_size, options, optimizer="adamw", clip=None, accumulate=1):
    kwargs = {**CASES[model], "optimizer": optimizer}
    options = {"cluster": "pcie_8gpu", "plan_dir": str(tmp_path), "verbose": False, **options}
    runs = pool.run(world_size, record, model, kwargs, options, STEPS, world_size, clip, accumulate)
    order = 1 if options.get("batch_scope") == "global" else world_size  # of the samples
    for run in runs:
        assert_same(run, plain(model, optimizer, order, clip, accumulate))
    return runs[0]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("model", CASES)
def test_two_ranks(pool, plain, tmp_path, model, schedule):
    optimizer, clip = ("adamw", None) if schedule == "1F1B" else ("sgd", 0.1)
    options = {"num_stages": 2, "num_microbatches": 2, "schedule": schedule}
    run = run_case(pool, plain, tmp_path, model, 2, options, optimizer, clip)
    assert run["pipeline"] == (2, 2, schedule)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_clipping_and_accumulation(pool, plain, tmp_path, optimizer):
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1F1B"}
    run_case(pool, plain, tmp_path, "gpt", 2, options, optimizer, 0.1, 2)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_three_ranks(pool, plain, tmp_path, model, num_stages):
    """The harness has 8 rows a step, which 3 ranks cannot share: each brings all of them."""
    options = {"num_stages": num_stages, "num_microbatches": 2, "schedule": "1F1B", "batch_scope": "global"}
    run = run_case(pool, plain, tmp_path, model, 3, options, clip=0.1)
    assert run["pipeline"] == (num_stages, 2, "1F1B")


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"},
        {"num_stages": 2, "num_microbatches": 2, "schedule": "GPipe", "parallel": "zero3"},
        {"num_stages": 2, "num_microbatches": 2, "schedule": "GPipe", "parallel": "zero2"},
        {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B", "parallel": "tensor", "remat": True},
        {"num_stages": 4, "num_microbatches": 4, "schedule": "ZBVZeroBubble", "batch_scope": "global"},
        {"num_stages": 4, "num_microbatches": 4, "schedule": "Interleaved1F1B", "batch_scope": "global"},
    ],
    ids=lambda o: o.get("parallel", o["schedule"]),
)
def test_four_ranks(pool, plain, tmp_path, options):
    run = run_case(pool, plain, tmp_path, "gpt", 4, options, clip=0.1)
    assert run["pipeline"] == tuple(options[key] for key in ("num_stages", "num_microbatches", "schedule"))


def test_micro_batches_without_stages(pool, plain, tmp_path):
    run = run_case(pool, plain, tmp_path, "gpt", 2, {"num_stages": 1, "num_microbatches": 4})
    assert run["pipeline"][:2] == (1, 4)


def rows_of(model, seed=5):
    return torch.utils.data.TensorDataset(*model.example_batch(32, torch.Generator().manual_seed(seed)))


def fit(root, strategy, devices, epochs, resume=None, save=None):
    """Train an MLP in fp64 and save a checkpoint; final weights and the trainer's metrics."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        model = MLP(optimizer="adamw")
        data = rows_of(model)
    finally:
        torch.set_default_dtype(torch.float32)
    chosen = {"strategy": AlpaStrategy(**strategy)} if strategy else {}
    trainer = pl.Trainer(
        devices=devices, accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=save == "callback", default_root_dir=root, precision="64-true",
        limit_val_batches=2, num_sanity_val_steps=1, **chosen,
        callbacks=[ModelCheckpoint(root, "middle", every_n_train_steps=2, save_top_k=1)] if save == "callback" else [],
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=16 // devices), DataLoader(data, batch_size=8), ckpt_path=resume)
    if save == "end":
        trainer.save_checkpoint(Path(root) / "end.ckpt")
    return {name: value.clone() for name, value in model.state_dict().items()}


PIPELINE = {"cluster": "pcie_8gpu", "verbose": False, "num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}


@pytest.mark.parametrize("save", ["callback", "end"])
def test_checkpoints_are_those_of_a_plain_trainer(pool, tmp_path, save):
    """Saved in the middle of a pipelined training or after it, resumed by a plain Trainer and by a pipeline."""
    pool.run(2, fit, str(tmp_path), PIPELINE, 2, 1, None, save)
    (file,) = tmp_path.glob("*.ckpt")
    content = torch.load(file, weights_only=False)
    state = content["optimizer_states"][0]
    plain = pool.run(1, fit, str(tmp_path / "plain"), None, 1, 1, None, "end", init_group=False)[0]
    reference = torch.load(tmp_path / "plain" / "end.ckpt", weights_only=False)
    assert content["state_dict"].keys() == reference["state_dict"].keys() == plain.keys()
    expected = reference["optimizer_states"][0]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        for key, value in values.items():
            assert state["state"][number][key].shape == value.shape
            assert state["state"][number][key].abs().sum() > 0
    resumed = pool.run(1, fit, str(tmp_path / "one"), None, 1, 2, str(file), init_group=False)[0]
    again = pool.run(2, fit, str(tmp_path / "two"), PIPELINE, 2, 2, str(file))
    for weights in again:
        for name, value in weights.items():
            assert value.shape == resumed[name].shape
            assert value.isfinite().all()
