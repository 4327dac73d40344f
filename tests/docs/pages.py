"""README and the pages of the site as tests read them: blocks of code, and sentences of prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SITE = sorted((ROOT / "docs").glob("*.md"))

# A block whose first line is such a comment is not run; the rest of the line is the reason.
NEEDS = "# needs "

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.M | re.S
)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_LIST_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s")
# The end of a sentence: a mark, closing quotes or brackets, a space, and no small letter behind it.
_END = re.compile(r"(?<=[.!?])[)\"'`*]*\s+(?=[^a-z])")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: of its first line, such as `python`; empty for none.
        title: name of the file that it is; empty for none.
        line: number of its first line in the page.
    """

    language: str
    title: str
    code: str
    line: int

    @property
    def reason(self) -> str:
        """Why it is not run; empty if it is."""
        first = self.code.lstrip().partition("\n")[0]
        return first.removeprefix(NEEDS) if first.startswith(NEEDS) else ""


def blocks(text: str) -> list[Block]:
    """Return the blocks of code of a page, in order."""
    found = []
    for match in _FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(language, title[1] if title else "", match["code"], line))
    return found


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences outside of tables, code, comments and headings.

    Each item of a list begins a sentence.
    """
    text = _COMMENT.sub("", _FENCE.sub("\n\n", text))
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        # An indented block of code, or a directive of mkdocstrings.
        is_other = line.startswith(("#", "|", "    ", ":::", "!["))
        if is_other or not line.strip() or _LIST_ITEM.match(line):
            yield from _split(" ".join(paragraph))
            paragraph = []
        if not is_other:
            paragraph.append(line.strip())


def _split(paragraph: str) -> Iterator[str]:
    for sentence in _END.split(paragraph):
        if sentence.strip():
            yield sentence.strip()


def num_words(sentence: str) -> int:
    """Return the words of a sentence; a link counts as its text."""
    return len(re.sub(r"\]\([^)]*\)", "]", sentence).split())
