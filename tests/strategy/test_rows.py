"""What a loader, a collate function or a constant does with a rank's own samples is that rank's
business: the numbers are DDP's, and the step is captured.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from covering import slow_but
from lightning.fabric.utilities.exceptions import MisconfigurationException
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy
from alpa_strategy.errors import AlpaError, OptionError, SetupError

ROWS, BATCHES = 4, 6


class Samples(Dataset):
    def __len__(self) -> int:
        return 2 * ROWS * BATCHES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = index % 3 + 1
        return {
            "x": torch.randn(5, generator=generator),
            "tokens": torch.arange(length),
            "y": index % 2,
        }


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    length = max(len(s["tokens"]) for s in samples)
    tokens = torch.stack([F.pad(s["tokens"], (0, length - len(s["tokens"]))) for s in samples])
    return {
        "x": torch.stack([s["x"] for s in samples]),
        "tokens": tokens,
        "y": torch.tensor([s["y"] for s in samples]),
    }


def packed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = torch.tensor([0, *(len(s["tokens"]) for s in samples)])
    x = torch.stack([s["x"] for s in samples])
    return {
        "x": x,
        "tokens": torch.cat([s["tokens"] for s in samples]),
        "cu_seqlens": lengths.cumsum(0),
        "own_row": torch.arange(len(samples)),
        "shuffle": torch.randperm(len(samples)),
        "nearest": torch.cdist(x, x).fill_diagonal_(9.0).argmin(1),
        "pairs": x @ x.T,
        "views": torch.cat([x, x]),
        "weights": torch.ones(len(samples[0]["x"])),
        "rate": torch.tensor(0.5),
        "y": torch.tensor([s["y"] for s in samples]),
    }


class Model(pl.LightningModule):
    """Uses the leaf `use` of the batch."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(5, 5), use

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        other = batch[self.use].double()
        return (self.layer(batch["x"]).square() * other.mean()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Masked:
    """Each batch has a mask, another one on rank 1 in the batches from number `fault` on."""

    def __init__(self, fault: int) -> None:
        self.fault, self.calls = fault, 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        mask = torch.ones(7, 7).tril()
        if self.calls >= self.fault and torch.distributed.get_rank() == 1:
            mask[0, 3] = 1.0
        self.calls += 1
        return {
            "x": torch.stack([s["x"] for s in samples]).double(),
            "mask": mask,
            "count": len(samples),
        }


class Scaled:
    """`packed` in fp64."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {**packed(samples), "x": torch.stack([s["x"] for s in samples]).double()}


class Fault(pl.Callback):
    """Changes a weight on rank 1 by 1e-3 after a step."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 3 and trainer.global_rank == 1:
            with torch.no_grad():
                module.layer.weight[2, 3] += 1e-3


def fitted(
    model: Any, loader: Any, strategy: Any, root: str, **options: Any
) -> tuple[list[Tensor], bool]:
    """Return final weights on two ranks, and whether the steps were eager."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, default_root_dir=root, **options, **QUIET
    )
    trainer.fit(model, loader)
    as_written = strategy != "ddp" and strategy.plan.is_eager
    return [p.detach() for p in model.parameters()], as_written


def train(
    root: str, use: str, fault: int | None, callbacks: Any = (), model: Any = Model, **options: Any
) -> tuple[list[Tensor], bool]:
    """Return final weights, and whether the steps were eager; `fault` None: `packed` batches."""
    torch.manual_seed(3)
    model = model(use).double()
    collate = Scaled() if fault is None else Masked(fault)
    sampler: Any = DistributedSampler(Samples(), 2, torch.distributed.get_rank(), shuffle=False)
    loader = DataLoader(Samples(), ROWS, sampler=sampler, collate_fn=collate)
    strategy: Any = "ddp"
    if options:
        strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, **options)
    return fitted(
        model,
        loader,
        strategy,
        root,
        max_epochs=2,
        callbacks=[globals()[name]() for name in callbacks],
    )


def train_both(root: str, use: str, fault: int | None) -> Any:
    return train(root, use, fault), train(root, use, fault, parallel="data")


@pytest.mark.parametrize("fault", slow_but((0, 3, 100), (3,)))
def test_a_mask_may_differ_between_ranks(pool, tmp_path, fault: int) -> None:
    for (expected, _), (weights, as_written) in pool.run(
        2, train_both, str(tmp_path), "mask", fault
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
        assert not as_written


@pytest.mark.parametrize("leaf", ["tokens", "cu_seqlens", "own_row", "views"])
def test_leaves_made_of_a_ranks_samples(pool, tmp_path, leaf: str) -> None:
    for (expected, _), (weights, as_written) in pool.run(2, train_both, str(tmp_path), leaf, None):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
        # `packed` has as many tokens as the rank's samples: the ranks' shapes differ.
        assert as_written


class CountsRows(Model):
    """With the batch size as an attribute, or in the batch: in the loss, or where it only weighs
    what is logged.
    """

    def __init__(self, use: str) -> None:
        super().__init__("mask")
        self.save_hyperparameters({"batch_size": ROWS, "where": use})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.hparams.where == "log":
            assert (
                self.trainer.world_size == torch.distributed.get_world_size()
            )  # computes nothing with it
        else:
            size = batch["count"] if self.hparams.where == "leaf" else self.hparams.batch_size
            loss = loss * size / len(batch["x"])
        self.log("loss", loss, batch_size=self.hparams.batch_size)
        return loss


def train_counting(root: str, use: str) -> Any:
    return train(root, use, 100, model=CountsRows), train(
        root, use, 100, model=CountsRows, parallel="data"
    )


@pytest.mark.parametrize("use", ["loss", "leaf", "log"])
def test_a_loss_with_the_batch_size_of_a_rank(pool, tmp_path, use: str) -> None:
    for (expected, _), (weights, as_written) in pool.run(2, train_counting, str(tmp_path), use):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
        assert not as_written


PLACES: dict[str, Any] = {
    "first": lambda z: z[0],
    "support": lambda z: z[3:] - z[:3].mean(0),
    "halves": lambda z: z[: len(z) // 2] - z[len(z) // 2 :],
    "neighbours": lambda z: z[1:] - z[:-1],
    "differences": lambda z: torch.diff(z, dim=0),
    "sums": lambda z: z.cumsum(0),
    "written": lambda z: torch.cat([z.clone().index_fill_(0, torch.tensor(0), 2.0), z[:1]]),
    "each": lambda z: torch.stack([row.tanh() for row in z]),
    "pieces": lambda z: torch.cat([part - part.mean(0) for part in z.split(2)]),
    "views": lambda z: torch.cat([z, 2.0 * z]).chunk(2)[1],
    "ways": lambda z: z.view(2, -1, 5).mean(1),  # 2 groups: of 2 rows in a rank's 4, of 4 in all 8
    "shots": lambda z: z.reshape(2, 2, -1).mean(1),
    "mixed": lambda z: z.view(5, -1).mean(1),
    "chunks": lambda z: torch.stack([part.mean(0) for part in z.chunk(2)]),
    "fours": lambda z: torch.stack([part.mean(0) for part in z.chunk(4)]),
    "sections": lambda z: torch.stack([part.mean(0) for part in z.tensor_split(3)]),
    "listed": lambda z: z[[0, 3]],
    "pairs": lambda z: z.view(-1, 2, 5).mean(1),  # the same pairs in both
    "columns": lambda z: z[:, 0] + z.unsqueeze(1).squeeze(1)[:, 1],
}


class ByPlace(Model):
    """Its loss is made of what `use` takes of the rows."""

    def __init__(self, use: str) -> None:
        super().__init__(use)
        self.register_buffer("anchors", torch.tensor([0, 3]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        z = self.layer(batch["x"])
        taken = z[self.anchors] if self.use == "anchors" else PLACES[self.use](z)
        loss = taken.square().mean()
        self.log("first", taken[0].sum())  # a log of a row is none of the loss
        return loss


def train_by_place(root: str, use: str) -> Any:
    return train(root, use, 100, model=ByPlace), train(
        root, use, 100, model=ByPlace, parallel="data"
    )


# Each of these takes rows as another one does.
SLOW_PLACES = {"support", "neighbours", "differences", "views", "shots", "chunks", "fours"}
ALL_PLACES = (*PLACES, "anchors")


@pytest.mark.parametrize(
    "use", slow_but(ALL_PLACES, [use for use in ALL_PLACES if use not in SLOW_PLACES])
)
def test_samples_that_are_taken_by_position_are_a_ranks(pool, tmp_path, use: str) -> None:
    for (expected, _), (weights, as_written) in pool.run(2, train_by_place, str(tmp_path), use):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
        assert not as_written


class Batches(Dataset):
    """Batches as the data set makes them, [steps, columns, 5]."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index + 100 * torch.distributed.get_rank())
        return {"x": torch.randn(4, 3, 5, generator=generator).double()}


class Sequences(Model):
    def __init__(self, use: str) -> None:
        super().__init__(use)
        self.layer = nn.GRU(5, 5) if use == "recurrent" else nn.Linear(5, 5)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.layer(batch["x"])
        return (out[0] if self.use == "recurrent" else out).square().mean()


def train_on_batches(root: str, use: str, strategy: Any) -> tuple[list[Tensor], bool]:
    torch.manual_seed(3)
    model = Sequences(use).double()
    strategy = "ddp" if strategy is None else AlpaStrategy(cluster="pcie_8gpu", verbose=False)
    loader = DataLoader(Batches(), batch_size=None)
    return fitted(model, loader, strategy, root, max_epochs=1, use_distributed_sampler=False)


def train_both_on_batches(root: str, use: str) -> Any:
    return train_on_batches(root, use, None), train_on_batches(root, use, "alpa")


@pytest.mark.parametrize("use", ["recurrent", "pointwise"])
def test_batches_of_a_loader_that_collates_nothing(pool, tmp_path, use: str) -> None:
    for (expected, _), (weights, as_written) in pool.run(
        2, train_both_on_batches, str(tmp_path), use
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
        assert not as_written


class WrittenOut(Model):
    """The number of rows stands in the code."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch["x"]).view(ROWS, 5).square().mean()


def train_written_out(root: str) -> Any:
    return train(root, "mask", 100, model=WrittenOut), train(
        root, "mask", 100, model=WrittenOut, num_stages=1, capture="require"
    )


def test_a_batch_size_in_the_code_is_that_of_a_rank(pool, tmp_path) -> None:
    for (expected, _), (weights, _) in pool.run(2, train_written_out, str(tmp_path)):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


def with_fault(root: str, as_written: bool) -> None:
    train(root, "mask", 100, ["Fault"], parallel="data", capture="never" if as_written else "auto")


@pytest.mark.parametrize("as_written", [False, True])
def test_a_weight_that_changes_on_one_rank_is_named(pool, tmp_path, as_written: bool) -> None:
    what = r"copies of layer.weight differ after step 8: on ranks \[1\] from those on ranks \[0\]"
    with pytest.raises(WorkerError, match=what):
        pool.run(2, with_fault, str(tmp_path), as_written)


def threads_of(root: str) -> tuple[int, int]:
    """This rank's threads before and after a training."""
    torch.set_num_threads(1 + torch.distributed.get_rank())
    before = torch.get_num_threads()
    train(root, "mask", 100, parallel="data")
    return before, torch.get_num_threads()


def test_ranks_compute_with_equally_many_threads(pool, tmp_path) -> None:
    """Kernels round by their number of threads: work that all ranks do alike must come out
    alike.
    """
    assert pool.run(2, threads_of, str(tmp_path)) == [(1, 1), (2, 1)]


class Unlike(Model):
    """Computes something else on rank 1."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.layer(batch["x"])
        return (x.tanh() if self.trainer.global_rank == 1 else x.sigmoid()).square().mean()


def unlike(root: str) -> None:
    train(root, "x", 100, parallel="data", capture="require", model=Unlike)


def test_ranks_whose_steps_differ_are_told_the_first_op(pool, tmp_path) -> None:
    pattern = (
        r"differ in the computation of training_step: rank 0: aten.sigmoid"
        r".*test_rows.py:\d+.*rank 1: aten.tanh"
    )
    with pytest.raises(WorkerError, match=pattern):
        pool.run(2, unlike, str(tmp_path))


def trainer_of(root: str) -> pl.Trainer:
    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False)
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        strategy=strategy,
        default_root_dir=root,
        **QUIET,
    )


def test_a_trainer_that_has_trained_can_be_stored(tmp_path) -> None:
    trainer, model = trainer_of(str(tmp_path)), Model("weights").double()
    trainer.fit(model, DataLoader(Samples(), ROWS, collate_fn=Scaled()))
    torch.save(trainer, tmp_path / "trainer.pt")
    again = torch.load(tmp_path / "trainer.pt", weights_only=False)
    torch.testing.assert_close(again.lightning_module.state_dict(), model.state_dict())
    assert again.global_step == trainer.global_step


def test_data_may_be_set_up_before_the_fit(tmp_path) -> None:
    trainer, model = trainer_of(str(tmp_path)), Model("weights").double()
    loader = DataLoader(Samples(), ROWS, collate_fn=Scaled())
    trainer.strategy._lightning_module = model
    trainer._data_connector.attach_data(model, train_dataloaders=loader)
    trainer.fit_loop.setup_data()
    trainer.fit(model, loader)
    assert trainer.global_step == len(loader)


class TwiceSharded(Model):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return type("ZeroRedundancyOptimizer", (type(optimizer),), {})(self.parameters(), lr=0.1)


def test_errors_are_of_the_kinds_that_callers_look_for(tmp_path) -> None:
    assert issubclass(AlpaError, RuntimeError)
    assert issubclass(OptionError, MisconfigurationException)
    with pytest.raises(SetupError, match='parallel="zero2"') as caught:
        trainer_of(str(tmp_path)).fit(
            TwiceSharded("weights").double(), DataLoader(Samples(), ROWS, collate_fn=Scaled())
        )
    assert isinstance(caught.value, MisconfigurationException)
