"""A module built under a Recorder holds what the same code makes on a device, bit by bit, and so do
the generators.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from lightning import LightningModule
from models import MODELS
from torch import nn

from alpa_strategy.errors import CaptureError
from alpa_strategy.lightning.module_init import move_real_tensors
from alpa_strategy.recording.recorder import Recorder

CPU = torch.device("cpu")


def uninitialised(module: nn.Module, recorder: Recorder) -> list[str]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [(name, tensor) for name, tensor in tensors if tensor.is_meta]
    return [name for name, tensor in on_meta if not recorder.is_deferred(tensor)]


class Block(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.down.weight.data.div_(math.sqrt(2.0 * (depth + 1)))  # reads what was drawn before


class GPTStyle(nn.Module):
    """Everything is drawn once by the layers and again by `apply`; tied head; masks and tables in
    buffers.
    """

    def __init__(self, width: int = 16, vocab: int = 40, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=3)
        self.blocks = nn.ModuleList([Block(width, i) for i in range(depth)])
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(vocab, vocab)).view(1, 1, vocab, vocab))
        frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer(
            "angles", torch.outer(torch.arange(vocab).float(), frequencies), persistent=False
        )
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
        self.head.weight = self.embed.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()


class Exotic(nn.Module):
    """Initialisers that compute: orthogonal, truncated normal, sparse, eye, values of other
    tensors, own generators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.empty(12, 8)) for _ in range(3))
        nn.init.orthogonal_(self.a)
        nn.init.trunc_normal_(self.b, std=0.3, a=-0.2, b=0.2)
        nn.init.sparse_(self.c, 0.3)
        self.d = nn.Parameter(torch.empty(8, 8))
        nn.init.eye_(self.d)
        generator = torch.Generator().manual_seed(5)
        self.e = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.f = nn.Parameter(torch.rand(8, 8, generator=generator) + self.d.detach())
        with torch.no_grad():
            self.e[2:4, 1:] = self.f[:2, 1:]
            self.f.copy_(self.e.t())
            self.b[torch.tensor([0, 5])] = 1.0
        self.g = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.h = nn.Parameter(torch.bernoulli(torch.full((6, 6), 0.4)))
        self.scale = float(self.a.detach().std())
        self.k = nn.Parameter(torch.full((4, 4), self.scale))
        self.attention = nn.MultiheadAttention(8, 2, bias=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.encoder = nn.TransformerEncoder(
            layer, 2, enable_nested_tensor=False
        )  # copies the layer
        self.lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=True)
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        # Computed of a large and a small tensor by an op that refuses two devices.
        self.register_buffer("normed", self.conv.weight.detach().abs())
        self.target = copy.deepcopy(self.attention)
        if (self.a > 100).any():
            nn.init.zeros_(self.a)
        torch.manual_seed(11)
        self.last = nn.Linear(5, 5).double()
        self.d.data = torch.rand(3, 3)
        order = torch.randperm(12)
        self.b.data = self.b.data[order]
        self.register_buffer("halved", torch.randn(7, 3).to(torch.bfloat16))


class Lazy(nn.Module):
    """Sees its sizes in a batch, which also moves running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(30)
        )
        self.norm = nn.BatchNorm1d(30)
        self.norm(self.net(torch.randn(5, 2, 7)))


def build(make, min_bytes):
    """(module built as it is, the same built under a recorder, the recorder); the generators stand
    alike afterwards.
    """
    torch.manual_seed(3)
    plain = make()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    recorder = Recorder(CPU, min_bytes)
    with recorder.recording():
        deferred = make()
    assert torch.equal(torch.get_rng_state(), after)
    return plain, deferred, recorder


def assert_equal(plain: nn.Module, deferred: nn.Module, recorder: Recorder) -> None:
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    results = {**dict(deferred.named_parameters()), **dict(deferred.named_buffers())}
    assert expected.keys() == results.keys()
    before = torch.get_rng_state()
    for name in reversed(expected):  # in any order
        value = recorder.materialize(results[name].detach())
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name
    assert torch.equal(torch.get_rng_state(), before)


# Importing other files adds to MODELS.
OWN_MODELS = [model for model in MODELS.values() if model.__module__ == "models"]


@pytest.mark.parametrize("min_bytes", [1, 300])
@pytest.mark.parametrize("make", [GPTStyle, Exotic, Lazy, *OWN_MODELS], ids=lambda m: m.__name__)
def test_values_are_those_of_a_device(make, min_bytes: int) -> None:
    plain, deferred, recorder = build(make, min_bytes)
    if min_bytes == 1 and make is GPTStyle:
        assert all(p.is_meta for p in deferred.parameters())
    assert_equal(plain, deferred, recorder)


def test_tied_parameters_stay_tied_and_small_tensors_are_real() -> None:
    plain, deferred, recorder = build(GPTStyle, 1000)
    assert deferred.head.weight is deferred.embed.weight
    assert deferred.rates == plain.rates
    assert deferred.embed.weight.is_meta
    assert not deferred.blocks[0].norm.weight.is_meta
    assert uninitialised(deferred, recorder) == []


def test_only_what_one_tensor_needs_is_run() -> None:
    """Numbers that are drawn again later, and other parameters, are not made."""
    _, deferred, recorder = build(GPTStyle, 1)
    number = recorder._numbers[deferred.blocks[1].up.weight.untyped_storage()._cdata]
    assert len(recorder._needed([number])) == 1


def test_on_the_meta_device() -> None:
    """`torch.device("meta")` inside of a recording costs nothing; outside of one, reset_parameters
    makes the values.
    """

    def make() -> nn.Module:
        with torch.device("meta"):
            return GPTStyle()

    torch.manual_seed(3)
    plain = GPTStyle()
    torch.manual_seed(3)
    recorder = Recorder(CPU, 1)
    with recorder.recording():
        module = make()
    assert_equal(plain, module, recorder)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    recorder = Recorder(CPU, 1)
    assert uninitialised(module, recorder) == [name for name, _ in module.named_parameters()]
    torch.manual_seed(1)
    with recorder.recording():
        for child in module:
            child.reset_parameters()
    assert uninitialised(module, recorder) == []
    torch.manual_seed(1)
    assert_equal(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)), module, recorder)


def test_loaded_values_are_read_when_they_are_asked_for(tmp_path) -> None:
    torch.manual_seed(9)
    source = GPTStyle()
    torch.save(source.state_dict(), tmp_path / "weights.pt")

    def make() -> nn.Module:
        module = GPTStyle()
        module.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True))
        module.blocks[0].up.bias.data += 1.0
        return module

    assert_equal(*build(make, 1))


def test_given_data_that_changes_afterwards_is_an_error() -> None:
    data = torch.randn(1024, 1024)
    recorder = Recorder(CPU, 1)
    with recorder.recording():
        layer = nn.Linear(1024, 1024)
        layer.weight.data.copy_(data)
    assert torch.equal(recorder.materialize(layer.weight.detach()), data)
    data.zero_()
    with pytest.raises(CaptureError, match="was changed afterwards"):
        recorder.materialize(layer.weight.detach())


def test_ranks_without_a_common_seed_agree() -> None:
    torch.manual_seed(3)
    plain = GPTStyle()
    scripts = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        recorder = Recorder(CPU, 1)
        with recorder.recording():
            scripts.append((GPTStyle(), recorder))
    (_, first), (module, other) = scripts
    assert first.digest() == other.digest()
    for tensor, of_first in zip(other.rank_dependent(), first.rank_dependent(), strict=True):
        tensor.data.copy_(of_first)
    assert_equal(plain, module, other)


def test_changes_that_were_recorded_are_not_taken_for_others() -> None:
    """`data = ...` puts a parameter into other memory, and its version goes on counting."""
    recorder = Recorder(CPU, min_bytes=1)
    with recorder.recording():
        weight = nn.Parameter(torch.empty(8, 8))
        nn.init.trunc_normal_(weight, std=0.3)
        nn.init.orthogonal_(weight)
        weight.data = weight.data * 0.7
        weight.data = weight.data.to(torch.float64)
        nn.init.eye_(weight)
    assert recorder.is_unchanged(weight)
    with torch.no_grad():
        for _ in range(20):  # more than what was recorded: that can be seen
            weight.mul_(2.0)
    assert not recorder.is_unchanged(weight)


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_a_deferred_module_knows_the_device_it_moves_to(built_on: str) -> None:
    module = LightningModule()
    module.layer = nn.Linear(2, 2, device=built_on)
    assert module.device == CPU
    move_real_tensors(module, torch.device("meta"))  # stands for a GPU
    assert module.device == torch.device("meta")
