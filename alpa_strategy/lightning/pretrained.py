"""`trainer.strategy.save_pretrained(DIR)`: the trained model in the format of Hugging Face."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from alpa_strategy.errors import CheckpointError
from alpa_strategy.lightning.checkpoint_paths import local_folder
from alpa_strategy.lightning.full_parameters import shapes_only


class SavesPretrained:
    """The part of a strategy that writes models in the format of Hugging Face."""

    def save_pretrained(
        self,
        folder: str | Path,
        max_shard_size: str | int | None = None,
        tokenizer: Any = None,
        module: str | None = None,
        in_background: bool = False,
    ) -> Path | str:
        """Write the model as its own `save_pretrained` does, by all ranks. Collective.

        Args:
            folder: on a file system that all ranks share, or a URL of fsspec (s3://, gs://). Other
                files in it stay.
            max_shard_size: largest size of a file of weights, 5GB by default.
            tokenizer: (or processor) whose files are written too; None: those of the folder or name
                from which the model was loaded are copied.
            module: name of the submodule, if several have a `save_pretrained`.
            in_background: with a URL: whether this returns when the files are on the local disk,
                below `default_root_dir`; `hf.uploads.wait()` waits until they are uploaded.

        Returns:
            The folder.

        Raises:
            SetupError: the module has no model of Hugging Face, or several and no name is given.
            CheckpointError: a file cannot be written, or the weights were not read yet.
        """
        # transformers is optional.
        from alpa_strategy.hf import saving

        strategy: Any = self
        if strategy._session.deferred_init.is_pending:
            raise CheckpointError(
                "the model's weights are read with the first training batch",
                "save it after the first step",
            )

        model = saving.hugging_face_model(strategy.lightning_module, module)
        size = saving.MAX_SHARD_SIZE if max_shard_size is None else max_shard_size
        strategy._meet()
        if strategy.is_whole:
            values = saving.values_in_memory(nullcontext)
        else:
            store = strategy.store
            values = saving.values_of(store, partial(shapes_only, store))
        root = local_folder(strategy.lightning_module.trainer) / ".alpa" / "exports"
        return saving.save_pretrained(model, folder, values, size, tokenizer, root, in_background)
