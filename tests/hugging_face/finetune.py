"""One fine-tuning of a tiny model from files, on this rank, with what has to be equal recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from equality.harness import Rows, _loader, _parallel_arguments
from hugging_face.tiny_models import MODELS, WITH_EXPERTS
from quiet import QUIET

SAMPLES = 8


class FineTuning(pl.LightningModule):
    """A model from files and its loss, as users write it."""

    def __init__(
        self, name: str, path: str, dtype: torch.dtype, by_name: bool, lora: str = ""
    ) -> None:
        super().__init__()
        self.name = name
        self.path = path
        self.dtype_of_files = dtype
        self.by_name = by_name
        self.lora = lora

        # Of the built model: name -> whether the parameter has memory.
        self.has_memory: dict[str, bool] = {}

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        import transformers

        auto_class = getattr(transformers, MODELS[self.name].auto_class)
        if self.by_name:
            from alpa_strategy import hf

            self.model = hf.from_pretrained(self.path, auto_class, dtype=self.dtype_of_files)
        else:
            self.model = auto_class.from_pretrained(self.path, dtype=self.dtype_of_files)
        self.model.train()
        if self.name in WITH_EXPERTS:
            # The default, grouped_mm, has no float64 kernel in PyTorch.
            self.model.set_experts_implementation("batched_mm")
        if self.lora:
            import peft

            config = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=self.lora == "dora")
            self.model = peft.get_peft_model(self.model, config)
        for name, parameter in self.model.named_parameters():
            with torch._C.DisableTorchFunction():
                self.has_memory[name] = not parameter.is_meta

    def training_step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = MODELS[self.name].loss(self.model, dict(batch))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class FirstParameters(pl.Callback):
    """The full parameters as the first step finds them, and the losses."""

    def __init__(self) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []
        self.is_sharded: list[str] = []
        self.state_of: list[str] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.parameters:
            return
        store = getattr(trainer.strategy, "store", None)
        for name, parameter in module.model.named_parameters():
            full = parameter.detach() if store is None else store.gather(parameter)
            self.parameters[name] = full.clone()
            if store is not None and parameter in store.sharded_parameters:
                self.is_sharded.append(name)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        names = {parameter: name for name, parameter in module.model.named_parameters()}
        states = trainer.optimizers[0].state
        self.state_of = sorted(names[parameter] for parameter in states)


def record(
    name: str,
    path: str,
    options: dict[str, Any] | None,
    world_size: int,
    root: str,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    by_name: bool = True,
    capture: str = "auto",
    export: str | None = None,
    lora: str = "",
    precision: str | None = None,
) -> dict[str, Any]:
    """Fine-tune `name` from the files in `path`, and return parameters, losses and weights.

    Args:
        name: of `tiny_models.MODELS`.
        path: folder of the files.
        options: of AlpaStrategy; None: the plain Trainer on the samples of all ranks.
        world_size: number of ranks.
        root: `default_root_dir`.
        steps: optimizer steps.
        dtype: of the parameters.
        by_name: load by `alpa_strategy.hf.from_pretrained`, else by the library's own.
        capture: option of AlpaStrategy.
        export: folder to which the trained model is written while it is sharded.
        lora: `lora` or `dora`: train an adapter of that kind.
        precision: of the Trainer; by default that of `dtype`.
    """
    rows = MODELS[name].batch(SAMPLES * steps, torch.Generator().manual_seed(3))
    strategy_options = None
    if options is not None:
        strategy_options = {**options, "capture": capture}
    recorder = FirstParameters()
    callbacks: list[pl.Callback] = [recorder]
    if export is not None:
        callbacks.append(ExportAtEnd(export))
    module = FineTuning(name, path, dtype, by_name and options is not None, lora)
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=1,
        accelerator="cpu",
        precision=precision or ("64-true" if dtype == torch.float64 else "32-true"),
        callbacks=callbacks,
        default_root_dir=root,
        **QUIET,
        **_parallel_arguments(strategy_options, world_size),
    )
    loader = _loader(Rows(rows), strategy_options, world_size, 1, SAMPLES)
    trainer.fit(module, loader)
    return _results(trainer, module, recorder)


def _results(trainer: Any, module: FineTuning, recorder: FirstParameters) -> dict[str, Any]:
    """Return what tests compare."""
    plan = getattr(trainer.strategy, "plan", None)
    return {
        "first": recorder.parameters,
        "losses": recorder.losses,
        "state": {k: v.detach().clone() for k, v in module.model.state_dict().items()},
        "buffers": {k: v.detach().clone() for k, v in module.model.named_buffers()},
        "state_of": recorder.state_of,
        "is_sharded": recorder.is_sharded,
        "has_memory": module.has_memory,
        "is_eager": plan is not None and plan.is_eager,
        "num_stages": 0 if plan is None else len(plan.stages),
    }


def assert_losses(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Losses are one process's; those of eager steps are each rank's on its own samples."""
    losses = torch.tensor([run["losses"] for run in runs])
    # Each rank has the loss of its own batch.
    mean = losses.mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected["losses"]), rtol=1e-6, atol=0)


class ExportAtEnd(pl.Callback):
    """Writes the trained model by `strategy.save_pretrained` after the last step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            trainer.strategy.save_pretrained(self.folder, max_shard_size="200KB")
