"""Sums that overlap with matmuls are priced where a program can overlap them, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alpa_strategy import ClusterSpec, PlanOptions, capture_step
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.inter_op.stage_problem import RematSpans, take_apart
from alpa_strategy.intra_op.build import IntraOp, build
from alpa_strategy.intra_op.memory_choices import with_recompute
from alpa_strategy.intra_op.option_tables import OptionTables
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.placement import dual_layout_to_str
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.planner import choose_plan
from alpa_strategy.planner.task import PlanTask

ADAM = OptimizerInfo(state_bytes=16)
SHAPES = {"rows": (4096, 1024), "samples of rows": (32, 128, 1024)}


class Wide(pl.LightningModule):
    """Layers whose sums take about as long as their products."""

    def __init__(self, num_layers: int = 1) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(1024, 8192) for _ in range(num_layers))
        self.down = nn.ModuleList(nn.Linear(8192, 1024) for _ in range(num_layers))
        self.norm = nn.LayerNorm(1024)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.norm(batch * self.norm.weight)
        for up, down in zip(self.up, self.down, strict=True):
            x = self.norm(x + down(torch.relu(up(x))))
        return x.square().mean()


def captured(shape: tuple[int, ...], num_layers: int = 1) -> StepGraph:
    with torch.device("meta"):
        batch = torch.zeros(shape, device="meta")
        return capture_step(Wide(num_layers), batch, world_size=2, batch_scope="global")


def cluster(num_devices: int, overlap: float = 0.75) -> ClusterSpec:
    sizes = {"num_nodes": 1, "devices_per_node": num_devices}
    return replace(ClusterSpec.load("pcie_8gpu", sizes), overlap=overlap)


def problem(step: StepGraph, mesh_shape: tuple[int, ...]) -> IntraOp:
    devices = cluster(int(np.prod(mesh_shape)))
    return build(
        step, OptionTables(devices.logical_mesh(mesh_shape), RooflineCosts(devices.device), ADAM)
    )


def transfer_of(intra: IntraOp, op_name: str) -> int:
    """The number of the transfer of an op's result."""
    (op,) = (op for op in intra.step.ops if op.name == op_name)
    (index,) = (i for i, t in enumerate(intra.transfers) if t.value == op.results[0])
    return index


def hidden(intra: IntraOp, op_name: str) -> dict[tuple[str, str], float]:
    """(source, target) -> seconds of the forward that cost no time, of an op's result."""
    layouts = intra.transfers[transfer_of(intra, op_name)]
    seconds = {}
    for p, source in enumerate(layouts.sources):
        for q, target in enumerate(layouts.targets):
            texts = dual_layout_to_str(source), dual_layout_to_str(target)
            seconds[texts] = float(layouts.hidden[p, q])
    return seconds


def test_a_sum_of_which_each_device_gets_rows_needs_another_dim_for_its_chunks():
    by_rows = hidden(problem(captured(SHAPES["rows"]), (2,)), "linear_1")
    assert by_rows["P", "R"] > 0
    assert by_rows["P", "S0"] == 0, "chunks of rows are not the rows of a device"
    by_samples = hidden(problem(captured(SHAPES["samples of rows"]), (2,)), "linear_1")
    assert by_samples["P", "R"] > 0
    assert by_samples["P", "S0"] > 0
    assert all(seconds == 0 for ends, seconds in by_samples.items() if ends[0] != "P")


def test_there_are_no_more_chunks_than_rows():
    few = hidden(problem(captured((1, 1024)), (2,)), "linear_1")
    assert few["P", "R"] == 0


def test_a_sum_over_all_axes_at_once_is_one_sum():
    seconds = hidden(problem(captured(SHAPES["rows"]), (2, 2)), "linear_1")
    assert seconds["P P", "R R"] > 0
    assert seconds["P P", "R P"] > 0
    assert seconds["P S0", "R R"] == 0, "a gather follows the sum"


def test_a_reader_in_another_recompute_segment_waits_for_the_sum():
    intra = problem(captured(SHAPES["rows"]), (2,))
    (reader,) = (i for i, op in enumerate(intra.step.ops) if op.name == "linear_1")
    split = RematSpans(intra, (0, reader + 1)).split()
    whole, apart = transfer_of(intra, "linear_1"), transfer_of(split, "linear_1")
    assert not split.transfers[apart].hidden.any()
    added = split.problem.transfers[apart].cost - intra.problem.transfers[whole].cost
    assert added == pytest.approx(intra.transfers[whole].hidden)
    forward = take_apart(split, (0, reader + 1)).transfers[apart].forward
    assert (forward >= take_apart(intra).transfers[whole].forward).all()


def test_a_result_that_is_recomputed_is_not_summed_in_chunks():
    intra = problem(captured(SHAPES["rows"]), (2,))
    again = with_recompute(intra)
    index = transfer_of(intra, "linear_1")
    num_rows = len(intra.transfers[index].sources)
    cost, copied = np.vsplit(again.problem.transfers[index].cost, [num_rows])
    if len(copied):
        assert copied == pytest.approx(cost + again.transfers[index].hidden[:num_rows])
        assert not again.transfers[index].hidden[num_rows:].any()


def planned(step: StepGraph, num_devices: int, overlap: float, **options: object) -> Plan:
    return choose_plan(PlanTask(step, cluster(num_devices, overlap), PlanOptions(**options), ADAM))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_priced_in_chunks_is_computed_in_chunks(shape):
    plan = planned(captured(shape), 2, 0.75, parallel="tensor")
    (stage,) = plan.stages
    assert stage.num_chunks
    assert stage.num_chunks.keys() == stage.execution.chunk_dims.keys()


@pytest.mark.parametrize(
    ("schedule", "overlaps"), [("Interleaved1F1B", True), ("InterleavedZeroBubble", False)]
)
def test_a_split_backward_overlaps_no_sums(schedule, overlaps):
    step = captured(SHAPES["samples of rows"], num_layers=4)
    pins = {"num_stages": 4, "num_microbatches": 2, "schedule": schedule}
    alone = planned(step, 4, 0.0, **pins)
    hiding = planned(step, 4, 0.75, **pins)
    assert any(stage.collectives for stage in hiding.stages)
    for stage in hiding.stages:
        assert bool(stage.num_chunks) == bool(stage.execution.chunk_dims)
    assert any(stage.num_chunks for stage in hiding.stages) == overlaps
    forward = sum(stage.forward_seconds for stage in alone.stages)
    hiding_forward = sum(stage.forward_seconds for stage in hiding.stages)
    assert (hiding_forward < forward) == overlaps
