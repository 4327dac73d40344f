"""Exports to URLs (s3://, gs://, memory://): folders that are complete on disk are uploaded, by
rank 0.
"""

import shutil
from pathlib import Path

from alpa_strategy import urls
from alpa_strategy.comm.collectives import Background
from alpa_strategy.errors import CheckpointError

# Jobs of this process, one after the other.
_BACKGROUND = Background("uploads")


def local_copy(url: str, root: Path) -> Path:
    """Return the local folder below `root` in which the files for a URL are written first."""
    return root / urls.digest(url)


def upload(folder: Path, url: str, in_background: bool) -> None:
    """Upload a folder's files and delete the folder.

    Files of weights come first and their index last, so that whoever finds the index finds all.

    Args:
        folder: local.
        url: of the folder to make.
        in_background: return at once; `wait` raises what failed. If not, earlier uploads are waited
            for first, and their errors are raised.

    Raises:
        CheckpointError: the URL cannot be written to.
    """

    def job() -> None:
        try:
            for file in _in_order(folder):
                urls.upload(file, f"{url}/{file.relative_to(folder).as_posix()}")
        except OSError as error:
            raise CheckpointError(str(error), "give another URL") from error
        shutil.rmtree(folder)

    if in_background:
        _BACKGROUND.run(job)
    else:
        wait()
        job()


def wait() -> None:
    """Return when nothing is uploaded any more.

    Raises:
        CheckpointError: an upload in the background has failed.
    """
    _BACKGROUND.wait()


def _in_order(folder: Path) -> list[Path]:
    """Return the files of a folder, large ones first, and those that name others last."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    is_index = {path: path.name.endswith(".index.json") for path in files}
    return sorted(files, key=lambda path: (is_index[path], -path.stat().st_size, str(path)))
