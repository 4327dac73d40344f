"""Fine-tuning of a Hugging Face language model: full, or with LoRA, on a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

# Targets with this value do not count.
IGNORED = -100


class FineTuning(lightning.LightningModule):
    """A causal language model from files.

    Args:
        name: folder or name of the hub.
        dtype: of the parameters.
        lr: of AdamW.
        weight_decay: of AdamW.
        lora: arguments of `peft.LoraConfig`; without `r` the whole model is trained.
    """

    def __init__(
        self,
        name: str,
        dtype: str = "float32",
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        from transformers import AutoModelForCausalLM

        from alpa_strategy import hf

        dtype = getattr(torch, self.hparams.dtype)
        self.model = hf.from_pretrained(self.hparams.name, AutoModelForCausalLM, dtype=dtype)
        self.model.train()
        lora = dict(self.hparams.lora or {})
        if lora.get("r"):
            import peft

            config = peft.LoraConfig(**{"target_modules": "all-linear", **lora})
            self.model = peft.get_peft_model(self.model, config)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens_BT, targets_BT = batch
        logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            trained, lr=self.hparams.lr, weight_decay=self.hparams.weight_decay
        )


class JsonLines(lightning.LightningDataModule):
    """Packed sequences of (tokens [B, T], targets [B, T]), int64.

    A line has `messages` (a chat, by the tokenizer's template), `prompt` and `completion`, or
    `text`. Targets of prompts, and of the other speakers' messages, are `IGNORED`.

    Args:
        path: file of JSON lines.
        tokenizer: folder or name of the hub.
        batch_size: sequences that the loader yields.
        sequence_length: T. Examples are packed: one follows the other, with an end token between.
        text: name of the text column.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        batch_size: int = 1,
        sequence_length: int = 1024,
        text: str = "text",
    ) -> None:
        super().__init__()
        self.path = Path(path)
        self.tokenizer_name = tokenizer
        self.batch_size = batch_size
        self.length = sequence_length
        self.text = text

    def setup(self, stage: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_name)
        ids: list[int] = []
        targets: list[int] = []
        with self.path.open() as lines:
            for line in lines:
                for piece, counts in self._pieces(json.loads(line)):
                    ids += piece
                    targets += piece if counts else [IGNORED] * len(piece)
        num_sequences = (len(ids) - 1) // self.length
        used = num_sequences * self.length
        tokens_NT = torch.tensor(ids[:used]).view(num_sequences, self.length)
        targets_NT = torch.tensor(targets[1 : used + 1]).view(num_sequences, self.length)
        self.data = TensorDataset(tokens_NT, targets_NT)

    def _pieces(self, example: dict[str, Any]) -> Iterator[tuple[list[int], bool]]:
        """Yield the token ids of an example in pieces, and whether the loss counts them."""
        end = [self.tokenizer.eos_token_id]
        if "messages" in example:
            yield from self._turns(example["messages"])
        elif "completion" in example:
            yield self._ids(example["prompt"]), False
            yield self._ids(example["completion"]) + end, True
        else:
            yield self._ids(example[self.text]) + end, True

    def _turns(self, messages: list[dict[str, str]]) -> Iterator[tuple[list[int], bool]]:
        """Yield what each message adds to the chat before it."""
        before = ""
        for index, message in enumerate(messages):
            chat = self.tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
            yield self._ids(chat[len(before) :]), message["role"] == "assistant"
            before = chat

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, self.batch_size, shuffle=True, drop_last=True)
