"""What hooks around a batch make of its samples is the rank's business: the numbers are DDP's."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from covering import slow_but
from quiet import QUIET
from strategy import batch_state_programs, transfer_hook_programs
from torch import Tensor

from alpa_strategy import AlpaStrategy


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def program(name: str) -> type[pl.LightningModule]:
    """Return the program of a name in either module."""
    for module in (transfer_hook_programs, batch_state_programs):
        if hasattr(module, name):
            return getattr(module, name)
    raise KeyError(name)


def train(
    name: str, strategy: Any, root: str
) -> tuple[dict[str, Tensor], list[float], bool, list[str]]:
    """Return the final state, losses by step, whether steps were eager, and the package's log."""
    torch.manual_seed(5)
    model = program(name)().double()
    losses: list[float] = []
    said = Lines()

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(said)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        strategy=strategy,
        default_root_dir=root,
        callbacks=[Watch()],
        **QUIET,
    )
    trainer.fit(model, datamodule=model.make_data() if hasattr(model, "make_data") else None)
    logger.removeHandler(said)
    assert "_on_before_batch_transfer" not in vars(model)
    as_written = strategy != "ddp" and strategy.plan.is_eager
    return model.state_dict(), losses, as_written, [x for x in said.lines if x.startswith("alpa:")]


def train_both(name: str, root: str) -> Any:
    return train(name, "ddp", root), train(
        name, AlpaStrategy(cluster="pcie_8gpu", verbose=False), root
    )


PROGRAMS = [
    "Flipped",
    "MixedUp",
    "Weighted",
    "Cropped",
    "Tokenized",
    "TwoViews",
    "Indexed",
    "RandomNegatives",
    "HardNegatives",
    "Counted",
    "RunningMean",
    "OnlySixRows",
    "Standardised",
    "Shares",
    "RandomShares",
    "AsManyByChance",
    "RowsOfTheStep",
    "RowsOfTheTransfer",
    "RowsOfACallback",
    "RowsInABuffer",
    "RowsOfTheLastBatch",
    "OnlySixRowsInTheStep",
    "OnlySixRowsAfterAChange",
    "RowsOfTheLastBatchAhead",
    "RowsOfTheGradient",
    "DividedByACallback",
    "DividedByTheBatchSize",
    "TimesTheRanks",
    "NumberInTheBatch",
    "NumberOfTheCollation",
    "SameNumberInTheBatch",
    "RowsFromTheLoader",
    "Normalised",
    "RowsInAContainer",
    "RowsUpdated",
    "TakesTheNext",
    "CallbackOfAThread",
    "DatasetOfAThread",
    "NamedAsAMethod",
    "AveragesOutside",
    "AveragesInOtherMemory",
    "ChangesFarAway",
]

# Steps of which a value changes from batch to batch in a way that no graph can hold.
EAGER: tuple[str, ...] = ()


# Each does with other code what another program does.
SLOW_PROGRAMS = {
    "AveragesOutside",
    "CallbackOfAThread",
    "Counted",
    "DividedByACallback",
    "NumberOfTheCollation",
    "OnlySixRows",
    "OnlySixRowsInTheStep",
    "RandomNegatives",
    "RowsInABuffer",
    "RowsInAContainer",
    "RowsOfACallback",
    "RowsOfTheLastBatch",
    "RowsOfTheTransfer",
    "SameNumberInTheBatch",
    "Shares",
    "Standardised",
}
ALL_PROGRAMS = (*PROGRAMS, "OfTheData")


@pytest.mark.parametrize(
    "name", slow_but(ALL_PROGRAMS, [name for name in ALL_PROGRAMS if name not in SLOW_PROGRAMS])
)
def test_hooks_around_a_batch(pool, tmp_path, name: str) -> None:
    (expected, found), (_, second) = pool.run(2, train_both, name, str(tmp_path))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        found[1], expected[1], rtol=1e-9, atol=1e-9
    )  # all numbers at random are the same ones
    assert all(torch.equal(found[0][key], second[0][key]) for key in found[0] if key != "mean")
    assert found[2] == (name in EAGER)
    assert any("steps run eagerly" in line for line in found[3]) == (name in EAGER)
