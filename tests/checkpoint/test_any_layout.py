"""What one plan saved, any other loads: other numbers of devices, layouts and cuts, and a plain
module.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoint.runs import (
    ONE_STAGE,
    PIPELINE,
    Scheduled,
    assert_bitwise,
    fit,
    make_loader,
    make_model,
    make_trainer,
)
from covering import slow_but

from alpa_strategy import AlpaStrategy, export_checkpoint, open_checkpoint
from alpa_strategy.checkpoint.sharded_state_dict import state_dict_with
from alpa_strategy.cli import main

# Stages of as many bytes.
SIZES = {"num_layers": 2}


def whole_state(strategy: Any) -> dict[str, Any]:
    """The optimizer's, as a plain Trainer would write it."""
    with strategy.run.full_parameters.suspended():
        return state_dict_with(strategy.optimizers[0], strategy.store, strategy.store.gather_like)


class Loaded(pl.Callback):
    """What the first step of a resumed training begins with: unsharded parameters and optimizer
    state; then it stops.
    """

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, AlpaStrategy):
            self.parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
            self.optimizer = deepcopy(optimizer.state_dict())
        else:
            store = strategy.store
            self.parameters = {
                name: store.gather(p).clone() for name, p in module.named_parameters()
            }
            self.optimizer = deepcopy(whole_state(strategy))
        trainer.should_stop = True


def load(root: str, options: dict[str, Any] | None, devices: int, path: str) -> dict[str, Any]:
    """Parameters and optimizer state that a training resumed from `path` begins with."""
    loaded = Loaded()
    trainer = make_trainer(root, options, devices, max_steps=4, callbacks=[loaded])
    model = make_model(**SIZES)
    trainer.fit(
        model, make_loader(model, 2), ckpt_path=path
    )  # 4 rows on each rank, however many there are
    return {"parameters": loaded.parameters, "optimizer": loaded.optimizer}


def save(root: str, options: dict[str, Any], devices: int, path: str) -> dict[str, Any]:
    """Two steps, then a checkpoint in the middle of training; what was in memory."""
    seen = Seen(path)
    fit(root, options, devices, 2, callbacks=[seen], model_kwargs=SIZES)
    return seen.state


class Seen(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *unused: Any) -> None:
        if trainer.global_step == 2:
            store = trainer.strategy.store
            self.state = {
                "parameters": {n: store.gather(p).clone() for n, p in module.named_parameters()},
                "optimizer": whole_state(trainer.strategy),
            }
            trainer.save_checkpoint(self.path)


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_bitwise(state["parameters"], expected["parameters"])
    assert state["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    assert_bitwise(state["optimizer"], expected["optimizer"])


LOADS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "pipeline": [(2, ONE_STAGE["tensor"]), (3, ONE_STAGE["zero3"])],
    "tensor": [(2, PIPELINE), (3, ONE_STAGE["tensor"])],
    "pipeline, others": [(1, {}), (2, PIPELINE), (4, ONE_STAGE["zero2"])],
}


@pytest.mark.parametrize("saved", slow_but(LOADS, ("pipeline",)))
def test_saved_on_four_ranks(pool, tmp_path: Path, saved: str) -> None:
    root, path = str(tmp_path), str(tmp_path / "four.ckpt")
    options = {"parallel": "tensor"} if saved == "tensor" else {**PIPELINE, "parallel": "zero3"}
    expected = pool.run(4, save, root, options, 4, path)[0]
    written = [file.stat().st_size for file in Path(path).glob("*.distcp")]
    assert len(written) == 4
    assert max(written) < 2 * min(written)  # each rank writes its share
    for devices, other in LOADS[saved]:
        for state in pool.run(devices, load, root, other, devices, path):
            assert_same_state(state, expected)
    plain = str(tmp_path / "plain.ckpt")
    assert main(["export", path, plain]) == 0
    torch.set_default_dtype(torch.float64)
    try:
        model = Scheduled.load_from_checkpoint(plain)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_bitwise({n: p.detach() for n, p in model.named_parameters()}, expected["parameters"])
    assert_same_state(load(root, None, 1, plain), expected)
    assert_bitwise(dict(open_checkpoint(path)["state_dict"]), dict(torch.load(plain)["state_dict"]))
    # And back: an ordinary file, on several devices.
    for state in pool.run(2, load, root, PIPELINE, 2, plain):
        assert_same_state(state, expected)


def test_export_of_nothing_is_a_clear_error(tmp_path: Path, capsys) -> None:
    (tmp_path / "half.ckpt").mkdir()
    assert main(["export", str(tmp_path / "half.ckpt"), str(tmp_path / "out.ckpt")]) == 2
    assert "not a complete checkpoint" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none.ckpt"), str(tmp_path / "out.ckpt")]) == 2
    assert not (tmp_path / "out.ckpt").exists()
    with pytest.raises(FileNotFoundError):
        export_checkpoint(tmp_path / "none.ckpt", tmp_path / "out.ckpt")


@pytest.mark.parametrize("schedule", slow_but((True, False), (True,)))
def test_from_an_ordinary_checkpoint(pool, tmp_path: Path, schedule: bool) -> None:
    """plain -> 2 ranks -> plain equals the plain training that was never interrupted, with
    clipping.
    """
    root = str(tmp_path)
    alone = {
        "steps": 1,
        "model_kwargs": {"dropout": 0.0, "schedule": schedule},
    }  # the order of rows does not matter
    _, _, expected = fit(root, None, 1, 4, **alone)
    trainer, _, _ = fit(root, None, 1, 2, **alone)
    trainer.save_checkpoint(f"{root}/2.ckpt")
    for options in (PIPELINE, ONE_STAGE["zero3"]):
        third_step = pool.run(2, one_step, root, options, alone)[0]
        torch.testing.assert_close(third_step, {3: expected[3]}, rtol=1e-9, atol=1e-9)
        export_checkpoint(f"{root}/3.ckpt", f"{root}/plain.ckpt")
        _, _, fourth_step = fit(root, None, 1, 4, ckpt_path=f"{root}/plain.ckpt", **alone)
        torch.testing.assert_close(fourth_step, {4: expected[4]}, rtol=1e-9, atol=1e-9)


def one_step(root: str, options: dict[str, Any], arguments: dict[str, Any]) -> dict[int, Any]:
    trainer, _, steps = fit(root, options, 2, 3, ckpt_path=f"{root}/2.ckpt", **arguments)
    trainer.save_checkpoint(f"{root}/3.ckpt")
    return steps
