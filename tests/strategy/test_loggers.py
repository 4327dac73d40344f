"""The Trainer's loggers get the plan and what its steps take."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from models import MODELS
from quiet import QUIET
from torch.utils.data import DataLoader

from alpa_strategy import AlpaStrategy

# An MLP has no tokens.
NAMES = ("step_seconds", "predicted_step_seconds", "planned_bytes", "samples_per_second", "mfu")


def train(root: str, logger: Any, num_ranks: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = MODELS["mlp"]()
    rows = model.example_batch(48, torch.Generator().manual_seed(0))
    samples = list(zip(*rows, strict=True))
    strategy = AlpaStrategy(cluster="pcie_8gpu", plan_dir=root, verbose=False, **options)
    settings = {**QUIET, "logger": logger, "log_every_n_steps": 2}
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        default_root_dir=root,
        **settings,
    )
    trainer.fit(model, DataLoader(samples, batch_size=4))
    return strategy.plan


def train_with_csv(root: str, log_plan: bool) -> None:
    train(root, CSVLogger(root, name="logs", version=0), 2, log_plan=log_plan)


def rows_of(folder: Path) -> list[dict[str, str]]:
    path = folder / "logs" / "version_0" / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row.get("alpa/step_seconds")]


def test_metrics_and_hyperparameters(pool, tmp_path: Path) -> None:
    pool.run(2, train_with_csv, str(tmp_path), True)
    rows = rows_of(tmp_path)
    # Six steps, every second, without the first.
    assert len(rows) == 2
    for row in rows:
        values = {name: float(row["alpa/" + name]) for name in NAMES}
        rate = values["samples_per_second"] * values["step_seconds"]
        assert rate == pytest.approx(8)
        assert all(value > 0 for value in values.values())
    text = (tmp_path / "logs" / "version_0" / "hparams.yaml").read_text()
    hyperparameters = yaml.safe_load(text)
    assert hyperparameters["alpa/stages"] == 1
    assert hyperparameters["alpa/eager"] is False


def test_it_can_be_left_out(pool, tmp_path: Path) -> None:
    pool.run(2, train_with_csv, str(tmp_path), False)
    assert rows_of(tmp_path) == []


@pytest.mark.parametrize("logger_class", [MLFlowLogger, WandbLogger])
def test_loggers_that_store_files_get_the_page(tmp_path: Path, logger_class: Any) -> None:
    """The services are not here: only what is asked of them is seen."""
    logger = MagicMock(spec=logger_class)
    pages: list[str] = []
    logger.run_id = "run"

    def keep(*arguments: Any, **unused: Any) -> None:
        pages.append(Path(arguments[-1]).read_text())

    logger.experiment = MagicMock()
    logger.experiment.log_artifact.side_effect = keep
    logger.experiment.save.side_effect = keep
    logger.save_dir = str(tmp_path)
    logger.name, logger.version = "name", "version"
    train(str(tmp_path), logger, 1)
    assert len(pages) == 1
    assert pages[0].lower().startswith("<!doctype html>")
    ours = [call.args[0] for call in logger.log_metrics.call_args_list if call.args]
    assert any("alpa/step_seconds" in metrics for metrics in ours)
