"""The same behaviours under "ddp" and under "alpa", with one stage and with a pipeline: equal
outcomes.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from conformance import (
    callbacks,
    checkpoints,
    data,
    deferred,
    evaluation,
    logs,
    loops,
    optimization,
)
from conformance.bench import RANKS, Bench, differences

MODULES = (loops, evaluation, data, optimization, logs, callbacks, checkpoints, deferred)
BEHAVIOURS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": function
    for module in MODULES
    for name, function in vars(module).items()
    if isinstance(function, types.FunctionType)
    and list(function.__annotations__) == ["bench", "return"]
}
AGAINST_ONE_PROCESS = {
    name for name, f in BEHAVIOURS.items() if getattr(f, "reference", "ddp") == "plain"
}


def run_behaviour(name: str, kind: str, root: str) -> Any:
    outcome = BEHAVIOURS[name](Bench(kind, root))
    torch.set_default_dtype(torch.float32)
    return outcome


@pytest.fixture(scope="session")
def reference(pool, tmp_path_factory):
    """Outcomes of the behaviours under "ddp" (or in one process), computed once."""
    results: dict[str, list[Any]] = {}

    def get(name: str) -> list[Any]:
        if name not in results:
            kind = "plain" if name in AGAINST_ONE_PROCESS else "ddp"
            root = str(tmp_path_factory.mktemp(kind))
            ranks = 1 if kind == "plain" else RANKS
            results[name] = pool.run(
                ranks, run_behaviour, name, kind, root, init_group=kind != "plain"
            )
        return results[name]

    return get


# Steps that run eagerly alone: a pipeline refuses them (test_refusals.py).
EAGER_ONLY = {"logs.printing"}
KINDS = ("alpa", "pipelined")


def cases():
    """Every behaviour with both kinds of plan. By default each behaviour runs with one kind, in
    turn; the others are slow.
    """
    for number, name in enumerate(BEHAVIOURS):
        kinds = KINDS[:1] if name in EAGER_ONLY else KINDS
        default = kinds[number % len(kinds)]
        for kind in kinds:
            marks = () if kind == default else pytest.mark.slow
            yield pytest.param(name, kind, marks=marks, id=f"{name}-{kind}")


@pytest.mark.parametrize(("name", "kind"), cases())
def test_same_as_ddp(pool, reference, tmp_path, name: str, kind: str) -> None:
    expected = reference(name)
    per_rank = pool.run(RANKS, run_behaviour, name, kind, str(tmp_path))
    assert not differences(expected, per_rank)
