"""Layers: the step's ops cut into runs of about equal work with little between them (Alpa, equation
5).

The bytes at a cut are those of every value made before and read after it, so a skip over several
layers counts at each boundary that it crosses. Stages are made of whole layers.
"""

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise

import numpy as np

from alpa_strategy.cost.flops import op_flops
from alpa_strategy.errors import PlanError
from alpa_strategy.ir.graph import StepGraph

# By how much a layer's FLOPs may exceed the average (Alpa's delta)
EXCESS = 0.5
# of the average FLOPs: an `arange` or the last sum of a loss is a part of a layer, not one of its
# own
LEAST = 0.05
# At the largest cut between blocks, against the least possible.
SAME_BYTES = 1.01
MAX_LAYERS = 64
# Of a stage's modules that are listed.
MAX_NAMES = 4
# Where the model has no repeated blocks.
PLAIN_LAYERS = 16


def cluster_layers(step: StepGraph, num_layers: int | None = None) -> tuple[int, ...]:
    """Return the op indices that split the step into layers, from 0 to the number of ops: layer i
    is ops [cuts[i], cuts[i + 1]).

    With the default number of layers they are between the repeated blocks of the model, if that is
    about as good (`SAME_BYTES`): equal layers are solved once. Else they minimise the largest
    number of bytes at a cut, then the sum of bytes, then the variance of the layers' FLOPs. No
    layer has more than (1 + `EXCESS`) times the average FLOPs (more if single ops force it), nor,
    if that is possible, less than `LEAST` times it.

    Raises:
        PlanError: there are fewer ops than layers.
    """
    usual = default_num_layers(step)
    num_layers = num_layers or usual
    if not 1 <= num_layers <= len(step.ops):
        raise PlanError(
            f"the step has {len(step.ops)} ops, which cannot make {num_layers} layers",
            "ask for fewer stages",
        )
    flops = np.array([op_flops(op.call) for op in step.ops], dtype=float)
    bytes_at = boundary_bytes(step)
    cuts = best_cuts(bytes_at, flops, num_layers, LEAST) or best_cuts(bytes_at, flops, num_layers)
    # Without a least size there is always a way.
    assert cuts is not None
    blocks = _between_blocks(step, flops, num_layers) if num_layers == usual else None
    if blocks is None:
        return cuts
    least = max(bytes_at[list(cuts[1:-1])], default=0)
    is_as_good = max(bytes_at[list(blocks[1:-1])]) <= SAME_BYTES * least
    return blocks if is_as_good else cuts


def _between_blocks(step: StepGraph, flops: np.ndarray, num_layers: int) -> tuple[int, ...] | None:
    """Return cuts between runs of equally many blocks; None if the model is not a sequence of
    blocks, or these are too unequal.

    The ops after the last block are a layer of their own if they are as much work as half a layer.

    Args:
        flops: [ops].
        num_layers: the number of runs.

    Returns:
        Op indices, from 0 to the number of ops.
    """
    starts: list[int] = []
    seen: list[tuple[str, int]] = []
    # Of the last block.
    end = 0
    for index, op in enumerate(step.ops):
        block = _block(op.module)
        if block is None:
            continue
        if not seen or block != seen[-1]:
            seen.append(block)
            starts.append(index)
        end = index + 1

    is_repeated = len(seen) != len(set(seen))
    if is_repeated or len(seen) < max(num_layers, 2):
        return None
    blocks_per_layer = -(-len(seen) // num_layers)
    cuts = [0, *starts[::blocks_per_layer][1:], len(step.ops)]
    mean = flops.sum() / num_layers
    if flops[end:].sum() > mean / 2:
        cuts.insert(-1, end)
    work = [flops[a:b].sum() for a, b in pairwise(cuts)]
    is_even = max(work[:num_layers], default=0.0) <= (1 + EXCESS) * mean
    return tuple(cuts) if is_even else None


def boundary_bytes(step: StepGraph, with_gradients: bool = False) -> np.ndarray:
    """Return [position] the bytes of the values (and their gradients, if `with_gradients`) that
    cross a cut before op `position`; 0 at both ends. Only results of ops count, no inputs.
    """
    change = np.zeros(len(step.ops) + 2)
    last = step.last_readers
    for value, op in step.makers.items():
        if last[value] > op:
            meta = step.values[value]
            has_gradient = with_gradients and meta.requires_grad
            num_bytes = meta.num_bytes * (2 if has_gradient else 1)
            change[op + 1] += num_bytes
            change[last[value] + 1] -= num_bytes
    return np.cumsum(change)[: len(step.ops) + 1]


def best_cuts(
    bytes_at: np.ndarray, flops: np.ndarray, num_layers: int, least: float = 0.0
) -> tuple[int, ...] | None:
    """Return the optimal cuts; None if there are none whose layers all have at least `least` times
    the mean FLOPs.

    The smallest largest cut is found by bisection: a greedy walk (or the DP, if there is a least
    size) decides whether a threshold is feasible. Ties are decided by a DP over the positions below
    it, O(num_layers * positions * window).

    Args:
        bytes_at: [number of ops + 1] bytes at each position.
        flops: [number of ops]
    """
    n = len(flops)
    prefix = np.concatenate([[0.0], np.cumsum(flops)])
    slack = prefix[-1] * 1e-12
    limit = (1 + EXCESS) * prefix[-1] / num_layers
    floor = least * prefix[-1] / num_layers
    inner = np.arange(1, n)
    inner = inner[(prefix[inner] >= floor) & (prefix[-1] - prefix[inner] >= floor)]
    while _fewest_layers(prefix, inner, limit + slack) > num_layers:
        # Single ops are larger than that.
        limit *= 1.1
    thresholds = np.unique(bytes_at[inner])

    def tied(threshold: float) -> tuple[int, ...] | None:
        allowed = inner[bytes_at[inner] <= threshold]
        return _tied_cuts(
            np.array([0, *allowed, n]), bytes_at, prefix, num_layers, (floor - slack, limit + slack)
        )

    def feasible(threshold: float) -> bool:
        allowed = inner[bytes_at[inner] <= threshold]
        if (
            len(allowed) < num_layers - 1
            or _fewest_layers(prefix, allowed, limit + slack) > num_layers
        ):
            return False
        return not floor or tied(threshold) is not None

    smallest = bisect_left(thresholds[:-1], True, key=feasible)
    return tied(thresholds[smallest] if len(thresholds) else np.inf)


def default_num_layers(step: StepGraph) -> int:
    """Return the number of layers into which a step is split: that of the repeated blocks of the
    module (`blocks.0`, `blocks.1`, ...), or `PLAIN_LAYERS` if these are not most of its work.

    Many blocks are taken several to a layer, so that there are at most `MAX_LAYERS`. There is at
    least one layer, and never more than there are ops with FLOPs.
    """
    work: dict[tuple[str, int] | None, float] = defaultdict(float)
    for op in step.ops:
        work[_block(op.module)] += op_flops(op.call)
    blocks = [block for block in work if block is not None]
    repeated = sum(work[block] for block in blocks) > 0.5 * sum(work.values())
    has_blocks = repeated and len(blocks) > 1
    count = len(blocks) if has_blocks else PLAIN_LAYERS
    # Several blocks a layer where there are many.
    count = -(-count // -(-count // MAX_LAYERS))
    return max(1, min(count, sum(op_flops(op.call) > 0 for op in step.ops)))


def span_name(step: StepGraph, first: int, last: int) -> str:
    """Return the modules of ops [first, last) for display: `embed, blocks.0-blocks.3`; `conv1 to
    layer2.0` if there are many.

    Numbered modules of one list are named by the first and the last.
    """
    # Each the modules of one list, or a single one.
    runs: list[list[str]] = []
    owners: list[str | None] = []
    for module in dict.fromkeys(op.module for op in step.ops[first:last] if op.module):
        block = _block(module)
        owner, name = (None, module) if block is None else (block[0], f"{block[0]}.{block[1]}")
        if owner is not None and owner in owners:
            runs[owners.index(owner)].append(name)
        elif [name] not in runs:
            runs.append([name])
            owners.append(owner)
    # Ops of the LightningModule itself.
    if not runs:
        return (
            step.ops[first].name
            if last == first + 1
            else f"{step.ops[first].name} to {step.ops[last - 1].name}"
        )
    if len(runs) > MAX_NAMES:
        return f"{runs[0][0]} to {runs[-1][-1]}"
    names = []
    for run in runs:
        names.append(run[0] if run[0] == run[-1] else f"{run[0]}-{run[-1]}")
    return ", ".join(names)


def _block(module: str) -> tuple[str, int] | None:
    """Return the list and the number of a module, `blocks.3.attn.qkv` -> (`blocks`, 3); None
    outside of numbered modules.
    """
    parts = module.split(".")
    for depth, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:depth]), int(part)
    return None


def _fewest_layers(prefix: np.ndarray, allowed: np.ndarray, limit: float) -> float:
    """Return the least number of layers into which the ops can be cut: a greedy walk makes each as
    long as the limit allows. inf if there must be a larger layer.

    Args:
        prefix: [ops + 1] FLOPs of all ops before each position.
        allowed: positions of possible cuts, ascending.
        limit: FLOPs of a layer.
    """
    num_ops = len(prefix) - 1
    ends = np.append(allowed, num_ops)
    work = prefix[ends]
    count, position = 0, 0
    while position < num_ops:
        reach = int(np.searchsorted(work, prefix[position] + limit, side="right")) - 1
        if reach < 0 or ends[reach] <= position:
            return np.inf
        position = int(ends[reach])
        count += 1
    return count


def _tied_cuts(
    points: np.ndarray,
    bytes_at: np.ndarray,
    prefix: np.ndarray,
    num_layers: int,
    sizes: tuple[float, float],
) -> tuple[int, ...] | None:
    """Return the cuts with the least sum of bytes, then of squared FLOPs, of all ways to make
    `num_layers` layers; None if there is none.

    Args:
        points: positions of possible cuts, the first and the last op's end included.
        bytes_at: [ops + 1] bytes at each position.
        prefix: [ops + 1] FLOPs of all ops before each position.
        sizes: (least, most) FLOPs of a layer.

    Returns:
        [num_layers + 1] positions, from the first point to the last.
    """
    m = len(points)
    work, weight = prefix[points], bytes_at[points]
    weight[0] = 0.0
    start = np.searchsorted(work, work - sizes[1], side="left")
    width = int((np.arange(m) - start).max())
    # [end, candidates for the layer's start]
    before = np.arange(m)[:, None] - np.arange(1, width + 1)[None, :]
    valid = before >= start[:, None]
    before = np.maximum(before, 0)
    valid &= work[:, None] - work[before] >= sizes[0]
    square = (work[:, None] - work[before]) ** 2
    total, spread = np.full(m, np.inf), np.full(m, np.inf)
    total[0] = spread[0] = 0.0
    came: list[np.ndarray] = []
    for _ in range(num_layers):
        reach = np.where(valid, (total + weight)[before], np.inf)
        least = reach.min(axis=1)
        tied = np.where(reach <= least[:, None], spread[before] + square, np.inf)
        best = tied.argmin(axis=1)
        total, spread = least, np.where(np.isfinite(least), tied[np.arange(m), best], np.inf)
        came.append(before[np.arange(m), best])
    if not np.isfinite(total[-1]):
        return None
    path = [m - 1]
    for origin in reversed(came):
        path.append(int(origin[path[-1]]))
    return tuple(int(points[i]) for i in reversed(path))
