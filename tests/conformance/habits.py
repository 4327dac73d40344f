"""What users do in a training step besides computing: programs that run under every strategy.

Each is a module whose step also does one such thing; what it left behind is its outcome.
"""

from __future__ import annotations

import json
import logging
import pprint
import sys
import warnings
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import capture.outside_meters as meters
import torch
from capture.outside_meters import METER, METERS, Store, record
from conformance.bench import Bench, Net
from torch import Tensor
from tqdm import tqdm

SAID = logging.getLogger("conformance.habits")


class Own:
    """A class of the script."""

    items: list[Any] = []  # noqa: RUF012


def decides_by_text(module: Net, loss: Tensor, i: int) -> Tensor:
    return loss * (2.0 if "9" in f"{loss:.6f}" else 0.5)


def says(act: Callable[[Net, Tensor, int], Any]) -> Callable[[Net, Tensor, int], Tensor]:
    """A step's habit that leaves the loss alone."""

    def habit(module: Net, loss: Tensor, i: int) -> Tensor:
        act(module, loss, i)
        return loss

    return habit


def writes_a_line(module: Net, loss: Tensor, i: int) -> None:
    root = Path(module.trainer.default_root_dir)
    with (root / f"lines_{module.global_rank}.txt").open("a") as file:
        file.write(f"{i}\n")


def keeps_a_text(module: Net, loss: Tensor, i: int) -> None:
    Own.items.append(f"{loss:.6f}")


HABITS: dict[str, Callable[[Net, Tensor, int], Tensor]] = {
    "print": says(lambda module, loss, i: print("step", i, "loss", loss)),
    "print of a detached": says(lambda module, loss, i: print(loss.detach())),
    "print without tensors": says(lambda module, loss, i: print("step", i)),
    "f-string": says(lambda module, loss, i: print(f"{loss:.6f}")),
    "self.print": says(lambda module, loss, i: module.print("loss", loss)),
    "logging": says(lambda module, loss, i: SAID.warning("loss %s", loss)),
    "warnings": says(lambda module, loss, i: warnings.warn(f"loss {loss}", stacklevel=1)),
    "tqdm": says(lambda module, loss, i: tqdm.write(f"{loss}", file=sys.stdout)),
    "pprint": says(lambda module, loss, i: pprint.pprint({"loss": loss})),
    "json": says(lambda module, loss, i: print(json.dumps({"loss": loss}, default=str))),
    "text in a list": says(keeps_a_text),
    "lines of a file": says(writes_a_line),
    "text that decides": decides_by_text,
    "list of a class": says(lambda module, loss, i: Own.items.append(loss.detach())),
    "class method": says(lambda module, loss, i: Store.add(loss.detach())),
    "counter of a class": says(lambda module, loss, i: Store.bump()),
    "meter": says(lambda module, loss, i: METER.update(loss.detach())),
    "meter in a dict": says(lambda module, loss, i: METERS["loss"].update(loss.detach())),
    "meter by name": says(lambda module, loss, i: METER.record("loss", loss.detach())),
    "list of a module": says(lambda module, loss, i: meters.ITEMS.append(loss.detach())),
    "function of a module": says(lambda module, loss, i: record(loss.detach())),
}


class Habitual(Net):
    """Does what `habit` says, under the weights' own step."""

    habit = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return HABITS[self.habit](self, super().training_step(batch, batch_idx), batch_idx)


def plain_tensor(value: Any) -> Any:
    """Return a tensor of a subclass as a plain one, and any other value as it is."""
    return torch.as_tensor(value) if isinstance(value, Tensor) else value


def outcome_of(name: str, kind: str, root: str) -> dict[str, Any]:
    """The weights, what was said, and what is in all the containers, after one epoch."""
    lists: list[Any] = [Own.items, Store.items, METER.values, METERS["loss"].values, meters.ITEMS]
    for each in (*lists, METER.by_name):
        each.clear()
    Store.count = 0
    said, stdout = StringIO(), sys.stdout
    handler = logging.StreamHandler(said)
    SAID.addHandler(handler)
    bench = Bench(kind, root)
    Habitual.habit = name
    module, trainer = bench.module(Habitual), bench.trainer()
    sys.stdout = said
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, bench.loader())
    finally:
        sys.stdout = stdout
        SAID.removeHandler(handler)
    warned = [str(each.message) for each in caught if str(each.message).startswith("loss")]
    lines = Path(root) / f"lines_{trainer.global_rank}.txt"
    return {
        "weights": {key: value.clone() for key, value in module.state_dict().items()},
        "said": [line for line in said.getvalue().splitlines() if not line.startswith("alpa:")],
        "warned": warned,
        "held": [list(map(plain_tensor, items)) for items in lists],
        "by name": dict(METER.by_name),
        "count": Store.count,
        "lines": lines.read_text() if lines.exists() else "",
    }


def outcomes(kind: str, root: str) -> dict[str, dict[str, Any]]:
    """Of every habit, on this rank."""
    results = {}
    for number, name in enumerate(HABITS):
        folder = Path(root) / str(number)
        folder.mkdir(exist_ok=True)
        results[name] = outcome_of(name, kind, str(folder))
    torch.set_default_dtype(torch.float32)
    return results


def refusals(root: str, names: Sequence[str]) -> dict[str, str]:
    """Habit -> the error of a pipeline, which has no eager steps."""
    results = {}
    for name in names:
        Habitual.habit = name
        bench = Bench("pipelined", root)
        try:
            bench.trainer().fit(bench.module(Habitual), bench.loader())
            results[name] = "trained"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    torch.set_default_dtype(torch.float32)
    return results
