"""The stage DP equals the exhaustive search of its objective, whatever the schedule, memory and
boundaries.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from alpa_strategy.inter_op.stage_dp import GRID, StageTables, solve_stages
from alpa_strategy.schedules import PipelineLatency, closed_form, in_flight


def anywhere(
    num_devices: int, *arrays: np.ndarray, boundary: np.ndarray | None = None
) -> StageTables:
    """Stages that may start at every device, with one kind of links, or messages that take no
    time.
    """
    L, _, m, _ = arrays[1].shape
    boundary = np.zeros((1, L + 1, m, m)) if boundary is None else boundary
    everywhere = np.ones((num_devices + 1, m), dtype=bool)
    return StageTables(*arrays, boundary, everywhere, np.zeros(num_devices + 1, dtype=int))


def random_tables(
    rng: np.random.Generator,
    num_layers: int,
    submeshes,
    candidates: int,
    boundary: bool,
    num_devices: int,
) -> StageTables:
    m = len(submeshes)
    shape = (num_layers, num_layers + 1, m, candidates)
    first, last = np.ogrid[:num_layers, : num_layers + 1]
    work = np.maximum(last - first, 0)[..., None, None] / np.array(submeshes)[None, None, :, None]
    seconds = np.where(work > 0, work * rng.uniform(0.5, 1.5, shape), np.inf)
    seconds[rng.random(shape) < 0.1] = np.inf
    return anywhere(
        num_devices,
        np.array(submeshes),
        seconds,
        rng.uniform(0, 0.5, shape),
        work * rng.uniform(1, 3, shape),
        work * rng.uniform(0, 1, shape),
        boundary=rng.uniform(0, 0.3, (1, num_layers + 1, m, m)) if boundary else None,
    )


def on_nodes(rng: np.random.Generator, tables: StageTables, num_devices: int) -> StageTables:
    """The same with one to three kinds of links, which stages have at random places."""
    kinds = int(rng.integers(1, 4))
    boundary = tables.boundary * rng.uniform(0, 1, (kinds, *tables.boundary.shape[1:]))
    return replace(tables, boundary=boundary, link_at=rng.integers(0, kinds, num_devices + 1))


def pinned(rng: np.random.Generator, tables: StageTables, num_devices: int) -> StageTables:
    """The same with some runs of layers that start at a place of their own."""
    num_layers = tables.seconds.shape[0]
    starts = rng.integers(0, num_devices, (num_layers, num_layers + 1))
    starts[rng.random(starts.shape) < 0.5] = -1
    return replace(tables, starts=(starts, np.arange(num_devices, -1, -1)))


def brute_force(
    tables,
    num_devices,
    latency: PipelineLatency,
    alive,
    memory_limit,
    num_stages,
    steps,
    share=1.0,
):
    """Every way to cut, every submesh and candidate of every stage."""
    L, _, m, c = tables.seconds.shape
    best = np.inf
    for count in num_stages:
        for cuts in combinations(range(1, L), count - 1):
            runs = list(pairwise((0, *cuts, L)))
            for meshes in product(range(m), repeat=count):
                if sum(tables.num_devices[a] for a in meshes) != num_devices:
                    continue
                options = []
                sizes = [int(tables.num_devices[a]) for a in meshes]
                places = [sum(sizes[:i]) for i in range(count)]
                if tables.starts is not None and any(
                    tables.starts[0][run] not in (-1, place)
                    for run, place in zip(runs, places, strict=True)
                ):
                    continue
                for i, ((k, l), a) in enumerate(zip(runs, meshes, strict=True)):  # noqa: E741
                    wire = 0.0
                    if i + 1 < count:
                        wire = tables.wire(l, a, meshes[i + 1], sum(sizes[i + 1 :]))
                    need = (
                        tables.bytes_always[k, l, a]
                        + alive[count - i - 1] * tables.bytes_in_flight[k, l, a]
                    )
                    options.append(
                        [
                            (tables.seconds[k, l, a, x], wire, tables.once_seconds[k, l, a, x])
                            for x in range(c)
                            if need[x] <= memory_limit and np.isfinite(tables.seconds[k, l, a, x])
                        ]
                    )
                for picked in product(*options):
                    after = [t + w for t, w, _ in picked]
                    value = latency.warmup * sum(after)
                    slowest = max(
                        latency.steady * max(t + share * w, w / 2) + steps * g for t, w, g in picked
                    )
                    if share < 1:
                        trips = [sum(after[i:]) / alive[count - i - 1] for i in range(count)]
                        slowest = max(slowest, latency.steady * max(trips))
                    best = min(best, value + slowest)
    return best


@pytest.mark.parametrize("block", range(8))
def test_equals_brute_force_on_200_random_cases(block):
    for case in range(25):
        rng = np.random.default_rng(1000 * block + case)
        num_layers, num_devices = int(rng.integers(1, 6)), int(rng.integers(1, 7))
        submeshes = sorted(rng.choice([1, 2, 3, 4], size=int(rng.integers(1, 4)), replace=False))
        candidates, boundary = int(rng.integers(1, 3)), bool(rng.random() < 0.5)
        tables = random_tables(rng, num_layers, submeshes, candidates, boundary, num_devices)
        if tables.boundary.any() and case % 2:
            tables = on_nodes(rng, tables, num_devices)
        if case % 3 == 0:
            tables = pinned(rng, tables, num_devices)
        num_microbatches = int(rng.integers(1, 9))
        schedule = str(rng.choice(["1F1B", "GPipe"]))
        alive = in_flight(schedule, num_layers, num_microbatches)[::-1]
        limit = float(rng.choice([2.0, 5.0, np.inf]))
        weights = (
            closed_form(schedule, num_layers, num_microbatches)
            if rng.random() < 0.8
            else PipelineLatency(0.0, 5.0)
        )
        counts = (
            range(1, num_layers + 1)
            if rng.random() < 0.7
            else [int(rng.integers(1, num_layers + 1))]
        )
        steps = float(rng.choice([0.0, 1.0, 2.0]))
        expected = brute_force(tables, num_devices, weights, alive, limit, counts, steps)
        solution = solve_stages(tables, num_devices, weights, alive, limit, counts, steps)
        if solution is None:
            assert np.isinf(expected)
            continue
        assert solution.seconds == pytest.approx(expected, rel=1e-12)
        check(tables, solution, num_devices, weights, alive, limit, steps)


def test_a_stage_may_be_as_slow_as_itself():
    """Its second term is added up in one way only: it is not left out at its own threshold by a
    rounding error.
    """
    for seed in range(100):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 4, [1], 1, True, 2)
        expected = brute_force(tables, 2, PipelineLatency(1.0, 3.0), [4, 4], np.inf, [2], 1.0)
        solution = solve_stages(tables, 2, PipelineLatency(1.0, 3.0), [4, 4], num_stages=[2])
        assert (np.inf if solution is None else solution.seconds) == pytest.approx(
            expected, rel=1e-12
        )


@pytest.mark.parametrize("block", range(2))
def test_equals_brute_force_where_messages_run_beside_the_work(block):
    for case in range(25):
        rng = np.random.default_rng(7000 * (block + 1) + case)
        num_layers, num_devices = int(rng.integers(2, 6)), int(rng.integers(2, 7))
        tables = random_tables(rng, num_layers, [1, 2, 3], 2, True, num_devices)
        wide = replace(tables, boundary=tables.boundary * rng.choice([1.0, 10.0]))
        schedule, num_microbatches = str(rng.choice(["1F1B", "GPipe"])), int(rng.integers(2, 30))
        weights = closed_form(schedule, num_layers, num_microbatches)
        alive = in_flight(schedule, num_layers, num_microbatches)[::-1]
        limit = float(rng.choice([5.0, np.inf]))
        counts = range(1, num_layers + 1)
        share = float(rng.choice([0.0, 0.5]))
        expected = brute_force(wide, num_devices, weights, alive, limit, counts, 1.0, share)
        solution = solve_stages(
            wide, num_devices, weights, alive, limit, counts, sender_share=share
        )
        if solution is None:
            assert np.isinf(expected)
            continue
        assert expected * (1 - 1e-12) <= solution.seconds <= expected * (1 + 2 * GRID)


def check(tables, found, num_devices, weights, alive, limit, steps):
    """The stages are what they are said to cost, in order, cover the layers and the devices, and
    fit.
    """
    seconds = []
    bottlenecks = []
    position = 0
    left = num_devices
    for i, stage in enumerate(found.stages):
        at = (stage.first, stage.last, stage.submesh, stage.candidate)
        assert stage.first == position
        position = stage.last
        t = tables.seconds[at]
        assert tables.starts is None or tables.starts[0][stage.first, stage.last] in (
            -1,
            num_devices - left,
        )
        left -= int(tables.num_devices[stage.submesh])
        if i + 1 < len(found.stages):
            t += tables.wire(stage.last, stage.submesh, found.stages[i + 1].submesh, left)
        assert (
            tables.bytes_always[at] + alive[len(found.stages) - i - 1] * tables.bytes_in_flight[at]
            <= limit
        )
        seconds.append(t)
        bottlenecks.append(weights.steady * t + steps * tables.once_seconds[at])
    assert position == tables.seconds.shape[0]
    assert sum(tables.num_devices[s.submesh] for s in found.stages) == num_devices
    assert found.seconds == pytest.approx(weights.warmup * sum(seconds) + max(bottlenecks))


def test_golden_case():
    """`np.random.seed(0)` tables: 8 layers, 8 devices, submeshes of 1, 2, 4, 8; 1F1B with 16
    micro-batches.

    Worked out once by brute force (above) over all 128 ways to cut.
    """
    np.random.seed(0)
    num_layers, submeshes = 8, np.array([1, 2, 4, 8])
    first, last = np.ogrid[:num_layers, : num_layers + 1]
    # Larger submeshes are used less well: 70 % of every doubling.
    work = np.maximum(last - first, 0)[..., None, None] / submeshes[None, None, :, None] ** 0.7
    seconds = np.where(work > 0, work * np.random.uniform(0.8, 1.2, (8, 9, 4, 1)), np.inf)
    zeros = np.zeros_like(seconds)
    tables = anywhere(8, submeshes, seconds, zeros, zeros, zeros)
    solution = solve_stages(tables, 8, closed_form("1F1B", 8, 16), in_flight("1F1B", 8, 16)[::-1])
    assert solution is not None
    expected = brute_force(
        tables,
        8,
        closed_form("1F1B", 8, 16),
        in_flight("1F1B", 8, 16)[::-1],
        np.inf,
        range(1, 9),
        1.0,
    )
    assert solution.seconds == pytest.approx(expected, rel=1e-12)
    assert solution.seconds == pytest.approx(23.428582471831, rel=1e-12)
    assert [(s.first, s.last, int(submeshes[s.submesh])) for s in solution.stages] == [
        (0, 1, 1),
        (1, 2, 1),
        (2, 3, 1),
        (3, 4, 1),
        (4, 6, 2),
        (6, 7, 1),
        (7, 8, 1),
    ]


def test_a_tolerance_is_kept():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 10, [1, 2, 4], 2, True, 8)
        alive = in_flight("1F1B", 10, 8)[::-1]
        exact = solve_stages(tables, 8, closed_form("1F1B", 10, 8), alive)
        near = solve_stages(tables, 8, closed_form("1F1B", 10, 8), alive, tolerance=0.01)
        assert exact is not None
        assert near is not None
        assert exact.seconds <= near.seconds <= exact.seconds / 0.99


def test_stages_start_where_they_may():
    """On nodes of 2 devices a stage of 2 may not lie across two nodes."""
    rng = np.random.default_rng(0)
    tables = random_tables(rng, 4, [1, 2], 1, False, 4)
    fits = np.array([[True, (4 - left) % 2 == 0] for left in range(5)])
    bound = replace(tables, fits=fits)
    solution = solve_stages(bound, 4, closed_form("1F1B", 4, 2), [1, 2, 3, 4], num_stages=[3])
    assert solution is not None
    offset = 0
    for stage in solution.stages:
        size = int(tables.num_devices[stage.submesh])
        assert size == 1 or offset % 2 == 0
        offset += size
