"""What docs and docstrings refer to exists: pages, anchors, files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    heads = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_docstrings_cite_sections_that_exist():
    cited = set()
    for file in (ROOT / "alpa_strategy").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "design section" not in text, file
        cited |= set(re.findall(r"docs/(\w+\.md)(?:#([\w-]+))?", text))
    assert cited
    for page, anchor in cited:
        assert (ROOT / "docs" / page).is_file(), page
        assert not anchor or anchor in anchors(ROOT / "docs" / page), f"{page}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """`room/file.py`, or `file.py` anywhere in the package, the recipes, the scripts or the
    tests.
    """
    text, _, old_words = page.read_text(encoding="utf-8").partition("## Old words")
    text += "".join(
        row.split("|")[2] for row in old_words.splitlines() if row.count("|") == 3
    )  # what is now
    named = set(re.findall(r"`([\w/]+\.(?:py|sh))`", text))
    folders = ("alpa_strategy", "recipes", "scripts", "tests", "docs")
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.*")
    ]
    missing = set()
    for name in named:
        if not any(f"/{file}".endswith(f"/{name}") for file in files):
            missing.add(name)
    # Of nanoGPT, DeepSpeed, the root of this repository, and users.
    others = {"prepare.py", "zero_to_fp32.py", "setup.py", "train.py"}
    assert missing - others == set()


def test_lines_of_the_recipe_that_the_walk_shows_are_those():
    lines = (ROOT / "recipes" / "gpt.py").read_text(encoding="utf-8").splitlines()
    words = {
        "aten.layer_norm": "norm2",
        "aten.linear": "fc",
        "aten.gelu": "gelu",
        "f_flatten_1": "cross_entropy",
    }
    words |= {"f_linear_2": "fc"}
    shown = re.findall(
        r"(aten\.\w+|f_\w+)\b.*gpt\.py:(\d+)", (ROOT / "docs" / "architecture.md").read_text()
    )
    assert {name for name, _ in shown} == set(words)
    assert all(words[name] in lines[int(number) - 1] for name, number in shown)
