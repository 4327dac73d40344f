"""scripts/check_structure.py and the import contracts hold, and see what breaks them."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NOT_QUICK

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location(
    "check_structure", ROOT / "scripts" / "check_structure.py"
)
check_structure = importlib.util.module_from_spec(spec)
sys.modules["check_structure"] = check_structure
spec.loader.exec_module(check_structure)


def test_the_tests_that_are_left_out_of_the_quick_ones_exist():
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert NOT_QUICK - names == set()


# scripts/test.sh does the same.
@pytest.mark.slow
def test_no_rule_is_broken_more_often_than_its_budget():
    assert check_structure.over_budget(check_structure.all_violations()) == []


def test_comments_of_the_package_explain_it():
    files = check_structure.read_folder(check_structure.PACKAGE)
    assert check_structure.comment_share(files) >= check_structure.MIN_COMMENT_SHARE


LONG_BODY = "def f():\n" + "    x = 1\n" * 60

PLANTED = {
    "long-line": "x = '" + "a" * 100 + "'\n",
    "long-file": "x = 1\n" * 601,
    "long-function": LONG_BODY,
    "dense": "x = [y if z else 0 for y in w]\n",
    "tuple-assignment": "a, b, c = 1, 2, 3\n",
    "ternary-in-comprehension": "x = [\n    y if z else 0\n    for y in w\n]\n",
    "nested-comprehension": "x = [[z for z in y] for y in w]\n",
    "phrase": "# the step is run as it is written\n",
    "vague-name": "for each in (1, 2):\n    print(each)\n",
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_example_of_each_layout_rule_is_seen(tmp_path, monkeypatch, rule):
    monkeypatch.setattr(check_structure, "BUDGETS", {})
    package = tmp_path / "alpa_strategy"
    package.mkdir()
    (package / "a.py").write_text(PLANTED[rule])
    violations = check_structure.all_violations(tmp_path)
    assert rule in {violation.rule for violation in violations}
    assert any(line.startswith(f"{rule}: ") for line in check_structure.over_budget(violations))


@pytest.mark.parametrize(
    "definition",
    [
        "found = 1\n",
        "def f(given):\n    return given\n",
        "def whole():\n    return 1\n",
        "x.own = 1\n",
        "class A:\n    kept: int\n",
        "[what for what in x]\n",
        "if made := f():\n    g(made)\n",
    ],
)
def test_a_vague_name_is_seen_wherever_it_is_defined(tmp_path, definition):
    for folder, rule in (("alpa_strategy", "vague-name"), ("tests", "vague-name-outside")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(definition)
        rules = [
            v.rule for v in check_structure.all_violations(tmp_path) if v.path == f"{folder}/a.py"
        ]
        assert rules == [rule]


@pytest.mark.parametrize(
    ("rule", "line"),
    [("long-docs-line", "word " * 25), ("phrase", "A step that runs as it is written.")],
)
def test_a_planted_example_in_the_docs_is_seen(tmp_path, rule, line):
    (tmp_path / "README.md").write_text(f"# Title\n\n{line}\n")
    assert [v.rule for v in check_structure.all_violations(tmp_path)] == [rule]


def test_tables_and_code_of_the_docs_may_be_long(tmp_path):
    long = "x" * 121
    (tmp_path / "README.md").write_text(f"| {long} |\n\n```text\n{long}\n```\n")
    assert check_structure.all_violations(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
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
        (
            "intra_op/a.py",
            "from torch import Tensor, distributed\n",
            "intra_op/a.py:1: imports torch.distributed",
        ),
        (
            "runtime/a.py",
            "import torch\ng = torch.distributed.new_group([0])\n",
            "runtime/a.py:2: calls new_group",
        ),
    ],
)
def test_a_broken_rule_of_the_package_is_named(tmp_path, file, text, message):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    violations = [
        violation
        for source in check_structure.read_folder(tmp_path)
        for violation in check_structure.structure_violations(source)
    ]
    assert any(message in str(violation) for violation in violations)


def test_what_has_a_listed_reason_is_allowed(tmp_path):
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "a.py").write_text(
        "# why\ndef f():\n    import deepspeed\n    new_group([0])\n"
    )
    (tmp_path / "cli.py").write_text("# why\ndef f():\n    import json\n")
    for source in check_structure.read_folder(tmp_path):
        assert list(check_structure.structure_violations(source)) == []


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


# scripts/test.sh does the same.
@pytest.mark.slow
def test_the_import_contracts_hold(copied):
    result = lint(copied)
    assert result.returncode == 0, result.stdout


BROKEN_CONTRACTS = (
    (
        "ir/op.py",
        "import alpa_strategy.sharding",
        "A package imports only from the packages below it",
    ),
    (
        "planner/task.py",
        "import alpa_strategy.comm.mesh",
        "Planning knows no process group and no Trainer",
    ),
    (
        "lower/codegen.py",
        "import lightning",
        "Only capture/lightning_adapter.py, lightning/ and strategy.py import Lightning",
    ),
    (
        "lower/codegen.py",
        "import alpa_strategy.intra_op.build",
        "What runs a plan imports nothing of planning",
    ),
    (
        "capture/trace.py",
        "import lightning",
        "Only capture/lightning_adapter.py, lightning/ and strategy.py import Lightning",
    ),
    (
        "strategy.py",
        "import alpa_strategy.extras.failure_watch.watch",
        "The core imports no extra",
    ),
    (
        "capture/trace.py",
        "import alpa_strategy.extras",
        "The core imports no extra",
    ),
    (
        "extras/shared_memory.py",
        "import alpa_strategy.extras.deferred_init",
        "An extra imports no other",
    ),
    (
        "units.py",
        "import alpa_strategy.newpackage",
        "A package imports only from the packages below it",
    ),
)


def test_broken_contracts_fail(copied):
    package = copied / "alpa_strategy"
    (package / "newpackage.py").write_text("")
    for file, line, _ in BROKEN_CONTRACTS:
        with (package / file).open("a") as source:
            source.write(f"\n{line}\n")

    result = lint(copied)
    assert result.returncode != 0
    broken = " ".join(result.stdout.split()).partition("Broken contracts")[2]
    for file, line, contract in BROKEN_CONTRACTS:
        assert contract in broken
        importing = "alpa_strategy." + file.removesuffix(".py").replace("/", ".")
        imported = line.split()[-1]
        assert f"{importing} -> {imported}" in broken or "newpackage" in line
    assert "alpa_strategy.newpackage" in broken
