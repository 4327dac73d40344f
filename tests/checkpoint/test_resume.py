"""A resumed training is the uninterrupted one, bit by bit, under one plan: dropout, shuffling, schedule, AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint.runs import ONE_STAGE, PIPELINE, Keep, assert_bitwise, checkpoint_at, fit

from alpa_strategy.checkpoint.directory import is_checkpoint

CASES = {"zero3": ONE_STAGE["zero3"], "tensor": ONE_STAGE["tensor"], "pipeline": PIPELINE}


def resume_twice(root: str, options: dict[str, Any]) -> bool:
    """Save every second step of six (four make an epoch), go on from each, and compare every step."""
    keep = Keep(f"{root}/kept", 2)
    _, _, expected = fit(root, options, 2, 6, callbacks=[keep])
    for step in (2, 4):  # in the middle of an epoch, and at its end
        assert is_checkpoint(checkpoint_at(root, step))
        trainer, _, steps = fit(root, options, 2, 6, ckpt_path=checkpoint_at(root, step))
        assert sorted(steps) == list(range(step + 1, 7)), sorted(steps)
        assert_bitwise(steps, {step: expected[step] for step in steps})
        assert trainer.current_epoch == 2
    return True


@pytest.mark.parametrize("case", CASES)
def test_resume_is_bitwise(pool, tmp_path: Path, case: str) -> None:
    assert pool.run(2, resume_twice, str(tmp_path), CASES[case]) == [True, True]
