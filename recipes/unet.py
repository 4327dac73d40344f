"""A diffusion model (DDPM, arXiv 2006.11239) as an ordinary LightningModule: a U-Net learns which
noise was added to an image.

Nothing in it knows of parallelism. Shapes: B batch, C channels, Y x X pixels, E of the embedded
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def time_waves(times_B: Tensor, dim: int) -> Tensor:
    """Sines and cosines [B, dim] of the times."""
    exponents = torch.arange(dim // 2, device=times_B.device) / (dim // 2)
    angles = times_B.unsqueeze(-1) * torch.exp(-math.log(10000) * exponents)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class ResBlock(nn.Module):
    """Two convolutions beside a shortcut; the time is added between them."""

    def __init__(self, in_channels: int, channels: int, time_dim: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.time = nn.Linear(time_dim, channels)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Identity()
        if in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1)

    def forward(self, x_BCYX: Tensor, time_BE: Tensor) -> Tensor:
        y_BCYX = self.conv1(F.silu(self.norm1(x_BCYX)))
        y_BCYX = y_BCYX + self.time(F.silu(time_BE))[:, :, None, None]
        return self.shortcut(x_BCYX) + self.conv2(F.silu(self.norm2(y_BCYX)))


class PixelAttention(nn.Module):
    """Self-attention of all pixels, beside a shortcut."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        q_BCYX, k_BCYX, v_BCYX = self.qkv(self.norm(x_BCYX)).chunk(3, dim=1)
        q_BTC = q_BCYX.flatten(2).transpose(1, 2)
        k_BTC = k_BCYX.flatten(2).transpose(1, 2)
        v_BTC = v_BCYX.flatten(2).transpose(1, 2)
        y_BTC = F.scaled_dot_product_attention(q_BTC, k_BTC, v_BTC)
        return x_BCYX + self.proj(y_BTC.transpose(1, 2).reshape(x_BCYX.shape))


class Level(nn.Module):
    """A residual block at one resolution, with attention or without."""

    def __init__(
        self, in_channels: int, channels: int, time_dim: int, groups: int, attends: bool
    ) -> None:
        super().__init__()
        self.block = ResBlock(in_channels, channels, time_dim, groups)
        self.attention = PixelAttention(channels, groups) if attends else nn.Identity()

    def forward(self, x_BCYX: Tensor, time_BE: Tensor) -> Tensor:
        return self.attention(self.block(x_BCYX, time_BE))


class UNet(nn.Module):
    """Images [B, C, Y, X] and times [B] -> images.

    On the way down each level's result is stored, on the way up it joins the one of its resolution.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        multipliers: Sequence[int],
        blocks_per_level: int,
        attention_levels: Sequence[int],
        groups: int,
    ) -> None:
        super().__init__()
        self.channels = channels
        time_dim = 4 * channels
        self.time = nn.Sequential(
            nn.Linear(channels, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim)
        )
        self.stem = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        stored = [channels]
        width = channels
        for level, multiplier in enumerate(multipliers):
            attends = level in attention_levels
            for _ in range(blocks_per_level):
                self.down.append(Level(width, channels * multiplier, time_dim, groups, attends))
                width = channels * multiplier
                stored.append(width)
            if level < len(multipliers) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                stored.append(width)
        self.middle = Level(width, width, time_dim, groups, True)
        self.after_middle = ResBlock(width, width, time_dim, groups)
        for level, multiplier in reversed(list(enumerate(multipliers))):
            attends = level in attention_levels
            for _ in range(blocks_per_level + 1):
                joined = width + stored.pop()
                self.up.append(Level(joined, channels * multiplier, time_dim, groups, attends))
                width = channels * multiplier
            if level > 0:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm = nn.GroupNorm(groups, width)
        self.out = nn.Conv2d(width, in_channels, 3, padding=1)

    def forward(self, x_BCYX: Tensor, times_B: Tensor) -> Tensor:
        time_BE = self.time(time_waves(times_B, self.channels).to(x_BCYX.dtype))
        x_BCYX = self.stem(x_BCYX)
        stored = [x_BCYX]
        for layer in self.down:
            x_BCYX = layer(x_BCYX, time_BE) if isinstance(layer, Level) else layer(x_BCYX)
            stored.append(x_BCYX)
        x_BCYX = self.after_middle(self.middle(x_BCYX, time_BE), time_BE)
        for layer in self.up:
            if isinstance(layer, Level):
                x_BCYX = layer(torch.cat((x_BCYX, stored.pop()), dim=1), time_BE)
            else:
                x_BCYX = layer(F.interpolate(x_BCYX, scale_factor=2.0))
        return self.out(F.silu(self.norm(x_BCYX)))


class DDPM(lightning.LightningModule):
    """A batch is (images [B, C, Y, X] from 0 to 1, labels [B], which are not used).

    Args:
        in_channels, channels, multipliers, blocks_per_level, attention_levels, groups: of `UNet`:
            level i has `multipliers[i]` times `channels`, at half the resolution of the one before.
        num_times: steps from image to noise.
        lr: Adam.
    """

    def __init__(
        self,
        in_channels: int = 3,
        channels: int = 128,
        multipliers: Sequence[int] = (1, 2, 2, 2),
        blocks_per_level: int = 2,
        attention_levels: Sequence[int] = (1,),
        groups: int = 32,
        num_times: int = 1000,
        lr: float = 2e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.unet = UNet(
            in_channels, channels, multipliers, blocks_per_level, attention_levels, groups
        )
        betas = torch.linspace(1e-4, 0.02, num_times) * (1000 / num_times)
        share = (1 - betas).cumprod(0)
        self.register_buffer("image_scale", share.sqrt(), persistent=False)
        self.register_buffer("noise_scale", (1 - share).sqrt(), persistent=False)

    def draw(self, images_BCYX: Tensor) -> tuple[Tensor, Tensor]:
        """Times [B] and noise of the images' shape."""
        shape = (len(images_BCYX),)
        times_B = torch.randint(self.hparams.num_times, shape, device=images_BCYX.device)
        return times_B, torch.randn_like(images_BCYX)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images_BCYX = 2 * batch[0] - 1
        times_B, noise_BCYX = self.draw(images_BCYX)
        image_scale = self.image_scale[times_B][:, None, None, None]
        noise_scale = self.noise_scale[times_B][:, None, None, None]
        noisy_BCYX = image_scale * images_BCYX + noise_scale * noise_BCYX
        loss = F.mse_loss(self.unet(noisy_BCYX, times_B), noise_BCYX)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
