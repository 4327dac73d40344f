"""Every block of code of README and the site runs, or says in its first line what it needs.

A page has a folder. Blocks with a title are files in it. Python blocks without one run in order, in
one process, after the `bash` blocks.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import README, ROOT, SITE, Block, blocks

PAGES = [README, *SITE]
# Languages that are run or read, and those that show what a program prints or a file has.
LANGUAGES = {"python", "bash", "yaml"}
SHOWN = {"", "text"}
SECONDS = 1500


def blocks_of(page: Path) -> list[Block]:
    return blocks(page.read_text(encoding="utf-8"))


def named(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_are_of_languages_that_are_checked(page):
    """What has no language shows output, and neither commands nor statements."""
    for block in blocks_of(page):
        assert block.language in LANGUAGES | SHOWN, f"{page.name}:{block.line}"
        if block.language in SHOWN:
            assert not block.code.startswith(("alpa ", "import ", "from ", "$ ")), block


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_and_yaml_can_be_read(page):
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.code)
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.code), dict)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_a_page_shows_are_used_by_a_command_of_it(page):
    commands = "".join(block.code for block in blocks_of(page) if block.language == "bash")
    for block in blocks_of(page):
        if block.title and not block.reason:
            assert block.title in commands, f"{page.name}:{block.line}"


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_blocks_of_a_page_run(page, tmp_path):
    folder = tmp_path / "page"
    folder.mkdir()
    environment = environment_with_commands(tmp_path / "bin")
    untitled = []
    for block in blocks_of(page):
        if block.title:
            (folder / block.title).write_text(block.code, encoding="utf-8")
        if block.reason or block.title:
            continue
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            check(command, folder, environment, f"{page.name}:{block.line}")
        elif block.language == "python":
            untitled.append(block.code)
    if untitled:
        (folder / "blocks_of_the_page.py").write_text("\n".join(untitled), encoding="utf-8")
        command = [sys.executable, "blocks_of_the_page.py"]
        check(command, folder, environment, page.name)


def environment_with_commands(folder: Path) -> dict[str, str]:
    """Variables with `alpa`, `python` and `torchrun` of this checkout first in the path."""
    folder.mkdir()
    modules = {
        "alpa": "-m alpa_strategy",
        "python": "",
        "torchrun": "-m torch.distributed.run --standalone",
    }
    for name, arguments in modules.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        script.chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


def check(command: list[str], folder: Path, environment: dict[str, str], place: str) -> None:
    """Run a command, and fail with what it printed if it does."""
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    output = (result.stdout + result.stderr)[-3000:]
    assert result.returncode == 0, f"{place}\n{output}"
