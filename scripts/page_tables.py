"""Tables in the pages of docs/ that scripts write, between two marks."""

from __future__ import annotations

from pathlib import Path


def write_marked(page: Path, marks: tuple[str, str], table: str) -> None:
    """Replace what a page has between its marks, these included.

    Args:
        page: has both marks.
        marks: lines before and after the table.
        table: with its marks.
    """
    before, _, rest = page.read_text().partition(marks[0])
    after = rest.partition(marks[1])[2]
    page.write_text(before + table + after)
