"""Steps that cannot be captured train in eager mode: as under DDP to the last digits, with a note
in the log.
"""

from __future__ import annotations

import gc
import logging
import random
import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conformance.bench import differences
from covering import covering, in_tiers, slow_but
from eager import programs
from eager.programs import PROGRAMS
from quiet import QUIET
from worker_pool import WorkerError

from alpa_strategy import AlpaStrategy, ClusterSpec
from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.collectives import cpu_group
from alpa_strategy.extras.eager_sharding.fully_shard import EagerFullyShard
from alpa_strategy.lightning.eager_run import EagerRun
from alpa_strategy.runtime.sharded_parameter import ShardedParameter

RANKS = 2


class Watch(pl.Callback):
    """Stores the metrics of each step, and whether the run is eager."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.is_written: list[bool] = []  # by step
        self.modes: dict[str, str] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.metrics.append(
            {name: float(value) for name, value in trainer.callback_metrics.items()}
        )
        run = getattr(trainer.strategy, "run", None)
        self.is_written.append(isinstance(run, EagerRun))
        if run is not None:
            self.modes = {
                name: str(plan.modes[0])
                for name, plan in run.plan.stages[0].parameter_plans.items()
            }


def train(
    name: str, kind: str, root: str, parallel: str = "auto", remat: Any = None
) -> dict[str, Any]:
    """The outcome of a program under "ddp" or "alpa" on this rank."""
    program = getattr(programs, name)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        module = program()
    finally:
        torch.set_default_dtype(torch.float32)
    watch, said = Watch(), Said()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(said)
    options = {"cluster": "pcie_8gpu", "verbose": False, "parallel": parallel, "remat": remat}
    strategy: Any = program.ddp if kind == "ddp" else AlpaStrategy(**options)
    common = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_epochs": 2,
        "precision": "64-true",
        "callbacks": [watch],
    }
    trainer = pl.Trainer(
        strategy=strategy, default_root_dir=root, **{**common, **QUIET, **program.arguments}
    )
    trainer.fit(module)
    logger.removeHandler(said)
    state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    buffers = {key for key, _ in module.named_buffers()}
    return {
        "weights": {key: value for key, value in state.items() if key not in buffers},
        # Those that a rank's own last step has left are its own, as under DDP.
        "buffers": {key: value for key, value in state.items() if key in buffers},
        "metrics": watch.metrics,
        "steps": trainer.global_step,
        "is_written": watch.is_written,
        "said": said.lines,
        "modes": watch.modes,
    }


class Said(logging.Handler):
    """The package's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "steps run eagerly" in text:
            self.lines.append(text)


def check_equal(expected: list[Any], found: list[Any]) -> None:
    parts = ("weights", "buffers", "metrics", "steps")
    of_both = []
    for each in (expected, found):
        compared = []
        for rank in each:
            compared.append({part: rank[part] for part in parts})
        of_both.append(compared)
    assert not differences(*of_both)
    for key, value in found[0]["weights"].items():
        assert torch.equal(value, found[1]["weights"][key]), key


def check_written(name: str, found: list[Any]) -> None:
    """From the first step on, or from the one that no graph can hold."""
    for rank in found:
        assert rank["is_written"][-1]
        assert rank["is_written"][0] is not PROGRAMS[name].begins_captured


@pytest.fixture(scope="session")
def under_ddp(pool, tmp_path_factory):
    """Outcomes under "ddp", computed once."""
    results: dict[str, list[Any]] = {}

    def get(name: str) -> list[Any]:
        if name not in results:
            results[name] = pool.run(RANKS, train, name, "ddp", str(tmp_path_factory.mktemp("ddp")))
        return results[name]

    return get


# Optimizers that look at all of a parameter, and steps that work on gradients themselves, need
# parameters whole.
IN_SHARDS = sorted(
    PROGRAMS.keys() - {"Lbfgs", "Sam", "Pruned", "LotteryTickets", "SparseTables", "Adversarial"}
)


# Penalties differentiate twice, experts have shapes of their own, recurrent nets keep weights in
# lists, queues and norms have buffers, GANs run several backward passes, some checkpoint by
# themselves.
MADE_AGAIN = [
    *(
        "GradientPenalty",
        "LoopsOverExperts",
        "Recurrent",
        "MoCo",
        "Normalized",
        "Gan",
        "SeveralBackwards",
    ),
    *("Checkpointed", "RankDependent", "Functions", "CapturableAtFirst", "LearnsToLearn"),
]


# Each program is run once by default, in turn with whole parameters and in shards of either kind,
# or recomputed.
IN_ALL_WAYS = [(name, "auto") for name in PROGRAMS]
IN_ALL_WAYS += product(IN_SHARDS, ("zero3", "zero2"))
BY_DEFAULT = covering([row for row in IN_ALL_WAYS if row[0] not in MADE_AGAIN])


def programs_in(*ways: str) -> list[Any]:
    """Return the programs that run in some of the ways, with the way if there are several."""
    parameters = []
    for row in IN_ALL_WAYS:
        marks = () if row in BY_DEFAULT else pytest.mark.slow
        if row[1] in ways:
            parameters.append(pytest.param(*row[: len(ways)], marks=marks))
    return parameters


@pytest.mark.parametrize(("name", "parallel"), programs_in("zero3", "zero2"))
def test_sharded_as_under_ddp(pool, under_ddp, tmp_path, name: str, parallel: str) -> None:
    per_rank = pool.run(RANKS, train, name, "alpa", str(tmp_path), parallel)
    check_equal(under_ddp(name), per_rank)
    check_written(name, per_rank)
    for rank in per_rank:
        assert any(mode[0] in "SG" for mode in rank["modes"].values())


def gatherings(root: str, memory: float) -> list[int]:
    """Of units of parameters, by step, in steps that write answers, on devices of `memory`
    bytes.
    """
    counts: list[int] = []
    start = EagerFullyShard._start

    def counted(self: EagerFullyShard, unit: int) -> Any:
        counts[-1] += 1
        return start(self, unit)

    class Steps(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            counts.append(0)

    module = programs.WritesAnswers().double()
    cluster = ClusterSpec.load("pcie_8gpu")
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=memory))
    strategy = AlpaStrategy(cluster=cluster, verbose=False, parallel="zero3")
    common: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_steps": 6,
        "precision": "64-true",
    }
    with patched([(EagerFullyShard, "_start", counted)]):
        pl.Trainer(
            strategy=strategy, callbacks=[Steps()], default_root_dir=root, **{**common, **QUIET}
        ).fit(module)
    return counts


def test_what_writes_is_gathered_twice_a_step_where_it_has_room(pool, tmp_path) -> None:
    """Once to see that it is used again, once to stay; twice more in each of two updates and their
    backward passes.
    """
    with_room, _ = pool.run(RANKS, gatherings, str(tmp_path), 1e9)
    without, _ = pool.run(RANKS, gatherings, str(tmp_path), 3e3)
    assert max(with_room) < min(without)


def warnings_of_parts(name: str, folder: str) -> int:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(name, "alpa", folder, "zero3")
    return sum("of which each rank has a shard" in str(each.message) for each in said)


def test_who_reads_parts_of_gradients_is_told_so_once(pool, tmp_path) -> None:
    assert pool.run(RANKS, warnings_of_parts, "ClipsByHand", str(tmp_path)) == [1, 0]
    assert pool.run(RANKS, warnings_of_parts, "TwoKindsOfOptimizer", str(tmp_path)) == [0, 0]


def warnings_of_nan(parallel: str, folder: str) -> int:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train("Borrows", "alpa", folder, parallel)
    return sum("the first loss is nan" in str(each.message) for each in said)


def test_parameters_read_outside_their_module_are_refused_when_sharded(pool, tmp_path) -> None:
    assert pool.run(RANKS, warnings_of_nan, "zero3", str(tmp_path)) == [1, 0]
    assert pool.run(RANKS, warnings_of_nan, "data", str(tmp_path)) == [0, 0]


@pytest.mark.parametrize(("name", "parallel"), in_tiers(product(MADE_AGAIN, ("data", "zero3"))))
def test_recomputed_as_under_ddp(pool, under_ddp, tmp_path, name: str, parallel: str) -> None:
    """Every submodule is recomputed in the backward."""
    per_rank = pool.run(RANKS, train, name, "alpa", str(tmp_path), parallel, ["*"])
    check_equal(under_ddp(name), per_rank)
    check_written(name, per_rank)


@pytest.mark.parametrize("name", programs_in("auto"))
def test_as_under_ddp(pool, under_ddp, tmp_path, name: str) -> None:
    per_rank = pool.run(RANKS, train, name, "alpa", str(tmp_path))
    check_equal(under_ddp(name), per_rank)
    check_written(name, per_rank)
    assert [len(rank["said"]) for rank in per_rank] == [1, 0]


def test_names_that_are_not_computed_with_stay_captured(pool, tmp_path) -> None:
    per_rank = pool.run(RANKS, train, "LooksAtNames", "alpa", str(tmp_path))
    assert not any(rank["is_written"][0] for rank in per_rank)


NUMBERS = ("CountsNames", "CountsRecords", "TimesRanks", "TimesRanksByGroup")


@pytest.mark.parametrize("name", slow_but(NUMBERS, ("CountsRecords", "TimesRanks")))
def test_numbers_of_a_rank_stay_captured(pool, under_ddp, tmp_path, name: str) -> None:
    """Lists with an item per sample, and the number of ranks, are what they are on each rank."""
    per_rank = pool.run(RANKS, train, name, "alpa", str(tmp_path))
    check_equal(under_ddp(name), per_rank)
    assert not any(any(rank["is_written"]) for rank in per_rank)


def test_shards_cannot_be_pruned(pool, tmp_path) -> None:
    with pytest.raises(WorkerError, match="SetupError: ModelPruning puts masks"):
        pool.run(RANKS, train, "Pruned", "alpa", str(tmp_path), "zero2")


def test_a_backward_of_ones_own_that_works_on_gradients_is_refused(pool, tmp_path) -> None:
    with pytest.raises(
        WorkerError, match=r"SetupError: ClipsInBackward\.backward works on gradients"
    ):
        pool.run(RANKS, train, "ClipsInBackward", "alpa", str(tmp_path))


def test_what_fails_on_parts_of_parameters_is_told_of_whole_ones(pool, tmp_path) -> None:
    with pytest.raises(
        WorkerError, match=r"must match the size(.|\n)*with trainer.strategy.whole_parameters\(\):"
    ):
        pool.run(RANKS, train, "AveragesParts", "alpa", str(tmp_path), "zero3")


def groups_after_each(root: str, uneven: bool) -> list[int]:
    """How many process groups there are after each of three trainings, the second of which fails.

    Args:
        uneven: in the midst of a collective that only one rank has begun.
    """
    counts = []
    for fails in (False, True, False):
        trainer = pl.Trainer(
            strategy=AlpaStrategy(
                cluster="pcie_8gpu", verbose=False, capture="never", parallel="zero3"
            ),
            **{
                "accelerator": "cpu",
                "devices": RANKS,
                "max_steps": 2,
                "default_root_dir": root,
                **QUIET,
            },
            callbacks=[Fails(uneven)] if fails else [],
        )
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            trainer.fit(programs.ReadsItsLoss().double())
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


class Fails(pl.Callback):
    """After the first step."""

    def __init__(self, uneven: bool = False) -> None:
        self._uneven = uneven

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._uneven and trainer.is_global_zero:
            self.work = dist.all_reduce(torch.ones(1), group=cpu_group("rounds"), async_op=True)
        raise ArithmeticError


@pytest.mark.parametrize("uneven", [False, True], ids=["", "uneven"])
def test_trainings_in_one_process_use_the_same_process_groups(pool, tmp_path, uneven: bool) -> None:
    """But for groups in which a training that failed has left a collective in flight."""
    for first, failed, next_one in pool.run(
        RANKS, groups_after_each, str(tmp_path), uneven, init_group=False
    ):
        assert first == failed
        assert (first < next_one) == uneven


def left_by_a_failure(parallel: str, capture: str, root: str) -> int:
    """How many parameters of a training that failed there are when it is gone."""
    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, capture=capture, parallel=parallel)
    common: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_steps": 2,
        "default_root_dir": root,
    }
    trainer = pl.Trainer(strategy=strategy, callbacks=[Fails()], **{**common, **QUIET})
    with pytest.raises(ArithmeticError):
        trainer.fit(programs.Program().double())
    del trainer, strategy
    gc.collect()
    return sum(type(each) is ShardedParameter for each in gc.get_objects())


@pytest.mark.parametrize(
    ("parallel", "capture"), [("data", "auto"), ("data", "never"), ("zero3", "never")]
)
def test_nothing_stays_of_a_training_that_failed(
    pool, tmp_path, parallel: str, capture: str
) -> None:
    assert (
        pool.run(RANKS, left_by_a_failure, parallel, capture, str(tmp_path), init_group=False)
        == [0] * RANKS
    )


def resume(root: str) -> tuple[list[str], int]:
    """Return the log of a run that resumes one of eager steps, and the number of its steps."""
    said = Said()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(said)
    try:
        for epochs, path in ((1, None), (2, f"{root}/last.ckpt")):
            strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False)
            common: dict[str, Any] = {"accelerator": "cpu", "devices": RANKS, "max_epochs": epochs}
            trainer = pl.Trainer(strategy=strategy, default_root_dir=root, **{**common, **QUIET})
            module = programs.ReadsItsLoss().double()
            trainer.fit(module, ckpt_path=path)
            trainer.save_checkpoint(f"{root}/last.ckpt")
    finally:
        logging.getLogger("lightning.pytorch.utilities.rank_zero").removeHandler(said)
    return said.lines, trainer.global_step


def test_a_resumed_run_is_not_captured_again(pool, tmp_path) -> None:
    (lines, steps), _ = pool.run(RANKS, resume, str(tmp_path))
    assert steps == 2 * programs.BATCHES
    assert "the checkpoint is of a training with eager steps" not in lines[0]
    assert "the checkpoint is of a training with eager steps" in lines[1]
