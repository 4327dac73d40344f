"""Models and losses of other libraries on two CPU ranks: "alpa" against DDP and one device.

    # libraries that are not installed are left out
    pip install timm peft transformers diffusers monai segmentation_models_pytorch \\
        pytorch_metric_learning lightly torch_geometric
    python scripts/third_party.py                                  # every program, auto and ZeRO-3
    python scripts/third_party.py "timm_*" peft_lora --plans auto  # some, by one plan
    python scripts/third_party.py --require                        # exit 1 if one equals neither

A program trains four steps in fp64 with the losses and helpers that its library recommends. A row
reports whether the step was captured, and the relative differences of logged losses from DDP's and
from those of one device on the samples of all ranks. Weights must be bitwise the same on both
ranks. Captured steps must equal one device's, eager steps DDP's. Losses are compared and not
weights: where a gradient is zero but for rounding, Adam makes a step of full size of it.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from bench_jobs import torchrun
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

RANKS = 2
STEPS = 4
ROWS = 4
CLASSES = 5
TOKENS = 101
TOLERANCE = 1e-6  # libraries keep some constants in fp32


class Trained(pl.LightningModule):
    """`loss(self, batch)` trained by AdamW; what the loss needs beside `net` are further
    modules.
    """

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor], **others: nn.Module) -> None:
        super().__init__()
        self.net, self.loss = net.double(), loss
        for name, module in others.items():
            setattr(self, name, module.double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self, batch)
        self.log("loss", loss, sync_dist=True, batch_size=ROWS)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


Made = tuple[Trained, Dataset]
# name -> (the library that it needs, the function that makes it)
PROGRAMS: dict[str, tuple[str, Callable[[], Made]]] = {}


def program(library: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        PROGRAMS[make.__name__] = library, make
        return make

    return add


def images(size: int = 32) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 3, size, size, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (64,), generator=generator))


def sentences(length: int = 16) -> Dataset:
    return TensorDataset(
        torch.randint(TOKENS, (64, length), generator=torch.Generator().manual_seed(3))
    )


def classify(module: Trained, batch: Any) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1])


# --- timm

TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "depth": 2},
    "beit_base_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 96, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "resnet10t": {},
    "regnetx_002": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
}


def of_timm(name: str) -> Made:
    import timm

    options = {"num_classes": CLASSES, "drop_rate": 0.0, **TIMM[name]}
    return Trained(timm.create_model(name, **options), classify), images(
        options.get("img_size", 32)
    )


PROGRAMS |= {f"timm_{name}": ("timm", partial(of_timm, name)) for name in TIMM}


# --- PEFT on a LLaMA of transformers, and transformers alone


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=TOKENS, num_key_value_heads=2, **sizes, **options)
    )


def next_token(module: Trained, batch: Any) -> Tensor:
    return module.net(input_ids=batch[0], labels=batch[0]).loss


PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "lora_and_head": (
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True, "target_modules": ["q_proj", "v_proj"]}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ["o_proj"]}),
    "oft": ("OFTConfig", {"r": 4, "oft_block_size": 0, "target_modules": ["q_proj"]}),
    "ia3": (
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
}


def of_peft(name: str) -> Made:
    import peft

    kind, options = PEFT[name]
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return Trained(peft.get_peft_model(llama(), config), next_token), sentences()


PROGRAMS |= {f"peft_{name}": ("peft", partial(of_peft, name)) for name in PEFT}


@program("peft")
def peft_lora_checkpointed() -> Made:
    import peft

    base = llama(use_cache=False)
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    return Trained(peft.get_peft_model(base, config), next_token), sentences()


@program("transformers")
def bert_masked() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    def loss(module: Trained, batch: Any) -> Tensor:
        is_masked = batch[0] % 5 == 0
        given = {
            "input_ids": torch.where(is_masked, 1, batch[0]),
            "labels": torch.where(is_masked, batch[0], -100),
        }
        return module.net(**given).loss

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Trained(
        BertForMaskedLM(BertConfig(vocab_size=TOKENS, **sizes, **dropout)), loss
    ), sentences()


# --- Segmentation, diffusion


def above_zero(images: Tensor) -> Tensor:
    return (images[:, :1] > 0).double()


@program("monai")
def monai_unet() -> Made:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    dice = DiceCELoss(to_onehot_y=True, softmax=True)
    return Trained(
        UNet(2, 3, 2, (8, 16, 32), (2, 2)), lambda m, b: dice(m.net(b[0]), above_zero(b[0]))
    ), images()


@program("segmentation_models_pytorch")
def smp_unet() -> Made:
    import segmentation_models_pytorch as smp

    dice = smp.losses.DiceLoss("binary")
    net = smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=1)
    return Trained(net, lambda m, b: dice(m.net(b[0]), above_zero(b[0]))), images()


@program("diffusers")
def diffusers_unet() -> Made:
    from diffusers import DDPMScheduler, UNet2DModel

    scheduler = DDPMScheduler(num_train_timesteps=20)

    def loss(module: Trained, batch: Any) -> Tensor:
        x = batch[0]
        steps = 3 * batch[1]
        noise = batch[0].roll(1, -1)
        return F.mse_loss(module.net(scheduler.add_noise(x, noise, steps), steps).sample, noise)

    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    net = UNet2DModel(
        32, 3, 3, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, **blocks
    )
    return Trained(net, loss), images()


@program("diffusers")
def diffusers_vae() -> Made:
    from diffusers import AutoencoderKL

    def loss(module: Trained, batch: Any) -> Tensor:
        latent = module.net.encode(batch[0]).latent_dist
        return (
            F.mse_loss(module.net.decode(latent.mode()).sample, batch[0])
            + 1e-3 * latent.kl().mean()
        )

    blocks = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    return Trained(
        AutoencoderKL(3, 3, *blocks, (8, 16), norm_num_groups=4, latent_channels=2), loss
    ), images()


# --- Metric learning and self-supervision: losses over all pairs of a batch, some over those of all
# ranks


def embedder() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 32), nn.Tanh(), nn.Linear(32, 16))


METRIC = ("NTXentLoss", "ContrastiveLoss", "TripletMarginLoss", "ArcFaceLoss")


def of_metric_learning(name: str) -> Made:
    from pytorch_metric_learning import losses

    criterion = (
        losses.ArcFaceLoss(CLASSES, 16) if name == "ArcFaceLoss" else getattr(losses, name)()
    )
    return Trained(
        embedder(), lambda m, b: m.criterion(m.net(b[0]), b[1]), criterion=criterion
    ), images()


PROGRAMS |= {
    f"metric_{name}": ("pytorch_metric_learning", partial(of_metric_learning, name))
    for name in METRIC
}

LIGHTLY = ("NTXentLoss", "BarlowTwinsLoss", "VICRegLoss")


def of_lightly(name: str) -> Made:
    import lightly.loss

    criterion = getattr(lightly.loss, name)(gather_distributed=True)
    views = lambda x: (x, x + 0.1 * x.roll(1, -1))  # noqa: E731
    return Trained(embedder(), lambda m, b: criterion(*map(m.net, views(b[0])))), images()


PROGRAMS |= {f"lightly_{name}": ("lightly", partial(of_lightly, name)) for name in LIGHTLY}


@program("lightly")
def lightly_dino() -> Made:
    import copy

    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    def loss(module: Trained, batch: Any) -> Tensor:
        update_momentum(module.net, module.teacher, 0.99)
        update_momentum(module.head, module.teachers_head, 0.99)
        views = batch[0], batch[0] + 0.1 * batch[0].roll(1, -1)
        taught = [module.teachers_head(module.teacher(view)) for view in views]
        return module.criterion(
            taught, [module.head(module.net(view)) for view in views], epoch=module.current_epoch
        )

    net = embedder()
    head = DINOProjectionHead(16, 32, 8, 24)
    teachers_head = DINOProjectionHead(16, 32, 8, 24)
    others = {"teacher": copy.deepcopy(net), "teachers_head": teachers_head}
    for each in others.values():
        deactivate_requires_grad(each)
    return Trained(net, loss, head=head, criterion=DINOLoss(output_dim=24), **others), images()


# --- Graphs: batches of custom classes whose dim 0 is no sample


class Graphs(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        from torch_geometric.data import Data

        g = torch.Generator().manual_seed(i)
        nodes = int(torch.randint(4, 9, (1,), generator=g))
        x, edges = (
            torch.randn(nodes, 8, generator=g, dtype=torch.float64),
            torch.randint(nodes, (2, 20), generator=g),
        )
        return Data(x=x, edge_index=edges, y=torch.randint(CLASSES, (1,), generator=g))


def of_graphs(name: str) -> Made:
    import torch_geometric.nn as gnn

    layers = [
        (getattr(gnn, name)(8, 16), "x, edge_index -> x"),
        (gnn.global_mean_pool, "x, batch -> x"),
    ]
    net = gnn.Sequential("x, edge_index, batch", [*layers, (nn.Linear(16, CLASSES), "x -> x")])
    return Trained(
        net, lambda m, b: F.cross_entropy(m.net(b.x, b.edge_index, b.batch), b.y)
    ), Graphs()


PROGRAMS |= {
    f"graphs_{n}": ("torch_geometric", partial(of_graphs, n))
    for n in ("GCNConv", "GATConv", "SAGEConv")
}


# --- Running


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["loss"]))


def train(name: str, kind: str, folder: str) -> dict[str, Any]:
    """One program under "ddp", on "one" device, or by a plan; what this rank found."""
    torch.manual_seed(1)
    module, data = PROGRAMS[name][1]()
    is_one, rank = kind == "one", int(os.environ.get("RANK", "0"))
    rows = range(len(data)) if is_one else range(rank, len(data), RANKS)  # type: ignore[arg-type]
    collate = None
    if isinstance(data, Graphs):
        from torch_geometric.data import Batch

        collate = Batch.from_data_list
    loader = DataLoader(
        data, ROWS * (RANKS if is_one else 1), sampler=list(rows), collate_fn=collate
    )
    strategy: Any = {"one": "auto", "ddp": "ddp_find_unused_parameters_true"}.get(kind)
    if strategy is None:
        from alpa_strategy import AlpaStrategy

        strategy = AlpaStrategy(verbose=False, cluster="pcie_8gpu", parallel=kind)
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if is_one else RANKS,
        strategy=strategy,
        max_steps=STEPS,
        precision="64-true",
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loader)
    plan = getattr(strategy, "plan", None)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return {
        "losses": losses.values,
        "weights": weights,
        "is_eager": plan is not None and plan.is_eager,
    }


def worker(kind: str, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        try:
            found = train(name, kind, folder)
        except Exception as error:  # of any library; the others go on
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        torch.save(found, Path(folder) / f"{name}_{kind}_{os.environ.get('RANK', '0')}.pt")


def launch(kind: str, folder: str, names: list[str]) -> None:
    """Train all programs under one `kind`, and print the end of the log if a process fails."""
    if kind == "one":
        command = [sys.executable, __file__]
    else:
        command = torchrun(__file__, RANKS)
    command += ["--worker", kind, folder, *names]
    log = Path(folder) / f"{kind}.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        done = subprocess.run(command, env=environment, stdout=out, stderr=out, cwd=folder)
    if done.returncode:
        print(f"{kind} ended with {done.returncode}:\n{log.read_text()[-3000:]}", file=sys.stderr)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative one of two runs' losses; nan where either failed."""
    if "error" in one or "error" in other:
        return float("nan")
    return max(
        abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one["losses"], other["losses"], strict=True)
    )


def table(folder: str, names: list[str], plans: list[str]) -> int:
    """Print what was found; how many programs equal neither."""
    shown, wrong = Table("program", "plan", "step", "from DDP", "from one device", "ranks"), 0

    def found(name: str, kind: str, rank: int = 0) -> dict[str, Any]:
        path = Path(folder) / f"{name}_{kind}_{rank}.pt"
        return (
            torch.load(path, weights_only=False) if path.exists() else {"error": "it did not end"}
        )

    for name in names:
        for plan in plans:
            own = found(name, plan)
            if "error" in own:
                shown.add_row(name, plan, own["error"].splitlines()[0][:60], "", "", "")
                wrong += 1
                continue
            both = own["weights"], found(name, plan, 1).get("weights", {})
            same = both[0].keys() == both[1].keys() and all(
                torch.equal(w, both[1][n]) for n, w in both[0].items()
            )
            apart = [difference(found(name, kind), own) for kind in ("ddp", "one")]
            if own["is_eager"]:
                step, deviation = "eager", apart[0]
            else:
                step, deviation = "captured", apart[1]
            is_right = same and deviation <= TOLERANCE
            wrong += not is_right
            shown.add_row(
                name,
                plan,
                step,
                *(f"{each:.0e}" for each in apart),
                "same" if same else "DIFFER",
                style=None if is_right else "red",
            )
    Console(width=120).print(shown)
    print(f"{len(names) * len(plans) - wrong} of {len(names) * len(plans)} equal what they should")
    return wrong


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", default=["*"], help="patterns of names")
    parser.add_argument("--plans", nargs="+", default=["auto", "zero3"], help="values of parallel=")
    parser.add_argument(
        "--require", action="store_true", help="exit 1 where a program equals neither"
    )
    args = parser.parse_args()
    asked = [
        name
        for name in PROGRAMS
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in args.programs)
    ]
    names = [name for name in asked if importlib.util.find_spec(PROGRAMS[name][0]) is not None]
    if missing := {PROGRAMS[name][0] for name in set(asked) - set(names)}:
        print(f"not installed: {', '.join(sorted(missing))}")
    if not names:
        parser.error(f"nothing to run of {', '.join(args.programs)}")
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("one", "ddp", *args.plans):
            launch(kind, folder, names)
        return int(table(folder, names, args.plans) > 0 and args.require)


if __name__ == "__main__":
    sys.exit(main())
