"""What the strategy cannot do is one AlpaError on every rank, before anything was trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.nn
from conformance.bench import PLANS, RANKS, Bench, Net
from lightning.pytorch.plugins.precision import FSDPPrecision
from quiet import QUIET
from torch.distributed import all_reduce as all_reduce_by_name
from torchmetrics.utilities.distributed import gather_all_tensors
from worker_pool import WorkerError

from alpa_strategy import AlpaError, AlpaStrategy


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class ReadsValues(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


class ReadsMetrics(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.trainer.callback_metrics.get("val_loss", 1.0)
        return weight * super().training_step(batch, batch_idx)


class Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        return None


class Fills(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.table["last"] = batch[0]
        return super().training_step(batch, batch_idx)


SEEN: list[int] = []
COUNT = 0


class KeepsOutside(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        SEEN.append(1)
        return super().training_step(batch, batch_idx)


class CountsOutside(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global COUNT
        COUNT += 1
        return super().training_step(batch, batch_idx)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class LooksAtAll(Net):
    """An optimizer that scales by the norm of all gradients cannot work on some of them."""

    def configure_optimizers(self) -> Any:
        class Trusts(torch.optim.SGD):
            def step(self, closure: Callable[[], Any] | None = None) -> Any:
                loss = closure() if closure is not None else None
                for group in self.param_groups:
                    trained = [p for p in group["params"] if p.grad is not None]
                    norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
                    for p in trained:
                        p.data.sub_(group["lr"] * p.grad / norm)
                return loss

        return Trusts(self.parameters(), lr=0.1)


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.LazyLinear(3)


class Prints(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.print("in the step")
        return super().training_step(batch, batch_idx)


REFUSED = {
    Prints: "prints",
    Manual: "manual optimization",
    Skips: "returned None",
    ReadsValues: "tensor's value",
    ReadsMetrics: "trainer.callback_metrics",
    Iterates: "dataloader_iter",
    Fills: "table",
    KeepsOutside: "SEEN",
    CountsOutside: "COUNT",
    Frozen: "no trainable parameters",
    LooksAtAll: "Trusts",
    Lazy: "more.weight has no shape",
}


def fit(name: str, kind: str, root: str) -> tuple[str, int]:
    """The error's text, and how many steps were done."""
    bench = Bench(kind, root)
    module, trainer = (
        bench.module(globals()[name]),
        bench.trainer({**PLANS[kind], "capture": "require"}),
    )
    try:
        trainer.fit(module, bench.loader())
    except AlpaError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


@pytest.mark.parametrize("kind", ["alpa", "pipelined"])
@pytest.mark.parametrize("module", REFUSED, ids=lambda m: m.__name__)
def test_one_clear_error(pool, tmp_path, module: type[Net], kind: str) -> None:
    per_rank = pool.run(RANKS, fit, module.__name__, kind, str(tmp_path))
    for text, steps in per_rank:
        assert REFUSED[module] in text
        assert "What to do" in text
        assert steps == 0


def fit_two(root: str) -> None:
    bench = Bench("alpa", root)
    bench.trainer().fit(bench.module(Two), bench.loader())


def test_several_optimizers(pool, tmp_path) -> None:
    """Lightning itself wants manual optimization for them."""
    with pytest.raises(
        WorkerError, match="multiple optimizers is only supported with manual optimization"
    ):
        pool.run(RANKS, fit_two, str(tmp_path))


def contrastive(module: Net, z: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(z @ others.T, torch.arange(len(z)))


COMMUNICATE: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "self.all_gather": lambda module, z: module.all_gather(z, sync_grads=True).flatten(0, 1),
    "all_reduce": lambda module, z: dist.all_reduce(z) or z,
    "c10d.allreduce_": lambda module, z: all_reduce_by_name(z) or z,
    "all_gather": lambda module, z: torch.cat(dist.nn.functional.all_gather(z)),
    "all_gather_tensor": lambda module, z: functional_collectives.all_gather_tensor(
        z, 0, dist.group.WORLD
    ),
    "barrier": lambda module, z: module.trainer.strategy.barrier() or z,
    "broadcast_object_list": lambda module, z: module.trainer.strategy.broadcast(z),
    "reduce": lambda module, z: module.trainer.strategy.reduce(z),
    "gather": lambda module, z: torch.cat(gather_all_tensors(z)),
}


class Communicates(Net):
    how = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.net(batch[0])
        return contrastive(self, z, COMMUNICATE[self.how](self, z))


def texts_of_communication(root: str, ways: tuple[str, ...]) -> dict[str, str]:
    results = {}
    for how in ways:
        Communicates.how = how
        results[how], _ = fit("Communicates", "alpa", root)
    return results


# A method of the module, a collective that writes, one of torch's functions with a gradient.
QUICK_WAYS = ("self.all_gather", "all_reduce", "all_gather")


@pytest.mark.parametrize(
    "ways",
    [QUICK_WAYS, pytest.param(tuple(COMMUNICATE), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_communication_in_the_step(pool, tmp_path, ways: tuple[str, ...]) -> None:
    """It would sum, or gather, what is the global batch's already."""
    for found in pool.run(RANKS, texts_of_communication, str(tmp_path), ways):
        for how, text in found.items():
            assert how.rpartition(" ")[2] in text
            assert "is called in the step" in text
            assert "arange(len(z))" in text


@pytest.mark.parametrize("loop", ["fit", "validate"])
def test_precision_of_another_strategy(tmp_path, loop: str) -> None:
    plugin = FSDPPrecision("bf16-true")
    trainer = pl.Trainer(
        strategy=AlpaStrategy(), accelerator="cpu", devices=1, plugins=[plugin], **QUIET
    )
    with pytest.raises(AlpaError, match="FSDPPrecision replaces"):
        getattr(trainer, loop)(Net(), Bench("alpa", str(tmp_path)).loader())
