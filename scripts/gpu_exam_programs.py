"""Parts of the GPU exam that train what others bring: programs of many kinds, and weights from a
Hugging Face folder.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import tempfile
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpu_exam_jobs import Add, each, verdict
from gpu_exam_models import (
    ROOT,
    Exam,
    Losses,
    Made,
    NextToken,
    Trained,
    alpa,
    apart,
    deterministic,
    fit_loader,
    state_of,
    tokens_of,
    trained,
)
from torch.utils.data import DataLoader, Dataset

STEPS = 4

# In float64: the last bits of kernels that add in another order.
TOLERANCE = 1e-9


class Batches(Dataset):
    """The batches of a program, one after the other."""

    def __init__(self, program: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [program.example(generator) for _ in range(STEPS)]

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self.batches[index])


def programs(exam: Exam, add: Add) -> None:
    """Train the programs of `tests/equality/programs`: alpa against the plain Trainer."""
    sys.path.insert(0, str(ROOT / "tests"))
    from equality.programs import MORE_PROGRAMS, PROGRAMS  # type: ignore[import-not-found]

    num_captured = 0
    classes = {**PROGRAMS, **MORE_PROGRAMS}
    for name, program in classes.items():
        with each(add, name), deterministic():
            plain, _ = _train_program(exam, program, "auto")
            mine, is_eager = _train_program(exam, program, alpa(capture="auto"))
            weights, losses = apart(mine, plain)
            num_captured += not is_eager
            text = f"weights {weights:.1e}, losses {losses:.1e}"
            if is_eager:
                text += ", eager"
            is_same = weights <= TOLERANCE and losses <= TOLERANCE
            add(None, verdict(is_same), text, weights=weights, losses=losses, is_eager=is_eager)
    add("captured", "ok", f"{num_captured} of {len(classes)}", captured=num_captured)


def _train_program(exam: Exam, program: Any, strategy: Any) -> tuple[Trained, bool]:
    """Train a program; return its losses and weights, and whether alpa ran it eagerly."""
    pl.seed_everything(0, verbose=False)
    torch.set_default_dtype(torch.float64)
    try:
        module = program()
    finally:
        torch.set_default_dtype(torch.float32)
    losses = Losses()
    # One item is a batch; a step may ask for the loader's batch size.
    loader = DataLoader(Batches(program), batch_size=1, collate_fn=itemgetter(0))
    fit_loader(exam, module, loader, strategy, steps=STEPS, callbacks=[losses])
    plan = getattr(strategy, "plan", None)
    return (losses.values(), state_of(module)), plan is not None and plan.is_eager


def hugging_face(exam: Exam, add: Add) -> None:
    """Fine-tune a Llama from a folder of safetensors, and write it as such a folder again."""
    if importlib.util.find_spec("transformers") is None:
        add("llama", "left out", "needs transformers")
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 64 if exam.small else 1024
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    with tempfile.TemporaryDirectory() as root:
        weights = Path(root) / "weights"
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(weights, max_shard_size="20MB")
        for precision in ("32-true", "bf16-true"):
            with each(add, precision), deterministic():
                _finetune_and_export(exam, add, weights, Path(root) / precision, precision)


def _finetune_and_export(
    exam: Exam, add: Add, weights: Path, exported: Path, precision: str
) -> None:
    """Add a row for one precision: training as the plain Trainer's, and the written folder's
    weights, read by the library, as those of the strategy.
    """
    from transformers import AutoModelForCausalLM

    plain = _finetune(exam, weights, "auto", precision)
    strategy = alpa()
    mine = _finetune(exam, weights, strategy, precision, exported)
    apart_weights, apart_losses = apart(mine, plain)
    again = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    again_state = {f"model.{name}": value.double() for name, value in again.state_dict().items()}
    is_exported = all(torch.equal(again_state[name], value) for name, value in mine[1].items())
    limit = 1e-5 if precision == "32-true" else 5e-3
    is_same = apart_weights <= limit and apart_losses <= limit
    text = f"weights {apart_weights:.1e}, losses {apart_losses:.1e}"
    text += ", written weights " + ("the same bits" if is_exported else "differ")
    add(None, verdict(is_same and is_exported), text, weights=apart_weights, losses=apart_losses)


def _finetune(
    exam: Exam, weights: Path, strategy: Any, precision: str, exported: Path | None = None
) -> Trained:
    """Train the model of a folder for a few steps; return losses and weights."""
    from transformers import AutoModelForCausalLM

    from alpa_strategy import hf

    class FineTuning(NextToken):
        def configure_model(self) -> None:
            if hasattr(self, "model"):
                return
            self.model = hf.from_pretrained(weights, AutoModelForCausalLM, dtype=torch.float32)
            self.model.train()

        def on_train_end(self) -> None:
            if exported is not None:
                self.trainer.strategy.save_pretrained(exported)  # type: ignore[attr-defined]

    def make(exam: Exam) -> Made:
        return FineTuning(), tokens_of(64, 64, 512), 8

    return trained(exam, make, strategy, precision, STEPS)
