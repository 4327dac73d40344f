"""Where checkpoints go: which paths are remote, and what is refused before anything is trained."""

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alpa_strategy.errors import CheckpointError


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL (s3://, gs://, memory://) and no path of a local or mounted
    folder.
    """
    return "://" in str(path)


def check_checkpoint_paths(trainer: Any, writes_directories: bool) -> None:
    """CheckpointError where the Trainer's checkpoints would go to a URL, as directories.

    Args:
        writes_directories: whether directories were asked for, whatever the plan.
    """
    if not writes_directories:
        return
    callbacks = trainer.checkpoint_callbacks
    folders = [getattr(callback, "dirpath", None) for callback in callbacks]
    if callbacks and not all(folders):
        folders.append(trainer.default_root_dir)
    for folder in folders:
        if folder and is_remote(folder):
            raise CheckpointError(
                f"checkpoints are to go to {folder}: directories of shards are written to local or "
                "mounted folders only",
                'leave out checkpoint="sharded" and async_checkpoint=True (one ordinary file is '
                "written then), or give a local dirpath",
            )


def warn_of_uploads(trainer: Any) -> None:
    """Loggers that upload checkpoints (`log_model`) look for files, and pass over directories."""
    flags = ("_log_model", "_log_model_checkpoints")
    uploading = [
        type(logger).__name__
        for logger in trainer.loggers
        if any(getattr(logger, flag, False) for flag in flags)
    ]
    if uploading and trainer.checkpoint_callbacks:
        rank_zero_warn(
            f"alpa: {', '.join(uploading)} uploads checkpoints that are files, and the plan has "
            'parameters in shards, whose checkpoints are directories: use checkpoint="single" to '
            "have them uploaded"
        )


def local_folder(trainer: Any) -> Path:
    """The Trainer's `default_root_dir`, or the current folder where that is a URL: plans and
    measured costs are stored below it.
    """
    folder = trainer.default_root_dir
    return Path.cwd() if is_remote(folder) else Path(folder)
