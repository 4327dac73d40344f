"""`alpa_notebook`: an interactive session trains on two ranks, and has the results afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SESSION = Path(__file__).with_name("notebook_session.py")


def run_cells(folder: Path, *cells: str) -> tuple[dict[str, Any], str]:
    """Run cells in an interactive interpreter; return the results by cell, and stderr."""
    # `-i`: Lightning takes it for an interactive session, as a notebook.
    process = subprocess.run(
        [sys.executable, "-i", str(SESSION), str(folder), *cells],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    results = {}
    for line in process.stdout.splitlines():
        if line.startswith("{"):
            results.update(json.loads(line))
    assert list(results) == list(cells), process.stderr
    return results, process.stderr


def test_fits_in_a_session(tmp_path):
    results, stderr = run_cells(tmp_path, "ask_for_alpa", "fit_twice", "raise_in_worker")
    assert 'strategy="alpa_notebook"' in results["ask_for_alpa"]["fix"]

    fitted = results["fit_twice"]
    first, second, third = fitted["errors"]
    assert third < second < 0.5 * first
    # 64 samples, 8 a batch, 2 ranks, 2 epochs.
    assert fitted["seen"] == [[8, 2, True]] * 2
    assert 0 < fitted["metrics"]["train_loss"] < 1
    assert fitted["plan_devices"] == [2]
    assert fitted["variables"] == []

    raised = results["raise_in_worker"]
    assert raised["text"] == "a mistake of rank 1"
    assert "on_train_batch_end" in raised["cause"]
    # The notebook shows it, and no worker.
    assert "a mistake of rank 1" not in stderr


@pytest.mark.slow
def test_callbacks_and_evaluation(tmp_path):
    results, _ = run_cells(
        tmp_path, "train_by_name", "evaluate", "build_late", "fit_the_same_trainer"
    )
    trained = results["train_by_name"]
    assert trained["stopped_epoch"] == 1
    assert trained["has_best"]
    assert trained["best"] > 0
    assert results["evaluate"]["validated"][0]["val_loss"] > 0
    assert results["evaluate"]["num_predicted"] == 4
    assert results["build_late"]["error"] < 0.2
    assert "has trained before" in results["fit_the_same_trainer"]["problem"]


@pytest.mark.slow
def test_a_killed_worker_is_named(tmp_path):
    results, _ = run_cells(tmp_path, "lose_a_worker")
    problem = results["lose_a_worker"]["problem"]
    assert problem.startswith("rank 1 (process ")
    assert "was ended by SIGKILL" in problem
