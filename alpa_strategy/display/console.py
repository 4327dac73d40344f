"""The package's console, and names on it: names from users and files are printed as plain text.

rich reads `[red]` in a string as markup, `:smile:` as an emoji, and passes terminal escapes on. A
parameter, a folder or a note may contain any of these. So every Console of this package is made
here and prints strings unchanged, and every name goes through `plain` first.
"""

from typing import Any

from rich.console import Console
from rich.text import Text

from alpa_strategy.errors import printable

_ONE_LINE = str.maketrans({"\n": r"\n", "\t": r"\t"})


def make_console(**options: Any) -> Console:
    """Return a Console that prints strings character by character.

    Args:
        options: other arguments of `rich.console.Console`.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


def plain(name: object, style: str = "", keeps_lines: bool = False) -> Text:
    """Return a name from a user or a file as text that every Console prints character by character.

    Args:
        name: its `str` is printed, with escapes in the place of control characters.
        style: of the text.
        keeps_lines: whether line breaks stay (in sentences), or are escaped (in names).
    """
    text = printable(str(name))
    if not keeps_lines:
        text = text.translate(_ONE_LINE)
    return Text(text, style)
