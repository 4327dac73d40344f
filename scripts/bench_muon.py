"""Muon under ZeRO-3: each matrix stepped by its owner, against every matrix gathered everywhere.

    # 2 nodes of 2 ranks, 1000 Mbit/s between the nodes; root and iproute2 needed
    scripts/emulated_cluster.sh 2 2 1000 scripts/bench_muon.py
    torchrun --nproc-per-node 4 scripts/bench_muon.py --size 512 --layers 8

Both ways take turns in one job, from the same weights and gradients, and must give the same
weights. The figures are the medians of a step's wall seconds and of a rank's CPU seconds. Only
the optimizer's step is measured, with its communication: forward and backward are the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.plan import ParameterPlan, Predicted, StagePlan
from alpa_strategy.planner.optimizer_reads import reads_of
from alpa_strategy.runtime.owner_step import OwnerStep
from alpa_strategy.runtime.parameters import ParameterStore

# Required seconds in multiples of those of gathering everywhere.
MAX_RATIO = 0.7


def main() -> None:
    """Measure both ways on all ranks; rank 0 prints the table."""
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    owners = Stepped(args, with_owners=True)
    everywhere = Stepped(args, with_owners=False)
    seconds: dict[str, list[tuple[float, float]]] = {"owners": [], "everywhere": []}
    for step in range(args.warmup + args.steps):
        for name, stepped in (("owners", owners), ("everywhere", everywhere)):
            stepped.set_gradients(step)
            figures = measured(stepped.step)
            if step >= args.warmup:
                seconds[name].append(figures)
    for one, other in zip(owners.parameters, everywhere.parameters, strict=True):
        torch.testing.assert_close(one.data, other.data, rtol=0, atol=0)
    if dist.get_rank() == 0:
        report(args, seconds)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    return parser.parse_args()


class Stepped:
    """The matrices of a transformer in shards, and the optimizer that steps them.

    Args:
        with_owners: whether each is stepped by its owner; else every rank gathers all of them.
    """

    def __init__(self, args: argparse.Namespace, with_owners: bool) -> None:
        torch.manual_seed(0)
        size = args.size
        shapes = [(3 * size, size), (size, size), (4 * size, size), (size, 4 * size)]
        module = nn.ParameterList(torch.randn(shape) for shape in shapes * args.layers)
        self.parameters = list(module)
        self.optimizer = torch.optim.Muon(self.parameters, lr=0.02)
        reads = reads_of(self.optimizer)
        self.store = store_of(module)
        self.store.shard()
        self.with_owners = with_owners
        if with_owners:
            self.store.assign_owners(reads)
            OwnerStep(self.optimizer, self.store)

    def set_gradients(self, step: int) -> None:
        """Give every parameter its shard of a random gradient, the same on all ranks."""
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters:
            full = torch.randn(self.store.full_shape(parameter), generator=generator)
            parameter.grad = self.store.shard_like(parameter, full)

    def step(self) -> None:
        """Step all parameters."""
        if self.with_owners:
            self.optimizer.step()
            return
        shards = [parameter.data for parameter in self.parameters]
        for parameter in self.parameters:
            assert parameter.grad is not None
            grad = self.store.gather_like(parameter, parameter.grad)
            full = self.store.gather(parameter)
            parameter.grad = None
            parameter.data = full
            parameter.grad = grad
        self.optimizer.step()
        for parameter, shard in zip(self.parameters, shards, strict=True):
            shard.copy_(self.store.shard_like(parameter, parameter.data))
            parameter.grad = None
            parameter.data = shard


def store_of(module: nn.Module) -> ParameterStore:
    """Return the store of the module's parameters under ZeRO-3 on all ranks; not sharded yet."""
    num_ranks = dist.get_world_size()
    mesh = build_mesh((num_ranks,))
    inputs = []
    for index, (name, parameter) in enumerate(module.named_parameters()):
        meta = TensorMeta(tuple(parameter.shape), parameter.dtype, True)
        inputs.append(ParameterInput(index, (name,), meta))
    plans = {parameter_input.name: ParameterPlan.parse("S0") for parameter_input in inputs}
    predicted = Predicted(0.0, 0)
    stage = StagePlan((1, num_ranks), 0, (num_ranks,), (0, 0), plans, {}, (), predicted)
    return ParameterStore(module, inputs, (stage,), (mesh,), mesh)


def measured(step: Callable[[], None]) -> tuple[float, float]:
    """Return the wall seconds of a step until all ranks have done it, and this rank's CPU
    seconds.
    """
    dist.barrier()
    started = time.perf_counter()
    cpu_started = time.process_time()
    step()
    cpu_seconds = time.process_time() - cpu_started
    dist.barrier()
    return time.perf_counter() - started, cpu_seconds


def report(args: argparse.Namespace, seconds: dict[str, list[tuple[float, float]]]) -> None:
    """Print the medians, and the ratios that are required."""
    table = Table(title=f"Muon, {4 * args.layers} matrices, hidden size {args.size}, ZeRO-3")
    for column in ("", "wall s", "CPU s of rank 0"):
        table.add_column(column)
    medians = {}
    for name, figures in seconds.items():
        medians[name] = [statistics.median(column) for column in zip(*figures, strict=True)]
        table.add_row(name, *(f"{value:.3f}" for value in medians[name]))
    pairs = zip(medians["owners"], medians["everywhere"], strict=True)
    ratios = [owners / everywhere for owners, everywhere in pairs]
    table.add_row("ratio", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)
    verdict = "met" if ratios[0] <= MAX_RATIO else "missed"
    Console().print(f"required: a ratio of wall seconds of at most {MAX_RATIO}: {verdict}")


if __name__ == "__main__":
    main()
