"""Attributes that the step reads are guarded: a change of any of them is noticed, other attributes
may change.
"""

from __future__ import annotations

import gc
import itertools
import logging
import re
import sys
import time
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from models import GPT
from torch import Tensor, nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.capture.python_reads import _watched_classes
from alpa_strategy.capture.python_state import patched
from alpa_strategy.errors import CaptureError
from alpa_strategy.ir.guards import changed_value
from alpa_strategy.ir.run_step import run_step


@dataclass
class Config:
    scale: float = 2.0


class Settings:
    def __init__(self) -> None:
        self.shift, self.names = 0.0, ["a"]

    @cached_property
    def sign(self) -> float:
        return 1.0


class Schedule:
    """No record: it holds a function."""

    def __init__(self) -> None:
        self.step = lambda: 0
        self.value = 0.5
        self.unread = 0

    def now(self) -> float:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.1)
        self.factor = 3

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)) * self.factor


class Reader(LightningModule):
    """Its loss depends on attributes of every kind."""

    gamma = 0.5

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.beta, self.unread = beta, 1
        self.block = Block()
        self.weights = {"a": 1.0, "b": [2.0, 3.0]}
        self.config = Config()
        self.space = types.SimpleNamespace(power=2)
        self.settings = Settings()
        self.tokens, self.counts = list(range(2000)), dict.fromkeys(range(2000), 1.0)
        self.prior = np.ones(30_000)
        self.mask, self.masks = torch.ones(4), [torch.ones(4)]
        self.function: Callable[[Tensor], Tensor] = torch.relu
        self.register_buffer("offset", torch.zeros(4))
        self.schedule = Schedule()
        self.kept = {"a": [Schedule()]}
        self.slotted = Slotted()
        self.scaled = partial(lambda schedule: schedule.now(), Schedule())
        self.added = nn.ModuleList()
        self.last, self.raised = deque([1.0], maxlen=1), partial(pow, exp=2)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.numbers, self.under = array("d", [1.0]), {"scale": 1.0}
        self.shown = types.MappingProxyType(self.under)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.function(self.block(batch)) * self.mask * self.masks[0] + self.offset
        scale = (
            self.weights["a"]
            + self.weights["b"][0]
            + self.config.scale
            + self.gamma
            + self.hparams.beta
        )
        h = h * self.settings.sign + self.settings.shift
        for layer in self.added:
            h = layer(h)
        h = h / self.tokens[1] * self.schedule.now() * self.kept["a"][0].value * self.slotted.value
        h = h * self.scaled() * self.raised(1.0) * self.last[0] * self.optimizer.defaults["lr"]
        h = h * self.numbers[0] * self.shown["scale"] * self.counts[7] * float(self.prior[20_001])
        scale = scale * getattr(self, "later", 1.0) * getattr(self.block, "later", 1.0)
        scale = (
            scale * getattr(self.block.linear, "later", 1.0) * getattr(self.schedule, "later", 1.0)
        )
        return self.beta * h.pow(self.space.power).sum() * scale


def changes() -> dict[str, tuple[str, Callable[[Reader], Any]]]:
    """Name of the attribute that must be reported -> a change of it."""
    return {
        "number": ("beta", lambda m: setattr(m, "beta", 0.2)),
        "type of a number": ("block.factor", lambda m: setattr(m.block, "factor", 3.0)),
        "None": ("beta", lambda m: setattr(m, "beta", None)),
        "missing": ("beta", lambda m: delattr(m, "beta")),
        "class attribute": ("gamma", lambda m: setattr(m, "gamma", 0.7)),
        "dropout": ("block.dropout.p", lambda m: setattr(m.block.dropout, "p", 0.0)),
        "eval": ("block.dropout.training", lambda m: m.block.eval()),
        "hyperparameter": ("_hparams", lambda m: m.hparams.update(beta=0.3)),
        "dict": ("weights", lambda m: m.weights.update(a=2.0)),
        "large list": ("tokens", lambda m: m.tokens.append(1)),
        "item of a large list": ("tokens", lambda m: m.tokens.__setitem__(7, -1)),
        "item of a large dict": ("counts", lambda m: m.counts.update({7: 2.0})),
        "large array": ("prior", lambda m: m.prior.__setitem__(20_001, 2.0)),
        "list in dict": ("weights", lambda m: m.weights["b"].append(1.0)),
        "dataclass": ("config", lambda m: setattr(m.config, "scale", 3.0)),
        "namespace": ("space", lambda m: setattr(m.space, "power", 3)),
        "object": ("settings", lambda m: setattr(m.settings, "shift", 1.0)),
        "list of an object": ("settings", lambda m: m.settings.names.append("b")),
        "object with functions": ("Schedule.value", lambda m: setattr(m.schedule, "value", 1.0)),
        "object in containers": ("Schedule.value", lambda m: setattr(m.kept["a"][0], "value", 1.0)),
        "object of a partial": (
            "Schedule.value",
            lambda m: setattr(m.scaled.args[0], "value", 1.0),
        ),
        "keywords of a partial": ("raised", lambda m: m.raised.keywords.update(exp=3)),
        "slots": ("Slotted.value", lambda m: setattr(m.slotted, "value", 2.0)),
        "deque": ("last", lambda m: m.last.append(2.0)),
        "array": ("numbers", lambda m: m.numbers.__setitem__(0, 2.0)),
        "what a proxy shows": ("shown", lambda m: m.under.update(scale=2.0)),
        "optimizer": ("SGD.defaults", lambda m: m.optimizer.defaults.update(lr=0.2)),
        "set later": ("later", lambda m: setattr(m, "later", 2.0)),
        "set later in a block": ("block.later", lambda m: setattr(m.block, "later", 2.0)),
        "set later in a layer": (
            "block.linear.later",
            lambda m: setattr(m.block.linear, "later", 2.0),
        ),
        "set later in an object": ("Schedule.later", lambda m: setattr(m.schedule, "later", 2.0)),
        "tensor": ("mask", lambda m: setattr(m, "mask", torch.zeros(4))),
        "tensor in place": ("mask", lambda m: m.mask.zero_()),
        "tensor in a list": ("masks", lambda m: m.masks[0].zero_()),
        "list of tensors": ("masks", lambda m: m.masks.clear()),
        "function": ("function", lambda m: setattr(m, "function", torch.tanh)),
        "submodule": ("_modules", lambda m: setattr(m, "block", Block())),
        "first of a list": ("added._modules", lambda m: m.added.append(Block())),
        "inner submodule": ("block._modules", lambda m: setattr(m.block, "dropout", nn.Identity())),
    }


@pytest.mark.parametrize("change", changes())
def test_a_change_of_what_the_step_read_is_noticed(change: str) -> None:
    module = Reader()
    step = capture_step(module, torch.randn(6, 4))
    assert changed_value(step.attributes) is None
    name, act = changes()[change]
    act(module)
    assert changed_value(step.attributes) == name


def test_a_class_attribute_that_is_set_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Reader()
    step = capture_step(module, torch.randn(6, 4))
    monkeypatch.setattr(Reader, "later", 2.0, raising=False)
    assert changed_value(step.attributes) == "later"


@pytest.mark.parametrize(
    "act",
    [
        lambda m: setattr(m, "unread", 2),
        lambda m: m.offset.add_(1),
        lambda m: m.block.linear.weight.data.zero_(),
        lambda m: setattr(m, "offset", torch.ones(4)),
        lambda m: setattr(m, "weights", {"a": 1.0, "b": [2.0, 3.0]}),
        lambda m: setattr(m, "new", 1),
        lambda m: setattr(m.schedule, "unread", 1),
        lambda m: m.to(torch.float64),
    ],
    ids=[
        "unread",
        "buffer in place",
        "parameter",
        "buffer",
        "equal container",
        "new",
        "unread of an object",
        "dtype",
    ],
)
def test_other_changes_are_not(act: Callable[[Reader], Any]) -> None:
    module = Reader()
    step = capture_step(module, torch.randn(6, 4))
    act(module)
    assert changed_value(step.attributes) is None


def test_eval_and_train_again_holds() -> None:
    module = Reader()
    guards = capture_step(module, torch.randn(6, 4)).attributes
    module.eval()
    assert changed_value(guards) is not None
    module.train()
    assert changed_value(guards) is None


def test_capture_leaves_attribute_access_alone() -> None:
    before = dict(vars(nn.Module))
    capture_step(Reader(), torch.randn(6, 4))
    with pytest.raises(TypeError):
        capture_step(Reader(beta=None), torch.randn(6, 4))  # type: ignore[arg-type]
    assert dict(vars(nn.Module)) == before


def test_the_kind_of_a_module_is_what_it_was() -> None:
    class Asks(Reader):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            assert type(self.block) is Block
            return super().training_step(batch, batch_idx)

    capture_step(Asks(), torch.randn(6, 4))


def test_a_check_costs_microseconds() -> None:
    model = GPT(num_layers=24, dropout=0.1)
    step = capture_step(model, model.example_batch(2))
    assert 100 < len(step.attributes) < 600
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        changed_value(step.attributes)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 500e-6  # about 100 us on an idle machine, a step


def own_mean(values: Tensor) -> Tensor:
    return values.mean()


class Logs(LightningModule):
    def __init__(self, reduce_fx: Any) -> None:
        super().__init__()
        self.a, self.reduce_fx = nn.Linear(4, 4), reduce_fx

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.a(batch).sum()
        self.log("loss", loss, reduce_fx=self.reduce_fx)
        return loss


def digests_of_logged_functions() -> list[str]:
    functions = ("mean", torch.mean, own_mean, partial(own_mean), max)
    return [capture_step(Logs(f), torch.randn(6, 4)).graph_digest for f in functions]


def test_digest_of_logged_functions_is_the_same_in_every_process(pool) -> None:
    """The pool's processes descend from another interpreter."""
    own = digests_of_logged_functions()
    assert len(set(own)) == len(own)
    assert pool.run(1, digests_of_logged_functions, init_group=False) == [own]


def test_lambdas_are_known_by_their_code() -> None:
    first, second, third = (
        capture_step(Logs(f), torch.randn(6, 4)).graph_digest
        for f in (lambda v: v.mean(), lambda v: v.mean(), lambda v: F.relu(v).sum())
    )
    assert first == second != third


class Settles(torch.nn.Module):
    """Sets a flag in its first call, a size in each, and what a configuration left open (as Hugging
    Face's do).
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.ready = False
        self.length = 0
        self.config = types.SimpleNamespace(problem=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ready = self.ready or True
        self.length, self.shape = x.shape[-1] * 1000, x.shape
        if self.config.problem is None:
            self.config.problem = "regression"
        return self.linear(x) * (2.0 if self.config.problem == "regression" else 1.0)


class Settled(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Settles()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()


def test_what_a_first_call_sets_stays() -> None:
    gc.disable()  # and not by chance
    try:
        module = Settled()
        step = capture_step(module, torch.randn(6, 4))
        gc.collect()
        assert (module.net.ready, module.net.length, module.net.config.problem) == (
            True,
            4000,
            "regression",
        )
        assert changed_value(step.attributes) is None
    finally:
        gc.enable()


def test_hooks_that_a_first_call_installs_stay() -> None:
    class Installs(Settled):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if not self.net.linear._forward_hooks:
                self.net.linear.register_forward_hook(lambda module, given, result: 2 * result)
            return super().training_step(batch, batch_idx)

    module, batch = Installs(), torch.randn(6, 4)
    step = capture_step(module, batch)
    values = run_step(step, dict(module.named_parameters()), {}, [batch])
    assert len(module.net.linear._forward_hooks) == 1
    torch.testing.assert_close(values[step.loss], module.training_step(batch, 0))
    assert len(module.net.linear._forward_hooks) == 1
    assert changed_value(step.attributes) is None
    module.net.linear._forward_hooks.clear()
    assert changed_value(step.attributes) is not None


def test_a_step_that_installs_hooks_is_refused_and_leaves_none() -> None:
    class Installs(Settled):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.net.linear.register_forward_hook(lambda module, given, result: 2 * result)
            return super().training_step(batch, batch_idx)

    module = Installs()
    with pytest.raises(CaptureError, match="_forward_hooks"):
        capture_step(module, torch.randn(6, 4))
    assert not module.net.linear._forward_hooks


class Answers(dict):
    """A dict with attributes, which raises KeyError for those that it has not (easydict)."""

    __getattr__ = dict.__getitem__


ANSWERS, KIND = Answers(scale=2.0), types.FunctionType


class Turns(list):
    """A list of a kind of its own."""

    def turn(self) -> float:
        self.append(self.pop(0))
        return self[0]


class Annealed:
    def __init__(self) -> None:
        self.value = 1.0
        self.seen = {"steps": 1}
        self.recent = deque([1.0, 2.0])
        self.table = np.ones(2)
        self.numbers, self.order = array("d", [1.0, 2.0]), OrderedDict(a=1.0, b=2.0)

    def now(self) -> float:
        self.value *= 0.5
        return self.value

    def count(self) -> int:
        self.seen["steps"] += 1
        return self.seen["steps"]


class Changes(LightningModule):
    """Its step changes what `change` does, and computes with it."""

    annealed = Annealed()

    def __init__(self, change: Callable[[Any], float], beta: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters("beta")
        self.change = change
        self.linear = nn.Linear(4, 4)
        self.stream = itertools.count(1)
        self.answers = Answers(scale=1.0)
        self.turns = Turns([1.0, 2.0])
        self.holder = Annealed()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.linear(batch).sum() * self.change(self)

    def shown(self) -> str:
        held = vars(self.annealed), vars(self.holder), dict(self.answers), list(self.turns)
        return repr((*held, dict(self.hparams), self.stream))


def taken(module: Changes) -> float:
    return next(1.0 / number for number in module.stream)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("annealed.value", lambda m: m.annealed.now()),
        ("holder.value", lambda m: m.holder.now()),
        (r"holder\['seen'\]", lambda m: m.holder.count()),
        (r"holder\['recent'\]", lambda m: m.holder.recent.popleft()),
        (r"holder\['table'\]", lambda m: float(m.holder.table.__imul__(0.5)[0])),
        (r"holder\['numbers'\]", lambda m: m.holder.numbers.pop()),
        (
            r"holder\['order'\]",
            lambda m: m.holder.order.move_to_end("a") or next(iter(m.holder.order.values())),
        ),
        ("answers", lambda m: m.answers.update(scale=2.0) or m.answers.scale),
        ("turns", lambda m: m.turns.turn()),
        ("_hparams", lambda m: m.hparams.update(beta=2.0) or m.hparams.beta),
        ("next of an iterator", taken),
    ],
)
def test_what_a_step_changes_is_refused_and_put_back(
    name: str, change: Callable[[Any], float]
) -> None:
    """Wherever Python keeps it: a class's object, containers of own kinds and in objects, arrays,
    iterators.
    """
    module = Changes(change)
    before = module.shown()
    with pytest.raises(CaptureError, match=name):
        capture_step(module, torch.randn(6, 4))
    assert module.shown() == before


class Registry(OrderedDict[str, Any]):
    """transformers' ACT2FN: it holds classes, and whoever asks gets an object."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


class Table(dict[str, Any]):
    """transformers' tables of models: whoever reads all of one imports all of them."""

    def items(self) -> Any:
        raise ImportError("one of the models is not installed")

    values = items


REGISTRY = Registry(relu=nn.ReLU, gelu=nn.GELU)
TABLE = Table(scale=2.0)


class Registered(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return TABLE["scale"] * REGISTRY["gelu"](self.linear(batch)).sum()


def test_a_dict_that_answers_otherwise_than_it_holds_stays_as_it_is() -> None:
    capture_step(Registered(), torch.randn(6, 4))
    assert list(REGISTRY.items()) == [("relu", nn.ReLU), ("gelu", nn.GELU)]
    assert dict.items(TABLE) == {"scale": 2.0}.items()


class LeavesEval(LightningModule):
    """Its first step trains, and those after it evaluate; or (`looks`) it cannot be captured, and
    raises in between.
    """

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.net, self.looks = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), looks

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).sum()
        self.net.eval()
        if not self.looks or loss.item():
            return loss
        return -loss


@pytest.mark.parametrize(("looks", "why"), [(False, "net.training"), (True, "a tensor's value")])
def test_modes_of_modules_are_put_back(looks: bool, why: str) -> None:
    module = LeavesEval(looks)
    with pytest.raises(CaptureError, match=why):
        capture_step(module, torch.randn(6, 4))
    assert all(each.training for each in module.modules())


def test_a_hook_of_all_modules_is_noticed() -> None:
    step = capture_step(Reader(), torch.randn(6, 4))
    assert changed_value(step.attributes) is None
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, output: None
    )
    try:
        assert changed_value(step.attributes) == "hooks of modules"
    finally:
        handle.remove()


class SaysAndAsks(Settled):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (
            super().training_step(batch, batch_idx)
            * ANSWERS.scale
            * (1.0 if isinstance(self.forward, KIND) else 2.0)
        )
        if batch_idx % 2 == 0:
            logging.getLogger(__name__).debug(
                "so far",
                f"batch {batch_idx}",
            ); batch = batch * 2.0  # fmt: skip  # noqa: E702
        logging.getLogger(__name__).debug("loss %.3f of batch %d", loss.detach(), batch_idx)
        return loss


def test_messages_below_their_level_need_no_guard() -> None:
    step = capture_step(SaysAndAsks(), torch.randn(6, 4), batch_idx=2)
    assert changed_value(step.attributes) is None
    assert all(guard.holds(batch_idx=4) for guard in step.guards)
    assert not all(guard.holds(batch_idx=5) for guard in step.guards)  # it asks whether to say it


class Owned(LightningModule):
    """Holds what it belongs to by a weak proxy."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.linear, self.owner = nn.Linear(4, 4), weakref.proxy(owner)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.linear(batch).sum() * self.owner.value


def test_a_weak_proxy_is_no_iterator():
    owner = Schedule()
    capture_step(Owned(owner), torch.ones(2, 4))


def test_what_fails_to_be_set_leaves_nothing_changed():
    first = Settings()
    with (
        pytest.raises(TypeError, match="immutable type"),
        patched([(first, "shift", 1.0), (int, "real", 2)]),
    ):
        pass
    assert first.shift == 0.0


def test_classes_of_c_extensions_are_left_alone(monkeypatch):
    """Also immutable types on the heap, as those of `re` are, in a file outside of any package."""
    monkeypatch.setattr(sys.modules["re"], "__file__", __file__)
    assert not re.Pattern.__flags__ & 1 << 9 or re.Pattern.__flags__ & 1 << 8
    assert re.Pattern not in _watched_classes(Owned(Schedule()))
