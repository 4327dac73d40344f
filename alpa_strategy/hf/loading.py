"""Weights of Hugging Face models, read where they are stored: `from_pretrained`.

The library builds the model and converts its weights. In `configure_model` nothing is materialized
by that: the ops are recorded (`recording/recorder.py`), and every rank reads what it stores once
there is a plan. Outside of it, this is the library's own loading with one kind of error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alpa_strategy.errors import CheckpointError, SetupError
from alpa_strategy.hf.libraries import library
from alpa_strategy.hf.quantized import check_not_quantized

# Names of a message.
NUM_NAMES = 5


def from_pretrained(
    path: str | Path, auto_class: Any, *, strict: bool = True, **settings: Any
) -> Any:
    """Return a model with the weights of a folder, or of a name of the hub.

    Args:
        path: folder or name.
        auto_class: of transformers, e.g. `AutoModelForCausalLM`.
        strict: whether parameters without weights, and weights without parameters, are errors. A
            model with a new head (a classifier on a language model) needs False: the library
            initializes the head.
        settings: of the library's `from_pretrained` (`dtype`, `attn_implementation`), or fields of
            its configuration.

    Raises:
        SetupError: transformers is not installed, a `device_map` is given, or the weights are
            quantized (bitsandbytes), in blocks that cannot be sharded.
        CheckpointError: a file cannot be read, a shape differs, or names do not match (`strict`).
            Other errors of the library pass.
    """
    library("transformers")
    check_not_quantized(path, settings)
    if settings.get("device_map") is not None:
        raise SetupError(
            f"device_map={settings['device_map']!r}: the plan decides where parameters are",
            "leave it out; `AlpaStrategy(device_map=...)` pins modules to devices",
        )
    # Shapes that differ are in the report then, with their names.
    accepts_shapes = settings.pop("ignore_mismatched_sizes", False)
    settings["output_loading_info"] = True
    settings["ignore_mismatched_sizes"] = True
    try:
        model, report = auto_class.from_pretrained(path, **settings)
    except Exception as error:
        # Any error of the library; those that a file explains are worded here.
        explained = _explained(path, error)
        if explained is None:
            raise
        raise explained from error

    _check_report(path, report, strict, accepts_shapes)
    return model


def _check_report(
    path: str | Path, report: Mapping[str, Any], strict: bool, accepts_shapes: bool
) -> None:
    """Check which names the library has found.

    Args:
        path: as the user wrote it.
        report: of the library's loading.
        strict: see `from_pretrained`.
        accepts_shapes: whether tensors of other shapes are initialized instead.

    Raises:
        CheckpointError: a shape differs, weights cannot be converted, or names do not match
            (`strict`).
    """
    mismatched = sorted(report["mismatched_keys"], key=lambda entry: str(entry[0]))
    if mismatched and not accepts_shapes:
        name, stored, expected = mismatched[0]
        raise CheckpointError(
            f"{name} has shape {list(stored)} in {_file_of(path, name)} and {list(expected)} in the"
            f" model ({len(mismatched)} such tensors)",
            "load the configuration that the weights were saved with",
        )
    if report.get("conversion_errors"):
        name, text = next(iter(report["conversion_errors"].items()))
        raise CheckpointError(f"the weights of {name} in {path} cannot be converted: {text}")

    if not strict:
        return
    for kind, problem in (
        ("missing_keys", "has no weights for"),
        ("unexpected_keys", "has weights that the model does not have:"),
    ):
        names = sorted(report[kind])
        if names:
            shown = ", ".join(names[:NUM_NAMES])
            more = f" and {len(names) - NUM_NAMES} more" if len(names) > NUM_NAMES else ""
            where = _file_of(path, names[0]) if kind == "unexpected_keys" else path
            raise CheckpointError(
                f"{where} {problem} {shown}{more}",
                "load the class that was saved, or from_pretrained(..., strict=False) to initialize"
                " or ignore them as the library does",
            )


def _explained(path: str | Path, error: Exception) -> CheckpointError | None:
    """Return an error that names the damaged or missing file, or None if no file explains it.
    CheckpointError is raised if it is an index that is damaged.
    """
    if isinstance(error, CheckpointError):
        return error
    folder = Path(path)
    if not folder.is_dir():
        return None

    for index in sorted(folder.glob("*.index.json")):
        names = set(_weight_map(index).values())
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            return CheckpointError(
                f"{folder / missing[0]} is missing: {index.name} names it", "copy all files"
            )

    safe_open = library("safetensors").safe_open
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as reason:
            # The library's own class of errors is private.
            return CheckpointError(f"{file} is damaged: {reason}", "copy it again")

    return None


def _weight_map(index: Path) -> Mapping[str, str]:
    """Return name of a tensor -> its file, as an index file has it.

    Raises:
        CheckpointError: the file cannot be read or is no index.
    """
    try:
        content = json.loads(index.read_text())
        return dict(content["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}", "copy it again") from error


def _file_of(path: str | Path, name: str) -> Path | str:
    """Return the file with the tensor `name` in a model's folder; `path` itself if that is no
    folder, or if no index of the folder names the tensor. CheckpointError if an index is damaged.
    """
    folder = Path(path)
    for index in sorted(folder.glob("*.index.json")) if folder.is_dir() else ():
        file = _weight_map(index).get(name)
        if file is not None:
            return folder / file
    return path
