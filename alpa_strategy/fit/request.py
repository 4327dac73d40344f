"""What `alpa plan hf:...` is asked for, and the configuration file that it names."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpa_strategy.errors import OptionError, check_names
from alpa_strategy.files import BadFileError, read_json
from alpa_strategy.hf.config_text import config_fields
from alpa_strategy.hf.libraries import library

# Before the path or name of a model, in place of a recipe.
PREFIX = "hf:"

# Nearest changes that are planned for an answer.
MAX_CHANGES = 3

# Dtypes of (parameters, what matmuls compute in), by the Trainer's name of the precision.
PRECISIONS = {
    "32-true": ("float32", "float32"),
    "bf16-mixed": ("float32", "bfloat16"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "16-mixed": ("float32", "float16"),
}


@dataclass(frozen=True)
class FitRequest:
    """A model by name, and the step that trains it."""

    # Folder, config.json or name of the hub, without `PREFIX`.
    source: str

    # Tokens of a sequence.
    sequence_length: int

    # Sequences of a step, of all devices together.
    batch_size: int

    # Rank of LoRA adapters of all linear layers; None: all parameters are trained.
    lora_rank: int | None = None

    # Of `optimizers.OPTIMIZERS`.
    optimizer: str = "adamw"

    # Of `PRECISIONS`.
    precision: str = "bf16-mixed"

    # Content of config.json.
    config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequence_length * self.batch_size

    @property
    def name(self) -> str:
        """Short name of the model, for display."""
        path = Path(self.source)
        if path.suffix == ".json":
            path = path.parent if path.stem == "config" else path.with_suffix("")
        return path.resolve().name if path.exists() else path.name


def checked(request: FitRequest) -> FitRequest:
    """Return the request with the content of its configuration.

    Raises:
        OptionError: a number is below 1, the precision is unknown, or there is no such
            configuration.
        SetupError: as of `read_config`.
    """
    numbers = {
        "--seq": request.sequence_length,
        "--batch": request.batch_size,
        "--lora": 1 if request.lora_rank is None else request.lora_rank,
    }
    for flag, value in numbers.items():
        if value < 1:
            raise OptionError(f"{flag} is {value}", "give a whole number of at least 1")
    check_names([request.precision], PRECISIONS, "--precision: there is no")
    config = read_config(request.source)
    return FitRequest(**{**vars(request), "config": config})


def read_config(source: str) -> dict[str, Any]:
    """Return the content of the config.json that `source` means.

    Args:
        source: a folder with config.json, a JSON file, or a name of the hub such as
            `Qwen/Qwen2-0.5B`, whose file is downloaded unless it is in the hub's cache.

    Raises:
        OptionError: there is no such file, or it is not a configuration of transformers.
        SetupError: huggingface_hub is not installed, for a name of the hub.
    """
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        file = _hub_file(source)
    try:
        content = read_json(file)
    except OSError as error:
        raise OptionError(
            f"{PREFIX}{source}: {file} cannot be read: {error.strerror}",
            "give a folder with a config.json, or the file",
        ) from None
    except BadFileError as error:
        raise OptionError(f"{PREFIX}{source}: {file} {error}", "give a config.json") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise OptionError(
            f"{PREFIX}{source}: {file} has no model_type",
            "give the config.json of a model of transformers",
        )
    return content


def _hub_file(source: str) -> Path:
    """Return the config.json of a model of the hub, downloaded or from the hub's cache.

    Raises:
        OptionError: the name is none of the hub, or the hub gives no such file.
        SetupError: huggingface_hub is not installed.
    """
    is_name = 1 <= source.count("/") + 1 <= 2 and not source.endswith(".json")
    if not is_name or source.startswith((".", "/", "~")):
        raise OptionError(
            f"{PREFIX}{source}: there is no such file or folder",
            "give a folder with a config.json, the file, or a name of the hub such as"
            " hf:Qwen/Qwen2-0.5B",
        )
    hub = library("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(source, "config.json"))
    # Errors of the hub's client, of HTTP and of sockets have no common base.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OptionError(
            f"{PREFIX}{source}: no such file or folder, and the hub gives no config.json: {reason}",
            "check the name, or give a folder with the model's config.json: no weights are needed",
        ) from None


def config_object(request: FitRequest) -> Any:
    """Return the configuration as an object of transformers.

    Raises:
        OptionError: transformers does not know the model's type, or refuses a value.
        SetupError: transformers is not installed.
    """
    transformers = library("transformers")
    model_type = str(request.config["model_type"])
    try:
        settings = config_fields(json.dumps(request.config))
        settings.pop("model_type")
        return transformers.AutoConfig.for_model(model_type, **settings)
    # Each class of configuration checks its values with errors of its own.
    except Exception as error:
        raise OptionError(
            f"{PREFIX}{request.source}: transformers {transformers.__version__} cannot read this"
            f" configuration of model_type {json.dumps(model_type)}: {error}",
            "check the values, or upgrade transformers",
        ) from None
