"""The package's console, and names on it: what a user or a file named is text and never a command.

rich reads `[red]` in a string as markup, `:smile:` as an emoji and passes terminal escapes on. A
parameter, a folder or a note may contain any of these. So every Console of this package is made
here and takes strings as they are, and every name goes through `plain` before it is drawn.
"""

from typing import Any

from rich.console import Console
from rich.text import Text

from alpa_strategy.errors import printable

_ONE_LINE = str.maketrans({"\n": r"\n", "\t": r"\t"})


def make_console(**options: Any) -> Console:
    """A Console that draws strings character by character.

    Args:
        options: other arguments of `rich.console.Console`.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


def plain(name: object, style: str = "", keeps_lines: bool = False) -> Text:
    """What a user or a file named, as text that every Console draws character by character.

    Args:
        name: its `str` is drawn, with escapes in the place of control characters.
        style: of the whole text.
        keeps_lines: a sentence of several lines stays one; in a name line breaks are escaped.
    """
    text = printable(str(name))
    if not keeps_lines:
        text = text.translate(_ONE_LINE)
    return Text(text, style)
