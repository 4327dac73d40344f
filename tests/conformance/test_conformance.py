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
# Where other tests have the same by default.
REPEATED = {
    "callbacks.average_by_hand": "callbacks.average_in_the_module",
    "callbacks.finetuning": "strategy/test_finetuning.py",
    "callbacks.learning_rate_finder": "checkpoint/test_lightning_readers.py",
    "callbacks.weight_averaging": "callbacks.weight_averaging_resumed",
    "checkpoints.best_checkpoint_is_tested": "checkpoint/test_lightning_readers.py",
    "checkpoints.module_of_the_best_checkpoint": "checkpoint/test_lightning_readers.py",
    "checkpoints.saved_by_hand_and_resumed": "loops.numbers_of_the_step",
    "checkpoints.weights_only_checkpoint": "checkpoint/test_lightning_readers.py",
    "data.loader_workers": "strategy/test_loader_order.py",
    "data.sequences_of_changing_length": "strategy/test_changing_shapes.py",
    "evaluation.several_validation_loaders": "strategy/test_evaluation.py",
    "evaluation.smaller_last_evaluation_batch": "strategy/test_evaluation.py",
    "logs.csv_logger": "strategy/test_loggers.py",
    "loops.batch_norm_over_all_ranks": "eager/test_synced_norms.py",
    "loops.compiled_parts_of_the_module": "equality/test_compiled.py",
    "loops.epoch_in_the_loss": "strategy/test_changing_numbers.py",
    "loops.sanity_check_and_val_check_interval": "loops.validation_every_few_batches_and_epochs",
    "optimization.clip_by_norm": "equality/test_equality.py",
    "optimization.parameters_frozen_on_the_way": "strategy/test_finetuning.py",
    "optimization.scheduler_by_epoch": "optimization.scheduler_on_plateau",
}


def cases():
    """Every behaviour with both kinds of plan. By default each behaviour runs with one kind, in
    turn, unless other tests have it; the others are slow.
    """
    assert BEHAVIOURS.keys() >= REPEATED.keys()
    for number, name in enumerate(BEHAVIOURS):
        kinds = KINDS[:1] if name in EAGER_ONLY else KINDS
        default = kinds[number % len(kinds)]
        for kind in kinds:
            is_default = kind == default and name not in REPEATED
            marks = () if is_default else pytest.mark.slow
            yield pytest.param(name, kind, marks=marks, id=f"{name}-{kind}")


@pytest.mark.parametrize(("name", "kind"), cases())
def test_same_as_ddp(pool, reference, tmp_path, name: str, kind: str) -> None:
    expected = reference(name)
    per_rank = pool.run(RANKS, run_behaviour, name, kind, str(tmp_path))
    assert not differences(expected, per_rank)
