"""Pipelines under the Trainer: the same training as on one device, whatever stages, schedule and
micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from covering import in_tiers, slow_but
from equality.harness import assert_same, record
from jobs import failing_job, processes_left, run_job
from models import MLP
from strategy.test_training import ROWS, Measured, Phased, SaveMidway, Validated, run_train, train
from strategy.test_training import assert_same as same_training
from worker_pool import WorkerError

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.planner import make_plan

KINDS = {"Validated": Validated, "Measured": Measured, "Phased": Phased}
STEPS = 3
CASES = {
    "gpt": {"ignore_fraction": 0.4, "num_layers": 2, "vocab_size": 33},
    "llama": {"num_layers": 1},
    "bert": {"num_layers": 1},
    "mlp": {},
}


@pytest.fixture(scope="session")
def plain(pool):
    """Runs of a plain single-process Trainer, computed once."""
    results = {}

    def get(model, optimizer, world_size, clip=None, accumulate=1):
        key = (model, optimizer, world_size, clip, accumulate)
        if key not in results:
            kwargs = {**CASES[model], "optimizer": optimizer}
            results[key] = pool.run(
                1,
                record,
                model,
                kwargs,
                None,
                STEPS,
                world_size,
                clip,
                accumulate,
                init_group=False,
            )[0]
        return results[key]

    return get


def run_case(
    pool, plain, tmp_path, model, world_size, options, optimizer="adamw", clip=None, accumulate=1
):
    kwargs = {**CASES[model], "optimizer": optimizer}
    options = {"cluster": "pcie_8gpu", "plan_dir": str(tmp_path), "verbose": False, **options}
    runs = pool.run(world_size, record, model, kwargs, options, STEPS, world_size, clip, accumulate)
    order = 1 if options.get("batch_scope") == "global" else world_size  # of the samples
    for run in runs:
        assert_same(run, plain(model, optimizer, order, clip, accumulate))
    return runs[0]


@pytest.mark.parametrize(("model", "schedule"), in_tiers(product(CASES, ("1F1B", "GPipe"))))
def test_two_ranks(pool, plain, tmp_path, model, schedule):
    optimizer, clip = ("adamw", None) if schedule == "1F1B" else ("sgd", 0.1)
    options = {"num_stages": 2, "num_microbatches": 2, "schedule": schedule}
    run = run_case(pool, plain, tmp_path, model, 2, options, optimizer, clip)
    assert run["pipeline"] == (2, 2, schedule)


@pytest.mark.parametrize("optimizer", slow_but(("adamw", "sgd"), ("adamw",)))
def test_clipping_and_accumulation(pool, plain, tmp_path, optimizer):
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1F1B"}
    run_case(pool, plain, tmp_path, "gpt", 2, options, optimizer, 0.1, 2)


# By default test_pipeline_matrix.py has a pipeline on three ranks.
@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_stages"), list(product(("gpt", "bert"), (2, 3))))
def test_three_ranks(pool, plain, tmp_path, model, num_stages):
    """The harness has 8 rows a step, which 3 ranks cannot share: each brings all of them."""
    options = {
        "num_stages": num_stages,
        "num_microbatches": 2,
        "schedule": "1F1B",
        "batch_scope": "global",
    }
    run = run_case(pool, plain, tmp_path, model, 3, options, clip=0.1)
    assert run["pipeline"] == (num_stages, 2, "1F1B")


OF_FOUR = {
    "1F1B": {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"},
    "zero3": {"num_stages": 2, "num_microbatches": 2, "schedule": "GPipe", "parallel": "zero3"},
    "zero2": {"num_stages": 2, "num_microbatches": 2, "schedule": "GPipe", "parallel": "zero2"},
    "tensor": {
        "num_stages": 2,
        "num_microbatches": 2,
        "schedule": "1F1B",
        "parallel": "tensor",
        "remat": True,
    },
    "ZBVZeroBubble": {
        "num_stages": 4,
        "num_microbatches": 4,
        "schedule": "ZBVZeroBubble",
        "batch_scope": "global",
    },
    "Interleaved1F1B": {
        "num_stages": 4,
        "num_microbatches": 4,
        "schedule": "Interleaved1F1B",
        "batch_scope": "global",
    },
}


# test_pipeline_matrix.py has all schedules and plans on four ranks, but for plans that are solved.
# By default test_pipeline_matrix.py has pipelines on four ranks.
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks(pool, plain, tmp_path, name):
    options = OF_FOUR[name]
    run = run_case(pool, plain, tmp_path, "gpt", 4, options, clip=0.1)
    assert run["pipeline"] == tuple(
        options[key] for key in ("num_stages", "num_microbatches", "schedule")
    )


def test_micro_batches_and_recomputation_on_one_device(pool, plain, tmp_path):
    run = run_case(
        pool, plain, tmp_path, "gpt", 1, {"num_microbatches": 4, "remat": True}, clip=0.1
    )
    assert run["pipeline"] == (1, 4, "none")


def test_micro_batches_without_stages(pool, plain, tmp_path):
    run = run_case(pool, plain, tmp_path, "gpt", 2, {"num_stages": 1, "num_microbatches": 4})
    assert run["pipeline"][:2] == (1, 4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"parallel": "tensor"}, marks=pytest.mark.slow),
        pytest.param(
            {"parallel": "zero3", "placements": {"*.weight": "S0"}}, marks=pytest.mark.slow
        ),
        {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"},
    ],
    ids=str,
)
def test_layouts_that_are_propagated(pool, plain, tmp_path, options):
    run_case(pool, plain, tmp_path, "gpt", 2, {"solver": "propagation", **options})


def test_parameters_on_the_devices_that_are_named(pool, plain, tmp_path):
    options = {"device_map": {"wte.*": 0, "head.*": 1}, "num_microbatches": 2, "schedule": "1F1B"}
    assert run_case(pool, plain, tmp_path, "gpt", 2, options)["pipeline"] == (2, 2, "1F1B")


PIPELINE = {"num_stages": 2, "num_microbatches": 2, "schedule": "1F1B"}


@pytest.mark.parametrize("kind", ["Validated", "Measured"])
def test_validation_and_logs(pool, tmp_path, kind):
    """Evaluation sees unsharded parameters; metrics, numbers and dicts are logged, and outputs
    returned, on all ranks.
    """
    arguments = {"validate": kind == "Validated", "max_epochs": 2}
    reference = train(KINDS[kind], str(tmp_path), None, **arguments)
    # The reference is one device: metrics that are no means over ranks need its contract.
    options = {**PIPELINE, "batch_scope": "global"}
    for run in pool.run(2, run_train, kind, str(tmp_path), options, arguments):
        same_training(run, reference)
        assert set(run["shapes"]) <= {(16, 8)}


def test_checkpoints_are_ordinary_and_resume_anywhere(pool, tmp_path):
    root = str(tmp_path)
    reference = train(MLP, root, None, max_epochs=2)
    pool.run(
        2,
        run_train,
        "MLP",
        root,
        {**PIPELINE, "checkpoint": "single"},
        {"save": f"{root}/half.ckpt"},
    )
    again = {"ckpt_path": f"{root}/half.ckpt", "max_epochs": 2}
    same_training(train(MLP, root, None, **again), reference)
    for resumed in pool.run(2, run_train, "MLP", root, PIPELINE, again):
        same_training(resumed, reference)
        for number, state in reference["optimizer"]["state"].items():
            torch.testing.assert_close(
                resumed["optimizer"]["state"][number], state, rtol=1e-9, atol=1e-9
            )


def run_and_save_midway(root):
    train(MLP, root, {**PIPELINE, "checkpoint": "single"}, callbacks=[SaveMidway()])


def test_a_checkpoint_in_the_middle_of_training(pool, tmp_path):
    plain, alpa = tmp_path / "plain", tmp_path / "alpa"
    train(MLP, str(plain), None, callbacks=[SaveMidway()])
    pool.run(2, run_and_save_midway, str(alpa))
    expected = torch.load(plain / "midway.ckpt", weights_only=False)
    stored = torch.load(alpa / "midway.ckpt", weights_only=False)
    assert stored.keys() == expected.keys()
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(stored[key], expected[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_rows", slow_but((3 * ROWS + 4, 3 * ROWS + 2), (3 * ROWS + 2,)))
def test_a_smaller_last_batch_and_a_branch_on_batch_idx(pool, tmp_path, num_rows):
    """The stages run a smaller batch; one that cannot be cut, or a step with other ops, runs in one
    piece.
    """
    reference = train(KINDS["Phased"], str(tmp_path), None, num_rows=num_rows)
    for run in pool.run(2, run_train, "Phased", str(tmp_path), PIPELINE, {"num_rows": num_rows}):
        same_training(run, reference)


class Alternating(MLP):
    """A parameter that the first batch does not use joins in every third one."""

    def __init__(self):
        super().__init__()
        self.extra = torch.nn.Linear(self.d_in, self.d_out)

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.net(x)
        if batch_idx % 3 == 2:
            prediction = prediction + self.extra(x)
        return torch.nn.functional.mse_loss(prediction, y)


def run_alternating(root):
    return train(Alternating, root, PIPELINE, gradient_clip_val=0.1)


def test_parameters_that_join_in_later(pool, tmp_path):
    reference = train(Alternating, str(tmp_path), None, gradient_clip_val=0.1)
    for run in pool.run(2, run_alternating, str(tmp_path)):
        same_training(run, reference)


def test_pins_that_cannot_be_met(pool, tmp_path):
    with pytest.raises(WorkerError, match="num_microbatches=3 does not divide the 4 rows"):
        pool.run(2, run_train, "MLP", str(tmp_path), {**PIPELINE, "num_microbatches": 3}, {})
    with pytest.raises(WorkerError, match="need at least 2 devices"):
        pool.run(1, run_train, "MLP", str(tmp_path), PIPELINE, {"world_size": 1})


WIDE = {"d_in": 256, "d_hidden": 256, "d_out": 256, "num_layers": 4}


def slow_network():
    """2 devices with a slow link; nothing but bytes and FLOPs costs time."""
    cluster = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 2})
    link = replace(cluster.intra_node, bandwidth=1e9, latency=1e-7)
    return replace(cluster, intra_node=link, device=replace(cluster.device, launch_seconds=1e-7))


def test_the_number_of_stages_alone_may_be_asked_for(pool, tmp_path):
    """The rest is solved; few rows, many weights, a slow network. The stored plan gives the
    same.
    """
    options = {
        "cluster": slow_network(),
        "plan_dir": str(tmp_path),
        "verbose": False,
        "num_stages": 2,
    }
    reference = pool.run(1, record, "mlp", WIDE, None, STEPS, 2, 0.5, init_group=False)[0]
    for _ in range(2):
        for run in pool.run(2, record, "mlp", WIDE, options, STEPS, 2, 0.5):
            assert_same(run, reference)
            assert run["pipeline"][0] == 2


def test_one_stage_stays_unless_asked_otherwise():
    slow = slow_network()
    torch.manual_seed(0)
    module = MLP(**WIDE)
    rows = module.example_batch(4)
    for options in ({}, {"num_stages": 1}, {"parallel": "data"}, {"logical_mesh": [2]}):
        plan = make_plan(module, rows, slow, PlanOptions.from_user(**options), OptimizerInfo())
        assert (len(plan.stages), plan.num_microbatches) == (1, 1)
    for asked in ({"remat": True}, {"remat": True, "num_stages": 4, "schedule": "ZBVZeroBubble"}):
        plan = make_plan(module, rows, slow, PlanOptions.from_user(**asked))
        assert all(stage.remat for stage in plan.stages)


# By default extras/failure_watch/test_lost_rank.py ends a rank in the midst of a step, and
# test_failure.py there has exceptions.
@pytest.mark.slow
def test_one_ranks_exception_ends_all_ranks(tmp_path):
    """In the midst of a step: the others wait for its messages then."""
    script = failing_job("on_train_batch_start", "num_stages=2, num_microbatches=2")
    done = run_job(tmp_path, script, str(tmp_path), timeout=110)
    assert done.returncode != 0
    assert "FINISHED" not in done.stdout
    assert "ValueError: the user's own mistake" in done.stderr
    assert processes_left(tmp_path) == ""


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, PIPELINE),
        # Recomputed alike: pipeline/test_staged_step.py.
        pytest.param(4, {**PIPELINE, "parallel": "tensor", "remat": True}, marks=pytest.mark.slow),
    ],
    ids=["", "recomputed"],
)
def test_dropout_is_reproducible(pool, tmp_path, world, options):
    """Same seed, same plan: the same losses, bit by bit, and the same on all ranks."""
    kwargs = {**CASES["gpt"], "dropout": 0.2}
    options = {**options, "cluster": "pcie_8gpu", "plan_dir": str(tmp_path), "verbose": False}
    first, again = (pool.run(world, record, "gpt", kwargs, options, STEPS, world) for _ in range(2))
    assert len(set(first[0]["losses"])) == STEPS
    for one, other in zip(first, again, strict=True):
        assert one["losses"] == other["losses"]
    assert len({tuple(run["losses"]) for run in first}) == 1
