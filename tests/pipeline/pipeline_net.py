"""A small net as hand-written stage programs, on any ranks and in any layouts, and the same step in
one process.

Layer l is `h[l + 1] = tanh(h[l] @ W_l^T)`, plus a skip from h[1] into the last layer. The first and
the last layer share their weight when `tied`. The integer tensor `ids` goes from the first stage to
the last by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from stores import store_on
from torch import nn
from torch.nn.functional import linear

from alpa_strategy.comm.mesh import build_stage_meshes
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.ir.graph import BatchInput, ParameterInput, StepGraph
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import INVARIANT, Layout, dual_layout
from alpa_strategy.ir.plan import ParameterPlan
from alpa_strategy.microbatch.rules import SUM, WHOLE, MicrobatchPlacement
from alpa_strategy.microbatch.transform import MicroStep
from alpa_strategy.pipeline.executor import Pipeline, PipelineSpec, SharedParameter
from alpa_strategy.pipeline.per_step_values import PerStepValues
from alpa_strategy.pipeline.stage_program import Span, StageProgram
from alpa_strategy.pipeline.stage_worker import LocalStage
from alpa_strategy.sharding.cross_mesh import StageSpec

WIDTH, ROWS = 6, 144
IDS = 100
LOSS = 200
ROW_MEANS = 201
COUNT = 202
F64 = torch.float64


class Net(nn.Module):
    def __init__(self, num_layers: int, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=F64) for _ in range(num_layers)
        )
        self.register_buffer("count", torch.zeros((), dtype=F64))
        if tied:
            self.layers[num_layers - 1].weight = self.layers[0].weight


def make_net(num_layers: int, tied: bool) -> Net:
    generator = torch.Generator().manual_seed(3)
    net = Net(num_layers, tied)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))
    return net


def global_batch(step=0):
    generator = torch.Generator().manual_seed(5 + step)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=F64) for _ in range(2))
    return x, y, torch.randint(0, 5, (ROWS,), generator=generator)


def whole_step(net, batch):
    """Loss, row means of the result, and gradients by name, in one process."""
    x, y, ids = batch
    h, num_layers = x, len(net.layers)
    first = None
    for i, layer in enumerate(net.layers):
        h = torch.tanh(linear(h, layer.weight))
        first = h if first is None else first
        if i == num_layers - 1 and i > 0:
            h = h + first
    loss = ((h - y).square().sum(1) * (1 + ids % 3)).sum() / ROWS
    names = [name for name, _ in net.named_parameters()]
    grads = torch.autograd.grad(loss, list(net.parameters()))
    return loss.detach(), h.mean(1).detach(), dict(zip(names, grads, strict=True))


@dataclass(frozen=True)
class StageCase:
    """A stage of the net. `style` per mesh axis: rows cut (`S0`), work repeated (`R`) or
    column-parallel (`T`); `modes`
    are those of its parameters' plans (default: what the style requests)."""

    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    style: str = "S0"
    mesh_shape: tuple[int, ...] = ()
    modes: str = ""

    @property
    def shape(self):
        return self.mesh_shape or (len(self.ranks),)

    @property
    def styles(self):
        """One style per mesh axis: S0 (data parallel), R (replicated), T (column parallel)."""
        styles = self.style.split()
        return styles if len(styles) == len(self.shape) else styles * len(self.shape)

    def per_axis(self, of_style: dict[str, str]) -> str:
        """The text of a layout whose placement on each axis depends on the axis's style."""
        return " ".join(of_style[style] for style in self.styles)

    @property
    def rows(self) -> Layout:
        return Layout.parse(self.per_axis({"S0": "S0", "R": "R", "T": "R"}))

    @property
    def plan(self) -> ParameterPlan:
        return ParameterPlan.parse(self.modes or self.per_axis({"S0": "R*", "R": "R", "T": "S0"}))


def program_of(case: StageCase, mesh, net, sent, is_last, rows):
    """The `SpanProgram` of the stage's only recompute segment."""
    num_layers = len(net.layers)
    invariant = (INVARIANT,) * len(case.shape)
    kept = dual_layout(str(case.rows))
    # Column-parallel axes: the input's gradient is a sum over them, the output is gathered.
    wide = dual_layout(case.per_axis({"S0": "S0", "R": "R", "T": "R*"}))
    columns = dual_layout(case.per_axis({"S0": "S0", "R": "R", "T": "S1"}))
    into = Reshard(kept, wide, (rows, WIDTH), mesh)
    out = Reshard(columns, kept, (rows, WIDTH), mesh)
    summed = dual_layout(case.per_axis({"S0": "P", "R": "R", "T": "R"}))
    total = Reshard(summed, invariant, (), mesh)
    means = Reshard(kept, invariant, (rows,), mesh)
    used = dual_layout(case.per_axis({"S0": "R*", "R": "R", "T": "S0"}))
    stored = []
    for mode in map(str, case.plan.modes):
        # parameters that are gathered once a step arrive unsharded
        stored.append("R*" if mode[0] == "G" else mode)
    gather = Reshard(dual_layout(" ".join(stored)), used, (WIDTH, WIDTH), mesh)

    def program(inputs):
        h, batch = dict(inputs.received), inputs.batch
        if 0 in case.layers:
            h[0], h[IDS] = batch[0], batch[2]
        for i in case.layers:
            name = (
                "layers.0.weight"
                if net.layers[i].weight is net.layers[0].weight
                else f"layers.{i}.weight"
            )
            h[i + 1] = torch.tanh(out(linear(into(h[i]), gather(inputs.parameters[name]))))
            if i == num_layers - 1 and i > 0:
                h[i + 1] = h[i + 1] + h[1]
        escaping = {}
        if is_last:
            result = h[num_layers]
            loss = ((result - batch[1]).square().sum(1) * (1 + h[IDS] % 3)).sum() / ROWS
            escaping = {
                LOSS: total(loss),
                ROW_MEANS: means(result.mean(1)),
                COUNT: inputs.buffers["count"] + 1,
            }
        return escaping, {value: h[value] for value in sent}, {}

    return program


def build(cases, schedule, num_microbatches, num_layers, tied=False, cluster=None):
    """(net with this rank's shards, Pipeline, {stage: LocalStage})."""
    net = make_net(num_layers, tied)
    rows = ROWS // num_microbatches
    rank = dist.get_rank()
    meshes = build_stage_meshes([(case.shape, case.ranks) for case in cases])
    last = len(cases) - 1
    received, sent = boundary_values(cases, num_layers)
    specs = []
    for i, case in enumerate(cases):
        specs.append(stage_spec(case, received[i], sent[i], i == 0, i == last))
    names = [f"layers.{i}.weight" for i in range(num_layers - tied)]
    users = {n: [] for n in names}
    for i, case in enumerate(cases):
        for layer in case.layers:
            users[names[layer % len(names)]].append(i)
    own, stores = {}, {}
    for i, case in enumerate(cases):
        if rank not in case.ranks:
            continue
        mesh = meshes[i]
        mine = []
        for n in names:
            if any(cases[user].ranks == case.ranks for user in users[n]):
                mine.append(n)
        inputs = tuple(ParameterInput(0, (n,), TensorMeta((WIDTH, WIDTH), F64, True)) for n in mine)
        store = stores.get(case.ranks)
        if store is None:
            store = stores[case.ranks] = store_on(mesh, net, inputs, dict.fromkeys(mine, case.plan))
            store.shard()
        span = Span(program_of(case, mesh, net, sent[i], i == last, rows), tuple(received[i]))
        parameters = {n: net.get_parameter(n) for n in mine}
        own[i] = LocalStage(
            StageProgram([span], LOSS),
            store.of_stage[0],
            mesh,
            parameters,
            {"count": net.count},
            PerStepValues(()),
        )
    shared = []
    for name, stages in users.items():
        if len({cases[i].ranks for i in stages}) > 1:
            uses = tuple((i, name, cases[i].plan.layout) for i in stages)
            shared.append(SharedParameter((WIDTH, WIDTH), F64, uses))
    micro = MicroStep(
        num_microbatches,
        microbatch_graph(num_layers, rows),
        states={
            LOSS: SUM,
            ROW_MEANS: MicrobatchPlacement("rows", 0, dist.get_world_size()),
            COUNT: WHOLE,
        },
        num_runs=dist.get_world_size(),
    )
    spec = PipelineSpec(micro, tuple(specs), schedule, tuple(shared), cluster)
    return net, Pipeline(spec, own, torch.device("cpu")), own


def boundary_values(cases, num_layers):
    """(values that each stage receives, values that each stage sends)."""
    maker = {IDS: 0}
    for i, case in enumerate(cases):
        for layer in case.layers:
            maker[layer + 1] = i
    received = []
    for i, case in enumerate(cases):
        needs = set(case.layers) - {0}
        if num_layers - 1 in case.layers and num_layers > 1:
            needs |= {1, IDS}
        received.append(sorted(value for value in needs if maker[value] != i))
    sent = [set() for _ in cases]
    for values in received:
        for value in values:
            sent[maker[value]].add(value)
    return received, [sorted(values) for values in sent]


def stage_spec(case, received, sent, is_first, is_last):
    """The StageSpec of one stage; all values between stages have the layout of its batch."""
    batch = {}
    if is_first:
        batch |= {0: case.rows, 2: case.rows}
    if is_last:
        batch |= {1: case.rows}
    return StageSpec(
        ranks=case.ranks,
        mesh_shape=case.shape,
        received=dict.fromkeys(received, case.rows),
        sent=dict.fromkeys(sent, case.rows),
        batch=batch,
        escaping=(LOSS, ROW_MEANS, COUNT) if is_last else (),
        buffer_updates={"count": COUNT} if is_last else {},
    )


def microbatch_graph(num_layers, rows):
    """The StepGraph of one micro-batch of `rows` samples: its values and its batch, no ops."""
    metas = {layer + 1: TensorMeta((rows, WIDTH), F64, True) for layer in range(num_layers)}
    metas |= {IDS: TensorMeta((rows,), torch.int64), LOSS: TensorMeta((), F64, True)}
    metas |= {ROW_MEANS: TensorMeta((rows,), F64), COUNT: TensorMeta((), F64)}
    values = tuple(metas.get(value, TensorMeta((), F64)) for value in range(max(metas) + 1))
    batch = (
        BatchInput(-1, 0, TensorMeta((rows, WIDTH), F64), 0),
        BatchInput(-1, 1, TensorMeta((rows, WIDTH), F64), 0),
        BatchInput(-1, 2, TensorMeta((rows,), torch.int64), 0),
    )
    return StepGraph(values, (), (), batch, (), (), LOSS, None)


def with_program(stage, program):
    """A `StageProgram` of one span, with another program in it."""
    return replace(stage, spans=[replace(stage.spans[0], program=program)])


def rank_rows(batch):
    """This rank's rows of a global batch."""
    size, rank = dist.get_world_size(), dist.get_rank()
    per_rank = ROWS // size
    return [t[rank * per_rank : (rank + 1) * per_rank] for t in batch]


def check_steps(
    cases, schedule, num_microbatches, num_layers, tied=False, num_steps=2, cluster=None
):
    """Run and compare with one process; returns the most (stage, micro-batch) pairs that were in
    flight.
    """
    _, pipeline, own = build(cases, schedule, num_microbatches, num_layers, tied, cluster)
    most = count_in_flight(pipeline)
    reference = make_net(num_layers, tied)
    for step in range(num_steps):
        batch = global_batch(step)
        loss, means, grads = whole_step(reference, batch)
        values, gradients = pipeline.step(rank_rows(batch))
        torch.testing.assert_close(values[LOSS], loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(values[ROW_MEANS], means, rtol=1e-12, atol=1e-12)
        assert values[COUNT].item() == (step + 1) * num_microbatches
        stores = {id(o.store): o.store for o in own.values()}
        results = {id(p): g for p, g in gradients}
        for store in stores.values():
            for parameter, sharded in store._by_parameter.items():
                name = sharded.name
                whole = sharded.gather_like(results[id(parameter)])
                torch.testing.assert_close(whole, grads[name], rtol=1e-12, atol=1e-12)
                assert parameter.grad is None
            store.after_optimizer_step()
    return most[0]


def count_in_flight(pipeline):
    """[the most (stage, micro-batch) pairs whose activations this rank holds at once], from here
    on.
    """
    most = [0]
    for worker in pipeline._workers.values():

        def forward(microbatch, run=worker.forward):
            run(microbatch)
            most[0] = max(most[0], sum(len(w._in_flight) for w in pipeline._workers.values()))

        worker.forward = forward
    return most
