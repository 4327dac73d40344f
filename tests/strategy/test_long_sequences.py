"""Sequences longer than one device holds: one sample cut over the devices, as the solver finds it,
without a pin.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equality.harness import assert_same, record
from models import GPT
from proofs.thread_mesh import ThreadMesh, run_on_threads
from torch.utils._python_dispatch import TorchDispatchMode

from alpa_strategy import ClusterSpec, PlanOptions, make_plan
from alpa_strategy.lower.ring_attention import RingAttention

STEPS = 2


def slow_cluster(num_devices: int) -> ClusterSpec:
    """Devices as slow as these sequences are short: what pays for long ones on real devices pays
    here.
    """
    spec = ClusterSpec.load("pcie_8gpu", {"num_nodes": 1, "devices_per_node": num_devices})
    device = replace(
        spec.device, memory_bandwidth=1e9, peak_flops=(("float64", 1e10),), launch_seconds=1e-6
    )
    return replace(spec, device=device, intra_node=replace(spec.intra_node, latency=1e-6))


def train(model: dict[str, Any], strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Steps of one sample, on this rank or on one device alone."""
    return record("gpt", model, strategy, STEPS, samples=1, world_size=4 if strategy else 1)


def limit_that_holds(length: int, model: dict) -> int:
    """Bytes that a plan for one device needs for a sample of this length, which keeps all its
    activations.
    """
    torch.set_default_dtype(torch.float64)
    try:
        module = GPT(**{**model, "seq_len": length})
        options = PlanOptions.from_user(batch_scope="global", remat=False)
        return make_plan(
            module, module.example_batch(1), slow_cluster(1), options
        ).predicted.peak_bytes
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("heads", "attention"),
    [
        pytest.param(4, "S1,S1,S1->S1", marks=pytest.mark.slow),
        (1, "S2,S2,S2->S2@ring_attention"),
    ],
)
def test_a_sample_four_times_as_long_as_fits_trains_on_four_ranks(
    pool, tmp_path: Path, heads: int, attention: str
):
    """Heads that divide evenly are exchanged for the sequence, else keys and values go around."""
    model = {"num_heads": heads, "seq_len": 512, "ignore_fraction": 0.1}
    strategy = {
        "batch_scope": "global",
        "memory_limit": limit_that_holds(128, model),
        "cluster": slow_cluster(4),
        "plan_dir": str(tmp_path),
    }
    runs = pool.run(4, train, model, strategy)
    (reference,) = pool.run(1, train, model, None, init_group=False)
    for run in runs:
        assert_same(run, reference)
        assert run["strategies"] == runs[0]["strategies"]
    found = {
        str(s[0])
        for name, s in runs[0]["strategies"].items()
        if name.startswith("scaled_dot_product")
    }
    assert found == {attention}
    for name, strategies in runs[0][
        "strategies"
    ].items():  # all between is cut along the sequence as well
        if name.startswith(("linear", "layer_norm", "gelu", "cross_entropy")):
            assert str(strategies[0]).partition("->")[0][:2] in ("S0", "S1"), (name, strategies)


class ScoresComputed(TorchDispatchMode):
    """Scores that attention computes in this thread: half of a block where a causal mask hides the
    other half.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scores = [0.0, 0.0]  # forward, backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_flash_attention"):
            is_backward = name.endswith("backward")
            query, key = args[
                is_backward : 2 + is_backward
            ]  # [..., rows, width], [..., columns, width]
            # defaults are left out
            if is_backward:
                causal = args[7]
            else:
                causal = len(args) > 4 and args[4]
            scores = query.shape[:-1].numel() * key.shape[-2] * (0.5 if causal else 1.0)
            self.scores[is_backward] += scores
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_is_as_much_work_on_every_device(devices: int, causal: bool) -> None:
    """Each computes its share of the scores that one device computes, to the element."""
    rows, heads = 24, 2
    query = torch.randn(1, heads, rows, 4, dtype=torch.float64)

    def device(mesh: ThreadMesh) -> list[float]:
        own = query.chunk(devices, 2)[mesh.coordinate[0]].clone().requires_grad_()
        with ScoresComputed() as counted:
            RingAttention.apply(mesh.axes[0], own, own, own, causal, 0.5).sum().backward()
        return counted.scores

    share = heads * rows * rows * (0.5 if causal else 1.0) / devices
    assert run_on_threads((devices,), device) == [[share, share]] * devices
