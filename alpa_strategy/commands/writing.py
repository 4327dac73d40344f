"""Files that a command writes at paths of the user's."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINVAL
from pathlib import Path

from alpa_strategy.errors import OptionError
from alpa_strategy.files import is_possible


@contextmanager
def writing(path: str) -> Iterator[Path]:
    """Context whose block writes a file at the user's `path`, which is yielded.

    Raises:
        OptionError: `path` is a directory or impossible, or the block raises an OSError.
    """
    try:
        if not is_possible(Path(path)) or Path(path).is_dir():
            raise OSError(EINVAL, "it is a directory, or has a name that no file can have")
        yield Path(path)
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written: {error.strerror}", "give another path"
        ) from None
