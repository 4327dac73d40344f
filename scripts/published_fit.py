"""Fits the constants of the cluster files on some published sources: coordinate descent, one
constant at a time.

    python scripts/published.py --fit

Every case is solved once (its layouts are pinned) and priced again for other constants by the
package's own functions. What is printed goes into configs/clusters by hand, rounded, where it makes
sense physically.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from published_price import Repricer
from published_rows import REACHED, Case

from alpa_strategy.cluster.devices import DeviceSpec
from alpa_strategy.cluster.spec import ClusterSpec

KINDS = ("matmul", "attention", "attention_backward")
# a row that is further off counts as if it were so far: it is another thing that is wrong there
CAP = 0.5


def family(device: DeviceSpec) -> str:
    """Devices that share efficiencies: the chip, and what limits its power."""
    return device.name.split("-")[0] + ("-500W" if "500W" in device.name else "")


def starting_point(cases: Sequence[Case]) -> dict[str, float]:
    """The constants as the cluster files have them; shares of data sheets where those would not be
    comparable.
    """
    results = {"bandwidth": 1.0, "line rate": REACHED, "overlap": cases[0].cluster.overlap}
    for case in cases:
        device = case.cluster.device
        for kind in KINDS:
            results[f"{family(device)} {kind}"] = device.efficiency_of(kind, "bfloat16")
    return results


def with_constants(cluster: ClusterSpec, constants: dict[str, float]) -> ClusterSpec:
    """A cluster whose device and links have other constants; `bandwidth` is relative to the
    file's.
    """
    device = cluster.device
    shares = {kind: constants[f"{family(device)} {kind}"] for kind in KINDS}
    device = replace(
        device,
        memory_bandwidth=device.memory_bandwidth * constants["bandwidth"],
        efficiency=shares["matmul"],
        efficiencies=tuple((kind, (("bfloat16", shares[kind]),)) for kind in KINDS),
    )
    line = cluster.inter_node.bandwidth * constants["line rate"] / REACHED
    inter = replace(cluster.inter_node, bandwidth=line)
    return replace(cluster, device=device, inter_node=inter, overlap=constants["overlap"])


def fit(cases: Sequence[Case], rounds: int = 6) -> dict[str, float]:
    """The constants with the least mean |log error|, sources weighing by the root of their rows."""
    priced = [Repricer(case) for case in cases]
    rows = Counter(case.source for case in cases)

    def loss(constants: dict[str, float]) -> float:
        total = 0.0
        for case, each in zip(cases, priced, strict=True):
            error = abs(
                math.log(each.seconds(with_constants(case.cluster, constants)) / case.seconds)
            )
            total += min(error, CAP) / math.sqrt(rows[case.source])
        return total

    best = starting_point(cases)
    least, step = loss(best), dict.fromkeys(best, 0.1)
    for number in range(rounds):
        for name in best:
            for factor in (1 + step[name], 1 / (1 + step[name])):
                other = best | {name: min(best[name] * factor, 1.5 if name == "bandwidth" else 1.0)}
                if (found := loss(other)) < least - 1e-9:
                    best, least = other, found
                    break
            else:
                step[name] /= 2
        shown = ", ".join(f"{name} {value:.3f}" for name, value in best.items())
        print(f"round {number + 1}: loss {least:.4f}: {shown}", flush=True)
    return best
