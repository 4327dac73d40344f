"""The states that a module goes through under one strategy."""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from alpa_strategy import AlpaStrategy
from alpa_strategy.lightning.session import ModuleState, Session


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.states: list[ModuleState] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def on_train_start(self) -> None:
        self._record_state()

    def on_train_batch_end(self, *args: object) -> None:
        self._record_state()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def _record_state(self) -> None:
        self.states.append(self.trainer.strategy._session.state)


@pytest.mark.parametrize(
    ("capture", "state"), [("auto", ModuleState.SHARDED), ("never", ModuleState.EAGER)]
)
def test_the_first_batch_shards_and_the_end_of_training_unshards(tmp_path, capture, state):
    module = Regression()
    strategy = AlpaStrategy(capture=capture, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))

    assert module.states == [ModuleState.FULL, state, state]
    assert strategy._session.state is ModuleState.FULL
    assert strategy.run is None


def test_a_module_is_deferred_while_there_are_tensors_to_make():
    session = Session(make_job=None, checkpoints=None)
    assert session.state is ModuleState.FULL

    session.deferred_init.begin(torch.device("cpu"))
    assert session.state is ModuleState.DEFERRED
