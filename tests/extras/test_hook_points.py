"""The core trains without any extra, calls each where it is registered, and says which one is
missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from models import MLP
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy, ClusterSpec, extras, hook_points, make_plan
from alpa_strategy.errors import SetupError
from alpa_strategy.hook_points import HookPoint
from alpa_strategy.lightning.session import ModuleState, Session

POINTS = {name: point for name, point in vars(hook_points).items() if isinstance(point, HookPoint)}


@contextmanager
def switched_off() -> Iterator[None]:
    """Context without extras."""
    for point in POINTS.values():
        point.register(None)
    try:
        yield
    finally:
        extras.register()


@pytest.mark.parametrize("name", POINTS)
def test_every_hook_point_has_an_extra(name: str) -> None:
    assert POINTS[name].extra is not None


def test_an_extra_is_loaded_when_it_is_called() -> None:
    calls = []
    point = HookPoint[int]("counting")

    def load() -> int:
        calls.append("loaded")
        return 3

    point.register(load)
    assert calls == []
    assert point.extra == 3
    point.register(None)
    assert point.extra is None
    with pytest.raises(SetupError, match="a test needs the extra counting, which is switched off"):
        point.required("a test")


def trained(root: str, with_extras: bool, options: dict[str, Any]) -> tuple[list[Tensor], bool]:
    """The weights after three steps on this rank, and whether the steps ran eagerly."""
    torch.manual_seed(3)
    module = MLP(num_layers=3).double()
    data = TensorDataset(*module.example_batch(24, torch.Generator().manual_seed(4)))
    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, **options)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=3,
        precision="64-true",
        default_root_dir=root,
        **QUIET,
    )
    loader = DataLoader(data, batch_size=4)
    if with_extras:
        trainer.fit(module, loader)
    else:
        with switched_off():
            trainer.fit(module, loader)
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    assert strategy.plan is not None
    return weights, strategy.plan.is_eager


@pytest.mark.parametrize(
    "options", [{"parallel": "zero3"}, {"capture": "never"}], ids=["captured", "eager"]
)
def test_the_core_trains_without_extras(pool, tmp_path, options: dict[str, Any]) -> None:
    results = {}
    for with_extras in (True, False):
        root = str(tmp_path / str(with_extras))
        results[with_extras] = pool.run(2, trained, root, with_extras, options)
    for (expected, is_eager), (weights, _) in zip(results[True], results[False], strict=True):
        assert is_eager == ("capture" in options)
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def problem(root: str, options: dict[str, Any]) -> str:
    """The error of a training without extras."""
    try:
        trained(root, False, options)
    except SetupError as error:
        return error.problem
    return ""


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"capture": "submodules"}, 'capture="submodules" needs the extra planned submodules'),
        ({"capture": "never", "parallel": "zero3"}, "needs the extra eager sharding"),
        ({"capture": "never", "remat": ["net"]}, "needs the extra activation checkpointing"),
    ],
)
def test_an_option_that_needs_an_extra_says_so(
    pool, tmp_path, options: dict[str, Any], missing: str
) -> None:
    for text in pool.run(2, problem, str(tmp_path), options):
        assert missing in text


def test_a_module_without_memory_needs_an_extra() -> None:
    with switched_off():
        session = Session(make_job=None, checkpoints=None)
    session.deferred_init.begin(torch.device("cpu"))
    assert session.state is ModuleState.FULL
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(SetupError, match="needs the extra deferred init"):
        session.deferred_init.settle(None, module, {}, lambda _: True)


class Phased(MLP):
    """Its phases are read by an extra alone."""

    def iteration_phases(self, batch: Any) -> dict[str, Any]:
        raise AssertionError("read")


def test_phases_are_left_alone_without_their_extra() -> None:
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    module = Phased()
    with switched_off():
        plan = make_plan(module, module.example_batch(4), cluster)
    assert plan.phases == ()
    with pytest.raises(AssertionError, match="read"):
        make_plan(module, module.example_batch(4), cluster)
