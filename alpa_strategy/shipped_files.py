"""Files that come with the package and are found by name: recipes and cluster descriptions."""

from __future__ import annotations

from pathlib import Path

# The folders of a checkout, as package data in a wheel (see setup.py).
RECIPES = "recipes"
CLUSTERS = "configs/clusters"


def shipped_folder(folder: str) -> Path:
    """Where `RECIPES` or `CLUSTERS` lies: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def find_named(name: str | Path, folder: str) -> Path | None:
    """The YAML file that `name` means: a path as given, else the shipped one of that name; None where there is neither.

    A name has no folder and may come without `.yaml`. A file of the user's own goes first.
    """
    given = Path(name)
    places = [given] if given.suffix in (".yaml", ".yml") else []
    if len(given.parts) == 1:
        places.append(shipped_folder(folder) / f"{given.name.removesuffix('.yaml')}.yaml")
    return next((place for place in [*places, given] if place.is_file()), None)


def shipped_names(folder: str) -> list[str]:
    """The names that `find_named` knows."""
    return sorted(file.stem for file in shipped_folder(folder).glob("*.yaml"))
