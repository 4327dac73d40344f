"""The package's console, and names on it: names from users and files are printed as plain text.

rich reads `[red]` in a string as markup, `:smile:` as an emoji, and passes terminal escapes on. A
parameter, a folder or a note may contain any of these. So every Console of this package is made
here and prints strings unchanged, and every name goes through `plain` first.
"""

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
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


class DottedName:
    """A parameter's or module's name in a table: where it is too long, it breaks after a dot.

    `encoder.layers.*.self_attn.in_proj_weight` in 30 columns is

        encoder.layers.*.self_attn.
        in_proj_weight
    """

    def __init__(self, name: str) -> None:
        self._text = plain(name)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = [""]
        for part in re.split(r"(?<=\.)", self._text.plain):
            if lines[-1] and len(lines[-1]) + len(part) > options.max_width:
                lines.append("")
            lines[-1] += part
        # A part that is wider than the column is folded.
        yield Text("\n".join(lines), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest_part = max(len(part) for part in self._text.plain.split("."))
        return Measurement(min(longest_part + 1, options.max_width), self._text.cell_len)
