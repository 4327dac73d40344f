"""LightningCLI takes a model's hyperparameters from the checkpoint that `--ckpt_path` names, where
that is a file (`LightningCLI._parse_ckpt_path`); here from directories of shards as well.

Lightning has no hook for it: the CLI builds the model before it makes the Trainer and its strategy,
and a subclass would have to be written into every user's script. So the method is wrapped when the
package is imported. It is given a file with the directory's hyperparameters, and does the rest
itself.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LightningCLI

from alpa_strategy.checkpoint.opening import is_checkpoint, open_checkpoint

HYPER_PARAMETERS = "hyper_parameters"


def let_cli_read_directories() -> None:
    """Wrap LightningCLI's reader of hyperparameters, unless it is wrapped already."""
    cli: Any = LightningCLI
    parse = getattr(cli, "_parse_ckpt_path", None)
    if parse is not None and not hasattr(parse, "__wrapped__"):
        cli._parse_ckpt_path = _reading_directories(parse)


def _reading_directories(parse: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return LightningCLI's `_parse_ckpt_path`, extended to read our checkpoint folders."""

    @wraps(parse)
    def parse_ckpt_path(cli: Any) -> None:
        before = cli.config
        subcommand = before.get("subcommand")
        path = before[subcommand].get("ckpt_path") if subcommand else None
        if not path or not is_checkpoint(path):
            parse(cli)
            return
        with _hyper_parameters_file(path) as file:
            before[subcommand]["ckpt_path"] = file
            try:
                parse(cli)
            finally:
                before[subcommand]["ckpt_path"] = path
                cli.config[subcommand]["ckpt_path"] = path

    return parse_ckpt_path


@contextmanager
def _hyper_parameters_file(directory: str | Path) -> Iterator[str]:
    """Context with the path of a temporary file that has the hyperparameters of a checkpoint, and
    nothing else. Raises CheckpointError if the checkpoint is incomplete.
    """
    checkpoint = open_checkpoint(directory, weights_only=True)
    content = {HYPER_PARAMETERS: checkpoint.get(HYPER_PARAMETERS, {})}
    with tempfile.NamedTemporaryFile(suffix=".ckpt") as file:
        torch.save(content, file)
        file.flush()
        yield file.name
