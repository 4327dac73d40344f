"""Small trainings as a new user brings them: Lightning's own examples and the usual first models.

Each entry of PROGRAMS makes a LightningModule and what `Trainer.fit` takes besides it. All data is
made here from a seed, so that nothing is downloaded. `bench_first_contact.py` times them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, DemoModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
CLASSES = 10
# More batches than any run makes steps, also when two ranks share them.
NUM_BATCHES = 400

Program = Callable[[], tuple[pl.LightningModule, Any]]


class Classifier(pl.LightningModule):
    """A network with a cross-entropy loss, logged to the progress bar, and Adam."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.net(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class RepeatedRows(Dataset):
    """`num_rows` rows that repeat those of a small data set: an epoch that fits into memory."""

    def __init__(self, rows: TensorDataset, num_rows: int) -> None:
        self.rows = rows
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.rows[index % len(self.rows)]


def _loader(batch_size: int, *tensors: Tensor) -> DataLoader:
    rows = RepeatedRows(TensorDataset(*tensors), NUM_BATCHES * batch_size)
    return DataLoader(rows, batch_size=batch_size, shuffle=True)


def _images(channels: int, size: int, batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(512, channels, size, size, generator=generator)
    labels = torch.randint(CLASSES, (512,), generator=generator)
    return _loader(batch_size, images, labels)


# The first page of a tutorial


def mnist_mlp() -> tuple[pl.LightningModule, Any]:
    """An MLP of one hidden layer on images of 28 x 28."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    return Classifier(net), _images(1, 28, 64)


def mnist_cnn() -> tuple[pl.LightningModule, Any]:
    """PyTorch's MNIST example: two convolutions, two linears, dropout."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, CLASSES),
    )
    return Classifier(net), _images(1, 28, 64)


class AutoEncoder(pl.LightningModule):
    """The module of Lightning's README."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def autoencoder() -> tuple[pl.LightningModule, Any]:
    """Lightning's README."""
    return AutoEncoder(), _images(1, 28, 32)


def boring() -> tuple[pl.LightningModule, Any]:
    """Lightning's BoringModel on its own loader: batches of one row, 64 an epoch."""
    return BoringModel(), None


def cli_demo() -> tuple[pl.LightningModule, Any]:
    """What LightningCLI's documentation starts with: DemoModel and BoringDataModule."""
    return DemoModel(), BoringDataModule()


# Small models of every kind


def gpt_tiny() -> tuple[pl.LightningModule, Any]:
    """README's recipe."""
    from alpa_strategy.recipe import build_data, build_model, load_recipe

    recipe = load_recipe(str(ROOT / "recipes" / "gpt_tiny.yaml"), [])
    return build_model(recipe), build_data(recipe)


class LSTMTagger(nn.Module):
    """Characters to classes: an embedding, two LSTM layers, the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states[:, -1])


def lstm() -> tuple[pl.LightningModule, Any]:
    """A small LSTM on sequences of 32."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (512, 32), generator=generator)
    labels = torch.randint(CLASSES, (512,), generator=generator)
    return Classifier(LSTMTagger()), _loader(32, tokens, labels)


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


def resnet() -> tuple[pl.LightningModule, Any]:
    """A ResNet of eight layers on images of 32 x 32."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        ResidualBlock(16, 16, 1),
        ResidualBlock(16, 32, 2),
        ResidualBlock(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )
    return Classifier(net), _images(3, 32, 32)


class SmallViT(nn.Module):
    """Patches of 8 x 8, four blocks of hidden size 96."""

    def __init__(self, hidden: int = 96) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 8, 8)
        self.positions = nn.Parameter(torch.zeros(1, 16, hidden))
        layer = nn.TransformerEncoderLayer(
            hidden, 4, 4 * hidden, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        states = self.encoder(patches + self.positions)
        return self.head(states.mean(1))


def vit() -> tuple[pl.LightningModule, Any]:
    """A small ViT of torch's own encoder layers."""
    return Classifier(SmallViT()), _images(3, 32, 32)


class GAN(pl.LightningModule):
    """Lightning's GAN example in small: two optimizers, optimized by hand."""

    def __init__(self, latent: int = 32) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 784))
        self.discriminator = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        images = images.flatten(1)
        generator_optimizer, discriminator_optimizer = self.optimizers()
        ones = torch.ones(images.shape[0], 1)
        noise = torch.randn(images.shape[0], self.latent)
        fakes = torch.tanh(self.generator(noise))

        self.toggle_optimizer(generator_optimizer)
        judged = self.discriminator(fakes)
        generator_loss = F.binary_cross_entropy_with_logits(judged, ones)
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.toggle_optimizer(discriminator_optimizer)
        real = F.binary_cross_entropy_with_logits(self.discriminator(images), ones)
        fake = F.binary_cross_entropy_with_logits(
            self.discriminator(fakes.detach()), torch.zeros_like(ones)
        )
        discriminator_loss = (real + fake) / 2
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)
        self.log_dict({"g_loss": generator_loss, "d_loss": discriminator_loss}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.generator.parameters(), lr=2e-4)
        discriminator = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4)
        return [generator, discriminator], []


def gan() -> tuple[pl.LightningModule, Any]:
    """Manual optimization."""
    return GAN(), _images(1, 28, 64)


class TabularNet(nn.Module):
    """Embeddings of eight categories beside sixteen numbers, three layers with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(20, 8) for _ in range(8))
        self.layers = nn.Sequential(
            nn.Linear(80, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, CLASSES),
        )

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        parts = [inputs["numbers"]]
        for column, embedding in enumerate(self.embeddings):
            parts.append(embedding(inputs["categories"][:, column]))
        return self.layers(torch.cat(parts, 1))


class TabularClassifier(Classifier):
    """Rows of numbers and categories; SGD with a schedule that steps every batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, categories, labels = batch
        logits = self.net({"numbers": numbers, "categories": categories})
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", (logits.argmax(1) == labels).float().mean())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def tabular() -> tuple[pl.LightningModule, Any]:
    """A tabular MLP."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1024, 16, generator=generator)
    categories = torch.randint(20, (1024, 8), generator=generator)
    labels = torch.randint(CLASSES, (1024,), generator=generator)
    return TabularClassifier(TabularNet()), _loader(128, numbers, categories, labels)


# Hugging Face


class LanguageModel(pl.LightningModule):
    """A model of transformers that computes its own loss; AdamW on what requires gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = self.model(input_ids=tokens, labels=labels).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)


def lora_llama() -> tuple[pl.LightningModule, Any]:
    """LoRA by peft on a LLaMA of four layers and hidden size 256."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, (256, 64), generator=generator)
    return LanguageModel(model), _loader(4, tokens, tokens)


def bert() -> tuple[pl.LightningModule, Any]:
    """A BERT of four layers and hidden size 128 that classifies sequences."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
        num_labels=CLASSES,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, (512, 64), generator=generator)
    labels = torch.randint(CLASSES, (512,), generator=generator)
    return LanguageModel(BertForSequenceClassification(config)), _loader(8, tokens, labels)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        mnist_mlp,
        mnist_cnn,
        autoencoder,
        boring,
        cli_demo,
        tabular,
        gan,
        lstm,
        resnet,
        vit,
        gpt_tiny,
        lora_llama,
        bert,
    )
}
# Their starts are allowed to take longer: capture walks a large library's code.
HUGGING_FACE = ("lora_llama", "bert")


def build(name: str) -> tuple[pl.LightningModule, Any]:
    """The module and the data of a program, made from seed 0."""
    sys.path.insert(0, str(ROOT / "recipes"))
    pl.seed_everything(0, verbose=False)
    return PROGRAMS[name]()
