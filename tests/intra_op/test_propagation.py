"""Layouts that are propagated: a point of the solver's own problem, as a reader works it out, never
the better one.
"""

from __future__ import annotations

from itertools import product

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from covering import in_tiers
from intra_op.test_known_optima import ADAM, cluster_of
from models import MODELS
from torch import nn

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.table import proof_of
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use, evaluate
from alpa_strategy.intra_op.solver.solve import propagate, solve
from alpa_strategy.ir.plan import modes_text
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PROPAGATION, PlanOptions
from alpa_strategy.planner.one_stage import plan_one_stage
from alpa_strategy.planner.plan_check import check_plan
from alpa_strategy.planner.planner import choose_plan
from alpa_strategy.planner.task import PlanTask

NOTE = "layouts propagated from op to op, not optimised"
CLUSTER = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": 4})


class Pair(pl.LightningModule):
    """A wide pair of linears, as of a transformer's MLP, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(1024, 65536, bias=False), nn.Linear(65536, 1024, bias=False)

    def training_step(self, batch, batch_idx):
        return self.proj(torch.relu(self.fc(batch))).mean()


def step_of(module, batch, num_devices=4, scope="rank"):
    return capture_step(module, batch, world_size=num_devices, batch_scope=scope)


def plan(model, rows, **options):
    torch.manual_seed(0)
    module = MODELS[model]()
    options = PlanOptions.from_user(**options)
    step = step_of(module, module.example_batch(rows), scope=options.rows)
    chosen_plan = choose_plan(PlanTask(step, CLUSTER, options, ADAM))
    if chosen_plan.is_pipelined:
        micro = microbatch(step, chosen_plan.num_microbatches, 4)
        check_plan(chosen_plan, micro.graph, 4, micro.from_prologue)
    else:
        check_plan(chosen_plan, step, 4, ())
    return chosen_plan


def test_columns_then_rows_have_one_all_reduce():
    """Megatron's two pins: everything else follows, and nothing is communicated but the second
    linear's sum.
    """
    with torch.device("meta"):
        step = step_of(Pair(), torch.empty(64, 1024), scope="global")
    options = PlanOptions.from_user(
        solver="propagation",
        batch_scope="global",
        placements={"fc.weight": "S0", "proj.weight": "S1"},
    )
    (stage,) = plan_one_stage(PlanTask(step, cluster_of(4), options, ADAM)).stages
    strategies = []
    for op in step.ops[:3]:
        (strategy,) = stage.strategies[op.name]
        strategies.append(str(strategy))
    assert strategies == [
        "R,S0->S1",
        "S1->S1",
        "S1,S1->P",
    ]
    large = [c for c in stage.collectives if c.num_bytes > 1024]
    assert {(c.kind, c.phase, c.num_bytes) for c in large} <= {
        ("all_reduce", "forward", 64 * 1024 * 4)
    }


OPTIONS = [
    {},
    {"logical_mesh": (2, 2)},
    {"parallel": "tensor"},
    {"parallel": "zero3"},
    {"batch_scope": "global", "num_stages": 1},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "1F1B"},
    {"num_stages": 1, "num_microbatches": 2, "remat": True},
    {"device_map": {"*": "0-3"}},
]
ROWS = {"mlp": 16, "gpt": 8}


@pytest.mark.parametrize(("model", "number"), in_tiers(product(ROWS, range(len(OPTIONS)))))
def test_it_is_never_better_than_the_program(model, number):
    options = OPTIONS[number]
    exact, found = (
        plan(model, ROWS[model], solver=solver, **options) for solver in ("ilp", "propagation")
    )
    assert found.predicted.step_seconds >= exact.predicted.step_seconds * (1 - 1e-9)
    assert NOTE in found.notes
    assert NOTE not in exact.notes
    assert found.gap == 1.0
    assert proof_of(found) == "distance to the optimum not known"
    assert found.fingerprint != exact.fingerprint


def test_pins_are_kept_and_parameters_lie_as_their_first_use_wants():
    chosen_plan = plan(
        "gpt",
        8,
        solver="propagation",
        num_stages=1,
        placements={"blocks.*.qkv.weight": "S0"},
        logical_mesh=[4],
    )
    modes = {
        name: modes_text(how.module_modes)
        for name, how in chosen_plan.stages[0].parameter_plans.items()
    }
    assert {mode for name, mode in modes.items() if name.endswith("qkv.weight")} == {"S0"}
    assert modes["wte.weight"] != "R", "rows of the batch are divided where it is read first"


def test_what_does_not_fit_is_said():
    with pytest.raises(DoesNotFitError) as error:
        plan("gpt", 8, solver="propagation", num_stages=1, num_microbatches=1, memory_limit="40KiB")
    assert "layouts that are propagated need" in error.value.problem
    assert "40.0 KiB" in error.value.problem
    assert 'solver="ilp"' in error.value.fix


def test_memory_sends_it_to_recomputation_where_that_fits():
    free = plan("gpt", 32, solver="propagation", num_stages=1, num_microbatches=2, remat=False)
    again = plan("gpt", 32, solver="propagation", num_stages=1, num_microbatches=2, remat=True)
    assert again.predicted.peak_bytes < free.predicted.peak_bytes
    limit = (again.predicted.peak_bytes + free.predicted.peak_bytes) / 2
    chosen_plan = plan(
        "gpt", 32, solver="propagation", num_stages=1, num_microbatches=2, memory_limit=limit
    )
    assert chosen_plan.stages[0].remat
    assert chosen_plan.predicted.peak_bytes <= limit


def random_problem(rng):
    """A chain of ops with parameters, some of which two ops use, and a skip."""
    size = int(rng.integers(2, 4))
    num_ops = int(rng.integers(2, 6))
    choices = [Choice(f"p{i}", rng.uniform(0, 1, size), np.ones(size)) for i in range(num_ops)]
    choices += [Choice(f"op{i}", rng.uniform(0, 1, size), np.ones(size)) for i in range(num_ops)]
    same = np.arange(size)

    def transfer(name, producer, consumers):
        uses = tuple(Use(c, rng.permutation(size)) for c in consumers)
        return Transfer(
            name, producer, same, uses, rng.uniform(0, 1, (size, size)), np.zeros((size, size))
        )

    transfers = [
        transfer(f"p{i}", i, sorted({num_ops + i, num_ops + int(rng.integers(i, num_ops))}))
        for i in range(num_ops)
    ]
    for i in range(num_ops - 1):
        readers = sorted({num_ops + i + 1, num_ops + int(rng.integers(i + 1, num_ops))})
        transfers.append(transfer(f"v{i}", num_ops + i, readers))
    return Problem(tuple(choices), tuple(transfers))


@pytest.mark.parametrize("seed", range(40))
def test_each_op_takes_what_is_cheapest_as_its_operands_lie(seed):
    """Against the definition: all strategies of an op, and of what is first used there, tried one
    by one.
    """
    problem = random_problem(np.random.default_rng(seed))
    found = propagate(problem)
    num_ops = len(problem.choices) // 2
    decided: dict[int, int] = {}

    def seconds(assignment):
        """Of what is decided alone."""
        known = [
            Transfer(t.name, t.producer, t.source, uses, t.cost, t.memory)
            for t in problem.transfers
            if t.producer in assignment
            and (uses := tuple(u for u in t.uses if u.choice in assignment))
        ]
        free = []
        for i, c in enumerate(problem.choices):
            free.append(Choice(c.name, c.cost if i in assignment else c.cost * 0, c.memory))
        return evaluate(
            Problem(tuple(free), tuple(known)), [assignment.get(i, 0) for i in range(len(free))]
        )[0]

    for op in range(num_ops, 2 * num_ops):
        new = set()
        for transfer in problem.transfers:
            if op in [use.choice for use in transfer.uses]:
                new.add(transfer.producer)
        new -= set(decided)
        assert len(new) <= 1, "its own parameter; all else is decided"
        tried = {}
        for k in range(len(problem.choices[op].cost)):
            for mode in range(len(problem.choices[op].cost)) if new else [0]:
                tried[k, mode] = seconds({**decided, op: k, **dict.fromkeys(new, mode)})
        k, mode = min(tried, key=tried.get)
        decided |= {op: k, **dict.fromkeys(new, mode)}
    assert found.assignment == tuple(decided[i] for i in range(len(problem.choices)))
    assert found.seconds == pytest.approx(evaluate(problem, found.assignment)[0])
    assert (found.method, found.bound) == (PROPAGATION, 0.0)
    assert found.seconds >= solve(problem).seconds - 1e-12


def test_a_dead_end_is_said():
    one = np.zeros(1)
    way = Transfer(
        "v",
        0,
        np.zeros(1, int),
        (Use(1, np.zeros(1, int)),),
        np.full((1, 1), np.inf),
        np.zeros((1, 1)),
    )
    with pytest.raises(PlanError, match="layouts cannot be propagated to linear_0"):
        propagate(Problem((Choice("p", one, one), Choice("linear_0", one, one)), (way,)))
