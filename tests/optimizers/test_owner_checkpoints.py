"""State that owners have is in checkpoints, readable under other plans and by one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from optimizers.resuming import NUM_STEPS, PLANS, train

from alpa_strategy import export_checkpoint


# Each under all other plans. By default the next test resumes each optimizer under one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "saved"),
    [
        ("shampoo", "stages"),
        ("muon", "zero3"),
        ("shampoo", "data"),
    ],
)
def test_resumed_under_another_plan(pool, tmp_path: Path, optimizer: str, saved: str) -> None:
    root = str(tmp_path)
    path = f"{root}/middle.ckpt"
    expected = pool.run(1, train, root, optimizer, None, 1, NUM_STEPS, init_group=False)[0]
    devices, options = PLANS[saved]
    saves = pool.run(devices, train, root, optimizer, options, devices, NUM_STEPS, None, path)
    # At the end of a training every rank has the full state.
    for found in saves:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    for name, (devices, options) in PLANS.items():
        if name == saved:
            continue
        resumed = pool.run(devices, train, root, optimizer, options, devices, NUM_STEPS, path)
        for found in resumed:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    plain = f"{root}/plain.ckpt"
    if Path(path).is_dir():
        export_checkpoint(path, plain)
    else:
        plain = path
    args = (root, optimizer, None, 1, NUM_STEPS, plain)
    (found,) = pool.run(1, train, *args, init_group=False)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("optimizer", "saved", "resumed"),
    [
        ("galore", "zero3", "stages"),
        ("8-bit in a class", "stages", "zero2 on 3"),
        pytest.param("8-bit", "stages", "zero2 on 3", marks=pytest.mark.slow),
        ("lookahead of a chain", "stages", "zero3"),
        # Under `tensor` gradients round otherwise, and batches that repeat have gradients of low
        # rank: their eigenvectors are any basis of a space, which the last bit decides.
        pytest.param("soap", "zero3", "zero2 on 3", marks=pytest.mark.slow),
        pytest.param("chained", "zero3", "stages", marks=pytest.mark.slow),
        pytest.param("lars", "data", "zero3", marks=pytest.mark.slow),
        pytest.param("muon with aux adam", "zero3", "tensor", marks=pytest.mark.slow),
        pytest.param("combined", "zero2 on 3", "stages", marks=pytest.mark.slow),
        pytest.param("lookahead", "stages", "zero3", marks=pytest.mark.slow),
    ],
)
def test_optimizers_of_people_are_resumed(
    pool, tmp_path: Path, optimizer: str, saved: str, resumed: str
) -> None:
    root = str(tmp_path)
    path = f"{root}/middle.ckpt"
    expected = pool.run(1, train, root, optimizer, None, 1, NUM_STEPS, init_group=False)[0]
    devices, options = PLANS[saved]
    pool.run(devices, train, root, optimizer, options, devices, NUM_STEPS // 2, None, path)

    devices, options = PLANS[resumed]
    runs = pool.run(devices, train, root, optimizer, options, devices, NUM_STEPS, path)
    for run in runs:
        torch.testing.assert_close(run, expected, rtol=1e-9, atol=1e-9)

    # Lightning's own reader refuses tensors that wrap others ("Callable map_location not
    # supported"), whoever wrote the file.
    if optimizer == "8-bit in a class":
        return
    plain = path
    if Path(path).is_dir():
        plain = f"{root}/plain.ckpt"
        export_checkpoint(path, plain, weights_only=False)
    args = (root, optimizer, None, 1, NUM_STEPS, plain)
    (run,) = pool.run(1, train, *args, init_group=False)
    torch.testing.assert_close(run, expected, rtol=1e-9, atol=1e-9)
