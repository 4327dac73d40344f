"""What the planner predicts for a published configuration: its own layouts pinned, priced by the
planner's own costs.

Blocks are equal, so models of one block and of two are solved as stages (`StageSolver`, as for any
plan), and the difference stands for every further block. Stages of a pipeline are then put on the
simulated clock as any plan's.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from published_models import Transformer
from published_rows import Case

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.logical_mesh import LogicalMesh
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.cost.flops import is_view, op_base_name
from alpa_strategy.cost.model import RooflineCosts
from alpa_strategy.cost.saved_tensors import Saved
from alpa_strategy.inter_op.simulation import runtime_seconds, simulated_seconds
from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.inter_op.stage_problem import cost_of
from alpa_strategy.inter_op.stage_solve import StageRequest, StageSolver
from alpa_strategy.intra_op.build import IntraOp
from alpa_strategy.intra_op.decode import messages, working_bytes
from alpa_strategy.ir.gathers import local_bytes
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.op import CUSTOM_OPS, OpCall
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.microbatch.transform import microbatch
from alpa_strategy.options import PlanOptions
from alpa_strategy.schedules import in_flight
from alpa_strategy.sharding.cross_mesh import boundary_link
from alpa_strategy.sharding.strategies import localize

ZERO = {0: "data", 1: "zero1", 2: "zero2", 3: "zero3"}
PRODUCTS = ("linear", "matmul_with_hp_or_float8_args")  # of activations and weights
FIELDS = ("forward", "backward", "once", "always", "saved", "segment_inputs")


@dataclass(frozen=True)
class Prediction:
    """Of a step: seconds, bytes of the device that needs most, whether it has them, and what they
    are made of.
    """

    seconds: float
    num_bytes: float
    fits: bool
    parts: dict[str, float]


def _name_of(call: OpCall) -> str:
    """The op's name, that of the class for an autograd.Function."""
    return (
        CUSTOM_OPS[call.target].function.__name__
        if call.target in CUSTOM_OPS
        else op_base_name(call)
    )


class ProgramCosts(RooflineCosts):
    """What a case's program makes of ops: compiled or not, and float8 products as its library has
    them.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case.cluster.device, compiled=case.compiled)
        self._program = case.program
        self._fused = RooflineCosts(case.cluster.device, compiled=True)

    def op_seconds(self, call: OpCall) -> tuple[float, float]:
        is_float8 = _name_of(call) == PRODUCTS[1]
        return (
            self._fused.op_seconds(call)
            if is_float8 and self._program.fused_casts
            else super().op_seconds(call)
        )

    def saved(self, call: OpCall) -> Saved:
        saved = super().saved(call)
        if _name_of(call) != PRODUCTS[1]:
            return saved
        if self._program.keeps_float8:
            saved = replace(
                saved, operands=(False, True), extra_bytes=call.operands[0].num_elements
            )
        return replace(saved, temporary_bytes=self._fused.saved(call).temporary_bytes)


def predict(case: Case) -> Prediction:
    """The case's own configuration, priced."""
    return _of_blocks(case, *(_solved(case, num_blocks) for num_blocks in (1, 2)))


class Repricer:
    """A case solved once, priced for other constants of its cluster: what `--fit` needs thousands
    of times.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self._solved = [_solved(case, num_blocks) for num_blocks in (1, 2)]
        self._calls = [list(_local_calls(case, solved)) for solved in self._solved]

    def seconds(self, cluster: ClusterSpec) -> float:
        """Of a step on `cluster`, under the layouts that were found."""
        case = replace(self.case, cluster=cluster)
        costs = ProgramCosts(case)
        mesh = cluster.logical_mesh(*_mesh(case))
        results = []
        for solved, calls in zip(self._solved, self._calls, strict=True):
            intra = _on(solved.intra, mesh)
            seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
            for message in messages(intra, solved.assignment):
                seconds[message.phase] += message.seconds(intra)
            again = 0.0
            for call, runs_again in calls:
                forward, backward = costs.op_seconds(call)
                seconds["forward"] += forward
                seconds["backward"] += backward
                again += forward * runs_again
            cost = replace(
                solved.cost,
                forward=seconds["forward"],
                backward=seconds["backward"],
                once=seconds["step"],
            )
            cost = _beside_compute(intra, solved.assignment, cost, case.tp if case.async_tp else 1)
            results.append(replace(solved, cost=cost, seconds_again=again))
        return _of_blocks(case, *results).seconds


def _beside_compute(
    intra: IntraOp, assignment: Sequence[int], cost: StageCost, async_tp: int
) -> StageCost:
    """`cost`, whose seconds are sums, without what is hidden: parameters are gathered and their
    gradients reduced beside the compute of other blocks, a block at once, as FSDP does; our runtime
    gathers where it uses.

    async_tp: chunks of a tensor parallel collective, all but one of which run beside a product; 1:
    it is whole.
    """
    alone: dict[tuple[str, bool], float] = defaultdict(float)
    together: dict[str, float] = defaultdict(float)
    for message in messages(intra, assignment):
        alone[message.phase, message.of_parameter] += message.seconds(intra)
        if message.of_parameter:
            together[message.phase] += message.seconds_together(intra)

    def hidden(phase: str, compute: float) -> float:
        return intra.mesh.overlap * max(0.0, min(together[phase], compute))

    computing = {
        phase: total - alone[phase, True] - alone[phase, False]
        for phase, total in (("forward", cost.forward), ("backward", cost.backward))
    }
    saved = {
        phase: alone[phase, True] - together[phase] + hidden(phase, computing[phase])
        for phase in computing
    }
    for phase, compute in computing.items():
        beside = min(alone[phase, False] * (1 - 1 / async_tp), compute - hidden(phase, compute))
        saved[phase] += intra.mesh.overlap * max(0.0, beside)
    # What is gathered once per step is so beside the first forward.
    room = sum(computing[phase] - hidden(phase, computing[phase]) for phase in computing)
    reduced = hidden("step", room) + alone["step", True] - together["step"]
    return replace(
        cost,
        forward=cost.forward - saved["forward"],
        backward=cost.backward - saved["backward"],
        once=cost.once - reduced,
    )


def _local_calls(case: Case, solved: _Solved) -> Iterator[tuple[OpCall, bool]]:
    """Yield the call of every op on one device, and whether it is recomputed.

    The optimizer's ops are not among them.
    """
    intra, products = solved.intra, 0
    for index, op in enumerate(intra.step.ops):
        strategy = intra.ops[index].strategies[solved.assignment[len(intra.parameters) + index]]
        name, shape = _name_of(op.call), intra.mesh.shape
        products += name in PRODUCTS and op.module.startswith("blocks")
        again = op.module.startswith("blocks") and is_recomputed(
            case.recompute, name, op.module, products
        )
        yield localize(op.call, strategy, shape, (0,) * len(shape)).call, again


def _of_blocks(case: Case, one: _Solved, two: _Solved) -> Prediction:
    block = {name: getattr(two.cost, name) - getattr(one.cost, name) for name in FIELDS}
    rest = {name: getattr(one.cost, name) - block[name] for name in FIELDS}
    return _pipelined(case, block, rest, one, two)


@dataclass(frozen=True)
class _Solved:
    """`cost` without recomputation; of all blocks: seconds to recompute what is, bytes that are
    kept nevertheless.
    """

    cost: StageCost
    seconds_again: float
    bytes_kept: float
    intra: IntraOp
    assignment: Sequence[int]


def mesh_and_pins(case: Case) -> tuple[tuple[int, ...], str | tuple[str, ...]]:
    """The logical mesh of a stage and the named plan of each of its axes."""
    zero = ZERO[case.zero]
    axes = (
        [(case.dp // case.shard, "data"), (case.shard, zero)]
        if case.zero == 3
        else [(case.dp, zero)]
    )
    axes = [(size, name) for size, name in (*axes, (case.tp, "tensor")) if size > 1]
    sizes, names = zip(*(axes or [(1, "data")]), strict=True)
    return sizes, names


def _mesh(case: Case) -> tuple[tuple[int, ...], tuple[int, int]]:
    """(logical shape, submesh) of a stage."""
    shape = mesh_and_pins(case)[0]
    per_node = min(math.prod(shape), case.cluster.devices_per_node)
    return shape, (math.prod(shape) // per_node, per_node)


def _on(intra: IntraOp, mesh: LogicalMesh) -> IntraOp:
    """The same problem with the links of another mesh."""
    tables = copy.copy(intra.tables)
    tables.mesh = mesh
    return replace(intra, tables=tables)


def _solved(case: Case, num_blocks: int) -> _Solved:
    shape, parallel = mesh_and_pins(case)
    num_devices = math.prod(shape)
    with torch.device("meta"):
        model = Transformer(num_blocks, **case.model).to(torch.bfloat16)
        tokens = torch.zeros(case.rows * case.dp, case.model["seq_len"], dtype=torch.long)
    step = capture_step(model, (tokens, tokens), world_size=num_devices, batch_scope="global")
    graph = microbatch(step, 1).graph
    options = PlanOptions(
        batch_scope="global", parallel=parallel, logical_mesh=shape, memory_limit=math.inf
    )
    program = case.program
    optimizer = OptimizerInfo(
        state_bytes=program.state_bytes, gradient_itemsize=program.gradient_bytes
    )
    costs = ProgramCosts(case)
    cluster = replace(
        case.cluster, overlap=0.0
    )  # what is hidden is so by the case's program, not by our runtime
    job = StageCostTask(
        graph,
        (0, len(graph.ops)),
        case.num_microbatches,
        cluster,
        costs,
        options,
        optimizer,
        math.inf,
    )
    solver = StageSolver(job)
    request = StageRequest(0, len(graph.ops), _mesh(case)[1], shape, remat=False, alive=1)
    priced = solver.price(request)
    assignment = priced.free.assignment
    stage = priced.unrestricted(request.starts)
    cost = cost_of(stage, assignment, working_bytes(stage.intra, assignment))
    hiding = _on(stage.intra, replace(stage.intra.mesh, overlap=case.cluster.overlap))
    cost = _beside_compute(hiding, assignment, cost, case.tp if case.async_tp else 1)
    seconds, kept = _again(case, stage.intra, assignment)
    cost = _as_programmed(case, cost, stage.intra, assignment)
    return _Solved(cost, seconds, kept, stage.intra, assignment)


def _as_programmed(
    case: Case, cost: StageCost, intra: IntraOp, assignment: Sequence[int]
) -> StageCost:
    """`cost` without bytes that our runtime needs and the case's program does not.

    A fused loss overwrites the logits by their gradient. FSDP that keeps gathered parameters
    (ZeRO-2) reduces gradients
    block by block: where there is one micro-batch, they are never all there.
    """
    always = cost.always
    saved = cost.saved
    working = cost.working
    if case.program.fused_loss:
        options = list(intra.ops)
        logits = case.rows * case.model["seq_len"] * case.model["vocab"] * 2 / case.tp
        for index, op in enumerate(intra.step.ops):
            name, op_options = _name_of(op.call), intra.ops[index]
            if op.module == "head":  # neither its result nor that one's gradient is there besides
                short = (
                    np.maximum(0, num_bytes - logits)
                    for num_bytes in (op_options.forward_bytes, op_options.backward_bytes)
                )
                options[index] = replace(
                    op_options, **dict(zip(("forward_bytes", "backward_bytes"), short, strict=True))
                )
            if name in ("to", "cross_entropy_sum") and not op.module:
                options[index] = replace(
                    op_options,
                    forward_bytes=0 * op_options.forward_bytes,
                    backward_bytes=0 * op_options.backward_bytes,
                )
                saved -= float(op_options.num_bytes[assignment[len(intra.parameters) + index]])
        saved += logits
        working = working_bytes(replace(intra, ops=tuple(options)), assignment)
    if case.zero == 2 and case.num_microbatches == 1:
        elements = sum(p.meta.num_elements for p in intra.step.parameters) / case.tp
        always -= elements * case.program.gradient_bytes * (1 - 1 / case.dp)
    return replace(cost, always=always, saved=saved, working=working)


def _again(case: Case, intra: IntraOp, assignment: Sequence[int]) -> tuple[float, float]:
    """(seconds to recompute what the case recomputes, bytes that it keeps nevertheless) in all
    blocks together.
    """
    seconds = kept = 0.0
    offset, products = len(intra.parameters), 0
    again: set[int] = set()
    for index, op in enumerate(intra.step.ops):
        if not op.module.startswith("blocks"):
            continue
        name, choice = _name_of(op.call), assignment[offset + index]
        products += name in PRODUCTS
        if is_recomputed(case.recompute, name, op.module, products):
            again.add(index)
            seconds += float(intra.ops[index].forward_seconds[choice])
        else:
            kept += float(intra.ops[index].num_bytes[choice])
    maker = {value: index for index, op in enumerate(intra.step.ops) for value in op.results}
    for transfer, layouts in zip(intra.problem.transfers, intra.transfers, strict=True):
        value = layouts.value
        readers = {op for op, _ in intra.step.consumers.get(value, ())}
        if not any(intra.step.ops[op].module.startswith("blocks") for op in readers):
            continue
        source = transfer.source[assignment[transfer.producer]]
        targets = {int(use.layout[assignment[use.choice]]) for use in transfer.uses}
        num_bytes = sum(float(transfer.memory[source, target]) for target in targets)
        if case.program.gathers_again:  # what tensor parallelism gathers is kept in shards
            num_bytes = min(
                num_bytes,
                local_bytes(intra.step.values[value], layouts.sources[source], intra.mesh.shape),
            )
        if value in maker and (
            maker[value] not in again or _enters_block(intra.step, maker[value], readers)
        ):
            kept += num_bytes
            if (
                not num_bytes
                and readers <= again
                and readers
                and not is_view(intra.step.ops[maker[value]].call)
            ):
                # no backward needs it, but the recomputation does
                meta = intra.step.values[value]
                kept += min(
                    local_bytes(meta, layouts.targets[t], intra.mesh.shape) for t in targets
                )
    return seconds, kept


def is_recomputed(policy: str, name: str, module: str, products: int) -> bool:
    """Return whether an op of a block is recomputed in the backward.

    `products`: the number of linears up to and including this op.
    """
    if policy == "op":
        return name != "scaled_dot_product_attention" and not (
            name in PRODUCTS and products % 2 == 1
        )
    if policy == "attention":
        return "attention" in module and name in ("softmax", "matmul", "dropout")
    return policy != "none"


def _enters_block(graph: StepGraph, maker: int, readers: set[int]) -> bool:
    """Whether a value goes from one block to the next."""
    block = graph.ops[maker].module.split(".")[:2]
    return any(graph.ops[op].module.split(".")[:2] != block for op in readers)


def _pipelined(
    case: Case, block: dict[str, float], rest: dict[str, float], one: _Solved, two: _Solved
) -> Prediction:
    """Blocks over stages, the embedding with the first one and the head with the last."""
    stages = case.pp * case.loops
    again = (two.seconds_again - one.seconds_again) * case.share
    kept = two.bytes_kept - one.bytes_kept
    # While a block's backward runs, all that it saves is there.
    working = two.cost.working + (block["saved"] - kept if case.recompute != "none" else 0.0)
    saved = kept * case.share + block["saved"] * (1 - case.share)
    costs = []
    numbers = _blocks_of_stages(case, stages, block, rest)
    for stage in range(stages):
        blocks = numbers[stage]
        ends = (stage + 1 == stages) + 0.0
        half = (stage in (0, stages - 1)) / (
            1 if stages == 1 else 2
        )  # of what embedding and head store
        costs.append(
            StageCost(
                blocks * block["forward"] + ends * rest["forward"],
                blocks * (block["backward"] + again) + ends * rest["backward"],
                blocks * block["once"] + half * rest["once"],
                blocks * block["always"] + half * rest["always"],
                blocks * saved + ends * rest["saved"],
                0.0,
                (0.0,),
                working,
            )
        )
    schedule = "1F1B" if case.loops == 1 else "Interleaved1F1B"
    num_devices = case.dp * case.tp
    per_node = min(num_devices, case.cluster.devices_per_node)
    submesh = num_devices // per_node, per_node
    size = 2 * case.rows * case.dp * case.model["seq_len"] * case.model["dim"]
    crosses_nodes = submesh[0] > 1 or 2 * submesh[1] > case.cluster.devices_per_node
    link = boundary_link(submesh, submesh, case.cluster, crosses_nodes)
    wire = 2 * (link.latency + size / link.bandwidth) if stages > 1 else 0.0
    pipeline = [
        (c.forward, c.backward, c.once, wire * (i < stages)) for i, c in enumerate(costs, start=1)
    ]
    overhead = runtime_seconds(case.cluster.device)
    (seconds,) = simulated_seconds(schedule, case.pp, case.num_microbatches, [pipeline], overhead)
    num_bytes = max(_mesh_bytes(case, costs, mesh, schedule) for mesh in range(case.pp))
    fits = num_bytes <= case.cluster.device.memory_bytes
    parts = {
        "forward": sum(c.forward for c in costs),
        "backward": sum(c.backward for c in costs),
        "once": max(c.once for c in costs),
    }
    return Prediction(seconds, num_bytes, fits, parts)


def _blocks_of_stages(
    case: Case, stages: int, block: dict[str, float], rest: dict[str, float]
) -> list[int]:
    """Equal numbers, or the last stage as many fewer as the head takes time, where the program cuts
    by time.
    """
    last = case.num_blocks // stages
    if case.program.balanced and stages > 1:
        head = (rest["forward"] + rest["backward"]) / (block["forward"] + block["backward"])
        last = max(1, round((case.num_blocks + head) / stages - head))
    others = max(1, stages - 1)
    left = case.num_blocks - last
    equal = [left // others + (stage < left % others) for stage in range(stages - 1)]
    return [*equal, last if stages > 1 else case.num_blocks]


def _mesh_bytes(case: Case, costs: Sequence[StageCost], mesh: int, schedule: str) -> float:
    stage_costs = costs[mesh :: case.pp]
    alive = (
        in_flight(schedule, case.pp, case.num_microbatches, case.loops)[mesh] / case.loops
        if case.pp > 1
        else 1
    )
    always = sum(c.always for c in stage_costs)
    saved = sum(c.saved for c in stage_costs)
    return always + alive * saved + max(c.working for c in stage_costs)
