"""The optional libraries of this package: imported where they are used, with one clear error."""

from importlib import import_module
from types import ModuleType

from alpa_strategy.errors import SetupError


def library(name: str) -> ModuleType:
    """Return an optional library's module.

    Args:
        name: of the module, e.g. `transformers` or `safetensors.torch`.

    Raises:
        SetupError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise SetupError(
            f"{package} is not installed, which models of Hugging Face need",
            f"pip install {package}, or all of them: pip install transformers safetensors peft",
        ) from error
