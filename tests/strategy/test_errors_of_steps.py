"""An error that the training step raises keeps its type and its text, as under DDP, with this
package's as its cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from covering import slow_but
from quiet import QUIET
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from alpa_strategy import AlpaStrategy

ROWS = 16


class Own(Exception):
    """An exception of the user's."""


class Numbered(ValueError):
    """One that is not made of a text alone."""

    def __init__(self, number: int, limit: int) -> None:
        super().__init__(f"{number} of {limit}")


def raises(error: Exception) -> Callable[[Any, Tensor, int], None]:
    def raise_it(module: Any, x: Tensor, i: int) -> None:
        raise error

    return raise_it


def later(module: Any, x: Tensor, i: int) -> None:
    if i == 1:
        raise ValueError("the second batch")


def too_few(module: Any, x: Tensor, i: int) -> None:
    if x.shape[0] < 1000:
        raise AssertionError("too few rows")


def missing(module: Any, x: Tensor, i: int) -> None:
    {"x": x}["y"]


def unlike_shapes(module: Any, x: Tensor, i: int) -> None:
    x @ torch.zeros(3, 3)


def no_such_attribute(module: Any, x: Tensor, i: int) -> None:
    module.absent(x)


def not_finite(module: Any, x: Tensor, i: int) -> None:
    if not torch.isfinite(x).all():
        raise ValueError("not finite")


def asserts_values(module: Any, x: Tensor, i: int) -> None:
    from strategy.raising_checks import asserts_finite

    asserts_finite(x)


def own_class(module: Any, x: Tensor, i: int) -> None:
    if torch.isnan(x).any():
        raise Own("a nan")


def numbered(module: Any, x: Tensor, i: int) -> None:
    if torch.isnan(x).any():
        raise Numbered(1, 2)


def text_of_values(module: Any, x: Tensor, i: int) -> None:
    if torch.isnan(x).any():
        # The same on both ranks: a rank whose error differs ends the other at once.
        raise ValueError(f"batch {i}: {bool(torch.isnan(x).any())} of {x.shape[-1]}")


ERRORS: dict[str, Callable[[Any, Tensor, int], None]] = {
    "ValueError": raises(ValueError("mine")),
    "AssertionError": raises(AssertionError("mine")),
    "RuntimeError": raises(RuntimeError("mine")),
    "own": raises(Own("mine")),
    "numbered": raises(Numbered(1, 2)),
    "NotImplementedError": raises(NotImplementedError("mine")),
    "the second batch": later,
    "too few rows": too_few,
    "KeyError": missing,
    "shapes": unlike_shapes,
    "AttributeError": no_such_attribute,
    "check": not_finite,
    "assert": asserts_values,
    "check of its own class": own_class,
    "check of a numbered class": numbered,
    "check with its values": text_of_values,
}
# What a pipeline, which sees all ranks' samples and no values, says otherwise: text, or type.
OF_VALUES = {"check of a numbered class", "check with its values"}


class Checks(pl.LightningModule):
    """A small net whose step begins with `check`."""

    check = ""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ERRORS[self.check](self, batch[0], batch_idx)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# These are raised as ValueError, or as the user's own exception, is.
SLOW = (
    "AssertionError",
    "RuntimeError",
    "NotImplementedError",
    "too few rows",
    "KeyError",
    "AttributeError",
)
DEFAULT = tuple(name for name in ERRORS if name not in SLOW)


def errors(kind: str, root: str, names: tuple[str, ...]) -> dict[str, tuple[str, str, str]]:
    """(type, text, type of the cause) of the error of every check in `names`, on this rank."""
    rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    rows[8:] = torch.nan  # the second batch of each rank
    results = {}
    for name in names:
        Checks.check = name
        options = {"cluster": "pcie_8gpu", "plan_dir": root, "verbose": False}
        if kind == "pipelined":
            options |= {"num_stages": 2, "num_microbatches": 2}
        strategy: Any = "ddp" if kind == "ddp" else AlpaStrategy(**options)
        trainer = pl.Trainer(
            **QUIET,
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            strategy=strategy,
            default_root_dir=root,
        )
        try:
            trainer.fit(Checks(), DataLoader(TensorDataset(rows), batch_size=4))
            results[name] = "none", "", ""
        except Exception as error:
            results[name] = type(error).__name__, str(error), type(error.__cause__).__name__
    return results


@pytest.fixture(scope="module")
def error_of(pool, tmp_path_factory):
    """Return a function: what a check raises under a kind of strategy, by rank."""
    results: dict[Any, Any] = {}

    def get(kind: str, name: str) -> list[tuple[str, str, str]]:
        names = SLOW if name in SLOW else DEFAULT
        if (kind, names) not in results:
            root = str(tmp_path_factory.mktemp(kind))
            results[kind, names] = pool.run(2, errors, kind, root, names, timeout=300)
        return [rank[name] for rank in results[kind, names]]

    return get


@pytest.mark.parametrize("name", slow_but(ERRORS, DEFAULT))
def test_type_and_text_are_ddps(error_of, name: str) -> None:
    for expected, found in zip(error_of("ddp", name), error_of("alpa", name), strict=True):
        assert found[:2] == expected[:2]
        assert found[2] in ("CaptureError", "FailedCheckError")


IN_A_PIPELINE = [name for name in ERRORS if name not in {*OF_VALUES, "shapes"}]


@pytest.mark.parametrize(
    "name", slow_but(IN_A_PIPELINE, [name for name in IN_A_PIPELINE if name in DEFAULT])
)
def test_type_and_text_in_a_pipeline(error_of, name: str) -> None:
    for expected, found in zip(error_of("ddp", name), error_of("pipelined", name), strict=True):
        assert found[:2] == expected[:2]
        assert found[2] in ("CaptureError", "FailedCheckError")


def test_torchs_own_error_about_shapes_in_a_pipeline(error_of) -> None:
    """The shapes are those of all ranks' samples."""
    for kind, text, cause in error_of("pipelined", "shapes"):
        assert (kind, cause) == ("RuntimeError", "CaptureError")
        assert "shapes cannot be multiplied" in text or "reduction dim" in text


@pytest.mark.parametrize("name", sorted(OF_VALUES))
def test_a_text_that_only_the_values_give_in_a_pipeline(error_of, name: str) -> None:
    for kind, text, _ in error_of("pipelined", name):
        assert kind in ("ValueError", "FailedCheckError", "CaptureError"), (kind, text)
        assert "test_errors_of_steps.py" in text
