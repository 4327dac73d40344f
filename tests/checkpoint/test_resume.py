"""A resumed training is the uninterrupted one, bit by bit, under one plan: dropout, shuffling,
schedule, AdamW.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.runs import (
    ONE_STAGE,
    PIPELINE,
    ROWS_PER_STEP,
    Keep,
    assert_bitwise,
    checkpoint_at,
    fit,
    make_loader,
    make_model,
)
from covering import slow_but
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from alpa_strategy.checkpoint.opening import is_checkpoint

CASES = {"zero3": ONE_STAGE["zero3"], "tensor": ONE_STAGE["tensor"], "pipeline": PIPELINE}


def resume_twice(root: str, options: dict[str, Any]) -> bool:
    """Save every second step of six (four make an epoch), resume from each, and compare every
    step.
    """
    keep = Keep(f"{root}/kept", 2)
    _, _, expected = fit(root, options, 2, 6, callbacks=[keep])
    for step in (2, 4):  # in the middle of an epoch, and at its end
        assert is_checkpoint(checkpoint_at(root, step))
        trainer, _, steps = fit(root, options, 2, 6, ckpt_path=checkpoint_at(root, step))
        assert sorted(steps) == list(range(step + 1, 7)), sorted(steps)
        assert_bitwise(steps, {step: expected[step] for step in steps})
        assert trainer.current_epoch == 2
    return True


# Below are a pipeline's chain of resumptions, and those of sharded parameters at other moments.
@pytest.mark.parametrize("case", slow_but(CASES, ("tensor",)))
def test_resume_is_bitwise(pool, tmp_path: Path, case: str) -> None:
    assert pool.run(2, resume_twice, str(tmp_path), CASES[case]) == [True, True]


def resume_at_ends_of_epochs(root: str, options: dict[str, Any]) -> bool:
    """Saved by the last batch of an epoch, resumed, and once more: epochs have two batches here."""
    _, _, expected = fit(f"{root}/whole", options, 2, 7, steps=2)
    start = None
    for end in (2, 4, 6):
        fit(
            f"{root}/to{end}",
            options,
            2,
            end,
            ckpt_path=start,
            steps=2,
            callbacks=[Keep(f"{root}/to{end}/kept", 1)],
        )
        start = checkpoint_at(f"{root}/to{end}", end)
    _, _, steps = fit(f"{root}/last", options, 2, 7, ckpt_path=start, steps=2)
    assert_bitwise(steps, {7: expected[7]})
    return True


# By default the test above resumes from the end of an epoch, and the chain below goes on from it.
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_resumed_where_epochs_end(pool, tmp_path: Path, case: str) -> None:
    assert pool.run(2, resume_at_ends_of_epochs, str(tmp_path), CASES[case]) == [True, True]


def resume_in_a_chain(root: str, options: dict[str, Any], ends: tuple[int, ...]) -> bool:
    """Go on from what a resumed training saved, in the middle and at the end of epochs, again and
    again.
    """
    _, _, expected = fit(f"{root}/undisturbed", options, 2, ends[-1])
    path = None
    for end in ends:
        _, _, steps = fit(
            root, options, 2, end, ckpt_path=path, callbacks=[Keep(f"{root}/kept", 1)]
        )
        assert_bitwise(steps, {step: expected[step] for step in steps})
        path = checkpoint_at(root, end)
    return True


# In the middle of an epoch, at its end, and after the first batch of the next.
@pytest.mark.parametrize(
    "ends",
    [
        (3, 4, 5, 8),
        pytest.param((3, 4, 5, 7, 8, 9, 10, 12, 13), marks=pytest.mark.slow),
    ],
    ids=["two epochs", "many"],
)
def test_a_chain_of_resumptions(pool, tmp_path: Path, ends: tuple[int, ...]) -> None:
    assert pool.run(2, resume_in_a_chain, str(tmp_path), PIPELINE, ends) == [True, True]


def resume_as_the_other_kind(root: str, kinds: tuple[str, str]) -> bool:
    """A training with eager steps is resumed with captured ones, and the other way round."""
    before, after = ({"capture": kind} for kind in kinds)
    fit(root, before, 2, 2, callbacks=[Keep(f"{root}/kept", 2)])
    trainer, _, steps = fit(root, after, 2, 4, ckpt_path=checkpoint_at(root, 2))
    assert sorted(steps) == [3, 4]
    return trainer.strategy.plan.is_eager


@pytest.mark.parametrize("kinds", [("never", "require"), ("require", "never")])
def test_a_training_goes_on_as_the_other_kind(pool, tmp_path: Path, kinds: tuple[str, str]) -> None:
    assert pool.run(2, resume_as_the_other_kind, str(tmp_path), kinds) == [kinds[1] == "never"] * 2


def resumed(
    root: str, options: dict[str, Any], max_steps: int, path: str, **arguments: Any
) -> tuple[Any, dict[int, Any], list[str]]:
    """Return the Trainer of a resumed run, what was recorded, and warnings of a stop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _, steps = fit(root, options, 2, max_steps, ckpt_path=path, **arguments)
    texts = [str(warning.message) for warning in caught]
    return trainer, steps, [text for text in texts if "a training that stopped" in text]


def resume_the_others(root: str) -> bool:
    """Saves that a Trainer makes at other moments, in one kind of run."""
    options = ONE_STAGE["zero3"]
    accumulate = {"accumulate_grad_batches": 2, "limit_train_batches": 6}
    for name, arguments in {
        "accumulate": accumulate,
        "validate": {"val_check_interval": 3},
    }.items():
        folder = f"{root}/{name}"
        val = make_loader(make_model(), 2, 1) if name == "validate" else None
        keep = Keep(f"{folder}/kept", 1)
        plugins = [AsyncCheckpointIO()] if name == "accumulate" else []
        extra = {"steps": 8, "val_loader": val, **arguments}
        _, _, expected = fit(folder, options, 2, 5, callbacks=[keep], plugins=plugins, **extra)
        _, steps, stops = resumed(folder, options, 5, checkpoint_at(folder, 3), **extra)
        assert not stops
        assert steps.keys() >= {4, 5}
        assert_bitwise(steps, {step: expected[step] for step in steps})
    # A training that `max_steps` ended in the middle of an epoch, saved when it was over, goes on
    # in that epoch.
    trainer, _, _ = fit(f"{root}/ended", options, 2, 3)
    trainer.save_checkpoint(f"{root}/ended.ckpt")
    trainer, steps, stops = resumed(f"{root}/ended", options, 6, f"{root}/ended.ckpt")
    assert len(stops) == int(trainer.is_global_zero)
    for text in stops:
        assert "stopped after 3 batches of epoch 0" in text
        assert "goes on with its other 1 of 4" in text
    _, _, expected = fit(f"{root}/ended", options, 2, 6)
    assert_bitwise(steps, {step: expected[step] for step in range(4, 7)})
    assert trainer.current_epoch == 2
    return True


def test_whenever_it_was_saved(pool, tmp_path: Path) -> None:
    assert pool.run(2, resume_the_others, str(tmp_path)) == [True, True]


class Lengths(Dataset):
    """Batches of two lengths in turn, on all ranks alike."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        length = (4, 7)[index // ROWS_PER_STEP % 2]
        return tuple(each[:length] for each in self.rows[index])


def resume_at_another_length(root: str, options: dict[str, Any]) -> bool:
    """The first batch after the resumption has another shape than the one that was planned for."""
    data = Lengths(make_loader(make_model(), 2).dataset)

    def loader() -> DataLoader:
        sampler = DistributedSampler(data, 2, dist.get_rank(), shuffle=False)
        return DataLoader(data, batch_size=ROWS_PER_STEP // 2, sampler=sampler)

    _, _, expected = fit(root, options, 2, 5, callbacks=[Keep(f"{root}/kept", 1)], loader=loader())
    _, _, steps = fit(root, options, 2, 5, ckpt_path=checkpoint_at(root, 1), loader=loader())
    assert_bitwise(steps, {step: expected[step] for step in range(2, 6)})
    return True


@pytest.mark.parametrize("case", slow_but(("tensor", "pipeline"), ("pipeline",)))
def test_resumed_under_the_same_plan_at_a_batch_of_another_length(
    pool, tmp_path: Path, case: str
) -> None:
    assert pool.run(2, resume_at_another_length, str(tmp_path), CASES[case]) == [True, True]


class Noisy(Dataset):
    """Rows that are changed at random when they are loaded."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        tokens, targets = self.rows[index]
        return torch.where(
            torch.rand(tokens.shape) < 0.2, torch.randint(33, tokens.shape), tokens
        ), targets


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, noisy: Noisy) -> None:
        self.noisy = noisy

    def __iter__(self) -> Any:
        return (self.noisy[i] for i in torch.randperm(len(self.noisy)).tolist())


@pytest.mark.parametrize("kind", ["random sampler", "iterable", "workers"])
def test_random_data_on_one_device(tmp_path: Path, kind: str) -> None:
    """Everything draws from the default generator, in turns: the sampler, the dataset, dropout."""
    root = str(tmp_path)

    def loader() -> DataLoader:
        noisy = Noisy(make_loader(make_model(), 1).dataset)
        if kind == "iterable":
            return DataLoader(Stream(noisy), batch_size=8)
        return DataLoader(noisy, batch_size=8, shuffle=True, num_workers=int(kind == "workers"))

    _, _, expected = fit(root, {}, 1, 6, callbacks=[Keep(f"{root}/kept", 2)], loader=loader())
    for step in (2, 4):
        torch.manual_seed(step)
        path = checkpoint_at(root, step)
        assert Path(path).is_file()
        _, _, steps = fit(root, {}, 1, 6, ckpt_path=path, loader=loader())
        assert_bitwise(steps, {step: expected[step] for step in range(step + 1, 7)})
