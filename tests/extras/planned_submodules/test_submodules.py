"""Steps that no graph can hold, whose submodules are planned: DDP's numbers on the same ranks."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from covering import slow_but
from quiet import QUIET
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy
from alpa_strategy.errors import OptionError

# rows of all ranks in a step
WIDTH = 8
LENGTH = 5
CLASSES = 12
ROWS = 8
STEPS = 5
# Programs are divided over all ranks.
TENSOR = {"parallel": "tensor"}
# Over two of four ranks.
TWO = {"logical_mesh": (2, 2), "parallel": ("data", "tensor")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Program(pl.LightningModule):
    """Reads its loss, logs as users do, and has a metric, a random number and a BatchNorm of its
    own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.net = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, label = batch
        x = self.norm(self.net(self.embed(tokens)).mean(1))
        loss = F.cross_entropy(self.head(x + 0.1 * torch.randn_like(x)), label)
        if loss.item() > 2.0:
            loss = 2.0 * loss
        self.seen.update(torch.ones_like(label).sum())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("sum", loss, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


class Positions(nn.Module):
    """Two of its results are the same on all ranks, and get a gradient from each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + self.table, self.table.tanh(), self.table.square().mean()


class Matches(Program):
    """Two encoders, whose outputs are matched by code that no graph holds (the Hungarian method),
    across all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.positions = Positions()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, table, size = self.positions(self.embed(batch[0]))
        x = x.mean(1)
        a, b = self.net(x), self.other(x)
        cost = torch.cdist(a, b)
        rows, columns = linear_sum_assignment(cost.detach().numpy())
        everyone = self.all_gather(b, sync_grads=True).flatten(0, -2)
        loss = cost[rows, columns].mean() + (a @ everyone.T).logsumexp(1).mean()
        loss = loss + (x @ table.T).square().mean() + x.detach().norm() * size
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Masked(Program):
    """Rows by data in the loss, a weight that a planned module shares with code outside, a penalty
    on all weights.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch[0]
        h = self.net(self.embed(tokens))
        mask = tokens % 3 == 0
        loss = F.cross_entropy(F.linear(h[mask], self.embed.weight), tokens[mask])
        if batch_idx == 3:
            loss = loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters())
        # Other shapes than the first: on all ranks, and on the last one.
        if batch_idx == 2:
            loss = loss + self.net(self.embed(tokens[:, :2])).mean()
        if batch_idx == 4:
            is_last = self.global_rank == self.trainer.world_size - 1
            loss = loss + self.net(self.embed(tokens[:, : 2 if is_last else LENGTH])).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Gan(Program):
    """Its own backward passes and two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.LeakyReLU(0.2), nn.Linear(2 * WIDTH, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_net, of_judge = self.optimizers()
        real = F.one_hot(batch[0][:, 0], WIDTH + 8)[:, :WIDTH].to(torch.float64)
        z = torch.randn_like(real)
        self.toggle_optimizer(of_net)
        loss = F.softplus(-self.judge(self.net(z))).mean()
        of_net.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_net, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        of_net.step()
        self.untoggle_optimizer(of_net)
        self.toggle_optimizer(of_judge)
        other = (
            F.softplus(-self.judge(real)).mean()
            + F.softplus(self.judge(self.net(z).detach())).mean()
        )
        of_judge.zero_grad()
        if isinstance(self.trainer.strategy, AlpaStrategy):
            other.backward()
        else:  # which DDP would not see
            self.manual_backward(other)
        of_judge.step()
        self.untoggle_optimizer(of_judge)
        self.log("train_loss", loss, sync_dist=True)
        self.log("other", other, sync_dist=True)

    def configure_optimizers(self) -> Any:
        net = [
            *self.net.parameters(),
            *self.embed.parameters(),
            *self.norm.parameters(),
            *self.head.parameters(),
        ]
        return torch.optim.AdamW(net, lr=0.02, eps=1e-3), torch.optim.SGD(
            self.judge.parameters(), lr=0.1
        )


class Penalized(Gan):
    """A gradient penalty (backward of a backward), through the planned judge."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_net, of_judge = self.optimizers()
        x = F.one_hot(batch[0][:, 0], WIDTH + 8)[:, :WIDTH].to(torch.float64).requires_grad_(True)
        score = self.judge(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = score.mean() + ((gradient.norm(dim=1) - 1.0) ** 2).mean()
        of_judge.zero_grad()
        self.manual_backward(loss)
        of_judge.step()
        other = -self.judge(self.net(x.detach())).mean()
        of_net.zero_grad()
        self.manual_backward(other)
        of_net.step()
        self.log("train_loss", loss, sync_dist=True)
        self.log("other", other, sync_dist=True)


class Scaled(nn.Module):
    """Its call takes a number that its Python reads, by name, and what no program gives: an
    object.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block, self.factor = Block(), 1.0

    def forward(self, x: Tensor, *, times: int, owner: Any = None) -> Any:
        for _ in range(times):
            x = self.block(x) * self.factor
        return Pair(x, owner)


class Pair:
    def __init__(self, x: Tensor, owner: Any) -> None:
        self.x, self.owner = x, owner


class Moments(nn.Module):
    """Takes its rank's mean away, and puts it back in another call, as RevIN does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, is_back: bool = False, act: Any = torch.tanh) -> Tensor:
        if not is_back:
            self.mean = x.mean((0, 1)).detach()
        return act(x / self.scale + self.mean if is_back else (x - self.mean) * self.scale)


class Unruly(Program):
    """Forwards that are recomputed in the backward, take numbers and functions, return objects,
    have hooks, remember tensors of their rank, are frozen later, and an evaluation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.hooked = Scaled(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.hooked[0].register_forward_hook(lambda module, given, output: 2.0 * output)
        self.moments = Moments()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scaled.factor = 1.0 if batch_idx < 3 else 0.5
        h = checkpoint(self.net, self.embed(batch[0]), use_reentrant=False)
        h = self.moments(self.moments(h, act=lambda x: x.clone()))
        h = self.hooked(self.scaled(h, times=1 + batch_idx % 2).x)
        h = self.moments(h, is_back=True)
        self.out = self.head(h).mean(1)
        loss = F.cross_entropy(self.out, batch[1])
        self.log("train_loss", float(loss), sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.embed.requires_grad_(self.global_step < 3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(
            "val_loss", self.head(self.net(self.embed(batch[0]))).square().mean(), sync_dist=True
        )


class Sparse(Program):
    """A bag of words, as many as this rank has, with gradients of the words that occur."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(CLASSES, WIDTH, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words = batch[0].flatten()[: 3 + self.global_rank]
        bags = self.bag(words, torch.tensor([0, 1]))
        loss = F.cross_entropy(self.head(self.net(bags)), batch[1][:2])
        self.log("train_loss", float(loss), sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # Programs make dense gradients; in the first step nothing is planned yet.
        if self.global_step == 0:
            indices = self.bag.weight.grad.coalesce().indices()
            self.log("rows", float(indices.numel()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Changes(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            with torch.no_grad():
                self.net[0].up.weight.data.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class Branches(Program):
    """Only some ranks call a planned submodule."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and self.global_rank == 1:
            loss = loss + self.net(self.embed(batch[0])).mean()
        return loss


class Ignores(Matches):
    """The loss of one rank does not depend on one of two planned submodules."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.embed(batch[0]).mean(1)
        a = self.net(x).square().mean()
        b = self.other(x).square().mean()
        is_larger = b.item() > a.item()
        self.log("is_larger", float(is_larger))
        if batch_idx == 3 and self.global_rank == 1:
            return a
        return a + b


class Looks(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx == 2:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.modes: dict[str, str] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if getattr(trainer.strategy, "run", None) is not None:
            plans = trainer.strategy.plan.stages[0].parameter_plans
            self.modes = {name: str(plan.modes[0]) for name, plan in plans.items()}


def train(
    name: str, root: str, options: dict[str, Any] | None, loaders: int, arguments: dict[str, Any]
) -> dict:
    """Return this rank's outcome of a training with `loaders` loaders; no options: under DDP."""
    program = {
        each.__name__: each
        for each in (
            Program,
            Matches,
            Masked,
            Gan,
            Penalized,
            Unruly,
            Sparse,
            Changes,
            Looks,
            Branches,
            Ignores,
        )
    }[name]
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    module = program()
    torch.set_default_dtype(torch.float32)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CLASSES, (STEPS * ROWS, LENGTH), generator=generator)
    own = torch.arange(STEPS * ROWS).view(STEPS, loaders, -1)[:, rank * loaders // ranks].tolist()
    loader = DataLoader(TensorDataset(tokens, tokens[:, 1]), batch_sampler=own)
    watch = Watch()
    strategy: Any = (
        "ddp_find_unused_parameters_true"
        if options is None
        else AlpaStrategy(cluster="pcie_8gpu", verbose=False, **options)
    )
    path, save = arguments.get("path"), arguments.get("save", False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        precision="64-true",
        callbacks=[watch],
        max_epochs=1,
        max_steps=2 if save else -1,
        use_distributed_sampler=False,
        default_root_dir=root,
        accumulate_grad_batches=arguments.get("accumulate", 1),
        **QUIET,
    )
    val = DataLoader(TensorDataset(tokens[rank::ranks]), batch_size=4)
    val_loader = val if name == "Unruly" else None
    trainer.fit(module, loader, val_loader, ckpt_path=None if save else path)
    if save:
        trainer.save_checkpoint(path)
    return {
        "logged": watch.logged,
        "modes": watch.modes,
        "state": {key: value.detach().clone() for key, value in module.state_dict().items()},
    }


def assert_same(found: list[dict], expected: list[dict]) -> None:
    for rank, one in enumerate(found):
        of_loader = expected[rank * len(expected) // len(found)]
        assert len(one["logged"]) == len(of_loader["logged"])
        for mine, theirs in zip(one["logged"], of_loader["logged"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)
        for key, value in of_loader["state"].items():
            torch.testing.assert_close(one["state"][key], value, rtol=0, atol=1e-9, msg=key)
    for key, value in found[0]["state"].items():
        if "norm.running" not in key:  # this rank's own, as under DDP
            assert all(torch.equal(one["state"][key], value) for one in found), key


# By default each is divided over two ranks, the first over two of four.
PROGRAMS = ("Program", "Matches", "Masked", "Gan", "Penalized", "Unruly", "Sparse")


@pytest.mark.parametrize("name", slow_but(PROGRAMS, PROGRAMS[1:]))
def test_programs_divided_over_two_ranks(pool, tmp_path, name):
    per_rank = pool.run(2, train, name, str(tmp_path), TENSOR, 2, {})
    assert_same(per_rank, pool.run(2, train, name, str(tmp_path), None, 2, {}))
    assert {
        mode[0]
        for key, mode in per_rank[0]["modes"].items()
        if key.startswith("net") and "weight" in key
    } >= {"S"}


@pytest.mark.parametrize("name", slow_but(PROGRAMS, PROGRAMS[:1]))
def test_programs_divided_over_two_of_four_ranks(pool, tmp_path, name):
    per_rank = pool.run(4, train, name, str(tmp_path), TWO, 4, {})
    assert_same(per_rank, pool.run(4, train, name, str(tmp_path), None, 4, {}))


@pytest.mark.parametrize(
    ("options", "loaders"),
    [
        ({"capture": "submodules"}, 2),  # a replica on each device
        (
            {
                "capture": "submodules",
                "batch_scope": "replica",
                "replicas": 1,
                "placements": {"net.*weight": "S0"},
            },
            1,
        ),
        (
            {"capture": "submodules", "batch_scope": "global", "logical_mesh": (2,), "remat": True},
            1,
        ),
    ],
)
def test_whose_rows_a_replica_has(pool, tmp_path, options, loaders):
    per_rank = pool.run(2, train, "Program", str(tmp_path), options, loaders, {"accumulate": 2})
    assert_same(
        per_rank,
        pool.run(loaders, train, "Program", str(tmp_path), None, loaders, {"accumulate": 2}),
    )


def test_a_resumed_training_goes_on(pool, tmp_path):
    path = str(tmp_path / "midway.ckpt")
    whole = pool.run(2, train, "Masked", str(tmp_path), TENSOR, 2, {})
    pool.run(2, train, "Masked", str(tmp_path), TENSOR, 2, {"path": path, "save": True})
    assert_same(
        pool.run(2, train, "Masked", str(tmp_path), TENSOR, 2, {"path": path}),
        [{**one, "logged": one["logged"][2:]} for one in whole],
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_microbatches": 2}, "micro-batches"),
        ({"parallel": "zero2"}, "parallel='zero2' is asked for"),
        ({"placements": {"*": "G0"}}, "gathered once a step"),
        ({"logical_mesh": (2, 2), "parallel": ("tensor", "tensor")}, "is asked for"),
        ({"logical_mesh": (2, 2), "batch_scope": "rank"}, "batch_scope='rank' is asked for"),
    ],
)
def test_what_cannot_be_met_is_refused_at_once(options, reason):
    with pytest.raises(OptionError, match=reason):
        AlpaStrategy(capture="submodules", **options)


@pytest.mark.parametrize("name", ["Changes", "Looks"])
def test_code_that_means_parts_for_the_whole_is_an_error(pool, tmp_path, name):
    with pytest.raises(WorkerError, match="of which each rank has a"):
        pool.run(2, train, name, str(tmp_path), TENSOR, 2, {})


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("Branches", "rank 0: the end of the step; rank 1: the forward of (embed|net)"),
        ("Ignores", "rank 0: the backward of other; rank 1: the backward of net"),
    ],
)
def test_ranks_that_need_each_other_for_different_things_end_with_one_error(
    pool, tmp_path, name, calls
):
    with pytest.raises(WorkerError, match=calls):
        pool.run(2, train, name, str(tmp_path), TENSOR, 2, {})
