"""The strategy's own arguments: what is unknown is named, the registry knows "alpa"."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from quiet import QUIET

import alpa_strategy
from alpa_strategy import AlpaStrategy
from alpa_strategy.errors import AlpaError, OptionError


def test_the_registered_name_gives_the_strategy() -> None:
    trainer = pl.Trainer(strategy="alpa", accelerator="cpu", devices=1, **QUIET)
    assert isinstance(trainer.strategy, AlpaStrategy)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"paralel": "data"}, "'paralel'.*did you mean 'parallel'"),
        ({"plan_directory": "x"}, "did you mean 'plan_dir'"),
        ({"parallel": "magic"}, "magic"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"backend": "ncll"}, "no communication backend 'ncll'"),
    ],
)
def test_wrong_options_are_named(wrong: dict, message: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){message}"):
        AlpaStrategy(**wrong)


def test_public_names_resolve() -> None:
    for name in ("AlpaError", "AlpaStrategy", "ClusterSpec", "Plan", "PlanOptions"):
        assert getattr(alpa_strategy, name) is not None
    with pytest.raises(AttributeError):
        alpa_strategy.nothing  # noqa: B018


class Bare(pl.LightningModule):
    """Configurable in what makes it unfit."""

    def __init__(
        self, *, parameters: bool = True, automatic: bool = True, optimizers: int = 1
    ) -> None:
        import torch

        super().__init__()
        self.layer = torch.nn.Linear(2, 2) if parameters else torch.nn.Identity()
        self.automatic_optimization = automatic
        self.num_optimizers = optimizers

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        import torch

        results = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.num_optimizers)]
        return results[0] if len(results) == 1 else results


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Bare(parameters=False), "no trainable parameters"),
        (Bare(automatic=False), "manual optimization"),
        (Bare(automatic=False, optimizers=2), "manual optimization"),
    ],
)
def test_modules_that_cannot_train_are_refused(model: Bare, message: str, tmp_path) -> None:
    import torch

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(4, 2)), batch_size=2
    )
    trainer = pl.Trainer(
        # without "require", manual optimization would run in eager steps
        strategy=AlpaStrategy(capture="require"),
        accelerator="cpu",
        devices=1,
        max_steps=1,
        max_epochs=1,  # a step that runs its own backward and takes none counts none
        **QUIET,
        default_root_dir=tmp_path,
    )
    with pytest.raises(AlpaError, match=message):
        trainer.fit(model, data)


def test_ranks_are_known_before_fit(monkeypatch) -> None:
    """Under torchrun `rank_zero_only` functions of the user's script run before fit, too."""
    for name, value in {
        "RANK": 3,
        "LOCAL_RANK": 3,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 4,
        "GROUP_RANK": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    for each in (rank_zero_only, utils_rank_zero_only):
        monkeypatch.setattr(each, "rank", 0, raising=False)
    pl.Trainer(strategy="alpa", accelerator="cpu", devices=4, logger=False)
    assert rank_zero_only.rank == 3
