"""A small training whose parameters are stored in given placements, and the same on one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from stores import store_on
from torch import nn

from alpa_strategy.comm.mesh import build_mesh
from alpa_strategy.comm.reshard import Reshard
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.placement import INVARIANT, REPLICATE
from alpa_strategy.ir.plan import ParameterPlan, Storage
from alpa_strategy.lightning.full_parameters import clip_by_norm

ROWS = 12


class Net(nn.Module):
    """Two layers, a tied weight, and a parameter that only an output that is not the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7, dtype=torch.float64)
        self.second = nn.Linear(7, 6, dtype=torch.float64)
        self.third = nn.Linear(6, 7, dtype=torch.float64)
        self.third.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.ones((), dtype=torch.float64))


def make_net() -> Net:
    generator = torch.Generator().manual_seed(3)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return net


def loss_sum(values, x):
    """Summed loss of rows x [rows, 6] (a sum: addends over rows add up over devices)."""
    h = torch.tanh(F.linear(x, values["first.weight"], values["first.bias"]))
    h = F.linear(h, values["second.weight"], values["second.bias"]) + values["bias"]
    h = F.linear(torch.tanh(h), values["first.weight"], values["third.bias"])
    return h.square().sum() / ROWS + 0 * values["unused"].detach().sum()


def inputs_of(net: Net) -> tuple[ParameterInput, ...]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(
        ParameterInput(i, tuple(n), TensorMeta(tuple(p.shape), p.dtype, True))
        for i, (p, n) in enumerate(names.items())
    )


def batches():
    generator = torch.Generator().manual_seed(5)
    return torch.randn((4, ROWS, 6), generator=generator, dtype=torch.float64)


def make_optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def reference(accumulate=1, max_norm=None, clear=True):
    """One process: final values, last gradients, norms, first moments."""
    net, norms = make_net(), []
    optimizer = make_optimizer(net)
    for i, x in enumerate(batches()):
        if i % accumulate == 0 and clear:
            optimizer.zero_grad()
        loss_sum(dict(net.named_parameters(remove_duplicate=False)), x).backward()
        if (i + 1) % accumulate == 0:
            if max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), max_norm).item())
            optimizer.step()
    named = dict(net.named_parameters())
    moments = {n: optimizer.state[p]["exp_avg"] for n, p in named.items() if p in optimizer.state}
    return (
        {n: p.detach() for n, p in named.items()},
        {n: p.grad for n, p in named.items()},
        norms,
        moments,
    )


def plan_of(mode: tuple[str, ...], shape) -> ParameterPlan:
    """`mode` for a parameter of `shape`: an axis that shards a dim that it lacks becomes R*."""
    fitting = []
    for m in mode:
        is_possible = m[0] == "R" or int(m[1:]) < len(shape)
        fitting.append(m if is_possible else "R*")
    return ParameterPlan.parse(" ".join(fitting))


def train(mesh, mode, accumulate=1, max_norm=None, clear=True, regather=False, bucket_bytes=200):
    """The same training on the devices of `mesh`; unsharded values on every device."""
    net, norms = make_net(), []
    optimizer = make_optimizer(net)
    inputs = inputs_of(net)
    plans = {p.name: plan_of(mode, p.meta.shape) for p in inputs}
    store = store_on(mesh, net, inputs, plans)
    identities = {n: id(p) for n, p in net.named_parameters()}
    # a loss whose graph has the unsharded shapes
    alive = loss_sum(dict(net.named_parameters(remove_duplicate=False)), batches()[0])
    store.shard(bucket_bytes=bucket_bytes)
    uses = uses_of(inputs, plans, mesh)
    divided = [axis for axis, m in enumerate(mode) if m != "R"]
    for i, x in enumerate(batches()):
        for axis in divided:
            x = x.tensor_split(mesh.shape[axis])[mesh.coordinate[axis]]
        hooks = store.of_stage[0].regather_hooks(prefetched_bytes=0)
        with hooks if regather else torch.enable_grad():
            local = store.of_stage[0].step_inputs()
            values = {name: use(local[name]) for name, use in uses.items()}
            loss = loss_sum(values, x)
        del values
        if i % accumulate == 0 and clear:
            optimizer.zero_grad()
        store.sync((i + 1) % accumulate == 0)
        loss.backward()
        store.finish_backward()
        if (i + 1) % accumulate == 0:
            if max_norm is not None:
                norms.append(clip_by_norm(store, max_norm, store.parameters).item())
            optimizer.step()
            store.after_optimizer_step()
    assert identities == {n: id(p) for n, p in net.named_parameters()}
    values, grads, moments = gather_results(net, store, optimizer)
    store.unshard()
    # losses from before: `alive` has the unsharded shapes, `loss` the local ones
    assert alive.requires_grad
    assert loss.requires_grad
    optimizer.zero_grad()
    assert all(torch.equal(p, values[n]) for n, p in net.named_parameters())
    # an ordinary module from here on
    loss_sum(dict(net.named_parameters(remove_duplicate=False)), batches()[0]).backward()
    return values, grads, norms, moments


def gather_results(net, store, optimizer):
    """The full values, gradients and first moments of all parameters, by name."""
    values = {}
    grads = {}
    moments = {}
    for name, parameter in net.named_parameters():
        values[name] = store.gather(parameter)
        assert torch.equal(store.shard_like(parameter, values[name]), parameter.detach())

        gradient = parameter.grad
        grads[name] = None if gradient is None else store.gather_like(parameter, gradient)

        if parameter in optimizer.state:
            moment = optimizer.state[parameter]["exp_avg"]
            moments[name] = store.gather_like(parameter, moment)
    return values, grads, moments


def uses_of(inputs, plans, mesh):
    """Parameter name -> the Reshard from its step layout to the unsharded value.

    On an axis where the storage placement is R all devices do the same work; on others the samples
    are divided among them.
    """
    uses = {}
    for p in inputs:
        plan = plans[p.name]
        full = []
        for mode in plan.modes:
            full.append(INVARIANT if mode.storage is Storage.INVARIANT else REPLICATE)
        uses[p.name] = Reshard(plan.step_layout(), tuple(full), p.meta.shape, mesh)
    return uses


def train_on_groups(mesh_shape, mode, options):
    return train(build_mesh(mesh_shape), mode, **options)


def assert_equals_reference(result, **options):
    expected = reference(**options)
    for found, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
