"""HFCheckpoint: writes the model in the format of Hugging Face during a training."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from alpa_strategy.errors import OptionError, SetupError
from alpa_strategy.hf import uploads


class HFCheckpoint(Callback):
    """Writes `<folder>/step-<n>` every few optimizer steps, by `strategy.save_pretrained`.

    Args:
        every_n_train_steps: optimizer steps between two saves.
        folder: of the saves, or a URL, to which they are uploaded in the background; None:
            `<default_root_dir>/hf`.
        max_shard_size: largest size of a file of weights.
        tokenizer: (or processor) whose files are written too.
        module: name of the submodule, if several have a `save_pretrained`.

    Raises:
        OptionError: `every_n_train_steps` is no positive integer.
        SetupError: the Trainer has another strategy.
    """

    def __init__(
        self,
        every_n_train_steps: int,
        folder: str | Path | None = None,
        max_shard_size: str | int | None = None,
        tokenizer: Any = None,
        module: str | None = None,
    ) -> None:
        if not isinstance(every_n_train_steps, int) or every_n_train_steps < 1:
            raise OptionError(
                f"HFCheckpoint(every_n_train_steps={every_n_train_steps!r})",
                "give a positive number of steps",
            )
        self._every_n_steps = every_n_train_steps
        self._folder = folder
        self._options = {
            "max_shard_size": max_shard_size,
            "tokenizer": tokenizer,
            "module": module,
        }

        # The last step that was saved: several batches may belong to one step.
        self._last_step = 0

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the strategy.

        Raises:
            SetupError: it is not ours.
        """
        if not hasattr(trainer.strategy, "save_pretrained"):
            raise SetupError(
                f"HFCheckpoint with {type(trainer.strategy).__name__}",
                'train with strategy="alpa", or call the model\'s own save_pretrained',
            )

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Save the model every `every_n_train_steps` optimizer steps, after an earlier upload is
        complete. To a URL, files are uploaded in the background.

        Raises:
            CheckpointError: an earlier upload failed.
        """
        step = trainer.global_step
        if step == self._last_step or step % self._every_n_steps:
            return

        self._last_step = step
        root = str(self._folder or f"{trainer.default_root_dir}/hf")
        folder = f"{root.rstrip('/')}/step-{step}"
        # An earlier upload that has failed is raised now.
        uploads.wait()
        trainer.strategy.save_pretrained(folder, in_background=True, **self._options)

    @override
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until all is uploaded.

        Raises:
            CheckpointError: an upload failed.
        """
        uploads.wait()
