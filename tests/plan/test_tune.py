"""The batch size that is tuned: the most samples a second that fit, no larger than that takes."""

from __future__ import annotations

from types import SimpleNamespace

from alpa_strategy.cli import main
from alpa_strategy.errors import DoesNotFitError
from alpa_strategy.planner.batch_size import best_batch, tune_batch


def planner(seconds, most=10**9):
    """Plans whose step takes `seconds(batch size)`; none above `most`."""

    def plan_at(batch_size):
        if batch_size > most:
            raise DoesNotFitError(f"{batch_size} rows do not fit")
        return SimpleNamespace(iteration_seconds=seconds(batch_size))

    return plan_at


def test_it_is_doubled_while_that_gains():
    found = tune_batch(planner(lambda n: 1 + n / 64), 8)
    assert best_batch(found) == 4096  # 63.0 of at most 64 rows a second; twice as many give 63.5
    assert list(found) == [8 * 2**i for i in range(11)]


def test_it_is_halved_until_it_fits_and_then_left():
    found = tune_batch(planner(lambda n: 1 + n / 64, most=40), 256)
    assert list(found) == [16, 32, 64, 128, 256]
    assert best_batch(found) == 32


def test_smaller_is_better_where_it_is_as_fast():

    def seconds(num_samples):
        factor = 1 if num_samples <= 16 else 1.5
        return num_samples / 100 * factor

    assert best_batch(tune_batch(planner(seconds), 64)) == 1


def test_nothing_fits():
    found = tune_batch(planner(lambda n: n, most=0), 12)
    assert list(found) == [3, 6, 12]
    assert best_batch(found) is None


def test_the_command_shows_what_was_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "plan.json"
    command = [
        "plan",
        "gpt_tiny",
        "--cluster",
        "pcie_8gpu",
        "cluster.num_nodes=1",
        "cluster.devices_per_node=2",
    ]
    command += [
        "model.num_layers=1",
        "data.batch_size=3",
        "plan.num_microbatches=1",
        "plan.num_stages=1",
        "--tune",
        "batch_size",
    ]
    assert main([*command, "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "samples/s" in shown
    assert "1 of 12" in shown  # 6 a rank
    # The stored plan knows the batch size that was chosen.
    assert main(["why", str(out), "blocks.0.mlp.fc.weight"]) == 0
