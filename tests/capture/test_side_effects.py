"""What a step does besides computing, and would do once if it were captured, is refused by its line
and undone; what others do in addition is not blamed on it.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import logging
import os
import pprint
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import capture.outside_meters as meters
import lightning.pytorch as pl
import pytest
import torch
from capture.outside_meters import (
    CALLBACKS,
    GROUPS,
    HOOKS,
    METER,
    METERS,
    RECORD,
    SLOTS,
    WRITER,
    Derived,
    Meter,
    Store,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm import tqdm

from alpa_strategy import AlpaStrategy
from alpa_strategy.capture.capture import capture_step
from alpa_strategy.errors import CaptureError

Act = Callable[["Model", torch.Tensor, int], Any]


class Model(pl.LightningModule):
    """A linear layer whose step also does what `act` does."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))
        self.act = act

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.layer(batch) * self.scale).square().mean()
        self.act(self, loss, batch_idx)
        return loss


@dataclass
class Holder:
    """Its text has that of the tensor in it."""

    loss: torch.Tensor


def named_by_its_text(model: Model, loss: torch.Tensor, i: int) -> None:
    model.log(f"loss {loss:.1f}", loss)


def text_in_a_list(model: Model, loss: torch.Tensor, i: int) -> None:
    kept = []
    kept.append(f"{loss}")


def text_that_decides(model: Model, loss: torch.Tensor, i: int) -> None:
    if "nan" in str(loss):
        raise ValueError("nan")


def text_of_an_error(model: Model, loss: torch.Tensor, i: int) -> None:
    raise ValueError(f"not {loss}")


def text_whose_error_is_swallowed(model: Model, loss: torch.Tensor, i: int) -> None:
    try:
        str(loss)
    except Exception:
        return


def formats_by_options(model: Model, loss: torch.Tensor, i: int) -> None:
    torch.set_printoptions(precision=4)
    format(loss, ".3f")


LOG = logging.getLogger("test_side_effects")
TEXTS: dict[str, Act] = {
    "print": lambda model, loss, i: print("loss", loss),
    "str": lambda model, loss, i: str(loss),
    "repr": lambda model, loss, i: repr(loss.detach()),
    "f-string": lambda model, loss, i: f"{loss}",
    "f-string with digits": lambda model, loss, i: f"{loss:.3f}",
    "f-string of its repr": lambda model, loss, i: f"{loss!r}",
    "percent": lambda model, loss, i: "%s" % loss,  # noqa: UP031
    "format": lambda model, loss, i: "{}".format(loss),  # noqa: UP032
    "join": lambda model, loss, i: ", ".join(map(str, [loss])),
    "logging": lambda model, loss, i: LOG.warning("loss %s", loss),
    "warnings": lambda model, loss, i: warnings.warn(f"loss {loss}", stacklevel=1),
    "tqdm": lambda model, loss, i: tqdm.write(f"{loss}"),
    "pprint": lambda model, loss, i: pprint.pformat({"loss": loss}),
    "json": lambda model, loss, i: json.dumps({"loss": loss}, default=str),
    "self.print": lambda model, loss, i: model.print(loss),
    "a list": lambda model, loss, i: str([loss]),
    "a dict": lambda model, loss, i: repr({"loss": loss}),
    "a record": lambda model, loss, i: str(Holder(loss)),
    "a parameter": lambda model, loss, i: str(model.layer.weight),
    "a buffer": lambda model, loss, i: f"{model.scale}",
    "a tensor of constants": lambda model, loss, i: str(torch.arange(3)),
    "standard error": lambda model, loss, i: print(loss, file=sys.stderr),
    "partial": lambda model, loss, i: functools.partial(print, "loss")(loss),
    "named by its text": named_by_its_text,
    "kept in a list": text_in_a_list,
    "decides": text_that_decides,
    "of an error": text_of_an_error,
    "swallowed": text_whose_error_is_swallowed,
    "options": formats_by_options,
}

LINES = Path(os.devnull).open("a")  # noqa: SIM115
QUEUE: queue.Queue[int] = queue.Queue()
READY = threading.Event()


def warns_each_time(model: Model, loss: torch.Tensor, i: int) -> None:
    warnings.warn(f"step {i}", stacklevel=1)


def starts_a_thread(model: Model, loss: torch.Tensor, i: int) -> None:
    threading.Thread(target=print).start()


def measures(model: Model, loss: torch.Tensor, i: int) -> None:
    start = timeit.default_timer()
    timeit.default_timer() - start


def sends(model: Model, loss: torch.Tensor, i: int) -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=0.1)


def lines_of_a_file(model: Model, loss: torch.Tensor, i: int) -> None:
    with Path("/nowhere/lines").open("a") as file:
        file.write(f"{i}\n")


ACTS: dict[str, tuple[Act, str]] = {
    "print": (lambda model, loss, i: print("step", i), "prints"),
    "print without numbers": (lambda model, loss, i: print("a step"), "prints"),
    "standard output": (lambda model, loss, i: sys.stdout.write(f"{i}\n"), "prints"),
    "standard error": (lambda model, loss, i: print(i, file=sys.stderr), "prints"),
    "pprint": (lambda model, loss, i: pprint.pprint({"step": i}), "prints"),
    "self.print": (lambda model, loss, i: model.print("step", i), "prints"),
    "tqdm": (lambda model, loss, i: tqdm.write("step"), "prints"),
    "logging": (lambda model, loss, i: LOG.warning("step %d", i), "logging"),
    "logging of rank 0": (lambda model, loss, i: rank_zero_info("step"), "logging"),
    "warnings": (warns_each_time, "warns"),
    "open file": (lambda model, loss, i: LINES.write(f"{i}\n"), "open file"),
    "print to a file": (lambda model, loss, i: print(i, file=LINES), "open file"),
    "file": (lines_of_a_file, "open"),
    "saves": (lambda model, loss, i: torch.save({"step": i}, "/nowhere/step.pt"), "save"),
    "sleeps": (lambda model, loss, i: time.sleep(0.001), "sleep"),
    "default_timer": (measures, "perf_counter"),
    "monotonic": (lambda model, loss, i: time.monotonic(), "monotonic"),
    "now": (lambda model, loss, i: datetime.datetime.now(), "now"),
    "today": (lambda model, loss, i: datetime.date.today(), "today"),
    "strftime": (lambda model, loss, i: time.strftime("%H"), "strftime"),
    "environment": (lambda model, loss, i: os.environ.update(STEP="1"), "__setitem__"),
    "environment gone": (lambda model, loss, i: os.environ.pop("HOME"), "__delitem__"),
    "makes a folder": (lambda model, loss, i: Path("/nowhere").mkdir(), "mkdir"),
    "removes a file": (lambda model, loss, i: os.remove("/nowhere"), "remove"),
    "runs a program": (lambda model, loss, i: subprocess.run(["true"], check=True), "Popen"),
    "queue": (lambda model, loss, i: QUEUE.put(1), "Queue.put"),
    "event": (lambda model, loss, i: READY.set(), "Event.set"),
    "thread": (starts_a_thread, "Thread.start"),
    "socket": (sends, "socket.connect"),
}


def refused(act: Act) -> str:
    """The message with which a step that does this is refused."""
    with pytest.raises(CaptureError) as caught:
        capture_step(Model(act), torch.randn(6, 4), batch_idx=3)
    return str(caught.value)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_a_tensor_is_a_read_of_its_value(name: str, capfd) -> None:
    text = refused(TEXTS[name])
    assert re.search("a text of a tensor|the step prints|to logging", text)
    assert "test_side_effects.py" in text
    assert "FakeTensor" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ACTS)
def test_what_acts_outside_is_refused_before_it_happens(name: str, capfd) -> None:
    act, why = ACTS[name]
    environment = dict(os.environ)
    text = refused(act)
    assert why in text
    assert "test_side_effects.py" in text
    assert "".join(capfd.readouterr()) == ""
    assert dict(os.environ) == environment
    assert QUEUE.empty()
    assert not READY.is_set()


def warns_once(model: Model, loss: torch.Tensor, i: int) -> None:
    warnings.warn("long rows", stacklevel=1)


def speaks_below_its_level(model: Model, loss: torch.Tensor, i: int) -> None:
    LOG.debug("loss %s", loss)


def makes_a_date(model: Model, loss: torch.Tensor, i: int) -> None:
    made = datetime.datetime(2020, 1, 2)
    assert isinstance(made, datetime.datetime)
    assert made.year == 2020


def buffers_a_text(model: Model, loss: torch.Tensor, i: int) -> None:
    assert str(loss.shape) == "torch.Size([])"
    assert f"{loss.dtype} {loss.ndim}" == "torch.float32 0"


@pytest.mark.parametrize("act", [warns_once, speaks_below_its_level, makes_a_date, buffers_a_text])
def test_what_says_nothing_of_its_own_is_captured(act: Act) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        capture_step(Model(act), torch.randn(6, 4))


OWN: list[Any] = []


class Own:
    """A class of the script."""

    items: list[Any] = []  # noqa: RUF012
    table: dict[str, Any] = {}  # noqa: RUF012
    pairs: set[int] = set()  # noqa: RUF012
    _private: list[Any] = []  # noqa: RUF012


def closure() -> tuple[list[Any], Callable[[Any], None]]:
    kept: list[Any] = []

    def keep(value: Any) -> None:
        kept.append(value)

    return kept, keep


KEPT, KEEP = closure()


def counts_in_the_file(model: Model, loss: torch.Tensor, i: int) -> None:
    meters.CALLS += 1


def through_a_local_name(model: Model, loss: torch.Tensor, i: int) -> None:
    store = Store
    store.items.append(loss)


def all_callbacks(model: Model, loss: torch.Tensor, i: int) -> None:
    for each in CALLBACKS:
        each(loss)


def sets_an_attribute(model: Model, loss: torch.Tensor, i: int) -> None:
    setattr(Store, "last", loss.detach())  # noqa: B010


def imports_inside(model: Model, loss: torch.Tensor, i: int) -> None:
    from capture.outside_meters import ITEMS

    ITEMS.append(loss)


CONTAINERS: dict[str, Act] = {
    "list of a class": lambda model, loss, i: Own.items.append(loss.detach()),
    "private list of a class": lambda model, loss, i: Own._private.append(1),
    "dict of a class": lambda model, loss, i: Own.table.update(loss=loss.detach()),
    "set of a class": lambda model, loss, i: Own.pairs.add(1),
    "class method": lambda model, loss, i: Store.add(loss.detach()),
    "static method": lambda model, loss, i: Store.bump(),
    "hidden dict of a class": lambda model, loss, i: Store._hidden.update(a=1),
    "class in a class": lambda model, loss, i: Store.Inner.items.append(loss),
    "list of a base class": lambda model, loss, i: Derived.items.append(loss),
    "list of an object's class": lambda model, loss, i: METER.every.append(loss),
    "class of a module": lambda model, loss, i: meters.Store.items.append(loss),
    "list of a module": lambda model, loss, i: meters.ITEMS.append(loss),
    "dict of a module": lambda model, loss, i: meters.TOTALS.update(loss=loss),
    "number of a module": counts_in_the_file,
    "function of a module": lambda model, loss, i: meters.record(loss),
    "counting function of a module": lambda model, loss, i: meters.count(),
    "meter": lambda model, loss, i: METER.update(loss.detach()),
    "meter in a dict": lambda model, loss, i: METERS["loss"].update(loss.detach()),
    "meter of a module": lambda model, loss, i: meters.METERS["loss"].update(loss),
    "new meter in a dict": lambda model, loss, i: METERS.setdefault("new", Meter()).update(loss),
    "lists by name in a meter": lambda model, loss, i: METER.record("loss", loss.detach()),
    "last value in a meter": lambda model, loss, i: METER.last.update(loss=loss.detach()),
    "deque in a meter": lambda model, loss, i: METER.recent.append(loss),
    "defaultdict": lambda model, loss, i: GROUPS["loss"].append(loss),
    "record": lambda model, loss, i: RECORD.values.append(loss),
    "record of slots": lambda model, loss, i: SLOTS.values.append(loss),
    "closure": lambda model, loss, i: KEEP(loss),
    "function in a dict": lambda model, loss, i: HOOKS["loss"](loss),
    "functions in a list": all_callbacks,
    "partial": functools.partial(lambda kept, model, loss, i: kept.append(loss), OWN),
    "through a local name": through_a_local_name,
    "setattr": sets_an_attribute,
    "list of a thread": lambda model, loss, i: WRITER.values.append(loss),
    "class of the model": lambda model, loss, i: type(model).__mro__[0].seen.update(a=1),
    "import in the step": imports_inside,
}


def held() -> str:
    """All that the table's rows may change, as text."""
    of_meters = [vars(each) for each in (METER, METERS["loss"], RECORD)]
    of_classes = [
        (name, value)
        for kind in (Own, Store, Store.Inner, Meter, Model)
        for name, value in sorted(vars(kind).items())
        if name[:2] != "__" and not callable(value) and type(value).__module__ == "builtins"
    ]
    of_module = meters.ITEMS, meters.TOTALS, meters.CALLS, sorted(METERS), dict(GROUPS)
    return repr((of_meters, of_classes, of_module, SLOTS.values, KEPT, OWN, WRITER.values))


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_the_code_reaches_is_watched_and_put_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "seen", {}, raising=False)
    before = held()
    text = refused(CONTAINERS[name])
    assert "changes" in text
    assert held() == before


@functools.lru_cache
def tables() -> Any:
    return {}


class Positions:
    """Fills its cache at first use, with what is the same at every step."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}

    def of(self, size: int) -> torch.Tensor:
        if size not in self.made:
            self.made[size] = torch.arange(float(size))
        return self.made[size]


POSITIONS = Positions()


def test_a_cache_of_constants_is_captured_and_emptied() -> None:
    capture_step(Model(lambda model, loss, i: POSITIONS.of(4)), torch.randn(6, 4))
    assert POSITIONS.made == {}


class OwnStrategy(AlpaStrategy):
    """A strategy of the user's."""

    def __init__(self) -> None:
        super().__init__(verbose=False)
        self.beats: list[int] = []


class Monitor:
    """An object with a thread that writes into it."""

    def __init__(self) -> None:
        self.lock, self.event = threading.Lock(), threading.Event()
        self.scale = 1.0
        self.queue: queue.Queue[int] = queue.Queue()


class Beats(threading.Thread):
    """A thread that is an attribute's owner."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.scale, self.beats = 1.0, [0]


UNNAMED: dict[str, list[int]] = {"beats": []}
OTHERS: dict[str, Any] = {
    "strategy": AlpaStrategy(verbose=False),
    "own strategy": OwnStrategy(),
    "trainer": pl.Trainer(logger=False, barebones=True, accelerator="cpu"),
    "logger": LOG,
    "lock": threading.Lock(),
    "condition": threading.Condition(),
    "event": threading.Event(),
    "queue": queue.Queue(),
    "thread": Beats(),
    "monitor": Monitor(),
    "socket": None,
    "stream": sys.stdout,
    "scale": 1.0,
}


def names_them(model: Model, loss: torch.Tensor, i: int) -> Any:
    return loss * OTHERS["scale"] * OTHERS["monitor"].scale * OTHERS["thread"].scale


def beat(name: str) -> None:
    """What a thread, or the library, does with one of them."""
    other = OTHERS[name]
    if name == "strategy" or name == "own strategy":
        other._launcher_of_test = [time.perf_counter()]
    elif name == "trainer":
        other.fit_loop.epoch_loop.batch_progress.current.ready += 1
    elif name == "logger":
        other.handlers = list(other.handlers)
        other._cache[7] = True
    elif name == "condition":
        other._waiters.append(threading.Lock())
    elif name == "event":
        other._cond._waiters.append(threading.Lock())
    elif name == "queue":
        other.queue.append(1)
        other.unfinished_tasks += 1
    elif name == "thread":
        other.beats.append(1)
        other._started._cond._waiters.append(1)
    elif name == "monitor":
        other.event._cond._waiters.append(1)
        other.queue.queue.append(1)
    else:
        UNNAMED["beats"].append(1)


@contextmanager
def beating(name: str) -> Iterator[None]:
    """Another thread that is busy with one of them while the block runs."""
    is_over = threading.Event()
    has_begun = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            beat(name)
            has_begun.set()
            time.sleep(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_threads_do_is_not_blamed_on_the_step(name: str) -> None:
    with beating(name):
        capture_step(Model(names_them), torch.randn(6, 4))


def test_objects_of_libraries_are_left_as_they_are() -> None:
    """What is not looked at is not put back either."""
    before = copy.copy(vars(OTHERS["own strategy"]))
    capture_step(Model(names_them), torch.randn(6, 4))
    assert vars(OTHERS["own strategy"]) == before
