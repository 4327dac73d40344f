"""Instances of the shape that a GPT on a 2-D logical mesh gives, for timing and testing the solver
without a model.

Per mesh axis a value is R, R* (repeated, gradient partial), P, S0 (batch), S1 (sequence) or S2
(features); ops choose among products of single-axis strategies, and a change of layout costs alpha
+ beta * bytes. The figures are round, the structure is what counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from alpa_strategy.intra_op.problem import Choice, Problem, Transfer, Use
from alpa_strategy.intra_op.solver.lagrangian import price_memory
from alpa_strategy.intra_op.solver.solve import solve

LAYOUTS = ("R", "R*", "P", "S0", "S1", "S2")
AXIS_SIZES = (4, 8)
ALPHA = (1e-5, 5e-5)
BANDWIDTH = (1e11, 1e10)
FLOPS = 1e14

LINEAR = (
    ("S0", "R*", "S0"),
    ("S1", "R*", "S1"),
    ("R*", "S1", "S2"),
    ("S2", "S2", "P"),
    ("R", "R", "R"),
)
NORM = (("S0", "R*", "S0"), ("S1", "R*", "S1"), ("R", "R", "R"))
POINTWISE = tuple((x, x) for x in ("R", "S0", "S1", "S2"))
ATTENTION = tuple((x, x) for x in ("R", "S0", "S2"))
ADD = tuple((x, x, x) for x in ("R", "R*", "P", "S0", "S1", "S2"))
STORAGE = tuple((x,) for x in ("R", "R*", "S1", "S2"))


class _Builder:
    def __init__(self, noise: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise = noise
        self.choices: list[Choice] = []
        self.producers: list[tuple[str, int, np.ndarray, float]] = []
        self.uses: list[list[Use]] = []

    def op(
        self,
        name: str,
        rules: Sequence[tuple[str, ...]],
        operands: Sequence[int],
        num_bytes: float,
        flops: float,
        saved: float = 1.0,
    ) -> int:
        """Add a choice (products of `rules`, operands then result); the number of its value."""
        axes = len(AXIS_SIZES)
        strategies = list(itertools.product(rules, repeat=axes))
        codes = []
        nums_shards = []
        for strategy in strategies:
            codes.append([_code(placements) for placements in zip(*strategy, strict=True)])
            # the work of a partial result is divided as that of a shard
            results = [rule[-1].replace("P", "S2") for rule in strategy]
            nums_shards.append(_num_parts(results))
        code = np.array(codes)
        split = np.array(nums_shards)
        seconds = 3 * flops / FLOPS / split + 3 * num_bytes / 1e12 / split + 1e-6
        seconds = seconds * (1 + self.noise * self.rng.random(len(seconds)))
        choice = len(self.choices)
        self.choices.append(Choice(name, seconds, saved * num_bytes / split))
        for i, value in enumerate(operands):
            self.uses[value].append(Use(choice, code[:, i]))
        self.producers.append((name, choice, code[:, -1], num_bytes))
        self.uses.append([])
        return len(self.producers) - 1

    def problem(self, memory_limit: float) -> Problem:
        one = [_axis_cost(n, a, b) for n, a, b in zip(AXIS_SIZES, ALPHA, BANDWIDTH, strict=True)]
        transfers = []
        for (name, choice, source, num_bytes), uses in zip(self.producers, self.uses, strict=True):
            if not uses:
                continue
            n = len(LAYOUTS)
            pairs = [
                one[0](num_bytes / 2)[:, None, :, None],
                one[1](num_bytes / 2)[None, :, None, :],
            ]
            cost = (pairs[0] + pairs[1]).reshape(n * n, n * n)
            parts = np.array([_num_parts(x) for x in itertools.product(LAYOUTS, repeat=2)])
            kept = np.where(np.eye(n * n, dtype=bool), 0.0, num_bytes / parts[None, :])
            transfers.append(Transfer(name, choice, source, tuple(uses), cost, kept))
        return Problem(tuple(self.choices), tuple(transfers), memory_limit)


def gpt_like(
    num_layers: int,
    memory_limit: float = float("inf"),
    *,
    hidden: int = 2048,
    noise: float = 0.0,
    seed: int = 0,
) -> Problem:
    """GPT-shaped, 19 choices a layer on a 4 x 8 mesh, 4 to 36 strategies a choice; `noise` makes
    layers differ.
    """
    build = _Builder(noise, seed)
    tokens = 32 * 1024
    act = tokens * hidden * 2.0

    def weight(name: str, rows: float, columns: float) -> int:
        # 16 bytes an element: fp16 weight and gradient, fp32 master copy and two moments.
        return build.op(name, STORAGE, [], rows * columns * 2.0, 0.0, saved=8.0)

    def linear(name: str, x: int, columns: int, rows: int, num_bytes: float) -> int:
        w = weight(f"{name}.weight", rows, columns)
        return build.op(name, LINEAR, [x, w], num_bytes, 2.0 * tokens * rows * columns)

    def norm(name: str, x: int) -> int:
        w = build.op(f"{name}.weight", (("R",), ("R*",)), [], 2.0 * hidden, 0.0, saved=8.0)
        return build.op(name, NORM, [x, w], act, 0.0)

    x = build.op("embedding", POINTWISE[:3], [], act, 0.0)
    for i in range(num_layers):
        h = linear(f"{i}.qkv", norm(f"{i}.norm1", x), hidden, 3 * hidden, 3 * act)
        q, k, v = (build.op(f"{i}.{part}", POINTWISE, [h], act, 0.0, saved=0.0) for part in "qkv")
        build_attention = tuple((a, a, a, a) for a, _ in ATTENTION)
        h = build.op(
            f"{i}.attention", build_attention, [q, k, v], act, 4.0 * tokens * 1024 * hidden
        )
        x = build.op(
            f"{i}.add1", ADD, [x, linear(f"{i}.proj", h, hidden, hidden, act)], act, 0.0, saved=0.0
        )
        h = build.op(
            f"{i}.gelu",
            POINTWISE,
            [linear(f"{i}.fc1", norm(f"{i}.norm2", x), hidden, 4 * hidden, 4 * act)],
            4 * act,
            0.0,
        )
        x = build.op(
            f"{i}.add2",
            ADD,
            [x, linear(f"{i}.fc2", h, 4 * hidden, hidden, act)],
            act,
            0.0,
            saved=0.0,
        )
    build.op("loss", POINTWISE[:3], [x], act, 0.0)
    return build.problem(memory_limit)


def _code(placements: Sequence[str]) -> int:
    return LAYOUTS.index(placements[0]) * len(LAYOUTS) + LAYOUTS.index(placements[1])


def _num_parts(placements: Sequence[str]) -> int:
    parts = 1
    for size, placement in zip(AXIS_SIZES, placements, strict=True):
        parts *= size if placement.startswith("S") else 1
    return parts


def _axis_cost(n: int, alpha: float, bandwidth: float) -> Callable[[float], np.ndarray]:
    """Forward and dual backward seconds of every change on one axis, as a function of the bytes."""

    def cost(num_bytes: float) -> np.ndarray:
        gather, reduce, move = (
            (alpha + f * num_bytes / bandwidth)
            for f in ((n - 1) / n, 2 * (n - 1) / n, (n - 1) / n**2)
        )
        table = np.full((len(LAYOUTS), len(LAYOUTS)), np.inf)
        for i, p in enumerate(LAYOUTS):
            for j, q in enumerate(LAYOUTS):
                if p == q:
                    table[i, j] = 0.0
                elif p.startswith("S") and q.startswith("S"):
                    table[i, j] = 2 * move
                elif p == "P":
                    seconds = {"R": reduce, "R*": 2 * reduce}
                    table[i, j] = seconds.get(q, 2 * gather)
                elif q == "P":
                    table[i, j] = np.inf
                elif p.startswith("S"):
                    table[i, j] = gather if q == "R" else 2 * gather
                elif p == "R":
                    table[i, j] = reduce if q == "R*" else gather
                else:
                    table[i, j] = np.inf if q == "R" else 0.0
        return table

    return cost


def least_bytes(problem: Problem) -> float:
    """The fewest bytes of any finite-cost assignment."""
    return solve(
        price_memory(replace(problem, memory_limit=np.inf), 1.0, seconds_weight=0.0)
    ).seconds
