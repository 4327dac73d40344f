"""README is short, and so is every sentence of it and of the site."""

import re

import pytest
from pages import README, SITE, blocks, num_words, sentences

MAX_README_WORDS = 900
MAX_SENTENCE_WORDS = 35


def test_readme_has_at_most_900_words():
    """Tables and code included; a link counts as its text."""
    text = README.read_text(encoding="utf-8")
    assert len(re.sub(r"\]\([^)]*\)", "]", text).split()) <= MAX_README_WORDS


@pytest.mark.parametrize("page", [README, *SITE], ids=lambda page: page.name)
def test_sentences_have_at_most_35_words(page):
    text = page.read_text(encoding="utf-8")
    long = [text for text in sentences(text) if num_words(text) > MAX_SENTENCE_WORDS]
    assert not long


def test_sentences_are_those_outside_of_tables_and_code():
    text = (
        "# A heading. With a stop\n\nOne `x.y` sentence.\nAnother, of [two](https://a.b)\n"
        "lines: a\nword.\n\n| a cell. | of. |\n\n```python\ncode. And = more\n```\n\n- An item\n- "
        "A second. A third (with\n  brackets.) A fourth\n"
    )
    assert list(sentences(text)) == [
        "One `x.y` sentence.",
        "Another, of [two](https://a.b) lines: a word.",
        "- An item",
        "- A second.",
        "A third (with brackets.",
        "A fourth",
    ]
    assert num_words("Another, of [two words](https://a.b/c d)") == 4


def test_blocks_have_languages_titles_and_reasons():
    text = '```python title="a.py"\nx = 1\n```\n\n```bash\n# needs 8 GPUs\nls\n```\n'
    first, second = blocks(text)
    assert (first.language, first.title, first.code, first.reason) == (
        "python",
        "a.py",
        "x = 1\n",
        "",
    )
    assert (second.language, second.reason, second.line) == ("bash", "8 GPUs", 5)
