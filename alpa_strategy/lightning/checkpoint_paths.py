"""The folders of a Trainer: what is refused or reported before anything is trained, and which
checkpoints `ckpt_path="last"` finds at a URL.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alpa_strategy.errors import CheckpointError
from alpa_strategy.urls import check_scheme, digest, is_of_process, is_url, local_path, names


def check_checkpoint_paths(trainer: Any, is_written_by_all_ranks: bool) -> None:
    """Check the URLs of the Trainer's checkpoints.

    Args:
        trainer: whose checkpoint callbacks and folder are checked.
        is_written_by_all_ranks: whether directories were requested, and there are several ranks.

    Raises:
        SetupError: the library for a URL is missing, or a scheme is unknown.
        CheckpointError: ranks would not find the shards of others.
    """
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    for folder in (*folders, trainer.default_root_dir):
        if not folder or not is_url(folder):
            continue
        check_scheme(folder)
        if is_written_by_all_ranks and is_of_process(folder):
            raise CheckpointError(
                f"checkpoints of all ranks are to go to {folder}, where no rank finds the files of"
                " another",
                'leave out checkpoint="sharded" (rank 0 writes one ordinary file then), or give'
                " another dirpath",
            )


def warn_of_uploads(trainer: Any) -> None:
    """Warn if a logger uploads checkpoints (`log_model`): it passes over directories, as sharded
    checkpoints are.
    """
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
    """Return the Trainer's `default_root_dir`, or the current folder if that is a URL: plans and
    measured costs are stored below it.
    """
    folder = trainer.default_root_dir
    return Path.cwd() if is_url(folder) else local_path(folder)


def path_or_url(path: str | Path) -> Path | str:
    """Return a local path, or the URL that is given, without a `/` at its end.

    Raises:
        SetupError: the library for the URL is missing, or its scheme is unknown.
    """
    if not is_url(path):
        return local_path(path)
    check_scheme(path)
    return str(path).rstrip("/")


def plan_folder(plan_dir: Path | str | None, folder: Path) -> Path:
    """Return the local folder of stored plans, or of copies of those at a URL.

    Args:
        plan_dir: result of `path_or_url` for the option; None: it is not given.
        folder: the folder `.alpa`.
    """
    if isinstance(plan_dir, str):
        return folder / "plans" / digest(plan_dir)
    return plan_dir or folder / "plans"


def find_last_at_urls() -> None:
    """Let `ckpt_path="last"` find checkpoints at URLs in this process, unless it does already.

    Lightning lists their folder, and then looks for the names without the scheme on the local disk
    (`ModelCheckpoint._find_last_checkpoints`).
    """
    callback: Any = ModelCheckpoint
    find = callback._find_last_checkpoints
    if not hasattr(find, "__wrapped__"):
        callback._find_last_checkpoints = _finding_urls(find)


def _finding_urls(find: Callable[[Any, Any], set[str]]) -> Callable[[Any, Any], set[str]]:
    """Return Lightning's method `find` with URLs in place of names without a scheme."""

    @wraps(find)
    def find_last_checkpoints(callback: Any, trainer: Any) -> set[str]:
        folder = str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))
        if not is_url(folder):
            return find(callback, trainer)
        urls = set()
        for name in names(folder):
            is_last = name.startswith(callback.CHECKPOINT_NAME_LAST)
            if is_last and name.endswith(callback.FILE_EXTENSION):
                urls.add(f"{folder.rstrip('/')}/{name}")
        return urls

    return find_last_checkpoints
