"""Configurations of equal stages on equal meshes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from alpa_strategy.inter_op.stage_cost import StageCost
from alpa_strategy.inter_op.stage_costs import StageCostTask
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.microbatch.transform import num_split_samples
from alpa_strategy.planner.figures import num_tokens
from alpa_strategy.sharding.cross_mesh import boundary_link

# Tokens of a micro-batch, about, on each device that computes sequences of its own.
_TOKENS_OF_A_DEVICE = (4096, 16384)


@dataclass(frozen=True)
class Configuration:
    """Equal stages on equal meshes."""

    num_stages: int
    num_microbatches: int

    # Of each stage.
    logical_mesh: tuple[int, ...]
    remat: bool

    # Of a named plan, one per mesh axis; (): layouts are solved.
    names: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The configuration in words, for errors."""
        mesh = "x".join(map(str, self.logical_mesh))
        stages = "stage" if self.num_stages == 1 else "stages"
        text = f"{self.num_stages} {stages} of {mesh}"
        text += f", {self.num_microbatches} micro-batches"
        return f"{text}, recomputed" if self.remat else text


# The least seconds of a configuration, which no plan of it is below, and the configuration.
Candidate = tuple[float, Configuration]


@dataclass(frozen=True)
class Estimate:
    """A configuration with the seconds of a step that its middle layer suggests."""

    seconds: float
    configuration: Configuration


def usual_sequences(step: StepGraph) -> tuple[float, ...]:
    """Return the sequences of a micro-batch to try on each device that computes some of its own: at
    least one.
    """
    num_sequences = num_split_samples(step)
    length = num_tokens(step, num_sequences) / num_sequences
    least, *more = _TOKENS_OF_A_DEVICE
    first = max(1.0, least / max(1.0, length))
    return (first, *(first * tokens / least for tokens in more))


def equal_stages(layer_seconds: Sequence[float], num_stages: int) -> list[int]:
    """Return the first layer of each stage, and at last the number of layers: stages of about equal
    seconds.

    Args:
        num_stages: at most as many as layers.
    """
    ends = list(accumulate(layer_seconds))
    bounds = [0]
    for index in range(1, num_stages):
        goal = ends[-1] * index / num_stages
        least = bounds[-1] + 1
        most = len(layer_seconds) - (num_stages - index)
        nearest = min(range(least, most + 1), key=lambda last: abs(ends[last - 1] - goal))
        bounds.append(nearest)
    return [*bounds, len(layer_seconds)]


def stage_bytes(cost: StageCost, alive: int, remat: bool, share: float) -> float:
    """Return the bytes of a stage of 1 / share layers: they use temporary memory in turn."""
    return stored_bytes(cost, alive, remat) / share + turn_bytes(cost, remat)


def stored_bytes(cost: StageCost, alive: int, remat: bool) -> float:
    """Return the bytes of a layer that stay while others compute."""
    return cost.always + kept_bytes(cost, alive, remat)


def kept_bytes(cost: StageCost, alive: int, remat: bool) -> float:
    """Return the bytes of a layer's activations that stay until its backward."""
    return (cost.segment_inputs if remat else cost.saved) * alive


def turn_bytes(cost: StageCost, remat: bool) -> float:
    """Return the bytes that a layer uses in its turn: temporary ones, and what it recomputes."""
    return cost.working + (max(cost.again) if remat else 0.0)


def wire_seconds(job: StageCostTask, cut: int, submesh: tuple[int, int], index: int) -> float:
    """Return the seconds of a micro-batch's messages across a cut, and back.

    Args:
        cut: index of the layer after it.
        submesh: of each of the equal stages.
        index: of the stage before it.
    """
    cluster = job.cluster
    last_sender = (index + 1) * math.prod(submesh) - 1
    per_node = cluster.devices_per_node
    crosses_nodes = last_sender // per_node != (last_sender + 1) // per_node
    link = boundary_link(submesh, submesh, cluster, crosses_nodes)
    num_bytes = job.crossing_bytes[cut]
    messages = int((num_bytes > 0).sum())
    return messages * link.latency + float(num_bytes.sum()) / link.bandwidth
