"""The rules of the house: scripts/house.py and the import contracts hold, and see what breaks
them.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NOT_QUICK

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
house = importlib.util.module_from_spec(spec)
sys.modules["house"] = house
spec.loader.exec_module(house)


def test_the_tests_that_are_left_out_of_the_quick_ones_exist():
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert NOT_QUICK - names == set()


def test_the_package_keeps_the_rules():
    assert list(house.broken_rules(house.read_package())) == []


def test_the_package_keeps_its_size():
    assert list(house.broken_sizes(house.read_package())) == []


def test_only_long_files_are_listed_as_waiting_to_be_split():
    long = {file.name for file in house.read_package() if file.num_lines > house.MAX_FILE_LINES}
    assert long == house.TO_BE_SPLIT


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (
            "lower/a.py",
            "def f():\n    import json\n",
            "lower/a.py:2: imports json inside a function",
        ),
        (
            "lower/a.py",
            "def f():\n    from alpa_strategy.ir import op\n",
            "imports alpa_strategy.ir inside",
        ),
        ("lower/a.py", "x = 1\n" * 601, "lower/a.py: 601 lines"),
        ("lower/a.py", "x = 1\n" * 50 + "# why\n", "1 lines have comments, 2.0%"),
        (
            "runtime/a.py",
            "import torch\ng = torch.distributed.new_group([0])\n",
            "runtime/a.py:2: calls new_group",
        ),
    ],
)
def test_a_broken_rule_is_told(tmp_path, file, text, told):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    files = house.read_package(tmp_path)
    assert any(
        told in problem for problem in (*house.broken_sizes(files), *house.broken_rules(files))
    )


def test_what_has_a_reason_is_no_problem(tmp_path):
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "a.py").write_text(
        "# why\ndef f():\n    import deepspeed\n    new_group([0])\n"
    )
    (tmp_path / "cli.py").write_text("# why\ndef f():\n    import json\n")
    assert list(house.broken_rules(house.read_package(tmp_path))) == []


def lint(folder):
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(
        ROOT / "alpa_strategy",
        tmp_path / "alpa_strategy",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold(copied):
    result = lint(copied)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        (
            "ir/op.py",
            "import alpa_strategy.sharding",
            "A room imports only from the rooms below it",
        ),
        (
            "planner/task.py",
            "import alpa_strategy.comm.mesh",
            "Planning knows no process group and no Trainer",
        ),
        (
            "lower/codegen.py",
            "import lightning",
            "Only capture/, lightning/ and strategy.py import Lightning",
        ),
        ("units.py", "import alpa_strategy.newroom", "A room imports only from the rooms below it"),
    ],
)
def test_a_broken_contract_fails(copied, file, line, contract):
    path = copied / "alpa_strategy" / file
    path.write_text(path.read_text() + f"\n{line}\n")
    if "newroom" in line:
        (copied / "alpa_strategy" / "newroom.py").write_text("")
    result = lint(copied)
    assert result.returncode != 0
    broken = " ".join(result.stdout.split()).partition("Broken contracts")[2]
    assert contract in broken
    assert line.split()[-1] in broken
