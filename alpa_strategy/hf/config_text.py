"""Fields of a configuration, from the text of a config.json."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alpa_strategy.hf.libraries import library


def config_fields(text: str) -> dict[str, Any]:
    """Return the fields of a configuration as the library reads them from its file.

    The library writes infinity and nan as objects, which JSON does not know; it decodes them while
    it reads a file. SetupError if transformers is not installed.

    Args:
        text: content of a config.json.
    """
    config_class = library("transformers").PreTrainedConfig
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(text)
        fields, _ = config_class.get_config_dict(file)
    return dict(fields)
