"""Half precision moves half the bytes: parameters are cast before they are gathered, gradients
summed as they come.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from covering import slow_but
from equality.harness import assert_same, record
from models import MODELS
from quiet import QUIET
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy
from alpa_strategy.comm import mesh

BULK = 64  # bytes: losses and counts are smaller, and stay as they are


class Counting:
    """A library of collectives that adds up the bytes of what it is given by kind and dtype."""

    counts: dict[str, int]

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        kind = next(
            (
                k
                for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
                if name.startswith(k)
            ),
            "",
        )
        if not kind:
            return found

        def call(tensor: Tensor, *rest: Any) -> Any:
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes >= BULK:
                Counting.counts[kind] = Counting.counts.get(kind, 0) + num_bytes
            return found(tensor, *rest)

        return call


class Samples(TensorDataset):
    """Samples that are taken a batch at a time: collating tens of thousands takes seconds."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self.tensors)


def loader_of(batch_size: int, *tensors: Tensor) -> DataLoader:
    return DataLoader(Samples(*tensors), batch_size, collate_fn=lambda batch: batch)


def bytes_of_steps(
    parallel: str, precision: str, folder: str, wide: bool = False
) -> tuple[dict[str, int], dict[bool, int]]:
    """Bytes of the collectives of two training steps after the first: by kind, and as planned,
    gathered or summed.
    """
    Counting.counts = {}
    init = mesh.AxisComm.__init__

    def counting(self: Any, size: int, index: int, group: Any, backend: Any, *more: Any) -> None:
        init(self, size, index, group, Counting(backend), *more)

    class Steps(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1:
                Counting.counts.clear()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.found = dict(Counting.counts)

    torch.manual_seed(0)
    model, steps = MODELS["mlp"](d_in=32, d_hidden=64, d_out=32, num_layers=3), Steps()
    mesh.AxisComm.__init__ = counting
    try:
        strategy = AlpaStrategy(
            parallel=parallel, cluster="pcie_8gpu", plan_dir=folder, fp32_reduction=wide
        )
        trainer = pl.Trainer(
            devices=2,
            accelerator="cpu",
            precision=precision,
            strategy=strategy,
            max_steps=3,
            callbacks=[steps],
            **QUIET,
        )
        trainer.fit(model, loader_of(32768, *model.example_batch(2 * 3 * 32768)))
    finally:
        mesh.AxisComm.__init__ = init
    planned = {True: 0, False: 0}
    for each in strategy.plan.collectives():
        planned[each.kind == "all_gather"] += (
            2 * each.num_bytes * (each.num_bytes >= BULK * each.count)
        )
    return steps.found, planned


@pytest.fixture(scope="module")
def counted(pool, tmp_path_factory):
    """`bytes_of_steps` on rank 0, each training once."""
    results = {}

    def get(
        parallel: str, precision: str, wide: bool = False
    ) -> tuple[dict[str, int], dict[bool, int]]:
        key = parallel, precision, wide
        if key not in results:
            folder = str(tmp_path_factory.mktemp("bytes"))
            results[key] = pool.run(2, bytes_of_steps, parallel, precision, folder, wide)[0]
        counts, planned = results[key]
        return dict(counts), planned

    return get


@pytest.mark.parametrize("parallel", slow_but(("zero1", "zero2", "zero3"), ("zero3",)))
def test_half_the_bytes_under_bf16(counted, parallel):
    (whole, planned_whole), (half, planned_half) = (
        counted(parallel, precision) for precision in ("32-true", "bf16-mixed")
    )
    assert len(whole) == 2  # gatherings, and sums of gradients
    for found, planned in ((whole, planned_whole), (half, planned_half)):
        gathered = found["all_gather"]
        assert planned[True] == pytest.approx(gathered, rel=0.02)
        assert planned[False] == pytest.approx(sum(found.values()) - gathered, rel=0.02)
    assert half == {kind: num_bytes // 2 for kind, num_bytes in whole.items()}


@pytest.mark.parametrize("parallel", slow_but(("zero1", "zero2", "zero3"), ("zero3",)))
def test_fp32_reduction_doubles_the_bytes_of_sums_alone(counted, parallel):
    half, wide = (counted(parallel, "bf16-mixed", wide)[0] for wide in (False, True))
    gathered = half.pop("all_gather")
    assert wide.pop("all_gather") == pytest.approx(
        gathered, rel=0.02
    )  # a bias may lie otherwise at another price
    assert half
    assert wide == {kind: 2 * num_bytes for kind, num_bytes in half.items()}


class Rows(pl.LightningModule):
    """The gradient of every weight is the sum of all rows: of one rank 1, of the other a bit that
    bf16's sum loses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def summed_rows(options: dict[str, Any], precision: str, folder: str) -> set[float]:
    """The elements of the gradient of `Rows`."""
    # samples of a rank: enough for the plan to gather weights and not samples
    count = 32768
    module, rows = Rows(), torch.zeros(2 * count, 64)
    rows[0], rows[1] = 1.0, 2.0**-9
    strategy = AlpaStrategy(
        cluster="pcie_8gpu",
        plan_dir=folder,
        verbose=False,
        master_weights=precision == "bf16-true",
        **options,
    )
    trainer = pl.Trainer(
        devices=2,
        accelerator="cpu",
        precision=precision,
        strategy=strategy,
        max_steps=1,
        max_epochs=-1,
        **QUIET,
    )
    trainer.fit(module, loader_of(count, rows))
    return set((-module.layer.weight.detach().double()).flatten().tolist())


@pytest.mark.parametrize(
    ("parallel", "precision"),
    slow_but(
        product(("data", "zero2", "zero3"), ("bf16-mixed", "bf16-true")),
        (("zero2", "bf16-true"), ("zero3", "bf16-mixed")),
    ),
)
def test_gradients_are_summed_in_fp32_and_not_rounded(pool, tmp_path, parallel, precision):
    options = {"parallel": parallel, "fp32_reduction": True}
    # The mean of the ranks' sums, as under DDP.
    assert pool.run(2, summed_rows, options, precision, str(tmp_path)) == [{(1 + 2.0**-9) / 2}] * 2
    written = pool.run(2, summed_rows, {**options, "capture": "never"}, precision, str(tmp_path))
    assert written == [{(1 + 2.0**-9) / 2}] * 2
    if parallel != "data":
        assert (
            pool.run(2, summed_rows, {"parallel": parallel}, precision, str(tmp_path))
            == [{0.5}] * 2
        )


@pytest.mark.parametrize(
    ("parallel", "is_compiled"),
    slow_but(product(("zero2", "zero3"), (False, True)), (("zero2", False),)),
)
def test_results_are_those_of_one_device(pool, tmp_path, parallel, is_compiled):
    kwargs = {"num_layers": 2, "tied": True}
    reference = pool.run(
        1, record, "gpt", kwargs, None, 3, 2, None, 1, str(tmp_path), "bf16-mixed", init_group=False
    )[0]
    strategy = {
        "parallel": parallel,
        "cluster": "pcie_8gpu",
        "plan_dir": str(tmp_path),
        "compile": {"backend": "aot_eager"} if is_compiled else False,
    }
    runs = pool.run(2, record, "gpt", kwargs, strategy, 3, 2, None, 1, str(tmp_path), "bf16-mixed")
    for mine in runs:
        losses = (torch.tensor(run["losses"]) for run in (mine, reference))
        torch.testing.assert_close(*losses, rtol=5e-3, atol=0)
        for name, expected in reference["gradients"][0].items():
            error = (mine["gradients"][0][name] - expected).norm() / expected.norm().clamp(min=1e-6)
            assert error < 0.03, (name, error)
    assert_same(runs[1], runs[0], 0.0)
