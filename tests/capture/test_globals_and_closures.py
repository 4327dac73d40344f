"""Globals and closures that the step reads are guarded; a step that changes any is refused."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import random
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import capture.outside_settings as settings
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from capture.outside_settings import CACHE, Defaults
from torch import nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.guards import changed_value

WEIGHT = 0.5


NOT_READ = 7


SCHEDULE = {"start": [1.0, 2.0]}


TABLE = np.array([1.0, 2.0])


MASK = torch.ones(4)


CONFIG = SimpleNamespace(depth=2)


COUNT = 0


SEEN: list[float] = []


RANDOM = np.random.default_rng(3)


STREAM = itertools.count(1)


def scaled(loss: torch.Tensor) -> torch.Tensor:
    return WEIGHT * loss * SCHEDULE["start"][0]


class Model(pl.LightningModule):
    """One linear layer; the loss depends on what `change` says."""

    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.change = change

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        return loss if self.change is None else self.change(self, loss)


class ReadsGlobals(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch * MASK, batch_idx)
        return (
            scaled(loss) * settings.TEMPERATURE * Defaults.scale * float(TABLE[0])
            + CONFIG.depth * math.pi
        )


class AddsAgain(ReadsGlobals):
    """What the base class reads counts too."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 1


def changed(model: pl.LightningModule, step: Any) -> str | None:
    return changed_value(step.attributes)


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "WEIGHT": (globals(), "WEIGHT", 0.7),
    "SCHEDULE": (SCHEDULE["start"], 0, 9.0),
    "TABLE": (TABLE, 0, 3.0),
    "MASK": (MASK, 0, 2.0),
    "CONFIG": (vars(CONFIG), "depth", 3),
    "settings.TEMPERATURE": (vars(settings), "TEMPERATURE", 1.0),
}


@pytest.mark.parametrize("kind", [ReadsGlobals, AddsAgain])
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_step_reads_is_guarded(kind: type[Model], name: str) -> None:
    model = kind()
    step = capture_step(model, torch.randn(6, 4))
    assert changed(model, step) is None
    owner, key, new = CHANGES[name]
    old = owner[key].clone() if isinstance(owner, torch.Tensor) else owner[key]
    try:
        owner[key] = new
        assert name.rpartition(".")[2] in str(changed(model, step))
    finally:
        owner[key] = old


def test_class_attributes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ReadsGlobals()
    step = capture_step(model, torch.randn(6, 4))
    monkeypatch.setattr(Defaults, "other", 6.0)
    monkeypatch.setattr(settings, "UNUSED", 6.0)
    assert changed(model, step) is None
    monkeypatch.setattr(Defaults, "scale", 6.0)
    assert "Defaults.scale" in str(changed(model, step))


def test_what_it_does_not_read_is_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ReadsGlobals()
    step = capture_step(model, torch.randn(6, 4))
    monkeypatch.setitem(globals(), "NOT_READ", 8)
    assert changed(model, step) is None


def test_closures_are_guarded() -> None:
    factor = 2.0

    class Closes(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * factor

    model = Closes()
    step = capture_step(model, torch.randn(6, 4))
    assert changed(model, step) is None
    factor = 3.0
    assert "factor" in str(changed(model, step))


def weighted(
    loss: torch.Tensor,
    state: dict[str, float] = {"weight": 2.0},  # noqa: B006
    *,
    power: int = 1,
) -> torch.Tensor:
    return loss**power * state["weight"]


def test_defaults_of_functions_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict among them is one object for all calls."""

    class Weighted(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return weighted(super().training_step(batch, batch_idx))

    model = Weighted()
    step = capture_step(model, torch.randn(6, 4))
    assert changed(model, step) is None
    monkeypatch.setitem(weighted.__defaults__[0], "weight", 3.0)  # type: ignore[index]
    assert "__defaults__ of weighted" in str(changed(model, step))


class Schedule:
    value = 1.0

    @staticmethod
    def now() -> float:
        return Schedule.value


def test_functions_of_classes_and_of_imported_files_are_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Follows(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return settings.cooled(super().training_step(batch, batch_idx)) * Schedule.now()

    model = Follows()
    step = capture_step(model, torch.randn(6, 4))
    assert changed(model, step) is None
    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "value", 2.0)
        assert "Schedule.value" in str(changed(model, step))
    monkeypatch.setattr(settings, "COOLING", 2.0)
    assert "COOLING" in str(changed(model, step))


class Losses:
    class Ranking:
        scale = 1.0

    weight = 1.0

    @classmethod
    def now(cls) -> float:
        return cls.weight


def of_a_class(loss: torch.Tensor, source: type = Losses) -> torch.Tensor:
    return loss * source.weight


@pytest.mark.parametrize(
    ("read", "owner", "name"),
    [
        (lambda model, loss: of_a_class(loss), Losses, "weight"),
        (lambda model, loss: loss * Losses.Ranking.scale, Losses.Ranking, "scale"),
        (lambda model, loss: loss * Losses.now(), Losses, "weight"),
        (lambda model, loss: loss * type(model).gamma, Model, "gamma"),
    ],
    ids=["in a default", "in a class", "by a class method", "of the module's class"],
)
def test_attributes_of_classes_are_guarded(monkeypatch, read: Any, owner: type, name: str) -> None:
    monkeypatch.setattr(Model, "gamma", 1.0, raising=False)
    model = Model(read)
    step = capture_step(model, torch.randn(6, 4))
    assert changed(model, step) is None
    monkeypatch.setattr(owner, name, 0.5)
    assert name in str(changed(model, step))


SETTING: ContextVar[float] = ContextVar("SETTING", default=1.0)


def test_the_environment_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(model: Any, loss: torch.Tensor) -> torch.Tensor:
        return (
            loss
            * float(os.environ.get("SCALE_OF_TEST", "1"))
            * (2 if "IS_TEST" in os.environ else 1)
        )

    model = Model(reads)
    for name, value in (("SCALE_OF_TEST", "3"), ("IS_TEST", ""), ("SCALE_OF_TEST", "4")):
        step = capture_step(model, torch.randn(6, 4))
        assert changed(model, step) is None
        monkeypatch.setenv(name, value)
        assert changed(model, step) == f"os.environ[{name!r}]"


def test_globals_of_functions_in_attributes_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda model, loss: loss * WEIGHT)
    step = capture_step(model, torch.randn(6, 4))
    assert changed(model, step) is None
    monkeypatch.setitem(globals(), "WEIGHT", 0.7)
    assert "WEIGHT" in str(changed(model, step))


def test_context_variables_are_guarded() -> None:
    model = Model(lambda model, loss: loss * SETTING.get())
    step = capture_step(model, torch.randn(6, 4))
    assert changed(model, step) is None
    token = SETTING.set(2.0)
    assert "SETTING" in str(changed(model, step))
    SETTING.reset(token)
    assert changed(model, step) is None


def counted(loss: torch.Tensor) -> torch.Tensor:
    counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
    return loss


def sets_a_global(model: Any, loss: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return loss


def fills_a_list(model: Any, loss: torch.Tensor) -> torch.Tensor:
    SEEN.append(1.0)
    return loss


def fills_a_dict(model: Any, loss: torch.Tensor) -> torch.Tensor:
    SCHEDULE[2] = loss
    return loss


def fills_an_object(model: Any, loss: torch.Tensor) -> torch.Tensor:
    CONFIG.depth += 1
    return loss


def draws(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * RANDOM.random()


def draws_from_its_own(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * model.rng.random()


def takes_the_next(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * next(STREAM)


def takes_its_own_next(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * next(model.stream) * next(iter([1.0]))


def writes(model: Any, loss: torch.Tensor) -> torch.Tensor:
    with open("/nowhere/steps.txt", "a") as file:
        file.write("a step")
    return loss


def reads_a_file(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * len(Path(__file__).read_text())


def counts_calls(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return counted(loss)


def takes_the_time(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * time.time()


def takes_times_by_name(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * perf_counter()


def draws_of_the_system(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * (uuid.uuid4().int % 7)


def seeds_by_the_system(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * np.random.default_rng().random()


def freezes(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.layer.requires_grad_(False)
    return loss


def freezes_by_flag(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.layer.bias.requires_grad = False
    return loss


def seeds(model: Any, loss: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return loss * torch.rand(())


def sets_the_environment(model: Any, loss: torch.Tensor) -> torch.Tensor:
    os.environ["SEEN_BY_TEST"] = "1"
    return loss


def changes_a_class(model: Any, loss: torch.Tensor) -> torch.Tensor:
    Defaults.scale *= 0.5
    return loss


def counts_in_a_default(
    model: Any,
    loss: torch.Tensor,
    state: dict[str, int] = {"calls": 0},  # noqa: B006
) -> torch.Tensor:
    state["calls"] += 1
    return loss * state["calls"]


def halves_an_array(model: Any, loss: torch.Tensor) -> torch.Tensor:
    TABLE[0] *= 0.5
    return loss * float(TABLE[0])


def counting() -> Callable[[Any, torch.Tensor], torch.Tensor]:
    calls = 0

    def counts_in_a_closure(model: Any, loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss * calls

    return counts_in_a_closure


def counts_in_its_class(model: Any, loss: torch.Tensor) -> torch.Tensor:
    type(model).calls = getattr(type(model), "calls", 0) + 1
    return loss * type(model).calls


counts_in_a_closure = counting()


REFUSED = {
    counts_in_a_closure: "calls of counting",
    counts_in_its_class: "Model.calls",
    counts_in_a_default: "defaults of counts_in_a_default",
    halves_an_array: "TABLE",
    sets_a_global: "COUNT",
    fills_a_list: "SEEN",
    fills_a_dict: "SCHEDULE",
    fills_an_object: "CONFIG",
    draws: "RANDOM",
    draws_from_its_own: "rng",
    takes_the_next: "next of an iterator.*next.STREAM",
    takes_its_own_next: "next of an iterator.*next.model.stream",
    writes: "nowhere",
    reads_a_file: "open",
    counts_calls: "counted",
    freezes: "freezes or unfreezes",
    freezes_by_flag: "freezes or unfreezes",
    seeds: "calls manual_seed",
    sets_the_environment: "calls __setitem__",
    changes_a_class: "Defaults",
    takes_the_time: "calls time .*time.time",
    takes_times_by_name: "calls perf_counter",
    draws_of_the_system: "calls urandom .*uuid4",
    seeds_by_the_system: "calls urandom .*default_rng",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_step_that_changes_something_outside_is_refused_and_undone(change: Any) -> None:
    model = Model(change)
    model.rng, model.stream = random.Random(1), itertools.count()
    state = (
        RANDOM.bit_generator.state["state"],
        model.rng.getstate(),
        repr(STREAM),
        repr(model.stream),
    )
    with pytest.raises(CaptureError, match=REFUSED[change]):
        capture_step(model, torch.randn(6, 4))
    assert (COUNT, SEEN, SCHEDULE, CONFIG.depth) == (0, [], {"start": [1.0, 2.0]}, 2)
    assert counts_in_a_closure.__closure__[0].cell_contents == 0
    assert not hasattr(Model, "calls")
    assert (TABLE.tolist(), counts_in_a_default.__defaults__) == ([1.0, 2.0], ({"calls": 0},))
    assert state == (
        RANDOM.bit_generator.state["state"],
        model.rng.getstate(),
        repr(STREAM),
        repr(model.stream),
    )


@functools.lru_cache
def positions(size: int) -> torch.Tensor:
    return torch.arange(float(size))


def test_a_cached_function_keeps_no_fake_tensors() -> None:
    step = capture_step(Model(lambda model, loss: loss * positions(4).sum()), torch.randn(6, 4))
    assert "arange" in " ".join(op.call.target_name for op in step.ops)
    assert positions(4).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_cached_function_of_a_closure_keeps_no_fake_tensors() -> None:
    cached = functools.lru_cache(positions.__wrapped__)
    capture_step(Model(lambda model, loss: loss * cached(4).sum()), torch.randn(6, 4))
    assert cached(4).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_step_that_changes_a_closure_is_refused() -> None:
    seen: list[Any] = []

    class Keeps(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            seen.append(batch)
            return super().training_step(batch, batch_idx)

    with pytest.raises(CaptureError, match="seen"):
        capture_step(Keeps(), torch.randn(6, 4))
    assert seen == []


class FillsACache(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if "scale" not in CACHE.values:
            CACHE.values["scale"] = torch.full((), 2.0)
        return loss * CACHE.values["scale"]


def test_a_cache_in_an_object_keeps_no_tensor_of_the_capture() -> None:
    capture_step(FillsACache(), torch.randn(4, 4))
    assert CACHE.values == {}


def test_lazy_globals_of_installed_packages_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As matplotlib.pyplot its backend, where a plot is named in the module's code."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "lazy_scale.py").write_text(LAZY)
    monkeypatch.syspath_prepend(str(site))
    lazy = importlib.import_module("lazy_scale")
    capture_step(Model(lambda model, loss: lazy.scaled(loss)), torch.randn(6, 4))
    assert lazy._scale is None
    with pytest.raises(CaptureError, match="_count"):
        capture_step(Model(lambda model, loss: lazy.annealed(loss)), torch.randn(6, 4))


LAZY = """
_scale, _count = None, 0


def scaled(x):
    global _scale
    _scale = _scale or 2.0
    return _scale * x


def annealed(x):
    global _count
    _count += 1
    return x / _count
"""
