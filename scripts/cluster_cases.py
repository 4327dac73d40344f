"""The models of bench_cluster.py: ordinary LightningModules, and how a user would shard each by
hand for Lightning's
ModelParallelStrategy (`configure_model`). Nothing in them knows of alpa."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F


class Net(nn.Module):
    """A network of `blocks`, with what is tensor parallel in a block and around the blocks."""

    blocks: nn.ModuleList
    block_plan: Mapping[str, Any] = {}
    outer_plan: Mapping[str, Any] = {}


class Task(pl.LightningModule):
    """Trains `net` by `loss(net(x), y)`; batches are (x, y).

    `shard` is what a user of ModelParallelStrategy writes into `configure_model`, after Lightning's
    documentation: tensor parallel on one mesh axis, FSDP on the other.
    """

    def __init__(self, net: Net, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def shard(self) -> None:
        """Shard `net` over `self.device_mesh`."""
        mesh = self.device_mesh
        assert mesh is not None
        tensor, data = mesh["tensor_parallel"], mesh["data_parallel"]
        if tensor.size() > 1:
            for block in self.net.blocks:
                parallelize_module(block, tensor, dict(self.net.block_plan))
            parallelize_module(self.net, tensor, dict(self.net.outer_plan))
        if data.size() > 1:
            for block in self.net.blocks:
                fully_shard(block, mesh=data)
            fully_shard(self.net, mesh=data)


class MuonTask(Task):
    """As `Task`, of a net whose parameters are all matrices, trained by Muon."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Muon(self.parameters(), lr=1e-3)


class Block(nn.Module):
    """A pre-norm transformer block whose heads follow the local width of its projections."""

    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.norm1(x_BTD)
        B, T, _ = h_BTD.shape
        q, k, v = (
            part(h_BTD).view(B, T, -1, self.head).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(a.transpose(1, 2).reshape(B, T, -1))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class GPT(Net):
    """Tokens [B, T] to logits [B * T, V]."""

    block_plan: Mapping[str, Any] = {
        "q": ColwiseParallel(),
        "k": ColwiseParallel(),
        "v": ColwiseParallel(),
        "o": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    outer_plan: Mapping[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }

    def __init__(self, layers: int, hidden: int, vocab: int, sequence: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, head=32) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.position(
            torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        )
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD)).flatten(0, 1)


class Pair(nn.Module):
    """Two linear layers around a ReLU, with a residual."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias)
        self.down = nn.Linear(2 * width, width, bias)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(torch.relu(self.up(x_BD)))


class Tower(Net):
    """An MLP tower, [B, D] to [B, D]."""

    block_plan: Mapping[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def __init__(self, pairs: int, width: int, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(width, bias) for _ in range(pairs))

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD


class ConvBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions; halves the image where it widens."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        self.skip = (
            nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv1(x_BCHW)))
        return torch.relu(self.norm2(self.conv2(h)) + self.skip(x_BCHW))


class ResNet(Net):
    """A residual network: images [B, 3, H, W] to classes [B, K]."""

    def __init__(self, widths: tuple[int, ...], per_width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1)
        blocks, inputs = [], widths[0]
        for width in widths:
            for _ in range(per_width):
                blocks.append(ConvBlock(inputs, width))
                inputs = width
        self.blocks = nn.ModuleList(blocks)
        self.classes = nn.Linear(inputs, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(x_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.classes(x_BCHW.mean((2, 3)))


@dataclass(frozen=True)
class Case:
    """A task, a row of its data (from a generator), and the rows of the global batch.

    `tokens`: what a row counts for in tokens/s. `tensor_parallel`: whether the model has a tensor
    parallel plan.
    """

    task: Callable[[], Task]
    row: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    rows: int
    tokens: int
    tensor_parallel: bool
    what: str


def token_loss(logits: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(logits, targets_BT.flatten())


def text(layers: int, hidden: int, vocab: int, sequence: int, rows: int) -> Case:
    """A GPT."""

    def row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        window = torch.randint(vocab, (sequence + 1,), generator=generator)
        return window[:-1], window[1:]

    what = f"GPT {layers} x {hidden}, vocabulary {vocab}, {rows} x {sequence} tokens"
    return Case(
        lambda: Task(GPT(layers, hidden, vocab, sequence), token_loss),
        row,
        rows,
        sequence,
        True,
        what,
    )


def tower(pairs: int, width: int, rows: int, muon: bool = False) -> Case:
    """An MLP tower; under Muon without biases."""

    def row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(width, generator=generator), torch.randn(width, generator=generator)

    task = MuonTask if muon else Task
    return Case(
        lambda: task(Tower(pairs, width, bias=not muon), F.mse_loss),
        row,
        rows,
        1,
        True,
        f"MLP tower {pairs} x {width}, {rows} rows{', Muon' if muon else ''}",
    )


def images(widths: tuple[int, ...], per_width: int, size: int, rows: int) -> Case:
    """A residual network."""

    def row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(3, size, size, generator=generator), torch.randint(
            100, (), generator=generator
        )

    what = f"ResNet {widths} x {per_width}, {rows} images of {size} x {size}"
    return Case(
        lambda: Task(ResNet(widths, per_width, 100), F.cross_entropy), row, rows, 1, False, what
    )


CASES: dict[str, Case] = {
    "gpt": text(layers=6, hidden=384, vocab=1024, sequence=128, rows=16),
    "mlp": tower(pairs=8, width=768, rows=512),
    "muon": tower(pairs=4, width=512, rows=512, muon=True),
    "vocabulary": text(layers=2, hidden=256, vocab=16384, sequence=64, rows=32),
    "resnet": images(widths=(32, 64, 128, 256), per_width=2, size=32, rows=64),
    "long": text(layers=4, hidden=128, vocab=512, sequence=256, rows=64),
}
