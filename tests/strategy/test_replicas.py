"""Replicas of several devices each: as under DDP with a rank for each replica, whatever the plan
inside of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from covering import slow_but
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy

STEPS = 5
ROWS = 4
REPLICAS = 2
RANKS = 4
WIDTH = 16


class Sequences(Dataset):
    """[T, WIDTH] and a class; T is the same of all samples, or is not; so are the values."""

    def __init__(self, count: int, lengths: int = 1, same: bool = False) -> None:
        self.count = count
        self.lengths = lengths
        self.same = same

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        index = 0 if self.same else index
        generator = torch.Generator().manual_seed(index)
        length = 3 + int(torch.randint(self.lengths, (), generator=generator))
        x_TD = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
        return x_TD, torch.tensor(index % 3)


class Stream(IterableDataset):
    """Batches of which all ranks have the same, until step `apart`; then each has others."""

    def __init__(self, apart: int) -> None:
        self.apart = apart

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(
                step + (step >= self.apart) * torch.distributed.get_rank()
            )
            yield (
                torch.randn(ROWS, 3, WIDTH, generator=generator, dtype=torch.float64),
                torch.arange(ROWS) % 3,
            )


def noisy(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What a worker adds at random."""
    x_BTD, y_B = padded(samples)
    return x_BTD + torch.randn_like(x_BTD), y_B


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    length = max(len(x) for x, _ in samples)
    x_BTD = torch.stack([F.pad(x, (0, 0, 0, length - len(x))) for x, _ in samples])
    return x_BTD, torch.stack([y for _, y in samples])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x_BTD)).chunk(3, -1)
        )
        return x_BTD + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Model(pl.LightningModule):
    """One attention and an MLP of each kind that is requested."""

    def __init__(
        self,
        norm: bool = False,
        dropout: float = 0.0,
        lengths: int = 1,
        last_rows: int = 0,
        same: bool = False,
        reads: bool = False,
        apart: int = STEPS,
        noise: bool = False,
    ) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, 3)
        self.accuracy = torchmetrics.MeanMetric()
        self.seen = torchmetrics.SumMetric()
        self.lengths = lengths
        self.last_rows = last_rows
        self.same = same
        self.reads = reads
        self.apart, self.noise = apart, noise

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.attention(x_BTD)
        x_BD = self.norm((x_BTD + self.down(F.gelu(self.up(x_BTD)))).mean(1))
        return self.head(self.drop(x_BD))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x_BTD, y_B = batch
        logits = self(x_BTD)
        loss = F.cross_entropy(logits, y_B)
        if self.reads and loss > 100.0:  # a value that Python reads
            loss = 2.0 * loss
        self.accuracy.update(loss)
        self.seen.update(torch.ones_like(y_B).sum())
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(y_B))
        self.log("sum", loss, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("own", loss)
        self.log("mean_loss", self.accuracy, on_step=False, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        count = REPLICAS * (ROWS * STEPS - self.last_rows)
        if self.apart < STEPS:
            return DataLoader(Stream(self.apart), None)
        if self.noise:
            return DataLoader(
                Sequences(count, same=self.same), ROWS, collate_fn=noisy, num_workers=1
            )
        return DataLoader(Sequences(count, self.lengths, self.same), ROWS, collate_fn=padded)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Sequences(RANKS * ROWS), ROWS, collate_fn=padded)


class Watch(pl.Callback):
    """What is logged, and this rank's parts of parameters and gradients, step by step."""

    def __init__(self, save: str | None = None) -> None:
        self.save = save
        self.logged: list[dict[str, float]] = []
        self.parts: list[list[Tensor]] = []
        self.buffers: list[list[Tensor]] = []
        self.plan: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})
        self.parts.append([p.detach().clone() for p in module.parameters()])
        self.buffers.append([buffer.clone() for buffer in module.buffers()])
        if (run := getattr(trainer.strategy, "run", None)) is not None:
            stages = run.plan.stages
            modes = {
                str(mode)
                for s in stages
                for plan in s.parameter_plans.values()
                for mode in plan.modes
            }
            self.plan = (len(stages), sorted(modes))
        if self.save is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.save)


def train(
    root: str, options: dict[str, Any] | None, model: dict[str, Any], **arguments: Any
) -> dict[str, Any]:
    """A training under DDP (`options`: None) or by replicas, on this rank."""
    pl.seed_everything(3, workers=True, verbose=False)
    module = globals()[arguments.pop("module", "Model")](**model).double()
    watch = Watch(arguments.pop("save", None))
    strategy: Any = "ddp_find_unused_parameters_true" if arguments.pop("unused", False) else "ddp"
    if options is not None:
        given = {
            "batch_scope": "replica",
            "replicas": REPLICAS,
            "cluster": "pcie_8gpu",
            # Plans are made once for all tests, whose folders lie side by side.
            "plan_dir": Path(root).parent / "plans",
            "verbose": False,
        }
        strategy = AlpaStrategy(**{**given, **options})
    resume = arguments.pop("resume", None)
    common = {
        "accelerator": "cpu",
        "precision": "64-true",
        "max_epochs": 1,
        "callbacks": [watch],
        "log_every_n_steps": 1,
    }
    devices = torch.distributed.get_world_size()
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        default_root_dir=root,
        **{**common, **QUIET, **arguments},
    )
    trainer.fit(module, ckpt_path=resume)
    return {
        "logged": watch.logged,
        "last": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "parts": watch.parts,
        "buffers": watch.buffers,
        "plan": watch.plan,
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "parameters": [name for name, _ in module.named_parameters()],
    }


@pytest.fixture(scope="module")
def under_ddp(pool, tmp_path_factory):
    """Trainings with a rank for each replica, computed once."""
    results: dict[str, list[Any]] = {}

    def get(model: dict[str, Any], **arguments: Any) -> list[Any]:
        key = repr((model, arguments))
        if key not in results:
            results[key] = pool.run(
                REPLICAS, train_ddp, str(tmp_path_factory.mktemp("ddp")), model, arguments
            )
        return results[key]

    return get


def train_ddp(root: str, model: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return train(root, None, model, **arguments)


def train_replicas(
    root: str, options: dict[str, Any], model: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    return train(root, options, model, **arguments)


def check(found: list[Any], expected: list[Any]) -> None:
    """Each rank's logs are those of its replica under DDP, weights too; replicas hold the same
    parts, bit by bit.
    """
    size = RANKS // REPLICAS
    for rank, one in enumerate(found):
        ddp = expected[rank // size]
        assert len(one["logged"]) == len(ddp["logged"]) > 0
        for own, other in zip(
            [*one["logged"], one["last"]], [*ddp["logged"], ddp["last"]], strict=True
        ):
            assert own.keys() == other.keys()
            assert own == pytest.approx(other, abs=1e-9), rank
        for name in ddp["weights"] if rank == 0 else ddp["parameters"]:
            torch.testing.assert_close(
                one["weights"][name], ddp["weights"][name], rtol=0, atol=1e-9, msg=name
            )
        torch.testing.assert_close(one["buffers"], ddp["buffers"], rtol=0, atol=1e-9)
        for step, parts in enumerate(one["parts"]):
            for name, a, b in zip(
                one["parameters"], parts, found[rank % size]["parts"][step], strict=True
            ):
                assert torch.equal(a, b), (step, name, rank)


INSIDE = {
    "tensor": {"parallel": "tensor"},
    "zero3": {"parallel": "zero3"},
    "data": {"parallel": "data"},
    "pipeline": {"num_stages": 2, "num_microbatches": 2},
}


# By default all of them are inside below.
@pytest.mark.slow
@pytest.mark.parametrize("inside", INSIDE)
def test_any_plan_inside_of_a_replica_is_ddp_outside(pool, under_ddp, tmp_path, inside):
    per_rank = pool.run(RANKS, train_replicas, str(tmp_path), INSIDE[inside], {}, {})
    assert per_rank[0]["plan"][0] == (2 if inside == "pipeline" else 1)
    check(per_rank, under_ddp({}))


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "other lengths in each replica and step": ("tensor", {"lengths": 4}, {}),
    "other lengths in a pipeline": ("pipeline", {"lengths": 4}, {}),
    "statistics of each replica's rows": ("tensor", {"norm": True}, {}),
    "a smaller last batch": ("zero3", {"last_rows": 1}, {}),
    "accumulation": ("tensor", {"last_rows": 1}, {"accumulate_grad_batches": 2}),
    "accumulation in a pipeline": ("pipeline", {}, {"accumulate_grad_batches": 2}),
    "evaluation in the midst of an epoch": ("data", {"norm": True}, {"val_check_interval": 2}),
    "clipping by norm": ("zero3", {}, {"gradient_clip_val": 0.1}),
    "no evaluation": ("tensor", {"norm": True}, {"limit_val_batches": 0}),
}


# Others of these are tried inside of another plan.
SLOW_CASES = {
    "other lengths in a pipeline",
    "statistics of each replica's rows",
    "accumulation",
    "no evaluation",
}


@pytest.mark.parametrize("case", slow_but(CASES, CASES.keys() - SLOW_CASES))
def test_what_ddp_does_replicas_do(pool, under_ddp, tmp_path, case):
    inside, model, arguments = CASES[case]
    check(
        pool.run(RANKS, train_replicas, str(tmp_path), INSIDE[inside], model, arguments),
        under_ddp(model, **arguments),
    )


def test_replicas_draw_their_own_numbers_and_their_ranks_the_same(pool, tmp_path):
    per_rank = pool.run(
        RANKS, train_replicas, str(tmp_path), INSIDE["tensor"], {"dropout": 0.5, "same": True}, {}
    )
    own = []
    for one in per_rank:
        own.append([step["own"] for step in one["logged"]])
    assert own[0] == own[1]
    assert own[2] == own[3]
    assert all(a != b for a, b in zip(own[0], own[2], strict=True))
    for name, value in per_rank[0]["weights"].items():
        assert all(torch.equal(value, one["weights"][name]) for one in per_rank), name


PLAIN = {"batch_scope": "rank", "replicas": None, "parallel": "data"}


# By default replicas resume their checkpoints below.
@pytest.mark.parametrize("first", slow_but(("replicas", "plain"), ("replicas",)))
def test_a_checkpoint_goes_from_replicas_to_a_plain_plan_and_back(pool, under_ddp, tmp_path, first):
    """In the middle of an epoch: the rest of it is trained on under the other plan."""
    path = str(tmp_path / "midway.ckpt")
    begins, goes_on = (RANKS, INSIDE["tensor"]), (REPLICAS, PLAIN)
    if first == "plain":
        begins, goes_on = goes_on, (RANKS, INSIDE["pipeline"])
    pool.run(begins[0], train_replicas, str(tmp_path), begins[1], {}, {"save": path})
    per_rank = pool.run(goes_on[0], train_replicas, str(tmp_path), goes_on[1], {}, {"resume": path})
    expected = under_ddp({})[0]
    assert [len(one["logged"]) for one in per_rank] == [STEPS - 2] * goes_on[0]
    for one in per_rank:
        for name, value in expected["weights"].items():
            torch.testing.assert_close(one["weights"][name], value, rtol=0, atol=1e-9, msg=name)


def test_a_resumed_training_goes_on_bit_by_bit(pool, tmp_path):
    path = str(tmp_path / "midway.ckpt")
    inside = INSIDE["zero3"]
    model = {"dropout": 0.5}
    whole = pool.run(RANKS, train_replicas, str(tmp_path), inside, model, {"save": path})
    per_rank = pool.run(RANKS, train_replicas, str(tmp_path), inside, model, {"resume": path})
    for one, other in zip(per_rank, whole, strict=True):
        assert [step["own"] for step in one["logged"]] == [
            step["own"] for step in other["logged"][2:]
        ]
        assert all(
            torch.equal(one["weights"][name], value) for name, value in other["weights"].items()
        )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"replicas": 3}, "replicas=3 does not divide"),
        ({"batch_scope": "global"}, "batch_scope='global' does not"),
        ({"capture": "never"}, "replicas=2"),
    ],
)
def test_what_contradicts_replicas_is_refused(pool, tmp_path, options, reason):
    with pytest.raises(WorkerError, match=reason):
        pool.run(RANKS, train_replicas, str(tmp_path), options, {}, {})


def test_a_step_that_cannot_be_captured_is_refused(pool, tmp_path):
    with pytest.raises(WorkerError, match="replicas=2"):
        pool.run(RANKS, train_replicas, str(tmp_path), {}, {"reads": True}, {})


@pytest.mark.parametrize("apart", slow_but((0, 3), (3,)))
def test_rows_that_differ_within_a_replica_are_refused_at_any_step(pool, tmp_path, apart):
    with pytest.raises(WorkerError, match="which are to load the same rows"):
        pool.run(RANKS, train_replicas, str(tmp_path), INSIDE["tensor"], {"apart": apart}, {})


def test_workers_draw_alike_within_a_replica(pool, tmp_path):
    per_rank = pool.run(
        RANKS, train_replicas, str(tmp_path), INSIDE["tensor"], {"noise": True, "same": True}, {}
    )
    own = []
    for one in per_rank:
        own.append([step["own"] for step in one["logged"]])
    assert own[0] == own[1]
    assert own[2] == own[3]
    assert all(a != b for a, b in zip(own[0], own[2], strict=True))


@pytest.mark.parametrize("replicas", slow_but((1, 4), (4,)))
def test_one_replica_and_one_for_each_device(pool, tmp_path, replicas):
    """All devices are one device then, or each is one under DDP."""
    per_rank = pool.run(RANKS, train_replicas, str(tmp_path), {"replicas": replicas}, {}, {})
    alone = pool.run(replicas, train_ddp, str(tmp_path), {}, {})
    for rank, one in enumerate(per_rank):
        expected = alone[rank * replicas // RANKS]
        assert one["last"] == pytest.approx(expected["last"], abs=1e-9)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(one["weights"][name], value, rtol=0, atol=1e-9, msg=name)


class Freezing(Model):
    """Hooks that look at gradients, and change what trains and a number of the step."""

    factor = 1.0

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.factor = 1.0 + 0.1 * batch_idx
        if batch_idx == 2:
            self.head.bias.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("norm", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))


def test_hooks_see_the_mean_of_the_replicas_and_may_freeze(pool, tmp_path):
    options = {"unused": True, "module": "Freezing"}
    expected = pool.run(REPLICAS, train_ddp, str(tmp_path), {}, options)
    check(pool.run(RANKS, train_replicas, str(tmp_path), INSIDE["zero3"], {}, options), expected)
